"""Copying the kept records of a batch body, against a plain twin that writes them anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.kernels.record_batch import GROWTH_BYTES, REBUILD_ROW, copy_kept

LONG = st.integers(-(2**62), 2**62 - 1)  # two of them fit 64 bits


def varint(value: int) -> bytes:
    raw = (value << 1) ^ (value >> 63)
    out = bytearray()
    while raw > 0x7F:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    return bytes(out) + bytes([raw])


def record(timestamp_delta: int, rest: bytes, attributes: int = 0) -> bytes:
    body = bytes([attributes]) + varint(timestamp_delta) + rest
    return varint(len(body)) + body


def copied(
    body: bytes, keep: list[bool], delta_ms: int, *, fixed: bool = False, plain: bool = False, room: int = 0
) -> bytes | None:
    """The kept records of a body that lies between other bytes, as the third of three bodies."""
    into = np.full(2 * room + 100 + len(body) + GROWTH_BYTES * len(keep), 0xEE, np.uint8)
    rows = np.zeros(2, REBUILD_ROW)
    source = record(1, b"first") + body + b"behind"
    rows["body_start"] = 0, len(source) - len(body) - 6
    rows["body_stop"] = len(source) - len(body) - 6, len(source) - 6
    rows["first_row"], rows["records"], rows["room"] = (0, 1), (1, len(keep)), room
    rows["delta_ms"], rows["delta_is_fixed"] = (0, delta_ms), (False, fixed)
    function = copy_kept.py_func if plain else copy_kept
    if plain:
        rows = rows.view(np.recarray)
    done = function(np.frombuffer(source, np.uint8), rows, np.array([True, *keep], bool), into)
    assert into[room : rows["stop"][0]].tobytes() == record(1, b"first")
    return into[rows["start"][1] + room : rows["stop"][1]].tobytes() if done == 2 else None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(LONG, st.binary(min_size=1, max_size=200), st.booleans()), max_size=8),
    LONG,
    st.booleans(),
)
def test_kept_records_equal_those_written_anew(
    drawn: list[tuple[int, bytes, bool]], delta_ms: int, fixed: bool
) -> None:
    body = b"".join(record(delta, rest) for delta, rest, _ in drawn)
    expected = b"".join(
        record(delta_ms if fixed else delta + delta_ms, rest) for delta, rest, kept in drawn if kept
    )
    keep = [kept for _, _, kept in drawn]
    assert copied(body, keep, delta_ms, fixed=fixed) == expected
    assert copied(body, keep, delta_ms, fixed=fixed, room=61) == expected


def test_unchanged_deltas_give_the_same_bytes() -> None:
    body = record(0, b"\x00abc") + record(5, b"\x02" + bytes(300)) + record(-7, b"\x04")
    assert copied(body, [True, True, True], 0) == body
    assert copied(body, [False, True, False], 0) == record(5, b"\x02" + bytes(300))
    assert copied(body, [False, False, False], 0) == b""


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        pytest.param(record(1, b"abc")[:-1], 1, id="cut"),
        pytest.param(record(1, b"abc") + b"x", 1, id="bytes-left-over"),
        pytest.param(record(1, b"abc"), 2, id="too-few-records"),
        pytest.param(varint(-1), 1, id="negative-length"),
        pytest.param(varint(0), 1, id="no-attributes"),
        pytest.param(varint(2) + b"\x00\x80", 1, id="delta-cut"),
        pytest.param(b"\xff" * 6, 1, id="endless-length"),
        pytest.param(b"", 1, id="empty"),
    ],
)
def test_body_without_those_records_is_refused(body: bytes, rows: int) -> None:
    assert copied(body, [True] * rows, 3) is None
    assert copied(body, [True] * rows, 3, plain=True) is None


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 4))
def test_hostile_body_never_leads_outside_the_arrays(body: bytes, rows: int) -> None:
    keep = [index % 2 == 0 for index in range(rows)]
    assert copied(body, keep, 1, plain=True) == copied(body, keep, 1)
