"""How fast is the whole way from a log to windows: read, decode, drop duplicates, count and sum, persisted?

Back of the envelope, for an event: reading 30 ns (70 with a JSON value), JSON to two columns 70, a fingerprint, its
place in order, a look into older runs and a place in a new one 120, a fold into one of 1.8 M windows 120, its share of
a checkpoint 30: 300 to 410 ns, 2.4 to 3.3 M events/s.

Events of 50 k keys, one in ten a copy of an earlier one, up to 100 k records later; windows of a minute, nearly as many
as events. A checkpoint on a folder follows after each 250 k events. `hot` is the same
with half of the events under one key. The peer is DuckDB: one batch query over the same events in Parquet, one thread,
nothing persisted. Ours is timed by processor time, stage by stage; waiting for the disk is shown beside it.

    python benchmarks/windows_chain.py [--rounds 8] [--full] [--json]
"""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import TypeVar

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from _report import Report, demand
from _storage import key_names, roomy, scratch_folder
from tidegate.log.log import Log
from tidegate.storage import WorkerStorageRuntime
from tidegate.storage.backends.folder import FolderBackend
from tidegate.tables.serdes.json import JsonDecoder
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Deduplicate, Tumbling
from tidegate.windows.operators.base import Moment, WindowRows
from tidegate.windows.operators.dedupe import DedupeOperator
from tidegate.windows.operators.windows import WindowOperator

KEYS, ROUND, START = 50_000, 250_000, 1_767_225_600_000
STEP_MS = 18  # between events: 2 M of them lie in 600 minutes, and few share key and minute
COPY_WITHIN = 100_000
MINUTE = 60_000
TASK = "bench/chain/0"
STAGES = ("read", "decode", "dedupe", "window", "checkpoint")
FIXED = np.dtype([("order_id", "<i8"), ("amount", "<f8")])
VALUES = pa.schema([("order_id", pa.binary()), ("amount", pa.float64())])
Result = TypeVar("Result")


def made_events(rows: int, *, hot: bool) -> pa.Table:
    """Columns key, ts, order_id, amount, in the order of the log; a tenth are copies of earlier rows."""
    chance = np.random.default_rng(7)
    copies = rows // 10
    sources = np.sort(chance.choice(rows - copies, copies, replace=False))
    place = np.concatenate([np.arange(rows - copies), sources + chance.integers(1, COPY_WITHIN, copies)])
    origin = np.concatenate([np.arange(rows - copies), sources])[np.argsort(place, kind="stable")]
    keys = chance.integers(0, KEYS, rows - copies)
    if hot:
        keys[chance.random(len(keys)) < 0.5] = 0
    step = STEP_MS * rows // (rows - copies)
    ts = START + np.arange(rows - copies) * step + chance.integers(-1000, 1000, rows - copies)
    columns = {
        "key": key_names(KEYS).take(pa.array(keys)),
        "ts": pa.array(ts),
        "order_id": pa.array(chance.permutation(rows - copies) + 10**9),
        "amount": pa.array(chance.integers(1, 10**6, rows - copies) / 100.0),
    }
    return pa.table(columns).take(pa.array(origin)).combine_chunks()


def json_values(events: pa.Table) -> pa.Array:
    texts = [events["order_id"].cast(pa.string()).chunk(0), events["amount"].cast(pa.string()).chunk(0)]
    joined = pc.binary_join_element_wise(
        '{"order_id":"', texts[0], '","amount":', texts[1], ',"currency":"EUR","status":"delivered"}', ""
    )
    return joined.cast(pa.binary())


def fixed_values(events: pa.Table) -> pa.Array:
    both = np.empty(events.num_rows, FIXED)
    for name in FIXED.names or ():
        both[name] = events[name].to_numpy()
    ends = np.arange(events.num_rows + 1, dtype=np.int32) * FIXED.itemsize
    return pa.Array.from_buffers(pa.binary(), events.num_rows, [None, pa.py_buffer(ends), pa.py_buffer(both)])


class JsonValues:
    """Values as JSON objects, of which two fields are read."""

    name, target = "JSON values", 2e6
    make = staticmethod(json_values)
    columns = "value::json ->> 'order_id' as order_id, (value::json ->> 'amount')::double as amount"

    def __init__(self) -> None:
        self._decoder = JsonDecoder({"order_id": "string", "amount": "double"})

    def decode(self, values: pa.Array) -> pa.RecordBatch:
        decoded = self._decoder.decode(values)
        demand(len(decoded.bad_rows) == 0, "every value can be read")
        columns = decoded.batch
        return pa.RecordBatch.from_arrays([columns[0].view(pa.binary()), columns[1]], schema=VALUES)


