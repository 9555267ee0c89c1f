"""What any flow set aside, with windows or without: late records, unreadable records, corrupt records.

Read from the app's last commit. While the app runs on it may let go what that commit needs; then a newer one is read.

Thread rule: opens what it needs and closes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pyarrow as pa

from tidegate.clock import SystemClock
from tidegate.errors import CorruptError, InvalidError, UnavailableError
from tidegate.pipeline.definition.changes import as_recorded
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.reading.late import late_rows
from tidegate.pipeline.reading.snapshot import FlowSnapshot
from tidegate.pipeline.rounds.records import CommitRecord, Records
from tidegate.pipeline.tasks.letters import read_letters
from tidegate.storage.backends.port import StorageBackend

TRIES: Final = 4


def late_of(backend: StorageBackend, app: str, flow: Flow) -> pa.Table:
    """Records that came too late, or from the future; empty where the flow keeps none."""
    if not flow.is_stateful:
        raise InvalidError(
            f"flow {flow.name} has neither windows nor deduplication, so nothing is ever late in it"
        )

    def look(records: Records, commit: CommitRecord) -> pa.Table:
        found = records.load_app()
        lines = () if found is None else found[0].definitions.get(commit.definition, ())
        line = next((each for each in lines if each.name == flow.name), None)
        laid = flow if line is None else as_recorded(flow, line.description)
        snapshot = FlowSnapshot(backend, app, laid, commit, clock=SystemClock())
        try:
            return late_rows(snapshot)
        finally:
            snapshot.close()

    return _newest(backend, app, look)


def dead_letters_of(backend: StorageBackend, app: str, flow: Flow) -> pa.Table:
    """Unreadable and corrupt records, with the reason: offset, partition, reason, key, value."""

    def look(records: Records, commit: CommitRecord) -> pa.Table:
        lines = [line for line in commit.sources if line.flow == flow.name]
        if not lines:
            raise InvalidError(f"app {app} was not run with a flow {flow.name} yet; run it once")
        whole = pa.concat_tables([read_letters(backend, records.state_of(line)) for line in lines])
        return whole.sort_by([("partition", "ascending"), ("offset", "ascending")])

    return _newest(backend, app, look)


def _newest(backend: StorageBackend, app: str, look: Callable[[Records, CommitRecord], pa.Table]) -> pa.Table:
    records = Records(backend, app)
    number = records.newest()
    for _ in range(TRIES):
        if number is None:
            raise UnavailableError(f"app {app} has no commit yet; run it, or wait for its first round")
        try:
            return look(records, records.read_commit(number)[0])
        except CorruptError:
            before, number = number, records.newest()
            if number == before:
                raise
    raise UnavailableError(f"app {app} commits faster than it can be read; try again")
