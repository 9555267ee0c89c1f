"""The JSON documents of the HTTP API, which the pages show, and what their fields have in common.

Every number in a document says what it is (`KINDS`): the OpenAPI document has it as `x-number`, or as `x-metric` with
the name of the metric that has the same value at `/metrics` (`metrics`). `Copy` is the same answer as a command line
and as Python. `Text` is record bytes made readable:

T1  nothing in a record controls the reader's terminal or page: control characters, terminal codes and direction marks
    are shown as escapes, bytes that are not UTF-8 as hexadecimal. Escaping for HTML is done by the templates.
T2  a long value is cut, and says how long it was.

Documents of topics and records are defined beside what makes them. Pure functions.
"""

from __future__ import annotations

import shlex
import unicodedata
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec

# -- kinds of numbers ------------------------------------------------------------------------------


def metric(name: str) -> msgspec.Meta:
    """For a field that is measured: the metric that says the same."""
    return msgspec.Meta(extra_json_schema={"x-metric": name})


KINDS: Final = {
    "name": "tells things apart: a partition, a round, a commit, a chain",
    "offset": "where a record lies",
    "moment": "when something was or will be, in epoch milliseconds",
    "setting": "what somebody set: a limit, an interval, a window's width",
    "answer": "how much was found for the very question that was asked",
    "detail": "of one thing among many: a record's size, how late it was, a log segment's bytes",
    "share": "a part of a whole; the parts are measured",
    "age": "how long ago a moment is that is measured",
}
"""What a number is that is not measured."""


def _is(kind: str) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema={"x-number": kind})


Name: TypeAlias = Annotated[int, _is("name")]
Offset: TypeAlias = Annotated[int, _is("offset")]
Moment: TypeAlias = Annotated[int, _is("moment")]
Setting: TypeAlias = Annotated[int, _is("setting")]
Answer: TypeAlias = Annotated[int, _is("answer")]
Detail: TypeAlias = Annotated[int, _is("detail")]
Share: TypeAlias = Annotated[float, _is("share")]
Age: TypeAlias = Annotated[int, _is("age")]
Backlog: TypeAlias = Annotated[int, metric("tidegate_backlog_bytes")]
Committed: TypeAlias = Annotated[int, metric("tidegate_committed_seconds")]
Faults: TypeAlias = Annotated[int, metric("tidegate_app_faults_total")]
Lag: TypeAlias = Annotated[int, metric("tidegate_lag_records")]
Late: TypeAlias = Annotated[int, metric("tidegate_late_total")]
LateRecords: TypeAlias = Annotated[int, metric("tidegate_table_late_records")]
LogBytes: TypeAlias = Annotated[int, metric("tidegate_log_bytes")]
LogRecords: TypeAlias = Annotated[int, metric("tidegate_log_records")]
LogSegments: TypeAlias = Annotated[int, metric("tidegate_log_segments")]
Memory: TypeAlias = Annotated[int, metric("tidegate_memory_bytes")]
RecordsRead: TypeAlias = Annotated[int, metric("tidegate_app_records_total")]
Rounds: TypeAlias = Annotated[int, metric("tidegate_rounds_total")]
Stopped: TypeAlias = Annotated[int, metric("tidegate_stopped_partitions")]
StreamTime: TypeAlias = Annotated[int, metric("tidegate_watermark_seconds")]


# -- the same by hand ------------------------------------------------------------------------------


class Copy(msgspec.Struct, frozen=True):
    """The same answer by hand."""

    cli: str
    python: str