class FixedValues:
    """Values as sixteen bytes: a number and a double."""

    name, target = "fixed-width values", 3e6
    make = staticmethod(fixed_values)
    columns = "order_id, amount"

    def decode(self, values: pa.Array) -> pa.RecordBatch:
        _, bounds, content = values.buffers()
        first = np.frombuffer(bounds, np.int32)[values.offset]
        both = np.frombuffer(content, FIXED, len(values), first)
        ids = np.ascontiguousarray(both["order_id"])
        ends = np.arange(len(values) + 1, dtype=np.int32) * 8
        made = pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(ends), pa.py_buffer(ids)])
        return pa.RecordBatch.from_arrays(
            [made, pa.array(np.ascontiguousarray(both["amount"]))], schema=VALUES
        )


@dataclass
class Times:
    """Processor time by stage, and the time on the wall over all."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    wall: float = 0.0

    def of(self, stage: str, run: Callable[[], Result]) -> Result:
        began = process_time()
        result = run()
        self.seconds[stage] += process_time() - began
        return result

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def pieces(log: Log, times: Times) -> Iterator[pa.RecordBatch]:
    """The topic in batches as they come from the log."""
    with log.reader("events") as reader:
        stream = iter(reader)
        while (piece := times.of("read", lambda: next(stream, None))) is not None:
            yield piece


def decoded(records: pa.RecordBatch, codec: JsonValues | FixedValues) -> EventBatch:
    """Records of the log as events."""
    return EventBatch(
        key=records["key"],
        ts=records["timestamp"].cast(pa.int64()).to_numpy(),
        offset=records["offset"].to_numpy(),
        partition=records["partition"].to_numpy(),
        stream_time=np.full(records.num_rows, -1),
        values=codec.decode(records["value"]),
    )


def run_chain(log: Log, folder: Path, codec: JsonValues | FixedValues) -> tuple[Times, list[WindowRows], int]:
    """One pass over the topic with fresh state; times, what was sent on, and how many duplicates were dropped."""
    runtime = WorkerStorageRuntime.open(roomy(), FolderBackend(folder))
    dedupe = DedupeOperator(runtime, TASK, "unique", Deduplicate("order_id", within="1h"), VALUES)
    wanted = resolve({"n": agg.count(), "total": agg.sum("amount")}, VALUES)
    windows = WindowOperator(runtime, TASK, "totals", Tumbling("1m", grace="1h"), wanted)
    times, sent, tokens = Times(), [], []
    moment, began = Moment(START), perf_counter()
    dropped = held = 0
    for records in pieces(log, times):
        batch = times.of("decode", partial(decoded, records, codec))
        unique = times.of("dedupe", partial(dedupe.process, batch, moment)).rows
        demand(isinstance(unique, EventBatch), "dedupe sends events on")
        dropped += len(batch) - len(unique)
        rows = times.of("window", partial(windows.process, unique, moment)).rows
        demand(isinstance(rows, WindowRows), "windows send rows on")
        sent.append(rows)
        held += len(batch)
        if held >= ROUND:
            held = 0
            tokens.append(times.of("checkpoint", partial(runtime.checkpoint, TASK)))
            if len(tokens) > 1:
                times.of("checkpoint", partial(runtime.release_checkpoint, TASK, tokens.pop(0)))
    times.of("checkpoint", partial(runtime.checkpoint, TASK))
    times.wall = perf_counter() - began
    runtime.close()
    return times, sent, dropped


def check(sent: list[WindowRows], dropped: int, events: pa.Table) -> int:
    """What was sent on last for each window is what one query over the different events says; how many windows."""
    flat = pa.table(
        {
            "key": pa.concat_arrays([rows.key for rows in sent]),
            "start": np.concatenate([rows.window_start for rows in sent]),
            "n": pa.concat_arrays([rows.values["n"] for rows in sent]),
            "total": pa.concat_arrays([rows.values["total"] for rows in sent]),
            "sent": np.arange(sum(map(len, sent))),
        }
    )
    connection = duckdb.connect(config={"threads": 1})
    connection.register("sent", flat)
    connection.register("events", events)
    query = f"""
        with found as (select key, start, arg_max(n, sent) n, arg_max(total, sent) total from sent group by all),
        once as (select any_value(key) key, any_value(ts) ts, any_value(amount) amount from events group by order_id),
        expected as (
            select key, ts // {MINUTE} * {MINUTE} as start, count(*) n, sum(amount) total from once group by all
        )
        select count(*), count(found.n), count(expected.n),
            count(*) filter (found.n = expected.n and abs(found.total - expected.total) <= 1e-12 * expected.total)
        from found full join expected using (key, start)
    """
    found = connection.sql(query).fetchall()
    windows, ours, theirs, equal = found[0]
    demand(
        windows == ours == theirs == equal > 0,
        f"{windows} windows: {ours} ours, {theirs} expected, {equal} equal",
    )
    demand(dropped == events.num_rows // 10, f"{dropped} duplicates dropped")
    return int(windows)


def peer_seconds(path: Path, columns: str) -> float:
    """DuckDB's best time for the whole job, one thread."""
    connection = duckdb.connect(config={"threads": 1})
    query = f"""
        select key, ts // {MINUTE} as start, count(*) as n, sum(amount) as total
        from (select any_value(key) as key, any_value(ts) as ts, any_value(amount) as amount
              from (select key, ts, {columns} from read_parquet('{path}')) group by order_id)
        group by all
    """
    fastest = float("inf")
    for _ in range(3):
        began = process_time()
        connection.sql(query).to_arrow_table()
        fastest = min(fastest, process_time() - began)
    return fastest


