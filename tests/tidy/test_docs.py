"""The documentation tells the truth: its examples run, its links lead somewhere, its tables match the code.

Every ```python and ```sh block of the README and of docs/ is executed, page by page, in order, in an empty
folder; the Python blocks of a page share their names. A block whose opening line says `skip` is not run, a
page with a block that says `spark` only together with Spark. Other languages (text) are for reading.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").rglob("*.md") if "decisions" not in p.parts)]
)
BLOCK = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")
LIMIT_S = 240
RUNNER = """
import json, subprocess, sys
names = {"__name__": "__main__"}
for number, (language, code) in enumerate(json.load(sys.stdin), 1):
    print(f"--- block {number} ({language})", flush=True)
    if language == "sh":
        subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True)
    else:
        exec(compile(code, f"block {number}", "exec"), names)
"""


def blocks(page: Path) -> list[tuple[str, set[str], str]]:
    """(language, flags, code) of every fenced block."""
    found = []
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        language, *flags = match["info"].split() or [""]
        found.append((language, set(flags), match["code"]))
    return found


def runnable(page: Path, *, spark: bool) -> list[tuple[str, str]]:
    """What to run of a page: all of it, or nothing when it belongs to the other kind of test."""
    wanted = [(lang, flags, code) for lang, flags, code in blocks(page) if lang in ("python", "sh")]
    if any("spark" in flags for _, flags, _ in wanted) != spark:
        return []
    return [(lang, code) for lang, flags, code in wanted if "skip" not in flags]


def run_page(page: Path, folder: Path, *, spark: bool) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "NO_COLOR": "1",
    }
    environment.pop("TIDEGATE_LOG", None)
    child = subprocess.Popen(
        [sys.executable, "-c", RUNNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=environment,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = child.communicate(json.dumps(runnable(page, spark=spark)), timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # with everything it started
        printed, _ = child.communicate()
        printed += f"\nkilled after {LIMIT_S} s"
    assert child.returncode == 0, f"{page.relative_to(ROOT)}\n{printed[-4000:]}"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p, spark=False)], ids=name)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, spark=False)


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p, spark=True)], ids=name)
def test_the_spark_examples_of_a_page_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, spark=True)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    for match in LINK.finditer(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        target = match["target"]
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_the_page_of_settings_is_the_one_the_code_gives() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "config-reference"))
    stored = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    assert stored == script["page"](), "run: .venv/bin/python scripts/config-reference --write"


def test_the_page_of_formats_names_every_file_of_a_log_and_no_other_of_ours(tmp_path: Path) -> None:
    import pyarrow as pa

    import tidegate as tg

    with tg.Log(tmp_path) as log:
        log.create_topic("t", config={"segment.bytes": 500})
    with tg.Log(tmp_path, maintenance=True) as log, log.writer("t", batch_records=1) as writer:
        writer.write(pa.table({"value": [b"x" * 50] * 20}))
    page = (ROOT / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    known = {name[20:] if name[:20].isdecimal() else name for name in names}
    assert [name for name in sorted(known) if f"`{name}`" not in page] == []
    ours = set(re.findall(r"`(tidegate\.[a-z.]+)`", page))
    assert ours == {name for name in names if name.startswith("tidegate.")}


def test_the_page_of_spark_options_names_every_option() -> None:
    from tidegate.spark.topics.options import _NAMES

    page = (ROOT / "docs" / "reference" / "spark-source.md").read_text(encoding="utf-8")
    missing = [option for option in _NAMES if option != "path" and f"`{option}`" not in page]
    assert missing == []


def test_the_page_of_exit_codes_has_the_codes_of_the_errors() -> None:
    from tidegate import errors

    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    codes = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.TidegateError)
    }
    assert all(f"| {code} |" in page for code in codes | {0, 130})


def test_the_readme_names_the_two_commands_and_every_verb() -> None:
    from tidegate.cli.main import VERBS

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme and "make test" in readme
    missing = [verb for verb in VERBS if f"tidegate {verb}" not in readme]
    assert missing == []
