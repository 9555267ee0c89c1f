"""Ranges of a log as events: what stops a partition, what is set aside, whose time counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from task_rig import TaskRig, last_of_each
from tidegate.errors import CorruptError
from tidegate.integrity.columns import read_columns
from tidegate.pipeline.dead_letters import SourceState, read_letters
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.messages import SourceOrder, SourceResult, Tick
from tidegate.pipeline.topology import (
    Aggregate,
    Dedupe,
    Filter,
    KeyBy,
    OnError,
    Select,
    Source,
    Step,
    To,
    Validate,
)
from tidegate.tables.serdes.base import Long, String, windowed
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.keys import KeyFormat, encode_keys
from tidegate.windows.kinds import Deduplicate, Tumbling
from tidegate.windows.operators.late import LateSettings
from tidegate.windows.operators.windowed_operator import FutureGuard

START = 1_767_225_600_000
COUNT = Aggregate(Tumbling("1000ms"), (agg.count().named("n"),))


def flow_of(
    *steps: Step, on_error: OnError = "fail", value: Any = None, timestamp: str | None = None
) -> Flow:
    source = Source(
        "events", String(), value or Json(n="int64"), on_error=on_error, timestamp=timestamp
    )  # fmt: skip
    return Flow(source, steps, (To("results"),))


def rows(*values: object, first: int = START) -> list[tuple[bytes, int, bytes]]:
    """A record every 10 ms; values that are no bytes are JSON's `n`."""
    made = []
    for place, value in enumerate(values):
        raw = value if isinstance(value, bytes | None) else json.dumps({"n": value}).encode()
        made.append((f"k{place % 2}".encode(), first + 10 * place, raw))
    return made


def counts(rig: TaskRig) -> dict[tuple[Any, ...], int]:
    """The windows' counts by key and start."""
    rig.deliver()
    found = last_of_each(rig.windows(KeyFormat.CHANGELOG, size_ms=1000))
    return {
        (key, start - START): int.from_bytes(value, "big") for (key, start, _), (_, value) in found.items()
    }


# -- values that cannot be read ------------------------------------------------------------------


def test_an_unreadable_value_stops_the_partition_and_all_before_it_counts(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of(COUNT)) as rig:
        rig.write(rows(1, 2, 3, b"{broken", 5))
        result = rig.round().sources[0]
        stopped = result.stopped
        assert stopped is not None
        assert (stopped.reason, stopped.offset, result.next_offset, result.records) == ("unreadable", 3, 3, 3)
        assert "events-0 stopped at offset 3" in stopped.message
        assert "--skip-to 4" in stopped.remedy
        assert counts(rig) == {(b"k0", 0): 2, (b"k1", 0): 1}
        assert rig.round().sources[0].stopped == stopped  # nothing changes until somebody decides
        rig.done.offsets[0] = 4
        result = rig.round().sources[0]
        assert (result.stopped, result.next_offset) == (None, 5)
        assert result.counters["skipped_offsets"] == 1
        assert counts(rig) == {(b"k0", 0): 3, (b"k1", 0): 1}


@pytest.mark.parametrize("on_error", ["drop", "keep"])
def test_unreadable_values_are_left_out_and_kept_if_asked(tmp_path: Path, on_error: OnError) -> None:
    with TaskRig(tmp_path, flow_of(COUNT, on_error=on_error)) as rig:
        rig.write(rows(1, b"{broken", 3, b"[]"))
        found = rig.round()
        rig.write(rows(b"7", 5, first=START + 40))
        rig.attempt()  # died before its commit: its letters are nobody's
        rig.restart()
        later = rig.round()
        assert (found.counter("unreadable"), later.counter("unreadable")) == (2, 1)
        assert counts(rig) == {(b"k0", 0): 2, (b"k1", 0): 1}
        letters = read_letters(rig.backend, later.sources[0].state)
        state = SourceState.decoded(later.sources[0].state)
        if on_error == "drop":
            assert letters.num_rows == 0
            return
        assert letters["offset"].to_pylist() == [1, 3, 4]
        assert letters["value"].to_pylist() == [b"{broken", b"[]", b"7"]
        assert letters["key"].to_pylist() == [b"k1", b"k1", b"k0"]
        assert all(letters["reason"].to_pylist())
        assert state.letter_count == 3
        assert read_letters(rig.backend, found.sources[0].state)["offset"].to_pylist() == [1, 3]


