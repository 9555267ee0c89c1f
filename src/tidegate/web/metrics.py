"""The numbers of all pages as Prometheus metrics.

M1  a number that a page shows with a metric (`schemas.metric`) has the same value here: both come from one document.
M2  only what lists read is read: ends and sizes of partitions, commits of apps, commit lists of tables. Audits and late
    rows are as of the last request for them; metrics start none.
M3  what is bounded on a page is bounded here: producers, and their cells (`integrity.MOST_CELLS` of a topic); a page
    names no metric of a producer beyond.

Gauges of apps have the names and values of a run's own (`tidegate run --metrics`); they are also here while the app
does not run. Counters start with the app, not with a process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.errors import AuthenticationError, TidegateError, UnavailableError
from tidegate.metrics import Instrument, Metrics, prometheus_text
from tidegate.web.apps import app_document, app_names
from tidegate.web.integrity import known_audits
from tidegate.web.open_tables import kept_commits, known_tables
from tidegate.web.schemas import AppDocument, AppQuestion, IntegrityDocument, RawAnswer
from tidegate.web.site import Site
from tidegate.web.tables import known_late
from tidegate.web.topics import MOST_ASKED, partition_rows, sizes_of, skew_of

if TYPE_CHECKING:
    from tidegate.pipeline.progress import RunInstruments


INSTRUMENTS: Final = (
    ("topics", "Topics of the log", ""),
    ("log_records", "Offsets that a partition keeps: at least its records", "topic partition"),
    ("log_bytes", "Bytes of a partition's log segments", "topic partition"),
    ("log_segments", "Log segments of a partition", "topic partition"),
    ("topic_skew_ratio", "The largest partition of a topic over the mean: 1 is even", "topic"),
    ("app_records_total", "Records that an app has read since it was made", "app"),
    ("app_faults_total", "Faults that an app has met", "app flow"),
    ("app_counts_total", "An app's totals since it was made, by name", "app flow counter"),
    ("committed_seconds", "When an app committed last, seconds since 1970", "app"),
    ("round_interval_seconds", "Time between an app's last two commits", "app"),
    ("round_records_per_second", "Records of the last round over that time", "app"),
    ("task_backlog_bytes", "Data that a task accepted and did not prune", "app flow task"),
    ("task_memory_bytes", "Memory that a task holds", "app flow task"),
    ("table_commits", "Commits (or versions) of a table that can be read", "table"),
    ("table_late_records", "Late records of a table, as last looked at", "table"),
    ("audit_records", "Records that the page's last audit of a topic has checked", "topic"),
    ("audit_log_records", "Records there were when it began", "topic"),
    ("audit_metadata_records", "Records with integrity metadata among them", "topic"),
    ("audit_verdicts", "Records by integrity verdict", "topic verdict"),
    ("audit_faults", "Records with an integrity fault among them", "topic"),
    ("audit_gaps", "Gaps that are no fault, and why", "topic partition reason"),
    ("audit_open_chains", "Producers' chains that have no end yet", "topic partition"),
    ("audit_damaged_places", "Places that could not be read", "topic"),
    ("audit_seconds", "How long it took so far", "topic"),
    ("audit_producers", "Producers it met", "topic"),
    ("audit_producer_records", "A producer's records in a partition", "topic partition producer"),
    ("audit_producer_faults", "Those with a fault", "topic partition producer"),
    ("audit_producer_duplicates", "Those that stand there already", "topic partition producer"),
)
"""Names without `tidegate_`, what they say, labels; counters end in `_total`."""


class SiteInstruments:
    """What the page measures beyond what runs of apps do, by name (`INSTRUMENTS`)."""

    def __init__(self, metrics: Metrics) -> None:
        self._by_name = {
            name: (metrics.counter if name.endswith("_total") else metrics.gauge)(
                f"tidegate_{name}", summary, tuple(labels.split())
            )
            for name, summary, labels in INSTRUMENTS
        }

    def __getitem__(self, name: str) -> Instrument:
        return self._by_name[name]


def exposition(site: Site) -> RawAnswer:
    """All of it as Prometheus reads it."""
    return RawAnswer(*prometheus_text(measured(site)))


def measured(site: Site) -> Metrics:
    """Every number there is, now (M1, M2)."""
    from tidegate.pipeline.progress import RunInstruments

    metrics = Metrics()
    run, own = RunInstruments(metrics), SiteInstruments(metrics)
    _topics(site, own)
    for app in app_names(site):
        try:
            document = app_document(site, app, AppQuestion())
        except TidegateError:
            continue  # the page says why
        _app(document, run, own)
    _tables(site, own)
    for audit in known_audits(site):
        _audit(audit, own)
    return metrics


def _topics(site: Site, to: SiteInstruments) -> None:
    names = site.topics()
    to["topics"].set(len(names))
    for name in names if site.cluster is None else names[:MOST_ASKED]:
        try:
            rows = partition_rows(site, name)
        except TidegateError as error:
            if isinstance(error, AuthenticationError | UnavailableError) and site.cluster is not None:
                raise  # as for the list of topics: a cluster that is gone would be waited for again and again
            continue
        for row in rows:
            place = {"topic": name, "partition": row["partition"]}
            to["log_records"].set(row["high_watermark"] - row["log_start"], **place)
            if row["bytes"] is not None:
                to["log_bytes"].set(row["bytes"], **place)
                to["log_segments"].set(row["segments"], **place)
        to["topic_skew_ratio"].set(skew_of(sizes_of(rows)), topic=name)


def _app(app: AppDocument, run: RunInstruments, own: SiteInstruments) -> None:
    of_app = {"app": app.name}
    run.stopped.set(app.stopped_total, **of_app)
    run.rounds.add(app.round, **of_app)
    own["app_records_total"].add(app.records, **of_app)
    own["committed_seconds"].set(app.committed_ms / 1000, **of_app)
    for flow, lost in app.lost.items():
        run.lost.add(lost, flow=flow, **of_app)
    for flow, held in app.held.items():
        run.held.set(held, flow=flow, **of_app)
    for source in app.sources:
        place = of_app | {"flow": source.flow, "topic": source.topic, "partition": str(source.partition)}
        if source.lag_records is not None:
            run.lag.set(source.lag_records, **place)
        if source.stream_time_ms is not None:
            run.watermark.set(source.stream_time_ms / 1000, **place)
    for flow in {each.flow for each in app.tenants}:
        mine = [each for each in app.tenants if each.flow == flow]
        run.backlog.set(sum(each.backlog_bytes for each in mine), flow=flow, **of_app)
        run.memory.set(sum(each.memory_bytes for each in mine), flow=flow, **of_app)
        for each in mine:
            own["task_backlog_bytes"].set(each.backlog_bytes, flow=flow, task=each.task, **of_app)
            own["task_memory_bytes"].set(each.memory_bytes, flow=flow, task=each.task, **of_app)
    _counters(app, run, own)
    for flow, faults in app.faults_of.items():
        own["app_faults_total"].add(faults, flow=flow, **of_app)
    if app.rounds:
        last = app.rounds[-1]
        for gauge, value in (
            (run.round_records, last.records),
            (own["round_interval_seconds"], last.seconds),
            (own["round_records_per_second"], last.records_per_second),
        ):
            if value is not None:
                gauge.set(value, **of_app)


def _counters(app: AppDocument, run: RunInstruments, own: SiteInstruments) -> None:
    from tidegate.pipeline.progress import DROPPED

    for each in app.counters:
        labels = {"app": app.name, "flow": each.flow}
        own["app_counts_total"].add(each.value, counter=each.counter, **labels)
        if (reason := each.counter.rpartition(".")[2]) in DROPPED:
            run.dropped.add(each.value, reason=reason, **labels)
        if each.metric == run.late.name:
            run.late.add(each.value, policy=each.counter.partition(".")[2], **labels)
        for counter in (run.late_windows, run.partly_late, run.duplicates, run.rows):
            if each.metric == counter.name:
                counter.add(each.value, **labels)


def _tables(site: Site, to: SiteInstruments) -> None:
    names = known_tables(site)
    for name in names:
        try:
            to["table_commits"].set(len(kept_commits(site.require_backend(), name)), table=name)
        except TidegateError:
            continue
    for name, late in known_late(site).items():
        if name in names:
            to["table_late_records"].set(late, table=name)


def _audit(audit: IntegrityDocument, to: SiteInstruments) -> None:
    topic = {"topic": audit.topic}
    for name, value in (
        ("records", audit.records),
        ("log_records", audit.total),
        ("metadata_records", audit.records_with_metadata),
        ("faults", audit.faults_total),
        ("damaged_places", audit.damaged_places),
        ("seconds", audit.took_ms / 1000),
        ("producers", audit.producers_total),
    ):
        to[f"audit_{name}"].set(value, **topic)
    for verdict, count in ({"duplicate": 0} | audit.verdicts).items():
        to["audit_verdicts"].set(count, verdict=verdict, **topic)
    for partition in map(str, audit.partitions):
        to["audit_open_chains"].set(audit.open_chains_of.get(partition, 0), partition=partition, **topic)
    for gap in audit.gaps:
        to["audit_gaps"].set(gap.count, partition=gap.partition, reason=gap.reason, **topic)
    for producer in audit.producers:
        for cell in producer.cells if producer.is_measured else ():
            place = topic | {"partition": str(cell.partition), "producer": producer.producer}
            to["audit_producer_records"].set(cell.records, **place)
            to["audit_producer_faults"].set(cell.faults, **place)
            to["audit_producer_duplicates"].set(cell.duplicates, **place)
