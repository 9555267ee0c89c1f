"""The levels on which cases of Kafka Streams' behaviour run: store, table, operator, app.

Every function here runs one case on one level through the calls that a user of that level has, and gives plain rows.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

import tidegate as tg
from streams_cases import AGAIN, LATEST, RESTART, Counted, Event, Put, Read, StoreCase, WindowCase
from table_records import Said, session_record, window_record, write_records
from tidegate.errors import TidegateWarning
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import EventBatch
from tidegate.windows.keys import SessionWindow, Windowed
from tidegate.windows.kinds import Session, Sliding
from tidegate.windows.operators.base import Moment, Output
from tidegate.windows.operators.session import SessionOperator
from tidegate.windows.operators.sliding import SlidingOperator
from tidegate.windows.operators.windows import WindowOperator
from tidegate.windows.stores.key_value_store import KeyValueStore
from tidegate.windows.stores.session_store import SessionStore
from tidegate.windows.stores.window_store import WindowStore
from window_oracles import ms
from workers import TASK, Worker

COUNTED = resolve({"n": agg.count()}, pa.schema([]))
LogLine = tuple[bytes, bytes | None, int]


class Answers(NamedTuple):
    """What a level answered to the reads of a case, in their order, and what it counted."""

    rows: list[Any]
    dropped: int | None
    segments: frozenset[int] | None = None
    null_keys: int = 0


def in_lives(items: Sequence[Any], end: Any) -> list[list[Any]]:
    """What each process is given, one after the other."""
    return [list(group) for is_end, group in groupby(items, lambda each: each is end) if not is_end]


def by_key(rows: Any) -> Any:
    """Rows with no order between keys: what `Read` promises."""
    if not isinstance(rows, list):
        return rows
    return sorted(rows, key=lambda row: row[0])


@contextmanager
def expected_warning(read: Read) -> Iterator[None]:
    """Inside, a warning comes exactly if the read says so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    told = [each for each in caught if issubclass(each.category, TidegateWarning)]
    assert bool(told) is read.warns, f"{read.call}{read.args}: warned {[str(each.message) for each in told]}"


# ── stores ───────────────────────────────────────────────────────────────────────────────────────────────────────


def open_store(case: StoreCase, worker: Worker, compat: str, log: list[LogLine] | None = None) -> Any:
    def changelog(keys: pa.Array, values: pa.Array, timestamps: Any) -> None:
        assert log is not None
        log.extend(zip(keys.to_pylist(), values.to_pylist(), timestamps.tolist(), strict=True))

    context = worker.runtime.context(TASK)
    given: dict[str, Any] = {
        "timestamped": case.timestamps,
        "changelog": None if log is None else changelog,
    }
    if case.kind == "key":
        return KeyValueStore(context, "store", **given)
    given |= {"retention": case.retention, "compat": compat}
    if case.kind == "session":
        return SessionStore(context, "store", **given)
    return WindowStore(context, "store", window_size=case.size, retain_duplicates=case.duplicates, **given)


def put_one(case: StoreCase, store: Any, put: Put) -> None:
    stamp = {} if put.ts is None else {"value_ts": put.ts}
    if case.kind == "key":
        store.put(put.key, put.value, **stamp)
    elif case.kind == "window":
        store.put(put.key, put.value, put.start, **stamp)
    elif put.removes:
        store.remove(Windowed(put.key, SessionWindow(put.start, put.end or 0)), **stamp)
    else:
        store.put(Windowed(put.key, SessionWindow(put.start, put.end or 0)), put.value, **stamp)


def put_together(case: StoreCase, store: Any, puts: Sequence[Put]) -> None:
    """All puts in one call; removals of sessions have a call of their own, so they part the others."""
    for removes, group in groupby(puts, lambda put: put.removes):
        some = list(group)
        keys, values = [put.key for put in some], [put.value for put in some]
        starts, ends = [put.start for put in some], [put.end or 0 for put in some]
        default = {"key": [0] * len(some), "window": starts, "session": ends}[case.kind]
        stamps = [usual if put.ts is None else put.ts for put, usual in zip(some, default, strict=True)]
        if case.kind == "key":
            store.put_all(keys, values, value_ts=stamps)
        elif case.kind == "window":
            store.put_all(keys, starts, values, value_ts=stamps)
        elif removes:
            store.remove_batch(keys, starts, ends, value_ts=stamps)
        else:
            store.put_all(keys, starts, ends, values, value_ts=stamps)


