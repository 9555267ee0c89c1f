"""The same input gives the same tables, whatever the options (R-22): cuts, shards, codecs, memory, restarts, dying
attempts. Every choice of any three options' values meets somewhere in the six sets that each input goes through."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
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
from tidegate.windows.kinds import Deduplicate, Hopping, Session, Sliding, Tumbling, WindowKind
from tidegate.windows.operators.windowed_operator import Emit

RULE = Deduplicate("id", within="2000ms", grace="1500ms")
KINDS: list[WindowKind] = [
    Tumbling("1000ms", grace="500ms"),
    Hopping("1000ms", advance="250ms", grace="500ms"),
    Sliding("700ms", grace="500ms"),
    Session("300ms", grace="500ms"),
]
WANTED = (agg.count().named("count"), agg.sum("n").named("sum"))
TINY = StorageConfig.for_tests(
    write_buffer={"reserve_bytes": 2 << 10, "soft_max_bytes": 4 << 10},
    base_runs={"reserve_bytes": 2 << 10, "soft_max_bytes": 4 << 10},
    max_run_rows=64,
    hot_bucket_count=1,
)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "cut": (9, 37, 1000),
    "shards": (0, 1, 3),
    "codec": ("none", "zstd", "gzip", "lz4", "snappy"),
    "memory": ("tiny", "plenty"),
    "restart": ("never", "often"),
    "attempts": ("once", "dying"),
}
SETS = 6
INPUTS = 12


def covering_array(seed: int = 1) -> list[dict[str, Any]]:
    """Option sets in which any three values of three options meet: greedy, each set covering most of what is left."""
    names = list(OPTIONS)
    left = {
        (trio, values)
        for trio in itertools.combinations(names, 3)
        for values in itertools.product(*(OPTIONS[name] for name in trio))
    }
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*OPTIONS.values())]
    random.Random(seed).shuffle(every)
    found: list[dict[str, Any]] = []

    def covers(chosen: dict[str, Any]) -> set[Any]:
        return {
            (trio, tuple(chosen[name] for name in trio)) for trio in itertools.combinations(names, 3)
        } & left

    while left:
        best = max(every, key=lambda chosen: len(covers(chosen)))
        left -= covers(best)
        found.append(best)
    return found


ARRAY = covering_array()


def test_any_three_options_meet_in_the_array() -> None:
    for trio in itertools.combinations(OPTIONS, 3):
        met = {tuple(chosen[name] for name in trio) for chosen in ARRAY}
        assert met == set(itertools.product(*(OPTIONS[name] for name in trio)))
    assert len(ARRAY) < 60


def table_of(folder: Path, number: int, events: list[dict[str, Any]], options: dict[str, Any]) -> Any:
    """The input's table under these options."""
    kind = KINDS[number % len(KINDS)]
    steps: list[Step] = [KeyBy("who", String(), shards=options["shards"])] if options["shards"] else []
    steps += [Dedupe(RULE), Aggregate(kind, WANTED)]
    value = Json(id="string", n="int64", who="string")
    flow = Flow(Source("events", String(), value), tuple(steps), (To("results"),))
    chance = random.Random(number)
    storage = TINY if options["memory"] == "tiny" else StorageConfig.for_tests()
    with TaskRig(folder, flow, storage=storage) as rig:
        keys, times, values = zip(*rows_of(events), strict=True)
        rows = pa.table(
            {"key": pa.array(keys, pa.binary()), "timestamp": times, "value": pa.array(values, pa.binary())}
        )
        with rig.log.writer("events", compression=options["codec"]) as writer:
            writer.write(rows, partition=0)
        for stop in [*range(options["cut"], len(events), options["cut"]), len(events)]:
            if options["restart"] == "often" and chance.random() < 0.5:
                rig.restart()
            if options["attempts"] == "dying" and chance.random() < 0.5:
                rig.attempt({0: stop})
            rig.round({0: stop}, shuffle=chance.randrange(3))
        rig.round({0: len(events)}, tick=Tick(rig.clock.now_ms(), closing=True))
        rig.deliver()
        form, size = key_format(kind)
        return last_of_each(rig.windows(form, size_ms=size))


def check(tmp_path: Path, first: int, inputs: int) -> int:
    cases = 0
    for number in range(first, first + inputs):
        events = stream(number, 110)
        oracle = expected(
            KINDS[number % len(KINDS)],
            Emit.UPDATE,
            [(0, place, event) for place, event in enumerate(events)],
            RULE,
        )
        table = said(oracle)
        for turn in range(SETS):
            options = ARRAY[(number * SETS + turn) % len(ARRAY)]
            found = table_of(tmp_path / f"{number}-{turn}", number, events, options)
            assert found == table, (number, options)
            cases += 1
    return cases


@pytest.mark.parametrize("block", range(2), ids=lambda block: f"R-22-{block}")
def test_any_options_give_the_same_table(tmp_path: Path, block: int, tally: Any) -> None:
    half = INPUTS // 2
    tally(check(tmp_path, block * half, half), seeds=[block * half, (block + 1) * half], sets=len(ARRAY))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(4), ids=lambda block: f"R-22-soak-{block}")
def test_two_hundred_inputs(tmp_path: Path, block: int, tally: Any) -> None:
    tally(
        check(tmp_path, 1000 + block * 50, 50), seeds=[1000 + block * 50, 1050 + block * 50], sets=len(ARRAY)
    )
