"""A scan of a table that follows a topic is of one commit, whatever is committed or collected while it is read."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from maintenance_steps import compacting, deleting
from table_records import Said, session_record, window_record, write_records
from tidegate.clock import ManualClock
from tidegate.errors import CommitGoneError, CorruptError
from tidegate.log.log import Log
from tidegate.tables.commits import KEPT
from tidegate.tables.factories import sessioned_table, windowed_table
from tidegate.tables.factories import table as key_table
from tidegate.tables.options import Consumed
from tidegate.tables.serdes.base import Long, String

PARTITIONS, KEYS = 4, 40
LAST = KEPT + 3
CONSUMED = Consumed(String(), Long())


def _said(kind: str, key: bytes, value: int) -> Said:
    data = value.to_bytes(8, "big")
    if kind == "window":
        return window_record(key, 1000, data)
    return session_record(key, 1000, 2000, data) if kind == "session" else Said(key, data, 0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(tmp_path: Path, clock: ManualClock) -> Iterator[Log]:
    with Log(tmp_path / "log", durability="os", clock=clock) as opened:
        yield opened


class Stage:
    """A topic whose every commit gives all keys one value, so that any mixture of commits shows in a total."""

    def __init__(self, kind: str, log: Log, folder: Path) -> None:
        self.kind, self.log, self.folder = kind, log, folder
        log.create_topic("t", PARTITIONS)
        self.write(1)
        self.builder = self.open()
        self.builder.catch_up()

    def open(self, **settings: Any) -> Any:
        given: dict[str, Any] = {"state": self.folder / "state", "consumed": CONSUMED, **settings}
        if self.kind == "window":
            return windowed_table(self.log, "t", "1s", **given)
        return (sessioned_table if self.kind == "session" else key_table)(self.log, "t", **given)

    def write(self, value: int) -> None:
        for partition in range(PARTITIONS):
            keys = [b"k%03d" % number for number in range(partition, KEYS, PARTITIONS)]
            write_records(
                self.log, "t", [_said(self.kind, key, value) for key in keys], partition=partition,
                partitions=PARTITIONS,
            )  # fmt: skip

    def commit(self, value: int) -> None:
        self.write(value)
        self.builder.catch_up()


@pytest.fixture(params=["window", "session", "key"])
def stage(request: pytest.FixtureRequest, log: Log, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(request.param, log, tmp_path)
    yield made
    made.builder.close()


def values(batch: pa.RecordBatch) -> list[int]:
    return list(batch.column("value").to_pylist())


@pytest.mark.parametrize("role", ["builder", "reader", "as_of"])
@pytest.mark.parametrize("after", range(1, PARTITIONS))
def test_batches_are_of_one_commit_when_another_is_made_between_them(
    stage: Stage, clock: ManualClock, role: str, after: int
) -> None:
    with stage.open(read_only=True) as reader:
        table = {"builder": stage.builder, "reader": reader}.get(role) or reader.as_of(1)
        scan, seen = table.batches(), []
        for number, batch in enumerate(scan, 1):
            seen += values(batch)
            if number == after:
                stage.commit(2)
                clock.advance("1s")
                if role == "reader":  # another question of the same table moves on
                    assert set(table.to_arrow()["value"].to_pylist()) == {2}
        assert seen == [1] * KEYS
        if role != "as_of":
            assert table.to_arrow()["value"].to_pylist() == [2] * KEYS


@pytest.mark.parametrize("form", ["sql", "export", "to_arrow", "to_pandas", "to_polars", "fetch_range"])
def test_every_form_of_a_whole_table_is_of_one_commit(
    stage: Stage, clock: ManualClock, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread asks, and so moves the table on, whenever a batch is read."""
    from tidegate.tables import queries

    rounds, original = iter(range(2, 1000)), queries.all_rows

    with stage.open(read_only=True) as table:

        def moving(*args: Any, **settings: Any) -> Iterator[pa.RecordBatch]:
            for batch in original(*args, **settings):
                yield batch
                stage.commit(next(rounds))
                clock.advance("1s")
                thread = threading.Thread(target=table.commits)
                other = threading.Thread(target=lambda: table.position)
                for each in (thread, other):
                    each.start()
                for each in (thread, other):
                    each.join(60)

        monkeypatch.setattr(queries, "all_rows", moving)
        if form == "sql":
            (row,) = table.sql("select count(*) n, min(value) low, max(value) high from rows").to_pylist()
            assert (row["n"], row["low"]) == (KEYS, row["high"])
        elif form == "export":
            assert table.export(tmp_path / "t.parquet") == KEYS
            assert len(set(pq.read_table(tmp_path / "t.parquet")["value"].to_pylist())) == 1
        elif form == "fetch_range":
            found = table.fetch_range(None, None)
            assert len(found) == KEYS and len({row.value for row in found}) == 1
        else:
            found = list(getattr(table, form)()["value"])
            assert (
                len(found) == KEYS
                and len({int(getattr(each, "as_py", lambda v=each: v)()) for each in found}) == 1
            )


