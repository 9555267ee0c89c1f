"""What writers and readers of every kind of log do alike: collected by the tests that give a `log`.

`log` has an empty topic `t` of four partitions.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tidegate.errors import InvalidError, OffsetOutOfRangeError
from tidegate.log.format.records import RECORD_SCHEMA
from tidegate.log.writer import partition_of_key

PARTITIONS = 4  # what the mock cluster gives every topic


def rows(first: int, last: int, **columns: Any) -> pa.Table:
    return pa.table({"value": [b"%d" % number for number in range(first, last)], **columns})


def read(log: Any, *arguments: Any, **settings: Any) -> list[int]:
    with log.reader("t", *arguments, **settings) as reader:
        return [int(value) for batch in reader for value in batch.column("value").to_pylist()]


def test_what_is_written_is_read_in_order(log: Any) -> None:
    with log.writer("t") as writer:
        written = writer.write(rows(0, 100), partition=1)
    assert sum(batch.records for batch in written) == 100
    assert read(log, [1]) == list(range(100))
    assert read(log) == list(range(100))
    assert read(log, [0]) == []


def test_every_field_comes_back(log: Any) -> None:
    table = pa.table(
        {
            "key": pa.array([b"k", None, b""], pa.binary()),
            "value": pa.array([b"\x00\xff", None, b""], pa.binary()),
            "timestamp": [1_767_225_600_001, 1_767_225_600_002, 1_767_225_600_003],
            "partition": pa.array([2, 2, 2], pa.int32()),
            "headers": pa.array(
                [[("h", b"1"), ("n", None)], [], None],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
        }
    )
    with log.writer("t", compression="gzip") as writer:
        writer.write(table)
    with log.reader("t", [2]) as reader:
        batches = list(reader)
    assert all(batch.schema == RECORD_SCHEMA for batch in batches)
    back = pa.Table.from_batches(batches, RECORD_SCHEMA)
    assert back.column("topic").to_pylist() == ["t"] * 3
    assert back.column("offset").to_pylist() == [0, 1, 2]
    for name in ("key", "value", "partition"):
        assert back.column(name).to_pylist() == table.column(name).to_pylist()
    assert back.column("timestamp").cast(pa.int64()).to_pylist() == table.column("timestamp").to_pylist()
    assert back.column("headers").to_pylist() == [
        [{"key": "h", "value": b"1"}, {"key": "n", "value": None}],
        [],
        [],
    ]


def test_keys_go_to_the_same_partitions(log: Any) -> None:
    keys = [b"key-%d" % number for number in range(40)]
    with log.writer("t") as writer:
        writer.write(rows(0, 40, key=keys))
    with log.reader("t") as reader:
        placed = {
            key: partition
            for batch in reader
            for key, partition in zip(
                batch.column("key").to_pylist(), batch.column("partition").to_pylist(), strict=True
            )
        }
    assert placed == {key: partition_of_key(key, PARTITIONS) for key in keys}


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        ("earliest", None, range(20)),
        ("latest", None, range(0)),
        (7, None, range(7, 20)),
        (20, None, range(0)),
        (-3, None, range(17, 20)),
        (5, 9, range(5, 9)),
        ("start", "end", range(20)),
        ({3: 18}, {3: 19}, range(18, 19)),
    ],
)
def test_start_and_stop(log: Any, start: Any, stop: Any, expected: range) -> None:
    with log.writer("t") as writer:
        writer.write(rows(0, 20), partition=3)
    assert read(log, [3], start=start, stop=stop) == list(expected)


def test_polling_positions_and_seeking(log: Any) -> None:
    with log.writer("t") as writer, log.reader("t", [0], start="latest") as reader:
        assert reader.poll() is None
        writer.write(rows(0, 5), partition=0)
        seen: list[int] = []
        while len(seen) < 5:
            batch = reader.poll("20s")
            assert batch is not None
            seen += [int(value) for value in batch.column("value").to_pylist()]
        assert seen == [0, 1, 2, 3, 4]
        assert reader.positions() == {0: 5}
        assert reader.end_offsets() == {0: 5}
        assert not reader.is_done
        reader.seek(0, 3)
        batch = reader.poll("20s")
        assert batch is not None
        assert batch.column("offset")[0].as_py() == 3


def offsets_of(batch: Any) -> tuple[int, list[int]]:
    """The partition of a batch, and its offsets."""
    assert batch is not None
    (number,) = set(batch.column("partition").to_pylist())
    return number, batch.column("offset").to_pylist()


def test_positions_follow_what_was_handed_out(log: Any) -> None:
    """Of several partitions fetched at once, those nobody got yet are still to be read, also by the next reader."""
    with log.writer("t") as writer:
        for number in range(PARTITIONS):
            writer.write(rows(0, 10), partition=number)
    with log.reader("t") as reader:
        expected = dict.fromkeys(range(PARTITIONS), 0)
        while sum(expected.values()) < 10 * PARTITIONS:
            number, offsets = offsets_of(reader.poll("20s"))
            assert offsets[0] == expected[number]
            expected[number] = offsets[-1] + 1
            assert reader.positions() == expected
            if sum(expected.values()) == 20:
                with log.reader("t", start=reader.positions()) as following:
                    assert sum(batch.num_rows for batch in following) == 20


def test_seeking_in_one_partition_leaves_the_others_where_they_are(log: Any) -> None:
    with log.writer("t") as writer:
        for number in range(PARTITIONS):
            writer.write(rows(0, 10), partition=number)
    with log.reader("t") as reader:
        first, seen = offsets_of(reader.poll("20s"))
        seen_of: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
        seen_of[first] = list(seen)
        reader.seek(first, 7)
        assert reader.positions() == dict.fromkeys(range(PARTITIONS), 0) | {first: 7}
        while sum(map(len, seen_of.values())) < 10 * (PARTITIONS - 1) + len(seen) + 3:
            number, offsets = offsets_of(reader.poll("20s"))
            seen_of[number] += offsets
    whole = {number: list(range(10)) for number in range(PARTITIONS)}
    assert seen_of == whole | {first: [*seen, 7, 8, 9]}


def test_seeking_where_nothing_is_read_is_refused(log: Any) -> None:
    with (
        log.reader("t", [1, 2]) as reader,
        pytest.raises(InvalidError, match="partition 3 of t is not read here"),
    ):
        reader.seek(3, 0)


def test_iterating_leaves_a_reader_that_can_be_polled_on(log: Any) -> None:
    with log.writer("t") as writer, log.reader("t", [0]) as reader:
        writer.write(rows(0, 5), partition=0)
        assert sum(batch.num_rows for batch in reader) == 5
        assert not reader.is_done and reader.poll() is None
        writer.write(rows(5, 8), partition=0)
        seen = list[int]()
        while len(seen) < 3:  # a cluster may send them one after another
            number, offsets = offsets_of(reader.poll("20s"))
            assert number == 0
            seen += offsets
        assert seen == [5, 6, 7]
        writer.write(rows(8, 9), partition=0)
        assert [offsets_of(batch) for batch in reader] == [(0, [8])]


def test_iterating_that_is_left_in_the_middle_goes_on_where_it_was(log: Any) -> None:
    with log.writer("t") as writer:
        for number in range(PARTITIONS):
            writer.write(rows(0, 10), partition=number)
    with log.reader("t") as reader:
        for batch in reader:
            first = offsets_of(batch)
            break
        assert sum(reader.positions().values()) == 10 and first[1] == list(range(10))
        rest = [offsets_of(batch) for batch in reader]
    assert sorted(rest) == [(each, list(range(10))) for each in range(PARTITIONS) if each != first[0]]


def test_a_stop_is_kept_by_iterating(log: Any) -> None:
    with log.writer("t") as writer:
        writer.write(rows(0, 10), partition=0)
    with log.reader("t", [0], stop=4) as reader:
        assert sum(batch.num_rows for batch in reader) == 4
        assert reader.is_done and reader.poll() is None and list(reader) == []
        assert reader.positions() == {0: 4}


def test_a_write_that_failed_leaves_nothing_to_the_next_one(log: Any) -> None:
    """What is told of a write is its own: no offset and no error of one before it."""
    with log.writer("t") as writer:
        with pytest.raises(InvalidError):
            writer.write(pa.table({"value": [b"small", b"x" * (3 << 20), b"small"]}), partition=0)
        for number in range(3):
            written = writer.write(rows(number, number + 2), partition=1)
            assert [(each.partition, each.first_offset, each.records) for each in written] == [
                (1, 2 * number, 2)
            ]
    assert read(log, [1]) == [0, 1, 1, 2, 2, 3]


def test_offsets_that_are_not_there(log: Any) -> None:
    with pytest.raises(OffsetOutOfRangeError) as refused, log.reader("t", [0], start=99) as reader:
        for _ in range(20):
            reader.poll("1s")
    assert refused.value.kafka_name == "OFFSET_OUT_OF_RANGE"
    assert (refused.value.offset, refused.value.end) == (99, 0)


def test_what_does_not_exist_is_said_so(log: Any) -> None:
    for use in (lambda: log.reader("tt"), lambda: log.writer("tt")):
        with pytest.raises(InvalidError, match="did you mean t") as unknown:
            use()
        assert unknown.value.kafka_name == "UNKNOWN_TOPIC_OR_PARTITION"
    with pytest.raises(InvalidError, match="has no partition 9"):
        log.reader("t", [9])
