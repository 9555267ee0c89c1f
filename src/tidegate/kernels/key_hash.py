"""Record keys as 128-bit fingerprints in an open-addressing table: key → the last offset it was seen at.

The fingerprint is SipHash-2-4 with 128 bits of output under a secret drawn for each table, so two keys meet
by chance only (about n²/2^129) and nobody who chooses keys can make them meet; nothing of a key is stored.

Table: one C-ordered uint64 row of three words for each slot,

    | low half of the fingerprint | high half | offset + 1 |

where a last word of 0 marks an empty slot. A fingerprint starts at slot (its bits 32 to 63) × slots / 2^32
and moves on by one slot until it is found or a slot is empty; nothing is ever removed, so there are no
holes. The caller keeps at least one slot empty, or a look-up would never end.

Keys arrive as Arrow binary columns do: one byte buffer and n + 1 int32 offsets, with a mask of the rows that
take part. Fingerprints are made for many keys before any is looked up: then the look-ups, which mostly wait for
memory, wait together. All kernels release the interpreter lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import INT64, INT64S, READ_BYTES, READ_INT32S, READ_INT64S, kernel
from tidegate.kernels.key_bytes import load_word
from tidegate.kernels.memory import load, pointer

_types: Any = types  # numba gives some of its types no annotations
UINT64 = types.uint64
INT64_PAIR = _types.UniTuple(types.int64, 2)
READ_FLAGS = types.Array(types.boolean, 1, "C", readonly=True)
TABLE = types.Array(types.uint64, 2, "C")
PRINTS = types.Array(types.uint64, 2, "C")
READ_PRINTS = types.Array(types.uint64, 2, "C", readonly=True)

_U8 = np.uint64(8)
_U13, _U16, _U17, _U21, _U32 = (np.uint64(bits) for bits in (13, 16, 17, 21, 32))
_FINAL, _SECOND = np.uint64(0xEE), np.uint64(0xDD)


@register_jitable
def _rotate(word: Any, bits: Any) -> Any:
    return (word << bits) | (word >> (np.uint64(64) - bits))


@register_jitable
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


@register_jitable(forceinline=True)
def begin_sip(secret0: Any, secret1: Any) -> Any:
    return (
        secret0 ^ np.uint64(0x736F6D6570736575),
        secret1 ^ np.uint64(0x646F72616E646F6D) ^ _FINAL,
        secret0 ^ np.uint64(0x6C7967656E657261),
        secret1 ^ np.uint64(0x7465646279746573),
    )


@register_jitable(forceinline=True)
def absorb_word(v0: Any, v1: Any, v2: Any, v3: Any, word: Any) -> Any:
    v3 ^= word
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@register_jitable(forceinline=True)
def _four_rounds(v0: Any, v1: Any, v2: Any, v3: Any) -> Any:
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    return _sip_round(v0, v1, v2, v3)


@register_jitable(forceinline=True)
def finish_sip(v0: Any, v1: Any, v2: Any, v3: Any) -> Any:
    """The two words of the fingerprint."""
    v0, v1, v2, v3 = _four_rounds(v0, v1, v2 ^ _FINAL, v3)
    low = v0 ^ v1 ^ v2 ^ v3
    v0, v1, v2, v3 = _four_rounds(v0, v1 ^ _SECOND, v2, v3)
    return low, v0 ^ v1 ^ v2 ^ v3


@register_jitable
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


@register_jitable
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
