"""A table of keys that are in memory: key hash → last tick, bytes of rows, bytes of state.

    slot    hash int64 | tick int64 | rows int64 | state int64        32 bytes, never across two cache lines

Open addressing with linear probing in one flat array of slots, whose number is a power of two. A slot whose two
byte counts are both 0 is empty, so a key vanishes when its last byte does. Removing moves later keys of the same
stretch back, so there are no tombstones and probing stays short.

A table is never full: `add_bytes` stops before that and its caller brings a larger one (`rehash`).
"""

from __future__ import annotations

from typing import Any, Final

from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import INT64, INT64S, READ_INT64S, kernel
from tidegate.kernels.memory import load, pointer, store

SLOT: Final = 4  # numbers in a slot
HASH: Final = 0
TICK: Final = 1
ROWS: Final = 2
STATE: Final = 3

SCATTER: Final = 0x1E3779B97F4A7C15  # odd

FULL: Final = 1  # the next key needs a larger table
BELOW_ZERO: Final = 2  # the next key has fewer bytes than are taken from it


@register_jitable(forceinline=True)
def home(key: int, mask: int) -> int:
    """Which slot a key would like; mixed, so that similar numbers lie apart (`mask` is below 2³²)."""
    mixed = key * SCATTER
    return (mixed ^ (mixed >> 32)) & mask


@register_jitable(forceinline=True)
def is_empty(slots: Any, place: int) -> bool:
    return (load(slots, SLOT * place + ROWS) | load(slots, SLOT * place + STATE)) == 0


@register_jitable(forceinline=True)
def find(slots: Any, mask: int, key: int) -> int:
    """The key's slot, or the empty one where it belongs."""
    place = home(key, mask)
    while load(slots, SLOT * place + HASH) != key and not is_empty(slots, place):
        place = (place + 1) & mask
    return place


@register_jitable
def take_out(slots: Any, mask: int, place: int) -> None:
    """Close the gap that a slot, whose bytes are 0 already, leaves in the stretch behind it."""
    hole, place = place, (place + 1) & mask
    while not is_empty(slots, place):
        wanted = home(load(slots, SLOT * place + HASH), mask)
        if ((place - wanted) & mask) >= ((place - hole) & mask):
            for part in range(SLOT):
                store(slots, SLOT * hole + part, load(slots, SLOT * place + part))
            store(slots, SLOT * place + ROWS, 0)
            store(slots, SLOT * place + STATE, 0)
            hole = place
        place = (place + 1) & mask


@kernel(INT64(INT64S, READ_INT64S, READ_INT64S, INT64, INT64, INT64, INT64S))
def add_bytes(
    table: Any, keys: Any, amounts: Any, column: int, tick: int, most_keys: int, progress: Any
) -> int:
    """Add `amounts` to the keys' bytes in `column` (`ROWS`, `STATE`); below 0 is refused, a new key gets `tick`.

    `progress` is (next key to do, keys in the table) and is brought up to date. 0 when all are done, else why it
    stopped: `FULL` beyond `most_keys`, which is below the number of slots, or `BELOW_ZERO`.
    """
    slots, source, sizes = pointer(table), pointer(keys), pointer(amounts)
    mask, index, count, status = len(table) // SLOT - 1, progress[0], progress[1], 0
    while index < len(keys):
        key, amount = load(source, index), load(sizes, index)
        place = find(slots, mask, key)
        fresh = is_empty(slots, place)
        after = load(slots, SLOT * place + column) + amount
        if after < 0:
            status = BELOW_ZERO
            break
        if fresh and amount != 0:
            if count >= most_keys:
                status = FULL
                break
            store(slots, SLOT * place + HASH, key)
            store(slots, SLOT * place + TICK, tick)
            count += 1
        store(slots, SLOT * place + column, after)
        if not fresh and is_empty(slots, place):
            take_out(slots, mask, place)
            count -= 1
        index += 1
    progress[0], progress[1] = index, count
    return status


@kernel(types.void(INT64S, READ_INT64S, INT64))
def touch(table: Any, keys: Any, tick: int) -> None:
    """Keys that are in the table were used at this tick; an older one changes nothing."""
    slots, source, mask = pointer(table), pointer(keys), len(table) // SLOT - 1
    for index in range(len(keys)):
        place = find(slots, mask, load(source, index))
        if not is_empty(slots, place):
            store(slots, SLOT * place + TICK, max(tick, load(slots, SLOT * place + TICK)))


@kernel(types.void(INT64S, READ_INT64S, INT64S))
def look_up(table: Any, keys: Any, found: Any) -> None:
    """The bytes of each key, rows and state together, into `found`; 0 for those that are not in the table."""
    slots, source, target, mask = pointer(table), pointer(keys), pointer(found), len(table) // SLOT - 1
    for index in range(len(keys)):
        place = find(slots, mask, load(source, index))
        held = load(slots, SLOT * place + ROWS) + load(slots, SLOT * place + STATE)
        store(target, index, held)


@kernel(INT64(INT64S, READ_INT64S))
def drop(table: Any, keys: Any) -> int:
    """Take keys out whatever bytes they have; how many there were."""
    slots, source, mask, found = pointer(table), pointer(keys), len(table) // SLOT - 1, 0
    for index in range(len(keys)):
        place = find(slots, mask, load(source, index))
        if not is_empty(slots, place):
            store(slots, SLOT * place + ROWS, 0)
            store(slots, SLOT * place + STATE, 0)
            take_out(slots, mask, place)
            found += 1
    return found


@kernel(types.void(INT64S, INT64S))
def rehash(old: Any, new: Any) -> None:
    """Bring every key of `old` into `new`, which is empty and large enough."""
    slots, target, mask = pointer(old), pointer(new), len(new) // SLOT - 1
    for place in range(len(old) // SLOT):
        if not is_empty(slots, place):
            into = find(target, mask, load(slots, SLOT * place + HASH))
            for part in range(SLOT):
                store(target, SLOT * into + part, load(slots, SLOT * place + part))


@kernel(INT64(INT64S, INT64S, INT64, INT64, INT64S, INT64S, INT64S))
def free_keys(table: Any, holds: Any, column: int, least: int, hashes: Any, ticks: Any, nbytes: Any) -> int:
    """Hash, tick and bytes in `column` of every key that `holds` does not hold and that has `least` bytes there.

    The three targets have room for every key of the table. How many there are.
    """
    slots, held, mask = pointer(table), pointer(holds), len(holds) // SLOT - 1
    to_hash, to_tick, to_bytes = pointer(hashes), pointer(ticks), pointer(nbytes)
    room, count = min(len(hashes), min(len(ticks), len(nbytes))), 0
    for place in range(len(table) // SLOT):
        size = load(slots, SLOT * place + column)
        if size < least or is_empty(slots, place) or count >= room:
            continue
        key = load(slots, SLOT * place + HASH)
        if is_empty(held, find(held, mask, key)):
            store(to_hash, count, key)
            store(to_tick, count, load(slots, SLOT * place + TICK))
            store(to_bytes, count, size)
            count += 1
    return count