def test_damaged_letters_are_an_error_and_never_an_answer(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of(COUNT, on_error="keep")) as rig:
        rig.write(rows(b"broken"))
        state = rig.round().sources[0].state
        name = SourceState.decoded(state).letters
        data = bytearray(memoryview(rig.backend.read(name)))
        data[-9] ^= 1
        rig.backend.delete(name)
        rig.backend.put(name, [bytes(data)])
        with pytest.raises(CorruptError, match="CRC"):
            read_letters(rig.backend, state)


def test_deletions_are_no_events_where_values_are_declared(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of(COUNT)) as rig:
        rig.write(rows(1, None, 3))
        assert rig.round().counter("no_value") == 1
        assert counts(rig) == {(b"k0", 0): 2}


def test_a_key_that_an_expression_cannot_read_stops_the_partition_right_before_it(tmp_path: Path) -> None:
    source = Source("events", Long(), Json(n="int64"))
    flow = Flow(source, (Filter("key > 0"), COUNT), (To("results"),))
    with TaskRig(tmp_path, flow) as rig:
        keys = [(5).to_bytes(8, "big"), (0).to_bytes(8, "big"), b"short", (6).to_bytes(8, "big")]
        rig.write([(key, START + place, b'{"n":1}') for place, key in enumerate(keys)])
        result = rig.round().sources[0]
        assert result.stopped is not None
        assert (result.stopped.reason, result.stopped.offset, result.next_offset) == ("unreadable", 2, 2)
        assert counts(rig) == {(keys[0], 0): 1}


def test_a_damaged_log_stops_the_partition_and_what_is_before_counts(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of(COUNT)) as rig:
        rig.write(rows(1, 2))
        rig.write(rows(3, 4))
        rig.log.release("events", 0)
        path = next((tmp_path / "events-0").glob("*.log"))
        data = bytearray(path.read_bytes())
        data[-2] ^= 255
        path.write_bytes(bytes(data))
        result = rig.round({0: 4}).sources[0]
        assert result.stopped is not None
        assert (result.stopped.reason, result.next_offset) == ("corrupt", 2)
        assert counts(rig) == {(b"k0", 0): 1, (b"k1", 0): 1}


def test_offsets_that_aged_out_stop_the_partition(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of(COUNT)) as rig:
        rig.write(rows(1, 2, 3))
        rig.log.partition("events", 0).delete_records_before(2)
        result = rig.round({0: 3}).sources[0]
        assert result.stopped is not None
        assert (result.stopped.reason, result.next_offset) == ("lost", 0)
        assert result.stopped.remedy == "tidegate app resume app --partition results:0 --skip-to 2"


# -- producers' numbering ------------------------------------------------------------------------


def numbered(rig: TaskRig, *values: object) -> pa.Table:
    """The records of a sender, control records among them."""
    rig.write(rows(*values), integrity=True)
    with rig.log.reader("events", control_records=True) as reader:
        return reader.read_all().combine_chunks()


def rewritten(folder: Path, flow: Flow, table: pa.Table) -> TaskRig:
    """Another log with these records as they are."""
    rig = TaskRig(folder, flow)
    with rig.log.writer("events") as writer:
        writer.write(table.select(["key", "value", "timestamp", "headers"]), partition=0)
    return rig


def data_rows(table: pa.Table) -> np.ndarray[Any, Any]:
    return np.flatnonzero(~read_columns(table["headers"].combine_chunks()).is_control)


