"""The cleaner's memory: for each key of the dirty range, the last offset it was seen at, in bounded space.

Owns the table's size and growth; hashing and probing are `kernels.key_hash`. A slot takes 24 bytes, as
Kafka's own map does, so `log.cleaner.dedupe.buffer.size` means the same number of keys here; a key is known
by a keyed 128-bit fingerprint where Kafka uses MD5.

Invariants:
M1  At most `slots × load factor` keys are held; a key that comes when that many are there is refused even if
    it is known, which is where Kafka's map stops too, so one pass covers the same offsets.
M2  The table starts small and grows by eight until it has all its slots, so a small log costs little and
    growing never holds more than 9/8 of the limit.

Thread rule: one cleaning uses one map; not shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tidegate.errors import InvalidError
from tidegate.kernels.hashing import fingerprint_keys, get_prints, move_prints, put_prints

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.randomness import Randomness

SLOT_BYTES = 24
DEFAULT_BYTES = 128 * 1024 * 1024
DEFAULT_LOAD_FACTOR = 0.9

_FIRST_SLOTS = 1 << 12
_GROWTH = 8
# Below its full size the table is kept sparse: probes are short and a growth step is rare.
_SPARSE = 0.5


class KeyMap:
    """Key → last offset, for at most `memory_bytes`."""

    def __init__(
        self,
        randomness: Randomness,
        *,
        memory_bytes: int = DEFAULT_BYTES,
        load_factor: float = DEFAULT_LOAD_FACTOR,
    ) -> None:
        self.slots = min(memory_bytes // SLOT_BYTES, 2**31 - 1)
        self.capacity = int(self.slots * load_factor)
        if self.capacity < 1 or not 0 < load_factor <= 1:
            raise InvalidError(
                f"{memory_bytes} bytes at load factor {load_factor} hold not a single key, so compaction "
                f"would never progress; raise log.cleaner.dedupe.buffer.size",
                kafka_name="INVALID_CONFIG",
            )
        self.entries = 0
        self._secret = (np.uint64(randomness.below(2**64)), np.uint64(randomness.below(2**64)))
        self._table = self._empty_table(min(self.slots, _FIRST_SLOTS))

    @property
    def full(self) -> bool:
        return self.entries >= self.capacity

    def put(self, keys: pa.Array, offsets: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> int:
        """Map each masked row's key to its offset, in row order: how many rows were done (M1).

        Less than all of them means the map is full and the row at that position did not fit.
        """
        prints = self._fingerprints(keys, mask)
        row = 0
        while True:
            limit = self._limit()
            row, self.entries = put_prints(self._table, self.entries, limit, prints, offsets, mask, row)
            if row == len(mask) or limit == self.capacity:
                return int(row)
            self._grow()

    def get(self, keys: pa.Array, mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Each masked row's last offset; -1 where the key is unknown or the row is not masked."""
        found = np.empty(len(mask), np.int64)
        get_prints(self._table, self._fingerprints(keys, mask), mask, found)
        return found

    def _fingerprints(self, keys: pa.Array, mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        bounds, data = key_buffers(keys)
        prints = np.empty((len(mask), 2), np.uint64)
        fingerprint_keys(data, bounds, mask, *self._secret, prints)
        return prints

    def _limit(self) -> int:
        """How many entries the table may hold before it grows or is full."""
        size = len(self._table)
        return self.capacity if size == self._full_size() else min(self.capacity, int(size * _SPARSE))

    def _full_size(self) -> int:
        # A look-up of an unknown key ends at an empty slot, so one is always left.
        return max(self.slots, self.capacity + 1)

    def _grow(self) -> None:
        target = self._empty_table(min(self._full_size(), len(self._table) * _GROWTH))
        move_prints(self._table, target)
        self._table = target

    def _empty_table(self, slots: int) -> np.ndarray[Any, Any]:
        return np.zeros((max(slots, 2), 3), np.uint64)


def key_buffers(keys: pa.Array) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The n + 1 int32 bounds and the bytes of an Arrow binary column, not copied."""
    _, bounds_buffer, data_buffer = keys.buffers()
    if bounds_buffer is None or len(keys) == 0:
        return np.zeros(len(keys) + 1, np.int32), np.empty(0, np.uint8)
    bounds = np.frombuffer(bounds_buffer, np.int32)[keys.offset : keys.offset + len(keys) + 1]
    if data_buffer is None:
        return bounds, np.empty(0, np.uint8)
    return bounds, np.frombuffer(data_buffer, np.uint8)
