"""Windowed keys, one at a time and by columns: the bytes of Kafka Streams, and what is refused."""

from __future__ import annotations

import struct
import warnings

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError, TidegateWarning, WindowedKeyFormatError
from tidegate.kernels import windowed_keys as kernels
from tidegate.log.writer import partition_of_key
from tidegate.windows.keys import (
    LATEST,
    LENIENT,
    STRICT,
    KeyChecks,
    KeyFormat,
    SessionWindow,
    TimeWindow,
    Window,
    Windowed,
    binary_column,
    decode_key,
    decode_keys,
    encode_key,
    encode_keys,
    lower_range,
    partitions_of_inner_keys,
    upper_range,
)

TOPIC, CHANGELOG, SESSION = KeyFormat.TOPIC, KeyFormat.CHANGELOG, KeyFormat.SESSION
T = 1_700_000_040_000

GOLDEN = [
    pytest.param(b"key", TimeWindow(50, 60), TOPIC, 0, "6b6579 0000000000000032", id="WIN-7.1-01-topic"),
    pytest.param(
        b"key", TimeWindow(50, 60), CHANGELOG, 0, "6b6579 0000000000000032 00000000", id="WIN-7.1-01-store"
    ),
    pytest.param(
        b"key", TimeWindow(50, 60), CHANGELOG, 7, "6b6579 0000000000000032 00000007", id="WIN-7.1-01-store-7"
    ),
    pytest.param(
        b"key", SessionWindow(50, 100), SESSION, 0, "6b6579 0000000000000064 0000000000000032",
        id="WIN-7.1-01-session",
    ),
    pytest.param(
        b"\0\0\0\1", TimeWindow(59996, 60006), CHANGELOG, 0, "00000001 000000000000ea5c 00000000",
        id="WIN-7.1-01-integer",
    ),
    pytest.param(
        b"user-1", TimeWindow(T, T + 10), CHANGELOG, 0, "757365722d31 0000018bcfe60440 00000000",
        id="WIN-7.1-01-user",
    ),
    pytest.param(
        b"user-1", SessionWindow(T, T + 5000), SESSION, 0, "757365722d31 0000018bcfe617c8 0000018bcfe60440",
        id="WIN-7.1-01-user-session",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("inner", "window", "key_format", "sequence", "raw"), GOLDEN)
def test_golden_keys(inner: bytes, window: Window, key_format: KeyFormat, sequence: int, raw: str) -> None:
    expected = bytes.fromhex(raw)
    assert encode_key(inner, window, key_format, sequence=sequence) == expected
    size = None if key_format is SESSION else 10
    assert decode_key(expected, key_format, size_ms=size, checks=LENIENT) == Windowed(inner, window, sequence)
    column = encode_keys(
        pa.array([inner]), np.array([window.start]), key_format,
        end=np.array([window.end]) if key_format is SESSION else None,
        sequence=np.array([sequence], np.int32) if key_format is CHANGELOG else None,
    )  # fmt: skip
    assert column.to_pylist() == [expected]
    decoded = decode_keys(column, key_format, size_ms=size, checks=LENIENT)
    assert decoded.inner.to_pylist() == [inner]
    assert (decoded.start[0], decoded.end[0], decoded.sequence[0]) == (window.start, window.end, sequence)


def test_a_store_key_read_in_topic_format_is_garbage_that_strict_checks_catch() -> None:
    raw = encode_key(b"a", TimeWindow(50, 60), CHANGELOG)
    assert raw is not None
    wrong = decode_key(raw, TOPIC, size_ms=10, checks=LENIENT)
    assert wrong == Windowed(bytes.fromhex("6100000000"), TimeWindow(214748364800, 214748364810))
    with pytest.raises(WindowedKeyFormatError, match="changelog format"):
        decode_key(raw, TOPIC, size_ms=10)
    other = encode_key(b"abcdefgh", TimeWindow(60_000, 60_010), TOPIC)
    with pytest.raises(WindowedKeyFormatError, match="topic format"):
        decode_key(other, CHANGELOG, size_ms=10)


@pytest.mark.parametrize(
    "size", [pytest.param(LATEST, id="WIN-7.1-02-max"), pytest.param(LATEST - 1, id="WIN-7.1-02")]
)
def test_an_end_beyond_the_largest_time_is_cut_with_a_warning(size: int) -> None:
    raw = encode_key(b"key", TimeWindow(50, 60), TOPIC)
    with pytest.warns(TidegateWarning, match="largest time"):
        assert decode_key(raw, TOPIC, size_ms=size) == Windowed(b"key", TimeWindow(50, LATEST))
    with pytest.warns(TidegateWarning, match="largest time"):
        assert decode_keys(pa.array([raw]), TOPIC, size_ms=size).end.tolist() == [LATEST]


@pytest.mark.parametrize(
    ("start", "size", "sequence"),
    [
        pytest.param(0, 1, 0, id="WIN-7.1-02-size-1"),
        pytest.param(0, 10, 0, id="WIN-7.1-02-size-10"),
        pytest.param(10, 20, 6, id="WIN-7.1-02-size-20"),
    ],
)
def test_changelog_keys_take_their_length_from_the_size(start: int, size: int, sequence: int) -> None:
    raw = b"k" + struct.pack(">qi", start, sequence)
    found = decode_key(raw, CHANGELOG, size_ms=size, checks=LENIENT)
    assert found is not None
    assert (found.window.start, found.window.end - found.window.start, found.sequence) == (
        start,
        size,
        sequence,
    )


@pytest.mark.parametrize(
    "nothing", [pytest.param(None, id="WIN-7.1-02-none"), pytest.param(b"", id="WIN-7.1-02-empty")]
)
@pytest.mark.parametrize("key_format", list(KeyFormat))
def test_no_bytes_are_no_key(nothing: bytes | None, key_format: KeyFormat) -> None:
    size = None if key_format is SESSION else 10
    assert decode_key(nothing, key_format, size_ms=size) is None
    decoded = decode_keys(pa.array([nothing], pa.binary()), key_format, size_ms=size)
    assert decoded.inner.to_pylist() == [None]
    assert decoded.bad_rows == 0
    window: Window = SessionWindow(1, 2) if key_format is SESSION else TimeWindow(1, 2)
    assert encode_key(None, window, key_format) is None


@pytest.mark.parametrize(
    ("inner", "start", "expected"),
    [
        pytest.param("0a0b0c", LATEST, "0a 7fffffffffffffff 7fffffff", id="WIN-7.1-03-cut"),
        pytest.param("0a8f9f", LATEST, "0a8f9f 7fffffffffffffff 7fffffff", id="WIN-7.1-03-whole"),
        pytest.param("0c0c09", 0x0AFFFFFFFFFFFFFF, "0c0c 0affffffffffffff 7fffffff", id="WIN-7.1-03-part"),
        pytest.param("0a0b0c", 0, "0a0b0c 0000000000000000 7fffffff", id="WIN-7.1-03-zero"),
    ],
)
def test_upper_bounds_of_a_range(inner: str, start: int, expected: str) -> None:
    assert upper_range(bytes.fromhex(inner), start) == bytes.fromhex(expected)


def test_lower_bounds_of_a_range_WIN_7_1_03() -> None:
    assert lower_range(bytes.fromhex("0a0b0c")) == bytes.fromhex("0a0b0c") + bytes(12), "WIN-7.1-03"


@given(st.binary(max_size=6), st.binary(max_size=6), st.integers(0, LATEST), st.integers(0, LATEST))
@settings(max_examples=200)
def test_every_key_of_a_range_lies_between_its_bounds(
    low: bytes, high: bytes, start: int, latest: int
) -> None:
    low, high = min(low, high), max(low, high)
    start, latest = min(start, latest), max(start, latest)
    for inner in (low, high):
        raw = inner + struct.pack(">qi", start, 0)
        assert lower_range(low) <= raw <= upper_range(high, latest) or not low


@pytest.mark.parametrize(
    ("key", "four", "ten"),
    [
        pytest.param(key, four, ten, id=f"WIN-7.1-05-{key.decode()}")
        for key, four, ten in [(b"a", 0, 4), (b"b", 0, 6), (b"key", 1, 1), (b"mel", 3, 9), (b"john", 3, 5)]
    ],
)
def test_a_windowed_key_goes_where_its_inner_key_goes(key: bytes, four: int, ten: int) -> None:
    for start in (0, 60_000, T):
        column = encode_keys(pa.array([key]), np.array([start]), TOPIC)
        inner = decode_keys(column, TOPIC, size_ms=10).inner
        assert partitions_of_inner_keys(inner, 4).tolist() == [four]
        assert partitions_of_inner_keys(inner, 10).tolist() == [ten]


def test_hashing_the_whole_windowed_key_would_put_it_elsewhere() -> None:
    raw = encode_key(b"b", TimeWindow(60_000, 60_010), TOPIC)
    assert raw is not None
    assert partition_of_key(raw, 4) == 2, "WIN-7.1-05"
    assert partition_of_key(b"b", 4) == 0


@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        pytest.param(key, hashed, id=f"WIN-7.1-04-{key}")
        for key, hashed in [
            ("21", -973932308),
            ("foobar", -790332482),
            ("abc", 479470107),
            ("a-little-bit-long-string", -985981536),
        ]
    ],
)
def test_murmur2_decides_the_partition(key: str, hashed: int) -> None:
    for partitions in (1, 7, 1000):
        chosen = partitions_of_inner_keys(pa.array([key.encode(), None]), partitions).tolist()
        assert chosen == [(hashed & 0x7FFFFFFF) % partitions, -1]


