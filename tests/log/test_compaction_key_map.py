"""The cleaner's key map: bounded, growing, and as forgetful as Kafka's."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tidegate.errors import InvalidError
from tidegate.log.compaction_filter import SLOT_BYTES, KeyMap
from tidegate.randomness import SeededRandomness


def key_map(slots: int = 1000, load_factor: float = 0.9) -> KeyMap:
    return KeyMap(SeededRandomness(7), memory_bytes=slots * SLOT_BYTES, load_factor=load_factor)


def put(target: KeyMap, keys: list[bytes], first_offset: int = 0) -> int:
    offsets = np.arange(first_offset, first_offset + len(keys), dtype=np.int64)
    return target.put(pa.array(keys, pa.binary()), offsets, np.ones(len(keys), bool))


def get(target: KeyMap, keys: list[bytes]) -> list[int]:
    return target.get(pa.array(keys, pa.binary()), np.ones(len(keys), bool)).tolist()


def test_map_holds_slots_times_load_factor_keys_and_then_refuses_even_known_ones() -> None:
    target = key_map(slots=10, load_factor=0.9)
    keys = [b"%d" % i for i in range(9)]
    assert put(target, keys) == 9
    assert target.full
    assert put(target, [b"0"], 100) == 0
    assert get(target, [b"0", b"8"]) == [0, 8]


def test_later_offset_of_a_key_replaces_the_earlier() -> None:
    target = key_map()
    assert put(target, [b"a", b"b", b"a"], 5) == 3
    assert get(target, [b"a", b"b", b"c"]) == [7, 6, -1]


def test_map_grows_to_many_keys_and_keeps_them_all() -> None:
    target = key_map(slots=200_000)
    keys = [b"key-%d" % i for i in range(100_000)]
    assert put(target, keys[:60_000]) == 60_000
    assert put(target, keys[60_000:], 60_000) == 40_000
    assert target.entries == 100_000
    assert get(target, keys) == list(range(100_000))


def test_small_map_costs_little_memory_until_keys_come() -> None:
    target = KeyMap(SeededRandomness(1))
    assert target.slots == 128 * 1024 * 1024 // 24
    assert target._table.nbytes < 200_000


def test_full_load_factor_still_ends_a_search_for_an_unknown_key() -> None:
    target = key_map(slots=4, load_factor=1.0)
    assert put(target, [b"a", b"b", b"c", b"d", b"e"]) == 4
    assert get(target, [b"zz", b"d"]) == [-1, 3]


def test_sliced_key_column_is_read_from_its_own_rows() -> None:
    target = key_map()
    keys = pa.array([b"x", b"long key", b"y"], pa.binary()).slice(1)
    target.put(keys, np.array([10, 11], np.int64), np.ones(2, bool))
    assert get(target, [b"x", b"long key", b"y"]) == [-1, 10, 11]


@pytest.mark.parametrize(("memory_bytes", "load_factor"), [(24, 0.9), (0, 0.9), (2400, 0.0)])
def test_map_too_small_for_one_key_is_refused(memory_bytes: int, load_factor: float) -> None:
    with pytest.raises(InvalidError, match=r"log\.cleaner\.dedupe\.buffer\.size"):
        KeyMap(SeededRandomness(1), memory_bytes=memory_bytes, load_factor=load_factor)
