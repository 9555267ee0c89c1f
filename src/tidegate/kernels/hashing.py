"""Hashes and checksums of columns: XXH64, murmur2, CRC-32, SipHash, and a table of key fingerprints.

Columns are Arrow binary columns: one byte buffer and n + 1 int32 offsets, which never decrease, end inside the buffer
and need not start at 0; a mask says which rows have a value.

XXH64 is that of the xxHash specification 0.1.1 with seed 0. Murmur2 is Kafka's partitioner: seed and sign bit as there.

An unfinished CRC-32 (zlib's) is inverted, in a 64-bit number: it begins as `ONES` and ends with `^ ONES`. Processors
with carry-less multiplication take sixteen bytes per step: the remainder of a polynomial is that of its high half times
a constant plus its low half, so 128 bits fold onto the next 128 by two multiplications. The rest, and other processors,
use tables of eight bytes per step.

The fingerprint of a key is SipHash-2-4 with 128 bits of output under a random secret per table: keys collide by chance
only (about n²/2^129) and are not stored. The table is one C-ordered uint64 row of three words for each slot,

    | low half of the fingerprint | high half | offset + 1 |

where a last word of 0 marks an empty slot. A fingerprint starts at slot (its bits 32 to 63) × slots / 2^32 and probes
linearly; entries are never removed. The caller keeps at least one slot empty, so that a look-up ends.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target

from tidegate.kernels.jit import (
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    READ_FLAGS,
    READ_INT32S,
    READ_INT64S,
    UINT64S,
    helper,
    int64,
    kernel,
    load,
    load_word,
    lowered,
    place,
    pointer,
    store,
)

# -- XXH64 -----------------------------------------------------------------------------------------

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_START1 = np.uint64(0x60EA27EEADC0B5D6)  # P1 + P2, and P1 taken from zero
_START4 = np.uint64(0x61C8864E7A143579)
_U64, _HALF = np.uint64(64), np.uint64(32)
_U1, _U7, _U11, _U12, _U18, _U23, _U27, _U29, _U31, _U33 = (
    np.uint64(bits) for bits in (1, 7, 11, 12, 18, 23, 27, 29, 31, 33)
)


@helper
def _rotate(word: Any, bits: Any) -> Any:
    return (word << bits) | (word >> (_U64 - bits))


@helper
def _round(lane: Any, word: Any) -> Any:
    return _rotate(lane + word * _P2, _U31) * _P1


@helper
def _merge_lane(digest: Any, lane: Any) -> Any:
    return (digest ^ _round(np.uint64(0), lane)) * _P1 + _P4


@helper
def xxh64(data: Any, start: int, stop: int) -> Any:
    """XXH64, seed 0, of data[start:stop]; `data` is a pointer to bytes."""
    at = start
    if stop - start >= 32:
        lane1, lane2, lane3, lane4 = _START1, _P2, np.uint64(0), _START4
        while stop - at >= 32:
            lane1 = _round(lane1, load_word(data, at))
            lane2 = _round(lane2, load_word(data, at + 8))
            lane3 = _round(lane3, load_word(data, at + 16))
            lane4 = _round(lane4, load_word(data, at + 24))
            at += 32
        digest = _rotate(lane1, _U1) + _rotate(lane2, _U7) + _rotate(lane3, _U12) + _rotate(lane4, _U18)
        digest = _merge_lane(_merge_lane(digest, lane1), lane2)
        digest = _merge_lane(_merge_lane(digest, lane3), lane4)
    else:
        digest = _P5
    digest += np.uint64(stop - start)
    while stop - at >= 8:
        digest = _rotate(digest ^ _round(np.uint64(0), load_word(data, at)), _U27) * _P1 + _P4
        at += 8
    if stop - at >= 4:
        low = np.uint64(load(data, at)) | (np.uint64(load(data, at + 1)) << np.uint64(8))
        high = np.uint64(load(data, at + 2)) | (np.uint64(load(data, at + 3)) << np.uint64(8))
        digest = _rotate(digest ^ ((low | (high << np.uint64(16))) * _P1), _U23) * _P2 + _P3
        at += 4
    while at < stop:
        digest = _rotate(digest ^ (np.uint64(load(data, at)) * _P5), _U11) * _P1
        at += 1
    digest = (digest ^ (digest >> _U33)) * _P2
    digest = (digest ^ (digest >> _U29)) * _P3
    return digest ^ (digest >> _HALF)


@kernel(types.void(READ_BYTES, READ_INT32S, UINT64S))
def hash_values(data: Any, bounds: Any, hashes: Any) -> None:
    """Write the hash of each value to `hashes`."""
    source = pointer(data)
    for row in range(hashes.shape[0]):
        hashes[row] = xxh64(source, int64(bounds[row]), int64(bounds[row + 1]))


# -- murmur2, Kafka's partitioner ------------------------------------------------------------------

_SEED = 0x9747B28C
_MULTIPLIER = 0x5BD1E995
_MASK = 0xFFFFFFFF


@helper
def _murmur2(source: Any, start: Any, end: Any) -> Any:
    """The unsigned 32-bit hash of source[start:end]."""
    length = end - start
    h = _SEED ^ length
    position = start
    while position + 4 <= end:
        k = (
            load(source, position)
            | load(source, position + 1) << 8
            | load(source, position + 2) << 16
            | load(source, position + 3) << 24
        )
        k = (k * _MULTIPLIER) & _MASK
        k ^= k >> 24
        k = (k * _MULTIPLIER) & _MASK
        h = ((h * _MULTIPLIER) & _MASK) ^ k
        position += 4
    rest = end - position
    if rest >= 3:
        h ^= load(source, position + 2) << 16
    if rest >= 2:
        h ^= load(source, position + 1) << 8
    if rest >= 1:
        h ^= load(source, position)
        h = (h * _MULTIPLIER) & _MASK
    h ^= h >> 13
    h = (h * _MULTIPLIER) & _MASK
    return h ^ (h >> 15)


@kernel(INT64(READ_BYTES))
def murmur2(key: Any) -> Any:
    """Kafka's hash of one key, as an unsigned number."""
    return _murmur2(pointer(key), 0, key.shape[0])