BAD = [
    (b"1234567", TOPIC, STRICT, "too short"),
    (b"12345678901", CHANGELOG, STRICT, "too short"),
    (b"123456789012345", SESSION, STRICT, "too short"),
    (b"k" + struct.pack(">q", -1), TOPIC, LENIENT, "cannot start at -1"),
    (b"k" + struct.pack(">q", LATEST), TOPIC, LENIENT, "no room for an end"),
    (b"k" + struct.pack(">qi", LATEST, 0), CHANGELOG, LENIENT, "no room for an end"),
    (b"k" + struct.pack(">qi", -5, 0), CHANGELOG, LENIENT, "cannot start at -5"),
    (b"k" + struct.pack(">qq", 5, -5), SESSION, LENIENT, "cannot start at -5"),
    (b"k" + struct.pack(">qq", 4, 5), SESSION, LENIENT, "before its start"),
    (b"k" + struct.pack(">qi", 5, -1), CHANGELOG, LENIENT, "sequence cannot be -1"),
    (b"k" + struct.pack(">qi", 5, 3), CHANGELOG, STRICT, "topic format"),
    (b"k" + struct.pack(">qi", 417 << 32 | 7, 0), TOPIC, STRICT, "changelog format"),
    (b"key" + struct.pack(">q", 1 << 48), TOPIC, STRICT, "another format"),
    (b"key" + struct.pack(">qq", 1_800_000_060_000, 1_800_000_000_000), TOPIC, STRICT, "is it a session"),
    (b"k" + struct.pack(">q", 50), TOPIC, KeyChecks(inner_bytes=4), "1 bytes where 4"),
    (b"k" + struct.pack(">q", 51), TOPIC, KeyChecks(advance_ms=10), "multiple of 10"),
]


