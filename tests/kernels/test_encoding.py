"""Sizing and writing records: the kernels against a twin that joins bytes, at every split."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.kernels.record_encoding import (
    LARGEST_INT64,
    SIZES_ROW,
    BinarySource,
    RecordSource,
    Sizes,
    encode_records,
    size_records,
)
from tidegate.testing.batches import Rec, build_record

UNBOUNDED = 2**62


def frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array


def binary(values: list[bytes | None], skip: int) -> BinarySource:
    """A column whose bitmap starts `skip` bits in, as that of a slice does."""
    ends = np.cumsum([0, *(len(value or b"") for value in values)], dtype=np.int32)
    content = np.frombuffer(b"".join(value or b"" for value in values) or b"\0", np.uint8)
    bits = np.array([1] * skip + [value is not None for value in values], np.uint8)
    valid = np.packbits(bits, bitorder="little") if None in values else np.zeros(0, np.uint8)
    return BinarySource(frozen(ends), frozen(content), frozen(valid), skip)


def columns(some: list[Rec], deltas: list[int], skip: int = 0) -> RecordSource:
    headers = [header for record in some for header in record.headers]
    counts = np.cumsum([0, *(len(record.headers) for record in some)], dtype=np.int32)
    return RecordSource(
        frozen(np.array([record.timestamp for record in some], np.int64)),
        frozen(np.array(deltas, np.int64)),
        binary([record.key for record in some], skip),
        binary([record.value for record in some], skip),
        frozen(counts if headers else np.zeros(0, np.int32)),
        binary([name.encode() for name, _ in headers], skip),
        binary([datum for _, datum in headers], skip),
    )


def size(source: RecordSource, start: int, max_bytes: int, max_records: int, base: int | None) -> Sizes:
    compiled, plain = np.zeros(1, SIZES_ROW), np.zeros(1, SIZES_ROW)
    size_records(source, start, max_bytes, max_records, base is None, base or 0, compiled)
    with np.errstate(over="ignore"):
        size_records.py_func(
            source, start, max_bytes, max_records, base is None, base or 0, plain.view(np.recarray)
        )
    assert compiled.tolist() == plain.tolist()
    return Sizes._make(compiled[0].item())


def write(source: RecordSource, start: int, stop: int, base: int, body_bytes: int) -> bytes:
    compiled, plain = np.full(body_bytes + 8, 0xEE, np.uint8), np.full(body_bytes + 8, 0xEE, np.uint8)
    assert encode_records(source, start, stop, base, compiled, 4) == 4 + body_bytes
    with np.errstate(over="ignore"):
        assert encode_records.py_func(source, start, stop, base, plain, 4) == 4 + body_bytes
    assert compiled.tobytes() == plain.tobytes()
    assert compiled[:4].tobytes() == compiled[-4:].tobytes() == b"\xee" * 4  # nothing outside was touched
    return compiled[4:-4].tobytes()


def twin(some: list[Rec], base: int, deltas: list[int]) -> list[bytes]:
    return [
        build_record(record, timestamp_delta=record.timestamp - base, offset_delta=delta)
        for record, delta in zip(some, deltas, strict=True)
    ]


fields = st.none() | st.binary(max_size=200)
headers = st.lists(st.tuples(st.text(max_size=4), st.none() | st.binary(max_size=4)), max_size=3)
records = st.lists(
    st.builds(Rec, fields, fields, st.integers(-1, 2**45), headers.map(tuple)), min_size=1, max_size=12
)


@given(records, st.integers(0, 9), st.none() | st.integers(0, 2**45))
@settings(max_examples=150, deadline=None)
def test_one_batch_is_the_twins(some: list[Rec], skip: int, base: int | None) -> None:
    source = columns(some, [], skip)
    sizes = size(source, 0, UNBOUNDED, UNBOUNDED, base)
    start = some[0].timestamp if base is None else base
    wanted = b"".join(twin(some, start, list(range(len(some)))))
    assert (sizes.stop, sizes.body_bytes, sizes.base_timestamp) == (len(some), len(wanted), start)
    assert write(source, 0, len(some), start, len(wanted)) == wanted
    stamps = [record.timestamp for record in some]
    assert sizes.max_timestamp == max([-1, *stamps])
    assert sizes.min_timestamp == min((stamp for stamp in stamps if stamp != -1), default=LARGEST_INT64)
    assert sizes.max_timestamp == -1 or sizes.max_timestamp_row == stamps.index(sizes.max_timestamp)
    assert sizes.null_keys == sum(record.key is None for record in some)


@given(records, st.integers(1, 400), st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_a_split_takes_as_many_records_as_fit_and_at_least_one(
    some: list[Rec], max_bytes: int, max_records: int
) -> None:
    source, start = columns(some, []), 0
    while start < len(some):
        sizes = size(source, start, max_bytes, max_records, None)
        encoded = twin(some[start:], some[start].timestamp, list(range(len(some) - start)))
        fits = 1
        while fits < min(max_records, len(encoded)) and sum(map(len, encoded[: fits + 1])) <= max_bytes:
            fits += 1
        wanted = b"".join(encoded[:fits])
        assert (sizes.stop - start, sizes.body_bytes) == (fits, len(wanted))
        assert write(source, start, sizes.stop, sizes.base_timestamp, sizes.body_bytes) == wanted
        start = sizes.stop


def test_given_deltas_are_written_as_they_are() -> None:
    some, deltas = [Rec(b"k", b"v", 5), Rec(b"k", b"v", 4), Rec(b"k", b"v", 6)], [3, 200, 2**31 - 1]
    source = columns(some, deltas)
    wanted = b"".join(twin(some, 2**45, deltas))
    assert size(source, 0, UNBOUNDED, UNBOUNDED, 2**45).body_bytes == len(wanted)
    assert write(source, 0, 3, 2**45, len(wanted)) == wanted


@pytest.mark.parametrize("length", [0, 63, 64, 8191, 8192, 70_000])
def test_lengths_around_each_varint_size(length: int) -> None:
    some = [Rec(b"k" * length, b"v" * length, 1, (("h" * length, b"x" * length),))]
    wanted = b"".join(twin(some, 1, [0]))
    source = columns(some, [])
    assert size(source, 0, UNBOUNDED, UNBOUNDED, None).body_bytes == len(wanted)
    assert write(source, 0, 1, 1, len(wanted)) == wanted
