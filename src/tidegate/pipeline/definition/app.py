"""`App`: what runs under one name: where its log and state are, its flows, and how it is started.

Nothing is opened, created or read by defining an app. `start` and `run` take the app's lease and begin rounds; the
tables open the log for reading and keep it until `close`.

    data="./data"                                      an embedded log in ./data/log, state in ./data/state
    log="kafka://broker:9092", state="s3://bucket/x"   a cluster's

Thread rule: define an app in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never

import pyarrow as pa

from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import InvalidError
from tidegate.integrity.validator import require_new_names
from tidegate.pipeline.definition import known_topics
from tidegate.pipeline.definition.fingerprint import Document, digest
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.places import log_address, state_address
from tidegate.pipeline.definition.steps import OnError, Sink, Source, sink_name
from tidegate.pipeline.definition.stream import Stream
from tidegate.storage import StorageConfig
from tidegate.storage.backends.base import check_state_name
from tidegate.tables.serdes.base import Serde, String, windowed
from tidegate.windows.operators.windowed_operator import Emit

if TYPE_CHECKING:
    from tidegate.clock import Clock
    from tidegate.metrics import Metrics
    from tidegate.pipeline.reading.result_table import ResultTable
    from tidegate.pipeline.rounds.engine import Engine
    from tidegate.pipeline.rounds.progress import Progress
    from tidegate.pipeline.rounds.run import Run, Summary
    from tidegate.storage.backends.base import StorageBackend
    from tidegate.tables.factories import KeyTable, SessionedTable, WindowedTable
    from tidegate.tables.versions.catalog import PushReport, Versions
    from tidegate.tables.versions.reader import VersionedTable

LOCAL = "local"
RENAMED = {"read": "open_table"}


class App:
    """A name, a log, a state, and flows.

    `storage` bounds what a worker process may use, `client` are settings of the Kafka client. A source partition
    without records for `idle_after` holds back neither re-keyed windows of the others nor records that are worked on in
    one order of all partitions (`explain` says which flows do that). At the end of a run `until="caught_up"` partitions
    that were read to their end are not waited for either. With None every partition is waited for, always: results
    never depend on when records came, and what waits is told in `progress.waiting_for`.
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
        self._streams: list[Stream] = []  # what each flow was made of
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
        """The records of a topic.

        Keys are text unless `key` says otherwise. `value` turns values into columns: `Json(order_id="string", …)`;
        without it they are one column of bytes, `value`. `timestamp` names the column event time is taken from,
        instead of the record's timestamp. `start` is where a new app begins. `on_error` is what happens to a record
        whose value cannot be read, or that a step behind it fails on (a function that raises, a cast that does not
        fit): `"fail"` stops its partition in front of it (the default), `"drop"` leaves it out and counts it, `"keep"`
        keeps it as a dead letter.
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
        """The changes of a table as a stream: what `.to_topic(topic)` of a flow sends, or a Kafka Streams changelog.

        Say `window_size`, which is not in the bytes, or `sessions=True`. Columns are `window_start`, `window_end`
        and those of the value. Event time is the last millisecond of the window.

        `emit` is how the topic is written: `"update"`, a window's new value whenever it changes (the default, and what
        Kafka Streams writes), or `"close"`, each window once. Of updates, windows behind it take back what a row was,
        so that every row counts once, with its last value; deletions take a row back. `emit` is known of what this
        app itself writes. `grace` is for topics that Tidegate did not write, whose records do not say which windows
        are final: for how long after its end a window may still change (its grace; of sessions gap and grace).
        `on_error` is as in `stream`.
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
        """What was given an end so far, in that order."""
        return tuple(self._flows)

    def flow(self, name: str) -> Flow:
        """The flow that ends in the topic or table of this name."""
        for flow in self._flows:
            if name in map(sink_name, flow.sinks):
                return flow
        have = ", ".join(flow.name for flow in self._flows)
        raise InvalidError(f"app {self.name} has no flow {name!r}; it has {have or 'none'}")

    def describe(self) -> Document:
        """The definition as plain values, for programs; places are not part of it."""
        return {
            "app": self.name,
            "fingerprint": self.fingerprint,
            "flows": [flow.document for flow in self._flows],
        }

    @property
    def fingerprint(self) -> str:
        """The same while the app says the same, in any process."""
        return digest({flow.name: flow.fingerprint for flow in self._flows})

    def explain(self, *, sample: bool | None = None) -> str:
        """The plan of every flow: source, steps, tasks and why, where each record goes, what the state will take.

        The size is reckoned from a minute of the log where there is one: `sample=False` does not look at it,
        `sample=True` also looks at a Kafka cluster.
        """
        from tidegate.pipeline.definition.explain import explain_app

        return explain_app(self, sample=sample)

    def _add(self, stream: Stream, sink: Sink) -> None:
        """Take an end of a stream into the app; the same once more changes nothing."""
        name = sink_name(sink)
        for place, (flow, known) in enumerate(zip(self._flows, self._streams, strict=True)):
            if name in map(sink_name, flow.sinks):
                if sink in flow.sinks and known == stream:
                    return  # a notebook's cell that was run again
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
        """Refuse flows that would feed each other for ever."""
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

    def start(
        self,
        engine: Any = None,
        *,
        until: Literal["caught_up"] | None = None,
        close: bool = False,
        trigger: DurationLike = "1s",
        round_records: int | None = None,
        on_loss: Literal["stop", "accept"] = "stop",
        metrics: Metrics | None = None,
        progress: Callable[[Progress], None] | None = None,
        clock: Clock | None = None,
        **settings: Any,
    ) -> Run:
        """Begin rounds where the app stopped, in the background: on a SparkSession, or in this process (None,
        "local").

        `until="caught_up"` ends it when all that is in the log now is done; `close=True` then makes every window
        final. `trigger` is the time between rounds once caught up, `round_records` fixes how many records a round
        reads. `on_loss` is what happens when records were deleted before they were read. `progress` is called with
        how it goes. Further settings are those of `RunSettings`.
        """
        run = self._opened(
            engine,
            until=until,
            close=close,
            trigger=trigger,
            round_records=round_records,
            on_loss=on_loss,
            metrics=metrics,
            progress=progress,
            clock=clock,
            **settings,
        )
        try:
            return run.begin()
        except BaseException:
            if run.is_running:
                run.stop_or_give_up()
            raise

    def _opened(
        self,
        engine: Any = None,
        *,
        until: Literal["caught_up"] | None = None,
        close: bool = False,
        trigger: DurationLike = "1s",
        round_records: int | None = None,
        on_loss: Literal["stop", "accept"] = "stop",
        metrics: Metrics | None = None,
        progress: Callable[[Progress], None] | None = None,
        clock: Clock | None = None,
        **settings: Any,
    ) -> Run:
        """The run that `start` begins, before it begins: whoever begins it can be interrupted and still stop it."""
        from tidegate.pipeline.rounds.settings import RunSettings
        from tidegate.pipeline.rounds.starting import start_run
        from tidegate.pipeline.tasks.setup import WorkerSetup

        _check_settings(settings)
        if not self._flows:
            raise InvalidError(
                f"app {self.name} does nothing yet: end a stream with .to_topic(topic) or .to_table(name)"
            )
        setup = WorkerSetup(
            app=self.name,
            flows=self.flows,
            log=self.log,
            state=self.state,
            storage=self.storage,
            client=self.client,
        )
        chosen = RunSettings(
            until=until,
            close=close,
            trigger_ms=_duration("trigger", trigger),
            round_records=round_records,
            on_loss=on_loss,
            idle_after_ms=self.idle_after_ms,
            **settings,
        )
        return start_run(
            setup,
            _engine(engine),
            settings=chosen,
            clock=clock,
            metrics=metrics,
            progress=progress,
            begins=False,
        )

    def run(self, engine: Any = None, **settings: Any) -> Summary:
        """`start` and wait for the end.

        Ctrl-C, also in a notebook's cell, ends the run after the round it is in and frees the app. If that takes
        longer than `stop_within_ms` (30 s), or at a second Ctrl-C, the round is given up: nothing of it counts.
        """
        run = self._opened(engine, **settings)
        try:
            return run.begin().wait()
        except BaseException:
            if run.is_running:
                run.stop_or_give_up()
            raise

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
        """A topic of time windows as a table over this app's log, kept in its state.

        Size and serdes need not be given for what the app itself makes. Settings are those of
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
        """A topic of sessions as a table over this app's log, kept in its state; see `tidegate.sessioned_table`."""
        from tidegate.tables.factories import sessioned_table

        known_topics.check_kind(self._flows, topic, "sessioned_table")
        return sessioned_table(self._reading(), topic, **self._table(topic, key, value, settings))

    def table(
        self, topic: str, *, key: Serde[Any] | None = None, value: Serde[Any] | None = None, **settings: Any
    ) -> KeyTable:
        """The last value of each key of a topic as a table over this app's log; see `tidegate.table`."""
        from tidegate.tables.factories import table

        known_topics.check_kind(self._flows, topic, "table")
        return table(self._reading(), topic, **self._table(topic, key, value, settings))

    def open_table(self, name: str, *, round: int | None = None) -> ResultTable:
        """The windows of a flow as the app's last commit has them, from any process: what `.to_table(name)` keeps.

        Any flow with windows can be read so, by the name of one of its ends. `round` is one of the last commits.
        """
        from tidegate.pipeline.reading.result_table import ResultTable

        flow = self.flow(name)
        return ResultTable(
            self._state_to_read(), self.name, flow, round=round, storage=self.storage, log=self._reading
        )

    def push(self, frame: Any, *, table: str, key: str | Sequence[str], **settings: Any) -> PushReport:
        """Push a Spark DataFrame as the next version of a table in this app's log and state, and show it once it is
        proven complete; see `tidegate.push` for the settings."""
        push = import_module("tidegate.spark.push.driver").push
        report: PushReport = push(
            frame, table=table, key=key, log=self.log, state=self.state, client=self.client, **settings
        )
        return report

    def versions(self, table: str) -> Versions:
        """The versions of a table that is pushed: `.list()`, `.swap(n)`, `.rollback()`."""
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
        """A table that is pushed, as its current version shows it, and later ones as they are swapped in."""
        from tidegate.tables.versions.reader import VersionedTable

        return VersionedTable(self._versions_state(), table, number=version, key=key, value=value)

    def late(self, flow: str) -> pa.Table:
        """The records of a flow that came too late, or from the future, with how late each was and for which window."""
        from tidegate.pipeline.reading.late import late_of

        return self._looked(lambda backend: late_of(backend, self.name, self.flow(flow)))

    def dead_letters(self, flow: str) -> pa.Table:
        """The records of a flow's source that could not be read or that a step failed on (`on_error="keep"`), or that
        `validate()` proved corrupt, with the reason."""
        from tidegate.pipeline.reading.late import dead_letters_of

        return self._looked(lambda backend: dead_letters_of(backend, self.name, self.flow(flow).name))

    def _looked(self, look: Callable[[StorageBackend], pa.Table]) -> pa.Table:
        backend = self._state_to_read()
        try:
            return look(backend)
        finally:
            backend.close()

    def _state_to_read(self) -> StorageBackend:
        """The state, opened to be read; made where there is none, so that it can be waited for."""
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
        """The state, open until `close`."""
        if self._opened_state is None:
            from tidegate.storage import open_backend

            self._opened_state = open_backend(self.state)
        return self._opened_state

    def _reading(self) -> Any:
        """The log, open for reading; it is kept until `close`."""
        if self._opened_log is None:
            from tidegate.log.log import is_kafka, open_log

            reading: dict[str, Any] = {} if is_kafka(self.log) else {"read_only": True}
            self._opened_log = open_log(self.log, client=self.client or None, **reading)
        return self._opened_log

    def close(self) -> None:
        """Let go of what was opened for tables; the app can be used on."""
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


