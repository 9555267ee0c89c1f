"""What every test may lean on: the interop modules by name, who runs beside whom, figures of promises, and a loud word
when real Kafka was not met."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests share plain modules: those that meet Kafka, live or recorded (brokers, raw batches, recorded folders), those of
# pushes and of replicas, those of the page (data of a run, the server over it, a browser).
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(0, str(Path(__file__).parent / "interop"))
sys.path.insert(0, str(Path(__file__).parent / "spark"))
sys.path.insert(0, str(Path(__file__).parent / "web"))
sys.path.insert(0, str(Path(__file__).parent / "browser"))

# Processes that tests start (Spark's Python workers, scripts that are killed) import tests/support too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "support"), os.environ.get("PYTHONPATH")])
)

from chromium import find_chromium
from kafka_home import find_kafka

import s3_server
from reliability_figures import Recorder, Tally
from s3_server import s3, s3_endpoint

__all__ = ["s3", "s3_endpoint"]

pytest.register_assert_rewrite("hybrid_rows")  # tests that several modules collect

# A property is true or false however busy the machine is: an example that took long, or was long in the making, is not
# a failure.
settings.register_profile("tidegate", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tidegate")

# Tests that share a broker or a Spark session stay on one worker, wherever their marker says so too: this
# version of pytest no longer lets pytest-xdist carry `xdist_group` from the workers to the scheduler.
TOGETHER = {
    "tests/interop/": "interop",
    "tests/spark/": "spark",
    "tests/tidy/test_docs_spark.py": "spark",
    "tests/web/": "web",
    "tests/browser/": "browser",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Like `--dist loadgroup`, by the place of a test instead of its marker."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByPlace(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            found = (group for place, group in TOGETHER.items() if nodeid.startswith(place))
            return next(found, None) or super()._split_scope(nodeid)

    return ByPlace(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-pictures", action="store_true", help="Draw the handbook's pictures anew (tests/browser)."
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the jars, or a browser, those tests are skipped; `pytest_unconfigure` says so at the end."""
    if find_kafka() is None:
        _skip(items, "interop", "no Kafka jars or no JVM; `make kafka` fetches the jars")
    if find_chromium() is None:
        _skip(items, "browser", "no Chromium; `sudo bash scripts/chromium` installs Debian's")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


NOT_MET = {
    "interop": "INTEROP NOT RUN: {} tests never met real Kafka; `make kafka` fetches it",
    "browser": "BROWSER NOT RUN: {} tests never saw the page; `sudo bash scripts/chromium` installs Chromium",
}


FIGURES = Recorder()


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """Where a test of a promise says what its cases came to."""
    return Tally(request.node)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    FIGURES.note(report)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if FIGURES.rows:
        terminalreporter.write_line(FIGURES.write(config.rootpath))
    if any(s3_server.NOT_RUN in str(each.longrepr) for each in terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(s3_server.NOT_RUN, yellow=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The very last lines of a run that never met real Kafka or a browser; after pytest's own summary."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = [] if reporter is None else reporter.stats.get("skipped", [])
    for marker, words in NOT_MET.items():
        skipped = [report for report in reports if marker in report.keywords]
        if skipped:
            reporter.write_line(words.format(len(skipped)), red=True, bold=True)
