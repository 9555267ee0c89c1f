"""Pipelines over a real broker: the results of a folder with the same records, through transactions, restarts of either
side, deletions and a listener with passwords."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from consuming import Seen, consume
from kafka_broker import Broker
from kafka_home import until
from live_pipelines import (
    EVERY,
    KINDS,
    MINUTE,
    PARTITIONS,
    REKEYED,
    T0,
    app_of,
    fill_broker,
    fill_folder,
    late_of,
    orders,
    partition_of,
    produce,
    table_windows,
    totals_of,
    verdicts_of,
    windows_of,
    write,
)
from secure_listener import PASSWORD

import tidegate as tg
from tidegate.cli.main import run as command_line
from tidegate.clock import SystemClock
from tidegate.errors import AuthenticationError, UnavailableError
from tidegate.integrity.header import CONTROL_KEY_PREFIX
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import open_log
from tidegate.pipeline.admin import app_status
from tidegate.pipeline.checkpoint import Records
from tidegate.pipeline.sink import Deliverer
from tidegate.pipeline.source import source_tolerance
from tidegate.storage import open_backend
from tidegate.tables.topic_encoding import read_encoding
from tidegate.windows.keys import KeyFormat, decode_keys

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]

ROWS = 600
ONCE: dict[str, Any] = {"until": "caught_up", "lease_ms": 2000}


class Ran(NamedTuple):
    """The same app over a broker and over a folder, both caught up and closed."""

    live: tg.App
    folder: tg.App


def made(broker: Broker, name: str, *, config: dict[str, str] | None = None) -> str:
    """A topic for an app's records; the log's address."""
    broker.create(f"{name}-orders", config, partitions=PARTITIONS)
    return f"kafka://{broker.address}"


def over_folder(folder: Path, name: str, rows: list[Any], **given: Any) -> tg.App:
    """The app over an embedded log, run to its end: what to expect."""
    fill_folder(folder / "log", f"{name}-orders", rows)
    app = app_of(name, folder / "log", folder / "state", **given)
    app.run("local", close=True, **ONCE)
    return app


@pytest.fixture(scope="module")
def ran(module_broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder, rows = tmp_path_factory.mktemp("live"), orders(ROWS)
    log = made(module_broker, "live")
    fill_broker(module_broker.address, "live-orders", rows)
    live = app_of("live", log, folder / "live")
    summary = live.run("local", close=True, round_records=160, **ONCE)
    assert (summary.caught_up, summary.closed, summary.exit_code) == (True, True, 0)
    assert summary.rounds > 4, "rounds end between records, markers and aborted ones"
    yield Ran(live, over_folder(folder, "live", rows))


@pytest.fixture
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    import tidegate.spark

    running = SparkSession.getActiveSession()
    session = tidegate.spark.session("tidegate-live", master="local[2,4]")
    session.sparkContext.setLogLevel("OFF")
    yield session
    if running is None:
        session.stop()


# -- the same as over a folder -------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(KINDS))
def test_windows_late_rows_and_counters_are_those_over_a_folder(ran: Ran, kind: str) -> None:
    assert windows_of(ran.live, kind) == windows_of(ran.folder, kind) != []
    assert late_of(ran.live, kind) == late_of(ran.folder, kind) != []
    totals = totals_of(ran.live, kind)
    assert totals == totals_of(ran.folder, kind)
    assert min(totals["dedupe.duplicates"], totals["verdict.ok"], totals["verdict.unmanaged"]) > 0


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_changelog_on_the_broker_is_the_table(ran: Ran, broker: Broker, kind: str) -> None:
    """Through the app's own table, through a stranger's, and for an ordinary client, who gets results only."""
    found = table_windows(ran.live, kind)
    assert found == table_windows(ran.folder, kind)
    assert len(found) == len(windows_of(ran.live, kind))
    topic = f"live-{kind}"
    seen = plain(broker, topic)
    assert {(key, start) for key, start, _ in found} <= {inner_of(each, kind) for each in seen}
    with open_log(ran.live.log) as log:
        verdicts = verdicts_of(log, topic)
    assert set(verdicts) == {"ok"}
    assert verdicts["ok"] == len(seen), "every record is a result"
    assert not any((each.key or b"").startswith(CONTROL_KEY_PREFIX) for each in seen)


def plain(broker: Broker, topic: str) -> list[Seen]:
    """What a client that validates nothing gets."""
    return [each for number in range(PARTITIONS) for each in consume(broker.address, topic, partition=number)]


def inner_of(record: Seen, kind: str) -> tuple[str, int]:
    """The key and start of the window in a changelog's key."""
    key_format = KeyFormat.SESSION if kind == "session" else KeyFormat.CHANGELOG
    size = None if kind == "session" else MINUTE
    decoded = decode_keys(pa.array([record.key], pa.binary()), key_format, size_ms=size)
    return decoded.inner[0].as_py().decode(), int(decoded.start[0])


