"""Comparing topics: equal is proven, and every kind of difference is told as a naive comparison tells it."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.cli.main import run
from tidegate.integrity import compare as comparing
from tidegate.integrity.compare import Comparison, Kind, compare_topics, join_blocks, longest_rising
from tidegate.integrity.digests import Parts, TopicAt
from tidegate.log.log import Log

Record = tuple[bytes | None, bytes | None]


class Inline:
    """Workers in this process, in any order, with everything sent and received."""

    workers = 3

    def run(self, work: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        for item in random.Random(1).sample(list(items), len(items)):
            yield pickle.loads(pickle.dumps(work(pickle.loads(pickle.dumps(item)))))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "BLOCK_BITS", 3)


def topic(path: Path, partitions: Sequence[Sequence[Record]], name: str = "orders") -> TopicAt:
    with Log(path, durability="os") as log:
        log.create_topic(name, len(partitions))
        with log.writer(name) as writer:
            for number, records in enumerate(partitions):
                if records:
                    keys, values = zip(*records, strict=True)
                    table = pa.table(
                        {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}
                    )
                    writer.write(table, partition=number)
    return TopicAt(str(path), name)


def records(count: int, first: int = 0) -> list[Record]:
    return [(b"k%d" % (n % 17), b"value %d" % n) for n in range(first, first + count)]


def kinds(found: Comparison) -> dict[str, int]:
    return {kind.value: count for kind, count in found.counts.items()}


@pytest.mark.parametrize("runner", [None, Inline()], ids=["here", "elsewhere"])
def test_a_copy_is_proven_equal_though_its_offsets_differ(tmp_path: Path, runner: Any) -> None:
    one = topic(tmp_path / "a", [records(500), records(90)])
    with Log(tmp_path / "b", durability="os") as log:
        log.create_topic("orders", 2)
        log.partition("orders", 0).truncate_fully(700)
        with log.writer("orders") as writer:
            for number, content in enumerate((records(500), records(90))):
                for start in range(0, len(content), 64):
                    keys, values = zip(*content[start : start + 64], strict=True)
                    writer.write(pa.table({"key": keys, "value": values}), partition=number)
    found = compare_topics(one, TopicAt(str(tmp_path / "b"), "orders"), runner=runner, smallest=50)
    assert found.is_equal and found.by == "partition"
    assert [each.records for each in found.partitions] == [(500, 500), (90, 90)]


@pytest.mark.parametrize("runner", [None, Inline()], ids=["here", "elsewhere"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda r: r[:40] + r[43:], {"missing": 3}),
        (lambda r: [*r[:40], r[40], *r[40:]], {"duplicate": 1}),
        (lambda r: [*r[:40], (r[40][0], b"other"), *r[41:]], {"changed": 1}),
        (lambda r: [*r[:40], (b"new", b"new"), *r[40:]], {"extra": 1}),
        (lambda r: [*r[:40], r[41], r[40], *r[42:]], {"moved": 1}),
        (lambda r: [*r[:40], *r[41:380], r[40], *r[380:]], {"moved": 1}),
        (lambda r: r[:-7], {"missing": 7}),
        (lambda _: [], {"missing": 400}),
    ],
    ids=["lost", "repeated", "changed", "added", "swapped", "moved far", "tail", "nothing"],
)
def test_each_kind_of_difference_is_told(
    change: Callable[[list[Record]], list[Record]], expected: dict[str, int], runner: Any, tmp_path: Path
) -> None:
    given = records(400)
    one, other = topic(tmp_path / "a", [given]), topic(tmp_path / "b", [change(given)])
    found = compare_topics(one, other, runner=runner, smallest=60)
    assert kinds(found) == expected and not found.is_equal
    assert found.partitions[0].ranges
    example = found.partitions[0].examples[0]
    if example.kind not in (Kind.EXTRA, Kind.DUPLICATE):
        assert example.a in (40, 41, 393, *range(40, 43), 0)


def test_a_record_in_another_partition_moved(tmp_path: Path) -> None:
    left, right = records(200), records(200, 1000)
    one = topic(tmp_path / "a", [left, right])
    other = topic(tmp_path / "b", [left[:50] + left[51:], [*right[:20], left[50], *right[20:]]])
    found = compare_topics(one, other)
    assert kinds(found) == {"moved": 1}
    (example,) = found.partitions[0].examples
    assert example.as_dict() == {
        "kind": "moved", "partition": 0, "offset_a": 50, "offset_b": 20, "key": "k16", "partition_b": 1,
    }  # fmt: skip


def test_other_numbers_of_partitions_are_compared_by_key(tmp_path: Path) -> None:
    given = records(300)
    one = topic(tmp_path / "a", [given[:150], given[150:]])
    other = topic(tmp_path / "b", [given[::3], given[1::3], given[2::3]])
    found = compare_topics(one, other, runner=Inline(), smallest=40)
    assert found.is_equal and found.by == "key" and found.partitions[0].records == (300, 300)
    third = topic(tmp_path / "c", [given[::3], given[1::3], [*given[2:299:3], (b"k0", b"else")]])
    changed = compare_topics(one, third)
    assert kinds(changed) in ({"changed": 1}, {"missing": 1, "extra": 1})


def test_random_edits_are_counted_as_sets_of_records_say(tmp_path: Path) -> None:
    chance = random.Random(7)
    for number in range(25):
        given = records(chance.randint(0, 200))
        copy = list(given)
        for _ in range(chance.randint(0, 6)):
            at = chance.randint(0, len(copy))
            match chance.randrange(4):
                case 0:
                    del copy[at : at + chance.randint(1, 4)]
                case 1:
                    copy[at:at] = [(b"k%d" % chance.randrange(17), b"new %d" % chance.getrandbits(40))]
                case 2:
                    copy[at:at] = copy[at : at + 2]
                case 3:
                    chance.shuffle(part := copy[at : at + 5])
                    copy[at : at + 5] = part
        one, other = topic(tmp_path / f"a{number}", [given]), topic(tmp_path / f"b{number}", [copy])
        found = compare_topics(one, other, runner=Inline(), smallest=chance.choice([10, 33, 1000]))
        assert found.is_equal == (given == copy)
        told = kinds(found)
        assert told.get("missing", 0) + told.get("changed", 0) == len(_left_over(given, copy))
        assert told.get("extra", 0) + told.get("changed", 0) + told.get("duplicate", 0) == len(
            _left_over(copy, given)
        )


def test_edits_of_few_different_records_are_counted_as_sets_of_records_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that is missing in one stretch and an extra one in another is neither missing nor changed."""
    monkeypatch.setattr(comparing, "BLOCK_BITS", 2)
    chance = random.Random(2)
    for number in range(25):
        few = chance.choice([2, 5])
        fields = [None, b"", *(b"%d" % n for n in range(few))]
        given = [(chance.choice(fields), chance.choice(fields)) for _ in range(chance.randint(1, 150))]
        copy = list(given)
        for _ in range(chance.randint(0, 4)):
            at, stop = sorted(chance.choices(range(len(copy) + 1), k=2))
            match chance.randrange(4):
                case 0:
                    del copy[at : at + 20]
                case 1:
                    copy[at:at] = [(None, b"")]
                case 2:
                    copy[at:stop] = chance.sample(copy[at:stop], stop - at)
                case 3:
                    copy = copy[at:] + copy[:at]
        one, other = topic(tmp_path / f"a{number}", [given]), topic(tmp_path / f"b{number}", [copy])
        lost, more = len(_left_over(given, copy)), len(_left_over(copy, given))
        for by, equal in (("partition", given == copy), ("key", not lost and not more)):
            found = compare_topics(one, other, by=by, smallest=chance.choice([10, 1000]))
            told = kinds(found)
            assert found.is_equal == equal
            assert told.get("missing", 0) + told.get("changed", 0) == lost
            assert told.get("extra", 0) + told.get("changed", 0) + told.get("duplicate", 0) == more


