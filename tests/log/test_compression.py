"""The four framings, byte by byte where others read them, and what bombs and broken streams do."""

import gzip
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import cramjam
import lz4.frame
import pytest
import zstandard

from tidegate.errors import CorruptError, InvalidError
from tidegate.log.format.batch import Codec
from tidegate.log.format.compression import (
    LZ4_BLOCK_BYTES,
    LZ4_HEADER,
    SNAPPY_BLOCK_BYTES,
    XERIAL_HEADER,
    Unpacker,
    compress,
    decompress,
)

PACKED = [codec for codec in Codec if codec is not Codec.NONE]
MIB = 1 << 20


def sample(size: int, seed: int = 1) -> bytes:
    """Half noise, half repetition: compressible, but not to nothing."""
    noise = random.Random(seed).randbytes(size // 2 + 1)
    return b"".join(noise[i : i + 50] + b"abcdefgh" * 6 + b"\n." for i in range(0, size // 2 + 1, 50))[:size]


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize(
    "size", [0, 1, 100, SNAPPY_BLOCK_BYTES - 1, SNAPPY_BLOCK_BYTES, 200_000, 3 * MIB + 7]
)
def test_what_goes_in_comes_out(codec: Codec, size: int) -> None:
    data = sample(size)
    assert decompress(codec, compress(codec, data), limit=max(size, 1)) == data


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer_goes_in(codec: Codec, kind: Callable[[bytes], bytes]) -> None:
    data = sample(5000)
    packed = compress(codec, kind(data))
    assert decompress(codec, kind(bytes(packed)), limit=5000) == data


# -- what others read -----------------------------------------------------------------------------


def test_gzip_is_read_by_another_gzip() -> None:
    assert gzip.decompress(compress(Codec.GZIP, sample(70_000))) == sample(70_000)
    assert decompress(Codec.GZIP, gzip.compress(b"theirs"), limit=10) == b"theirs"


def test_zstd_is_read_by_another_zstd_with_and_without_a_content_size() -> None:
    ours = bytes(compress(Codec.ZSTD, sample(300_000)))
    assert zstandard.ZstdDecompressor().decompressobj().decompress(ours) == sample(300_000)
    for told in (True, False):
        theirs = zstandard.ZstdCompressor(write_content_size=told).compress(sample(300_000))
        assert decompress(Codec.ZSTD, theirs, limit=MIB) == sample(300_000)


@pytest.mark.parametrize("level", [None, 1, 9, 12])
@pytest.mark.parametrize("data", [b"", b"a", sample(300_000), random.Random(1).randbytes(200_000)])
def test_lz4_frames_have_independent_blocks_and_no_content_checksum(level: int | None, data: bytes) -> None:
    ours = bytes(compress(Codec.LZ4, data, level=level))
    about = lz4.frame.get_frame_info(ours)
    assert (about["block_linked"], about["content_checksum"]) == (False, False)
    assert about["block_size"] == 64 << 10
    assert about["block_checksum"] == (level not in (None, 9))
    assert lz4.frame.decompress(ours) == data
    theirs = lz4.frame.compress(data, block_linked=False)
    assert decompress(Codec.LZ4, theirs, limit=MIB) == data


def test_snappy_has_the_xerial_frame_with_blocks_of_32_kib() -> None:
    packed = bytes(compress(Codec.SNAPPY, sample(2 * SNAPPY_BLOCK_BYTES + 5)))
    assert packed[:16] == bytes.fromhex("82534e415050590000000001 00000001") == XERIAL_HEADER
    position, blocks = 16, []
    while position < len(packed):
        (length,) = struct.unpack_from(">i", packed, position)
        position += 4
        blocks.append(bytes(cramjam.snappy.decompress_raw(packed[position : position + length])))
        position += length
    assert [len(block) for block in blocks] == [SNAPPY_BLOCK_BYTES, SNAPPY_BLOCK_BYTES, 5]
    assert b"".join(blocks) == sample(2 * SNAPPY_BLOCK_BYTES + 5)


def test_snappy_without_the_frame_is_one_raw_block() -> None:
    raw = bytes(cramjam.snappy.compress_raw(sample(100_000)))
    assert decompress(Codec.SNAPPY, raw, limit=MIB) == sample(100_000)


def test_snappy_versions_written_little_endian_are_no_matter() -> None:
    packed = bytearray(compress(Codec.SNAPPY, b"hello"))
    packed[8:16] = struct.pack("<ii", 1, 1)
    assert decompress(Codec.SNAPPY, packed, limit=10) == b"hello"


# -- levels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "level"),
    [
        (Codec.GZIP, -1),
        (Codec.GZIP, 9),
        (Codec.LZ4, 1),
        (Codec.LZ4, 17),
        (Codec.ZSTD, -131072),
        (Codec.ZSTD, 22),
    ],
)
def test_every_level_kafka_has_works(codec: Codec, level: int) -> None:
    assert decompress(codec, compress(codec, sample(10_000), level=level), limit=10_000) == sample(10_000)


@pytest.mark.parametrize(
    ("codec", "level"), [(Codec.GZIP, 0), (Codec.GZIP, 10), (Codec.LZ4, 0), (Codec.LZ4, 18), (Codec.ZSTD, 23)]
)
def test_a_level_kafka_does_not_have_is_invalid(codec: Codec, level: int) -> None:
    with pytest.raises(InvalidError, match=f"no level {level}"):
        compress(codec, b"x", level=level)


def test_a_higher_level_is_smaller() -> None:
    text = " ".join(str(n * n) for n in range(30_000)).encode()
    for codec, high in ((Codec.GZIP, 9), (Codec.LZ4, 12), (Codec.ZSTD, 19)):
        low = 1 if codec is not Codec.LZ4 else None
        assert len(compress(codec, text, level=high)) < len(compress(codec, text, level=low))


# -- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", Codec)
def test_the_limit_is_exact(codec: Codec) -> None:
    packed = compress(codec, sample(50_000))
    assert len(decompress(codec, packed, limit=50_000)) == 50_000
    with pytest.raises(CorruptError, match="49999"):
        decompress(codec, packed, limit=49_999)


def test_an_unpacker_uses_its_memory_again_for_batches_of_any_size_and_codec() -> None:
    unpacker = Unpacker(MIB)
    for size in (100, 300_000, 7, 0, 1_000_000, 50_000):
        for codec in Codec:
            assert unpacker.unpack(codec, compress(codec, sample(size, seed=size))) == sample(size, seed=size)
        with pytest.raises(CorruptError):
            unpacker.unpack(Codec.ZSTD, b"broken")


@pytest.mark.parametrize("size", [0, 100, 40_000, 300_000])
def test_an_unpacker_begins_with_memory_it_is_given_and_keeps_to_its_limit(size: int) -> None:
    memory = memoryview(bytearray(100_000))
    for codec in PACKED:
        packed = compress(codec, sample(size))
        assert Unpacker(max(size, 1), memory).unpack(codec, packed) == sample(size)
        if size:
            with pytest.raises(CorruptError, match=f"{size - 1} bytes"):
                Unpacker(size - 1, memory).unpack(codec, packed)


def zstd_runs(times: int) -> bytes:
    """A frame of run-length blocks: 4 bytes become 128 KiB, `times` times. 32 768-fold."""
    block = struct.pack("<I", (128 << 10) << 3 | 1 << 1)[:3] + b"x"
    last = struct.pack("<I", (128 << 10) << 3 | 1 << 1 | 1)[:3] + b"x"
    return bytes.fromhex("28b52ffd 00 38") + block * (times - 1) + last


def zstd_with_window(log: int) -> bytes:
    """A frame that asks its reader to keep 2**log bytes."""
    wide = zstandard.ZstdCompressionParameters(window_log=log, write_content_size=0)
    stream = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    return stream.compress(ZEROS) + stream.flush()


def xerial(*blocks: bytes) -> bytes:
    return XERIAL_HEADER + b"".join(struct.pack(">i", len(block)) + block for block in blocks)


ZEROS = bytes(64 * MIB)
BOMBS = {
    "gzip-1000x": (Codec.GZIP, lambda: bytes(cramjam.gzip.compress(ZEROS))),
    "gzip-members": (Codec.GZIP, lambda: gzip.compress(bytes(MIB)) * 64),
    "lz4-255x": (Codec.LZ4, lambda: bytes(compress(Codec.LZ4, ZEROS))),
    "lz4-frames": (Codec.LZ4, lambda: bytes(compress(Codec.LZ4, bytes(MIB))) * 64),
    "zstd-10000x": (Codec.ZSTD, lambda: bytes(cramjam.zstd.compress(ZEROS, level=3))),
    "zstd-30000x": (Codec.ZSTD, lambda: zstd_runs(512)),
    "zstd-frames": (Codec.ZSTD, lambda: bytes(cramjam.zstd.compress(bytes(MIB), level=3)) * 64),
    "zstd-long-window": (
        Codec.ZSTD,
        lambda: zstd_with_window(27),
    ),
    "snappy-20x": (Codec.SNAPPY, lambda: bytes(compress(Codec.SNAPPY, ZEROS))),
    "snappy-raw": (Codec.SNAPPY, lambda: bytes(cramjam.snappy.compress_raw(ZEROS))),
    "snappy-lies": (Codec.SNAPPY, lambda: xerial(*[b"\xff\xff\xff\xff\x0f\x00"] * 1000)),
}


@pytest.mark.parametrize(("codec", "bomb"), BOMBS.values(), ids=[f"R-33-{name}" for name in BOMBS])
def test_a_bomb_stops_at_the_limit(codec: Codec, bomb: Callable[[], bytes]) -> None:
    packed, limit = bomb(), 4 * MIB
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match=f"{limit} bytes"):
            decompress(codec, packed, limit=limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit + MIB


MEASURED_IN_A_PROCESS_OF_ITS_OWN = """
import resource, sys
from tidegate.errors import CorruptError
from tidegate.log.format.batch import Codec
from tidegate.log.format.compression import decompress

codec, path, limit = Codec(int(sys.argv[1])), sys.argv[2], int(sys.argv[3])
packed = open(path, "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decompress(codec, packed, limit=limit)
except CorruptError:
    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.parametrize("name", ["gzip-1000x", "lz4-255x", "zstd-30000x", "zstd-long-window", "snappy-raw"])
def test_a_bomb_takes_no_more_of_the_machine_than_the_limit(name: str, tmp_path: Path) -> None:
    codec, bomb = BOMBS[name]
    (tmp_path / "bomb").write_bytes(bomb())
    run = [sys.executable, "-c", MEASURED_IN_A_PROCESS_OF_ITS_OWN, str(int(codec)), str(tmp_path / "bomb")]
    grown = subprocess.run([*run, str(4 * MIB)], check=True, capture_output=True, text=True).stdout
    assert int(grown) <= 4 * MIB + 16 * MIB


def test_a_window_beyond_what_zstd_allows_is_refused() -> None:
    with pytest.raises(CorruptError, match=r"zstd data does not decompress .*memory"):
        decompress(Codec.ZSTD, zstd_with_window(28), limit=100 * MIB)


@pytest.mark.parametrize(
    ("codec", "stream"),
    [
        pytest.param(Codec.ZSTD, bytes.fromhex("28b52ffd 00 38 010000") * 50_000, id="zstd-empty-frames"),
        pytest.param(Codec.SNAPPY, xerial(*[b"\0"] * 50_000), id="snappy-empty-blocks"),
        pytest.param(Codec.SNAPPY, xerial(), id="snappy-no-block"),
        pytest.param(Codec.LZ4, bytes.fromhex("04224d187040ad00000000") * 50_000, id="lz4-empty-frames"),
        pytest.param(Codec.GZIP, gzip.compress(b"") * 20_000, id="gzip-empty-members"),
    ],
)
def test_endless_nothing_is_nothing(codec: Codec, stream: bytes) -> None:
    assert decompress(codec, stream, limit=100) == b""


# -- broken streams -------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", PACKED)
def test_a_stream_cut_anywhere_is_corrupt_or_shorter_never_something_else(codec: Codec) -> None:
    data = sample(400)
    packed = bytes(compress(codec, data))
    for cut in range(len(packed)):
        try:
            part = decompress(codec, packed[:cut], limit=1000)
        except CorruptError:
            continue
        assert codec is Codec.SNAPPY  # whose frame does not say where it ends
        assert data.startswith(bytes(part))


@pytest.mark.parametrize("codec", PACKED)
def test_any_flipped_bit_gives_bytes_or_corrupt_error(codec: Codec) -> None:
    packed = bytes(compress(codec, sample(120)))
    for bit in range(8 * len(packed)):
        broken = bytearray(packed)
        broken[bit >> 3] ^= 1 << (bit & 7)
        try:
            assert len(decompress(codec, broken, limit=5000)) <= 5000
        except CorruptError:
            pass


@pytest.mark.parametrize("codec", PACKED)
def test_noise_gives_bytes_or_corrupt_error(codec: Codec) -> None:
    generator = random.Random(5)
    start = bytes(compress(codec, b"start" * 50))
    for _ in range(1500):
        noise = start[: generator.randrange(len(start))] + generator.randbytes(generator.randrange(60))
        try:
            assert len(decompress(codec, noise, limit=5000)) <= 5000
        except CorruptError:
            pass


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(XERIAL_HEADER + b"\0\0", id="cut-length"),
        pytest.param(XERIAL_HEADER + struct.pack(">i", -1) + b"abc", id="negative-length"),
        pytest.param(XERIAL_HEADER + struct.pack(">i", 4) + b"abc", id="long-length"),
        pytest.param(XERIAL_HEADER + struct.pack(">i", 2**31 - 1) + b"abc", id="huge-length"),
    ],
)
def test_a_snappy_block_length_that_lies_is_corrupt(stream: bytes) -> None:
    with pytest.raises(CorruptError, match="ends inside its block at 16"):
        decompress(Codec.SNAPPY, stream, limit=100)


# -- LZ4, block by block --------------------------------------------------------------------------


def lz4_frame(*blocks: bytes) -> bytes:
    return LZ4_HEADER + b"".join(struct.pack("<I", len(block)) + block for block in blocks) + bytes(4)


def lz4_result(decompressed: Callable[[], memoryview | bytes]) -> bytes | None:
    try:
        return bytes(decompressed())
    except (CorruptError, cramjam.DecompressionError):
        return None


def lz4_streams(generator: random.Random) -> list[bytes]:
    """Sound frames, and frames of blocks that begin as a size would."""
    noise = generator.randbytes(LZ4_BLOCK_BYTES + 10)
    sound = [bytes(compress(Codec.LZ4, data)) for data in (b"", b"a", sample(150_000), noise, sample(400))]
    tiny = bytes(cramjam.lz4.compress_block(bytes([20, 0, 0, 0, 1]) + noise[:9], store_size=False))
    sized = [bytes([first, 1, 0, 0]) + tiny for first in (0x00, 0x0F, 0x10, 0x40, 0xF0)]
    return [*sound, *map(lz4_frame, sized), lz4_frame(tiny), lz4_frame(tiny, sized[1], tiny), sound[1] * 2]


def test_lz4_block_by_block_is_what_a_reader_of_frames_finds() -> None:
    generator, outcomes = random.Random(11), set()
    for stream in lz4_streams(generator):
        for attempt in range(200):
            changed = bytearray(stream)
            for _ in range(attempt % 4):
                at = generator.randrange(min(len(changed), generator.choice([12, 40, len(changed)])))
                changed[at] ^= 1 << generator.randrange(8)
            if attempt % 10 == 9:
                del changed[generator.randrange(len(changed)) :]
            packed = bytes(changed)
            ours = lz4_result(lambda packed=packed: decompress(Codec.LZ4, packed, limit=MIB))
            room = memoryview(bytearray(MIB))
            whole = lz4_result(lambda p=packed, room=room: room[: cramjam.lz4.decompress_into(p, room)])
            assert ours == whole, packed.hex()[:200]
            outcomes.add(ours is None)
    assert outcomes == {True, False}


def test_an_lz4_block_that_begins_with_a_size_is_not_read_as_if_it_did() -> None:
    inner = b"\x50hello"
    both_ways = b"\x90\0\0\0" + inner  # nine literals; or a size, and five
    only_sized = bytes.fromhex("0f010000") + inner  # as a block: copy what is before the start
    assert decompress(Codec.LZ4, lz4_frame(both_ways), limit=MIB) == b"\0\0\0" + inner
    with pytest.raises(CorruptError):
        decompress(Codec.LZ4, lz4_frame(only_sized), limit=MIB)


@pytest.mark.parametrize("offset", [0, 1, 2, 1000, 65535])
def test_lz4_never_shows_what_was_in_memory_before(offset: int) -> None:
    copies = (
        b"\x1fx" + struct.pack("<H", offset) + b"\x30" + b"\x50plain"
    )  # 1 literal, then 67 bytes from there
    memory = memoryview(bytearray(b"secret" * 100_000))
    stream = lz4_frame(bytes(cramjam.lz4.compress_block(b"first" * 9, store_size=False)), copies)
    shown = lz4_result(lambda: Unpacker(MIB, memory).unpack(Codec.LZ4, stream))
    assert (shown is None) == (offset > 1)
    assert shown is None or not set(b"ec") & set(shown)
