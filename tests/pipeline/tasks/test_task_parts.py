"""The parts of a task by themselves: packing, consolidating, sharding, where results go, what memory tasks share."""

from __future__ import annotations

import json
import random
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from task_rig import TaskRig
from tidegate.clock import ManualClock
from tidegate.errors import CorruptError, InternalError, InvalidError
from tidegate.integrity import ChainState
from tidegate.kernels.hashing import murmur2
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.steps import Aggregate, AsTable, Dedupe, KeyBy, Sink, Source, Step, To
from tidegate.pipeline.rounds.orders import Tick
from tidegate.pipeline.tasks import names
from tidegate.pipeline.tasks.batching import in_batches, row_bytes
from tidegate.pipeline.tasks.changelog import OutboxState
from tidegate.pipeline.tasks.consolidating import last_of_each
from tidegate.pipeline.tasks.packing import join_events, pack_events, unpack_events
from tidegate.pipeline.tasks.setup import WorkerSetup
from tidegate.pipeline.tasks.timing import Timings
from tidegate.storage import StorageConfig
from tidegate.storage.backends.base import check_name
from tidegate.tables.serdes.base import Long, String
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.events import EventBatch
from tidegate.windows.keys import KeyFormat
from tidegate.windows.kinds import Deduplicate, Tumbling
from tidegate.windows.operators.base import WindowRows

START = 1_767_225_600_000


def batch_of(*keys: bytes | None, first: int = 0, columns: bool = True) -> EventBatch:
    rows = len(keys)
    values = (
        pa.record_batch({"key": pa.array(range(rows), pa.int64()), "ts": pa.array(["x"] * rows)})
        if columns
        else pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
    )
    return EventBatch(
        pa.array(keys, pa.binary()),
        np.arange(rows) + START,
        np.arange(first, first + rows),
        np.full(rows, 3, np.int32),
        np.arange(rows) + START + 1,
        values,
    )


def same(one: EventBatch, other: EventBatch) -> bool:
    numbers = all(
        np.array_equal(getattr(one, name), getattr(other, name))
        and getattr(one, name).dtype == getattr(other, name).dtype
        for name in ("ts", "offset", "partition", "stream_time")
    )
    return numbers and one.key.equals(other.key) and one.values.equals(other.values)


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("keys", [(), (b"a", None, b""), (b"k",) * 500])
def test_events_survive_their_bytes_slices_too(keys: tuple[bytes | None, ...], columns: bool) -> None:
    batch = batch_of(*keys, columns=columns)
    assert same(unpack_events(pack_events(batch)), batch)
    part = batch.slice(min(1, len(batch)), len(batch))
    assert same(unpack_events(pack_events(part)), part)
    assert len(pack_events(batch.slice(0, min(1, len(batch))))) < 3000  # a slice does not carry the whole


@pytest.mark.parametrize("columns", [True, False])
def test_joined_events_lie_behind_each_other(columns: bool) -> None:
    pieces = [batch_of(b"a", b"b", columns=columns), batch_of(b"c", first=2, columns=columns)]
    joined = join_events(pieces)
    assert len(joined) == 3
    assert joined.key.to_pylist() == [b"a", b"b", b"c"]
    assert joined.offset.tolist() == [0, 1, 2]
    assert same(joined.slice(0, 2), pieces[0])


@pytest.mark.parametrize("seed", range(6))
def test_batches_are_cut_by_their_events_however_the_pieces_were(seed: int) -> None:
    chance, clock = random.Random(seed), ManualClock()
    events = batch_of(*(b"k" * chance.choice([0, 1, 5, 300]) for _ in range(400)))
    limits = {"rows": chance.choice([1, 7, 150, 1000]), "size": chance.choice([1, 500, 4000, 1 << 20])}
    whole = list(in_batches([events], Timings(clock), **limits))
    assert sum(map(len, whole)) == 400
    sizes = [int(row_bytes(batch).sum()) for batch in whole]
    for batch, size in zip(whole, sizes, strict=True):
        assert len(batch) <= limits["rows"]
        assert size <= limits["size"] or len(batch) == 1
    places = sorted(chance.sample(range(401), 9))
    pieces = [events.slice(start, stop) for start, stop in pairwise([0, *places, 400])]
    found = list(in_batches(pieces, Timings(clock), **limits))
    assert [batch.offset.tolist() for batch in found] == [batch.offset.tolist() for batch in whole]
    assert all(same(one, other) for one, other in zip(found, whole, strict=True))


def rows_of(lines: list[tuple[bytes, int, int, int]]) -> WindowRows:
    keys, starts, ends, values = zip(*lines, strict=True) if lines else ((), (), (), ())
    numbers = np.array(values, np.int64)
    return WindowRows(
        pa.array(keys, pa.binary()), np.array(starts, np.int64), np.array(ends, np.int64), numbers,
        pa.record_batch({"n": pa.array(values, pa.int64())}), numbers, numbers, numbers,
        deleted=numbers % 5 == 0,
    )  # fmt: skip


