"""Apps: progress, rounds, sources, memory, faults, and stopped partitions with the command that resumes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.durations import counted
from tidegate.errors import TidegateError, UnavailableError
from tidegate.web.failures import NotThereError
from tidegate.web.integrity import audit_faults, audits
from tidegate.web.schemas import (
    AppDocument,
    AppLine,
    AppList,
    AppQuestion,
    Copy,
    CounterLine,
    FaultLine,
    FaultsDocument,
    FaultsQuestion,
    FlowShown,
    IntegrityQuestion,
    RoundLine,
    SourceLine,
    StoppedLine,
    TenantLine,
    Way,
    cli,
    shared,
    state_python,
)
from tidegate.web.site import Site

if TYPE_CHECKING:
    from tidegate.pipeline.admin import AppStatus, CommitInfo
    from tidegate.pipeline.checkpoint import CommitRecord, FlowLine, Limits
    from tidegate.pipeline.messages import Held
    from tidegate.pipeline.progress import StoppedPartition

STALE_MS: Final = 60_000
SHOWN_FAULTS: Final = 200
_NO_FAULT: Final = ("integrity",)
"""Why a partition stopped whose record is counted by its verdict."""
_GONE: Final = ("lost", "recreated")
"""Why a partition stopped that cannot go on where it was."""


class NothingYetError(UnavailableError):
    """An app that was begun and has not committed anything."""


def app_list(site: Site) -> AppList:
    lines = [_line(site, name) for name in app_names(site)]
    python = state_python(
        site.state_path,
        "app_status, list_apps",
        "for name in list_apps(backend):",
        "    print(app_status(backend, name))",
    )
    command = cli("tidegate app status", log=site.log_path, state=site.state_path)
    return AppList(str(site.state_path), lines, Copy(command, python))


def app_names(site: Site) -> list[str]:
    from tidegate.pipeline.admin import list_apps

    return [] if site.backend is None else list_apps(site.backend)


def app_document(site: Site, app: str, _question: AppQuestion) -> AppDocument:
    """One app by its records, and the log it reads."""
    from tidegate.pipeline.admin import app_commits, app_status
    from tidegate.pipeline.planner import held_of

    backend = site.require_backend()
    require_app(site, app)
    commit, flows = commit_of(site, app)
    status = app_status(backend, app, site.log, clock=site.clock)
    ends = _ends(site, {flow.topic for flow in flows})
    now_ms = site.clock.now_ms()
    rounds = _rounds(app_commits(backend, app))
    sources = _sources(commit, {flow.name: flow.topic for flow in flows}, ends, now_ms)
    lag = sum(each.lag_records or 0 for each in sources)
    state, sentence = _standing(
        status.owner, len(status.stopped), len(sources), lag, commit.committed_ms, now_ms
    )
    lost = {flow.name: 0 for flow in flows}
    held = held_of({flow.name for flow in flows}, commit)
    for loss in status.losses:
        lost[loss.flow] = lost.get(loss.flow, 0) + loss.end - loss.first
    limits = commit.limits or default_limits()
    faults, all_fail = _faults(status), _all_fail(status)
    python = state_python(
        site.state_path,
        "app_commits, app_status",
        f"print(app_status(backend, {app!r}))",
        f"for commit in app_commits(backend, {app!r}):",
        "    print(commit)",
    )
    return AppDocument(
        name=app,
        state=state,
        health=_health(status, sum(faults.values()), lag),
        sentence=sentence,
        owner=status.owner,
        generation=status.generation,
        round=status.round,
        committed_ms=commit.committed_ms,
        age_ms=max(0, now_ms - commit.committed_ms),
        now_ms=now_ms,
        records=status.records,
        lag_records=lag,
        backlog_bytes=status.backlog_bytes,
        backlog_limit_bytes=limits.backlog_bytes,
        memory_bytes=sum(task.memory_bytes for task in commit.tasks),
        memory_limit_bytes=limits.memory_bytes,
        flows=[_flow(line, commit) for line in flows],
        sources=sources,
        tenants=[
            TenantLine(task.flow, task.task, task.backlog_bytes, task.memory_bytes, _time(task.stream_time))
            for task in commit.tasks
        ],
        rounds=rounds,
        counters=_counters(commit),
        stopped=_stopped(site, status, all_fail),
        stopped_total=len(status.stopped),
        lost_records=sum(lost.values()),
        lost=lost,
        held={flow.name: held[flow.name].events if flow.name in held else 0 for flow in flows},
        faults=sum(faults.values()),
        faults_of=faults,
        all_fail=all_fail,
        by_hand=Copy(
            f"{cli('tidegate app status', app, log=site.log_path, state=site.state_path)}\n"
            f"{cli('tidegate app checkpoints', app, state=site.state_path)}",
            python,
        ),
        next=f"{status.round}-{lag}",
    )


def require_app(site: Site, app: str) -> None:
    from tidegate.pipeline.admin import has_app

    if site.backend is None or not has_app(site.backend, app):
        have = ", ".join(app_names(site)) or "none"
        raise NotThereError(f"there is no app {app[:100]!r} here; there are: {have}")


def commit_of(site: Site, app: str) -> tuple[CommitRecord, tuple[FlowLine, ...]]:
    """The app's last commit, and the flows it was made with."""
    from tidegate.pipeline.checkpoint import Records

    records = Records(site.require_backend(), app)
    newest, found = records.newest(), records.load_app()
    if newest is None or found is None:
        raise NothingYetError(
            f"app {app} has not committed anything yet; run it, or wait for its first round"
        )
    commit = records.read_commit(newest)[0]
    return commit, found[0].definitions.get(commit.definition, ())


