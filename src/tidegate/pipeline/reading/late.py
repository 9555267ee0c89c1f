"""What a flow set aside, over all of its tasks: late and future records, and values that could not be read.

Thread rule: pure functions over a snapshot, or over one that they open and close.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from tidegate.clock import SystemClock
from tidegate.errors import CorruptError, InvalidError, UnavailableError
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.reading.snapshot import AppCommits, FlowSnapshot
from tidegate.pipeline.rounds.records import CommitRecord, Records
from tidegate.pipeline.tasks.letters import read_letters
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.commits import TRIES
from tidegate.tables.dead_letters import DEAD_LETTER_SCHEMA


def late_rows(snapshot: FlowSnapshot) -> pa.Table:
    """The late tables of all operators: key, stream_time, event_ts, partition, offset, window_start, how_late_ms,
    reason, values, and which operator set the record aside. `window_start` is -1 where no window was in question."""
    pieces: list[pa.Table] = []
    for number in sorted(snapshot.source.chains):
        chain = snapshot.source.chains[number]
        for operator in chain.operators:
            if operator.late_table is not None:
                found = operator.late_table.read()
                pieces.append(
                    found.append_column("operator", pa.array([operator.name] * found.num_rows, pa.string()))
                )
    if not pieces:
        return pa.table({})
    whole = pa.concat_tables(pieces, promote_options="permissive")
    return whole.sort_by([("partition", "ascending"), ("offset", "ascending")])


def dead_letters(backend: StorageBackend, records: Records, commit: CommitRecord, flow: str) -> pa.Table:
    """The records of all source partitions that could not be read: offset, partition, reason, key, value."""
    lines = [line for line in commit.sources if line.flow == flow]
    pieces = [read_letters(backend, records.state_of(line)) for line in lines]
    whole = pa.concat_tables([DEAD_LETTER_SCHEMA.empty_table(), *pieces])
    return whole.sort_by([("partition", "ascending"), ("offset", "ascending")])


def late_of(backend: StorageBackend, app: str, flow: Flow) -> pa.Table:
    """Records that came too late, or from the future, by the app's last commit; empty where the flow keeps none."""
    if not flow.is_stateful:
        raise InvalidError(
            f"flow {flow.name} has neither windows nor deduplication, so nothing is ever late in it"
        )
    commits = AppCommits(backend, app, flow, clock=SystemClock())

    def look(commit: CommitRecord) -> pa.Table:
        snapshot = commits.open(commit)
        try:
            return late_rows(snapshot)
        finally:
            snapshot.close()

    return _newest(commits.records, look)


def dead_letters_of(backend: StorageBackend, app: str, flow: str) -> pa.Table:
    """Unreadable and corrupt records by the app's last commit, with the reason."""
    records = Records(backend, app)

    def look(commit: CommitRecord) -> pa.Table:
        if not any(line.flow == flow for line in commit.sources):
            raise InvalidError(f"app {app} was not run with a flow {flow} yet; run it once")
        return dead_letters(backend, records, commit, flow)

    return _newest(records, look)


def _newest(records: Records, look: Callable[[CommitRecord], pa.Table]) -> pa.Table:
    """Look into the last commit, or into a newer one where what it needs is collected meanwhile."""
    number = records.newest()
    for _ in range(TRIES):
        if number is None:
            raise UnavailableError(
                f"app {records.app} has no commit yet; run it, or wait for its first round"
            )
        try:
            return look(records.read_commit(number)[0])
        except CorruptError:
            before, number = number, records.newest()
            if number == before:
                raise
    raise UnavailableError(f"app {records.app} commits faster than it can be read; try again")