def test_a_re_keyed_flow_is_the_one_over_a_folder(ran: Ran) -> None:
    """Its shards are not the source's partitions; three tasks write the changelog's three."""
    assert windows_of(ran.live, REKEYED) == windows_of(ran.folder, REKEYED) != []
    assert table_windows(ran.live, REKEYED) == table_windows(ran.folder, REKEYED)


@pytest.mark.spark
def test_on_spark_it_is_the_same(ran: Ran, spark: Any, broker: Broker, tmp_path: Path) -> None:
    log = made(broker, "sparked")
    fill_broker(broker.address, "sparked-orders", orders(ROWS))
    app = app_of("sparked", log, tmp_path / "state")
    summary = app.run(spark, close=True, round_records=400, **ONCE)
    assert (summary.engine, summary.caught_up, summary.closed, summary.exit_code) == ("spark", True, True, 0)
    for kind in EVERY:
        assert windows_of(app, kind) == windows_of(ran.folder, kind)
        assert table_windows(app, kind) == table_windows(ran.folder, kind)
    for kind in KINDS:
        assert late_of(app, kind) == late_of(ran.folder, kind) != []
        assert totals_of(app, kind) == totals_of(ran.folder, kind)


# -- restarts ------------------------------------------------------------------------------------


def test_a_broker_restarts_while_apps_run(broker: Broker, tmp_path: Path) -> None:
    """One app waits for it and goes on by itself; an impatient one ends, says so, and resumes when it is started."""
    rows, half = orders(400), 200
    log = made(broker, "patient")
    broker.create("impatient-orders", partitions=PARTITIONS)
    apps = {name: app_of(name, log, tmp_path / name, kinds=["tumbling"]) for name in ("patient", "impatient")}
    for name in apps:
        write(log, f"{name}-orders", rows[:half], integrity=True)
    how: dict[str, Any] = {"trigger": "100ms", "round_records": 20}
    patient = apps["patient"].start("local", patience_ms=200_000, **how)
    impatient = apps["impatient"].start("local", patience_ms=0, attempts=1, **how)
    for each in (patient, impatient):
        until(lambda run=each: run.progress.round >= 3, "rounds to be under way")  # type: ignore[misc]
    broker.kill()
    with pytest.raises(UnavailableError, match=re.escape(broker.address)) as gone:
        impatient.await_termination("60s")
    assert gone.value.exit_code == 3
    assert patient.is_running
    broker.start(same_ports=True)
    for name in apps:
        produce(broker.address, f"{name}-orders", rows[half:])
    with patient:
        patient.await_caught_up("90s")
    apps["impatient"].run("local", **ONCE)
    expected = over_folder(tmp_path / "expected", "patient", rows, kinds=["tumbling"])
    for app in apps.values():
        assert windows_of(app, "tumbling") == windows_of(expected, "tumbling")
        assert table_windows(app, "tumbling") == table_windows(expected, "tumbling")


class LookingTogether(KafkaLog):
    """A log whose two users both look at a partition before either writes."""

    meeting = threading.Barrier(2, timeout=300)

    def bounds(self, *where: Any, **how: Any) -> dict[int, tuple[int, int]]:
        found = super().bounds(*where, **how)
        self.meeting.wait()
        return found


