"""Window and session stores equal a dict with a clock, whatever is put, in whatever batches, through restarts.

The model is the rules as one would write them on paper: one record at a time, plain Python. The store gets the same
puts in random batches, and between them everything storage may do to it: dumps, evictions, compactions, checkpoints,
and deaths after which it comes back from the last checkpoint (and the model with it).
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from maintenance_steps import compacting, dumping
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.windows.keys import KeyFormat, SessionWindow, TimeWindow, Windowed, encode_key
from tidegate.windows.stores.segments import Compat
from tidegate.windows.stores.session_store import SessionStore
from tidegate.windows.stores.window_store import WindowStore
from workers import TASK, Worker

RETENTION, INTERVAL, SIZE, FAR = 40, 16, 5, 2**63 - 1
KEYS = (b"a", b"aa", b"b", b"\x00", b"")
COMPATS = tuple(Compat)


class Model:
    """Rows by (key, time, second number), and the rules in words of their own."""

    def __init__(self, compat: Compat, duplicates: bool = False) -> None:
        self.compat, self.duplicates = compat, duplicates
        self.rows: dict[tuple[bytes, int, int], bytes] = {}
        self.segments: set[int] = set()
        self.observed = -1
        self.sequence = self.logged = self.dropped = 0
        self.log: list[tuple[bytes, int, int, bytes | None]] = []

    def put(self, key: bytes, time: int, second: int, value: bytes | None) -> None:
        if self.duplicates:
            self.logged += 1
            self.log.append((key, time, self.logged, value))
            if value is None:
                return
            self.sequence += 1
            second = self.sequence
        else:
            self.log.append((key, time, second, value))
        self.observed = max(self.observed, time)
        first_live = max(0, self.observed - RETENTION) // INTERVAL
        live = time // INTERVAL >= first_live
        if live:
            self.segments.add(time // INTERVAL)
        self.clean(first_live)
        if self.compat is Compat.KAFKA_STREAMS_MEMORY:
            live = time > self.observed - RETENTION
        if not live:
            self.dropped += 1
        elif value is None:
            self.rows.pop((key, time, second), None)
        else:
            self.rows[key, time, second] = value

    def clean(self, first_live: int) -> None:
        self.segments = {each for each in self.segments if each >= first_live}
        self.rows = {row: value for row, value in self.rows.items() if row[1] // INTERVAL >= first_live}

    def remove(self, key: bytes, time: int, second: int) -> None:
        self.observed = max(self.observed, time)
        self.rows.pop((key, time, second), None)
        self.log.append((key, time, second, None))

    def restarted(self) -> Model:
        """As it is after coming back from a checkpoint taken now."""
        again = copy.deepcopy(self)
        # A time segment without rows leaves nothing in storage; it comes back with its next row.
        again.segments = {time // INTERVAL for _, time, _ in self.rows}
        if self.compat is not Compat.TIDEGATE:
            again.observed, again.sequence, again.logged = -1, 0, 0
        else:
            again.clean(max(0, self.observed - RETENTION) // INTERVAL)
        return again

    def readable(self, lax: bool = True) -> dict[tuple[bytes, int, int], bytes]:
        edge = 0 if lax and self.compat is Compat.KAFKA_STREAMS_TIME_ORDERED else 1
        return {row: value for row, value in self.rows.items() if row[1] >= self.observed - RETENTION + edge}


TIMES = st.integers(0, 150)
VALUES = st.one_of(st.none(), st.binary(max_size=3))
PUTS = st.lists(st.tuples(st.sampled_from(KEYS), TIMES, st.integers(0, 20), VALUES), max_size=12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("batch"), PUTS),
        st.tuples(st.just("singles"), PUTS),
        st.tuples(st.just("remove"), PUTS),
        st.tuples(st.sampled_from(("dump", "evict", "compact", "maintain", "checkpoint", "die")), st.none()),
    ),
    max_size=14,
)


class Rig:
    """A store, its storage, and what a death takes it back to."""

    def __init__(self, kind: str, compat: Compat, duplicates: bool) -> None:
        self.kind, self.compat, self.duplicates = kind, compat, duplicates
        self.backend, self.deaths = MemoryBackend(), 0
        self.model = Model(compat, duplicates)
        self.logged: list[tuple[bytes, bytes | None]] = []
        self.open()
        self.saved = (self.worker.runtime.checkpoint(TASK), self.model.restarted(), 0)

    def open(self) -> None:
        self.worker = Worker(backend=self.backend, seed=self.deaths * 10)
        context = self.worker.runtime.context(TASK)
        common: dict[str, Any] = {
            "retention": RETENTION,
            "segment_interval": INTERVAL,
            "compat": self.compat,
            "changelog": self.changelog,
        }
        self.store: Any
        if self.kind == "window":
            self.store = WindowStore(
                context, "w", window_size=SIZE, retain_duplicates=self.duplicates, **common
            )
        else:
            self.store = SessionStore(context, "s", **common)

    def changelog(self, keys: pa.Array, values: pa.Array, timestamps: Any) -> None:
        self.logged += list(zip(keys.to_pylist(), values.to_pylist(), strict=True))

    def step(self, what: str, puts: list[tuple[bytes, int, int, bytes | None]] | None) -> None:
        runtime, state = self.worker.runtime, self.store.state
        if puts is not None:
            pieces = [puts] if what == "batch" else [[put] for put in puts]
            for piece in pieces:
                self.remove(piece) if what == "remove" and self.kind == "session" else self.put(piece)
        elif what == "checkpoint":
            self.saved = (runtime.checkpoint(TASK), self.model.restarted(), len(self.logged))
        elif what == "die":
            self.deaths += 1
            token, model, logged = self.saved
            self.model = copy.deepcopy(model)
            del self.logged[logged:]
            self.open()
            self.worker.runtime.apply_checkpoint(TASK, token)
        elif what == "maintain":
            runtime.maintain(TASK, 1000)
        elif what == "compact":
            for bucket in state.index.all_buckets():
                self.worker.run(compacting(runtime, TASK, state, bucket))
        else:
            buckets = state.index.all_buckets()
            self.worker.run(dumping(runtime, TASK, state, buckets, evict=what == "evict"))

    def put(self, puts: list[tuple[bytes, int, int, bytes | None]]) -> None:
        keys, times, lengths, values = ([put[at] for put in puts] for at in range(4))
        starts = [max(0, time - length) for time, length in zip(times, lengths, strict=True)]
        dropped = self.model.dropped
        if self.kind == "window":
            for key, time, _, value in puts:
                self.model.put(key, time, 0, value)
            result = self.store.put_all(keys, times, values)
        else:
            for key, time, start, value in zip(keys, times, starts, values, strict=True):
                self.model.put(key, time, start, value)
            result = self.store.put_all(keys, starts, times, values)
        assert result.dropped == self.model.dropped - dropped

    def remove(self, puts: list[tuple[bytes, int, int, bytes | None]]) -> None:
        for key, time, length, _ in puts:
            start = max(0, time - length)
            self.model.remove(key, time, start)
            self.store.remove(Windowed(key, SessionWindow(start, time)))

    def window(self, time: int, second: int) -> TimeWindow | SessionWindow:
        return TimeWindow(time, time + SIZE) if self.kind == "window" else SessionWindow(second, time)

    def check(self) -> None:
        model, store = self.model, self.store
        assert (store.observed_time, store.dropped_records) == (model.observed, model.dropped)
        assert set(store.segments.ids) >= {time // INTERVAL for _, time, _ in model.rows}
        assert set(store.segments.ids) <= model.segments | {
            start // INTERVAL for start in store.state.index.all_buckets()
        }
        held = {start // INTERVAL for start in store.state.index.all_buckets()}
        assert held <= set(store.segments.ids), "no row outlives its time segment"
        expected = model.readable(lax=self.kind == "window")
        rows = sorted(expected.items())
        if self.kind == "window":
            self.check_windows(rows)
            everything = (store.all(), store.backward_all(), store.fetch_range(None, b"\xff", 0, FAR))
        else:
            self.check_sessions(rows)
            everything = (store.fetch_range(None, None), store.backward_fetch_range(None, None))
        for found in everything:
            plain = [
                ((each.key, each.window.start, each.sequence), value)
                if self.kind == "window"
                else ((each.key, each.window.end, each.window.start), value)
                for each, value in found
            ]
            assert sorted(plain) == rows

    def check_windows(self, rows: list[tuple[tuple[bytes, int, int], bytes]]) -> None:
        store = self.store
        for key in KEYS:
            mine = [(time, value) for (owner, time, _), value in rows if owner == key]
            assert list(store.fetch(key, 0, FAR)) == mine
            assert list(store.backward_fetch(key, -5, 200)) == mine[::-1]
            assert list(store.fetch(key, 30, 90)) == [row for row in mine if 30 <= row[0] <= 90]
        batch = store.fetch_keys(list(KEYS), 20, 100)
        found = list(
            zip(*(batch.column(name).to_pylist() for name in ("key", "window_start", "value")), strict=True)
        )
        assert found == [
            (key, time, value)
            for key in KEYS
            for (owner, time, _), value in rows
            if owner == key and 20 <= time <= 100
        ]
        if not self.duplicates:
            asked = [(key, time) for key in KEYS for time in range(0, 150, 7)]
            expected = {(key, time): value for (key, time, _), value in rows}
            aligned = store.get_batch([key for key, _ in asked], [time for _, time in asked])
            assert aligned.column("value").to_pylist() == [expected.get(each) for each in asked]
            assert [store.fetch(*each) for each in asked[:20]] == [expected.get(each) for each in asked[:20]]

    def check_sessions(self, rows: list[tuple[tuple[bytes, int, int], bytes]]) -> None:
        store = self.store
        for key in KEYS:
            mine = [
                (Windowed(key, SessionWindow(start, end)), v)
                for (owner, end, start), v in rows
                if owner == key
            ]
            assert list(store.fetch(key)) == mine
            assert list(store.backward_fetch(key)) == mine[::-1]
            near = [(each, v) for each, v in mine if each.window.end >= 40 and each.window.start <= 90]
            assert list(store.find_sessions(key, 40, 90)) == near
            assert list(store.backward_find_sessions_range(key, key, 40, 90)) == near[::-1]
            for each, value in mine:
                assert store.fetch_session(key, each.window.start, each.window.end) == value

    def check_log(self) -> None:
        """The changelog has every put, dropped ones too, as this instance and those before it made them."""
        key_format = KeyFormat.CHANGELOG if self.kind == "window" else KeyFormat.SESSION
        expected = []
        for key, time, second, value in self.model.log:
            sequence = second if self.kind == "window" else 0
            name = encode_key(key, self.window(time, second), key_format, sequence=sequence)
            expected.append((name, value))
        assert self.logged == expected

    def check_restored_from_the_log(self) -> None:
        """A store made of the changelog alone shows the same rows (numbers of duplicates are the changelog's own)."""
        if self.compat is not Compat.TIDEGATE or self.duplicates or not self.logged:
            return
        worker = Worker(seed=99)
        keys, values = zip(*self.logged, strict=True)
        context, common = worker.runtime.context(TASK), {"retention": RETENTION, "segment_interval": INTERVAL}
        again: Any = (
            WindowStore(context, "w", window_size=SIZE, **common)
            if self.kind == "window"
            else SessionStore(context, "s", **common)
        )
        again.restore_batch(pa.array(keys, pa.binary()), pa.array(values, pa.binary()), [0] * len(keys))
        shown = again.all() if self.kind == "window" else again.fetch_range(None, None)
        mine = self.store.all() if self.kind == "window" else self.store.fetch_range(None, None)
        assert {(each.key, each.window): value for each, value in shown} == {
            (each.key, each.window): value for each, value in mine
        }
        assert again.observed_time == self.store.observed_time


def run(rig: Rig, steps: list[tuple[str, Any]]) -> None:
    for what, puts in steps:
        rig.step(what, puts)
        rig.check()
    rig.check_log()
    rig.check_restored_from_the_log()
    assert not any(rig.worker.runtime.leaks())


@settings(max_examples=60)
@given(st.sampled_from(COMPATS), st.booleans(), STEPS)
def test_a_window_store_equals_a_dict(compat: Compat, duplicates: bool, steps: list[tuple[str, Any]]) -> None:
    run(Rig("window", compat, duplicates), steps)


@settings(max_examples=50)
@given(st.sampled_from(COMPATS), STEPS)
def test_a_session_store_equals_a_dict(compat: Compat, steps: list[tuple[str, Any]]) -> None:
    run(Rig("session", compat, False), steps)


@settings(max_examples=40)
@given(PUTS, st.lists(st.integers(0, 12), max_size=3), st.booleans())
def test_how_puts_are_cut_into_batches_changes_nothing(
    puts: list[tuple[bytes, int, int, bytes | None]], cuts: list[int], duplicates: bool
) -> None:
    whole, cut = (Rig("window", Compat.TIDEGATE, duplicates) for _ in range(2))
    whole.put(puts)
    bounds = sorted({0, *(min(each, len(puts)) for each in cuts), len(puts)})
    for first, stop in pairwise(bounds):
        cut.put(puts[first:stop])
    assert list(whole.store.all()) == list(cut.store.all())
    assert whole.logged == cut.logged
    assert whole.store.segments.ids == cut.store.segments.ids
    assert whole.store.state.encode_progress() == cut.store.state.encode_progress()