@kernel(types.void(READ_BYTES, READ_INT32S, READ_FLAGS, INT64, INT32S))
def partitions_of_keys(data: Any, bounds: Any, has_key: Any, partitions: Any, chosen: Any) -> Any:
    """Fill `chosen` with each row's partition; rows without a key are left as they are."""
    source = pointer(data)
    limits = pointer(bounds)
    target = pointer(chosen)
    for row in range(has_key.shape[0]):
        if has_key[row]:
            positive = _murmur2(source, load(limits, row), load(limits, row + 1)) & 0x7FFFFFFF
            store(target, row, positive % partitions)


# -- CRC-32 ----------------------------------------------------------------------------------------

ONES: Final = 0xFFFFFFFF
BLOCK: Final = 16
_POLYNOMIAL: Final = 0xEDB88320
_SHIFTED_POLYNOMIAL: Final = 0x1DB710641  # the polynomial, bits in reverse, with its top bit
_QUOTIENT: Final = 0x1F7011641  # x^64 divided by it
_OVER_128: Final = 0x1751997D0  # x^(128+32), x^(128-32) and x^64 modulo it
_OVER_64: Final = 0x0CCAA009E
_OVER_32: Final = 0x163CD6124
MULTIPLIES: Final = "+pclmul" in str(cpu_target.target_context.codegen().magic_tuple())


