"""The first page: a summary sentence, lag, backlog, memory, faults, and what to do next."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tidegate.durations import counted
from tidegate.web.apps import app_list, default_limits
from tidegate.web.integrity import known_audits
from tidegate.web.schemas import (
    AppLine,
    Backlog,
    Copy,
    Faults,
    IntegrityDocument,
    Lag,
    Late,
    LogBytes,
    Memory,
    Moment,
    Offset,
    Setting,
    cli,
    log_python,
    metric,
)
from tidegate.web.site import Site
from tidegate.web.topics import TopicLine, topic_list


class Step(msgspec.Struct, frozen=True):
    """Something to do next: why, where to look, the command."""

    sentence: str
    href: str
    command: str = ""


class Overview(msgspec.Struct, frozen=True):
    """All of it at a glance. `health` is good, watch or bad."""

    health: str
    sentence: str
    now_ms: Moment
    log: str
    state: str
    topics: list[TopicLine]
    topics_total: Annotated[int, metric("tidegate_topics")]
    apps: list[AppLine]
    lag_records: Lag
    log_records: Offset
    backlog_bytes: Backlog
    backlog_limit_bytes: Setting
    memory_bytes: Memory
    memory_limit_bytes: Setting
    bytes: LogBytes | None
    faults: Faults
    late: Late
    steps: list[Step]
    by_hand: Copy


def overview(site: Site) -> Overview:
    topics, apps = topic_list(site).topics, app_list(site).apps
    audited = [each for each in known_audits(site) if each.faults_total]
    health, sentence = _health(topics, apps, audited)
    limits = default_limits()
    of_apps = ("lag_records", "log_records", "backlog_bytes", "memory_bytes", "faults", "late")
    sums = {name: sum(getattr(app, name) for app in apps) for name in of_apps}
    python = log_python(site.log_path, "print(log.partition_counts())")
    return Overview(
        health=health,
        sentence=sentence,
        now_ms=site.clock.now_ms(),
        log=str(site.log_path),
        state=str(site.state_path),
        topics=topics,
        topics_total=len(topics),
        apps=apps,
        backlog_limit_bytes=sum(app.backlog_limit_bytes for app in apps) or limits.backlog_bytes,
        memory_limit_bytes=sum(app.memory_limit_bytes for app in apps) or limits.memory_bytes,
        bytes=None if site.cluster else sum(topic.bytes or 0 for topic in topics),
        steps=_steps(site, topics, apps),
        **sums,
        by_hand=Copy(
            f"{cli('tidegate topic list', log=site.log_path)}\n"
            f"{cli('tidegate app status', log=site.log_path, state=site.state_path)}",
            python,
        ),
    )


def _health(
    topics: list[TopicLine], apps: list[AppLine], audited: list[IntegrityDocument]
) -> tuple[str, str]:
    """The worst thing there is, said first."""
    stopped = [app for app in apps if app.stopped]
    if stopped:
        return "bad", f"App {stopped[0].name} is stopped by a fault: it needs a decision."
    broken = [app for app in apps if app.state == "unreadable"]
    if broken:
        return "bad", f"The state of app {broken[0].name} cannot be read: {broken[0].sentence}"
    unread = [topic for topic in topics if topic.unreadable]
    if unread:
        return "bad", f"Topic {unread[0].name} cannot be read: {unread[0].unreadable}"
    if not topics:
        return "watch", "There is no topic here yet."
    faulty = [app for app in apps if app.faults]
    if faulty:
        told = counted(faulty[0].faults, "fault")
        health = max((app.health for app in faulty), key=["good", "watch", "bad"].index)
        return health, f"App {faulty[0].name} met {told} in its input: see which records."
    if audited:
        told = counted(audited[0].faults_total, "fault")
        return "bad", f"Topic {audited[0].topic} has {told}: see which records."
    starting = [app for app in apps if app.state == "starting"]
    if starting:
        return "watch", f"App {starting[0].name} has not committed anything yet: wait for its first round."
    behind = [app for app in apps if app.lag_records and app.state == "idle"]
    if behind:
        name, left = behind[0].name, f"{behind[0].lag_records:,} records"
        return "watch", f"App {name} is not running and has {left} left to read."
    if not apps:
        return "good", f"{counted(len(topics), 'topic')}; no app reads them yet."
    if lag := sum(app.lag_records for app in apps):
        return "good", f"All is well; {lag:,} records are still to be read."
    return "good", "Everything was read, and no fault was found."


def _steps(site: Site, topics: list[TopicLine], apps: list[AppLine]) -> list[Step]:
    steps = []
    for app in sorted(apps, key=lambda each: not each.stopped):
        href = f"/apps/{app.name}"
        if app.stopped:
            steps.append(Step(f"{app.name}: see which partition stopped, and resume it", href))
        elif app.lag_records and app.state == "idle":
            wait = f"{app.name}: start it again, {app.lag_records:,} records wait"
            steps.append(Step(wait, href, "tidegate run MODULE:app"))
        if app.all_fail:
            why = f"no record of {', '.join(app.all_fail)} could be used: change its definition"
            steps.append(Step(f"{app.name}: {why}", href))
        if app.faults:
            found = f"{app.name}: {app.faults:,} faults were found in its input; see which records"
            steps.append(Step(found, f"{href}/faults"))
        if app.late:
            late = f"{app.name}: {app.late:,} records came too late or too early; see them in its table"
            steps.append(Step(late, "/tables"))
    for topic in [topic for topic in topics if topic.records][:3]:
        command = cli("tidegate verify", topic.name, log=site.log_path)
        why = f"{topic.name}: check that nothing is missing"
        steps.append(Step(why, f"/topics/{topic.name}/integrity", command))
    if not topics:
        command = cli("tidegate topic create", "orders", log=site.log_path)
        steps.append(Step("Make a topic and write to it", "/", command))
    return steps[:8]
