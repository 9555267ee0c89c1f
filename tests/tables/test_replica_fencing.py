"""Whose records count: the rule itself, against a scalar twin, for any cut of the version topic."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tidegate.integrity.columns import read_columns
from tidegate.integrity.control_records import Leadership, leadership_row
from tidegate.integrity.header import RecordKind, Stamp
from tidegate.integrity.sender import table_of
from tidegate.tables.hybrid.replica import NOBODY, screen

GUIDS = [bytes([number]) * 16 for number in range(3)]
RECORD = st.tuples(st.just("data"), st.sampled_from(range(3)))
STAMP = st.tuples(st.just("stamp"), st.integers(1, 5))


def row(kind: str, number: int) -> pa.RecordBatch:
    if kind == "stamp":  # epoch n belongs to sender n % 3
        return table_of(leadership_row(Leadership(number, GUIDS[number % 3]), nonce=0, now_ms=0))
    stamp = Stamp(RecordKind.PUT, 255, 0, GUIDS[number], 0, 1, 0, 0)
    headers = [[{"key": "div", "value": stamp.to_bytes()}]]
    batch = table_of(leadership_row(Leadership(1, GUIDS[0]), nonce=0, now_ms=0))
    column = pa.array(headers, batch.schema.field("headers").type)
    return batch.set_column(3, "headers", column)


@given(st.lists(RECORD | STAMP, min_size=1, max_size=12), st.integers(0, 12))
def test_screening_equals_its_scalar_twin_wherever_it_is_cut(said: list[tuple[str, int]], cut: int) -> None:
    leader, expected = NOBODY, []
    for kind, number in said:
        if kind == "stamp":
            expected.append(True)
            if number > leader.epoch:
                leader = Leadership(number, GUIDS[number % 3])
        else:
            expected.append(leader == NOBODY or leader.guid == GUIDS[number])
    found: list[bool] = []
    now = NOBODY
    for part in (said[:cut], said[cut:]):
        if part:
            batch = pa.Table.from_batches([row(*each) for each in part]).combine_chunks().to_batches()[0]
            screened = screen(now, batch, read_columns(batch.column("headers")))
            found += [True] * len(part) if screened.counts is None else screened.counts.tolist()
            now = screened.leadership
    assert found == expected and now == leader