def _tables() -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Row k maps a byte to its effect on the CRC k bytes later."""
    tables = np.zeros((8, 256), dtype=np.uint32)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        tables[0, byte] = crc
    for row in range(1, 8):
        before = tables[row - 1]
        tables[row] = (before >> 8) ^ tables[0][before & 0xFF]
    return tables


_T: Final = _tables()


@helper
def fold_int32(crc: Any, value: Any) -> Any:
    """Add four bytes to the CRC: the low half of `value`, big-endian."""
    first = _T[3, (crc ^ (value >> 24)) & 0xFF] ^ _T[2, ((crc >> 8) ^ (value >> 16)) & 0xFF]
    second = _T[1, ((crc >> 16) ^ (value >> 8)) & 0xFF] ^ _T[0, ((crc >> 24) ^ value) & 0xFF]
    return np.int64(first ^ second)


@helper
def fold_int64(crc: Any, value: Any) -> Any:
    """Add eight bytes to the CRC: `value`, big-endian."""
    return fold_int32(fold_int32(crc, value >> 32), value)


@helper
def fold_bytes(crc: Any, data: Any, start: Any, stop: Any) -> Any:
    """Add the bytes data[start:stop] to the CRC; `data` is a pointer."""
    at = start
    if MULTIPLIES and stop - at >= BLOCK:
        blocks = (stop - at) >> 4
        crc = fold_blocks(crc, data, at, blocks)
        at += blocks << 4
    while stop - at >= 8:
        early = _T[7, (crc ^ load(data, at)) & 0xFF] ^ _T[6, ((crc >> 8) ^ load(data, at + 1)) & 0xFF]
        early ^= _T[5, ((crc >> 16) ^ load(data, at + 2)) & 0xFF]
        early ^= _T[4, ((crc >> 24) ^ load(data, at + 3)) & 0xFF]
        late = _T[3, load(data, at + 4)] ^ _T[2, load(data, at + 5)]
        late ^= _T[1, load(data, at + 6)] ^ _T[0, load(data, at + 7)]
        crc = np.int64(early ^ late)
        at += 8
    if stop - at >= 4:
        early = _T[3, (crc ^ load(data, at)) & 0xFF] ^ _T[2, ((crc >> 8) ^ load(data, at + 1)) & 0xFF]
        late = _T[1, ((crc >> 16) ^ load(data, at + 2)) & 0xFF]
        late ^= _T[0, ((crc >> 24) ^ load(data, at + 3)) & 0xFF]
        crc = np.int64(early ^ late)
        at += 4
    while at < stop:
        crc = np.int64(_T[0, (crc ^ load(data, at)) & 0xFF]) ^ (crc >> 8)
        at += 1
    return crc


def fold_blocks(crc: int, data: Any, start: int, blocks: int) -> int:
    """Add `blocks` times sixteen bytes from `start` to the CRC, at least one block."""
    stop = start + BLOCK * blocks
    if blocks < 1 or not 0 <= start <= len(data) - BLOCK * blocks:
        raise IndexError(f"blocks from {start} to {stop} of {len(data)} bytes")
    return zlib.crc32(bytes(data[start:stop]), int(crc) ^ ONES) ^ ONES


_WORD: Final = ir.IntType(64)
_PAIR: Final = ir.VectorType(_WORD, 2)
_WIDE: Final = ir.IntType(128)


def _pair(low: int, high: int) -> Any:
    return ir.Constant(_PAIR, [low, high])


@lowered(
    fold_blocks,
    lambda crc, data, start, blocks: types.int64(types.int64, data, types.int64, types.int64),
)
def _fold_blocks(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    first_crc, data, first, count = arguments
    length = builder.shl(count, ir.Constant(_WORD, 4))
    source = place(context, builder, signature.args[1], data, first, length)
    multiply_type = ir.FunctionType(_PAIR, [_PAIR, _PAIR, ir.IntType(8)])
    multiply = builder.module.globals.get("llvm.x86.pclmulqdq") or ir.Function(
        builder.module, multiply_type, "llvm.x86.pclmulqdq"
    )

    def times(left: Any, right: Any, halves: int) -> Any:
        """Carry-less product of a half of `left` (low digit of `halves`) and a half of `right` (high digit)."""
        return builder.call(multiply, [left, right, ir.Constant(ir.IntType(8), halves)])

    def block_at(position: Any) -> Any:
        where = builder.bitcast(builder.gep(source, [position]), _PAIR.as_pointer())
        return builder.load(where, align=1)

    def shifted(pair: Any, bits: int) -> Any:
        wide = builder.lshr(builder.bitcast(pair, _WIDE), ir.Constant(_WIDE, bits))
        return builder.bitcast(wide, _PAIR)

    zero = ir.Constant(ir.IntType(32), 0)
    begin = builder.insert_element(_pair(0, 0), first_crc, zero)
    begin = builder.xor(begin, block_at(ir.Constant(_WORD, 0)))
    before = builder.block
    looping = builder.append_basic_block("fold.loop")
    step = builder.append_basic_block("fold.step")
    done = builder.append_basic_block("fold.done")
    builder.branch(looping)

    builder.position_at_end(looping)
    folded, number = builder.phi(_PAIR), builder.phi(_WORD)
    folded.add_incoming(begin, before)
    number.add_incoming(ir.Constant(_WORD, 1), before)
    builder.cbranch(builder.icmp_signed("<", number, count), step, done)

    builder.position_at_end(step)
    over = _pair(_OVER_128, _OVER_64)
    position = builder.shl(number, ir.Constant(_WORD, 4))
    onto = builder.xor(times(folded, over, 0x00), times(folded, over, 0x11))
    folded.add_incoming(builder.xor(onto, block_at(position)), step)
    number.add_incoming(builder.add(number, ir.Constant(_WORD, 1)), step)
    builder.branch(looping)

    builder.position_at_end(done)
    low_words = _pair(ONES, ONES)
    rest = builder.xor(shifted(folded, 64), times(folded, over, 0x10))
    rest = builder.xor(shifted(rest, 32), times(builder.and_(rest, low_words), _pair(_OVER_32, 0), 0x00))
    divisor = _pair(_SHIFTED_POLYNOMIAL, _QUOTIENT)
    quotient = builder.and_(times(builder.and_(rest, low_words), divisor, 0x10), low_words)
    rest = builder.xor(rest, times(quotient, divisor, 0x00))
    return builder.lshr(builder.extract_element(rest, zero), ir.Constant(_WORD, 32))


# -- SipHash and the table of key fingerprints -----------------------------------------------------

_types: Any = types  # numba gives some of its types no annotations
UINT64 = types.uint64
INT64_PAIR = _types.UniTuple(types.int64, 2)
TABLE = types.Array(types.uint64, 2, "C")
PRINTS = types.Array(types.uint64, 2, "C")
READ_PRINTS = types.Array(types.uint64, 2, "C", readonly=True)
_U8 = np.uint64(8)
_U13, _U16, _U17, _U21, _U32 = (np.uint64(bits) for bits in (13, 16, 17, 21, 32))
_FINAL, _SECOND = np.uint64(0xEE), np.uint64(0xDD)


@helper
def _sip_round(v0: Any, v1: Any, v2: Any, v3: Any) -> Any:
    v0 += v1
    v1 = _rotate(v1, _U13) ^ v0
    v0 = _rotate(v0, _U32)
    v2 += v3
    v3 = _rotate(v3, _U16) ^ v2
    v0 += v3
    v3 = _rotate(v3, _U21) ^ v0
    v2 += v1
    v1 = _rotate(v1, _U17) ^ v2
    v2 = _rotate(v2, _U32)
    return v0, v1, v2, v3


@helper(forceinline=True)
def begin_sip(secret0: Any, secret1: Any) -> Any:
    return (
        secret0 ^ np.uint64(0x736F6D6570736575),
        secret1 ^ np.uint64(0x646F72616E646F6D) ^ _FINAL,
        secret0 ^ np.uint64(0x6C7967656E657261),
        secret1 ^ np.uint64(0x7465646279746573),
    )


@helper(forceinline=True)
def absorb_word(v0: Any, v1: Any, v2: Any, v3: Any, word: Any) -> Any:
    v3 ^= word
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@helper(forceinline=True)
def _four_rounds(v0: Any, v1: Any, v2: Any, v3: Any) -> Any:
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    return _sip_round(v0, v1, v2, v3)


@helper(forceinline=True)
def finish_sip(v0: Any, v1: Any, v2: Any, v3: Any) -> Any:
    """The two words of the fingerprint."""
    v0, v1, v2, v3 = _four_rounds(v0, v1, v2 ^ _FINAL, v3)
    low = v0 ^ v1 ^ v2 ^ v3
    v0, v1, v2, v3 = _four_rounds(v0, v1 ^ _SECOND, v2, v3)
    return low, v0 ^ v1 ^ v2 ^ v3


@helper
def _fingerprint(data: Any, start: Any, end: Any, secret0: Any, secret1: Any) -> Any:
    """SipHash-2-4-128 of data[start:end]: (low half, high half)."""
    v0, v1, v2, v3 = begin_sip(secret0, secret1)
    position = start
    while position + 8 <= end:
        v0, v1, v2, v3 = absorb_word(v0, v1, v2, v3, load_word(data, position))
        position += 8
    word = np.uint64((end - start) & 0xFF) << np.uint64(56)
    for i in range(end - position):
        word |= np.uint64(load(data, position + i)) << (np.uint64(i) * _U8)
    v0, v1, v2, v3 = absorb_word(v0, v1, v2, v3, word)
    return finish_sip(v0, v1, v2, v3)


@kernel(types.void(READ_BYTES, READ_INT32S, READ_FLAGS, UINT64, UINT64, PRINTS))
def fingerprint_keys(data: Any, bounds: Any, mask: Any, secret0: Any, secret1: Any, prints: Any) -> None:
    """The fingerprint of each masked row's key, low half first. Bounds lie inside the data and never fall."""
    source = pointer(data)
    for row in range(mask.shape[0]):
        if mask[row]:
            low, high = _fingerprint(source, bounds[row], bounds[row + 1], secret0, secret1)
            prints[row, 0] = low
            prints[row, 1] = high


