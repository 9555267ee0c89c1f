"""Time segments: which exist, which are dropped, and by whom; the rows of the table, and of the table of triggers."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tidegate.storage import Merge, RuntimeContext, StoreSpec
from tidegate.windows.keys import KeyFormat, SessionWindow, Windowed, encode_keys
from tidegate.windows.stores import segments
from tidegate.windows.stores.segmented_store import WindowsState
from tidegate.windows.stores.segments import Compat, Expiry, TimeSegments, divide, segment_start_of
from tidegate.windows.stores.session_store import SessionStore
from tidegate.windows.stores.value_store import PAYLOAD
from tidegate.windows.stores.window_store import WindowStore
from workers import TASK, Worker

I = 60_000  # noqa: E741 - the interval, as everywhere


def make(interval: int = I, retention: int = 4 * I, name: str = "test") -> TimeSegments:
    state = WindowsState(StoreSpec(name, Merge.LAST, PAYLOAD, bucket_ms=interval, segment_ms=interval))
    context = Worker().runtime.context(TASK)
    context.attach(state)
    return TimeSegments(context, state, Expiry(retention, interval))


def create(segments: TimeSegments, *ids: int) -> None:
    """Make them as puts in the order of time would."""
    for each in ids:
        segments.get_or_create_segment_if_live(each, each * segments._expiry.interval_ms)


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────


def numbers_and_names() -> None:
    segments = make()
    assert [segments.segment_id(ts) for ts in (0, I, 2 * I)] == [0, 1, 2]
    assert [make(2 * I).segment_id(ts) for ts in (I, 2 * I)] == [0, 1]
    assert [segments.segment_name(each) for each in (0, 1)] == ["test.0", f"test.{I}"]
    worker = Worker()
    store = WindowStore(
        worker.runtime.context(TASK), "test", retention=4 * I, segment_interval=I, window_size=1
    )
    store.put(b"k", b"v", I)
    worker.runtime.checkpoint(TASK)
    assert len(worker.objects(f"/packs/test/{I}-")) == 1, "what a time segment holds carries its name"


def rolling() -> None:
    segments = make()
    create(segments, 0, 1, 2, 3, 4)
    assert segments.ids == [0, 1, 2, 3, 4]
    create(segments, 5)
    assert segments.ids == [1, 2, 3, 4, 5]
    create(segments, 6)
    assert segments.ids == [2, 3, 4, 5, 6]


def too_old() -> None:
    segments = make()
    assert segments.get_or_create_segment_if_live(0, 7 * I) is None
    assert segments.ids == []
    segments = make()
    create(segments, 0, 1)
    segments.get_or_create_segment_if_live(7, 7 * I)
    assert segments.ids == [7]
    assert segments.get_segment(0) is segments.get_segment(1) is None


def future() -> None:
    segments = make()
    create(segments, 0, 1, 2, 3, 4)
    for each in (5, 6):
        segments.get_or_create_segment_if_live(each, 4 * I)
    assert segments.ids == [0, 1, 2, 3, 4, 5, 6]


def in_order() -> None:
    segments = make()
    for each in (4, 2, 0, 1, 3):
        segments.get_or_create_segment_if_live(each, 4 * I)
    assert [each.id for each in segments.segments(0, 2 * I)] == [0, 1, 2]
    assert [each.id for each in segments.segments(0, 2 * I, forward=False)] == [2, 1, 0]


def reopened() -> None:
    worker = Worker()
    store = WindowStore(
        worker.runtime.context(TASK), "test", retention=4 * I, segment_interval=I, window_size=1
    )
    store.put_all([b"k"] * 5, [each * I for each in range(5)], [b"v"] * 5)
    segments = store.segments
    segments.close()
    assert segments.get_segment(0) is None
    segments.open_existing(-1)
    assert segments.ids == [0, 1, 2, 3, 4]


def old_names() -> None:
    assert segment_start_of("test-197001010000", "test") == 0
    assert segment_start_of("test-197001010001", "test") == I
    assert segment_start_of("test:60000", "test") == I == segment_start_of("test.60000", "test")
    assert [
        segment_start_of(each, "test") for each in ("test", "other.0", "test-1970", "test.x", ".lock")
    ] == [None] * 5
    assert make().segment_name(I // I) == "test.60000", "what is written is the form with a dot"


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(numbers_and_names, id="WIN-7.2-01"),
        pytest.param(rolling, id="WIN-7.2-02"),
        pytest.param(too_old, id="WIN-7.2-03"),
        pytest.param(future, id="WIN-7.2-04"),
        pytest.param(in_order, id="WIN-7.2-05"),
        pytest.param(reopened, id="WIN-7.2-06"),
        pytest.param(old_names, id="WIN-7.2-07"),
    ],
)
def test_time_segments(row: Callable[[], None]) -> None:
    row()


def test_division_truncates_toward_zero() -> None:
    assert [divide(each, 10) for each in (-11, -10, -9, -1, 0, 9, 10)] == [-1, -1, 0, 0, 0, 0, 1]
    segments = make()
    assert {segments.segment_id(ts) for ts in (-(I - 1), -1, 0, I - 1)} == {0}


# ── who calls cleanup ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """For every cleanup, who called it: the functions, from the outermost in this project to the nearest."""
    seen: list[list[str]] = []
    real = TimeSegments.cleanup_expired_segments

    def recording(self: TimeSegments, observed_time: int) -> list[int]:
        chain, frame = [], sys._getframe(1)
        while frame is not None and ("windows" in frame.f_code.co_filename):
            chain.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        seen.append(chain[::-1])
        return real(self, observed_time)

    monkeypatch.setattr(TimeSegments, "cleanup_expired_segments", recording)
    return seen


class Processor:
    """What a user writes."""

    def __init__(self, store: WindowStore) -> None:
        self.store = store

    def process(self, key: bytes, value: bytes, ts: int) -> None:
        self.store.put(key, value, ts)


def open_windows(context: RuntimeContext, **changes: object) -> WindowStore:
    return WindowStore(context, "w", **{"retention": 2 * I, "window_size": 3} | changes)  # type: ignore[arg-type]


def test_the_call_chain_of_a_put_is_the_one_of_the_diagram(calls: list[list[str]]) -> None:
    processor = Processor(open_windows(Worker().runtime.context(TASK)))
    calls.clear()
    processor.process(b"k", b"v", 0)
    (chain,) = calls
    assert chain[-10:] == [
        "WindowStore.put",
        "WindowStore.put_all",
        "ValueStore._put_all",
        "WindowStore._write",
        "ValueStore._write",
        "SegmentedStore.put_batch",
        "PreparedPut.commit",
        "SegmentedStore._insert",
        "TimeSegments.enter_segments",
        "TimeSegments.get_or_create_segment_if_live",
    ]
    assert chain.index("Processor.process") < chain.index("WindowStore.put")


def test_nobody_else_in_the_code_calls_cleanup() -> None:
    callers = set()
    for path in Path(segments.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                called = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
                if "cleanup_expired_segments" in called:
                    callers.add(f"{path.stem}.{function.name}")
    assert callers == {
        "segments.get_or_create_segment_if_live",
        "segments.advance",
        "segments.open_existing",
    }


def test_operators_and_tables_drop_rows_through_time_segments_only() -> None:
    source = Path(segments.__file__).parents[2]
    callers = set()
    for path in [*(source / "windows").rglob("*.py"), *(source / "tables").rglob("*.py")]:
        called = {
            node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
        }
        if called & {"drop_segments", "prune"}:
            callers.add(path.stem)
    assert callers == {"segments"}


CALLER = "TimeSegments.get_or_create_segment_if_live"


@pytest.fixture
def windows(calls: list[list[str]]) -> WindowStore:
    store = open_windows(Worker().runtime.context(TASK))
    store.put_all([b"a", b"a", b"b"], [0, I, 2 * I], [b"1", b"2", b"3"])
    calls.clear()
    return store


def changelog_key(key: bytes, start: int) -> object:
    import numpy as np
    import pyarrow as pa

    return encode_keys(pa.array([key], pa.binary()), np.array([start]), KeyFormat.CHANGELOG)


class TestTriggersOfTheSeed:
    """One row of the seed's table each: does the operation trigger cleanup, and by which method?"""

    def test_put_does(self, windows: WindowStore, calls: list[list[str]]) -> None:
        windows.put(b"a", b"4", 4 * I)
        assert [chain[-1] for chain in calls] == [CALLER]
        assert windows.segments.ids == [2, 4]

    def test_fetch_does_not(self, windows: WindowStore, calls: list[list[str]]) -> None:
        windows.state.observed_time = 4 * I  # expired time segments are there, and a fetch leaves them alone
        list(windows.fetch(b"a", 0, 9 * I))
        list(windows.backward_fetch(b"a", 0, 9 * I))
        list(windows.fetch_range(b"a", b"b", 0, 9 * I))
        list(windows.fetch_all(0, 9 * I))
        list(windows.all())
        windows.fetch_keys([b"a", b"b"], 0, 9 * I)
        list(windows.batches())
        assert calls == []
        assert windows.segments.ids == [0, 1, 2]

    def test_get_does_not(self, windows: WindowStore, calls: list[list[str]]) -> None:
        windows.state.observed_time = 4 * I
        assert windows.fetch(b"a", 0) is None
        windows.get_batch([b"a"], [0])
        assert calls == []
        assert windows.segments.ids == [0, 1, 2]

    def test_open_existing_does_and_calls_it_directly(self, calls: list[list[str]]) -> None:
        worker = Worker()
        worker.runtime.apply_checkpoint(TASK, make_checkpoint(worker))
        calls.clear()
        store = open_windows(worker.runtime.context(TASK))
        assert [chain[-1] for chain in calls] == ["TimeSegments.open_existing"]
        assert store.segments.ids == [2, 3, 4], "the observed time came with the checkpoint"

    def test_restore_does(self, windows: WindowStore, calls: list[list[str]]) -> None:
        windows.restore_batch(changelog_key(b"a", 4 * I), [b"x"], [7])  # type: ignore[arg-type]
        assert [chain[-1] for chain in calls] == [CALLER]
        assert windows.segments.ids == [2, 4]