def restarted(case: StoreCase, worker: Worker, life: int, compat: str) -> tuple[Worker, Any]:
    token = worker.runtime.checkpoint(TASK)
    again = Worker(backend=worker.backend, seed=life)
    again.runtime.apply_checkpoint(TASK, token)
    return again, open_store(case, again, compat)


def store_by_rows(case: StoreCase, compat: str = "tidegate") -> Answers:
    """Kafka Streams' own calls, a row at a time."""
    worker = Worker()
    store = open_store(case, worker, compat)
    for life, puts in enumerate(in_lives(case.puts, RESTART)):
        if life:
            worker, store = restarted(case, worker, life, compat)
        for put in puts:
            put_one(case, store, put)
    opened = []
    for read in case.reads:
        with expected_warning(read):
            opened.append(ask_store(case, store, read))
    for put in case.while_open:
        put_one(case, store, put)
    found = [store_rows(case, read, rows) for read, rows in zip(case.reads, opened, strict=True)]
    return Answers(found, dropped_of(case, store), segments_of(case, store))


def store_by_batches(case: StoreCase, compat: str = "tidegate") -> Answers:
    """The calls for columns; a read that has none is left out (`...`)."""
    worker = Worker()
    store = open_store(case, worker, compat)
    for life, puts in enumerate(in_lives(case.puts, RESTART)):
        if life:
            worker, store = restarted(case, worker, life, compat)
        put_together(case, store, puts)
    found = [ask_store_for_columns(case, store, read) for read in case.reads]
    return Answers(found, dropped_of(case, store), segments_of(case, store))


def store_restored(case: StoreCase, compat: str = "tidegate") -> Answers:
    """A store that is restored in one go from the changelog of another; nothing is counted as dropped by it."""
    log: list[LogLine] = []
    first = open_store(case, Worker(), compat, log)
    for put in case.puts:
        put_one(case, first, put)
    store = open_store(case, Worker(), compat)
    keys, values, timestamps = zip(*log, strict=True)
    if case.kind == "key":
        store.restore_batch(list(keys), list(values), value_ts=list(timestamps))
    else:
        store.restore_batch(pa.array(keys, pa.binary()), list(values), list(timestamps))
    found = []
    for read in case.reads:
        with expected_warning(read):
            found.append(store_rows(case, read, ask_store(case, store, read)))
    return Answers(found, dropped_of(case, store))


def dropped_of(case: StoreCase, store: Any) -> int:
    return 0 if case.kind == "key" else store.dropped_records


def segments_of(case: StoreCase, store: Any) -> frozenset[int] | None:
    return None if case.kind == "key" else frozenset(store.segments.ids)


STORE_CALLS = {
    "window": {"get": "fetch"},
    "session": {
        "get": "fetch_session",
        "all": "fetch_range",
        "backward_all": "backward_fetch_range",
    },
    "key": {},
}


def ask_store(case: StoreCase, store: Any, read: Read) -> Any:
    args = (None, None) if case.kind == "session" and read.call in ("all", "backward_all") else read.args
    return getattr(store, STORE_CALLS[case.kind].get(read.call, read.call))(*args)


def store_rows(case: StoreCase, read: Read, found: Any) -> Any:
    """What a store answered, as rows."""

    def told(value: Any) -> tuple[Any, ...]:
        return tuple(value) if case.timestamps else (value,)

    if read.call == "get":
        return found if found is None or not case.timestamps else tuple(found)
    rows = []
    for where, value in found:
        if case.kind == "key":
            rows.append((where, *told(value)))
        elif isinstance(where, int):
            rows.append((read.args[0], where, *told(value)))
        elif case.kind == "window":
            assert where.window.end == where.window.start + case.size
            rows.append((where.key, where.window.start, *told(value)))
        else:
            rows.append((where.key, where.window.start, where.window.end, *told(value)))
    return rows


def ask_store_for_columns(case: StoreCase, store: Any, read: Read) -> Any:
    """A read through `get_batch`, `fetch_keys` or `batches`; `...` where there is no such form."""
    args = read.args
    if read.call == "get":
        starts: list[list[int]] = [[each] for each in args[1:]]
        answer = store.get_batch([args[0]], *starts).to_pylist()[0]
        if answer["value"] is None or not case.timestamps:
            return answer["value"]
        return answer["value"], answer["value_ts"]
    reading = columns_for(case, store, read)
    if reading is None:
        return ...
    with expected_warning(read):
        batches = list(reading())
    names = {"window": ("window_start",), "session": ("window_start", "window_end"), "key": ()}[case.kind]
    last = ("value", "value_ts") if case.timestamps else ("value",)
    rows = [
        tuple(row[name] for name in ("key", *names, *last)) for batch in batches for row in batch.to_pylist()
    ]
    return sorted(rows) if case.kind == "key" else rows