@pytest.mark.parametrize(("raw", "key_format", "checks", "why"), BAD)
def test_bad_keys_are_refused_with_their_reason(
    raw: bytes, key_format: KeyFormat, checks: KeyChecks, why: str
) -> None:
    size = None if key_format is SESSION else 10
    with pytest.raises(WindowedKeyFormatError, match=why):
        decode_key(raw, key_format, size_ms=size, checks=checks)
    good = b"good" + bytes(key_format.suffix_bytes)
    decoded = decode_keys(pa.array([good, raw, None]), key_format, size_ms=size, checks=checks)
    assert decoded.bad.tolist() == [False, True, False]
    assert decoded.inner.to_pylist() == [b"good", None, None]
    with pytest.raises(WindowedKeyFormatError, match="topic t partition 3 offset 8: "):
        decoded.require_good(offsets=np.array([7, 8, 9]), topic="t", partition=3)
    with pytest.raises(WindowedKeyFormatError, match="row 1: "):
        decoded.require_good()
    assert decoded.reason(1) != decoded.reason(0)


def test_sizes_belong_to_time_windows_only() -> None:
    for decode in (
        lambda **more: decode_key(b"", **more),
        lambda **more: decode_keys(pa.array([b""]), **more),
    ):
        with pytest.raises(TypeError, match="no window size"):
            decode(key_format=SESSION, size_ms=10)
        with pytest.raises(TypeError, match="give the window size"):
            decode(key_format=TOPIC)
        with pytest.raises(InvalidError, match="1 ms or more"):
            decode(key_format=TOPIC, size_ms=0)


