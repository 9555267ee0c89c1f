"""Measuring and decoding records: both kernels against one twin, on sound and on hostile bytes.

The twin reads records the slow way and raises at the first thing wrong. Every case also runs the kernels as
plain Python, where an access outside an array raises, and once more with columns that are always full, so
that decoding stops and goes on wherever it can.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.kernels.record_batch import (
    DONE,
    FULL_HEADER_KEYS,
    FULL_HEADER_VALUES,
    FULL_HEADERS,
    FULL_KEYS,
    FULL_RECORDS,
    FULL_VALUES,
    HEADER_ROW,
    MALFORMED,
    MEASURED_ROW,
    PROGRESS_ROW,
    BinaryArrays,
    Measured,
    Progress,
    RecordArrays,
    decode_records,
    measure_records,
)
from tidegate.testing.batches import Rec, build_record, varint

LOWEST, HIGHEST = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class Body:
    """Records on their own, with what their batch's header would say."""

    content: bytes
    count: int
    base_offset: int = 0
    base_timestamp: int = 0
    append_time: int | None = None
    last_offset_delta: int = 2**31 - 1


@dataclass(frozen=True)
class Seen:
    """One record as the twin reads it."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[bytes, bytes | None]]


# -- the twin -------------------------------------------------------------------------------------


class Twin:
    """A reader that stumbles (ValueError) over the first wrong byte."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def take(self, length: int) -> bytes:
        if not 0 <= length <= len(self.content):
            raise ValueError("not enough bytes")
        taken, self.content = self.content[:length], self.content[length:]
        return taken

    def number(self, bits: int = 32) -> int:
        raw = 0
        for place in range((bits + 6) // 7):
            byte = self.take(1)[0]
            raw += (byte % 128) << 7 * place
            if byte < 128:
                raw %= 2**bits
                return raw // 2 if raw % 2 == 0 else -(raw // 2) - 1
        raise ValueError("too long a number")

    def sized(self) -> bytes | None:
        length = self.number()
        return None if length == -1 else self.take(length)


def twin_record(content: bytes, body: Body) -> Seen:
    record = Twin(content)
    record.take(1)
    timestamp_delta, offset_delta = record.number(64), record.number()
    key, value, count = record.sized(), record.sized(), record.number()
    if not 0 <= count <= len(record.content):
        raise ValueError("header count")
    headers = []
    for _ in range(count):
        name, datum = record.sized(), record.sized()
        if name is None:
            raise ValueError("header without a key")
        headers.append((name, datum))
    if record.content:
        raise ValueError("bytes left in the record")
    timestamp = body.append_time
    if timestamp is None:
        timestamp = (body.base_timestamp + timestamp_delta + 2**63) % 2**64 - 2**63  # wraps, as in Java
    return Seen(body.base_offset + offset_delta, timestamp, key, value, headers)


def twin(body: Body) -> list[Seen] | int:
    """The records, or the number of the first bad one (`count` when bytes are left over)."""
    reader, seen = Twin(body.content), []
    for number in range(body.count):
        try:
            length = reader.number()
            seen.append(twin_record(reader.take(length), body))
        except ValueError:
            return number
    return body.count if reader.content else seen


# -- the kernels ----------------------------------------------------------------------------------


def source_and_rows(bodies: list[Body]) -> tuple[Any, Any]:
    """The bodies in one array, each behind 61 bytes that no kernel may look at."""
    rows, content = np.zeros(len(bodies), HEADER_ROW), b""
    for row, body in zip(rows, bodies, strict=True):
        row["position"] = len(content)
        row["length"] = 49 + len(body.content)
        row["count"] = body.count
        row["base_offset"], row["base_timestamp"] = body.base_offset, body.base_timestamp
        row["last_offset_delta"] = body.last_offset_delta
        if body.append_time is not None:
            row["attributes"], row["max_timestamp"] = 8, body.append_time
        content += b"\xff" * 61 + body.content
    return np.frombuffer(content, np.uint8), rows


def measure(body: Body) -> tuple[bool, Measured]:
    source, rows = source_and_rows([body])
    compiled, plain = np.zeros(1, MEASURED_ROW), np.zeros(1, MEASURED_ROW)
    sound = measure_records(source, rows, compiled)
    with np.errstate(over="ignore"):
        assert sound == measure_records.py_func(source, rows.view(np.recarray), plain.view(np.recarray))
    assert compiled.tolist() == plain.tolist()
    return bool(sound), Measured._make(compiled[0].item())


def check_facts(body: Body) -> None:
    """Measure one body, and compare with the twin."""
    sound, found = measure(body)
    told = twin(body)
    if isinstance(told, int):
        assert (sound, found.record) == (False, told)
        return
    assert (sound, found.record, found.position) == (True, body.count, 61 + len(body.content))
    stamps = [record.timestamp for record in told if record.timestamp != -1]
    assert found.min_timestamp == min(stamps, default=HIGHEST)
    assert found.max_timestamp == max([-1, *stamps])
    newest = [record.offset for record in told if record.timestamp == found.max_timestamp > -1]
    assert found.max_timestamp_offset == (newest[0] if newest else -1)
    assert found.null_keys == sum(record.key is None for record in told)
    in_place = [record.offset - body.base_offset == place for place, record in enumerate(told)]
    assert found.nonconsecutive == in_place.count(False)


def room(
    records: int, key: int, value: int, headers: int, header_key: int, header_value: int
) -> RecordArrays:
    def binary(rows: int, content: int) -> BinaryArrays:
        ends, valid = np.zeros(rows + 1, np.int32), np.full((rows + 7) // 8, 0xFF, np.uint8)
        return BinaryArrays(ends, valid, np.zeros(content, np.uint8))

    numbers, bits = np.zeros(records, np.int64), np.full((records + 7) // 8, 0xFF, np.uint8)
    columns = binary(records, key), binary(records, value)
    header_columns = binary(headers, header_key), binary(headers, header_value)
    ends = np.zeros(records + 1, np.int32)
    return RecordArrays(numbers, numbers.copy(), bits, *columns, ends, *header_columns)


def flat(arrays: RecordArrays) -> list[Any]:
    return [part for item in arrays for part in (item if isinstance(item, BinaryArrays) else [item])]


def run(
    decoder: Any, source: Any, rows: Any, start: int, stop: int, plenty: int
) -> tuple[int, Progress, RecordArrays]:
    """Decode to the end, with `plenty` room everywhere, or step by step with only what is asked for."""
    sizes = dict.fromkeys(
        [FULL_RECORDS, FULL_KEYS, FULL_VALUES, FULL_HEADERS, FULL_HEADER_KEYS, FULL_HEADER_VALUES], plenty
    )
    arrays, progress = room(*sizes.values()), np.zeros(1, PROGRESS_ROW)
    if decoder is not decode_records:
        rows, progress = rows.view(np.recarray), progress.view(np.recarray)
    while True:
        status = decoder(source, rows, start, stop, progress, arrays)
        told = Progress._make(progress[0].item())
        if status == DONE:  # where to go on means nothing then
            return status, told._replace(position=0, previous_delta=0), arrays
        if status == MALFORMED:
            return status, told, arrays
        assert told.wanted > sizes[status]
        sizes[status] = told.wanted
        smaller, arrays = arrays, room(*sizes.values())
        for old, new in zip(flat(smaller), flat(arrays), strict=True):
            new[: len(old)] = old


def is_valid(bitmap: Any, index: int) -> bool:
    return bool(bitmap[index >> 3] >> (index & 7) & 1)


def value_at(arrays: BinaryArrays, index: int) -> bytes | None:
    content: bytes = arrays.content[arrays.ends[index] : arrays.ends[index + 1]].tobytes()
    return content if is_valid(arrays.valid, index) else None


def seen_in(arrays: RecordArrays, told: Progress) -> list[Seen]:
    seen = []
    for index in range(told.records):
        timestamp = int(arrays.timestamp[index])
        assert is_valid(arrays.timestamp_valid, index) == (timestamp != -1)
        headers = []
        for header in range(arrays.header_ends[index], arrays.header_ends[index + 1]):
            name = value_at(arrays.header_key, header)
            assert name is not None
            headers.append((name, value_at(arrays.header_value, header)))
        key, value = value_at(arrays.key, index), value_at(arrays.value, index)
        seen.append(Seen(int(arrays.offset[index]), timestamp, key, value, headers))
    return seen


def check(bodies: list[Body], start: int = LOWEST, stop: int = HIGHEST) -> Progress:
    """Decode, with and without stops, compiled and plain, and compare with the twin."""
    for body in bodies:
        check_facts(body)
    source, rows = source_and_rows(bodies)
    status, told, arrays = run(decode_records, source, rows, start, stop, plenty=4096)
    with np.errstate(over="ignore"):
        for decoder, plenty in (
            (decode_records, 0),
            (decode_records.py_func, 4096),
            (decode_records.py_func, 0),
        ):
            again = run(decoder, source, rows, start, stop, plenty)
            assert again[:2] == (status, told)
            assert status != DONE or seen_in(again[2], told) == seen_in(arrays, told)
    wanted = []
    for index, body in enumerate(bodies):
        found = twin(body)
        if isinstance(found, int):
            assert (status, told.batch, told.record) == (MALFORMED, index, found)
            return told
        wanted += [record for record in found if start <= record.offset < stop]
    assert status == DONE
    assert seen_in(arrays, told) == wanted
    return told


# -- sound records --------------------------------------------------------------------------------

fields = st.none() | st.binary(max_size=80)
headers = st.lists(st.tuples(st.text(max_size=4), st.none() | st.binary(max_size=4)), max_size=3)
records = st.lists(
    st.builds(Rec, fields, fields, st.integers(-3, 2**42), headers.map(tuple)), min_size=0, max_size=12
)


def body_of(some: list[Rec], **changes: Any) -> Body:
    base = some[0].timestamp if some else -1
    content = b"".join(
        build_record(record, timestamp_delta=record.timestamp - base, offset_delta=place)
        for place, record in enumerate(some)
    )
    return Body(content, len(some), **{"base_timestamp": base, **changes})


@given(st.lists(records, max_size=3), st.integers(-1, 40), st.integers(-1, 40))
@settings(max_examples=150, deadline=None)
def test_any_records_read_as_the_twin_reads_them(batches: list[list[Rec]], start: int, stop: int) -> None:
    check([body_of(some, base_offset=10 * index) for index, some in enumerate(batches)], start, stop)


@given(records, st.sampled_from([-1, 0, 77]))
@settings(max_examples=50, deadline=None)
def test_append_time_is_every_records_time(some: list[Rec], append_time: int) -> None:
    check([body_of(some, append_time=append_time)])


def test_timestamps_wrap_around_as_in_java() -> None:
    content = build_record(Rec(), timestamp_delta=2**63 - 1, offset_delta=0)
    check([Body(content, 1, base_timestamp=2**63 - 1)])
    check([Body(content, 1, base_timestamp=-(2**63))])  # -1: no timestamp


@pytest.mark.parametrize(
    ("deltas", "last", "unordered"),
    [
        ([0, 1, 2], 2, 0),
        ([0, 2, 9], 9, 0),
        ([5, 6, 7], 20, 0),
        ([0, 0, 1], 2, 1),
        ([2, 1, 0], 2, 2),
        ([-1, 0, 1], 2, 1),
        ([0, 1, 2], 1, 1),
    ],
)
def test_offsets_out_of_order_are_counted(deltas: list[int], last: int, unordered: int) -> None:
    content = b"".join(build_record(Rec(), timestamp_delta=0, offset_delta=delta) for delta in deltas)
    assert check([Body(content, len(deltas), last_offset_delta=last)]).unordered == unordered


def test_decoding_goes_on_from_run_to_run() -> None:
    arrays, progress = room(*[64] * 6), np.zeros(1, PROGRESS_ROW)
    for some in ([Rec(b"k", b"vv", 5)], [Rec(None, None, 9), Rec(b"kk", b"", 7, (("h", b"x"),))]):
        source, rows = source_and_rows([body_of(some)])
        progress["batch"] = progress["record"] = 0
        assert decode_records(source, rows, LOWEST, HIGHEST, progress, arrays) == DONE
    told = Progress._make(progress[0].item())
    assert (told.records, told.headers) == (3, 1)
    assert [(seen.key, seen.value) for seen in seen_in(arrays, told)] == [
        (b"k", b"vv"),
        (None, None),
        (b"kk", b""),
    ]


# -- hostile bytes --------------------------------------------------------------------------------

SMALL = [Rec(b"key", b"value", 1, (("h", b"x"), ("n", None))), Rec(None, b"", -1), Rec(b"", None, 2)]


def test_every_cut_of_a_body_is_a_bad_record() -> None:
    body = body_of(SMALL)
    for cut in range(len(body.content)):
        assert not measure(Body(body.content[:cut], 3))[0]
        check([Body(body.content[:cut], 3)])


@pytest.mark.parametrize("count", [0, 1, 2, 4, 100, 2**31 - 1])
def test_a_wrong_count_is_found(count: int) -> None:
    assert check([Body(body_of(SMALL).content, count)]).record == min(count, 3)


def test_every_flipped_bit_of_a_body_reads_as_the_twin_reads_it() -> None:
    content = body_of(SMALL).content
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        check([Body(bytes(flipped), 3)])


NUMBERS = [-(2**31), -(2**31) + 1, -2, -1, 0, 1, 2**31 - 1]


@pytest.mark.parametrize(
    "field", ["length", "timestamp", "offset", "key", "value", "headers", "name", "datum"]
)
def test_every_number_of_a_record_may_lie(field: str) -> None:
    """R-32: each field × {-1, 0, smallest, largest, what remains ± 1, …}, and numbers of too many bytes."""
    key, value, header = [varint(3), b"abc"], [varint(2), b"de"], [varint(1), b"h", varint(1), b"x"]
    fields = [b"\0", varint(5), varint(0), *key, *value, varint(1), *header]
    names = ["", "timestamp", "offset", "key", "", "value", "", "headers", "name", "", "datum", ""]
    sound = len(b"".join(fields))
    lies = [varint(number) for number in [*NUMBERS, sound - 1, sound, sound + 1, *range(20)]]
    lies += [b"\x81\0", b"\x82\x80\0"]  # -1 and 1, in more bytes than they need
    lies += [varint(2**63 - 1), varint(-(2**63))]
    lies += [b"\x80" * 5 + b"\0", b"\x80" * 10 + b"\0", b"\xff" * 12, b""]
    for lie in lies:
        changed = b"".join(lie if name == field else part for name, part in zip(names, fields, strict=True))
        length = lie if field == "length" else varint(len(changed))
        for tail in (b"", b"\0", varint(7) + bytes(7)):
            check([Body(length + changed + tail, 1)])
            check([Body(length + changed + tail, 2)])


@pytest.mark.parametrize("seed", range(4))
def test_noise_reads_as_the_twin_reads_it(seed: int) -> None:
    generator = random.Random(seed)
    sound = body_of(SMALL).content
    for _ in range(150):
        cut = generator.randrange(len(sound))
        noise = (
            sound[:cut]
            + generator.randbytes(generator.randrange(30))
            + sound[generator.randrange(len(sound)) :]
        )
        check([Body(noise, generator.randrange(5))])
