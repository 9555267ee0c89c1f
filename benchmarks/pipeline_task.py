"""How fast is one task of a pipeline, from a log to a changelog, and what does it add to the bare operators?

Back of the envelope, for an event: the bare chain (`windows_chain`) takes 300 to 450 ns. A task adds finding headers,
stream time and joining batches, 20 ns; stamping and encoding a record of the changelog is another 250 ns, writing,
syncing and appending its 100 bytes 100.

One process, one core, rounds of 250 k events with a checkpoint each, as in `windows_chain`, whose events these are;
nothing of a master but the orders. Bare chain and task take turns, and the best of each counts, by processor time.
Results are read back and compared with one query over the events.

    python benchmarks/pipeline_task.py [--rounds 8] [--full] [--json]
"""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import pyarrow as pa

from _report import Report, demand
from _storage import roomy, scratch_folder
from tidegate.integrity.columns import without_control
from tidegate.log.log import Log
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.steps import Aggregate, AsTable, Dedupe, Sink, Source, Step, To, Validate
from tidegate.pipeline.rounds.orders import Delivery, SourceOrder, TaskOrder, Tick
from tidegate.pipeline.tasks.setup import WorkerSetup
from tidegate.pipeline.tasks.worker import Worker
from tidegate.tables.serdes.base import DecodedColumn, String
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.keys import KeyFormat, decode_keys
from tidegate.windows.kinds import Deduplicate, Tumbling
from tidegate.windows.operators.base import WindowRows
from windows_chain import (
    FIXED,
    MINUTE,
    ROUND,
    START,
    VALUES,
    FixedValues,
    JsonValues,
    check,
    made_events,
    run_chain,
)

NO_ROWS = np.empty(0, np.int64)


class FixedSerde:
    """The sixteen bytes of `windows_chain` as a serde: a number, kept as bytes, and a double."""

    name = "order"
    fixed_bytes: int | None = FIXED.itemsize
    arrow_type = pa.struct(list(VALUES))

    def encode(self, value: Any) -> bytes | None:
        raise NotImplementedError("the benchmark writes columns")

    def decode(self, raw: bytes | None) -> Any:
        raise NotImplementedError("the benchmark reads columns")

    def encode_column(self, values: pa.Array) -> pa.BinaryArray:
        raise NotImplementedError("the benchmark writes its own")

    def decode_column(self, raw: pa.Array) -> DecodedColumn:
        if not len(raw):
            return DecodedColumn(pa.array([], self.arrow_type), NO_ROWS, ())
        columns = FixedValues().decode(raw).columns
        return DecodedColumn(pa.StructArray.from_arrays(columns, fields=list(VALUES)), NO_ROWS, ())


@dataclass
class Passed:
    """One pass over the topic by a task."""

    seconds: float = 0.0
    wall: float = 0.0
    stages: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    duplicates: int = 0


def flow_of(serde: Any, sinks: tuple[Sink, ...], *, validate: bool) -> Flow:
    wanted = (agg.count().named("n"), agg.sum("amount").named("total"))
    steps: list[Step] = [Validate()] if validate else []
    steps += [
        Dedupe(Deduplicate("order_id", within="1h")),
        Aggregate(Tumbling("1m", grace="1h"), wanted),
    ]
    return Flow(Source("events", String(), serde), tuple(steps), sinks)


def run_task(log: Log, state: Path, flow: Flow, round_records: int = ROUND) -> Passed:
    """One pass with fresh state, what each round sends delivered by the next."""
    setup = WorkerSetup(
        "bench", (flow,), str(log.path), str(state), roomy(), partitions={"events": 1, flow.name: 1}
    )
    worker, done = Worker(setup, log=log), Passed()
    end = log.partition_rows("events")[0]["high_watermark"]
    offset, source, token, base = 0, b"", b"", 0
    waiting: tuple[Delivery, ...] = ()
    number, tick = 0, Tick(START + 86_400_000)
    began, wall = process_time(), perf_counter()
    while offset < end:
        number += 1
        reading = worker.read(
            SourceOrder(flow.name, 0, offset, min(end, offset + round_records), source), tick
        )
        result = worker.work(TaskOrder(flow.name, 0, token, waiting), tick, number, reading)
        read = reading.result()
        offset, source, token, waiting = read.next_offset, read.state, result.token, ()
        if result.parcel is not None:
            waiting = (Delivery(number, result.parcel, (base,)),)
            base += result.parcel.sections[0].records
        done.stages.update(result.timings_ms)
        done.rows += result.rows_sent
        done.duplicates += result.counters.get("dedupe.duplicates", 0)
    worker.deliver(waiting)
    done.seconds, done.wall = process_time() - began, perf_counter() - wall
    worker.close()
    return done