def _line(site: Site, app: str) -> AppLine:
    try:
        document = app_document(site, app, AppQuestion())
    except TidegateError as error:
        state = "starting" if isinstance(error, NothingYetError) else "unreadable"
        health = "watch" if state == "starting" else "bad"
        limits = default_limits()
        return AppLine(
            app, state, str(error), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, health, limits.backlog_bytes, limits.memory_bytes, [],
        )  # fmt: skip
    counts = {
        "log_records": sum(each.end_offset or 0 for each in document.sources),
        "late": sum(each.value for each in document.counters if each.metric == "tidegate_late_total"),
        "stopped": document.stopped_total,
    }
    return AppLine(**shared(document, AppLine) | counts)


def default_limits() -> Limits:
    """What an app may hold that has done no round since limits are recorded."""
    from tidegate.pipeline.checkpoint import Limits
    from tidegate.storage import StorageConfig

    config = StorageConfig()
    return Limits(config.backlog_limit_bytes, config.worker_total_bytes)


def _faults(status: AppStatus) -> dict[str, int]:
    """By flow: what validation found, what could not be read, and partitions that stopped for another fault."""
    from tidegate.pipeline.progress import faults_of

    return {
        flow: sum(faults_of({flow: counters}).values())
        + counters.get("unreadable", 0)
        + sum(each.flow == flow and each.reason not in _NO_FAULT for each in status.stopped)
        for flow in status.topics
        for counters in (status.totals.get(flow, {}),)
    }


def _all_fail(status: AppStatus) -> list[str]:
    """The flows of which no record could be used: it is the definition that does not fit, not a record."""
    stopped = {each.flow for each in status.stopped if each.reason not in (*_NO_FAULT, *_GONE)}
    return [
        flow
        for flow in status.topics
        for counters in (status.totals.get(flow, {}),)
        if not counters.get("events") and (flow in stopped or counters.get("unreadable"))
    ]


def _health(status: AppStatus, faults: int, lag: int) -> str:
    from tidegate.pipeline.progress import new_faults

    if status.stopped or new_faults(status.totals) or _all_fail(status):
        return "bad"
    return "watch" if faults or (lag and not status.owner) else "good"


