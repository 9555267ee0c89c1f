"""The handbook is whole: every page is in the site, every metric, option and field it speaks of is the code's."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def pipeline_metrics() -> dict[str, tuple[str, ...]]:
    """The metrics of a run and their labels, from the code that makes them."""
    from tidegate.metrics import Metrics
    from tidegate.pipeline.progress import RoundMetrics

    metrics = Metrics()
    RoundMetrics(metrics, "shop", {})
    return {each.name: tuple(each.labels) for each in metrics.instruments()}


def test_every_page_is_in_the_site_and_the_site_has_no_other() -> None:
    said = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = set(re.findall(r"([\w/-]+\.md)$", said.partition("\nnav:")[2], re.MULTILINE))
    assert nav == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_the_first_page_leads_to_every_guide_and_reference_and_the_readme_to_it() -> None:
    first, readme = text("index.md"), (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [page for room in ("guides", "operations", "reference") for page in DOCS.glob(f"{room}/*.md")]
    assert [page.name for page in pages if f"({page.relative_to(DOCS)})" not in first] == []
    assert "(docs/index.md)" in readme and "(docs/start.md)" in readme


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the docs extra is not installed; `make docs` installs it")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert built.returncode == 0, built.stderr
    site = tmp_path / "site"
    page = (site / "operations" / "metrics-and-alerts" / "index.html").read_text(encoding="utf-8")
    assert "TidegateWatermarkStuck" in page and "```" not in page
    assert "What we refuse" in (site / "internals" / "index.html").read_text(encoding="utf-8")
    assert (site / "llms.txt").exists() and (site / "images" / "log-life.svg").exists()


@pytest.mark.parametrize("flags", ["skip", "spark", "skip spark", "install"])
def test_the_site_shows_code_without_the_flags_of_the_tests(flags: str) -> None:
    hook = runpy.run_path(str(ROOT / "scripts" / "handbook_hooks.py"))["on_page_markdown"]
    assert hook(f"a\n```python {flags}\nx = 1\n```\n", page=None) == "a\n```python\nx = 1\n```\n"
    assert hook("```text output\nx\n```\n") == "``` { .text .output }\nx\n```\n"
    assert hook(f"```text\n```sh {flags} more\n") == f"```text\n```sh {flags} more\n"


def test_every_metric_of_a_run_is_in_the_reference_with_its_labels() -> None:
    rows = {}
    for line in re.findall(r"^\|.*\|$", text("reference/metrics.md"), re.MULTILINE):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`(tidegate_\w+)`", cells[0]):
            rows[name] = {cell for each in cells[1:3] for cell in re.findall(r"\w+", each)}
    for name, labels in pipeline_metrics().items():
        assert name in rows, name
        assert set(labels) <= rows[name], name


def test_the_alert_rules_ask_for_metrics_and_labels_there_are() -> None:
    from tidegate.integrity.verdicts import FATAL

    (rules,) = re.findall(r"```yaml\n(.*?)```", text("operations/metrics-and-alerts.md"), re.DOTALL)
    metrics = pipeline_metrics()
    assert set(re.findall(r"tidegate_\w+", rules)) <= set(metrics)
    assert len(re.findall(r"- alert: ", rules)) == len(re.findall(r" expr: ", rules)) == 3
    for labels in re.findall(r"by \(([^)]*)\) \(", rules):
        for name in re.findall(r"tidegate_\w+", rules):
            if f"by ({labels}) ({name})" in rules:
                assert set(labels.split(", ")) <= set(metrics[name]), name
    for verdicts in re.findall(r'verdict=~"([^"]*)"', rules):
        assert set(verdicts.split("|")) == {verdict.label for verdict in FATAL}
    assert rules.count("(") == rules.count(")")


def test_the_page_of_formats_has_every_field_of_an_apps_records() -> None:
    from tidegate.pipeline import checkpoint, messages
    from tidegate.tables.commits import Held

    page = text("reference/formats.md").partition("## Objects of an app")[2]
    kinds: list[type[msgspec.Struct]] = [
        checkpoint.AppRecord,
        checkpoint.FlowLine,
        checkpoint.PlanRecord,
        checkpoint.CommitRecord,
        checkpoint.SourceLine,
        checkpoint.TaskLine,
        checkpoint.Loss,
        checkpoint.Range,
        checkpoint.Halt,
        messages.Tick,
        messages.Stop,
        messages.Parcel,
        messages.Section,
        messages.Delivery,
        messages.Held,
        Held,
    ]
    missing = {
        (kind.__name__, name)
        for kind in kinds
        for name in kind.__struct_encode_fields__
        if f"`{name}`" not in page
    }
    assert missing == set()


def test_every_promise_names_the_tests_that_hold_it() -> None:
    said = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    made = set(re.findall(r"^- ([LWE]\d+) \*", said, re.MULTILINE))
    rows = re.findall(r"^\| ((?:[LWE]\d+(?:, )?)+) \| (`tests/.*) \|$", said, re.MULTILINE)
    assert {name for names, _ in rows for name in names.split(", ")} == made
    tests = {path for _, paths in rows for path in re.findall(r"`(tests/[^`]+)`", paths)}
    assert len(tests) > 30 and [path for path in sorted(tests) if not (ROOT / path).exists()] == []