def test_an_app_killed_between_commit_and_delivery(broker: Broker, tmp_path: Path) -> None:
    """What was committed is delivered by whoever comes next. Two that do so at the same moment (one of them came back
    from the dead) both write: a plain consumer then gets records twice, a validating one calls the second DUPLICATE,
    so tables are right, and the app goes on behind them."""
    rows, half, kind = orders(400), 200, "tumbling"
    log = made(broker, "killed")
    write(log, "killed-orders", rows[:half], integrity=True)
    started = [log, str(tmp_path / "state"), kind]
    script = f"import live_pipelines; live_pipelines.run_until_delivery('killed', *{started!r})"
    killed = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        timeout=600,
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    assert plain(broker, "killed-tumbling") == [], "nothing leaves before the commit, and then it was killed"
    app = app_of("killed", log, tmp_path / "state", kinds=[kind])
    committed = windows_of(app, kind)
    assert committed != []
    deliver_twice_at_once(broker, tmp_path / "state")
    seen = plain(broker, "killed-tumbling")
    assert len(seen) == 2 * len({each[2:4] for each in seen}) == 2 * len(committed)
    assert_tables_are_right(app, kind, log, duplicates=len(committed))
    produce(broker.address, "killed-orders", rows[half:])
    app.run("local", round_records=40, **ONCE)
    expected = over_folder(tmp_path / "expected", "killed", rows, kinds=[kind])
    assert windows_of(app, kind) == windows_of(expected, kind)
    assert_tables_are_right(app, kind, log, duplicates=len(committed))


def deliver_twice_at_once(broker: Broker, state: Path) -> None:
    """The newest commit's parcels, by two deliverers that both saw nothing of them in the log."""
    backend = open_backend(state)
    records = Records(backend, "killed")
    newest = records.newest()
    assert newest is not None
    deliveries = records.read_commit(newest)[0].deliveries
    failures: list[BaseException] = []

    def deliver() -> None:
        try:
            with LookingTogether(broker.address, {}) as log:
                Deliverer(log, backend, SystemClock(), keeps_open=False).deliver(deliveries)
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=deliver) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    backend.close()
    assert failures == []


def assert_tables_are_right(app: tg.App, kind: str, log: str, *, duplicates: int) -> None:
    with open_log(log) as opened:
        verdicts = verdicts_of(opened, f"{app.name}-{kind}")
    assert set(verdicts) == {"ok", "duplicate"}
    assert verdicts["duplicate"] >= duplicates
    found = {(key, start): value for (key, start, _), (value, _) in table_windows(app, kind).items()}
    with app.open_table(f"{app.name}-{kind}") as table:
        assert found == {(row.key, row.window.start): row.value for row in table.all()}


# -- ranges --------------------------------------------------------------------------------------


def test_ranges_that_end_at_markers_and_aborted_records_lose_nothing(broker: Broker) -> None:
    """Wherever a round is cut, the next begins at that very offset, and every committed record is in one of them."""
    log, rows = made(broker, "cut"), [row for row in orders(60) if partition_of([row]) == [0]][:12]
    produce(broker.address, "cut-orders", rows[:3], transaction="cut-1")
    produce(broker.address, "cut-orders", rows[3:6], transaction="cut-2", abort=True)
    produce(broker.address, "cut-orders", rows[6:9])
    produce(broker.address, "cut-orders", rows[9:], transaction="cut-3")
    committed = [row.value.encode() for row in (*rows[:3], *rows[6:])]
    with open_log(log) as opened:
        assert isinstance(opened, KafkaLog)
        first, end = opened.bounds("cut-orders", [0], isolation="read_committed")[0]
        assert (first, end) == (0, 12 + 3), "a marker for each transaction"

        def values(start: int, stop: int) -> list[bytes]:
            where: dict[str, Any] = {"start": {0: start}, "stop": {0: stop}, "isolation": "read_committed"}
            with opened.reader("cut-orders", [0], **where, control_records=True) as reader:
                found = [value for batch in reader for value in batch.column("value").to_pylist()]
                assert reader.positions() == {0: stop}
            return found

        for cut in range(end + 1):
            assert values(0, cut) + values(cut, end) == committed, cut


def test_validation_knows_that_a_brokers_topic_is_compacted(broker: Broker, tmp_path: Path) -> None:
    compacts = {"cleanup.policy": "compact", "min.compaction.lag.ms": "7000"}
    for name, config, lag_ms in (("compacting", compacts, 7000), ("not-compacting", {}, -1)):
        log = made(broker, name, config=config)
        app = app_of(name, log, tmp_path / name, kinds=["tumbling"])
        with open_log(log) as opened:
            tolerance = source_tolerance(opened, app.flows[0], 0)
            assert (tolerance.compaction_lag_ms, tolerance.bound()) == (lag_ms, -1)