def measure(
    folder: Path, codec: JsonValues | FixedValues, events: pa.Table, repetitions: int
) -> tuple[Times, int]:
    """The stages of the best of several passes, after one that is checked."""
    values = codec.make(events)
    with Log(folder / "log", durability="os") as log:
        log.create_topic("events", 1)
        with log.writer("events") as writer:
            writer.write(pa.table({"key": events["key"], "value": values, "timestamp": events["ts"]}))
    best = Times(dict.fromkeys(STAGES, float("inf")))
    windows = 0
    with Log(folder / "log", read_only=True) as log:
        for number in range(repetitions):
            gc.collect()
            times, sent, dropped = run_chain(log, folder / f"state-{number}", codec)
            if not windows:
                windows = check(sent, dropped, events)
            del sent
            if times.total < best.total:
                best = times
        if os.environ.get("PROFILE"):
            profile = cProfile.Profile()
            profile.runcall(run_chain, log, folder / "state-profile", codec)
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    return best, windows


def main() -> None:
    report = Report(__doc__.splitlines()[0] if __doc__ else "", rounds=8)
    pa.set_cpu_count(1)
    rows, repetitions = report.numbers["rounds"] * ROUND, 5 if report.full else 3
    for codec in (JsonValues(), FixedValues()):
        rates = {}
        for name in ("even", "hot"):
            events = made_events(rows, hot=name == "hot")
            with scratch_folder() as folder:
                times, windows = measure(folder, codec, events, repetitions)
                rates[name] = rows / times.total
                if name == "even":
                    show(report, folder, codec, events, times, windows)
        skew = rates["even"] / rates["hot"]
        report.figure(
            f"{codec.name}, one key has half", f"{rates['hot'] / 1e6:.2f} M records/s", f"{skew:.2f}× as long",
            "at most 1.5×", skew <= 1.5,
        )  # fmt: skip


def show(
    report: Report,
    folder: Path,
    codec: JsonValues | FixedValues,
    events: pa.Table,
    times: Times,
    windows: int,
) -> None:
    """The figures of the plain case."""
    rows = events.num_rows
    given = {"value": codec.make(events)} if isinstance(codec, JsonValues) else {}
    plain = {name: events[name] for name in (("key", "ts") if given else events.column_names)}
    pq.write_table(pa.table({**plain, **given}), folder / "events.parquet")
    peer = peer_seconds(folder / "events.parquet", codec.columns)
    rate = rows / times.total
    report.figure(
        f"{codec.name}, {windows / 1e6:.2f} M windows", f"{rate / 1e6:.2f} M records/s",
        f"{peer / times.total:.2f}× of DuckDB's", f"{codec.target / 1e6:g} M records/s", rate >= codec.target,
    )  # fmt: skip
    report.figure("  on the wall", f"{rows / times.wall / 1e6:.2f} M records/s")
    for stage, seconds in times.seconds.items():
        share = f"{seconds / times.total:.0%}"
        report.figure(f"  {stage}", f"{seconds / rows * 1e9:.0f} ns a record", share)
    report.figure("  DuckDB, one batch query", f"{rows / peer / 1e6:.2f} M records/s")


if __name__ == "__main__":
    main()