def test_repeats_and_control_records_are_left_out(tmp_path: Path) -> None:
    flow = flow_of(Validate(), COUNT)
    with TaskRig(tmp_path / "good", flow) as rig:
        table = numbered(rig, 1, 2, 3)
    twice = pa.concat_tables([table.slice(0, 3), table.slice(1)]).combine_chunks()
    with rewritten(tmp_path / "twice", flow, twice) as rig:
        rig.round({0: 2})
        rig.restart()
        found = rig.round()
        assert found.sources[0].verdicts["duplicate"] == 2
        assert found.sources[0].stopped is None
        assert counts(rig) == {(b"k0", 0): 2, (b"k1", 0): 1}


def test_without_validation_only_control_records_are_left_out(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of(COUNT)) as rig:
        numbered(rig, 1, 2, 3)
        found = rig.round()
        assert found.sources[0].verdicts == {}
        assert found.sources[0].counters["unchecked"] == 3
        assert counts(rig) == {(b"k0", 0): 2, (b"k1", 0): 1}


@pytest.mark.parametrize("cut", [None, 3])
@pytest.mark.parametrize("on_error", ["fail", "drop", "keep"])
def test_a_gap_does_what_the_flow_says(tmp_path: Path, on_error: OnError, cut: int | None) -> None:
    flow = flow_of(Validate(on_error), COUNT)
    with TaskRig(tmp_path / "good", flow) as rig:
        table = numbered(rig, 1, 2, 3, 4, 5, 6)
    place = int(data_rows(table)[2])
    gapped = pa.concat_tables([table.slice(0, place), table.slice(place + 1)]).combine_chunks()
    with rewritten(tmp_path / "gapped", flow, gapped) as rig:
        if cut is not None:
            rig.round({0: cut})
            rig.restart()
        result = rig.round().sources[0]
        everything = {(b"k0", 0): 2, (b"k1", 0): 3}
        if on_error == "fail":
            assert result.stopped is not None
            assert (result.stopped.reason, result.stopped.offset) == ("integrity", place)
            assert result.next_offset == place
            assert counts(rig) == {(b"k0", 0): 1, (b"k1", 0): 1}
            again = rig.round().sources[0]
            assert again.stopped == result.stopped
            rig.done.offsets[0] = place + 1  # somebody decided
            assert rig.round().sources[0].stopped is None
            assert counts(rig) == {(b"k0", 0): 2, (b"k1", 0): 2}
            return
        assert result.stopped is None
        assert result.verdicts["missing"] == 1
        assert read_letters(rig.backend, result.state).num_rows == 0  # the record behind the gap is sound
        assert counts(rig) == everything


@pytest.mark.parametrize("cut", [None, 3])
@pytest.mark.parametrize("on_error", ["fail", "drop", "keep"])
def test_a_corrupt_record_never_counts(tmp_path: Path, on_error: OnError, cut: int | None) -> None:
    flow = flow_of(Validate(on_error), COUNT)
    with TaskRig(tmp_path / "good", flow) as rig:
        table = numbered(rig, 1, 2, 3, 4, 5, 6)
    place = int(data_rows(table)[2])
    values = table.column("value").to_pylist()
    values[place] = values[place].replace(b"3", b"7")
    at = table.schema.get_field_index("value")
    flipped = table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))
    with rewritten(tmp_path / "flipped", flow, flipped) as rig:
        if cut is not None:
            rig.round({0: cut})
            rig.restart()
        result = rig.round().sources[0]
        if on_error == "fail":
            assert result.stopped is not None and result.stopped.offset == place
            return
        letters = read_letters(rig.backend, result.state)
        assert letters["offset"].to_pylist() == ([place] if on_error == "keep" else [])
        assert all(reason.startswith("CORRUPT (D1)") for reason in letters["reason"].to_pylist())
        assert result.counters["faulty_kept" if on_error == "keep" else "faulty_dropped"] == 1
        assert counts(rig) == {(b"k0", 0): 2, (b"k1", 0): 3}