def _is_same(known: Stream, stream: Stream) -> bool:
    """Whether a stream is the very one a flow was made of: its ends share the work."""
    return (
        known.source is stream.source
        and len(known.steps) == len(stream.steps)
        and all(ours is theirs for ours, theirs in zip(known.steps, stream.steps, strict=True))
    )


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings of a run that do not exist, by name."""
    from difflib import get_close_matches

    from tidegate.pipeline.rounds.settings import RunSettings

    own = {"until", "close", "trigger_ms", "round_records", "on_loss", "idle_after_ms"}
    more = [each.name for each in fields(RunSettings) if each.name not in own]
    asked = ["until", "close", "trigger", "round_records", "on_loss", "metrics", "progress", "clock"]
    for name in settings:
        if name not in more:
            near = get_close_matches(name, [*asked, *more], n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join([*asked, *more])}"
            raise InvalidError(f"a run has no setting {name!r}; {hint}")


def _duration(name: str, given: DurationLike) -> int:
    try:
        return duration_ms(given)
    except InvalidError as error:
        raise InvalidError(f"{name}: {error}") from None


def _engine(engine: Any) -> Engine | Callable[[Any], Engine] | None:
    """None is the local engine. Spark's is found by name when a session comes, so that nothing else ever loads it."""
    if engine is None or engine == LOCAL:
        return None
    if type(engine).__module__.split(".")[0] == "pyspark":
        return lambda setup: import_module("tidegate.spark.engine").SparkEngine(engine, setup)
    if isinstance(engine, str):
        raise InvalidError(f"engine {engine!r} is not known; give a SparkSession, or 'local'")
    if not callable(getattr(engine, "run", None)) and not callable(engine):
        raise TypeError(f"{engine!r} is no engine; give a SparkSession, or 'local'")
    chosen: Engine = engine
    return chosen
