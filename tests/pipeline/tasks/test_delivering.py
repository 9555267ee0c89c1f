"""Committed parcels into topics: once, whatever died when, and never over somebody else's records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from encoded_batches import encode_batches
from tidegate.clock import ManualClock
from tidegate.errors import ConflictError, CorruptError, FencedError
from tidegate.log.log import Log
from tidegate.pipeline.rounds.orders import Delivery, Parcel
from tidegate.pipeline.tasks.delivering import Deliverer
from tidegate.pipeline.tasks.parcels import Batches, write_parcel
from tidegate.storage.backends.memory import MemoryBackend

START = 1_767_225_600_000


def batches_of(first: int, count: int, *, per_batch: int = 10) -> list[bytearray]:
    made = []
    for start in range(first, first + count, per_batch):
        rows = range(start, min(start + per_batch, first + count))
        table = pa.table(
            {
                "key": pa.array([f"k{row % 4}".encode() for row in rows], pa.binary()),
                "value": pa.array([f"value {row}".encode() for row in rows], pa.binary()),
                "timestamp": pa.array([START + row for row in rows], pa.int64()),
            }
        )
        made += list(encode_batches(table, max_batch_bytes=1 << 20))
    return made


@dataclass
class Rig:
    log: Log
    backend: MemoryBackend
    clock: ManualClock
    deliverer: Deliverer

    def parcel(self, name: str, first: int, count: int, *, topic: str = "out", partition: int = 0) -> Parcel:
        return write_parcel(
            self.backend, name, [Batches(topic, partition, b"".join(batches_of(first, count)), count)]
        )

    def values(self, topic: str = "out") -> list[str]:
        with self.log.reader(topic) as reader:
            return [value.decode() for value in reader.read_all()["value"].to_pylist()]


@pytest.fixture(params=[True, False], ids=["kept-open", "released"])
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    clock, backend = ManualClock(), MemoryBackend()
    with Log(tmp_path / "log", clock=clock) as log:
        log.create_topic("out", 2)
        yield Rig(log, backend, clock, Deliverer(log, backend, clock, keeps_open=request.param))


def expected(first: int, count: int) -> list[str]:
    return [f"value {row}" for row in range(first, first + count)]


def test_parcels_follow_each_other_and_a_repeat_changes_nothing(rig: Rig) -> None:
    first, second = (
        Delivery(1, rig.parcel("p/1", 0, 25), (0,)),
        Delivery(2, rig.parcel("p/2", 25, 12), (25,)),
    )
    assert rig.deliverer.deliver([first]) == 25
    assert rig.deliverer.deliver([first]) == 0
    assert rig.deliverer.deliver([first, second]) == 12
    assert rig.deliverer.deliver([first, second]) == 0
    assert rig.values() == expected(0, 37)


@pytest.mark.parametrize("whole", [0, 1, 2])
def test_a_crash_between_two_batches_is_completed(rig: Rig, whole: int) -> None:
    parcel = rig.parcel("p/1", 0, 25)
    for batch in batches_of(0, 25)[:whole]:
        rig.log.partition("out", 0).append(batch)
    rig.log.release("out", 0)
    assert rig.deliverer.deliver([Delivery(1, parcel, (0,))]) == 25 - 10 * whole
    assert rig.values() == expected(0, 25)


def test_a_crash_before_the_acknowledgement_is_completed(rig: Rig) -> None:
    parcel = rig.parcel("p/1", 0, 25)
    log = rig.log.partition("out", 0)
    for batch in batches_of(0, 25):
        log.append(batch)
    assert log.high_watermark == 0
    assert rig.deliverer.deliver([Delivery(1, parcel, (0,))]) == 0
    assert rig.values() == expected(0, 25)


def test_a_foreign_record_is_never_written_over_nor_behind(rig: Rig) -> None:
    parcel = rig.parcel("p/1", 0, 25)
    with rig.log.writer("out") as writer:
        writer.write(pa.table({"key": ["k0"], "value": ["not ours"]}), partition=0)
    rig.log.release("out", 0)
    with pytest.raises(FencedError, match=r"out-0.*offset 0.*another record"):
        rig.deliverer.deliver([Delivery(1, parcel, (0,))])
    assert rig.values() == ["not ours"]


def test_a_foreign_record_in_the_middle_is_found_and_named(rig: Rig) -> None:
    other = batches_of(0, 10) + batches_of(110, 10)
    for batch in other:
        rig.log.partition("out", 0).append(batch)
    rig.log.partition("out", 0).acknowledge(sync=True)
    with pytest.raises(FencedError, match="offset 10"):
        rig.deliverer.deliver([Delivery(1, rig.parcel("p/1", 0, 25), (0,))])
    assert rig.values() == expected(0, 10) + expected(110, 10)


def test_a_log_that_ends_before_the_base_has_lost_what_was_published(rig: Rig) -> None:
    with pytest.raises(FencedError, match="ends before"):
        rig.deliverer.deliver([Delivery(2, rig.parcel("p/2", 25, 5), (25,))])
    assert rig.values() == []


def test_a_log_that_ends_inside_a_batch_is_not_ours(rig: Rig) -> None:
    for batch in batches_of(0, 10) + batches_of(10, 5):
        rig.log.partition("out", 0).append(batch)
    with pytest.raises(FencedError, match="middle of a batch"):
        rig.deliverer.deliver([Delivery(1, rig.parcel("p/1", 0, 25), (0,))])


def test_a_damaged_parcel_publishes_nothing(rig: Rig) -> None:
    good = rig.parcel("p/1", 0, 25)
    data = bytearray(memoryview(rig.backend.read("p/1")))
    data[-3] ^= 4
    rig.backend.put("p/2", [bytes(data)])
    bad = Parcel("p/2", good.size, good.digest, good.sections)
    with pytest.raises(CorruptError, match="p/2 is damaged"):
        rig.deliverer.deliver([Delivery(1, bad, (0,))])
    assert rig.values() == []


@pytest.mark.parametrize(
    "setting", [{"compression.type": "lz4"}, {"message.timestamp.type": "LogAppendTime"}]
)
def test_topics_with_their_own_idea_of_batches_are_compared_by_records(
    rig: Rig, setting: dict[str, str]
) -> None:
    rig.log.create_topic("packed", 1, setting)
    parcel = rig.parcel("p/1", 0, 25, topic="packed")
    assert rig.deliverer.deliver([Delivery(1, parcel, (0,))]) == 25
    assert rig.deliverer.deliver([Delivery(1, parcel, (0,))]) == 0
    assert rig.values("packed") == expected(0, 25)
    other = rig.parcel("p/2", 1, 25, topic="packed")
    with pytest.raises(FencedError):
        rig.deliverer.deliver([Delivery(1, other, (0,))])


def test_records_that_aged_out_meanwhile_need_not_be_there(rig: Rig) -> None:
    parcel = rig.parcel("p/1", 0, 25)
    rig.deliverer.deliver([Delivery(1, parcel, (0,))])
    rig.log.partition("out", 0).delete_records_before(14)
    assert rig.deliverer.deliver([Delivery(1, parcel, (0,))]) == 0
    assert rig.values() == expected(14, 11)


def test_several_sections_go_to_their_own_partitions(rig: Rig) -> None:
    parcel = write_parcel(
        rig.backend,
        "p/1",
        [Batches("out", 0, b"".join(batches_of(0, 5)), 5), Batches("out", 1, b"".join(batches_of(50, 7)), 7)],
    )
    assert rig.deliverer.deliver([Delivery(1, parcel, (0, 0))]) == 12
    assert sorted(rig.values()) == sorted(expected(0, 5) + expected(50, 7))


def test_a_partition_that_another_process_keeps_is_waited_for_and_then_told(tmp_path: Path) -> None:
    clock, backend = ManualClock(), MemoryBackend()
    with Log(tmp_path, clock=clock) as other, Log(tmp_path, clock=clock) as log:
        other.create_topic("out", 1)
        other.partition("out", 0)
        parcel = write_parcel(backend, "p/1", [Batches("out", 0, b"".join(batches_of(0, 5)), 5)])
        deliverer = Deliverer(log, backend, clock, keeps_open=False)
        with pytest.raises(ConflictError):
            deliverer.deliver([Delivery(1, parcel, (0,))])
        other.release("out", 0)
        assert deliverer.deliver([Delivery(1, parcel, (0,))]) == 5
        other.partition("out", 0)  # it was let go