def test_a_commit_that_is_collected_under_a_scan_is_an_error_that_says_what_to_do(
    stage: Stage, clock: ManualClock
) -> None:
    with stage.open(read_only=True) as table:
        scan = table.batches()
        assert values(next(scan)) == [1] * (KEYS // PARTITIONS)
        _collect(stage, clock)
        _forget_packs(table)
        with pytest.raises(
            CommitGoneError, match=r"commit 1 of table .* is not kept any more.*read the table again"
        ):
            list(scan)
        assert set(table.to_arrow()["value"].to_pylist()) == {LAST}  # the table itself goes on


def test_a_query_that_meets_a_collected_commit_looks_into_the_newest(
    stage: Stage, clock: ManualClock
) -> None:
    with stage.open(read_only=True) as table:
        assert len(table.all()) == KEYS
        _collect(stage, clock)
        table._follower._looked_ms = clock.monotonic_ms()  # it believes that it has looked just now
        _forget_packs(table)
        assert set(table.sql("select value from rows")["value"].to_pylist()) == {LAST}
        past = table.as_of(table.commits()[0].number)
        first = next(past.batches())
        _collect(stage, clock)
        past._snapshot._runtime._parts.packs.close()
        with pytest.raises(CommitGoneError, match="is not kept any more"):
            past.all()
        assert len(set(values(first))) == 1


def test_damage_of_a_commit_that_is_kept_is_not_taken_for_a_collected_one(
    stage: Stage, tmp_path: Path
) -> None:
    with stage.open(read_only=True) as table:
        for pack in (tmp_path / "state").rglob("*.pack"):
            pack.unlink()
        with pytest.raises(CorruptError):
            table.all()


def test_a_scan_that_is_let_go_gives_its_snapshot_back(stage: Stage, clock: ManualClock) -> None:
    with stage.open(read_only=True) as table:
        for number in range(2, 12):
            scan = table.batches()
            assert set(values(next(scan))) == {number - 1}
            stage.commit(number)
            clock.advance("1s")
            assert set(table.to_arrow()["value"].to_pylist()) == {number}
            if number % 2:
                scan.close()
            del scan
            gc.collect()
        assert len(table._follower._others) <= 1 and not any(each.readers for each in table._follower._others)


def test_readers_of_one_table_do_not_wait_for_each_other(stage: Stage, clock: ManualClock) -> None:
    with stage.open(read_only=True) as table:
        reading, may_end, seen = threading.Event(), threading.Event(), []

        def look(source: Any) -> None:
            reading.set()
            may_end.wait(120)
            seen.append(source.source.positions)

        thread = threading.Thread(target=table._read, args=(look,))
        thread.start()
        assert reading.wait(120)
        before = table.position
        stage.commit(2)
        clock.advance("1s")
        _within(lambda: table.to_arrow()["value"].to_pylist(), [2] * KEYS)
        may_end.set()
        thread.join(120)
        assert seen == [before]


def _within(ask: Callable[[], Any], expected: Any) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ask()), daemon=True)
    thread.start()
    thread.join(120)
    assert found == [expected]


def _collect(stage: Stage, clock: ManualClock) -> None:
    """More commits than are kept, older rows merged away, and everything that no kept commit names deleted."""
    source = stage.builder._builder.source
    for value in range(2, LAST + 1):
        stage.commit(value)
        clock.advance("1h")
        for state in source.partitions:
            for bucket in state.index.buckets(0, 10_000):
                list(compacting(source.runtime, source.task, state, bucket.start))
        list(deleting(source.runtime, source.task))


def _forget_packs(table: Any) -> None:
    """As where packs are far away, or too many to stay open: what is not there any more cannot be read."""
    for side in (table._follower._current, *table._follower._others):
        side.view._runtime._parts.packs.close()