def test_an_unreadable_value_leaves_the_validator_right_before_it(tmp_path: Path) -> None:
    flow = flow_of(Validate("fail"), COUNT)
    with TaskRig(tmp_path, flow) as rig:
        table = numbered(rig, 1, 2, b"{broken", 4, 5)
        place = int(data_rows(table)[2])
        result = rig.round().sources[0]
        assert result.stopped is not None
        assert (result.stopped.reason, result.next_offset) == ("unreadable", place)
        assert result.verdicts == {"ok": place}
        rig.done.offsets[0] = place + 1
        result = rig.round().sources[0]
        assert result.stopped is None  # and no gap either
        assert counts(rig) == {(b"k0", 0): 2, (b"k1", 0): 2}


# -- time ----------------------------------------------------------------------------------------


def read(rig: TaskRig, order: SourceOrder, tick: Tick) -> tuple[list[Any], SourceResult]:
    reading = rig.worker.read(order, tick)
    return list(reading), reading.result()


def test_stream_time_is_the_sources_own_over_cuts_and_filters(tmp_path: Path) -> None:
    flow = flow_of(Filter("n > 1"), COUNT)
    times = [5, 9, 3, 20, 7, 7, 30]
    with TaskRig(tmp_path, flow) as rig:
        rig.write(
            [(b"k", START + ts, json.dumps({"n": place % 3}).encode()) for place, ts in enumerate(times)]
        )
        state, found, tick = b"", dict[int, int](), Tick(START)
        for start, stop in ((0, 3), (3, 4), (4, 4), (4, 7)):
            batches, result = read(rig, SourceOrder("results", 0, start, stop, state), tick)
            state = result.state
            for batch in batches:
                found |= zip(batch.offset.tolist(), batch.stream_time.tolist(), strict=True)
        assert found == {2: START + 9, 5: START + 20}
        assert result.stream_time == START + 30


def test_records_of_the_far_future_move_no_clock_and_kill_nobody(tmp_path: Path) -> None:
    window = Aggregate(
        Tumbling("1000ms", grace=0),
        (agg.count().named("n"),),
        late=LateSettings(),
        future=FutureGuard("1m", "late"),
    )
    dedupe = Dedupe(Deduplicate("n", within="1000ms", grace=0))
    with TaskRig(tmp_path, flow_of(dedupe, window)) as rig:
        late = START + 86_400_000
        rig.write(
            [
                (b"k", ts, json.dumps({"n": place}).encode())
                for place, ts in enumerate([START, late, START + 10])
            ]
        )
        found = rig.round(tick=Tick(START + 1000))
        assert found.sources[0].stream_time == START + 10
        assert found.counter("windows.future") == 1
        assert found.counter("dedupe.late") == 0
        assert counts(rig) == {(b"k", 0): 2}


def test_what_a_filter_leaves_out_still_closes_windows(tmp_path: Path) -> None:
    from tidegate.windows.operators.windowed_operator import Emit

    window = Aggregate(Tumbling("1000ms"), (agg.count().named("n"),), emit=Emit.CLOSE)
    with TaskRig(tmp_path, flow_of(Filter("n > 0"), window)) as rig:
        rig.write([(b"k", START, b'{"n":1}'), (b"k", START + 5000, b'{"n":0}')])
        rig.round()
        assert counts(rig) == {(b"k", 0): 1}


def test_a_column_as_event_time(tmp_path: Path) -> None:
    value = Json(at="timestamp", n="int64")
    with TaskRig(tmp_path, flow_of(COUNT, value=value, timestamp="at")) as rig:
        rig.write([(b"k", 1, b'{"at":"2026-01-01T00:00:02Z","n":1}'), (b"k", 2, b'{"at":null,"n":1}')])
        found = rig.round()
        assert found.counter("windows.negative_time") == 1
        assert counts(rig) == {(b"k", 2000): 1}


