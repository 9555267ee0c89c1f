"""Flows with settings that chance chooses, run in a way that chance chooses, against the slow way in plain Python.

The determinism matrix has every step with fixed settings; here lengths, graces, policies, null keys and ids, empty
partitions, sizes of rounds, restarts and chains of windows over changes are drawn together. Table, topic and late
records must be those of the slow way.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import tidegate as tg
from window_oracles import Clock, Record, oracle_of

T0 = 1_767_261_600_000
VALUE = {"id": "string", "group": "string", "x": "int64", "at": "int64"}
Rows = dict[tuple[Any, int, int], dict[str, Any]]  # key, start, end → the aggregates


class Line(NamedTuple):
    """A record of the log."""

    partition: int
    key: str | None
    ts: int
    value: dict[str, Any]


class Dedupe(NamedTuple):
    within_ms: int
    grace_ms: int
    late: str
    refresh: bool


@dataclass
class Case:
    """What one seed stands for."""

    seed: int
    chance: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.chance = chance = random.Random(self.seed)
        self.has_null_keys = chance.random() < 0.3
        self.partitions = chance.choice([1, 2, 3, 5])
        self.has_own_time = chance.random() < 0.3
        self.lines = list(self._lines(chance.choice([10, 40, 90])))
        self.is_rekeyed, self.is_filtered = chance.random() < 0.55, chance.random() < 0.3
        self.dedupe: Dedupe | None = None
        if chance.random() < 0.4 and (self.is_rekeyed or self.partitions == 1 or not self.has_null_keys):
            within = chance.choice([1000, 6000, 20000])
            self.dedupe = Dedupe(
                within,
                chance.choice([within, 0, 4000]),
                chance.choice(["keep", "drop", "forward"]),
                chance.random() < 0.4,
            )
        self.kind = self._kind()
        self.emit, self.late = chance.choice(["update", "close"]), chance.choice(["keep", "keep", "drop"])
        self.size = chance.choice([1, 3, 7, 13, 29, 1000])
        self.pieces, self.stops = chance.choice([1, 1, 2, 4]), chance.choice([None, None, 1, 3])
        self.again = self._again() if chance.random() < 0.6 else None
        self.again_emit = chance.choice(["update", "close"])
        self.again_is_rekeyed, self.again_is_filtered = chance.random() < 0.5, chance.random() < 0.5
        self.is_one_app, self.has_third = chance.random() < 0.5, chance.random() < 0.4

    def _lines(self, events: int) -> Iterator[Line]:
        chance = self.chance
        used = max(1, self.partitions - chance.choice([0, 0, 1]))  # the last one may stay empty
        ahead = [chance.choice([0, 0, 2000, 9000]) for _ in range(used)]
        for number in range(events):
            partition = chance.randrange(used)
            late = chance.choice([0, 0, 0, 0, 1500, 4000, 15000])
            ts = T0 + number * chance.choice([100, 600, 600, 2500]) - late + ahead[partition]
            ts = ts // 1000 * 1000 if chance.random() < 0.1 else ts
            key = f"k{partition}-{chance.randrange(3)}"
            value: dict[str, Any] = {
                "group": None if chance.random() < 0.08 else f"g{chance.randrange(4)}",
                "x": None if chance.random() < 0.1 else chance.randrange(-50, 100),
                "at": ts,
            }
            if number == 0 or chance.random() < 0.95:
                value["id"] = f"e{chance.randrange(max(2, events // 2))}"
            is_keyless = self.has_null_keys and chance.random() < 0.15
            if number == 0:  # an app does not start while no record has what its state depends on
                value.update(group=value["group"] or "g0", x=max(20, value["x"] or 0))
                is_keyless = False
            yield Line(partition, None if is_keyless else key, ts, value)

    def _kind(self) -> Any:
        chance = self.chance
        more = {"grace": f"{chance.choice([0, 0, 500, 3000, 10000])}ms"}
        if chance.random() < 0.7:
            more["retention"] = "1d"
        kind = chance.choice([tg.Tumbling, tg.Hopping, tg.Sliding, tg.Session])
        if kind is tg.Tumbling:
            return tg.Tumbling(f"{chance.choice([1000, 5000, 7001])}ms", **more)
        if kind is tg.Hopping:
            size = chance.choice([4000, 10000, 9999])
            return tg.Hopping(f"{size}ms", f"{chance.choice([size // 2, 1000, 3000, size // 3])}ms", **more)
        return kind(f"{chance.choice([300, 1000, 2000, 5000])}ms", **more)

    def _again(self) -> Any:
        grace = self.chance.choice(["0s", "2s"])
        return self.chance.choice(
            [
                tg.Tumbling("30s", retention="1d"),
                tg.Tumbling("7s", grace=grace, retention="1d"),
                tg.Hopping("20s", "5s", retention="1d"),
            ]
        )

    # -- running ---------------------------------------------------------------------------------

    def apps(self, folder: Path) -> list[tg.App]:
        first = tg.App("one", data=folder, idle_after=None)
        stream = first.stream("in", value=tg.Json(**VALUE), timestamp="at" if self.has_own_time else None)
        if self.is_filtered:
            stream = stream.filter("x >= 20")
        if self.is_rekeyed:
            stream = stream.key_by("group", shards=3)
        if self.dedupe is not None:
            within, grace, late, refresh = self.dedupe
            stream = stream.drop_duplicates(
                "id", f"{within}ms", grace=f"{grace}ms", late=late, refresh=refresh
            )
        made = {
            "n": tg.count(), "some": tg.count("x"), "total": tg.sum("x"), "low": tg.min("x"), "high": tg.max("x"),
            "mean": tg.mean("x"), "begin": tg.first("x"), "end": tg.last("x"), "ids": tg.collect("id"),
            "different": tg.count_distinct("id"), "top": tg.top_k("x", 2),
        }  # fmt: skip
        windows = stream.window(self.kind, emit=self.emit, late=self.late).agg(**made)
        windows.to_topic("out", integrity=False).to_table("out-table")
        if self.again is None:
            return [first]
        second = first if self.is_one_app else tg.App("two", data=folder, idle_after=None)
        said: dict[str, Any] = {} if self.is_one_app else {"emit": self.emit}
        if isinstance(self.kind, tg.Session):
            said["sessions"] = True
        else:
            is_sliding = isinstance(self.kind, tg.Sliding)
            said["window_size"] = f"{self.kind.difference_ms if is_sliding else self.kind.size_ms}ms"
        value = tg.Json(n="int64", total=tg.field("int64", optional=True))  # null where every x is
        changes = second.changes("out", value=value, **said)
        if self.again_is_filtered:
            changes = changes.filter("n <> 2")
        if self.again_is_rekeyed:
            changes = changes.key_by("n % 3", shards=2)
        again = changes.window(self.again, emit=self.again_emit)
        again = again.agg(rows=tg.count(), n=tg.sum("n"), total=tg.sum("total"), mean=tg.mean("n"))
        again.to_topic("out2", integrity=False).to_table("out2-table")
        if self.has_third:
            third = second.changes(
                "out2",
                key=tg.Long() if self.again_is_rekeyed else None,
                value=tg.Json(rows="int64", n="int64"),
                window_size=f"{self.again.size_ms}ms",
                **({} if self.is_one_app else {"emit": self.again_emit}),
            )
            third.window(tg.Tumbling("1m", retention="1d")).agg(
                windows=tg.count(), rows=tg.sum("rows"), n=tg.sum("n")
            ).to_table("out3-table")
        return [first] if self.is_one_app else [first, second]

    def run(self, folder: Path) -> None:
        for piece in range(self.pieces):
            part = [
                line for at, line in enumerate(self.lines) if at * self.pieces // len(self.lines) == piece
            ]
            write(folder, part, self.partitions, has_own_time=self.has_own_time)
            for stop in (None,) if self.stops is None else (self.stops, None):
                for app in self.apps(folder):
                    run_once(app, self.size * len(app.flows), stop, close=piece == self.pieces - 1)

    # -- the slow way ----------------------------------------------------------------------------

    def expected(self) -> tuple[Rows, int]:
        """The windows, and how many lines the late table has."""
        times: dict[int, int] = defaultdict(lambda: -1)
        offsets: Counter[int] = Counter()
        stamps: dict[tuple[int, int], int] = {}
        events: list[tuple[int, int, int, str | None, Line]] = []
        for line in self.lines:
            partition = line.partition
            times[partition] = max(times[partition], line.ts)
            offset, offsets[partition] = offsets[partition], offsets[partition] + 1
            stamps[partition, offset] = times[partition]
            if not self.is_filtered or (line.value["x"] is not None and line.value["x"] >= 20):
                key = line.value["group"] if self.is_rekeyed else line.key
                events.append((times[partition], partition, offset, key, line))
        events.sort(key=lambda event: event[:3] if self.is_rekeyed else event[1:3])
        if self.dedupe is not None:
            events = list(unique(events, self.dedupe, self.is_rekeyed))
        oracle = oracle_of(self.kind)
        oracle.clock = AtSource(stamps)
        oracle.run(
            Record(None if key is None else key.encode(), line.ts, 0, offset, partition)
            for _, partition, offset, key, line in events
        )
        lines = {(partition, offset): line for _, partition, offset, _, line in events}
        rows = {
            (key.decode(), start, end): aggregated(records, lines)
            for (key, start, end), (_, records) in oracle.table.items()
        }
        return rows, len(oracle.late)

    def expected_again(self, rows: Rows) -> Rows:
        if self.again is None:
            return {}
        held: dict[tuple[Any, int, int], list[dict[str, Any]]] = defaultdict(list)
        for (key, _, end), row in rows.items():
            if not (self.again_is_filtered and row["n"] == 2):
                by = row["n"] % 3 if self.again_is_rekeyed else key
                at = end if isinstance(self.kind, tg.Session) else end - 1
                for start in self.again.starts(at):
                    held[by, start, start + self.again.size_ms].append(row)
        return {
            window: {
                "rows": len(each),
                "n": sum(row["n"] for row in each),
                "total": summed([row["total"] for row in each]),
                "mean": sum(row["n"] for row in each) / len(each),
            }
            for window, each in held.items()
        }


class AtSource(Clock):
    """Stream times as they were where records were read."""

    def __init__(self, stamps: dict[tuple[int, int], int]) -> None:
        super().__init__()
        self._stamps = stamps

    def judge(self, record: Record) -> int:
        return self._stamps[record.partition, record.offset]


def unique(
    events: Sequence[tuple[int, int, int, str | None, Line]], rule: Dedupe, is_rekeyed: bool
) -> Iterator[tuple[int, int, int, str | None, Line]]:
    known: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for event in events:
        stamp, partition, _, key, line = event
        if line.value.get("id") is None:
            yield event
        elif line.ts < stamp - rule.grace_ms:
            if rule.late == "forward":
                yield event
        else:
            own = None if is_rekeyed or key is not None else partition
            accepted = known[key, line.value["id"], own]
            is_new = all(abs(line.ts - each) >= rule.within_ms for each in accepted)
            if is_new or rule.refresh:
                accepted.append(line.ts)
            if is_new:
                yield event


def aggregated(records: Sequence[Record], lines: dict[tuple[int, int], Line]) -> dict[str, Any]:
    order = sorted(records, key=lambda each: (each.ts, each.partition, each.offset))
    values = [lines[each.partition, each.offset].value for each in order]
    some = [value["x"] for value in values if value["x"] is not None]
    ids = [value.get("id") for value in values]
    return {
        "n": len(values), "some": len(some), "total": summed(some),
        "low": min(some, default=None), "high": max(some, default=None),
        "mean": sum(some) / len(some) if some else None,
        "begin": values[0]["x"], "end": values[-1]["x"], "ids": ids,
        "different": len({each for each in ids if each is not None}), "top": sorted(some, reverse=True)[:2],
    }  # fmt: skip


def summed(values: Sequence[int | None]) -> int | None:
    there = [each for each in values if each is not None]
    return sum(there) if there else None


def write(folder: Path, part: Sequence[Line], partitions: int, *, has_own_time: bool) -> None:
    with tg.Log(folder / "log", durability="os") as log:
        log.create_topic("in", partitions, if_not_exists=True)
        writer = log.writer("in")
        for partition in range(partitions):
            own = [line for line in part if line.partition == partition]
            if own:
                columns = {
                    "key": pa.array([line.key for line in own], pa.string()),
                    "value": [json.dumps(line.value) for line in own],
                    "timestamp": [T0 if has_own_time else line.ts for line in own],
                }
                writer.write(pa.table(columns), partition=partition)


def run_once(app: tg.App, size: int, stop: int | None, *, close: bool) -> None:
    if stop is None:
        app.run("local", until="caught_up", close=close, round_records=size)
        return
    begun: list[int] = []
    is_returned = threading.Event()

    def watch(progress: Any) -> None:
        begun.append(progress.round)
        if progress.round >= begun[0] + stop:
            assert is_returned.wait(60)  # the first rounds may end before `start` does
            run.stop()

    run = app.start("local", until="caught_up", round_records=size, progress=watch)
    is_returned.set()
    run.await_termination()


def of_table(table: Any) -> Rows:
    with table as rows:
        found = [((row.key, row.window.start, row.window.end), row.value) for row in rows.all()]
    assert len(dict(found)) == len(found), "a window is there twice"
    return dict(found)


def check(folder: Path, seed: int) -> None:
    case = Case(seed)
    case.run(folder)
    first, *others = case.apps(folder)
    second = others[0] if others else first
    rows, late = case.expected()
    assert of_table(first.open_table("out-table")) == rows, case
    read = first.sessioned_table if isinstance(case.kind, tg.Session) else first.windowed_table
    with first:
        assert of_table(read("out", retention="1d")) == rows, case
    if case.late == "keep":
        table = first.late("out")
        by = table["operator"].to_pylist() if table.num_rows else []
        assert by.count("windows") == late, case
    if case.again is None:
        return
    again = case.expected_again(rows)
    assert of_table(second.open_table("out2-table")) == again, case
    with second:
        assert of_table(second.windowed_table("out2", retention="1d")) == again, case
    if case.has_third:
        third: Rows = {}
        for (key, _, end), row in again.items():
            start = (end - 1) // 60_000 * 60_000
            held = third.setdefault((key, start, start + 60_000), {"windows": 0, "rows": 0, "n": 0})
            held["windows"], held["rows"], held["n"] = (
                held["windows"] + 1,
                held["rows"] + row["rows"],
                held["n"] + row["n"],
            )
        assert of_table(second.open_table("out3-table")) == third, case


@pytest.mark.parametrize("seed", range(6))
def test_flows_that_chance_chose_come_to_what_the_slow_way_comes_to(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(10))
def test_many_more_flows(tmp_path: Path, block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        check(tmp_path / f"{seed}", seed)
