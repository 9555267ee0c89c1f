"""The records of a hybrid partition's leader as bytes: stamps, switches, upstream positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.integrity.columns import read_columns
from tidegate.integrity.control_records import (
    LEADERSHIP_GUID,
    Leadership,
    TopicSwitch,
    leadership_row,
    leadership_stamps,
    upstream_offsets,
    with_upstream,
)
from tidegate.integrity.sender import table_of
from tidegate.integrity.validator import PartitionValidator
from tidegate.integrity.verdicts import Verdict
from tidegate.log.format.records import HEADERS_TYPE

GUID = bytes(range(16))


def stamp_batch(leadership: Leadership, **changed: Any) -> pa.RecordBatch:
    row = table_of(leadership_row(leadership, nonce=7, now_ms=1_700_000_000_000))
    batch = row.append_column("offset", pa.array([5], pa.int64()))
    for name, values in changed.items():
        batch = batch.set_column(batch.schema.get_field_index(name), name, values)
    return batch


def test_a_stamp_says_epoch_and_sender_in_its_key() -> None:
    """Golden bytes: a change here is a change of format."""
    batch = stamp_batch(Leadership(2**31 + 3, GUID))
    assert batch.column("key")[0].as_py().hex() == (
        "0044495600" + GUID.hex() + "00000001" + "00000003" + "00000007"
    )
    assert batch.column("value")[0].as_py() == b""
    headers = {each["key"]: each["value"].hex() for each in batch.column("headers")[0].as_py()}
    assert LEADERSHIP_GUID.hex() == "3c090a82541e5b4e9b6ff8b248b5a1ec"
    assert headers["divc"] == "0100"
    assert headers["div"][:72] == (
        "01020202"
        + LEADERSHIP_GUID.hex()
        + "00000000"
        + "00000000"
        + (1_700_000_000_000).to_bytes(8, "big").hex()
    )


def test_a_stamp_is_a_heartbeat_to_validators_and_read_back_by_replicas() -> None:
    leadership = Leadership(9, GUID)
    batch = stamp_batch(leadership)
    validator = PartitionValidator("users_v1", 0)
    assert validator.validate(batch, 0).verdicts.tolist() == [Verdict.HEARTBEAT]
    assert len(validator.state.producers) == 0
    assert list(leadership_stamps(batch, read_columns(batch.column("headers")))) == [(0, leadership)]


def test_a_stamp_that_was_changed_says_nothing() -> None:
    batch = stamp_batch(Leadership(9, GUID))
    key = bytearray(batch.column("key")[0].as_py())
    key[25] ^= 1  # another epoch
    changed = stamp_batch(Leadership(9, GUID), key=pa.array([bytes(key)], pa.binary()))
    assert list(leadership_stamps(changed, read_columns(changed.column("headers")))) == []


@pytest.mark.parametrize(
    "leadership", [Leadership(0, GUID), Leadership(2**62, GUID), Leadership(1, b"short")]
)
def test_a_leadership_that_cannot_be_written_is_refused(leadership: Leadership) -> None:
    with pytest.raises(InvalidError, match="no leadership"):
        leadership_row(leadership, nonce=0, now_ms=0)


def test_a_topic_switch_as_bytes() -> None:
    switch = TopicSwitch("live", 1_700_000_000_000, 42, b"state")
    assert (
        switch.to_bytes().hex()
        == "01" + "0000018bcfe56800" + "000000000000002a" + "0004" + "6c697665" + "7374617465"
    )
    assert TopicSwitch.from_bytes(switch.to_bytes()) == switch


@given(st.binary(max_size=40))
def test_any_bytes_are_a_switch_or_refused(data: bytes) -> None:
    try:
        found = TopicSwitch.from_bytes(data)
    except InvalidError:
        return
    assert found.offset >= 0


HEADER = st.fixed_dictionaries(
    {"key": st.sampled_from(["a", "divu", "div"]), "value": st.none() | st.binary(max_size=9)}
)


@given(st.lists(st.lists(HEADER, max_size=3), min_size=1, max_size=6), st.integers(0, 3), st.data())
def test_upstream_positions_go_last_and_replace_older_ones(
    headers: list[list[dict[str, Any]]], skip: int, data: Any
) -> None:
    start = min(skip, len(headers) - 1)
    column = pa.array(headers, HEADERS_TYPE).slice(start)
    offsets = data.draw(st.lists(st.integers(0, 2**62), min_size=len(column), max_size=len(column)))
    found = with_upstream(column, np.array(offsets, np.int64))
    assert found.to_pylist() == [
        [each for each in row if each["key"] != "divu"]
        + [{"key": "divu", "value": offset.to_bytes(8, "big")}]
        for row, offset in zip(headers[start:], offsets, strict=True)
    ]
    assert upstream_offsets(found).tolist() == offsets
    expected = []
    for row in headers[start:]:
        sound = [
            h["value"] for h in row if h["key"] == "divu" and h["value"] is not None and len(h["value"]) == 8
        ]
        expected.append(int.from_bytes(sound[-1], "big", signed=True) if sound else -1)
    assert upstream_offsets(column).tolist() == expected
