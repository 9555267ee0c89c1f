"""What every test may lean on: the interop modules by name, who runs beside whom, and a loud word when real
Kafka was not met."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings

# The tests that meet Kafka, live or recorded, share plain modules (brokers, raw batches, recorded folders), and so
# do those of pushes.
sys.path.insert(0, str(Path(__file__).parent / "interop"))
sys.path.insert(0, str(Path(__file__).parent / "spark"))

from kafka_home import find_kafka

# A property is true or false however busy the machine is: an example that took long is not a failure.
settings.register_profile("tidegate", deadline=None)
settings.load_profile("tidegate")

# Tests that share a broker or a Spark session stay on one worker, wherever their marker says so too: this
# version of pytest no longer lets pytest-xdist carry `xdist_group` from the workers to the scheduler.
TOGETHER = {
    "tests/interop/": "interop",
    "tests/spark/": "spark",
    "tests/tidy/test_docs.py": "spark",
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the jars the interop tests are skipped; `pytest_unconfigure` says so at the end."""
    if find_kafka() is not None:
        return
    absent = pytest.mark.skip(reason="no Kafka jars or no JVM; `make kafka` fetches the jars")
    for item in items:
        if item.get_closest_marker("interop") is not None:
            item.add_marker(absent)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The very last line of a run that never met real Kafka; after pytest's own summary, so nobody misses it."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = [] if reporter is None else reporter.stats.get("skipped", [])
    skipped = [report for report in reports if "interop" in report.keywords]
    if skipped:
        reporter.write_line(
            f"INTEROP NOT RUN: {len(skipped)} tests never met real Kafka; `make kafka` fetches it",
            red=True,
            bold=True,
        )