def faults(site: Site, app: str, question: FaultsQuestion) -> FaultsDocument:
    """Every fault that can still be named, with its place."""
    from tidegate.pipeline.admin import app_status
    from tidegate.pipeline.progress import faults_of, new_faults
    from tidegate.pipeline.table import dead_letters_of

    backend = site.require_backend()
    require_app(site, app)
    commit_of(site, app)
    status = app_status(backend, app, clock=site.clock)
    found: dict[tuple[str, str, int, int], FaultLine] = {}

    def add(
        kind: str, flow: str, partition: int, offset: int, message: str, remedy: str, *missing: int | None
    ) -> None:
        place = (flow, status.topics[flow], partition, offset)
        if place not in found:
            found[place] = FaultLine(kind, *place, message, remedy, *missing)

    for each in _stopped(site, status, _all_fail(status)):
        add("stopped", each.flow, each.partition, each.offset, each.message, each.ways[0].command)
    checking = []
    for flow, topic in status.topics.items():
        if faults_of({flow: status.totals.get(flow, {})}):
            audit = audits(site).look(topic, IntegrityQuestion(wait_ms=question.wait_ms))
            checking += [topic] if audit.state == "running" else []
            for fault in audit_faults(audit):
                if fault.is_fault and fault.offset < status.positions[flow].get(fault.partition, 0):
                    missing = (fault.missing, fault.missing_first, fault.missing_last)
                    add(
                        fault.kind, flow, fault.partition, fault.offset, fault.message, fault.remedy, *missing
                    )
        for row in dead_letters_of(backend, app, flow).slice(0, SHOWN_FAULTS).to_pylist():
            remedy = "it is kept as a dead letter; write it again as it should be"
            add("unreadable", flow, row["partition"], row["offset"], row["reason"], remedy)
    lines = [cli("tidegate app status", app, log=site.log_path, state=site.state_path)]
    if new_faults(status.totals):
        lines.append(cli("tidegate app acknowledge", app, state=site.state_path))
    python = state_python(
        site.state_path,
        "app_status",
        "from tidegate.pipeline.table import dead_letters_of",
        f"for flow in app_status(backend, {app!r}).topics:",
        f"    print(dead_letters_of(backend, {app!r}, flow))",
    )
    return FaultsDocument(
        app=app,
        faults_total=sum(_faults(status).values()),
        faults=list(found.values())[:SHOWN_FAULTS],
        checking=sorted(set(checking)),
        is_acknowledged=not (status.stopped or new_faults(status.totals) or _all_fail(status)),
        by_hand=Copy("\n".join(lines), python),
    )


def _ends(site: Site, topics: set[str]) -> dict[str, dict[int, int]]:
    """How far each topic goes now; one that is gone is left out."""
    found: dict[str, dict[int, int]] = {}
    known = set(site.topics())
    for topic in topics & known:
        try:
            found[topic] = {number: end for number, (_, end) in site.bounds(topic).items()}
        except TidegateError:
            continue
    return found


def _sources(
    commit: CommitRecord, topics: dict[str, str], ends: dict[str, dict[int, int]], now_ms: int
) -> list[SourceLine]:
    from tidegate.pipeline.planner import held_of

    slowest = {
        flow: min((line.stream_time for line in commit.sources if line.flow == flow), default=-1)
        for flow in topics
    }
    held = held_of(topics, commit)
    lines = []
    for line in commit.sources:
        topic = topics.get(line.flow, "")
        end = ends.get(topic, {}).get(line.partition)
        lag = None if end is None else max(0, end - line.next_offset)
        lines.append(
            SourceLine(
                line.flow,
                topic,
                line.partition,
                line.next_offset,
                end,
                lag,
                _time(line.stream_time),
                _waiting(line, lag, end is None, slowest.get(line.flow, -1), held.get(line.flow)),
            )
        )
    return lines


def _waiting(line: Any, lag: int | None, is_gone: bool, slowest: int, held: Held | None) -> str:
    if line.stopped is not None:
        return f"stopped at offset {line.stopped.offset}: {line.stopped.reason}"
    if is_gone:
        return "its topic is not in this log any more"
    if held is not None and held.waits_for[1] == line.partition and not lag:
        return (
            f"new records; {held.events:,} records of other partitions are held back until it has come as far"
        )
    if line.stream_time < 0:
        return "its first record"
    if lag:
        return f"{lag:,} records to be read"
    if line.stream_time == slowest:
        return "new records; it is the one that holds event time back"
    return "new records"


def _standing(
    owner: str, stopped: int, partitions: int, lag: int, committed_ms: int, now_ms: int
) -> tuple[str, str]:
    """The state in a word, and in a sentence."""
    if stopped:
        if stopped == partitions:
            return "stopped", "is stopped by a fault in every partition that it reads"
        return "stopped", f"has {counted(stopped, 'partition')} stopped by a fault; the others go on"
    left = "has read everything there is" if not lag else f"has {lag:,} records left to read"
    if owner:
        if lag and now_ms - committed_ms > STALE_MS:
            return "running", f"is run by {owner}, {left}, and has not committed for over a minute"
        return "running", f"is run by {owner} and {left}"
    if lag:
        return "idle", f"is not running and {left}: start it, or look at why it ended"
    return "idle", f"is not running; it {left}"


