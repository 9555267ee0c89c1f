"""CRC-32 (IEEE, zlib's) inside kernels.

Owns the arithmetic; what is checksummed is the caller's. A CRC on its way is a 64-bit number whose upper half
is zero, inverted: it begins as `ONES` and ends by `^ ONES`, as zlib does inside.

Sixteen bytes a step where the processor multiplies without carries (x86 `pclmulqdq`, chosen when the module is
loaded; numba keeps compiled kernels apart by processor): the remainder of a polynomial is the remainder of
its high half times a constant plus its low half, so 128 bits fold onto the next 128 by two multiplications,
and two more steps bring 128 bits to 32. What is left, and everything elsewhere, goes through tables of eight
bytes a step.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba.core.registry import cpu_target
from numba.extending import register_jitable

from tidegate.kernels.memory import load, lowered, place, types

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
    """Row k turns a byte into its effect on the CRC k bytes later."""
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


@register_jitable
def fold_int32(crc: Any, value: Any) -> Any:
    """Four more bytes: the low half of `value`, big-endian."""
    first = _T[3, (crc ^ (value >> 24)) & 0xFF] ^ _T[2, ((crc >> 8) ^ (value >> 16)) & 0xFF]
    second = _T[1, ((crc >> 16) ^ (value >> 8)) & 0xFF] ^ _T[0, ((crc >> 24) ^ value) & 0xFF]
    return np.int64(first ^ second)


@register_jitable
def fold_int64(crc: Any, value: Any) -> Any:
    """Eight more bytes: `value`, big-endian."""
    return fold_int32(fold_int32(crc, value >> 32), value)


@register_jitable
def fold_bytes(crc: Any, data: Any, start: Any, stop: Any) -> Any:
    """The bytes data[start:stop] more; `data` is a pointer."""
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
    """`blocks` times sixteen bytes from `start` more, at least one block."""
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
        """Half of `left` (low digit of `halves`) times half of `right` (high digit)."""
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
