"""What a screen offers to copy does the same by hand: every command line is run, every piece of Python too."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest
from served_shop import make

from tidegate.cli.main import run
from tidegate.web.endpoints import ADDRESSED
from tidegate.web.site import Site

WORDS = {"topic": "orders", "partition": "1", "offset": "765", "table": "shop:per-minute", "app": "shop"}
ASKS = {
    "table": {"key": "customer-7"}, "explain": {"key": "customer-7", "start": "1767261600000"},
    "diff": {"before": "5", "after": "6", "key": "customer-7"}, "records": {"limit": "3"},
    "integrity": {"wait_ms": "20000"}, "faults": {"wait_ms": "20000"},
}  # fmt: skip
TOLD = {"tidegate verify": 1, "tidegate app status": 1}
"""Commands whose exit code says what the planted data holds: faults, which apps found, too."""
STORED = {"table": {"table": "counts"}, "explain": {"table": "counts"}}
SHOWN = [(each, WORDS) for each in ADDRESSED if each.page] + [
    (each, WORDS | STORED[each.name]) for each in ADDRESSED if each.name in STORED
]


@pytest.fixture(scope="module")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop of this module's own: some of the commands change it."""
    folder = tmp_path_factory.mktemp("copied") / "data"
    make(folder)
    return folder


@pytest.fixture(scope="module")
def site(own_data: Path) -> Any:
    made = Site(own_data / "log", own_data / "state")
    yield made
    made.close()


@pytest.mark.parametrize(("asked", "words"), SHOWN, ids=lambda each: getattr(each, "name", ""))
def test_what_is_copied_runs(site: Site, asked: Any, words: dict[str, str], capfd: Any) -> None:
    """Commands end well (verify: with the faults that were planted), and Python with something on the screen."""
    copy = asked.ask(site, words, ASKS.get(asked.name, {})).by_hand
    assert copy.cli.startswith("tidegate ")
    for line in copy.cli.splitlines():
        ended = run(shlex.split(line)[1:])
        said = capfd.readouterr()
        assert ended == next((code for verb, code in TOLD.items() if line.startswith(verb)), 0), (
            line,
            said.err,
        )
        assert said.out.strip(), line
    if "…" in copy.python or "NAME" in copy.python:  # a list of tables leaves open which one is meant
        assert asked.name == "tables"
        return
    if "app.open_table" in copy.python:  # what only the app's own program can do
        compile(copy.python, "copied", "exec")
        return
    exec(compile(copy.python, "copied", "exec"), {})
    assert capfd.readouterr().out.strip() or asked.name == "diff", copy.python


@pytest.mark.parametrize("asked", [each for each in ADDRESSED if each.page], ids=lambda each: each.name)
def test_every_screen_offers_its_copies(client: httpx.Client, asked: Any) -> None:
    page = client.get(
        asked.page.format(**WORDS), params=ASKS.get(asked.name, {}), headers={"accept": "text/html"}
    )
    assert page.status_code == 200, page.text
    for words in ("Copy as CLI", "Copy as Python", "The same as JSON"):
        assert words in page.text
