"""The bytes of `div`, `divc` and control keys, one at a time. Golden: other programs may read these."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.integrity.header import (
    CONTROL_KEY_PREFIX,
    FINAL,
    HEADER_BYTES,
    HEARTBEAT,
    ChecksumType,
    ControlKey,
    ControlType,
    EndOfChain,
    RecordKind,
    Stamp,
    start_of_chain_bytes,
    start_of_chain_from_bytes,
    start_of_push_bytes,
)

GUID = bytes(range(16))
STAMP = Stamp(RecordKind.PUT, 255, 0, GUID, 3, 70_000, 1_767_225_600_000, 0xDEADBEEF)

stamps = st.builds(
    Stamp,
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 255),
    st.binary(min_size=16, max_size=16),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**32 - 1),
)


def test_the_forty_bytes_are_these() -> None:
    expected = "0100ff00" + GUID.hex() + "00000003" + "00011170" + "0000019b76daa800" + "deadbeef"
    assert STAMP.to_bytes().hex() == expected
    assert len(STAMP.to_bytes()) == HEADER_BYTES


@given(stamps)
def test_any_stamp_comes_back_from_its_bytes(stamp: Stamp) -> None:
    assert Stamp.from_bytes(stamp.to_bytes()) == stamp


@pytest.mark.parametrize("length", [0, 1, 39, 41, 80])
def test_another_length_is_refused(length: int) -> None:
    with pytest.raises(InvalidError, match="40 bytes"):
        Stamp.from_bytes(bytes(length))


def test_another_version_is_refused() -> None:
    with pytest.raises(InvalidError, match="version 2"):
        Stamp.from_bytes(b"\x02" + STAMP.to_bytes()[1:])


def test_flags_and_types_say_what_they_mean() -> None:
    start = STAMP._replace(kind=RecordKind.CONTROL, control=ControlType.START_OF_CHAIN)
    end = start._replace(control=ControlType.END_OF_CHAIN, flags=FINAL | HEARTBEAT)
    assert start.is_start_of_chain and not start.is_end_of_chain and not start.is_final
    assert end.is_end_of_chain and end.is_final and end.is_heartbeat
    assert not STAMP._replace(control=ControlType.START_OF_CHAIN).is_start_of_chain


def test_the_stamp_sum_covers_clock_and_flags_modulo_2_64() -> None:
    assert STAMP.stamp_summand == STAMP.timestamp
    assert STAMP._replace(flags=255, timestamp=-1).stamp_summand == ((255 << 56) - 1) % 2**64


def test_a_control_key_is_a_reserved_prefix_and_the_position() -> None:
    key = ControlKey(GUID, 1, 2, 3).to_bytes()
    assert key.hex() == "0044495600" + GUID.hex() + "00000001" + "00000002" + "00000003"
    assert ControlKey.from_bytes(key) == ControlKey(GUID, 1, 2, 3)
    assert ControlKey.from_bytes(key[:-1]) is None
    assert ControlKey.from_bytes(b"x" + key[1:]) is None
    assert key.startswith(CONTROL_KEY_PREFIX)


def test_the_payloads_are_these() -> None:
    assert start_of_chain_bytes(ChecksumType.ADHASH2).hex() == "0105"
    assert start_of_chain_from_bytes(bytes.fromhex("0104")) == ChecksumType.ADHASH
    assert start_of_push_bytes(is_sorted=True).hex() == "0101"
    end = EndOfChain(5, 2**64 - 1, 7, 9)
    assert end.to_bytes().hex() == "0105" + "f" * 16 + "00000007" + "0000000000000009"
    assert EndOfChain.from_bytes(end.to_bytes()) == end


@pytest.mark.parametrize("read", [start_of_chain_from_bytes, EndOfChain.from_bytes])
@pytest.mark.parametrize("data", [b"", b"\x01", b"\x02\x05", b"\x02" + bytes(21), bytes(30)])
def test_other_payload_bytes_are_refused(read: object, data: bytes) -> None:
    with pytest.raises(InvalidError):
        read(data)  # type: ignore[operator]