def results(log: Log, topic: str) -> list[WindowRows]:
    """What a reader of the changelog gets."""
    value, found = Json(n="int64", total="double"), list[WindowRows]()
    with log.reader(topic) as reader:
        for batch in reader:
            data = without_control(batch)
            keys = decode_keys(data.column("key"), KeyFormat.CHANGELOG, size_ms=MINUTE)
            decoded = value.decode_values(data.column("value"))
            demand(len(decoded.bad_rows) == 0, "every result can be read")
            none = np.zeros(len(keys), np.int64)
            found.append(WindowRows(keys.inner, keys.start, keys.end, none, decoded.batch, none, none, none))
    return found


def measure(
    report: Report, folder: Path, codec: JsonValues | FixedValues, events: pa.Table, repetitions: int
) -> None:
    """Bare chain and tasks in turns over one log."""
    rows = events.num_rows
    serde = Json(order_id="string", amount="double") if isinstance(codec, JsonValues) else FixedSerde()
    table = pa.table({"key": events["key"], "value": codec.make(events), "timestamp": events["ts"]})
    with Log(folder / "log", durability="os") as log:
        log.create_topic("events", 1)
        with log.writer("events") as writer:
            writer.write(table)
        plain = flow_of(serde, (AsTable("results"),), validate=True)
        bare, alone, sending = float("inf"), Passed(float("inf")), Passed(float("inf"))
        for number in range(repetitions):
            gc.collect()
            times, sent, dropped = run_chain(log, folder / f"bare-{number}", codec)
            if number == 0:
                check(sent, dropped, events)
            del sent
            bare = min(bare, times.total)
            gc.collect()
            passed = run_task(log, folder / f"plain-{number}", plain)
            alone = min(alone, passed, key=lambda each: each.seconds)
            topic = f"results-{number}"
            log.create_topic(topic, 1)
            gc.collect()
            passed = run_task(log, folder / f"to-{number}", flow_of(serde, (To(topic),), validate=True))
            if number == 0:
                check(results(log, topic), passed.duplicates, events)
            sending = min(sending, passed, key=lambda each: each.seconds)
            log.delete_topic(topic)
        if os.environ.get("PROFILE"):
            log.create_topic("profiled", 1)
            profile = cProfile.Profile()
            flow = flow_of(serde, (To("profiled"),), validate=True)
            profile.runcall(run_task, log, folder / "state-profile", flow)
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    over = alone.seconds / bare - 1
    report.figure(f"{codec.name}: the bare chain", f"{rows / bare / 1e6:.2f} M records/s")
    report.figure(
        f"{codec.name}: a task without a changelog", f"{rows / alone.seconds / 1e6:.2f} M records/s",
        f"{over:+.1%} of the bare chain's time", "at most 10 % more", over <= 0.10,
    )  # fmt: skip
    show(report, alone, rows)
    extra = (sending.seconds - alone.seconds) / sending.rows
    report.figure(
        f"{codec.name}: a task with .to_topic(topic), {sending.rows / 1e6:.2f} M results",
        f"{rows / sending.seconds / 1e6:.2f} M records/s", f"{extra * 1e9:.0f} ns a result",
    )  # fmt: skip
    show(report, sending, rows)


def show(report: Report, passed: Passed, rows: int) -> None:
    """Where the time on the wall went, as the task itself says."""
    total = sum(passed.stages.values())
    report.figure("  on the wall", f"{rows / passed.wall / 1e6:.2f} M records/s")
    for stage, ms in passed.stages.most_common():
        if ms * 50 >= total:
            report.figure(f"  {stage}", f"{ms / rows * 1e6:.0f} ns a record", f"{ms / total:.0%}")


def main() -> None:
    report = Report(__doc__.splitlines()[0] if __doc__ else "", rounds=8)
    pa.set_cpu_count(1)
    rows, repetitions = report.numbers["rounds"] * ROUND, 5 if report.full else 3
    events = made_events(rows, hot=False)
    for codec in (JsonValues(), FixedValues()):
        with scratch_folder() as folder:
            measure(report, folder, codec, events, repetitions)


if __name__ == "__main__":
    main()
