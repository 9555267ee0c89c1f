"""Which partition a row goes to."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.log.format.records import coerce
from tidegate.log.writer import RUN_ROWS, Partitioner, partition_of_key

KEYS = st.lists(st.one_of(st.none(), st.binary(max_size=8)), min_size=1, max_size=60)


def split(
    partitioner: Partitioner, keys: list[bytes | None], explicit: list[int | None] | None = None
) -> dict[int, list[int]]:
    """Partition → the row numbers that went there, in order."""
    values = pa.array([b"%d" % number for number in range(len(keys))], pa.binary())
    columns = coerce(pa.table({"key": pa.array(keys, pa.binary()), "value": values}))
    given_partitions = None if explicit is None else pa.array(explicit, pa.int32())
    return {
        partition: [int(value) for value in rows.value.to_pylist()]
        for partition, rows in partitioner.split(columns, given_partitions)
    }


@given(KEYS, st.integers(1, 9))
@settings(max_examples=150)
def test_every_row_goes_somewhere_once_and_in_order(keys: list[bytes | None], partitions: int) -> None:
    placed = split(Partitioner("t", partitions), keys)
    assert sorted(row for rows in placed.values() for row in rows) == list(range(len(keys)))
    for partition, rows in placed.items():
        assert rows == sorted(rows)
        for row in rows:
            key = keys[row]
            if key is not None and partitions > 1:
                assert partition_of_key(key, partitions) == partition


def test_keys_land_where_kafkas_own_clients_put_them() -> None:
    # murmur2("foobar") = -790332482; its positive form modulo 7, and so on
    assert partition_of_key(b"foobar", 7) == (-790332482 & 0x7FFFFFFF) % 7
    assert partition_of_key(b"21", 100) == (-973932308 & 0x7FFFFFFF) % 100


def test_a_given_partition_wins_over_the_key() -> None:
    placed = split(Partitioner("t", 3), [b"a", b"b", b"c", None], [2, None, 0, 1])
    assert placed[2][0] == 0
    assert 2 in placed[0]
    assert 3 in placed[1]
    assert 1 in placed[partition_of_key(b"b", 3)]


def test_keyless_rows_fill_one_partition_after_the_other_over_calls() -> None:
    partitioner = Partitioner("t", 3, first=1)
    assert split(partitioner, [None] * 5) == {1: [0, 1, 2, 3, 4]}
    assert split(partitioner, [None]) == {2: [0]}
    assert split(partitioner, [None]) == {0: [0]}
    long = split(partitioner, [None] * (RUN_ROWS + 1))
    assert {partition: len(rows) for partition, rows in long.items()} == {1: RUN_ROWS, 2: 1}


def test_a_sliced_key_column_is_read_where_it_lies() -> None:
    table = pa.table({"key": [b"x%d" % i for i in range(50)], "value": [b"%d" % i for i in range(50)]})
    whole = Partitioner("t", 5).choose(coerce(table), None)
    part = Partitioner("t", 5).choose(coerce(table.slice(13, 20)), None)
    assert part.tolist() == whole[13:33].tolist()


@pytest.mark.parametrize(
    ("explicit", "says"),
    [
        (pa.array([3]), "has no partition 3"),
        (pa.array([-1]), "has no partition -1"),
        (pa.array(["a"]), "give partition numbers"),
        (pa.array([2**40]), "has no partition"),
    ],
)
def test_a_partition_the_topic_does_not_have_is_refused(explicit: pa.Array, says: str) -> None:
    columns = coerce(pa.table({"value": [b"x"]}))
    with pytest.raises(InvalidError, match=says):
        list(Partitioner("t", 3).split(columns, explicit))


def test_nothing_is_split_into_nothing() -> None:
    assert split(Partitioner("t", 3), []) == {}
