"""Whole histories of a task against the slow way: restored from any commit that is kept, after collection and eviction
(R-21), and under a clock that does as it likes (R-23)."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from task_oracles import START, expected, key_format, rows_of, said, stream
from task_rig import Committed, TaskRig, last_of_each
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.messages import Tick, storage_task
from tidegate.pipeline.topology import Aggregate, Dedupe, Source, Step, To, Validate
from tidegate.storage import StorageConfig
from tidegate.storage.manifest import collect_garbage
from tidegate.tables.serdes.base import String
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.kinds import Deduplicate, Hopping, Session, Sliding, Tumbling, WindowKind
from tidegate.windows.operators.windowed_operator import Emit

RULE = Deduplicate("id", within="2000ms", grace="1500ms")
KINDS: dict[str, WindowKind] = {
    "tumbling": Tumbling("1000ms", grace="500ms"),
    "hopping": Hopping("1000ms", advance="250ms", grace="500ms"),  # by tiles
    "sliding": Sliding("700ms", grace="500ms"),
    "session": Session("300ms", grace="500ms"),
}
WANTED = (agg.count().named("count"), agg.sum("n").named("sum"))
EVICTING = StorageConfig.for_tests(
    write_buffer={"reserve_bytes": 2 << 10, "soft_max_bytes": 4 << 10},
    base_runs={"reserve_bytes": 2 << 10, "soft_max_bytes": 4 << 10},
    max_run_rows=64,
    hot_bucket_count=1,
)
KEPT = 4
ROWS = 120


def flow_of(kind: WindowKind, *, validated: bool = False) -> Flow:
    steps: list[Step] = [Validate()] if validated else []
    steps += [Dedupe(RULE), Aggregate(kind, WANTED)]
    value = Json(id="string", n="int64", who="string")
    return Flow(Source("events", String(), value), tuple(steps), (To("results"),))


def table_of(rig: TaskRig, kind: WindowKind) -> Any:
    rig.deliver()
    form, size = key_format(kind)
    return last_of_each(rig.windows(form, size_ms=size))


def truth(kind: WindowKind, events: list[dict[str, Any]]) -> Any:
    return said(expected(kind, Emit.UPDATE, [(0, place, event) for place, event in enumerate(events)], RULE))


def state_of(rig: TaskRig) -> list[tuple[Any, ...]]:
    """The windows that the task's state holds."""
    rig.round()  # without records: it is restored where it was not warm
    operator: Any = rig.worker._tasks["results", 0].chain.operators[-1]
    rows = operator.windows()
    columns = (
        rows.key.to_pylist(),
        rows.window_start.tolist(),
        rows.window_end.tolist(),
        rows.values.to_pylist(),
    )
    return sorted(zip(*columns, strict=True), key=repr)


