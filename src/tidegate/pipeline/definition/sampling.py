"""A minute of a log, taken through the steps of a flow that keep nothing: how many records, keys, identities it has.

At most `MAX_RECORDS` are read from the end of the log, the same from each partition; what comes of those in the
newest minute of event time says how fast state grows. Values that cannot be read are left out here; the run will
say what becomes of them.

Thread rule: opens the log for reading and closes it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.clock import SystemClock
from tidegate.errors import TidegateError
from tidegate.integrity.tolerance import tolerance_of
from tidegate.log.access.connect import is_kafka, open_log
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.steps import Aggregate, Dedupe, Lookup
from tidegate.storage import open_backend
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Hopping

SAMPLE_MS = 60_000
MAX_RECORDS = 200_000


@dataclass(frozen=True)
class Sample:
    """What was seen: rates are per second of event time, after the steps before the first that keeps state."""

    records: int  # as read
    span_ms: int  # of event time
    partitions: int
    records_per_second: float
    keys: int
    key_bytes: float
    panes_per_second: float | None = None  # different (key, pane) pairs, where windows have panes


def sample_flow(flow: Flow, log: str, client: Mapping[str, str]) -> Sample | str:
    """A sample, or why there is none."""
    if not is_kafka(log) and not Path(log).is_dir():
        return f"there is no log at {log} yet"
    settings: dict[str, Any] = {} if is_kafka(log) else {"read_only": True}
    try:
        with open_log(log, client=client or None, **settings) as opened:
            if flow.source.topic not in opened.topics():
                return f"there is no topic {flow.source.topic} yet"
            numbers = tuple(opened.describe(flow.source.topic).partition_numbers)
            batches = list(_newest(opened, flow.source.topic, numbers))
    except TidegateError as error:  # a plan can be told without looking
        return f"the log could not be looked at ({error})"
    events = [each for each in _events(flow, batches) if len(each)]
    if not events:
        return f"{flow.source.topic} holds nothing that comes so far"
    return _measured(flow, _last_minute(events), sum(batch.num_rows for batch in batches), len(numbers))


def gap_doubts(flow: Flow, log: str, client: Mapping[str, str]) -> list[str]:
    """Where loss in the flow's topic would not show to a validator, each reason once; none where nobody can tell."""
    if not is_kafka(log) and not Path(log).is_dir():
        return []
    settings: dict[str, Any] = {} if is_kafka(log) else {"read_only": True}
    topic = flow.source.topic
    try:
        with open_log(log, client=client or None, **settings) as opened:
            if topic not in opened.topics():
                return []
            found = [
                (number, tolerance_of(opened, topic, number).doubt())
                for number in opened.describe(topic).partition_numbers
            ]
    except TidegateError:  # told with the sample
        return []
    told = (f"{topic}-{number}: {doubt}" if "offset" in doubt else doubt for number, doubt in found if doubt)
    return list(dict.fromkeys(told))


def _newest(log: Any, topic: str, numbers: tuple[int, ...]) -> Iterator[pa.RecordBatch]:
    """The last records of every partition."""
    with log.reader(topic, start=-max(1, MAX_RECORDS // len(numbers))) as reader:
        yield from reader


def _events(flow: Flow, batches: list[pa.RecordBatch]) -> Iterator[EventBatch]:
    """Their events, as they come to the first step that keeps state."""
    from tidegate.pipeline.tasks.decoding import RecordDecoder
    from tidegate.pipeline.tasks.stateless import Around, stage_of

    around = Around(
        open_backend("memory://"), SystemClock()
    )  # only lookups look around, and none comes so far
    decoder = RecordDecoder(flow.source, flow.schemas[0])
    stages = []
    for place, step in enumerate(flow.steps):
        if isinstance(step, Dedupe | Aggregate | Lookup):
            break
        stages.append(stage_of(step, flow.schemas[place], flow.key_serdes[place], around))
    for batch in batches:
        decoded = decoder.decode(batch)
        good = np.ones(batch.num_rows, np.bool_)
        good[decoded.bad_rows] = False
        if decoded.absent is not None:
            good &= ~decoded.absent
        times = decoder.event_time(decoded.values, batch.column("timestamp"))
        events = EventBatch(
            decoded.key,
            times,
            batch.column("offset").to_numpy(),
            batch.column("partition").to_numpy(),
            times,
            decoded.values,
        ).take(good & (times >= 0))
        for stage in stages:
            if stage is not None and len(events):
                events = stage(events)
        yield events


def _last_minute(events: list[EventBatch]) -> list[EventBatch]:
    """What lies in the newest minute of event time; a few clocks that run ahead do not make it empty."""
    newest = int(np.quantile(np.concatenate([each.ts for each in events]), 0.99, method="higher"))
    kept = [each.take((each.ts > newest - SAMPLE_MS) & (each.ts <= newest)) for each in events]
    return [each for each in kept if len(each)]


def _measured(flow: Flow, events: list[EventBatch], read: int, partitions: int) -> Sample:
    ts = np.concatenate([each.ts for each in events])
    keys = pa.chunked_array([each.key for each in events]).dictionary_encode().combine_chunks()
    if isinstance(keys, pa.ChunkedArray):
        keys = pa.concat_arrays(keys.chunks)
    codes = keys.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    span_ms = max(1000, int(ts.max() - ts.min()) + 1)
    lengths = [len(key) for key in keys.dictionary.to_pylist() if key is not None]
    panes = None
    if flow.window is not None and isinstance(flow.window.kind, Hopping):
        width = min(flow.window.kind.pane_ms, SAMPLE_MS)
        pairs = np.unique(np.stack([codes.astype(np.int64), ts // width]), axis=1).shape[1]
        panes = pairs * 1000 / max(span_ms, width)
    return Sample(
        records=read,
        span_ms=span_ms,
        partitions=partitions,
        records_per_second=len(ts) * 1000 / span_ms,
        keys=len(lengths),
        key_bytes=sum(lengths) / max(1, len(lengths)),
        panes_per_second=panes,
    )
