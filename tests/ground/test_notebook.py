"""What is displayed is short and escaped, whatever records hold."""

from __future__ import annotations

from tidegate.notebook import (
    LONGEST_CELL,
    SHOWN_COLUMNS,
    SHOWN_ROWS,
    cell,
    facts_html,
    grid_html,
    grid_text,
    more,
)


def test_a_cell_is_escaped_and_cut() -> None:
    assert cell("<script>&\"'") == "&lt;script&gt;&amp;&quot;&#x27;"
    assert len(cell("x" * 10_000)) == LONGEST_CELL and cell("x" * 10_000).endswith("…")
    assert cell(None) == "" and cell(0) == "0" and cell(b"\xff") == "b&#x27;\\xff&#x27;"


def test_a_grid_has_ten_rows_and_says_how_many_more_there_are() -> None:
    shown = grid_html(["n"], ([n] for n in range(500)), total=500, types=["int64"])
    assert shown.count("<td>") == SHOWN_ROWS + 1 and "… 490 more rows" in shown and "<i>int64</i>" in shown
    assert "more" not in grid_html(["n"], [[1]], total=1)
    assert more(10, None, "rows") == "… the first 10 rows" and more(3, None, "rows") == ""


def test_a_wide_grid_is_cut() -> None:
    names = [f"c{n}" for n in range(100)]
    assert grid_html(names, [list(range(100))], total=1).count("<td>") == SHOWN_COLUMNS


def test_names_are_escaped_too() -> None:
    assert "<img" not in facts_html("<img>", {"<img>": "<img>", "left out": None}) + grid_html(
        ["<img>"], [["<img>"]], total=1, types=["<img>"]
    )
    assert "left out" not in facts_html("t", {"left out": None})


def test_text_cannot_drive_the_terminal() -> None:
    said = grid_text(["key", "value"], [["a", "\x1b[2J"], ["bb", "x"]], total=5)
    assert said.splitlines() == ["key  value", "a    \\x1b[2J", "bb   x", "… 3 more rows"]