def columns_for(case: StoreCase, store: Any, read: Read) -> Callable[[], Iterable[pa.RecordBatch]] | None:
    """The call for columns that answers a read; None: there is none."""
    call, args = read.call, read.args
    if call in ("fetch", "find_sessions"):
        return lambda: [store.fetch_keys([args[0]], *args[1:])]
    if case.kind == "window" and call in ("fetch_all", "all"):
        return lambda: store.batches(*args)
    if case.kind == "window" and call == "fetch_range":
        return lambda: store.batches(*args[2:], key_from=args[0], key_to=args[1])
    whole = {"session": ("fetch_range", "all"), "key": ("range", "all")}.get(case.kind, ())
    if call in whole and not (case.kind == "key" and read.warns):
        low, high = args or (None, None)
        return lambda: store.batches(key_from=low, key_to=high)
    return None


# ── tables over topics ───────────────────────────────────────────────────────────────────────────────────────────


def records_of(case: StoreCase, puts: Iterable[Put]) -> list[Said]:
    """The puts as records of the store's changelog; one without a key is a record without a key."""
    said = []
    for put in puts:
        if put.key is None or case.kind == "key":
            said.append(Said(put.key, put.value, put.ts or 0))
        elif case.kind == "window" and put.start < 0:  # no builder makes such a key
            said.append(Said(put.key + struct.pack(">qi", put.start, 0), put.value, 0))
        elif case.kind == "window":
            said.append(window_record(put.key, put.start, put.value, put.ts))
        else:
            said.append(session_record(put.key, put.start, put.end or 0, put.value, put.ts))
    return said


def open_table(case: StoreCase, log: Any, folder: Path) -> Any:
    if case.kind == "key":
        return tg.table(log, "topic", state=folder / "state")
    kept = {"state": folder / "state", "retention": ms(case.retention)}
    if case.kind == "session":
        return tg.sessioned_table(log, "topic", **kept)
    return tg.windowed_table(log, "topic", ms(case.size), **kept)


def run_table(case: StoreCase, folder: Path) -> Answers:
    with tg.Log(folder / "log", durability="os") as log:
        lives = in_lives(case.puts, RESTART)
        for life, puts in enumerate(lives):
            write_records(log, "topic", records_of(case, puts))
            with open_table(case, log, folder) as table:
                if life == len(lives) - 1:
                    found = [ask_table(case, table, read) for read in case.reads]
                    return Answers(found, table.counts.expired, null_keys=table.counts.null_keys)
    raise AssertionError("a case has puts")


TABLE_CALLS = {
    "find_sessions_range": "fetch_range",
    "backward_find_sessions": "backward_fetch",
    "backward_find_sessions_range": "backward_fetch_range",
    "range": "fetch_range",
    "reverse_range": "backward_fetch_range",
    "reverse_all": "backward_all",
}


def ask_table(
    case: StoreCase, table: Any, read: Read, value: Callable[[Any], Any] = lambda each: each
) -> Any:
    if read.call == "get":
        found = table.get(*read.args)
        if case.timestamps and found is not None:
            (row,) = table.fetch(*read.args, *read.args[1:])
            return value(found), row.timestamp
        return None if found is None else value(found)
    with expected_warning(read):
        rows = list(getattr(table, TABLE_CALLS.get(read.call, read.call))(*read.args))
    told = []
    for row in rows:
        last = (value(row.value), row.timestamp) if case.timestamps else (value(row.value),)
        if case.kind == "key":
            told.append((row.key, *last))
        elif case.kind == "window":
            assert row.window.end == row.window.start + case.size
            told.append((row.key, row.window.start, *last))
        else:
            told.append((row.key, row.window.start, row.window.end, *last))
    return told


# ── puts as records: the windows that hold the last value of their records ───────────────────────────────────────


def events_of(case: StoreCase, puts: Iterable[Put]) -> list[Event]:
    """Records that bring about the puts: one in each window; of a session as many as keep it together."""
    events = []
    for put in puts:
        if case.kind == "window":
            assert put.value is not None and put.start % case.size == 0, (
                "left_out says so where that is not so"
            )
            events.append(Event(put.key, put.start if put.ts is None else put.ts, put.value))
        else:
            assert case.gap is not None and put.value is not None and put.end is not None
            times = [*range(put.start, put.end, case.gap), put.end]
            events += [Event(put.key, time, put.value) for time in times]
    return events