def make_checkpoint(worker: Worker) -> bytes:
    """A checkpoint with time segments 0 to 4, of which a retention of two keeps 2 to 4."""
    store = open_windows(worker.runtime.context(TASK), retention=4 * I, segment_interval=I)
    store.put_all([b"k"] * 5, [each * I for each in range(5)], [b"v"] * 5)
    token = worker.runtime.checkpoint(TASK)
    worker.runtime.detach(TASK, store.state)
    return token


class TestTriggersBesides:
    """What the seed's table leaves open."""

    def test_a_dropped_put_cleans_up_all_the_same(self, windows: WindowStore, calls: list[list[str]]) -> None:
        windows.state.observed_time = 4 * I
        assert windows.put(b"a", b"late", 1) is False
        assert [chain[-1] for chain in calls] == ["TimeSegments.advance"]
        assert windows.segments.ids == [2]

    def test_a_batch_cleans_up_once_for_all_its_rows(
        self, windows: WindowStore, calls: list[list[str]]
    ) -> None:
        windows.put_all([b"a"] * 1000, [4 * I + each for each in range(1000)], [b"x"] * 1000)
        assert len(calls) == 1

    def test_a_null_put_of_retained_duplicates_does_not(self, calls: list[list[str]]) -> None:
        store = open_windows(Worker().runtime.context(TASK), retain_duplicates=True)
        store.put(b"a", b"1", 0)
        calls.clear()
        store.put(b"a", None, 9 * I)
        assert calls == []
        assert store.observed_time == 0

    def test_removing_a_session_does_not_but_moves_the_clock(self, calls: list[list[str]]) -> None:
        store = SessionStore(Worker().runtime.context(TASK), "s", retention=I, segment_interval=I)
        store.put(Windowed(b"a", SessionWindow(0, 0)), b"1")
        calls.clear()
        store.remove(Windowed(b"a", SessionWindow(0, 9 * I)))
        assert calls == []
        assert (store.observed_time, store.segments.ids) == (9 * I, [0])

    def test_commit_close_and_the_wall_clock_do_not(self, calls: list[list[str]]) -> None:
        worker = Worker()
        store = open_windows(worker.runtime.context(TASK))
        store.put(b"a", b"1", 0)
        store.state.observed_time = 9 * I
        calls.clear()
        worker.clock.advance(365 * 86_400_000)
        worker.runtime.maintain(TASK, 1000)
        worker.runtime.checkpoint(TASK)
        store.segments.close()
        assert calls == []

    def test_a_new_instance_that_forgets_its_clock_opens_everything(self, calls: list[list[str]]) -> None:
        worker = Worker()
        worker.runtime.apply_checkpoint(TASK, make_checkpoint(worker))
        store = open_windows(worker.runtime.context(TASK), compat=Compat.KAFKA_STREAMS)
        assert store.segments.ids == [0, 1, 2, 3, 4], "called, with a clock that says nothing is old"
        store.put(b"k", b"v", 4 * I)
        assert store.segments.ids == [2, 3, 4]
