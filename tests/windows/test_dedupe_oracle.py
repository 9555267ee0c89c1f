"""Deduplication equals a naive oracle on random streams, whatever the cuts, restarts, replays and evictions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maintenance_steps import dumping
from task_oracles import VALUES, Oracle, Record, batch_of, forwarded, operator_on
from tidegate.windows.kinds import Deduplicate
from tidegate.windows.operators.base import Moment
from tidegate.windows.operators.dedupe import DedupeOperator
from window_oracles import ms
from workers import TASK, Worker

NOW = Moment(now_ms=0)


@st.composite
def streams(draw: st.DrawFn) -> list[Record]:
    """Records around a moving time: few ids, copies, lateness, replays, records without id."""
    seed, count = draw(st.integers(0, 2**32)), draw(st.integers(1, 150))
    chance = np.random.default_rng(seed)
    partitions = int(chance.integers(1, 3))
    now, records, next_offset = 0, [], [0] * partitions
    for _ in range(count):
        now += int(chance.choice([0, 1, 5, 20, 200], p=[0.3, 0.3, 0.25, 0.13, 0.02]))
        if records and chance.random() < 0.08:  # a stretch of one partition is sent again
            again = records[int(chance.integers(len(records)))]
            records += [
                each for each in records if each.partition == again.partition and each.offset >= again.offset
            ][:4]
            continue
        partition = int(chance.integers(partitions))
        identity = None if chance.random() < 0.05 else f"id{chance.integers(6)}"
        key = [None, b"", b"key0", b"key1"][int(chance.choice(4, p=[0.15, 0.1, 0.4, 0.35]))]
        ts = max(0, now - int(chance.choice([0, 3, 15, 60, 150], p=[0.5, 0.2, 0.15, 0.1, 0.05])))
        records.append(Record(identity, ts, next_offset[partition], key, partition))
        next_offset[partition] += 1
    return records


definitions = st.builds(
    Deduplicate,
    st.just("id"),
    st.integers(1, 80).map(ms),
    grace=st.integers(0, 80).map(ms),
    late=st.sampled_from(["drop", "forward"]),
    refresh=st.booleans(),
)


@settings(max_examples=120, deadline=None)
@given(streams(), definitions, st.integers(0, 2**32), st.sampled_from([7, 50, 1000]))
def test_equals_the_oracle_whatever_the_cuts_restarts_and_evictions(
    records: list[Record], definition: Deduplicate, seed: int, bucket_ms: int
) -> None:
    chance = np.random.default_rng(seed)
    oracle = Oracle(definition)
    oracle.times = {each.partition: -1 for each in records}
    partitions = tuple(sorted(oracle.times))
    verdicts = [oracle.judge(each) for each in records]
    expected = [
        (each.partition, each.offset)
        for each, verdict in zip(records, verdicts, strict=True)
        if oracle.goes_on(verdict)
    ]
    worker = Worker()
    operator = operator_on(worker, definition, bucket_ms=bucket_ms, partitions=partitions)
    found: list[tuple[int, int]] = []
    late: list[int] = []
    at = 0
    while at < len(records):
        step = int(chance.choice([1, 1, 2, 5, 40]))
        output = operator.process(batch_of(records[at : at + step]), NOW)
        found += forwarded(output)
        late += [] if output.late is None else output.late.events.offset.tolist()
        at += step
        state = operator.states[0]
        action = chance.integers(5)
        if action == 0:
            worker.runtime.maintain(TASK, 1000)
        elif action == 1 and (buckets := state.index.all_buckets()):
            worker.run(dumping(worker.runtime, TASK, state, buckets, evict=bool(chance.integers(2))))
        elif action == 2:
            token = worker.runtime.checkpoint(TASK)
            worker = Worker(backend=worker.backend, seed=at + 1)
            operator = DedupeOperator(
                worker.runtime, TASK, "dedupe", definition, VALUES, bucket_ms=bucket_ms, partitions=partitions
            )
            worker.runtime.apply_checkpoint(TASK, token)
    assert found == expected
    names = ("new", "replays", "duplicates", "late", "no_id")
    assert operator.counters == {name: verdicts.count(name) for name in names if name in verdicts}
    if definition.late == "drop":
        is_late = [each.offset for each, verdict in zip(records, verdicts, strict=True) if verdict == "late"]
        assert late == is_late


@pytest.mark.parametrize("seed", range(4))
def test_large_batches_equal_the_oracle(seed: int) -> None:
    chance = np.random.default_rng(seed)
    times = np.arange(30_000) // 10 - chance.integers(0, 60, 30_000)
    ids = chance.integers(0, 8_000, 30_000)
    records = [Record(str(i), max(0, int(t)), n) for n, (i, t) in enumerate(zip(ids, times, strict=True))]
    oracle = Oracle(Deduplicate("id", "400ms", grace="50ms"))
    expected = [(0, each.offset) for each in records if oracle.goes_on(oracle.judge(each))]
    operator = operator_on(Worker(), oracle.definition, bucket_ms=100)
    found = []
    for start in range(0, len(records), 7_000):
        found += forwarded(operator.process(batch_of(records[start : start + 7_000]), NOW))
    assert found == expected