def test_impossible_windows_are_not_written() -> None:
    keys = pa.array([b"a", b"b"])
    with pytest.raises(InvalidError, match="row 1"):
        encode_keys(keys, np.array([0, -1]), TOPIC)
    with pytest.raises(InvalidError, match="row 1"):
        encode_keys(keys, np.array([0, LATEST]), TOPIC)
    with pytest.raises(InvalidError, match="row 0"):
        encode_keys(keys, np.array([5, 5]), SESSION, end=np.array([4, 5]))
    with pytest.raises(InvalidError, match="row 1"):
        encode_keys(keys, np.array([5, 5]), CHANGELOG, sequence=np.array([4, -5], np.int32))
    with pytest.raises(TypeError, match="end in their bytes"):
        encode_keys(keys, np.array([5, 5]), SESSION)
    with pytest.raises(TypeError, match="no sequence"):
        encode_keys(keys, np.array([5, 5]), TOPIC, sequence=np.zeros(2, np.int32))
    with pytest.raises(InvalidError, match="3 numbers"):
        encode_keys(keys, np.array([5, 5, 5]), TOPIC)
    with pytest.raises(TypeError, match="float64"):
        encode_keys(keys, np.array([5.0, 5.0]), TOPIC)
    with pytest.raises(InvalidError, match="do not fit"):
        encode_keys(keys, np.array([5, 5]), CHANGELOG, sequence=np.array([0, 2**31]))
    with pytest.raises(InvalidError, match="0 to"):
        encode_key(b"a", TimeWindow(0, 1), CHANGELOG, sequence=-1)
    with pytest.raises(TypeError, match="SessionWindow"):
        encode_key(b"a", SessionWindow(0, 1), TOPIC)


def test_windows_know_what_they_overlap() -> None:
    assert not TimeWindow(50, 100).overlaps(TimeWindow(0, 50))
    assert not TimeWindow(50, 100).overlaps(TimeWindow(100, 150))
    assert SessionWindow(50, 100).overlaps(SessionWindow(0, 50))
    assert SessionWindow(50, 100).overlaps(SessionWindow(100, 150))
    assert not SessionWindow(50, 100).overlaps(SessionWindow(101, 150))
    with pytest.raises(TypeError):
        TimeWindow(50, 100).overlaps(SessionWindow(50, 100))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        SessionWindow(50, 100).overlaps(TimeWindow(50, 100))  # type: ignore[arg-type]
    for wrong in (lambda: TimeWindow(-1, 5), lambda: TimeWindow(5, 5), lambda: SessionWindow(5, 4)):
        with pytest.raises(InvalidError):
            wrong()


KEYS = st.lists(st.one_of(st.none(), st.binary(max_size=30)), max_size=30)


def one_by_one(
    keys: list[bytes | None], key_format: KeyFormat, size: int | None, checks: KeyChecks
) -> list[object]:
    """Each key as the scalar decoder has it; `bad` for one it refuses."""
    found: list[object] = []
    for key in keys:
        try:
            one = decode_key(key, key_format, size_ms=size, checks=checks)
            found.append(one and (one.key, one.window.start, one.window.end, one.sequence))
        except WindowedKeyFormatError:
            found.append("bad")
    return found


@given(
    KEYS,
    st.sampled_from(list(KeyFormat)),
    st.sampled_from([1, 60_000, LATEST]),
    st.sampled_from([STRICT, LENIENT, KeyChecks(inner_bytes=4), KeyChecks(strict=False, advance_ms=7)]),
    st.integers(0, 4),
)
@settings(max_examples=400)
def test_a_column_is_read_as_key_by_key(
    keys: list[bytes | None], key_format: KeyFormat, size: int, checks: KeyChecks, skip: int
) -> None:
    window_size = None if key_format is SESSION else size
    column = pa.array(keys, pa.binary())[skip:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = one_by_one(keys[skip:], key_format, window_size, checks)
        decoded = decode_keys(column, key_format, size_ms=window_size, checks=checks)
    inner = decoded.inner.to_pylist()
    numbers = zip(inner, decoded.start.tolist(), decoded.end.tolist(), decoded.sequence.tolist(), strict=True)
    found = [
        "bad" if bad else (None if one[0] is None else one)
        for bad, one in zip(decoded.bad, numbers, strict=True)
    ]
    assert found == expected
    assert decoded.bad_rows == expected.count("bad")


ROWS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.binary(max_size=12)), st.integers(0, LATEST - 1), st.integers(0, 2**31 - 1)
    ),
    max_size=20,
)


@given(ROWS, st.sampled_from(list(KeyFormat)))
@settings(max_examples=150)
def test_a_column_is_written_as_key_by_key_and_read_back(
    rows: list[tuple[bytes | None, int, int]], key_format: KeyFormat
) -> None:
    keys = pa.array([key for key, _, _ in rows], pa.binary())
    start = np.array([start for _, start, _ in rows], np.int64)
    sequence = np.array([sequence for _, _, sequence in rows], np.int32)
    end = start + np.minimum(sequence, LATEST - start)
    more = {SESSION: {"end": end}, CHANGELOG: {"sequence": sequence}}.get(key_format, {})
    column = encode_keys(keys, start, key_format, **more)

    def window(row: int) -> Window:
        first = int(start[row])
        return SessionWindow(first, int(end[row])) if key_format is SESSION else TimeWindow(first, first + 1)

    expected = [
        encode_key(key, window(row), key_format, sequence=number if key_format is CHANGELOG else 0)
        for row, (key, _, number) in enumerate(rows)
    ]
    assert column.to_pylist() == expected
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        back = decode_keys(column, key_format, size_ms=None if key_format is SESSION else 1, checks=LENIENT)
    assert back.inner.to_pylist() == keys.to_pylist()
    held = np.array([key is not None for key, _, _ in rows], np.bool_)
    assert back.start[held].tolist() == start[held].tolist()


