"""A round that is repeated gives the same bytes, wherever it runs; what it wrote is found damaged when it is."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from task_rig import Round, TaskRig
from tidegate.errors import CorruptError
from tidegate.integrity import PartitionValidator, Verdict
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.steps import Aggregate, Dedupe, KeyBy, Source, Step, To
from tidegate.pipeline.rounds.orders import Parcel, Section, Tick
from tidegate.pipeline.tasks.changelog import sender_guid
from tidegate.pipeline.tasks.parcels import Batches, read_parcel, write_parcel
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.tables.serdes.base import String
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.kinds import Deduplicate, Session, Tumbling
from tidegate.windows.operators.windowed_operator import Emit

START = 1_767_225_600_000


def flow_of(*, rekeyed: bool = False, emit: Emit = Emit.UPDATE, sessions: bool = False) -> Flow:
    steps: list[Step] = [KeyBy("who", String(), shards=3)] if rekeyed else []
    kind = Session("200ms") if sessions else Tumbling("1000ms", grace="300ms")
    steps += [
        Dedupe(Deduplicate("id", within="5000ms")),
        Aggregate(kind, (agg.count().named("n"), agg.sum("x").named("total")), emit=emit),
    ]
    return Flow(
        Source("events", String(), Json(id="string", x="double", who="string")),
        tuple(steps),
        (To("results"),),
    )


def events(seed: int, rows: int) -> list[tuple[bytes, int, bytes]]:
    chance, made = random.Random(seed), list[tuple[bytes, int, bytes]]()
    for number in range(rows):
        who = f"k{chance.randrange(7)}"
        value = {"id": f"e{number - chance.choice([0, 0, 0, 1])}", "x": chance.random() * 100, "who": who}
        made.append(
            (who.encode(), START + number * 20 + chance.randrange(-50, 50), json.dumps(value).encode())
        )
    return made


def parcels(rig: TaskRig, found: Round) -> dict[int, tuple[bytes, tuple[Section, ...]]]:
    """What each task wants to publish."""
    return {
        number: (bytes(read_parcel(rig.backend, task.parcel)), task.parcel.sections)
        for number, task in found.tasks.items()
        if task.parcel is not None
    }


@pytest.mark.parametrize("emit", [Emit.UPDATE, Emit.CLOSE])
@pytest.mark.parametrize("rekeyed", [False, True])
@pytest.mark.parametrize("sessions", [False, True])
def test_a_repeated_round_gives_the_same_bytes_warm_or_restored_in_any_order_of_arrival(
    tmp_path: Path, rekeyed: bool, emit: Emit, sessions: bool
) -> None:
    flow = flow_of(rekeyed=rekeyed, emit=emit, sessions=sessions)
    with TaskRig(tmp_path, flow, partitions=2) as rig:
        for partition in range(2):
            rig.write(events(partition, 240), partition=partition)
        seen = 0
        for stop in (60, 130, 131, 240):
            stops = {0: stop, 1: stop}
            first = rig.attempt(stops)
            again = rig.attempt(stops, shuffle=1)  # the warm task is not at the token any more
            rig.restart()
            fresh = rig.attempt(stops, shuffle=2)
            expected = parcels(rig, first)
            assert parcels(rig, again) == expected
            assert parcels(rig, fresh) == expected
            assert {number: result.state for number, result in first.sources.items()} == {
                number: result.state for number, result in fresh.sources.items()
            }
            seen += sum(len(data) for data, _ in expected.values())
            names = {
                task.parcel.name
                for each in (first, again, fresh)
                for task in each.tasks.values()
                if task.parcel
            }
            assert len(names) == 3 * len(expected)  # attempts never meet
            rig.commit(fresh)
        assert seen


def test_a_warm_task_goes_on_without_being_restored(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of()) as rig:
        rig.write(events(1, 100))
        rig.round({0: 50})
        before = rig.worker._tasks["results", 0]
        rig.round({0: 100})
        assert rig.worker._tasks["results", 0] is before
        rig.attempt({0: 100}, tick=Tick(START, closing=True))
        rig.attempt({0: 100})
        assert rig.worker._tasks["results", 0] is not before


def test_validators_find_the_results_whole_and_in_order_over_restarts(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of()) as rig:
        rig.write(events(4, 200))
        for stop in (40, 90, 200):
            rig.restart()
            rig.round({0: stop})
        rig.round({0: 200}, tick=Tick(rig.clock.now_ms(), closing=True))
        rig.deliver()
        validator = PartitionValidator("results", 0)
        verdicts: dict[Verdict, int] = {}
        for batch in rig.records().combine_chunks().to_batches():
            judged = validator.validate(batch, rig.clock.now_ms())
            verdicts |= {verdict: count for verdict, count in judged.counts.items() if count}
        assert set(verdicts) == {Verdict.OK}
        (producer,) = list(validator.state.producers)
        assert producer.guid == sender_guid("app", "", "results", 0, 0)
        assert producer.sequence + 1 == producer.data_records == len(rig.records())


def test_another_life_of_the_app_is_another_sender_from_its_beginning(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of(), life="one") as rig:
        rig.write(events(4, 100))
        rig.round({0: 50})
        rig.life = "two"
        rig.round({0: 100})
        rig.deliver()
        validator = PartitionValidator("results", 0)
        for batch in rig.records().combine_chunks().to_batches():
            assert not validator.validate(batch, rig.clock.now_ms()).is_fatal.any()
        found = {producer.guid: producer.chain for producer in validator.state.producers}
        assert found == {sender_guid("app", life, "results", 0, 0): 0 for life in ("one", "two")}


def test_every_flipped_bit_of_a_parcel_is_noticed(tmp_path: Path) -> None:
    backend = FolderBackend(tmp_path)
    parcel = write_parcel(
        backend,
        "p/1",
        [
            Batches("a", 0, b"firstsecond", 2),
            Batches("b", 3, bytearray(b"x"), 1),
        ],
    )
    assert parcel.sections == (Section("a", 0, 0, 11, 2), Section("b", 3, 11, 1, 1))
    whole = bytes(read_parcel(backend, parcel))
    assert whole == b"firstsecondx"
    damaged = MemoryBackend()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        damaged.put(f"p/{bit}", [bytes(data)])
        with pytest.raises(CorruptError, match="damaged"):
            read_parcel(damaged, Parcel(f"p/{bit}", parcel.size, parcel.digest, parcel.sections))
    damaged.put("p/short", [whole[:-1]])
    with pytest.raises(CorruptError, match="11 bytes"):
        read_parcel(damaged, Parcel("p/short", parcel.size, parcel.digest, parcel.sections))
