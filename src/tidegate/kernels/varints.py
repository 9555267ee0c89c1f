"""Zig-zag varints (Kafka's varint and varlong): 7 bits a byte, lowest first, at most 5 or 10 bytes.

    0 → 00    -1 → 01    1 → 02    63 → 7e    -64 → 7f    64 → 80 01    2147483647 → fe ff ff ff 0f

Readers never look at or beyond `end`. One that finds no number there answers position `end + 1`, from
where every further read fails the same way; so a kernel may read a whole record and then ask once whether
the position is still inside. Bits above the 32nd (64th) are dropped, as Java drops them.
"""

from __future__ import annotations

from typing import Any

from numba.extending import register_jitable

from tidegate.kernels.memory import load, store


@register_jitable(forceinline=True)
def read_varint(source: Any, position: int, end: int) -> tuple[int, int]:
    """The 32-bit number at `position`, and the position after it (`end + 1` when there is none)."""
    if position >= end:
        return 0, end + 1
    raw = load(source, position)
    if raw < 0x80:
        return (raw >> 1) ^ -(raw & 1), position + 1
    if position + 1 < end:  # two bytes are so common that they are worth their own lines
        byte = load(source, position + 1)
        if byte < 0x80:
            raw = (raw & 0x7F) | byte << 7
            return (raw >> 1) ^ -(raw & 1), position + 2
    raw, position = read_raw(source, position, end, 5)
    raw &= 0xFFFFFFFF
    return (raw >> 1) ^ -(raw & 1), position


@register_jitable(forceinline=True)
def read_varlong(source: Any, position: int, end: int) -> tuple[int, int]:
    """The 64-bit number at `position`, and the position after it (`end + 1` when there is none)."""
    if position >= end:
        return 0, end + 1
    raw = load(source, position)
    if raw < 0x80:
        return (raw >> 1) ^ -(raw & 1), position + 1
    if position + 1 < end:
        byte = load(source, position + 1)
        if byte < 0x80:
            raw = (raw & 0x7F) | byte << 7
            return (raw >> 1) ^ -(raw & 1), position + 2
    raw, position = read_raw(source, position, end, 10)
    # the shift must not carry the sign along: in compiled code `raw` is a signed 64-bit number
    return ((raw >> 1) & 0x7FFFFFFFFFFFFFFF) ^ -(raw & 1), position


@register_jitable
def read_raw(source: Any, position: int, end: int, places: int) -> tuple[int, int]:
    """The number at `position` before zig-zag, of at most `places` bytes; (0, `end + 1`) when there is none."""
    raw = 0
    for place in range(places):
        if position + place >= end:
            return 0, end + 1
        byte = load(source, position + place)
        raw |= (byte & (0x7F if place < 9 else 0x01)) << 7 * place
        if byte < 0x80:
            return raw, position + place + 1
    return 0, end + 1


@register_jitable
def varint_size(value: int) -> int:
    """Bytes of `value` as a varint or varlong: both encode a number they share alike."""
    raw = (value << 1) ^ (value >> 63)
    if raw < 0:  # the 64th bit is set: compiled code sees a negative number
        return 10
    size = 1
    while raw >= 0x80:
        raw >>= 7
        size += 1
    return size


@register_jitable
def write_varint(target: Any, position: int, value: int) -> int:
    """Write `value` at `position`, where the caller knows there is room; the position after it."""
    raw = (value << 1) ^ (value >> 63)
    while raw < 0 or raw >= 0x80:
        store(target, position, (raw & 0x7F) | 0x80)
        raw = (raw >> 7) & 0x01FFFFFFFFFFFFFF
        position += 1
    store(target, position, raw)
    return position + 1