@given(KEYS, st.sampled_from([kernels.TOPIC, kernels.CHANGELOG, kernels.SESSION]))
@settings(max_examples=60)
def test_the_kernel_never_leaves_its_arrays(keys: list[bytes | None], code: int) -> None:
    """Run as plain Python every access is checked; and it answers what the compiled one does."""
    column, rows = binary_column(pa.array(keys, pa.binary())), len(keys)
    answers = []
    for run in (kernels.decode_windowed_keys, kernels.decode_windowed_keys.py_func):
        ends, content = np.zeros(rows + 1, np.int32), np.zeros(column.total_bytes, np.uint8)
        start, end = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        sequence, verdict = np.zeros(rows, np.int32), np.zeros(rows, np.uint8)
        bad = run(*column, code, 10, 1, -1, -1, ends, content, start, end, sequence, verdict)
        answers.append(
            [int(bad), *(array.tolist() for array in (ends, content, start, end, sequence, verdict))]
        )
    assert answers[0] == answers[1]


DAYS = range(1, (2100 - 1970) * 365 + 32, 10)
ROUND = [period << 32 for period in range(1, 957)]  # every 49.7 days the low half of a time is 0
STARTS = sorted(
    {day * 86_400_000 for day in DAYS} | {at + shift for at in ROUND for shift in (-1000, 0, 60_000)}
)
INNERS = [
    (b"ann", None), (b"customer-17", None), (b"2026-11-17", None),
    (bytes.fromhex("6d1bcb5c0d5c4bd89d0b0e5b6c4b7f0e"), None),
    (struct.pack(">q", 5), 8), (struct.pack(">q", 4_294_967_296 * 3), 8), (struct.pack(">i", 77), 4),
]  # fmt: skip


@pytest.mark.parametrize(("inner", "fixed"), INNERS)
def test_formats_are_told_apart_at_every_date_from_1970_to_2100(inner: bytes, fixed: int | None) -> None:
    """By structure, and not by whether a bit of the day's milliseconds happens to be set."""
    checks = KeyChecks(inner_bytes=fixed)
    starts = np.array(STARTS, np.int64)
    keys = pa.array([inner] * len(starts), pa.binary())
    for lasting in (0, 10_000, 3_600_000):
        written = {
            TOPIC: encode_keys(keys, starts, TOPIC),
            CHANGELOG: encode_keys(keys, starts, CHANGELOG),
            SESSION: encode_keys(keys, starts, SESSION, end=starts + lasting),
        }
        for kind, column in written.items():
            for read in KeyFormat:
                size = None if read is SESSION else 60_000
                found = decode_keys(column, read, size_ms=size, checks=checks)
                if read is kind:
                    assert found.bad_rows == 0
                    assert found.start.tolist() == STARTS
                else:
                    # a start that is a multiple of 2**32 leaves the start 0, which only a serde's length tells apart
                    passed = np.flatnonzero(found.good & ((starts & 0xFFFFFFFF != 0) | (fixed is not None)))
                    assert not len(passed), (kind, read, [STARTS[row] for row in passed[:5]])


def test_scalar_and_column_agree_about_other_formats() -> None:
    chance = np.random.default_rng(5)
    for _ in range(300):
        start = int(chance.choice(STARTS)) + int(chance.integers(0, 3))
        inner, _ = INNERS[int(chance.integers(len(INNERS)))]
        kind, read = (list(KeyFormat)[int(chance.integers(3))] for _ in range(2))
        window = SessionWindow(start, start + 9) if kind is SESSION else TimeWindow(start, start + 60_000)
        raw = encode_key(inner, window, kind)
        size = None if read is SESSION else 60_000
        decoded = decode_keys(pa.array([raw]), read, size_ms=size)
        try:
            decode_key(raw, read, size_ms=size)
        except WindowedKeyFormatError:
            assert decoded.bad_rows == 1
        else:
            assert decoded.bad_rows == 0