@pytest.mark.parametrize(("keys", "span"), [(3, 4), (40, 10**15), (1, 1)])
def test_of_several_results_for_a_window_the_last_stays_in_its_place(keys: int, span: int) -> None:
    chance = random.Random(keys)
    pieces, lines = [], list[tuple[bytes, int, int, int]]()
    for _ in range(4):
        piece = []
        for _ in range(chance.randrange(0, 60)):
            start = chance.randrange(span) * 1000
            piece.append(
                (f"k{chance.randrange(keys)}".encode(), start, start + chance.choice([10, 20]), len(lines))
            )
            lines.append(piece[-1])
        pieces.append(rows_of(piece))
    found = last_of_each(pieces)
    last = {line[:3]: line for line in lines}
    expected = [line for line in lines if last[line[:3]] == line]
    assert found.values["n"].to_pylist() == [line[3] for line in expected]
    assert found.key.to_pylist() == [line[0] for line in expected]
    assert found.deleted is not None
    assert found.deleted.tolist() == [line[3] % 5 == 0 for line in expected]


def test_lists_of_results_that_all_stay_are_not_copied() -> None:
    """One window of lists can be a large part of the process's memory."""

    def piece(key: bytes, *lists: list[int]) -> WindowRows:
        rows = len(lists)
        zeros = np.zeros(rows, np.int64)
        values = pa.record_batch({"l": pa.array(lists, pa.list_(pa.int64()))})
        return WindowRows(pa.array([key] * rows), zeros, np.arange(rows), zeros, values, zeros, zeros, zeros)

    def place(rows: WindowRows) -> int:
        return int(rows.values["l"].values.buffers()[1].address)

    first, again, other = piece(b"k", [1], [2, 3]), piece(b"k", [4], [5]), piece(b"o", [6])
    assert place(last_of_each([first])) == place(first)
    assert place(last_of_each([first, again])) == place(again)
    assert last_of_each([first, other, again]).values["l"].to_pylist() == [[6], [4], [5]]


def flow_of(*sinks: Sink, shards: int = 0, dedupe: bool = False, count: bool = False) -> Flow:
    steps: list[Step] = [KeyBy("who", String(), shards=shards)] if shards else []
    steps += [Dedupe(Deduplicate("who", within="1000ms"))] if dedupe else []
    wanted = (agg.count(),) if count else (agg.count().named("n"), agg.max("x").named("most"))
    steps.append(Aggregate(Tumbling("1000ms"), wanted))
    return Flow(Source("events", String(), Json(who="string", x="int64")), tuple(steps), sinks)


def test_a_shard_is_the_partition_that_kafka_would_choose(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of(To("results"), shards=5)) as rig:
        keys = [f"key-{number}".encode() for number in range(200)]
        batch = batch_of(*keys, None)
        parts = rig.worker.split("results", batch)
        seen = list[int]()
        for shard, part in parts:
            seen += part.offset.tolist()
            for key in part.key.to_pylist():
                chosen = 0 if key is None else (murmur2(np.frombuffer(key, np.uint8)) & 0x7FFFFFFF) % 5
                assert chosen == shard
            assert part.offset.tolist() == sorted(part.offset.tolist())
        assert sorted(seen) == list(range(201))
        assert rig.worker.split("results", batch.slice(0, 0)) == []
    with (
        TaskRig(tmp_path / "plain", flow_of(To("results"))) as rig,
        pytest.raises(InternalError, match="not re-keyed"),
    ):
        rig.worker.split("results", batch)


def write_some(rig: TaskRig, rows: int = 60) -> None:
    for partition in range(rig.partitions):
        rig.write(
            [
                (f"k{n}".encode(), START + n, json.dumps({"who": f"w{n % 7}", "x": n}).encode())
                for n in range(partition, rows, rig.partitions)
            ],
            partition=partition,
        )


@pytest.mark.parametrize("shards", [0, 3])
def test_tasks_write_their_own_partitions_where_there_are_as_many(tmp_path: Path, shards: int) -> None:
    with TaskRig(tmp_path, flow_of(To("results"), shards=shards), partitions=2) as rig:
        write_some(rig)
        for number, task in rig.round().tasks.items():
            assert task.parcel is not None
            assert [section.partition for section in task.parcel.sections] == [number]


def test_other_numbers_of_partitions_are_filled_by_key(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of(To("results")), partitions=2, sink_partitions=3) as rig:
        write_some(rig)
        found = rig.round()
        assert all(task.parcel and len(task.parcel.sections) == 3 for task in found.tasks.values())
        rig.deliver()
        for key, partition in _places(rig):
            assert (murmur2(np.frombuffer(key, np.uint8)) & 0x7FFFFFFF) % 3 == partition


def _places(rig: TaskRig) -> list[tuple[bytes, int]]:
    from tidegate.integrity.columns import without_control
    from tidegate.windows.keys import decode_keys

    found = list[tuple[bytes, int]]()
    for batch in rig.records().combine_chunks().to_batches():
        data = without_control(batch)
        keys = decode_keys(data.column("key"), KeyFormat.CHANGELOG, size_ms=1000)
        found += zip(keys.inner.to_pylist(), data.column("partition").to_pylist(), strict=True)
    return found


