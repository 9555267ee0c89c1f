"""Events of several partitions in one order: however they come in pieces, whatever is held back, after any restart."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tidegate.errors import CorruptError
from tidegate.pipeline.tasks import held_events
from tidegate.pipeline.tasks.held_events import HeldEvents, HeldState, merged
from tidegate.storage import StorageConfig, WorkerStorageRuntime, open_backend
from tidegate.windows.events import EventBatch

TASK = "app/flow/0"
VALUES = pa.schema([pa.field("text", pa.string()), pa.field("number", pa.int64())])
Row = tuple[int, int, int]  # stamp, partition, offset


def events(rows: list[Row]) -> EventBatch:
    """Events that say in their columns who they are; some have no key, some no text."""
    stamp, partition, offset = (list(column) for column in zip(*rows, strict=True))
    values = [
        pa.array([None if each % 5 == 0 else f"text {each}" for each in offset], pa.string()),
        pa.array([7 * each for each in offset], pa.int64()),
    ]
    return EventBatch(
        key=pa.array([None if each % 7 == 0 else b"k%d" % each for each in offset], pa.binary()),
        ts=np.array(stamp, np.int64) - np.array(offset, np.int64) % 3,
        offset=np.array(offset, np.int64),
        partition=np.array(partition, np.int32),
        stream_time=np.array(stamp, np.int64),
        values=pa.RecordBatch.from_arrays(values, schema=VALUES),
    )


def rows_of(batches: Any) -> list[Row]:
    found: list[Row] = []
    for batch in batches:
        rows = list(
            zip(batch.stream_time.tolist(), batch.partition.tolist(), batch.offset.tolist(), strict=True)
        )
        expected = events(rows)
        assert batch.key.equals(expected.key) and batch.values.equals(expected.values)
        assert batch.ts.tolist() == expected.ts.tolist()
        found += rows
    return found


class Bench:
    """A task that can be thrown away and restored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.open(None)

    def open(self, token: bytes | None) -> None:
        self.runtime = WorkerStorageRuntime.open(StorageConfig.for_tests(), open_backend(self._folder))
        self.runtime.apply_checkpoint(TASK, token)
        self.held = HeldEvents(self.runtime, TASK, VALUES)

    def restart(self) -> None:
        token = self.runtime.checkpoint(TASK)
        self.runtime.close()
        self.open(token)


def a_log(chance: random.Random, partitions: int, each: int) -> list[list[Row]]:
    log = []
    for partition in range(partitions):
        offset, stamp, rows = 0, chance.choice([-1, 0, 50_000]), list[Row]()
        for _ in range(chance.randrange(each)):
            offset += chance.choice([1, 1, 1, 4])
            stamp += chance.choice([0, 0, 1, 700, 61_000])
            rows.append((stamp, partition, offset))
        log.append(rows)
    return log


@pytest.mark.parametrize("limit", [1, 1 << 20], ids=["little at once", "all at once"])
def test_any_pieces_any_frontiers_any_restarts_give_the_sorted_log(
    tmp_path: Path, monkeypatch: Any, limit: int
) -> None:
    monkeypatch.setattr(held_events, "RELEASED_ROWS", limit)
    for seed in range(40):
        chance = random.Random(seed)
        log = a_log(chance, chance.randrange(1, 5), 40)
        bench, got, at = Bench(tmp_path / str(seed)), list[Row](), [0] * len(log)
        while any(place < len(rows) for place, rows in zip(at, log, strict=True)):
            pieces = []
            for partition, rows in enumerate(log):
                count = chance.choice([0, 0, 1, 3, 9])
                part = rows[at[partition] : at[partition] + count]
                at[partition] += len(part)
                cut = chance.randrange(len(part) + 1)
                pieces += [events(each) for each in (part[cut:], part[:cut]) if each]
            chance.shuffle(pieces)
            frontiers = {}
            for partition, rows in enumerate(log):
                if at[partition] < len(rows):  # one that was read to its end is not waited for
                    done = rows[at[partition] - 1] if at[partition] else (-1, partition, -1)
                    frontiers[partition] = (done[0], done[2] + 1)
            before = rows_of(bench.held.take(pieces, frontiers))
            bound = min(
                ((time, number, offset) for number, (time, offset) in frontiers.items()), default=None
            )
            assert all(bound is None or row < bound for row in before)
            got += before
            held = bench.held.held
            waiting = sum(at) - len(got)
            assert waiting == (0 if held is None else held.events)
            if held is not None:
                rest = sorted(
                    {row for rows, place in zip(log, at, strict=True) for row in rows[:place]} - set(got)
                )
                assert held.waits_for <= rest[0]
                assert held.offsets.keys() == {row[1] for row in rest}
                assert all(row[2] >= held.offsets[row[1]] for row in rest)
            if chance.random() < 0.3:
                bench.restart()
        while bench.held.held is not None:
            got += rows_of(bench.held.take([], {}))
        assert got == sorted(row for rows in log for row in rows), seed
        assert bench.runtime.charge_of(TASK) == 0, "what went is still charged"
        bench.runtime.close()


def test_merging_many_lanes_in_batches_is_sorting(monkeypatch: Any) -> None:
    monkeypatch.setattr(held_events, "PIECE_ROWS", 7)
    for seed in range(60):
        chance = random.Random(seed)
        log = a_log(chance, 4, 60)
        lanes = []
        for rows in log:
            cuts = sorted({0, len(rows), *(chance.randrange(len(rows) + 1) for _ in range(3))})
            lanes.append([events(rows[a:b]) for a, b in pairwise(cuts)])
        batches = list(merged(lanes))
        assert rows_of(batches) == sorted(row for rows in log for row in rows)
        if sum(1 for rows in log if rows) > 1:
            assert max(map(len, batches)) <= 7


def test_offsets_that_begin_anew_lose_nothing(tmp_path: Path) -> None:
    """A topic that was made again, and that somebody had the app go on with, begins at offset 0."""
    bench = Bench(tmp_path)
    before, after = [(20, 0, 50), (30, 0, 51), (30, 0, 52)], [(30, 0, 0), (30, 0, 1), (40, 0, 2)]
    assert rows_of(bench.held.take([events(before)], {0: (30, 53), 1: (25, 7)})) == [(20, 0, 50)]
    assert rows_of(bench.held.take([events(after)], {0: (40, 3), 1: (25, 7)})) == []
    held = bench.held.held
    assert held is not None and (held.events, held.offsets) == (5, {0: 0})
    bench.restart()
    assert rows_of(bench.held.take([], {0: (40, 3), 1: (35, 9)})) == [*before[1:], *after[:2]]
    assert rows_of(bench.held.take([], {})) == after[2:]
    assert bench.held.held is None and bench.runtime.charge_of(TASK) == 0


def test_an_unknown_format_is_refused() -> None:
    state = HeldState(VALUES)
    for damaged, said in ((b"\x09", "format 9"), (b"\x01\xc1", "cannot be read")):
        with pytest.raises(CorruptError, match=said):
            state.restore_progress(damaged)
