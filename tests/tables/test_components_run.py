"""The stores and the storage that the seeds describe are what every record passes through.

Each way into a table is run with its calls recorded: a component that nothing calls any more is missing here. Spark and
the command line: `tests/spark/test_components_on_spark.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from call_trace import STORAGE, TIME_SEGMENTS, Calls
from table_stages import KINDS, Results, Sessioned, Stage, Stored, Versioned, Windowed

MAINTAINED = {"MaintenanceSupervisor.maintain"}  # by a checkpoint that others follow; a push makes one
STORES = {
    Results: {
        "WindowStore.__init__",
        "WindowStore.put_batch",
        "StateHandle.keep",
        "WorkerStorageRuntime.state_handle",
    }
    | MAINTAINED,
    Windowed: {"WindowStore.__init__", "WindowStore.prepare"} | MAINTAINED,
    Sessioned: {"SessionStore.__init__", "SessionStore.prepare"} | MAINTAINED,
    Stored: {"KeyValueStore.__init__", "KeyValueStore.prepare"} | MAINTAINED,
    Versioned: {"KeyValueStore.__init__", "KeyValueStore.prepare"},
}
FETCHES = {
    Results: {"WindowStore.fetch_batch", "WindowStore.scan"},
    Windowed: {"WindowStore.fetch_batch", "WindowStore.open_scan"},
    Sessioned: {"SessionStore.fetch_batch", "SessionStore.open_scan"},
    Stored: {"KeyValueStore.fetch_batch", "KeyValueStore.open_scan"},
    Versioned: {"KeyValueStore.fetch_batch", "KeyValueStore.open_scan"},
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.lower())
def test_every_way_into_a_table_goes_through_the_same_components(kind: type[Stage], tmp_path: Path) -> None:
    with Calls() as calls:
        stage = kind(tmp_path)
        try:
            assert stage.get() == 1
            assert stage.values() == {1}
            assert len(stage.table.fetch("k003")) == 1
        finally:
            stage.close()
    table = type(stage.table).__name__
    read = {"CommitFollower.pinned", f"{table}.get", f"{table}.fetch", f"{table}.scan"}
    has_time = kind in (Results, Windowed, Sessioned)
    wanted = STORAGE | STORES[kind] | FETCHES[kind] | read | (TIME_SEGMENTS if has_time else set())
    assert wanted - calls.names == set()
