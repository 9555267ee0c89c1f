"""Whole tasks against the oracles that take one record at a time: any cuts, any restarts, both plans."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from task_oracles import expected, key_format, rows_of, said, stream
from task_rig import TaskRig, last_of_each
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.steps import Aggregate, Dedupe, KeyBy, Source, Step, To
from tidegate.pipeline.rounds.orders import Tick
from tidegate.storage import StorageConfig
from tidegate.tables.serdes.base import String
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.keys import KeyFormat
from tidegate.windows.kinds import Deduplicate, Hopping, Session, Sliding, Tumbling, WindowKind
from tidegate.windows.operators.windowed_operator import Emit

VALUE = Json(id="string", n="int64", who="string")
KINDS: dict[str, WindowKind] = {
    "tumbling": Tumbling("1000ms", grace="500ms"),
    "hopping": Hopping("1000ms", advance="250ms", grace="500ms"),
    "sliding": Sliding("700ms", grace="500ms"),
    "session": Session("300ms", grace="500ms"),
}
RULE = Deduplicate("id", within="2000ms", grace="1500ms")
WANTED = (agg.count().named("count"), agg.sum("n").named("sum"))


def flow_of(kind: WindowKind, *, emit: Emit = Emit.UPDATE, dedupe: bool = True, rekeyed: int = 0) -> Flow:
    steps: list[Step] = []
    if rekeyed:
        steps.append(KeyBy("who", String(), shards=rekeyed))
    if dedupe:
        steps.append(Dedupe(RULE))
    steps.append(Aggregate(kind, WANTED, emit=emit))
    return Flow(Source("events", String(), VALUE), tuple(steps), (To("results"),))


@pytest.mark.parametrize("emit", [Emit.UPDATE, Emit.CLOSE])
@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("seed", [1, 2])
def test_a_task_says_what_the_oracle_says_wherever_rounds_are_cut(
    tmp_path: Path, name: str, emit: Emit, seed: int
) -> None:
    kind, events, chance = KINDS[name], stream(seed, 300), random.Random(seed)
    with TaskRig(tmp_path, flow_of(kind, emit=emit)) as rig:
        rig.write(rows_of(events))
        stop = 0
        while stop < len(events):
            stop = min(len(events), stop + chance.choice([1, 7, 40, 90]))
            if chance.random() < 0.3:
                rig.attempt({0: stop})  # died before the commit
            if chance.random() < 0.3:
                rig.restart()
            rig.round({0: stop})
        if emit is Emit.CLOSE:
            rig.round({0: stop}, tick=Tick(rig.clock.now_ms(), closing=True))
        rig.deliver()
        oracle = expected(kind, emit, [(0, place, event) for place, event in enumerate(events)], RULE)
        if emit is Emit.CLOSE:
            oracle.finish()
        form, size = key_format(kind)
        found = rig.windows(form, size_ms=size)
        assert last_of_each(found) == said(oracle)
        if emit is Emit.CLOSE:  # every window once, in the order of their ends
            assert [row[:3] for row in found] == [row.window for row in oracle.rows]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", list(KINDS))
def test_re_keyed_shards_say_together_what_one_task_says(tmp_path: Path, name: str, shards: int) -> None:
    kind, chance = KINDS[name], random.Random(5)
    parts = [stream(seed, 150) for seed in (11, 12)]
    with TaskRig(tmp_path, flow_of(kind, dedupe=False, rekeyed=shards), partitions=2) as rig:
        for partition, events in enumerate(parts):
            rig.write(rows_of(events), partition=partition)
        stops, order = {0: 0, 1: 0}, list[tuple[int, int, dict[str, Any]]]()
        while any(stops[number] < 150 for number in stops):
            before = dict(stops)
            stops = {number: min(150, stop + chance.choice([0, 10, 60])) for number, stop in stops.items()}
            for partition, events in enumerate(parts):
                order += [
                    (partition, place, events[place]) for place in range(before[partition], stops[partition])
                ]
            if chance.random() < 0.4:
                rig.restart()
            rig.round(stops, shuffle=chance.randrange(5))
        rig.deliver()
        oracle = expected(kind, Emit.UPDATE, order)
        form, size = key_format(kind)
        assert last_of_each(rig.windows(form, size_ms=size)) == said(oracle)


def test_one_partition_re_keyed_by_its_own_key_gives_what_co_partitioned_gives(tmp_path: Path) -> None:
    events, kind = stream(3, 400), KINDS["hopping"]
    results = []
    for name, shards in (("plain", 0), ("one", 1), ("four", 4)):
        with TaskRig(tmp_path / name, flow_of(kind, rekeyed=shards)) as rig:
            rig.write(rows_of(events))
            for stop in (90, 91, 250, 400):
                rig.round({0: stop})
            rig.deliver()
            results.append(last_of_each(rig.windows(KeyFormat.CHANGELOG, size_ms=1000)))
    assert results[0]
    assert results[1] == results[0]
    assert results[2] == results[0]


def test_state_that_outgrows_memory_changes_nothing(tmp_path: Path) -> None:
    small = StorageConfig.for_tests(
        write_buffer={"reserve_bytes": 4 << 10, "soft_max_bytes": 8 << 10},
        base_runs={"reserve_bytes": 4 << 10, "soft_max_bytes": 8 << 10},
    )
    events, kind = stream(9, 600), KINDS["tumbling"]
    with TaskRig(tmp_path, flow_of(kind), storage=small) as rig:
        rig.write(rows_of(events))
        for stop in range(50, 601, 50):
            rig.round({0: stop})
        rig.deliver()
        oracle = expected(kind, Emit.UPDATE, [(0, place, event) for place, event in enumerate(events)], RULE)
        assert last_of_each(rig.windows(KeyFormat.CHANGELOG, size_ms=1000)) == said(oracle)