@helper
def _slot(table: Any, low: Any, high: Any) -> Any:
    """The slot that holds the fingerprint, or the empty one where it belongs."""
    slots = table.shape[0]
    slot: Any = np.int64(((low >> _U32) * np.uint64(slots)) >> _U32)
    while table[slot, 2] != 0 and (table[slot, 0] != low or table[slot, 1] != high):
        slot += 1
        if slot == slots:
            slot = 0
    return slot


@kernel(INT64_PAIR(TABLE, INT64, INT64, READ_PRINTS, READ_INT64S, READ_FLAGS, INT64))
def put_prints(table: Any, entries: Any, limit: Any, prints: Any, offsets: Any, mask: Any, first: Any) -> Any:
    """Map each masked row's fingerprint to its offset, from row `first` on: (rows done, entries).

    Stops before the first masked row that finds `limit` entries there, whether or not its key is known.
    """
    rows = mask.shape[0]
    for row in range(first, rows):
        if not mask[row]:
            continue
        if entries >= limit:
            return row, entries
        slot = _slot(table, prints[row, 0], prints[row, 1])
        if table[slot, 2] == 0:
            table[slot, 0] = prints[row, 0]
            table[slot, 1] = prints[row, 1]
            entries += 1
        table[slot, 2] = np.uint64(offsets[row] + 1)
    return np.int64(rows), entries


@kernel(types.void(TABLE, READ_PRINTS, READ_FLAGS, INT64S))
def get_prints(table: Any, prints: Any, mask: Any, found: Any) -> None:
    """Fill `found` with each masked row's mapped offset, -1 for an unknown key and for rows not masked."""
    for row in range(mask.shape[0]):
        if mask[row]:
            found[row] = np.int64(table[_slot(table, prints[row, 0], prints[row, 1]), 2]) - 1
        else:
            found[row] = -1


@kernel(types.void(TABLE, TABLE))
def move_prints(source: Any, target: Any) -> None:
    """Put every entry of `source` into the empty, larger `target`."""
    for row in range(source.shape[0]):
        if source[row, 2] != 0:
            slot = _slot(target, source[row, 0], source[row, 1])
            for word in range(3):
                target[slot, word] = source[row, word]