def window_of(case: StoreCase) -> Any:
    """Windows that take a record exactly as long as the store would show the row."""
    kept = ms(case.retention)
    if case.kind == "session":
        assert case.gap is not None
        return tg.Session(ms(case.gap), grace=ms(case.retention - case.gap - 1), retention=kept)
    return tg.Tumbling(ms(case.size), grace=ms(case.retention - case.size), retention=kept)


VALUES = pa.schema([("value", pa.binary())])


def batch_of(events: Sequence[Event], first_offset: int) -> EventBatch:
    count = len(events)
    return EventBatch(
        key=pa.array([event.key for event in events], pa.binary()),
        ts=np.array([event.ts for event in events], np.int64),
        offset=np.arange(first_offset, first_offset + count, dtype=np.int64),
        partition=np.zeros(count, np.int32),
        stream_time=np.full(count, -1, np.int64),
        values=pa.RecordBatch.from_arrays(
            [pa.array([event.value for event in events], pa.binary())], schema=VALUES
        ),
    )


def operator_of(window: Any, worker: Worker, aggregates: Any, **settings: Any) -> Any:
    made = {Session: SessionOperator, Sliding: SlidingOperator}.get(type(window), WindowOperator)
    return made(worker.runtime, TASK, "windows", window, aggregates, **settings)


class Ran(NamedTuple):
    """An operator after all records, what it sent, and its counters over all lives."""

    operator: Any
    outputs: list[Output]
    counters: dict[str, int]


def run_operator_over(
    window: Any, events: Sequence[Event], cut: int, aggregates: Any, **settings: Any
) -> Ran:
    """`cut` records in each batch; a new operator from the checkpoint wherever `events` say so."""
    worker, offset, outputs = Worker(), 0, list[Output]()
    counters: dict[str, int] = {}
    operator = operator_of(window, worker, aggregates, **settings)
    for life, some in enumerate(in_lives(events, AGAIN)):
        if life:
            token = worker.runtime.checkpoint(TASK)
            worker = Worker(backend=worker.backend, seed=life)
            operator = operator_of(window, worker, aggregates, **settings)
            worker.runtime.apply_checkpoint(TASK, token)
        for at in range(0, len(some), cut):
            piece = some[at : at + cut]
            outputs.append(operator.process(batch_of(piece, offset), Moment(0)))
            offset += len(piece)
    for output in outputs:
        for name, number in output.counters.items():
            counters[name] = counters.get(name, 0) + number
    return Ran(operator, outputs, counters)


def run_operator(case: StoreCase, cut: int) -> Answers:
    aggregates = resolve({"value": tg.last("value")}, VALUES)
    events = [
        each
        for life, puts in enumerate(in_lives(case.puts, RESTART))
        for each in ([AGAIN] if life else []) + events_of(case, puts)
    ]
    ran = run_operator_over(window_of(case), events, cut, aggregates)
    rows = ran.operator.windows().to_batch().to_pylist()
    held = [
        (row["key"], row["window_start"], row["window_end"], row["values"]["value"], row["ts"])
        for row in rows
    ]
    found = [ask_rows(case, held, read) for read in case.reads]
    return Answers(found, ran.counters.get("late_records", 0), null_keys=ran.counters.get("no_key", 0))


def ask_rows(case: StoreCase, held: list[tuple[bytes, int, int, bytes, int]], read: Read) -> Any:
    """A read as its definition says it, over all rows that an operator holds."""
    call, args = read.call.replace("find_sessions", "fetch"), read.args
    if call.startswith("backward_"):
        forward = ask_rows(case, held, read._replace(call=call.removeprefix("backward_")))
        return forward[::-1]
    is_session = case.kind == "session"

    def shown(row: tuple[bytes, int, int, bytes, int]) -> tuple[Any, ...]:
        key, start, end, value, ts = row
        bounds = (start, end) if is_session else (start,)
        return (key, *bounds, value, ts) if case.timestamps else (key, *bounds, value)

    if call == "get":
        found = [row for row in held if row[: len(args)] == args]
        assert len(found) <= 1
        return None if not found else (found[0][3:] if case.timestamps else found[0][3])
    low, high = (
        {"fetch": (args[0], args[0]), "fetch_range": args[:2]}.get(call, (None, None))
        if args
        else (None, None)
    )
    span = {"fetch": args[1:], "fetch_range": args[2:]}.get(call, args)
    first, last = span or (0, LATEST)
    return [
        shown(row)
        for row in sorted(held, key=lambda row: (row[0], row[2], row[1]))
        if (low is None or row[0] >= low)
        and (high is None or row[0] <= high)
        and (row[2] >= first and row[1] <= last if is_session else first <= row[1] <= last)
    ]


