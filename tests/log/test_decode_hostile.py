"""Decoders are total (R-31), lengths are never trusted (R-32): any bytes give records or one typed error.

Every case carries a correct CRC unless the CRC is the case, so that the lies reach the code behind it. What
compiled kernels touch is proved in `tests/kernels`; here it is the whole path, with memory and time bounded.
"""

import random
import struct
import time
import tracemalloc
from collections.abc import Iterator

import pyarrow as pa
import pytest

from tidegate.errors import CorruptError, InvalidError
from tidegate.log.format.batch import batch_crc
from tidegate.log.format.decode import DecodeLimits, decode, decode_pieces, inspect_records
from tidegate.testing.batches import CODECS, COMPRESS, CodecName, Rec, build_batch, varint

LIMITS = DecodeLimits(max_decompressed_bytes=1 << 16, max_piece_bytes=1 << 16, max_total_bytes=1 << 20)
SMALL = [Rec(b"key", b"value", 1, (("h", b"x"), ("n", None))), Rec(None, b"", -1), Rec(b"", None, 2)]

HEADER_FIELDS = {
    "base_offset": (0, ">q"),
    "length": (8, ">i"),
    "leader_epoch": (12, ">i"),
    "magic": (16, ">b"),
    "crc": (17, ">I"),
    "attributes": (21, ">h"),
    "last_offset_delta": (23, ">i"),
    "base_timestamp": (27, ">q"),
    "max_timestamp": (35, ">q"),
    "producer_id": (43, ">q"),
    "producer_epoch": (51, ">h"),
    "base_sequence": (53, ">i"),
    "count": (57, ">i"),
}


def sealed(batch: bytearray) -> bytes:
    """The same bytes with the CRC they should have."""
    if len(batch) >= 61:
        batch[17:21] = batch_crc(batch, 0, len(batch)).to_bytes(4, "big")
    return bytes(batch)


def survives(buffer: bytes) -> bool:
    """Whether it decodes; anything but records or a typed error fails the test."""
    try:
        batch = decode(buffer, topic="t", partition=0, control="include", limits=LIMITS)
    except (CorruptError, InvalidError) as error:
        assert str(error)
        assert not isinstance(error, CorruptError) or error.position is not None
        decoded = False
    else:
        batch.validate(full=True)
        decoded = True
    try:
        list(decode_pieces(buffer, topic="t", partition=0, aborted=[(1, 0)], limits=LIMITS, partial_end=True))
        inspect_records(buffer, limits=LIMITS)
    except (CorruptError, InvalidError):
        pass
    return decoded


def values(width: int, remaining: int) -> Iterator[int]:
    low, high = -(2 ** (8 * width - 1)), 2 ** (8 * width - 1) - 1
    for value in (
        -1,
        0,
        1,
        low,
        low + 1,
        high,
        high - 1,
        remaining - 1,
        remaining,
        remaining + 1,
        2**31 - 1,
        2**63 - 1,
    ):
        if low <= value <= high:
            yield value


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("field", HEADER_FIELDS, ids=[f"R-32-{field}" for field in HEADER_FIELDS])
def test_any_header_field_may_lie(field: str, codec: CodecName) -> None:
    position, kind = HEADER_FIELDS[field]
    sound = build_batch(SMALL, codec=codec, producer_id=1, producer_epoch=0, base_sequence=0)
    assert survives(sound)
    for value in values(struct.calcsize(kind), len(sound) - 12):
        for wrapped in (sound, sound + sound):
            batch = bytearray(wrapped)
            struct.pack_into(kind, batch, position, value if kind != ">I" else value & 0xFFFFFFFF)
            survives(bytes(batch) if field == "crc" else sealed(batch))


