"""What a flow set aside, over all of its tasks: late and future records, and values that could not be read.

Thread rule: pure functions over a snapshot.
"""

from __future__ import annotations

import pyarrow as pa

from tidegate.errors import UnavailableError
from tidegate.pipeline.reading.snapshot import FlowSnapshot
from tidegate.pipeline.rounds.records import CommitRecord, Records
from tidegate.pipeline.tasks.letters import read_letters
from tidegate.storage.backends.port import StorageBackend
from tidegate.tables.serdes.dead_letters import DEAD_LETTER_SCHEMA


def late_rows(snapshot: FlowSnapshot) -> pa.Table:
    """The late tables of all operators: key, stream_time, event_ts, partition, offset, window_start, how_late_ms,
    reason, values, and which operator set the record aside. `window_start` is -1 where no window was in question."""
    pieces: list[pa.Table] = []
    for chain in snapshot.chains:
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


def letters_of_flow(backend: StorageBackend, app: str, flow: str) -> pa.Table:
    """The same of the app's last commit."""
    records = Records(backend, app)
    newest = records.newest()
    if newest is None:
        raise UnavailableError(f"app {app} has no commit yet; run it, or wait for its first round")
    return dead_letters(backend, records, records.read_commit(newest)[0], flow)