# ── apps ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def said_of(events: Iterable[Event]) -> list[Said]:
    return [Said(event.key, event.value, event.ts) for event in events]


def run_app(case: StoreCase, folder: Path) -> Answers:
    """Windows as a table of the app; plain keys go through the app into a topic, and that is the table."""
    app = tg.App("cases", log=folder / "log", state=folder / "state")
    stream = app.stream("in", key=tg.Bytes())
    if case.kind == "key":
        stream.to_topic("topic")
    else:
        windows = stream.window(window_of(case))
        windows.agg(value=tg.last("value")).to_table("windows")
    late = no_key = 0
    for puts in in_lives(case.puts, RESTART):
        with tg.Log(folder / "log", durability="os") as log:
            said = records_of(case, puts) if case.kind == "key" else said_of(events_of(case, puts))
            write_records(log, "in", said)
        summary = app.run("local", until="caught_up")
        assert summary.exit_code == 0, str(summary)
        late = summary.progress.late
        no_key = summary.progress.counters.get("windows.no_key", 0)
    if case.kind == "key":
        with app, app.table("topic") as table:
            found = [ask_table(case, table, read) for read in case.reads]
            return Answers(found, None, null_keys=table.counts.null_keys)
    with app.open_table("windows") as table:
        found = [ask_table(case, table, read, lambda value: value["value"]) for read in case.reads]
    assert app.late("windows").num_rows == late
    return Answers(found, late, null_keys=no_key)


# ── counted windows ──────────────────────────────────────────────────────────────────────────────────────────────


class CountedWindows(NamedTuple):
    """Rows of windows, with what was left out: windows that had closed to a record, records late for all of theirs,
    records without a key."""

    rows: list[Counted]
    dropped: int
    late: int | None
    skipped: int


def count_in_store(case: WindowCase) -> CountedWindows:
    """Kafka Streams' own steps for a windowed count, made with the calls of our stores, a record at a time."""
    window, is_session = case.window, isinstance(case.window, Session)
    worker, compat = Worker(), "kafka-streams"

    def opened() -> Any:
        context = worker.runtime.context(TASK)
        if is_session:
            return SessionStore(context, "store", retention=window.retention_ms, compat=compat)
        return WindowStore(
            context,
            "store",
            retention=window.retention_ms,
            window_size=window.size_ms,
            timestamped=True,
            compat=compat,
        )

    store, dropped, skipped = opened(), 0, 0
    for life, events in enumerate(in_lives(case.events, AGAIN)):
        if life:
            token = worker.runtime.checkpoint(TASK)
            worker = Worker(backend=worker.backend, seed=life)
            worker.runtime.apply_checkpoint(TASK, token)
            store = opened()
        stream_time = -1
        for event in events:
            if event.key is None:
                skipped += 1
                continue
            stream_time = max(stream_time, event.ts)
            step = _count_session if is_session else _count_windows
            dropped += step(store, window, event.key, event.ts, stream_time)
    rows = []
    for where, value in store.fetch_range(None, None) if is_session else store.all():
        number, stamp = (value, where.window.end) if is_session else value
        rows.append((where.key, where.window.start, where.window.end, int(number), stamp))
    return CountedWindows(sorted(rows), dropped, None, skipped)


def _count_windows(store: WindowStore, window: Any, key: bytes, ts: int, stream_time: int) -> int:
    close, dropped = stream_time - window.grace_ms, 0
    for start in window.starts(ts):
        if start + window.size_ms <= close:
            dropped += 1
            continue
        old: Any = store.fetch(key, start)
        number, stamp = (0, ts) if old is None else (int(old.value), old.timestamp)
        store.put(key, b"%d" % (number + 1), start, value_ts=max(ts, stamp))
    return dropped