# -- records that are gone -----------------------------------------------------------------------


def delete_before(broker: Broker, topic: str, partition: int, offset: int) -> None:
    admin = broker.admin()
    for done in admin.delete_records([TopicPartition(topic, partition, offset)]).values():
        done.result(30)


def test_offsets_that_aged_out_stop_their_partition_with_the_command_that_resumes(
    broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, kind = orders(300), "tumbling"
    log = made(broker, "aged")
    app = app_of("aged", log, tmp_path / "state", kinds=[kind])
    produce(broker.address, "aged-orders", rows[:100])
    app.run("local", **ONCE)
    produce(broker.address, "aged-orders", rows[100:])
    read, there = partition_of(rows[:100]).count(1), partition_of(rows).count(1)
    delete_before(broker, "aged-orders", 1, read + 10)
    summary = app.run("local", **ONCE)
    (stopped,) = summary.stopped
    assert (summary.exit_code, stopped.partition, stopped.reason, stopped.offset) == (5, 1, "lost", read)
    command = (
        f"tidegate app resume aged --partition aged-tumbling:1 --skip-to {read + 10} --state {app.state}"
    )
    assert stopped.command == command
    assert f"offsets {read} to {read + 9} of aged-orders-1 were deleted" in stopped.message
    assert positions(app) == {0: partition_of(rows).count(0), 1: read}, "the other partition goes on"
    assert command_line(command.split()[1:]) == 0
    capsys.readouterr()
    assert app.run("local", **ONCE).exit_code == 0
    assert positions(app)[1] == there
    assert losses(app) == [(1, read, read + 10)]


def test_losses_can_be_accepted_and_are_recorded_for_ever(broker: Broker, tmp_path: Path) -> None:
    rows, kind = orders(300), "tumbling"
    log = made(broker, "accepted")
    app = app_of("accepted", log, tmp_path / "state", kinds=[kind])
    produce(broker.address, "accepted-orders", rows[:100])
    app.run("local", **ONCE)
    produce(broker.address, "accepted-orders", rows[100:])
    read, there = partition_of(rows[:100]).count(0), partition_of(rows).count(0)
    delete_before(broker, "accepted-orders", 0, read + 7)
    assert app.run("local", **ONCE).exit_code == 5
    assert app.run("local", on_loss="accept", **ONCE).exit_code == 0
    assert positions(app)[0] == there
    assert losses(app) == [(0, read, read + 7)]
    kept = [row for row, number in zip(rows, partition_of(rows), strict=True) if number == 0]
    left = [row for row, number in zip(rows, partition_of(rows), strict=True) if number == 1]
    expected = over_folder(
        tmp_path / "expected", "accepted", [*kept[:read], *kept[read + 7 :], *left], kinds=[kind]
    )
    assert windows_of(app, kind) == windows_of(expected, kind)


def positions(app: tg.App) -> dict[int, int]:
    backend = open_backend(app.state)
    (found,) = app_status(backend, app.name).positions.values()
    backend.close()
    return dict(found)


def losses(app: tg.App) -> list[tuple[int, int, int]]:
    backend = open_backend(app.state)
    found = app_status(backend, app.name).losses
    backend.close()
    return [(each.partition, each.first, each.end) for each in found]


# -- passwords -----------------------------------------------------------------------------------


def test_an_app_over_tls_with_a_password_keeps_it_to_itself(
    broker: Broker,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, kind = orders(200), "session"
    made(broker, "secret")
    produce(broker.address, "secret-orders", rows)
    log, client = f"kafka://{broker.secure.address}", broker.secure.client()
    app = app_of("secret", log, tmp_path / "state", kinds=[kind], client=client)
    summary = app.run("local", close=True, round_records=80, **ONCE)
    expected = over_folder(tmp_path / "expected", "secret", rows, kinds=[kind])
    assert windows_of(app, kind) == windows_of(expected, kind)
    assert table_windows(app, kind) == table_windows(expected, kind)
    settings = tmp_path.parent / f"{tmp_path.name}-client.properties"  # the one file that may hold it
    settings.write_text("".join(f"{key}={value}\n" for key, value in client.items()))
    asked = ["app", "status", "secret", "--state", app.state, "--log", log, "--command-config", str(settings)]
    assert command_line([*asked, "--format", "jsonl"]) == 0
    told = capfd.readouterr()
    assert json.loads(told.out)["lag"] == 0
    said = [*told, repr(app), str(summary), app.explain(sample=True), app._repr_html_(), repr(summary)]
    monkeypatch.setattr("tidegate.log.kafka.log.TIMEOUT_SECONDS", 3)
    with pytest.raises(AuthenticationError, match="does not let in user 'tidegate'") as refused:
        app_of("secret", log, tmp_path / "other", client=broker.secure.client(f"not {PASSWORD}")).run("local")
    said += [str(refused.value), repr(refused.value), caplog.text, *capfd.readouterr()]
    assert [each for each in said if PASSWORD in each] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if PASSWORD.encode() in path.read_bytes()] == []


def test_a_clusters_topic_keeps_one_encoding_too(broker: Broker, tmp_path: Path) -> None:
    """It is recorded in the app's state: a cluster's topics have no settings of ours."""
    address = made(broker, "encoded")
    produce(broker.address, "encoded-orders", orders(20))

    def ran(size: str, topic: str) -> None:
        app = tg.App("encoded", log=address, state=tmp_path / "state")
        app.stream("encoded-orders").window(tg.Tumbling(size, grace="2m", retention="3h")).count().to_topic(
            topic
        )
        app.run("local", **ONCE)

    ran("1m", "encoded-counts")
    ran("1m", "encoded-elsewhere")
    with pytest.raises(tg.errors.InvalidError, match="another encoding into topic encoded-counts"):
        ran("5m", "encoded-counts")
    ran("1m", "encoded-counts")
    with open_log(address) as log:
        found = read_encoding(log, open_backend(tmp_path / "state"), "encoded-counts")
    assert found is not None
    assert (found.window_size_ms, found.is_update_changelog) == (60_000, True)


# -- topics that change under an app ---------------------------------------------------------------


def counting(log: str, state: Path, topic: str) -> tg.App:
    app = tg.App("counting", log=log, state=state)
    windows = app.stream(topic).window(tg.Tumbling("1d", retention="3650d"))
    windows.agg(n=tg.count()).to_table("counts")
    return app


def produce_plain(address: str, topic: str, count: int) -> None:
    """Records of today: the broker looks for expired ones all the time."""
    with open_log(f"kafka://{address}") as log, log.writer(topic) as writer:
        writer.write(pa.table({"key": [b"k"] * count, "value": [b"v"] * count, "timestamp": [T0] * count}))


def counted(app: tg.App) -> int:
    with app.open_table("counts") as table:
        return sum(row.value["n"] for row in table.all())


def test_a_topic_deleted_and_created_again_on_a_broker_stops_its_flow(broker: Broker, tmp_path: Path) -> None:
    broker.create("again", partitions=1)
    produce_plain(broker.address, "again", 100)
    app = counting(f"kafka://{broker.address}", tmp_path / "state", "again")
    assert app.run("local", **ONCE).exit_code == 0
    with open_log(f"kafka://{broker.address}") as log:
        before = log.topic_states(["again", "nowhere"])
        assert list(before) == ["again"] and before["again"].topic_id
        log.delete_topic("again")
        until(lambda: not log.topic_states(["again"]), "the topic to be gone")
        log.create_topic("again", 1)
        until(lambda: log.topic_states(["again"]), "the topic to be there")
    produce_plain(broker.address, "again", 300)
    (stopped,) = app.run("local", **ONCE).stopped
    assert stopped.reason == "recreated" and before["again"].topic_id in stopped.message
    assert counted(app) == 100


def test_partitions_added_on_a_broker_while_an_app_runs_are_noticed(broker: Broker, tmp_path: Path) -> None:
    broker.create("grown", partitions=1)
    produce_plain(broker.address, "grown", 100)
    app = counting(f"kafka://{broker.address}", tmp_path / "state", "grown")
    run = app.start("local", lease_ms=2000)
    run.await_caught_up("300s")
    with open_log(f"kafka://{broker.address}") as log:
        log.add_partitions("grown", 2)
    with pytest.raises(tg.InvalidError, match=r"had 1 partitions .* has 2 now"):
        run.await_termination("300s")