def test_a_count_of_two_billion_in_61_bytes_costs_nothing() -> None:
    batch = build_batch([], count=2**31 - 1, last_offset_delta=2**31 - 1, body=b"")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match="says it has 2147483647 records but holds 0"):
            decode(batch, topic="t", partition=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_bit_of_a_batch_is_refused_or_decodes(codec: CodecName) -> None:
    """Flips under a correct CRC; the bits of the records reach the decoder, the codec or both."""
    sound = build_batch(SMALL, codec=codec)
    decoded = 0
    for bit in range(8 * len(sound)):
        flipped = bytearray(sound)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        decoded += survives(sealed(flipped))
    assert decoded > 100  # timestamps, epochs, bytes of values: many flips still make records


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_bit_is_found_by_the_crc_but_in_the_bytes_it_does_not_cover(codec: CodecName) -> None:
    sound = build_batch(SMALL, base_offset=5, codec=codec)
    missed = set()
    for bit in range(8 * len(sound)):
        flipped = bytearray(sound)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        try:
            decode(flipped, topic="t", partition=0)
        except CorruptError:
            continue
        missed.add(bit >> 3)
    assert missed <= {*range(8), *range(12, 16)}  # base offset and leader epoch, which a leader stamps


@pytest.mark.parametrize("codec", CODECS)
def test_every_cut_is_refused(codec: CodecName) -> None:
    sound = build_batch(SMALL, codec=codec)
    for cut in range(len(sound)):
        with pytest.raises(CorruptError):
            decode(sound[:cut] or b"\0", topic="t", partition=0)


def mutated(generator: random.Random, codec: CodecName) -> bytes:
    """A batch whose records, numbers or bytes were tampered with, sealed so that it is believed."""
    body = bytearray(build_batch(SMALL)[61:])
    for _ in range(generator.randrange(1, 4)):
        place = generator.randrange(len(body) + 1)
        match generator.randrange(4):
            case 0:
                body[place:place] = generator.randbytes(generator.randrange(1, 6))
            case 1:
                del body[place : place + generator.randrange(1, 6)]
            case 2:
                exponent = generator.choice([0, 1, 6, 7, 13, 14, 20, 27, 31, 32, 62, 63])
                number = generator.choice([-1, 1]) * 2**exponent + generator.randrange(-1, 2)
                body[place : place + 1] = varint(max(-(2**63), min(number, 2**63 - 1)))
            case _:
                body[place : place + 1] = b"\xff" * generator.randrange(1, 12)
    packed = bytearray(COMPRESS[codec](bytes(body)))
    if generator.random() < 0.3 and packed:
        packed[generator.randrange(len(packed))] ^= 1 << generator.randrange(8)
    return build_batch([], body=bytes(packed), codec=codec, count=generator.randrange(5), last_offset_delta=9)


@pytest.mark.parametrize("codec", CODECS)
def test_tampered_records_give_records_or_a_typed_error(codec: CodecName) -> None:
    """R-31, a short form; the soak runs many more."""
    generator = random.Random(codec)
    decoded = [survives(mutated(generator, codec)) for _ in range(1500)]
    assert 0 < sum(decoded) < len(decoded)


@pytest.mark.soak
@pytest.mark.parametrize("codec", CODECS)
def test_a_million_tampered_records_give_records_or_a_typed_error(codec: CodecName) -> None:
    generator = random.Random(f"soak {codec}")
    for _ in range(200_000):
        survives(mutated(generator, codec))


def test_time_is_linear_in_the_input() -> None:
    """The worst a record can do: headers without end, and lies at the very last byte."""
    record = b"\0\0\0\1\1" + varint(200_000) + b"\0\0" * 200_000
    for tail in (b"", b"\0"):
        body = varint(len(record)) + record + tail
        started = time.process_time()
        survives(build_batch([], body=body, count=1, last_offset_delta=0))
        assert time.process_time() - started < 60  # CPU of 0.4 MB; quadratic time takes minutes


@pytest.mark.parametrize("codec", CODECS[1:])
def test_memory_stays_within_input_and_limit(codec: CodecName) -> None:
    bombs = b"".join(
        build_batch([Rec(value=bytes(60_000))], base_offset=i, codec=codec) for i in range(200)
    )  # 12 MB unfolded, 1 MiB allowed
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidError, match="1048576 bytes"):
            decode(bombs, topic="t", partition=0, limits=LIMITS)
        for piece in decode_pieces(bombs, topic="t", partition=0, limits=LIMITS):
            assert pa.total_allocated_bytes() - before < 1 << 18
            assert piece.num_rows == 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(bombs) + (2 << 20)