# -- shapes --------------------------------------------------------------------------------------


def test_a_tables_changes_are_events_of_the_keys_inside(tmp_path: Path) -> None:
    keys = windowed(String(), size="1s", key_format=KeyFormat.CHANGELOG)
    source = Source("events", String(), Json(n="int64"), windows=keys, on_error="drop")
    wanted = (agg.sum("n").named("n"), agg.max("window_end").named("end"))
    flow = Flow(source, (Aggregate(Tumbling("60000ms"), wanted),), (To("results"),))
    with TaskRig(tmp_path, flow) as rig:
        made = encode_keys(
            pa.array([b"a", b"a", b"b"]), np.array([START, START + 1000, START]), KeyFormat.CHANGELOG
        )
        rig.write([(key, START + 5, b'{"n":4}') for key in made.to_pylist()] + [(b"x", START, b'{"n":4}')])
        found = rig.round()
        assert found.counter("unreadable") == 1
        rig.deliver()
        table = last_of_each(rig.windows(KeyFormat.CHANGELOG, size_ms=60_000))
        assert {key: json.loads(value) for (key, _, _), (_, value) in table.items()} == {
            b"a": {"n": 8, "end": "2026-01-01T00:00:02.000Z"},
            b"b": {"n": 4, "end": "2026-01-01T00:00:01.000Z"},
        }


def test_events_alone_go_on_as_records_under_their_new_keys(tmp_path: Path) -> None:
    source = Source("events", String(), Json(n="int64", who="string"))
    steps = (Filter("n > 0"), Select((("n", "n * 10"), ("who", "who"))), KeyBy("who", String()))
    with TaskRig(tmp_path, Flow(source, steps, (To("results", integrity=False),)), sink_partitions=4) as rig:
        rig.write([(b"x", START + n, json.dumps({"n": n, "who": f"w{n % 3}"}).encode()) for n in range(9)])
        rig.round()
        rig.deliver()
        table = rig.records()
        found = zip(table["key"].to_pylist(), map(json.loads, table["value"].to_pylist()), strict=True)
        assert sorted((key.decode(), value["n"], value["who"]) for key, value in found) == sorted(
            (f"w{n % 3}", n * 10, f"w{n % 3}") for n in range(1, 9)
        )
        places = {
            (key, partition)
            for key, partition in zip(table["key"].to_pylist(), table["partition"].to_pylist(), strict=True)
        }
        assert len(places) == 3  # a key is in one partition


def test_a_state_survives_its_bytes_and_other_bytes_are_refused() -> None:
    state = SourceState(7, 8, b"v", True, "name", 9)
    assert SourceState.decoded(state.encoded()) == state
    assert SourceState.decoded(b"") == SourceState()
    for wrong in (b"\x02" + state.encoded()[1:], state.encoded()[:-2], b"\x01\xc1"):
        with pytest.raises(CorruptError):
            SourceState.decoded(wrong)


def test_fetch_buffers_are_used_again_and_readings_at_one_time_have_their_own(tmp_path: Path) -> None:
    with TaskRig(tmp_path, flow_of(COUNT), partitions=2) as rig:
        for partition in range(2):
            rig.write(rows(*range(50)), partition=partition)
        readings = [
            rig.worker.read(SourceOrder("results", number, 0, 50, b""), Tick(START)) for number in range(2)
        ]
        streams = [iter(reading) for reading in readings]
        found = [next(stream) for stream in streams]
        assert [batch.values["n"].to_pylist() for batch in found] == [list(range(50))] * 2
        for stream in streams:
            assert next(stream, None) is None
        assert len(rig.worker._buffers._free) == 2
        kept = {id(buffer) for buffer in rig.worker._buffers._free}
        rig.round()
        assert {id(buffer) for buffer in rig.worker._buffers._free} == kept
