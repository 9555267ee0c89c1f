"""`App`: the flows that run under one name, where their log and state are, and how they are started.

Defining an app opens, creates and reads nothing. `start` and `run` take the app's lease and begin rounds. The table
methods open the log for reading and keep it open until `close`.

    data="./data"                                      an embedded log in ./data/log, state in ./data/state
    log="kafka://broker:9092", state="s3://bucket/x"   a cluster's

Thread rule: define an app in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Unpack

import pyarrow as pa

from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import InvalidError
from tidegate.integrity.validator import require_new_names
from tidegate.pipeline import flow as known_topics
from tidegate.pipeline.definition.stream import Stream
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.settings import RunOptions, log_address, state_address
from tidegate.pipeline.topology import Document, OnError, Sink, Source, digest, sink_name
from tidegate.storage import StorageConfig
from tidegate.storage.backends.base import check_state_name
from tidegate.tables.serdes.base import Serde, String, windowed
from tidegate.windows.operators.windowed_operator import Emit

if TYPE_CHECKING:
    from tidegate.pipeline.admin import AppAdmin
    from tidegate.pipeline.coordinator import Engine
    from tidegate.pipeline.query import Run, Summary
    from tidegate.pipeline.table import ResultTable
    from tidegate.storage.backends.base import StorageBackend
    from tidegate.tables.factories import KeyTable, SessionedTable, WindowedTable
    from tidegate.tables.versions.catalog import PushReport, Versions
    from tidegate.tables.versions.reader import VersionedTable

LOCAL = "local"
RENAMED = {"read": "open_table"}


class App:
    """An app: a name, a log, a state store, and flows.

    `storage` limits what a worker process may use, `client` holds settings of the Kafka client. A source partition
    without records for `idle_after` no longer holds back the watermark of re-keyed windows, nor steps that process
    all partitions in one order (`explain` names those flows). At the end of a run with `until="caught_up"`,
    partitions that were read to their end are not waited for either. With `idle_after=None` every partition is
    always waited for: results never depend on when records arrived, and `progress.waiting_for` names what is
    missing.
    """

    def __init__(
        self,
        name: str,
        *,
        data: str | Path | None = None,
        log: str | Path | None = None,
        state: str | Path | None = None,
        storage: StorageConfig | Mapping[str, Any] | None = None,
        client: Mapping[str, str] | None = None,
        idle_after: DurationLike | None = "30s",
    ) -> None:
        self.name = check_state_name("app", name)
        self.log = log_address(data, log)
        self.state = state_address(data, state)
        self.client = dict(client or {})
        if self.client and not self.log.startswith("kafka://"):
            raise InvalidError(
                f"app {name}: client= has settings of the Kafka client ({next(iter(self.client))}), but its "
                f"log is the folder {self.log}; give log='kafka://HOST:PORT', or leave them out"
            )
        self.storage = storage if isinstance(storage, StorageConfig) else StorageConfig.of(storage or {})
        self.idle_after_ms = None if idle_after is None else duration_ms(idle_after)
        self._flows: list[Flow] = []
        self._streams: list[Stream] = []  # the stream that each flow was made from
        self._opened_log: Any = None
        self._opened_state: StorageBackend | None = None

    # ── defining ─────────────────────────────────────────────────────────────────────────────────────────────────

    def stream(
        self,
        topic: str,
        *,
        key: Serde[Any] | None = None,
        value: Serde[Any] | None = None,
        timestamp: str | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        on_error: OnError = "fail",
        **renamed: Never,
    ) -> Stream:
        """Return the records of a topic as a stream.

        Keys are text unless `key` names another serde. `value` turns values into columns: `Json(order_id="string",
        …)`; without it the value is one column of bytes, `value`. `timestamp` names the column that holds event
        time; without it the record's timestamp is used. `start` is where a new app begins to read. `on_error`
        decides about a record whose value cannot be read, or that a later step fails on (a function that raises, a
        cast that does not fit): `"fail"` (the default) stops its partition in front of it, `"drop"` leaves it out
        and counts it, `"keep"` stores it as a dead letter.
        """
        require_new_names(f"stream({topic!r}, ", renamed, {"on_bad": "on_error"})
        source = Source(topic, String() if key is None else key, value, timestamp, start, on_error)
        return Stream(self, source)

    def changes(
        self,
        topic: str,
        *,
        window_size: DurationLike | None = None,
        sessions: bool = False,
        key: Serde[Any] | None = None,
        value: Serde[Any] | None = None,
        key_format: Literal["changelog", "topic"] = "changelog",
        emit: Emit | Literal["update", "close"] | None = None,
        grace: DurationLike | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        on_error: OnError = "fail",
        **renamed: Never,
    ) -> Stream:
        """Return the changes of a table as a stream: what `.to_topic(topic)` of a flow sends, or a Kafka Streams
        changelog.

        Give `window_size`, which is not in the bytes, or `sessions=True`. The columns are `window_start`,
        `window_end` and those of the value. Event time is one millisecond before the window's end, also of sliding
        windows, which include it: the bytes do not say which kind it is. For sessions it is the end.

        `emit` says how the topic is written: `"update"` sends a window's new value whenever it changes (the default,
        and what Kafka Streams writes), `"close"` sends each window once. With updates, windows over this stream
        retract a row's previous value, so each row counts once, with its last value; a deletion retracts the row.
        For topics that this app writes itself, `emit` is known. `grace` is needed for topics that Tidegate did not
        write, whose records do not say which windows are final: how long after its end a window may still change
        (its grace; for sessions gap plus grace; for sliding windows a millisecond more). `on_error` is as in `stream`.
        """
        require_new_names(f"changes({topic!r}, ", renamed, {"on_bad": "on_error"})
        if (window_size is None) is not sessions:
            raise InvalidError(
                f"changes of {topic}: give window_size= where it has windows of time, or sessions=True, and not both"
            )
        inner = String() if key is None else key
        wrapped = (
            windowed(inner)
            if window_size is None
            else windowed(inner, size=window_size, key_format=key_format)
        )
        written, settles_ms = known_topics.changelog(self._flows, topic, emit, grace)
        return Stream(self, Source(topic, inner, value, None, start, on_error, wrapped, written, settles_ms))

    @property
    def flows(self) -> tuple[Flow, ...]:
        """The flows defined so far, in order."""
        return tuple(self._flows)

    def flow(self, name: str) -> Flow:
        """Return the flow that writes the topic or table of this name."""
        for flow in self._flows:
            if name in map(sink_name, flow.sinks):
                return flow
        have = ", ".join(sink_name(sink) for flow in self._flows for sink in flow.sinks)
        raise InvalidError(f"app {self.name} has no topic or table {name!r}; it has {have or 'none'}")

    def describe(self) -> Document:
        """Return the definition as plain values. Paths and addresses are not part of it."""
        return {
            "app": self.name,
            "fingerprint": self.fingerprint,
            "flows": [flow.document for flow in self._flows],
        }

    @property
    def fingerprint(self) -> str:
        """The digest of the definition; equal definitions have equal digests in every process."""
        return digest({flow.name: flow.fingerprint for flow in self._flows})

    def explain(self, *, sample: bool | None = None) -> str:
        """Return the plan of every flow: source, steps, tasks and why, where each record is sent, and the expected
        state size.

        The size is estimated from a minute of an embedded log. `sample=False` reads no sample, `sample=True` also
        samples a Kafka cluster.
        """
        from tidegate.pipeline.explain import explain_app

        return explain_app(self, sample=sample)

    def _add(self, stream: Stream, sink: Sink) -> None:
        """Add an output of a stream to the app; adding the same one again changes nothing."""
        name = sink_name(sink)
        for place, (flow, known) in enumerate(zip(self._flows, self._streams, strict=True)):
            if name in map(sink_name, flow.sinks):
                if sink in flow.sinks and known == stream:
                    return  # a notebook cell that was run again
                raise InvalidError(
                    f"app {self.name} has something that goes to {name!r} already; give this its own name, "
                    "or make the App anew where a changed definition shall replace it"
                )
            if _is_same(known, stream):
                self._check_circle(stream.source.topic, name)
                grown = Flow(known.source, known.steps, (*flow.sinks, sink))
                known_topics.check_reading([*self._flows[:place], grown, *self._flows[place + 1 :]])
                self._flows[place] = grown
                return
        made = Flow(stream.source, stream.steps, (sink,))
        self._check_circle(stream.source.topic, name)
        known_topics.check_reading([*self._flows, made])
        self._flows.append(made)
        self._streams.append(stream)

    def _check_circle(self, source: str, name: str) -> None:
        """Refuse flows that would feed each other in a cycle."""
        leads_to: dict[str, set[str]] = {source: {name}}
        for flow in self._flows:
            leads_to.setdefault(flow.source.topic, set()).update(sink.topic for sink in flow.topics)
        seen, ahead = set[str](), [name]
        while ahead:
            here = ahead.pop()
            if here == source:
                raise InvalidError(
                    f"app {self.name}: {source} goes to {name}, which comes back to {source} by other flows, "
                    "so records would run in a circle for ever; send it to another topic"
                )
            if here not in seen:
                seen.add(here)
                ahead += leads_to.get(here, ())

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, engine: Literal["spark", "local"] | Any = "local", **options: Unpack[RunOptions]) -> Run:
        """Start the app in the background, from its last commit.

        `engine` is a SparkSession, `"spark"` for `tidegate.spark.session()`, or `"local"` (the default) for threads
        of this process. `until="caught_up"` ends the run when everything that is in the log now is processed;
        `close=True` then makes every window final. `trigger` is the time between rounds once caught up, `"1s"` by
        default; `trigger="once"` is `until="caught_up"`. `round_records` fixes how many records a round reads.
        `on_loss` decides about records that were deleted before they were read: `"stop"`, or `"accept"`, which is
        recorded. `maintains_log=True` also applies retention and compaction to the embedded log. `progress` is called
        with each progress report.
        """
        run = self._opened(engine, **options)
        with _stopped_if_interrupted(run):
            return run.begin()

    def run(
        self, engine: Literal["spark", "local"] | Any = "local", **options: Unpack[RunOptions]
    ) -> Summary:
        """Call `start`, with the same options, and wait for the end.

        Ctrl-C, also in a notebook cell, ends the run after the current round and frees the app. If that takes longer
        than `stop_within_ms` (30 s), or at a second Ctrl-C, the round is abandoned and not committed.
        """
        run = self._opened(engine, **options)
        with _stopped_if_interrupted(run):
            return run.begin().await_termination()

    def _opened(self, engine: Any = None, **options: Unpack[RunOptions]) -> Run:
        """Open the run that `start` begins, so that an interrupted caller can still stop it."""
        from tidegate.pipeline.launcher import start_run
        from tidegate.pipeline.settings import RunSettings, WorkerSetup

        settings: dict[str, Any] = {**options}
        _check_options(settings)
        if not self._flows:
            raise InvalidError(
                f"app {self.name} does nothing yet: end a stream with .to_topic(topic) or .to_table(name)"
            )
        trigger = settings.pop("trigger", "1s")
        if trigger == "once":
            trigger, settings["until"] = "1s", "caught_up"
        try:
            trigger_ms = duration_ms(trigger)
        except InvalidError as error:
            raise InvalidError(f"trigger: {error}") from None
        given = {name: settings.pop(name, None) for name in ("clock", "metrics", "progress")}
        chosen = RunSettings(trigger_ms=trigger_ms, idle_after_ms=self.idle_after_ms, **settings)
        setup = WorkerSetup(self.name, self.flows, self.log, self.state, self.storage, self.client)
        return start_run(setup, _engine(engine), settings=chosen, begins=False, **given)

    @property
    def admin(self) -> AppAdmin:
        """Status of the app, and changes to it while it does not run."""
        from tidegate.pipeline.admin import AppAdmin

        return AppAdmin(self.name, self.state, self.log, self.client)

    # ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────

    def windowed_table(
        self,
        topic: str,
        window_size: DurationLike | None = None,
        *,
        key: Serde[Any] | None = None,
        value: Serde[Any] | None = None,
        **settings: Any,
    ) -> WindowedTable:
        """Return a topic of time windows as a table over this app's log, kept in its state.

        Window size and serdes need not be given for topics that the app writes itself. Settings are those of
        `tidegate.windowed_table`.
        """
        from tidegate.tables.factories import windowed_table

        known_topics.check_kind(self._flows, topic, "windowed_table")
        size = known_topics.window_size(self._flows, topic, window_size)
        settings.setdefault("key_format", known_topics.key_format(self._flows, topic))
        return windowed_table(self._reading(), topic, size, **self._table(topic, key, value, settings))

    def sessioned_table(
        self, topic: str, *, key: Serde[Any] | None = None, value: Serde[Any] | None = None, **settings: Any
    ) -> SessionedTable:
        """Return a topic of sessions as a table over this app's log, kept in its state; see
        `tidegate.sessioned_table`."""
        from tidegate.tables.factories import sessioned_table

        known_topics.check_kind(self._flows, topic, "sessioned_table")
        return sessioned_table(self._reading(), topic, **self._table(topic, key, value, settings))

    def table(
        self, topic: str, *, key: Serde[Any] | None = None, value: Serde[Any] | None = None, **settings: Any
    ) -> KeyTable:
        """Return the last value of each key of a topic as a table over this app's log; see `tidegate.table`."""
        from tidegate.tables.factories import table

        known_topics.check_kind(self._flows, topic, "table")
        return table(self._reading(), topic, **self._table(topic, key, value, settings))

    def open_table(self, name: str, *, round: int | None = None) -> ResultTable:
        """Open the windows of a flow as of the app's last commit, from any process: what `.to_table(name)` keeps.

        Every flow with windows can be read this way, by the name of one of its outputs. `round` selects one of the
        last commits.
        """
        from tidegate.pipeline.table import ResultTable

        flow = self.flow(name)
        return ResultTable(
            self._state_to_read(), self.name, flow, round=round, storage=self.storage, log=self._reading
        )

    def push(self, frame: Any, *, table: str, key: str | Sequence[str], **settings: Any) -> PushReport:
        """Push a Spark DataFrame as the next version of a table in this app's log and state, and serve it once it is
        proven complete; see `tidegate.push` for the settings."""
        push = import_module("tidegate.spark.push").push
        report: PushReport = push(
            frame, table=table, key=key, log=self.log, state=self.state, client=self.client, **settings
        )
        return report

    def versions(self, table: str) -> Versions:
        """Return the versions of a pushed table: `.list()`, `.swap(n)`, `.rollback()`."""
        from tidegate.tables.versions.catalog import Versions

        return Versions(self._versions_state(), table)

    def versioned_table(
        self,
        table: str,
        *,
        version: int | None = None,
        key: Serde[Any] | None = None,
        value: Serde[Any] | None = None,
    ) -> VersionedTable:
        """Return a pushed table at its current version; it follows later swaps."""
        from tidegate.tables.versions.reader import VersionedTable

        return VersionedTable(self._versions_state(), table, number=version, key=key, value=value)

    def late(self, flow: str) -> pa.Table:
        """Return the late and future records of a flow, with how late each one was and for which window."""
        from tidegate.pipeline.table import late_of

        return self._looked(lambda backend: late_of(backend, self.name, self.flow(flow)))

    def dead_letters(self, flow: str) -> pa.Table:
        """Return the source records of a flow that could not be read or that a step failed on (`on_error="keep"`), or
        that `validate()` proved corrupt, each with the reason."""
        from tidegate.pipeline.table import dead_letters_of

        return self._looked(lambda backend: dead_letters_of(backend, self.name, self.flow(flow).name))

    def _looked(self, look: Callable[[StorageBackend], pa.Table]) -> pa.Table:
        backend = self._state_to_read()
        try:
            return look(backend)
        finally:
            backend.close()

    def _state_to_read(self) -> StorageBackend:
        """Open the state for reading; it is created if absent, so that a reader can wait for the first commit."""
        from tidegate.storage import open_backend
        from tidegate.storage.backends.base import NoStateError

        try:
            return open_backend(self.state, read_only=True)
        except NoStateError:
            return open_backend(self.state)

    def _table(
        self, topic: str, key: Serde[Any] | None, value: Serde[Any] | None, settings: dict[str, Any]
    ) -> dict[str, Any]:
        consumed = known_topics.consumed(self._flows, topic, key, value, settings.pop("consumed", None))
        return {"state": self.state, **settings, "consumed": consumed}

    def _versions_state(self) -> StorageBackend:
        """The state, kept open until `close`."""
        if self._opened_state is None:
            from tidegate.storage import open_backend

            self._opened_state = open_backend(self.state)
        return self._opened_state

    def _reading(self) -> Any:
        """The log, open for reading until `close`."""
        if self._opened_log is None:
            from tidegate.log.log import is_kafka, open_log

            reading: dict[str, Any] = {} if is_kafka(self.log) else {"read_only": True}
            self._opened_log = open_log(self.log, client=self.client or None, **reading)
        return self._opened_log

    def close(self) -> None:
        """Close what was opened for tables; the app stays usable."""
        opened = [self._opened_log, self._opened_state]
        self._opened_log = self._opened_state = None
        for each in opened:
            if each is not None:
                each.close()

    def __getattr__(self, name: str) -> Never:
        if name in RENAMED:
            raise InvalidError(f"app.{name}(…) is app.{RENAMED[name]}(…) now")
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __enter__(self) -> App:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        flows = ", ".join(f"{flow.source.topic} → {flow.name}" for flow in self._flows) or "nothing yet"
        return f"<App {self.name}: {flows}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.explain(sample=False))}</pre>"


