"""Pages that are made of the code are the ones the code gives now, and links lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import click
import pytest
from pages import DOCS, PAGES, ROOT, anchors, links, name

GENERATED = {
    "config-reference": "reference/config.md",
    "cli-reference": "reference/cli.md",
    "error-reference": "reference/errors.md",
    "metric-reference": "reference/metrics.md",
    "http-reference": "reference/http-api.md",
    "glossary": "concepts/glossary.md",
    "llms": "llms.txt",
}


@pytest.mark.parametrize("script", GENERATED)
def test_a_generated_page_is_the_one_the_code_gives(script: str) -> None:
    stored = (DOCS / GENERATED[script]).read_text(encoding="utf-8")
    made = runpy.run_path(str(ROOT / "scripts" / script))["page"]()
    assert stored == made, f"run: make reference (.venv/bin/python scripts/{script} --write)"


def test_the_python_pages_are_those_the_code_gives() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "python-reference"))["pages"]()
    stored = {path for path in PAGES if path.parent == DOCS / "reference" / "python"} | {
        DOCS / "reference" / "python.md"
    }
    assert stored == set(made)
    stale = [name(path) for path, page in made.items() if path.read_text(encoding="utf-8") != page]
    assert stale == [], "run: make reference (.venv/bin/python scripts/python-reference --write)"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for file, anchor in links(page):
        target = page.parent / file if file else page
        assert target.exists(), f"{name(page)} links to {file}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name(page)} links to {file}#{anchor}"


def test_a_link_to_nothing_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` C?\n\n[x](other.md#y) [z](#a-b-c) ![p](p.svg) `[no](no.md)`\n", encoding="utf-8")
    assert links(page) == [("other.md", "y"), ("", "a-b-c"), ("p.svg", "")]
    assert anchors(page) == {"a-b-c"}


def test_every_metric_in_the_sources_is_on_the_page() -> None:
    page = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    made = set(re.findall(r'\.(?:counter|gauge)\(\s*"(tidegate_\w+)"', sources))
    assert made and {each for each in made if f"`{each}`" not in page} == set()


def test_every_option_of_every_command_is_on_the_page() -> None:
    from tidegate.cli.main import cli

    script = runpy.run_path(str(ROOT / "scripts" / "cli-reference"))
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    found = list(script["commands"](cli, "tidegate"))
    assert len(found) > 20
    for path, command, context in found[1:]:
        assert f"### `{path}`" in page
        part = page.partition(f"### `{path}`\n")[2].partition("\n### ")[0]
        for each in command.get_params(context):
            if isinstance(each, click.Option) and not each.hidden and "--help" not in each.opts:
                assert f"`{each.opts[-1]}`" in part, f"{path} {each.opts}"


def test_every_error_has_a_remedy_of_its_own_and_a_documented_exit_code() -> None:
    from tidegate import errors

    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.TidegateError)
    ]
    assert [kind.__name__ for kind in kinds if "remedy" not in vars(kind)] == []
    assert all(f"| {code} |" in page for code in {kind.exit_code for kind in kinds} | {0, 130})


def test_the_runbook_has_every_reason_to_stop_and_every_kind_of_finding() -> None:
    from tidegate.log.verify.findings import KINDS

    page = (DOCS / "operations" / "runbook.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"| `{kind}` |" not in page] == []
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "src/tidegate/pipeline").rglob("*.py")
    )
    reasons = set(
        re.findall(
            r'^[A-Z_]+(?:: Final)? = "(integrity|unreadable|corrupt|lost|recreated)"', sources, re.MULTILINE
        )
    )
    assert all(
        f"| `{reason}` |" in page
        for reason in reasons | {"integrity", "unreadable", "corrupt", "lost", "recreated"}
    )


def test_metrics_of_the_reference_are_those_of_the_product(tmp_path: Path) -> None:
    """What an app's run, a log, a table, an audit, a store and the page export is what the page of metrics lists."""
    import pyarrow as pa

    import tidegate as tg
    from tidegate.integrity import audit_topic
    from tidegate.metrics import Metrics, prometheus_text
    from tidegate.storage import StorageConfig, WorkerStorageRuntime, open_backend
    from tidegate.web.metrics import exposition
    from tidegate.web.site import Site
    from tidegate.windows.stores.window_store import WindowStore

    ten = 1_767_261_600_000
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("clicks", 1)
        with log.writer("clicks", integrity=True) as sender:
            rows = {"key": ["a", None], "value": ['{"x":1}'] * 2, "timestamp": [ten] * 2}
            sender.write(pa.table(rows))
        app = tg.App("shop", data=str(tmp_path))
        clicks = app.stream("clicks", value=tg.Json(x="double")).validate()
        clicks.window(tg.Tumbling("1m")).agg(n=tg.count()).to_topic("counts")
        of_run, of_store = Metrics(), Metrics()
        app.run("local", until="caught_up", metrics=of_run)
        audit_topic(log, "clicks")
        with tg.windowed_table(log, "counts", "1m", state=tmp_path / "tables"):
            pass
        with WorkerStorageRuntime.open(StorageConfig(), open_backend("memory://one")) as runtime:
            WindowStore(runtime.context("one"), "w", retention="1h", window_size="1m", metrics=of_store)
        page = exposition(Site(tmp_path / "log", tmp_path / "state")).body
        exported = [*(prometheus_text(each)[0] for each in (of_run, log.metrics, of_store)), page]
    product = {
        name.decode() if kind != b"counter" else f"{name.decode().removesuffix('_total')}_total"
        for text in exported
        for name, kind in re.findall(rb"^# TYPE (tidegate_\w+) (\w+)$", text, re.MULTILINE)
    }
    reference = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(tidegate_\w+)` \|", reference, re.MULTILINE))
    assert listed - product == set(), "listed, and exported nowhere"
    assert product - listed == set(), "exported, and not listed"
    section = reference.partition("\n## The page\n")[2]
    shown = set(re.findall(r"^(tidegate_\w+)[{ ]", page.decode(), re.MULTILINE))
    assert {"tidegate_dropped_records_total", "tidegate_held_records", "tidegate_topics"} <= shown
    assert {each for each in shown if f"`{each}`" not in section} == set(), "not said to be on the page"
