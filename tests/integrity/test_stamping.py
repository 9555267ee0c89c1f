"""Fresh headers on Arrow columns: against a plain twin, beside the headers rows came with."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.integrity.columns import checksum_of, field_sum, source_of, stamp_rows
from tidegate.integrity.header import HEADER_BYTES, ControlKey, Stamp
from tidegate.kernels.integrity import HeaderArrays, measure_headers, merge_headers, stamp_records
from tidegate.log.format.records import GIVEN_HEADERS_TYPE, HEADERS_TYPE

GUID = bytes(range(1, 17))
FIRST = Stamp(0, 255, 0, GUID, 5, 100, 1_767_225_600_000, 0)
NAME = np.frombuffer(b"div", np.uint8)
fields = st.one_of(st.none(), st.binary(max_size=60))
given_headers = st.one_of(
    st.none(),
    st.lists(
        st.tuples(
            st.sampled_from(["div", "divc", "trace", "", "ünï"]), st.one_of(st.none(), st.binary(max_size=9))
        ),
        max_size=4,
    ),
)
rows_of_records = st.lists(st.tuples(fields, fields, given_headers), min_size=1, max_size=10)


def source(rows: list[tuple[object, ...]], *, headers: bool = True):  # type: ignore[no-untyped-def]
    lists = [
        None if row[2] is None else [{"key": k, "value": v} for k, v in row[2]]  # type: ignore[attr-defined]
        for row in rows
    ]
    return source_of(
        key=pa.array([row[0] for row in rows], pa.binary()),
        value=pa.array([row[1] for row in rows], pa.binary()),
        headers=pa.array(lists, GIVEN_HEADERS_TYPE) if headers else None,
    )


def twin(number: int, key: bytes | None, value: bytes | None) -> Stamp:
    kind = 1 if value is None else 0
    stamp = FIRST._replace(kind=kind, sequence=FIRST.sequence + number)
    return stamp._replace(crc=checksum_of(stamp, key, value))


@settings(max_examples=200, deadline=None)
@given(rows_of_records, st.booleans(), st.data())
def test_every_row_gets_the_stamp_of_the_plain_twin(
    rows: list[tuple[object, ...]], with_headers: bool, draw: st.DataObject
) -> None:
    start = draw.draw(st.integers(0, len(rows) - 1))
    stamped = stamp_rows(
        source(rows, headers=with_headers),
        start,
        len(rows),
        first=FIRST,
        checksum_type=5,
        max_bytes=2**40,
    )
    assert stamped.stop == len(rows)
    assert stamped.headers.type == HEADERS_TYPE
    stamped.headers.validate(full=True)
    total = 0
    for number, (key, value, kept) in enumerate(rows[start:]):
        expected = twin(number, key, value)  # type: ignore[arg-type]
        own = [(k, v) for k, v in kept or [] if k not in ("div", "divc")] if with_headers else []  # type: ignore[attr-defined]
        found = [(entry["key"], entry["value"]) for entry in stamped.headers[number].as_py()]
        assert found == [*own, ("div", expected.to_bytes())]
        total += expected.crc
    assert stamped.checksum == total % 2**64
    assert stamped.used_bytes == sum(len(k or b"") + len(v or b"") for k, v, _ in rows[start:])  # type: ignore[arg-type]


@given(rows_of_records)
@settings(max_examples=50, deadline=None)
def test_adhash_sums_fields_and_none_sums_nothing(rows: list[tuple[object, ...]]) -> None:
    summed = stamp_rows(source(rows), 0, len(rows), first=FIRST, checksum_type=4, max_bytes=2**40)
    expected = sum(field_sum(twin(0, key, value), key, value) for key, value, _ in rows)  # type: ignore[arg-type]
    assert summed.checksum == expected % 2**64
    nothing = stamp_rows(source(rows), 0, len(rows), first=FIRST, checksum_type=0, max_bytes=2**40)
    assert nothing.checksum == 0
    assert nothing.headers == summed.headers


def test_rows_stop_before_the_one_that_does_not_fit() -> None:
    rows = [(b"k", b"v" * 9, None)] * 5
    for limit, fitting in ((9, 0), (10, 1), (29, 2), (30, 3), (49, 4), (50, 5)):
        stamped = stamp_rows(source(rows), 0, 5, first=FIRST, checksum_type=5, max_bytes=limit)
        assert (stamped.stop, stamped.used_bytes) == (fitting, 10 * fitting)
        assert len(stamped.headers) == fitting


def test_a_reserved_key_is_refused_by_row_number() -> None:
    rows = [(b"a", b"", None), (ControlKey(GUID, 0, 0).to_bytes(), b"", None)]
    with pytest.raises(InvalidError, match="row 1 is reserved"):
        stamp_rows(source(rows), 0, 2, first=FIRST, checksum_type=5, max_bytes=100)
    similar = [(b"\x00DIX\x00" + bytes(28), b"", None), (b"\x00DIV\x00", b"", None)]
    assert stamp_rows(source(similar), 0, 2, first=FIRST, checksum_type=5, max_bytes=100).stop == 2


def test_the_uncompiled_kernels_give_the_same_and_stay_inside_their_buffers() -> None:
    rows = [(b"k", b"v" * 30, [("x", b"1"), ("div", b"")]), (None, None, [("y", None)]), (b"", b"", None)]
    columns = source(rows)
    expected = stamp_rows(columns, 0, 3, first=FIRST, checksum_type=5, max_bytes=100)
    stamps, answer = np.zeros(3 * HEADER_BYTES, np.uint8), np.zeros(4, np.int64)
    template = np.frombuffer(FIRST.to_bytes(), np.uint8)
    stamp_records.py_func(columns, 0, 3, 100, template, FIRST.sequence, 5, stamps, answer)
    assert answer.tolist() == [3, expected.checksum, expected.used_bytes, -1]
    measure_headers.py_func(columns, 0, 3, answer)
    assert answer.tolist() == [2, 2, 1, 1]
    into = arrays(3, 5, 2 + 9, 1 + 120, nullable=True)
    assert merge_headers.py_func(columns, 0, 3, NAME, stamps, into)
    entries = expected.headers.values
    values = entries.field("value").to_pylist()
    assert into.ends.tolist() == expected.headers.offsets.to_pylist()
    assert into.key_content.tobytes() == b"".join(entries.field("key").cast(pa.binary()).to_pylist())
    assert into.value_content.tobytes() == b"".join(value for value in values if value is not None)
    assert into.value_valid[0] == sum(1 << n for n, value in enumerate(values) if value is not None)


def arrays(
    rows: int, entries: int, key_bytes: int, value_bytes: int, *, nullable: bool = False
) -> HeaderArrays:
    return HeaderArrays(
        np.zeros(rows + 1, np.int32),
        np.zeros(entries + 1, np.int32),
        np.zeros(key_bytes, np.uint8),
        np.zeros(entries + 1, np.int32),
        np.zeros((entries + 7) // 8 if nullable else 0, np.uint8),
        np.zeros(value_bytes, np.uint8),
    )


@pytest.mark.parametrize(
    ("entries", "key_bytes", "value_bytes"), [(1, 99, 99), (2, 3, 99), (2, 99, 41), (3, 99, 99), (0, 99, 99)]
)
def test_other_room_than_was_measured_is_noticed(entries: int, key_bytes: int, value_bytes: int) -> None:
    columns = source([(b"k", b"v", [("x", b"12")])])
    stamps = np.frombuffer(bytes(HEADER_BYTES), np.uint8)
    assert merge_headers(columns, 0, 1, NAME, stamps, arrays(1, 2, 4, 42))
    assert not merge_headers(columns, 0, 1, NAME, stamps, arrays(1, entries, key_bytes, value_bytes))