def _count_session(store: SessionStore, window: Any, key: bytes, ts: int, stream_time: int) -> int:
    first, last, number = ts, ts, 0
    merged = []
    for session, value in store.find_sessions(key, ts - window.gap_ms, ts + window.gap_ms):
        assert isinstance(value, bytes)
        merged.append(session)
        number += int(value)
        first, last = min(first, session.window.start), max(last, session.window.end)
    if last < stream_time - window.grace_ms - window.gap_ms:
        return 1
    if (first, last) != (ts, ts):
        for session in merged:
            store.remove(session)
    store.put(Windowed(key, SessionWindow(first, last)), b"%d" % (number + 1))
    return 0


def count_in_operator(case: WindowCase, cut: int, compat: str | None) -> CountedWindows:
    """Rows are those that the operator shows, or on close those that it sent."""
    ran = run_operator_over(case.window, case.events, cut, COUNTED, emit=case.emit, compat=compat)
    if case.emit == "close":
        rows = [row for output in ran.outputs for row in _counted(output.rows)]
    else:
        rows = _counted(ran.operator.windows())
    return CountedWindows(
        sorted(rows),
        ran.counters.get("late_windows", 0),
        ran.counters.get("late_records", 0),
        ran.counters.get("no_key", 0),
    )


def _counted(rows: Any) -> list[Counted]:
    return [
        (row["key"], row["window_start"], row["window_end"], row["values"]["n"], row["ts"])
        for row in rows.to_batch().to_pylist()
        if not row.get("deleted")
    ]


def count_in_table(case: WindowCase, folder: Path, compat: str | None) -> list[Counted]:
    """What an operator sends, record by record, written to a changelog topic and read as a table.

    On close there is nothing left to change, so that windows are read however old they are.
    """
    ran = run_operator_over(case.window, case.events, 1, COUNTED, emit=case.emit, compat=compat)
    is_session = isinstance(case.window, Session)
    said = []
    for output in ran.outputs:
        for row in output.rows.to_batch().to_pylist():  # type: ignore[union-attr]
            value = None if row.get("deleted") else row["values"]["n"].to_bytes(8, "big")
            if is_session:
                said.append(
                    session_record(row["key"], row["window_start"], row["window_end"], value, row["ts"])
                )
            else:
                said.append(window_record(row["key"], row["window_start"], value, row["ts"]))
    kept: dict[str, Any] = {"state": folder / "state", "consumed": tg.Consumed(tg.Bytes(), tg.Long())}
    kept["retention"] = "1d" if case.emit == "close" else ms(case.window.retention_ms)
    with tg.Log(folder / "log", durability="os") as log:
        write_records(log, "topic", said)
        if is_session:
            table: Any = tg.sessioned_table(log, "topic", **kept)
        else:
            size = case.window.difference_ms if isinstance(case.window, Sliding) else case.window.size_ms
            table = tg.windowed_table(log, "topic", ms(size), **kept)
        with table:
            return sorted(
                (row.key, row.window.start, row.window.end, row.value, row.timestamp) for row in table.all()
            )


def count_in_app(case: WindowCase, folder: Path, compat: str | None) -> CountedWindows:
    """Rows are those of the app's table, or on close those of its topic."""
    app = tg.App("cases", log=folder / "log", state=folder / "state")
    windows = app.stream("in", key=tg.Bytes()).window(case.window, emit=case.emit, compat=compat)
    counted = windows.count("n")
    if case.emit == "close":
        counted.to_topic("windows")
    else:
        counted.to_table("windows")
    for events in in_lives(case.events, AGAIN):
        with tg.Log(folder / "log", durability="os") as log:
            write_records(log, "in", said_of(events))
        summary = app.run("local", until="caught_up")
        assert summary.exit_code == 0, str(summary)
    counters = summary.progress.counters
    consumed = tg.Consumed(tg.Bytes(), tg.Long())
    if case.emit == "update":
        with app.open_table("windows") as table:
            rows = [
                (row.key, row.window.start, row.window.end, row.value["n"], row.timestamp)
                for row in table.all()
            ]
    else:
        if isinstance(case.window, Session):
            opened: Any = app.sessioned_table("windows", consumed=consumed)
        else:
            size = case.window.difference_ms if isinstance(case.window, Sliding) else case.window.size_ms
            opened = app.windowed_table("windows", ms(size), consumed=consumed)
        with app, opened as table:
            rows = [
                (row.key, row.window.start, row.window.end, row.value, row.timestamp) for row in table.all()
            ]
    return CountedWindows(
        sorted(rows),
        counters.get("windows.late_windows", 0),
        counters.get("windows.late_records", 0),
        counters.get("windows.no_key", 0),
    )