@contextmanager
def _stopped_if_interrupted(run: Run) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if run.is_running:
            run.stop_or_give_up()
        raise


def _is_same(known: Stream, stream: Stream) -> bool:
    """Whether a stream is the same object that a flow was made from: its outputs share the work."""
    return (
        known.source is stream.source
        and len(known.steps) == len(stream.steps)
        and all(ours is theirs for ours, theirs in zip(known.steps, stream.steps, strict=True))
    )


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse unknown options of a run, by name."""
    from difflib import get_close_matches

    known = list(RunOptions.__annotations__)
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise InvalidError(f"a run has no setting {name!r}; {hint}")


def _engine(engine: Any) -> Engine | Callable[[Any], Engine] | None:
    """Return the engine for a session; None means local. Spark's engine is imported only when a session is given."""
    if engine is None or engine == LOCAL:
        return None
    if engine == "spark":
        engine = import_module("tidegate.spark.session").session()
    if type(engine).__module__.split(".")[0] == "pyspark":
        return lambda setup: import_module("tidegate.spark.engine").SparkEngine(engine, setup)
    if isinstance(engine, str):
        raise InvalidError(f"engine {engine!r} is not known; give a SparkSession, 'spark' or 'local'")
    if not callable(getattr(engine, "run", None)) and not callable(engine):
        raise TypeError(f"{engine!r} is no engine; give a SparkSession, 'spark' or 'local'")
    chosen: Engine = engine
    return chosen