def _rounds(commits: list[CommitInfo]) -> list[RoundLine]:
    lines = []
    before: CommitInfo | None = None
    for commit in commits:
        records: int | None = None
        seconds: float | None = None
        if before is not None:
            records = max(0, commit.records - before.records)
            seconds = (commit.committed_ms - before.committed_ms) / 1000
        rate = None if not seconds or records is None else records / seconds
        since = {"records": records, "total": commit.records, "seconds": seconds, "records_per_second": rate}
        lines.append(RoundLine(**shared(commit, RoundLine) | since))
        before = commit
    return lines


def _counters(commit: CommitRecord) -> list[CounterLine]:
    from tidegate.pipeline.progress import is_duplicate, is_late

    def named(counter: str) -> str:
        what = counter.partition(".")[2]
        if counter.startswith("verdict.") or counter == "records":
            return "tidegate_records_total"
        if is_late(counter):
            return "tidegate_late_total"
        if is_duplicate(counter):
            return "tidegate_duplicates_total"
        others = {
            "late_windows": "tidegate_late_windows_total",
            "partly_late_records": "tidegate_partly_late_total",
        }
        return others.get(
            what, "tidegate_rows_sent_total" if counter == "rows_sent" else "tidegate_app_counts_total"
        )

    return [
        CounterLine(flow, counter, value, named(counter))
        for flow, counters in commit.totals.items()
        for counter, value in counters.items()
    ]


def _stopped(site: Site, status: AppStatus, all_fail: list[str]) -> list[StoppedLine]:
    return [
        StoppedLine(
            each.flow, each.topic, each.partition, each.offset, each.reason, each.message,
            _ways(site, status.app, each, all_fail=each.flow in all_fail),
        )
        for each in status.stopped
    ]  # fmt: skip


def _ways(site: Site, app: str, stop: StoppedPartition, *, all_fail: bool) -> list[Way]:
    """How to go on, without loss first; what only skips is not offered where every record would have to be skipped."""

    def command(skip_to: str | None) -> str:
        place = f"{stop.flow}:{stop.partition}"
        return cli("tidegate app resume", app, partition=place, skip_to=skip_to, state=site.state_path)

    skip_to = stop.command.partition("--skip-to ")[2].split(" ")[0] or None
    if stop.reason in _GONE:
        return [Way("What it was to read next is gone: go on with what is there", command(skip_to))]
    if all_fail:
        why = f"No record of {stop.topic} could be used so far: change the app's definition (how it reads {stop.topic})"
        return [Way(f"{why}, then go on where it stopped, without loss", command(None))]
    corrected = "Correct the record or the app's definition, then go on where it stopped, without loss"
    return [Way(corrected, command(None)), Way("Go on behind it, without this record", command(skip_to))]


def _flow(line: FlowLine, commit: CommitRecord) -> FlowShown:
    said = msgspec.json.decode(line.description)
    sinks = said.get("sinks", [])
    return FlowShown(
        line.name,
        line.topic,
        [_step(each) for each in said.get("steps", [])],
        [each["name"] for each in sinks if each.get("step") == "table"],
        [each["topic"] for each in sinks if each.get("step") == "to"],
        commit.watermarks.get(line.name),
    )


def _step(said: dict[str, Any]) -> str:
    """A step in a few words."""
    from tidegate.durations import format_duration

    match said.get("step"):
        case "validate":
            return f"validate (on_error: {said.get('on_error') or said.get('on_fault')})"
        case "deduplicate":
            return (
                f"drop duplicates of {', '.join(said['columns'])} within {format_duration(said['within_ms'])}"
            )
        case "aggregate":
            kind = said["kind"]
            size = kind.get("size_ms") or kind.get("gap_ms") or kind.get("difference_ms")
            name = "tumbling" if kind.get("advance_ms") == kind.get("size_ms") is not None else kind["kind"]
            named = ", ".join(each["name"] for each in said["aggregates"])
            return f"{name} windows{f' of {format_duration(size)}' if size else ''}: {named}"
        case "key_by":
            return "key by another value"
        case other:
            return str(other)


def _time(stream_time: int) -> int | None:
    return None if stream_time < 0 else stream_time
