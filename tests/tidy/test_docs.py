"""The documentation tells the truth: its examples run, print what it says, its tables match the code.

Every ```python and ```sh block of the README and of docs/ is executed, page by page, in order, in an empty
folder; the Python blocks of a page share their names. See `pages` for what a block can say about itself, `warm` for
how it is run. Pages with Spark are in `test_docs_spark.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import PAGES, ROOT, difference, name, needs_spark, runnable
from warm import Warm

LIMIT_S = 240
# docs/start.md is followed at a terminal: test_newcomer.py
ALONE = [p for p in PAGES if runnable(p) and not needs_spark(p) and p.name != "start.md"]


@pytest.mark.parametrize("page", ALONE, ids=name)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, warm: Warm) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    wanted = runnable(page)
    ran = warm.run([(block.language, block.code) for block in wanted], folder, limit_s=LIMIT_S)
    assert ran.code == 0, f"{name(page)}\n{ran.said[-4000:]}"
    told = zip(wanted, ran.printed, strict=True)
    wrong = [difference(block.output, said) for block, said in told if block.output is not None]
    assert [each for each in wrong if each is not None] == []


def test_the_page_of_formats_names_every_file_of_a_log_and_no_other_of_ours(tmp_path: Path) -> None:
    import pyarrow as pa

    import tidegate as tg
    from tidegate.cli.main import run

    with tg.Log(tmp_path) as log:
        log.create_topic("t", config={"segment.bytes": 500})
        log.create_topic("c", config={"segment.bytes": 500, "cleanup.policy": "compact"})
    with tg.Log(tmp_path, maintenance=True) as log:
        for topic in ("t", "c"):
            with log.writer(topic, batch_records=1) as writer:
                writer.write(pa.table({"key": [b"k"] * 20, "value": [b"x" * 50] * 20}))
    assert run(["log", "clean", "c", "--log", str(tmp_path)]) == 0
    page = (ROOT / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
    names = {path.name for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".deleted"}
    known = {name[20:] if name[:20].isdecimal() else name for name in names}
    assert [name for name in sorted(known) if f"`{name}`" not in page] == []
    ours = set(re.findall(r"`(tidegate\.[a-z.]+)`", page))
    assert ours == {name for name in names if name.startswith("tidegate.")}


def test_the_page_of_spark_options_names_every_option() -> None:
    from tidegate.spark.options import _NAMES

    page = (ROOT / "docs" / "reference" / "spark-source.md").read_text(encoding="utf-8")
    missing = [option for option in _NAMES if option != "path" and f"`{option}`" not in page]
    assert missing == []


def test_the_readme_names_the_two_commands_and_is_short() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme and "make test" in readme
    assert readme.count("![") == 1 and len(readme.splitlines()) <= 80