def test_two_sinks_of_one_flow_get_the_same_results_in_their_own_forms(tmp_path: Path) -> None:
    flow = flow_of(To("results"), To("other", key_format="topic", integrity=False), AsTable("kept"))
    with TaskRig(tmp_path, flow) as rig:
        write_some(rig)
        rig.round()
        rig.deliver()
        plain = rig.records("other")
        assert [[each["key"] for each in held] for held in plain["headers"].to_pylist()] == [["settled"]] * 60
        assert len(rig.windows(KeyFormat.CHANGELOG, size_ms=1000)) == 60
        assert sorted(map(json.loads, plain["value"].to_pylist()), key=str) == sorted(
            ({"n": 1, "most": n} for n in range(60)), key=str
        )


def test_a_lone_count_is_eight_bytes(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of(To("results"), count=True)) as rig:
        write_some(rig, 3)
        rig.round()
        rig.deliver()
        values = {value for *_, value in rig.windows(KeyFormat.CHANGELOG, size_ms=1000)}
        assert values == {Long().encode(1)}


def test_updates_of_a_large_round_are_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(in_batches, rows=16)
    monkeypatch.setattr("tidegate.pipeline.tasks.worker.in_batches", small)
    flow = Flow(
        Source("events", String(), Json(who="string", x="int64")),
        (KeyBy("who", String(), shards=1), Aggregate(Tumbling("1000ms"), (agg.count().named("n"),))),
        (To("results"),),
    )
    with TaskRig(tmp_path, flow, partitions=4) as rig:
        write_some(rig, 64)
        found = rig.round()
        assert found.tasks[0].rows_sent == 7
        rig.deliver()
        rows = rig.windows(KeyFormat.CHANGELOG, size_ms=1000)
        counts = sorted(int.from_bytes(value, "big") for *_, value in rows)
        assert counts == [9, 9, 9, 9, 9, 9, 10]


def test_a_round_without_records_changes_nothing_and_gives_the_same_token(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of(To("results"), dedupe=True)) as rig:
        write_some(rig)
        first = rig.round()
        second = rig.round()
        assert second.tasks[0].token == first.tasks[0].token
        assert second.tasks[0].parcel is None
        assert second.tasks[0].rows_sent == 0


def test_the_end_of_the_input_puts_nothing_but_results_into_the_topic(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of(To("results"))) as rig:
        write_some(rig)
        rig.round()
        assert rig.round(tick=Tick(START, closing=True)).tasks[0].parcel is None


def test_positions_survive_their_bytes_and_other_bytes_are_refused() -> None:
    state = OutboxState()
    state.move("life", "topic", 3, ChainState(chain=4, sequence=5))
    restored = OutboxState()
    restored.restore_progress(state.encode_progress())
    assert restored.position("life", "topic", 3) == ChainState(chain=4, sequence=5)
    assert restored.position("life", "topic", 2) == ChainState()
    assert restored.position("other", "topic", 3) == ChainState()
    restored.restore_progress(b"")
    assert restored.position("life", "topic", 3) == ChainState()
    for wrong in (b"\x02\x92", b"\x01\xc1"):
        with pytest.raises(CorruptError):
            restored.restore_progress(wrong)


def test_an_error_in_a_round_leaves_the_task_at_its_token(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of(To("results"))) as rig:
        write_some(rig)
        rig.round({0: 30})
        token = rig.done.tokens[0]
        rig.done.tokens[0] = b"not a token"
        with pytest.raises((CorruptError, InvalidError)):
            rig.attempt()
        rig.done.tokens[0] = token
        rig.round()
        rig.deliver()
        assert len(rig.windows(KeyFormat.CHANGELOG, size_ms=1000)) == 60


def test_more_tasks_than_storage_was_set_up_for_share_its_memory() -> None:
    flow = flow_of(To("results"), shards=64)
    setup = WorkerSetup(
        "app", (flow,), "log", "state", StorageConfig(), partitions={"events": 2, "results": 64}
    )
    config = setup.runtime_config
    assert config.max_tasks == 64
    assert config.deleted_by == "master"
    assert config.worker_total_bytes == StorageConfig().worker_total_bytes
    assert 0 < config.write_buffer.reserve_bytes < StorageConfig().write_buffer.reserve_bytes
    few = WorkerSetup(
        "app", (flow_of(To("results")),), "log", "state", StorageConfig(), partitions={"events": 2}
    )
    assert few.runtime_config.write_buffer == StorageConfig().write_buffer
    with pytest.raises(InvalidError, match="has no flow 'nothing'; it has results"):
        few.flow("nothing")


@pytest.mark.parametrize("name", ["a.b", ".hidden", "with space", "ü/ö", "a:b"])
def test_names_of_users_become_names_of_objects(name: str) -> None:
    for made in (
        names.storage_task(name, name, 1),
        names.parcel_name(name, name, 2, 3, "ab"),
        names.letters_name(name, name, 2, 3, "ab"),
    ):
        assert check_name(made) == made