def _left_over(one: list[Record], other: list[Record]) -> list[Record]:
    rest = list(other)
    left = []
    for record in one:
        if record in rest:
            rest.remove(record)
        else:
            left.append(record)
    return left


def test_what_counts_is_chosen(tmp_path: Path) -> None:
    for name, time, header in (("a", 1000, b"1"), ("b", 2000, b"2")):
        with Log(tmp_path / name, durability="os") as log:
            log.create_topic("orders", 1)
            rows = [
                {"key": b"k", "value": b"v", "timestamp": time, "headers": [{"key": "h", "value": header}]}
            ]
            with log.writer("orders") as writer:
                writer.write(pa.Table.from_pylist(rows))
    one, other = (TopicAt(str(tmp_path / name), "orders") for name in "ab")
    assert kinds(compare_topics(one, other)) == {"changed": 1}
    assert compare_topics(one, other, parts=Parts.KEY | Parts.VALUE).is_equal
    assert not compare_topics(one, other, parts=Parts.KEY | Parts.VALUE | Parts.TIMESTAMP).is_equal


def test_blocks_do_not_depend_on_ranges(tmp_path: Path) -> None:
    source = topic(tmp_path / "a", [records(700)])
    from tidegate.integrity.digests import cut

    expected = None
    for smallest in (1, 7, 50, 300, 1000):
        orders = cut(source, source.extents(), 10_000, smallest=smallest)
        blocks = join_blocks([comparing.block_range(Parts.KEY | Parts.VALUE, (0, order)) for order in orders])
        expected = blocks.tolist() if expected is None else expected
        assert blocks.tolist() == expected
    assert expected is not None and 40 < len(expected) < 200


