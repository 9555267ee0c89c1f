"""Headers columns into rows: against a plain twin, on sound, odd and hostile headers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.integrity.columns import control_payload, read_columns, source_of, without_control
from tidegate.integrity.header import EndOfChain, Stamp, start_of_chain_bytes
from tidegate.integrity.state import Manifest
from tidegate.kernels.integrity import MALFORMED, MANAGED, STAMP_ROW, UNMANAGED, read_stamps
from tidegate.log.format.records import HEADERS_TYPE

Headers = list[tuple[str, bytes | None]]
GUID = bytes(range(1, 17))


def stamp(**fields: Any) -> Stamp:
    return Stamp(0, 255, 0, GUID, 0, 1, 1000, 77)._replace(**fields)


def control(kind: int, payload: bytes | None, **fields: Any) -> Headers:
    headers: Headers = [("div", stamp(kind=2, control=kind, **fields).to_bytes())]
    return headers if payload is None else [*headers, ("divc", payload)]


def column(rows: list[Headers | None]) -> pa.ListArray:
    lists = [None if row is None else [{"key": k, "value": v} for k, v in row] for row in rows]
    return pa.array(lists, HEADERS_TYPE)


def twin(headers: Headers | None) -> dict[str, int]:
    """What a row should be, the slow and obvious way; empty when only the state counts."""
    found = [value for key, value in headers or [] if key == "div"]
    payloads = [value for key, value in headers or [] if key == "divc"]
    if not found:
        return {"state": UNMANAGED}
    wrong = {"state": MALFORMED}
    if len(found) > 1 or found[0] is None:
        return wrong
    try:
        read = Stamp.from_bytes(found[0])
    except InvalidError:
        return wrong
    if read.chain < 0 or read.sequence < 0 or (read.kind != 2 and read.control != 255):
        return wrong
    row = {name: getattr(read, name) for name in Stamp._fields if name != "guid"}
    row |= {
        "guid_high": int.from_bytes(read.guid[:8], "big"),
        "guid_low": int.from_bytes(read.guid[8:], "big"),
    }
    row |= dict.fromkeys(("announced_type", "certified", "certified_type", "certified_checksum"), 0)
    if read.kind == 2:
        if len(payloads) > 1:
            return wrong
        payload = payloads[0] if payloads else None
        sizes = {0: {2}, 1: set(range(2, 10_000)), 2: {2}, 3: {22}}.get(read.control)
        if sizes is not None and (payload is None or len(payload) not in sizes or payload[0] != 1):
            return wrong
        if read.control in (2, 3) and payload is not None:
            if payload[1] not in (0, 4, 5):
                return wrong
            if read.control == 2:
                row["announced_type"] = payload[1]
            else:
                end = EndOfChain.from_bytes(payload)
                row |= {
                    "certified": 1,
                    "certified_type": end.checksum_type,
                    "certified_checksum": end.checksum,
                    "certified_records": end.records,
                    "certified_stamp_sum": end.stamp_sum,
                }
    return {**row, "state": MANAGED}


def check(rows: list[Headers | None]) -> None:
    columns = read_columns(column(rows))
    for number, headers in enumerate(rows):
        for field, value in twin(headers).items():
            assert int(columns.rows[number][field]) == value, (field, headers)


end_payload = EndOfChain(5, 2**64 - 2, 4_000_000_000, 2**63).to_bytes()
odd_bytes = st.one_of(
    st.none(),
    st.binary(max_size=60),
    st.sampled_from([end_payload, start_of_chain_bytes(5), b"\x01\x07", Manifest().to_bytes()]),
)
sound = st.builds(
    lambda kind, control, flags, chain, sequence, time, crc: stamp(
        kind=kind, control=control, flags=flags, chain=chain, sequence=sequence, timestamp=time, crc=crc
    ).to_bytes(),
    st.sampled_from([0, 1, 2, 3, 9]),
    st.sampled_from([0, 1, 2, 3, 4, 5, 8, 99, 255]),
    st.integers(0, 255),
    st.integers(-2, 2**31 - 1),
    st.integers(-2, 2**31 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**32 - 1),
)
header = st.one_of(
    st.tuples(st.just("div"), sound),
    st.tuples(st.sampled_from(["div", "divc", "dix", "di", "divcc", "", "trace-id", "Div"]), odd_bytes),
)
record_headers = st.lists(header, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.none(), record_headers), max_size=8))
def test_any_headers_give_the_rows_of_the_plain_twin(rows: list[Headers | None]) -> None:
    check(rows)


@settings(max_examples=150, deadline=None)
@given(st.lists(record_headers, min_size=1, max_size=6), st.data())
def test_a_slice_reads_like_the_rows_it_is(rows: list[Headers], draw: st.DataObject) -> None:
    start = draw.draw(st.integers(0, len(rows) - 1))
    whole, part = read_columns(column(rows)), read_columns(column(rows).slice(start))
    assert (part.rows == whole.rows[start:]).all()


def test_the_uncompiled_kernel_gives_the_same_and_stays_inside_its_buffers() -> None:
    rows: list[Headers | None] = [
        [("div", stamp().to_bytes())],
        control(3, end_payload),
        control(2, b"\x01\x05"),
        [("div", b"short"), ("divc", b"")],
        None,
        [("x", None)],
    ]
    plain = np.zeros(len(rows), STAMP_ROW)
    read_stamps.py_func(source_of(headers=column(rows)), plain)
    assert (np.asarray(plain) == read_columns(column(rows)).rows).all()


@pytest.mark.parametrize("position", range(40))
def test_damage_to_any_byte_of_a_header_is_seen_or_changes_what_it_says(position: int) -> None:
    """Never an error, and never the row of the undamaged record."""
    before = read_columns(column([[("div", stamp().to_bytes())]])).rows[0]
    for bit in range(8):
        damaged = bytearray(stamp().to_bytes())
        damaged[position] ^= 1 << bit
        check([[("div", bytes(damaged))]])
        after = read_columns(column([[("div", bytes(damaged))]])).rows[0]
        assert after != before


def test_a_start_without_its_payload_and_repeated_headers_are_malformed() -> None:
    div = ("div", stamp().to_bytes())
    rows: list[Headers | None] = [
        control(2, None),
        control(3, b"\x01\x05"),
        control(3, b"\x02" + end_payload[1:]),
        control(0, b"\x01"),
        control(1, b""),
        [*control(2, b"\x01\x05"), ("divc", b"\x01\x05")],
        [div, div],
        [("div", None)],
    ]
    assert read_columns(column(rows)).state.tolist() == [MALFORMED] * len(rows)


def test_kinds_and_control_types_nobody_knows_are_left_to_the_validator() -> None:
    rows: list[Headers | None] = [
        [("div", stamp(kind=77).to_bytes())],
        control(99, None),
        control(7, b"anything"),
    ]
    assert read_columns(column(rows)).state.tolist() == [MANAGED] * 3


def test_views_agree_with_the_scalar_stamp() -> None:
    columns = read_columns(
        column([[("div", stamp(chain=4, sequence=9).to_bytes())], control(2, b"\x01\x05")])
    )
    assert columns.stamp(0) == stamp(chain=4, sequence=9)
    assert columns.guid(0) == GUID
    assert columns.is_control.tolist() == [False, True]
    assert columns.is_heartbeat.tolist() == [False, False]
    assert len(columns[1:]) == 1 and columns[1:].control.tolist() == [2]
    assert columns.chain.tolist() == [4, 0] and columns.timestamp.tolist() == [1000, 1000]
    assert columns.guid_high[0] == columns.guid_high[1] and columns.guid_low[0] == columns.guid_low[1]


def test_consumers_can_leave_control_records_out() -> None:
    batch = pa.record_batch(
        {"value": [b"1", b"", b"2"], "headers": column([None, control(2, b"\x01\x05"), None])}
    )
    assert without_control(batch).column("value").to_pylist() == [b"1", b"2"]
    assert control_payload(batch.column("headers"), 1) == b"\x01\x05"
    assert control_payload(batch.column("headers"), 0) is None


def test_chunks_and_other_header_types_are_taken_and_nonsense_is_refused() -> None:
    rows: list[Headers | None] = [[("div", stamp().to_bytes())]]
    chunked = pa.chunked_array([column(rows), column(rows)])
    assert read_columns(chunked).state.tolist() == [MANAGED, MANAGED]
    nullable = column(rows).cast(pa.list_(pa.struct([("key", pa.large_string()), ("value", pa.binary())])))
    assert read_columns(nullable).state.tolist() == [MANAGED]
    assert len(read_columns(column([]))) == 0
    with pytest.raises(InvalidError, match="headers"):
        read_columns(pa.array([1, 2]))