def cli(
    verb: str,
    *words: str,
    log: Path | str | None = None,
    state: Path | str | None = None,
    **options: str | int | None,
) -> str:
    """Return a command line, quoted for a shell. Options that are None or False are left out, True is a flag; words
    like -3 follow `--`."""
    given = {**options, "log": log, "state": state}
    parts: list[str] = []
    for name, value in given.items():
        if value is not None and value is not False:
            parts.append(f"--{name.strip('_').replace('_', '-')}")
            parts += [] if value is True else [shlex.quote(str(value))]
    quoted = [shlex.quote(word) for word in words]
    if any(word.startswith("-") for word in words):
        return " ".join([verb, *parts, "--", *quoted])
    return " ".join([verb, *quoted, *parts])


class RawAnswer(NamedTuple):
    """An answer that is no JSON document: bytes as they are, and where a page goes on."""

    body: bytes
    type: str
    next: str = ""


def shared(source: Any, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of a document that `source` has under the same names."""
    return {name: getattr(source, name) for name in kind.__struct_fields__ if hasattr(source, name)}


def log_python(log: Path | str, *lines: str) -> str:
    """Lines of Python with the log open."""
    inside = "\n".join(f"    {line}" for line in lines)
    if isinstance(log, str):
        opening = "import tidegate as tg\nfrom tidegate.log.log import open_log"
        return f"{opening}\n\nwith open_log({log!r}) as log:\n{inside}"
    return f"import tidegate as tg\n\nwith tg.Log({str(log)!r}, read_only=True) as log:\n{inside}"


def state_python(state: Path | str, names: str, *lines: str) -> str:
    """Lines of Python with the state of apps open."""
    return "\n".join(
        (
            f"from tidegate.pipeline.admin import {names}",
            "from tidegate.storage import open_backend",
            "",
            f"backend = open_backend({str(state)!r}, read_only=True)",
            *lines,
        )
    )


# -- record bytes as text --------------------------------------------------------------------------

MOST_TEXT: Final = 2000
DEEPEST: Final = 64
_PLAUSIBLE: Final = (631_152_000_000, 4_102_444_800_000)  # windows between 1990 and 2100
_HIDDEN: Final = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


class Text(msgspec.Struct, frozen=True):
    """Bytes as text; `kind` is null, text, json or bytes; `cut` when there is more than is shown."""

    kind: str
    text: str
    size: Detail
    cut: bool = False


class Stamp(msgspec.Struct, frozen=True):
    """What a producer said about a record (its integrity header)."""

    producer: str
    kind: str
    chain: Name
    sequence: Name
    timestamp_ms: Moment
    checksum: str
    is_control: bool = False


class Window(msgspec.Struct, frozen=True):
    """A key and its window, as they lie in the record's key; `end_ms` is null where the width is not known."""

    key: Text
    start_ms: Moment
    end_ms: Moment | None = None
    format: str = "changelog"


def text_of(raw: bytes | None, most: int = MOST_TEXT) -> Text:
    """T1, T2."""
    if raw is None:
        return Text("null", "", 0)
    piece = raw[: most * 4]
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(piece) - 4 or len(piece) == len(raw):
            return Text("bytes", raw[: most // 3].hex(" "), len(raw), len(raw) > most // 3)
        text = piece[: error.start].decode("utf-8")
    cut = len(text) > most or len(piece) < len(raw)
    kind = "json" if not cut and is_json(raw) else "text"
    return Text(kind, visible(text[:most]), len(raw), cut)


def visible(text: str) -> str:
    """The text with everything that cannot be seen shown as an escape; line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter in "\n\t" or unicodedata.category(letter) not in _HIDDEN
        else letter.encode("unicode_escape", "surrogatepass").decode("ascii")
        for letter in text
    )


def is_json(raw: bytes) -> bool:
    """Whether it is a JSON object or array, of a depth that anyone would write."""
    start = raw.lstrip()[:1]
    if start not in (b"{", b"[") or raw.count(b"[") + raw.count(b"{") > 10_000:
        return False
    try:
        msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return True


def stamp_of(headers: list[dict[str, Any]]) -> Stamp | None:
    """The integrity header among a record's headers, if it can be read."""
    from tidegate.errors import InvalidError
    from tidegate.integrity.header import HEADER_KEY, ControlType, RecordKind
    from tidegate.integrity.header import Stamp as Header

    raw = next((each["value"] for each in headers if each["key"] == HEADER_KEY), None)
    if raw is None:
        return None
    try:
        found = Header.from_bytes(raw)
    except InvalidError:
        return None
    is_control, names = found.kind == RecordKind.CONTROL, {each.value: each.name for each in RecordKind}
    kind = names.get(found.kind, str(found.kind))
    if is_control:
        kind = {each.value: each.name for each in ControlType}.get(found.control, kind)
    kind = "heartbeat" if found.is_heartbeat else kind.lower().replace("_", " ")
    checksum = f"{found.crc:08x}"
    return Stamp(found.guid.hex(), kind, found.chain, found.sequence, found.timestamp, checksum, is_control)


class KeyFormat(NamedTuple):
    """How keys of a topic are read. `is_known`: an app says so, so that any time is a window's; else it is a guess."""

    name: str
    size_ms: int = 0
    is_known: bool = False


def window_of(raw: bytes | None, format: KeyFormat) -> Window | None:
    """The key as a windowed key of this format; None when it is none, or its time is no time."""
    import struct

    sizes = {"topic": 8, "changelog": 12, "session": 16}
    size = sizes[format.name]
    if raw is None or len(raw) < size or (len(raw) == size and not format.is_known):
        return None
    inner, tail = raw[:-size], raw[-size:]
    end: int | None = None
    if format.name == "session":
        end, start = struct.unpack(">qq", tail)
    elif format.name == "changelog":
        start, sequence = struct.unpack(">qi", tail)
        if sequence:
            return None
    else:
        (start,) = struct.unpack(">q", tail)
    first, last = (0, 2**62) if format.is_known else _PLAUSIBLE
    if not first <= start <= last or (end is not None and not start <= end <= last):
        return None
    if end is None and format.size_ms:
        end = start + format.size_ms
    return Window(text_of(inner, 200), start, end, format.name)


# -- integrity -------------------------------------------------------------------------------------

FIRST_LOOK_MS: Final = 150
ProducerRecords: TypeAlias = Annotated[int, metric("tidegate_audit_producer_records")]
ProducerFaults: TypeAlias = Annotated[int, metric("tidegate_audit_producer_faults")]
ProducerDuplicates: TypeAlias = Annotated[int, metric("tidegate_audit_producer_duplicates")]
OpenChains: TypeAlias = Annotated[int, metric("tidegate_audit_open_chains")]


class CellShown(msgspec.Struct, frozen=True):
    """What one producer has in one partition; `first_offset` is that of its first fault."""

    partition: Name
    records: ProducerRecords
    faults: ProducerFaults
    duplicates: ProducerDuplicates
    first_offset: Offset | None


class ProducerShown(msgspec.Struct, frozen=True):
    """One producer over all partitions."""

    producer: str
    records: ProducerRecords
    faults: ProducerFaults
    duplicates: ProducerDuplicates
    cells: list[CellShown]
    is_measured: bool = True
    """Whether its cells are among the metrics, where there is room for so many of a topic."""


class FaultShown(msgspec.Struct, frozen=True):
    """One record that is not as its producer said."""

    kind: str
    partition: Name
    offset: Offset
    producer: str
    message: str
    detail: str
    remedy: str
    is_fault: bool
    missing: Detail | None = None
    """How many records of its producer are not there; their numbers, first and last."""
    missing_first: Name | None = None
    missing_last: Name | None = None


class GapShown(msgspec.Struct, frozen=True):
    """Gaps that are no fault, and why."""

    partition: Name
    count: Annotated[int, metric("tidegate_audit_gaps")]
    first_offsets: list[Offset]
    reason: str


class DamageShown(msgspec.Struct, frozen=True):
    """A place that could not be read; null: nothing behind it was read."""

    partition: Name
    offset: Offset
    resumed_at: Offset | None


class IntegrityDocument(msgspec.Struct, frozen=True):
    """What an audit found, so far or in the end. `state` is running, done, cut or failed."""

    topic: str
    state: str
    sentence: str
    evidence: str
    began_ms: Moment
    took_ms: Annotated[int, metric("tidegate_audit_seconds")]
    records: Annotated[int, metric("tidegate_audit_records")]
    total: Annotated[int, metric("tidegate_audit_log_records")]
    records_with_metadata: Annotated[int, metric("tidegate_audit_metadata_records")]
    metadata_share: Share | None
    """The part of the records that carries metadata; null where none was read."""
    verdicts: dict[str, Annotated[int, metric("tidegate_audit_verdicts")]]
    partitions: list[Name]
    producers: list[ProducerShown]
    producers_total: Annotated[int, metric("tidegate_audit_producers")]
    faults: list[FaultShown]
    faults_total: Annotated[int, metric("tidegate_audit_faults")]
    open_chains: OpenChains
    """Producers' chains that have no end yet."""
    open_chains_of: dict[str, OpenChains]
    """The same by partition, where there are any."""
    damage: list[DamageShown]
    damaged_places: Annotated[int, metric("tidegate_audit_damaged_places")]
    gaps: list[GapShown]
    compacted_below: dict[str, Offset]
    """By partition, the offset below which compaction may have removed records, where it is known."""
    doubts: list[str]
    """Where loss would not show, partition by partition, and why."""
    notes: list[str]
    by_hand: Copy


class IntegrityQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`again` begins a new audit, `wait_ms` waits so long for its end."""

    again: bool = False
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=20_000)] = FIRST_LOOK_MS


# -- tables ----------------------------------------------------------------------------------------

Written = Annotated[
    str, msgspec.Meta(max_length=40, description="A moment: 2026-01-01T10:00Z, or epoch milliseconds")
]
Key = Annotated[str, msgspec.Meta(max_length=2000)]
Round = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class TableLine(msgspec.Struct, frozen=True):
    """One table in a list."""

    name: str
    app: str
    kind: str
    topic: str
    commit: Name
    commits: Annotated[int, metric("tidegate_table_commits")]
    committed_ms: Moment
    unreadable: str | None = None


class TableList(msgspec.Struct, frozen=True):
    """All tables here."""

    state: str
    tables: list[TableLine]
    by_hand: Copy


class RowShown(msgspec.Struct, frozen=True):
    """One row: a key, its window (null for plain keys), its values by name."""

    key: Any
    window_start_ms: Moment | None
    window_end_ms: Moment | None
    value: dict[str, Any]
    timestamp_ms: Moment | None


class RowsDocument(msgspec.Struct, frozen=True):
    """Rows as one commit has them; `next` goes on where there are more."""

    table: str
    commit: Name
    rows: list[RowShown]
    next: str | None = None


class LateShown(msgspec.Struct, frozen=True):
    """A record that was set aside for its time."""

    partition: Name
    offset: Offset
    key: Text
    event_ms: Moment
    window_start_ms: Moment | None
    how_late_ms: Detail
    reason: str
    operator: str


class LateDocument(msgspec.Struct, frozen=True):
    """Records that came too late, or too early."""

    table: str
    commit: Name
    topic: str
    total: LateRecords
    rows: list[LateShown]


class CommitShown(msgspec.Struct, frozen=True):
    """A commit that can still be read."""

    number: Name
    committed_ms: Moment
    records: Detail | None


class TableDocument(msgspec.Struct, frozen=True):
    """One table: what it is, one key's windows, late rows, commits."""

    name: str
    app: str
    kind: str
    topic: str
    changelog: str
    window_ms: Setting
    is_versioned: bool
    columns: list[str]
    unread_columns: list[str]
    """Columns that are empty here, because only the app's program can tell their values."""
    column: str
    commit: Name
    committed_ms: Moment
    commits: list[CommitShown]
    positions: dict[str, Offset]
    key: str
    some_keys: list[str]
    rows: list[RowShown]
    rows_total: Answer
    late: list[LateShown]
    late_total: LateRecords
    by_hand: Copy


class ChangeShown(msgspec.Struct, frozen=True):
    """One row that differs between two commits; before or after is null where it was not there."""

    key: Any
    window_start_ms: Moment | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class DiffDocument(msgspec.Struct, frozen=True):
    """What changed from one commit (of a pushed table: version) to another."""

    table: str
    is_versioned: bool
    before: Name
    after: Name
    gained: Answer
    lost: Answer
    changed: Answer
    rows: list[ChangeShown]
    is_complete: bool
    by_hand: Copy


class PartShown(msgspec.Struct, frozen=True):
    """A record that belongs to a window, and how it was counted."""

    partition: Name
    offset: Offset
    timestamp_ms: Moment | None
    outcome: str
    reason: str
    value: Text


class ExplainDocument(msgspec.Struct, frozen=True):
    """Why a value is what it is."""

    table: str
    topic: str
    key: str
    window_start_ms: Moment | None
    window_end_ms: Moment | None
    value: dict[str, Any] | None
    sentence: str
    parts: list[PartShown]
    outcomes: dict[str, Answer]
    looked_at: Answer | None
    notes: list[str]
    by_hand: Copy


class TableQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which key, which stretch of window starts, as of which commit, which column as a chart."""

    key: Key = ""
    since: Written = ""
    until: Written = ""
    as_of: Round | None = None
    column: Annotated[str, msgspec.Meta(max_length=200)] = ""


class FetchQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key's windows that start in [since, until], both included."""

    key: Key
    since: Written = ""
    until: Written = ""
    as_of: Round | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000


class ScanQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All keys' rows, page by page; every page of one scan is of one commit."""

    since: Written = ""
    until: Written = ""
    as_of: Round | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    after: Annotated[str, msgspec.Meta(max_length=60, description="`next` of the page before")] = ""


class ExplainQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key, the start of its window (none for plain keys), and of a session the end."""

    key: Key
    start: Written = ""
    end: Written = ""


class LateQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many to show."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000


class DiffQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From which commit to which, and of which key (all, where the table is small)."""

    before: Round
    after: Round
    key: Key = ""


# -- apps ------------------------------------------------------------------------------------------

Lost: TypeAlias = Annotated[int, metric("tidegate_lost_records_total")]


class Way(msgspec.Struct, frozen=True):
    """One way to go on: what it does, and the whole command."""

    sentence: str
    command: str


class StoppedLine(msgspec.Struct, frozen=True):
    """A source partition that a fault stopped, and how to go on: without loss first, where that can be."""

    flow: str
    topic: str
    partition: Name
    offset: Offset
    reason: str
    message: str
    ways: list[Way]


class AppLine(msgspec.Struct, frozen=True):
    """One app in a list. `state` is starting, running, idle, stopped or unreadable; `health` good, watch or bad."""

    name: str
    state: str
    sentence: str
    round: Rounds
    records: RecordsRead
    lag_records: Lag
    log_records: Offset
    backlog_bytes: Backlog
    memory_bytes: Memory
    faults: Faults
    late: Late
    stopped: Stopped
    committed_ms: Committed
    health: str
    backlog_limit_bytes: Setting
    memory_limit_bytes: Setting
    all_fail: list[str]
    """Flows of which no record could be used so far."""


class SourceLine(msgspec.Struct, frozen=True):
    """One source partition of a flow: how far it was read, what event time has been reached, what it waits for."""

    flow: str
    topic: str
    partition: Name
    next_offset: Offset
    end_offset: Offset | None
    lag_records: Lag | None
    stream_time_ms: StreamTime | None
    waits_for: str


class TenantLine(msgspec.Struct, frozen=True):
    """One task of a flow: the state it keeps, on disk and in memory."""

    flow: str
    task: Name
    backlog_bytes: Annotated[int, metric("tidegate_task_backlog_bytes")]
    memory_bytes: Annotated[int, metric("tidegate_task_memory_bytes")]
    stream_time_ms: StreamTime | None


class RoundLine(msgspec.Struct, frozen=True):
    """One commit that is kept; `records` are those of this round, null where the one before is gone.

    `stream_times` is the event time that each partition had reached, by TOPIC-PARTITION.
    """

    round: Name
    committed_ms: Moment
    records: Annotated[int, metric("tidegate_round_records")] | None
    total: RecordsRead
    seconds: Annotated[float, metric("tidegate_round_interval_seconds")] | None
    records_per_second: Annotated[float, metric("tidegate_round_records_per_second")] | None
    stream_times: dict[str, StreamTime]
    memory_bytes: Memory
    backlog_bytes: Backlog
    generation: Name
    change: str


class CounterLine(msgspec.Struct, frozen=True):
    """One of the app's totals since it was made, and the metric with which a run counts the same."""

    flow: str
    counter: str
    value: Annotated[int, metric("tidegate_app_counts_total")]
    metric: str


class FlowShown(msgspec.Struct, frozen=True):
    """One flow: what it reads, what it does, where its results go."""

    name: str
    topic: str
    steps: list[str]
    tables: list[str]
    topics: list[str]
    watermark_ms: Moment | None


class AppDocument(msgspec.Struct, frozen=True):
    """One app whole. `health` is good, watch or bad."""

    name: str
    state: str
    health: str
    sentence: str
    owner: str
    generation: Name
    round: Rounds
    committed_ms: Committed
    age_ms: Age
    """How long ago that was."""
    now_ms: Moment
    records: RecordsRead
    lag_records: Lag
    backlog_bytes: Backlog
    backlog_limit_bytes: Setting
    memory_bytes: Memory
    memory_limit_bytes: Setting
    flows: list[FlowShown]
    sources: list[SourceLine]
    tenants: list[TenantLine]
    rounds: list[RoundLine]
    counters: list[CounterLine]
    stopped: list[StoppedLine]
    stopped_total: Stopped
    lost_records: Lost
    lost: dict[str, Lost]
    held: dict[str, Annotated[int, metric("tidegate_held_records")]]
    """The same by flow."""
    faults: Faults
    """Records with an integrity fault, records that could not be read, partitions that stopped for another fault."""
    faults_of: dict[str, Faults]
    all_fail: list[str]
    """Flows of which no record could be used so far."""
    by_hand: Copy
    next: str


class AppList(msgspec.Struct, frozen=True):
    """All apps that have state here."""

    state: str
    apps: list[AppLine]
    by_hand: Copy


class FaultLine(msgspec.Struct, frozen=True):
    """One fault that an app met, and its record."""

    kind: str
    flow: str
    topic: str
    partition: Name
    offset: Offset
    message: str
    remedy: str
    missing: Detail | None = None
    """How many records of its producer are not there; their numbers, first and last."""
    missing_first: Name | None = None
    missing_last: Name | None = None


class FaultsDocument(msgspec.Struct, frozen=True):
    """The faults that an app met: what stopped it, what it set aside, what validation found.

    Validation counts, and does not say where: for that the topic is checked again, and `checking` are those of which
    that is not done yet.
    """

    app: str
    faults_total: Faults
    faults: list[FaultLine]
    checking: list[str]
    is_acknowledged: bool
    by_hand: Copy


class FaultsQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`wait_ms`: for how long to wait for a check of a topic."""

    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=20_000)] = 150


class AppQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`after` is the last round that is known already: what a live page sends back."""

    after: Annotated[str, msgspec.Meta(max_length=40)] = ""