def test_the_longest_rising_subsequence() -> None:
    assert longest_rising([]) == []
    numbers = [5, 1, 4, 2, 3, 9, 0, 8]
    assert [numbers[at] for at in longest_rising(numbers)] == [1, 2, 3, 8]


def test_the_command_says_equal_or_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topic(tmp_path / "a", [records(60)])
    topic(tmp_path / "b", [records(60)])
    topic(tmp_path / "c", [records(59)])
    assert run(["audit", "compare", f"{tmp_path}/a/orders", f"{tmp_path}/b/orders"]) == 0
    assert "equal" in capsys.readouterr().out
    assert run(["audit", "compare", "orders", f"{tmp_path}/c/orders", "--log", f"{tmp_path}/a"]) == 1
    told = capsys.readouterr().out
    assert "1 missing" in told and "missing: key 'k8' at A offset 59, B not there" in told
    assert run(["audit", "compare", f"{tmp_path}/a/", f"{tmp_path}/b/orders"]) == 2


class Meddling(TopicAt):
    """A topic that is repaired between the first read and the second."""

    def read(self, partition: int, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        reads.append(self.url)
        if reads.count(self.url) > 1:
            yield from TopicAt(str(Path(self.url).with_name("a")), self.topic).read(partition, start, stop)
        else:
            yield from super().read(partition, start, stop)


reads: list[str] = []


@pytest.mark.parametrize("by", ["partition", "key"])
def test_what_differed_when_it_was_read_is_not_called_equal_because_it_changed_since(
    tmp_path: Path, by: str
) -> None:
    reads.clear()
    one = topic(tmp_path / "a", [records(200)])
    topic(tmp_path / "b", [[*records(120), (b"k1", b"other"), *records(79, 121)]])
    other = Meddling(str(tmp_path / "b"), "orders")
    found = compare_topics(one, other, by=by)
    assert reads == [other.url] * 2, "the second read saw the same records as side A"
    assert not found.is_equal
    (part,) = found.partitions
    assert part.differing == 1 and part.changed == 1
    assert kinds(found) == {}, "nothing is said of records that were not there"


@pytest.mark.parametrize("by", ["partition", "key"])
def test_a_stretch_that_is_too_long_is_told_as_a_range_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    one, other = topic(tmp_path / "a", [records(300)]), topic(tmp_path / "b", [records(300, 1000)])
    monkeypatch.setattr(comparing, "MOST_RECORDS", 100)
    sizes: list[int] = []
    read = comparing.Side.read

    def watched(*given: Any, **more: Any) -> Any:
        side = read(*given, **more)
        sizes.append(len(side.hashes))
        return side

    monkeypatch.setattr(comparing.Side, "read", watched)
    found = compare_topics(one, other, by=by)
    (part,) = found.partitions
    assert not found.is_equal and part.untold and sum(sizes) <= 100
    if by == "partition":
        assert part.ranges == [((0, 300), (0, 300))] and not part.counts


def test_the_command_says_what_it_could_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topic(tmp_path / "a", [records(300)])
    topic(tmp_path / "b", [records(300, 1000)])
    monkeypatch.setattr(comparing, "MOST_RECORDS", 100)
    assert run(["audit", "compare", f"{tmp_path}/a/orders", f"{tmp_path}/b/orders"]) == 1
    told = capsys.readouterr()
    assert "1 long stretches that were not compared" in told.err and "equal" not in told.out