def uninterrupted(folder: Path, kind: WindowKind, events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The state after one round over everything, which also says what brute force says."""
    with TaskRig(folder, flow_of(kind)) as rig:
        rig.write(rows_of(events))
        rig.round()
        assert table_of(rig, kind) == truth(kind, events)
        return state_of(rig)


def go_back(rig: TaskRig, then: Committed) -> None:
    """As after `tidegate app replay --to-round`: state and offsets of that commit, results behind those there are."""
    rig.deliver()
    ends = rig.done.ends
    rig.done = copy.deepcopy(then)
    rig.done.ends, rig.done.waiting = ends, {}


def history(folder: Path, name: str, seed: int) -> tuple[int, int]:
    """One history; how often it went back, and how many objects were collected on the way."""
    kind, events, chance = KINDS[name], stream(seed, ROWS), random.Random(seed)
    backs = collected = 0
    with TaskRig(folder / "cut", flow_of(kind), storage=EVICTING if seed % 2 else None) as rig:
        rig.write(rows_of(events))
        task = storage_task(rig.setup.app, "results", 0)
        kept: list[Committed] = []
        while rig.done.offsets.get(0, 0) < ROWS:
            stop = min(ROWS, rig.done.offsets.get(0, 0) + chance.choice([5, 20, 45]))
            if chance.random() < 0.3:
                rig.attempt({0: stop})  # died before its commit: what it wrote is garbage
            rig.round({0: stop})
            kept = [*kept, copy.deepcopy(rig.done)][-KEPT:]
            rig.clock.advance(1000)
            if chance.random() < 0.4:
                rig.restart()
                tokens = [each.tokens[0] for each in kept]
                now_ms = rig.clock.now_ms()
                collected += len(
                    collect_garbage(rig.backend, task, tokens, grace_ms=0, now_ms=now_ms).removed
                )
            if backs < 3 and chance.random() < 0.35:
                place = chance.randrange(len(kept))
                kept = kept[: place + 1]  # what came after it is undone, and nothing to go back to
                go_back(rig, kept[-1])
                backs += 1
        assert state_of(rig) == uninterrupted(folder / "whole", kind, events), (name, seed)
        if name != "session" or not backs:
            # A session that was sent, undone, and then grew in one round instead of two has nobody to delete it.
            assert table_of(rig, kind) == truth(kind, events), (name, seed)
    return backs, collected


@pytest.mark.parametrize("name", [pytest.param(name, id=f"R-21-{name}") for name in KINDS])
def test_any_kept_commit_and_what_followed_give_the_uninterrupted_result(
    tmp_path: Path, name: str, tally: Any
) -> None:
    found = [history(tmp_path / f"{seed}", name, seed) for seed in range(10)]
    backs, collected = (sum(each) for each in zip(*found, strict=True))
    assert backs > 5 and collected > 5
    tally(len(found), repaired=sum(1 for each, _ in found if each), seeds=[0, 10], restores=backs)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [pytest.param(name, id=f"R-21-soak-{name}") for name in KINDS])
def test_many_histories(tmp_path: Path, name: str, tally: Any) -> None:
    found = [history(tmp_path / f"{seed}", name, seed) for seed in range(1000, 2250)]
    tally(len(found), repaired=sum(1 for each, _ in found if each), seeds=[1000, 2250])


def under_a_clock(folder: Path, name: str, seed: int, *, devil: bool) -> Any:
    """The same rounds, at a steady pace or at times that jump; the table, the late rows' number, the verdicts."""
    kind, events, chance = KINDS[name], stream(seed, ROWS), random.Random(seed)
    jumps = random.Random(~seed)
    counted: dict[str, int] = {}
    with TaskRig(folder, flow_of(kind, validated=True)) as rig:
        rig.write(rows_of(events), integrity=True)
        end, stop = rig.end(0), 0
        while stop < end:
            stop = min(end, stop + chance.choice([5, 20, 45]))
            if devil:
                hours = jumps.choice([0, -26, 24 * 3650, 1, None])
                rig.clock.set_now_ms(START + (0 if hours is None else hours * 3_600_000))
            else:
                rig.clock.set_now_ms(START + 3_600_000 + stop)
            if chance.random() < 0.3:
                rig.restart()
            done = rig.round({0: stop}, tick=Tick(max(0, rig.clock.now_ms())))
            for counters in (done.sources[0].counters, done.sources[0].verdicts, done.tasks[0].counters):
                for counter, number in counters.items():
                    counted[counter] = counted.get(counter, 0) + number
        del counted["delivered"]  # with what the sender says of itself, which goes by the clock
        return table_of(rig, kind), counted


@pytest.mark.parametrize("name", [pytest.param(name, id=f"R-23-{name}") for name in KINDS])
def test_a_clock_that_jumps_freezes_and_lies_changes_no_window_and_no_verdict(
    tmp_path: Path, name: str, tally: Any
) -> None:
    """Back 26 hours, ten years ahead, standing still: one run against another with a steady clock."""
    seeds = range(6)
    for seed in seeds:
        wild = under_a_clock(tmp_path / f"wild-{seed}", name, seed, devil=True)
        calm = under_a_clock(tmp_path / f"calm-{seed}", name, seed, devil=False)
        assert wild == calm, (name, seed)
        assert wild[0] == truth(KINDS[name], stream(seed, ROWS)), (name, seed)
        assert wild[1]["ok"] >= ROWS, wild[1]
    tally(len(seeds), seeds=[0, len(seeds)])
