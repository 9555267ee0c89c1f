"""Whole runs in this process, with real log, state and tasks: the same results however rounds are cut or ended."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tidegate as tg
from pipelines import named_objects, objects_of
from tidegate.clock import ManualClock
from tidegate.errors import ConflictError, FencedError, InvalidError, OverloadError, UnavailableError
from tidegate.log.catalog import TopicPartition
from tidegate.log.log import Log
from tidegate.metrics import Metrics
from tidegate.pipeline.admin import (
    app_commits,
    app_status,
    list_apps,
    rebase_outputs,
    replay_app,
    reset_app,
    resume_partition,
)
from tidegate.pipeline.checkpoint import KEPT, CommitRecord, Records
from tidegate.pipeline.dead_letters import chain_of
from tidegate.pipeline.definition.app import App
from tidegate.pipeline.gc import Collector
from tidegate.pipeline.launcher import start_run
from tidegate.pipeline.local_engine import LocalEngine
from tidegate.pipeline.progress import Progress
from tidegate.pipeline.query import Run, Summary
from tidegate.pipeline.settings import RunSettings, WorkerSetup
from tidegate.randomness import SeededRandomness
from tidegate.storage import StorageConfig, open_backend
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.tables.serdes.base import String
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates.definitions import count
from tidegate.windows.aggregates.definitions import sum as sum_of
from tidegate.windows.kinds import Tumbling

START = 1_700_000_000_000
PARTITIONS = 2
SMALL = StorageConfig.for_tests(
    max_tasks=8,
    write_buffer={"reserve_bytes": 1024, "soft_max_bytes": 1 << 20},
    base_runs={"reserve_bytes": 1024, "soft_max_bytes": 1 << 20},
    state_cache={"reserve_bytes": 1024, "soft_max_bytes": 1 << 18},
)


def shop(
    folder: Path, *, rekeyed: bool = False, name: str = "shop", storage: StorageConfig = SMALL, **source: Any
) -> App:
    """Orders by minute: validated, deduplicated, windowed, sent to a topic."""
    app = App(name, data=folder, storage=storage)
    stream = app.stream(
        "orders", key=String(), value=Json(order_id="string", amount="double"), **source
    ).validate()
    if rekeyed:
        stream = stream.key_by("substr(order_id, 1, 2)", String(), shards=3)
    stream = stream.drop_duplicates("order_id", within="20s")
    stream.window(Tumbling("10s", grace="5s")).agg(n=count(), total=sum_of("amount")).to_topic("per_window")
    return app


def orders(seed: int, rows: int = 400) -> pa.Table:
    """Events that mostly go forward, some repeated, some too late."""
    chance = random.Random(seed)
    lines = []
    for number in range(rows):
        late = chance.choice([0, 0, 0, 2_000, 4_000, 60_000])
        lines.append((number % 7, number, START + number * 250 - late))
        if chance.random() < 0.1:
            lines.append(lines[-1])
    return pa.table(
        {
            "key": [f"k{key}" for key, _, _ in lines],
            "value": [f'{{"order_id":"o{number}","amount":{number}.25}}' for _, number, _ in lines],
            "timestamp": [ts for _, _, ts in lines],
        }
    )


def filled(folder: Path, table: pa.Table, partitions: int = PARTITIONS) -> None:
    with Log(folder / "log") as log:
        log.create_topic("orders", partitions, if_not_exists=True)
        with log.writer("orders", integrity={"clock": ManualClock()}) as writer:
            writer.write(table)


STARTS: Counter[str] = Counter()


def started(app: App, *, clock: ManualClock | None = None, **settings: Any) -> Run:
    """As `App.start` does it, with chance and time in our hands; the first start of every app has the same chance."""
    STARTS[app.state] += 1
    progress = settings.pop("progress", None)
    metrics = settings.pop("metrics", None)
    backend = settings.pop("backend", None)
    setup = WorkerSetup(app=app.name, flows=app.flows, log=app.log, state=app.state, storage=app.storage)
    return start_run(
        setup,
        settings=RunSettings(**({"until": "caught_up"} | settings)),
        clock=clock or ManualClock(START + 3_600_000),
        randomness=SeededRandomness(STARTS[app.state]),
        progress=progress,
        metrics=metrics,
        backend=backend,
    )


def ran(app: App, **settings: Any) -> Summary:
    return started(app, **settings).await_termination("60s")


def sent(folder: Path, topic: str = "per_window") -> pa.Table:
    with Log(folder / "log", read_only=True) as log:
        table = log.reader(topic).read_all()
    return table.sort_by([("partition", "ascending"), ("offset", "ascending")])


def with_values(table: pa.Table) -> list[bytes]:
    """Records that are rows: those of the sender itself carry no value."""
    return [value for value in table["value"].to_pylist() if value]


def rows_of(folder: Path, topic: str = "per_window") -> list[tuple[Any, ...]]:
    columns = [
        sent(folder, topic)[name].to_pylist() for name in ("partition", "offset", "key", "value", "timestamp")
    ]
    return [row for row in zip(*columns, strict=True) if row[3]]


def fingerprint(table: pa.Table) -> str:
    """Every byte of every record."""
    return hashlib.sha256(repr(table.combine_chunks().to_pydict()).encode()).hexdigest()


def newest(app: App) -> CommitRecord:
    records = Records(open_backend(app.state), app.name)
    number = records.newest()
    assert number is not None
    return records.read_commit(number)[0]


def table_of(folder: Path, topic: str = "per_window") -> dict[tuple[Any, Any], Any]:
    """What a reader of the changelog ends up with."""
    rows = sent(folder, topic)
    last = {}
    for key, value, ts in zip(
        *(rows[name].to_pylist() for name in ("key", "value", "timestamp")), strict=True
    ):
        if value:
            last[key] = (value, ts)
    return last


def counters(app: App) -> dict[str, int]:
    return {
        name: number
        for name, number in newest(app).totals["per_window"].items()
        if name not in ("rows_sent", "windows.emitted")
    }


# -- cuts and restarts ---------------------------------------------------------------------------


@pytest.mark.parametrize("rekeyed", [False, True], ids=["co-partitioned", "re-keyed"])
def test_rounds_cut_differently_give_the_same_table(tmp_path: Path, rekeyed: bool) -> None:
    table = orders(1)
    found = []
    for cut in (29, 150, 10_000):
        folder = tmp_path / str(cut)
        filled(folder, table)
        app = shop(folder, rekeyed=rekeyed)
        summary = ran(app, round_records=cut, close=True)
        assert summary.caught_up and summary.closed and summary.exit_code == 0
        assert summary.records == newest(app).totals["per_window"]["records"] >= len(table)
        found.append((table_of(folder), counters(app)))
    assert found[0] == found[1] == found[2]
    assert found[0][1]["dedupe.duplicates"] > 10


def test_a_restart_after_every_round_changes_no_byte(tmp_path: Path) -> None:
    filled(tmp_path / "whole", orders(2))
    shutil.copytree(tmp_path / "whole", tmp_path / "pieces")
    whole = shop(tmp_path / "whole")
    ran(whole, round_records=40)
    pieces, starts = shop(tmp_path / "pieces"), 0
    while True:
        runs: list[Run] = []
        run = started(
            pieces, round_records=40, progress=lambda progress, runs=runs: [each.stop() for each in runs]
        )
        runs.append(run)
        summary = run.await_termination("60s")
        starts += 1
        if summary.caught_up:
            break
        assert starts < 60
    assert starts > 5
    assert fingerprint(sent(tmp_path / "pieces")) == fingerprint(sent(tmp_path / "whole"))
    assert newest(pieces).totals == newest(whole).totals
    assert [line.state for line in newest(pieces).sources] == [line.state for line in newest(whole).sources]


class LosingBackend(FolderBackend):
    """Publishing the commits of some rounds fails once: before it happened, or after, with the answer lost."""

    def __init__(self, root: Path, losing: dict[int, str]) -> None:
        super().__init__(root)
        self.losing = losing

    def publish(self, name: str, data: bytes, *, expected: str | None) -> str:
        round = int(name[-10:]) if "/commits/" in name else -1
        how = self.losing.pop(round, "")
        if how == "before":
            raise UnavailableError("the disk is gone")
        version = super().publish(name, data, expected=expected)
        if how == "after":
            raise UnavailableError("the answer is lost")
        return version


@pytest.mark.parametrize("how", ["before", "after"])
def test_R_19_a_round_whose_commit_fails_is_repeated_byte_for_byte(tmp_path: Path, how: str) -> None:
    filled(tmp_path / "whole", orders(3))
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    whole, broken = shop(tmp_path / "whole"), shop(tmp_path / "broken")
    ran(whole, round_records=60, backend=LosingBackend(Path(whole.state), {}))
    backend = LosingBackend(Path(broken.state), dict.fromkeys((2, 3, 5, 6), how))
    failures = 0
    while True:
        try:
            ran(broken, round_records=60, backend=backend, patience_ms=0)
            break
        except UnavailableError:
            failures += 1
        if how == "before":  # the round is repeated as its plan says, not as this size would have it
            with pytest.raises((Enough, UnavailableError)):
                ran(broken, round_records=999, backend=backend, progress=enough, patience_ms=0)
    assert not backend.losing and failures >= 2
    assert fingerprint(sent(tmp_path / "broken")) == fingerprint(sent(tmp_path / "whole"))
    assert newest(broken).totals == newest(whole).totals


@pytest.mark.parametrize("how", ["before", "after"])
def test_what_is_out_of_reach_for_a_while_does_not_end_a_run(tmp_path: Path, how: str) -> None:
    filled(tmp_path / "whole", orders(3))
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    whole, broken = shop(tmp_path / "whole"), shop(tmp_path / "broken")
    ran(whole, round_records=60, backend=LosingBackend(Path(whole.state), {}))
    backend = LosingBackend(Path(broken.state), dict.fromkeys((2, 3, 5, 6), how))
    seen: list[Progress] = []
    assert ran(broken, round_records=60, backend=backend, progress=seen.append).caught_up
    assert (
        not backend.losing
        and sum("gone" in str(each.waiting_for) or "lost" in str(each.waiting_for) for each in seen) == 4
    )
    # Time passed while it waited, and the sender's headers say so; the results do not.
    assert rows_of(tmp_path / "broken") == rows_of(tmp_path / "whole")
    with pytest.raises(UnavailableError, match="the disk is gone"):
        filled(tmp_path / "broken", orders(4, 10))
        ran(broken, backend=LosingBackend(Path(broken.state), {newest(broken).round + 1: "before"}))


class Enough(Exception):
    """The run is to end right after a commit."""


def enough(progress: Progress) -> None:
    raise Enough


def test_new_records_are_read_from_where_the_last_run_ended(tmp_path: Path) -> None:
    app = shop(tmp_path)
    filled(tmp_path, orders(4, 100))
    first = ran(app)
    filled(tmp_path, orders(5, 50))
    second = ran(app)
    again = ran(app)
    assert (again.rounds, again.records) == (0, 0)
    with Log(tmp_path / "log", read_only=True) as log:
        ends = sum(row["high_watermark"] for row in log.partition_rows("orders"))
    assert first.records + second.records == ends


def test_closing_makes_every_window_final_once(tmp_path: Path) -> None:
    app = shop(tmp_path)
    filled(tmp_path, orders(6, 60))
    assert ran(app, close=True).closed
    assert newest(app).closed == ("per_window",)
    rounds = newest(app).round
    ran(app, close=True)
    assert newest(app).round == rounds


def test_several_flows_share_a_round_and_a_commit(tmp_path: Path) -> None:
    filled(tmp_path, orders(7, 100))
    app = shop(tmp_path)
    app.stream("orders", key=String(), value=Json(amount="double")).filter("amount > 50").to_topic("large")
    ran(app)
    commit = newest(app)
    assert {line.flow for line in commit.sources} == {"per_window", "large"}
    assert len(with_values(sent(tmp_path, "large"))) == commit.totals["large"]["rows_sent"] > 20


def test_R_23_a_clock_that_jumps_changes_no_result(tmp_path: Path) -> None:
    filled(tmp_path / "calm", orders(32))
    shutil.copytree(tmp_path / "calm", tmp_path / "wild")
    calm, wild = shop(tmp_path / "calm"), shop(tmp_path / "wild")
    ran(calm, round_records=50)
    clock, chance = ManualClock(START + 3_600_000), random.Random(4)

    def jump(progress: Progress) -> None:
        clock.set_now_ms(START + 3_600_000 + chance.choice([-26 * 3_600_000, 0, 10 * 365 * 86_400_000]))

    ran(wild, round_records=50, clock=clock, progress=jump)
    assert table_of(tmp_path / "wild") == table_of(tmp_path / "calm")
    assert counters(wild) == counters(calm)
    ticks = [
        Records(open_backend(wild.state), "shop").read_commit(each.round)[0].tick.now_ms
        for each in app_commits(open_backend(wild.state), "shop")
    ]
    assert ticks == sorted(ticks) and ticks[-1] > START + 9 * 365 * 86_400_000


def chained(folder: Path) -> App:
    """Orders are counted by window, and windows are counted by how many orders they have."""
    app = App("shop", data=folder, storage=SMALL)
    stream = app.stream("orders", key=String(), value=Json(order_id="string", amount="double"))
    counts = stream.window(Tumbling("10s", grace="0s"), emit="close").agg(n=count())
    counts.to_topic("counts", value=Json(n="long"))
    again = app.changes("counts", window_size="10s", key=String(), value=Json(n="long"))
    again.key_by("n", shards=2).window(Tumbling("1h")).count().to_topic("by_count")
    return app


def test_a_flow_reads_what_another_of_the_app_writes_in_the_same_run(tmp_path: Path) -> None:
    filled(tmp_path, orders(33))
    app = chained(tmp_path)
    summary = ran(app, close=True, round_records=200)
    assert summary.caught_up and set(newest(app).closed) == {"counts", "by_count"}
    totals = newest(app).totals
    windows = len(with_values(sent(tmp_path, "counts")))
    assert windows > 20 and totals["by_count"]["events"] == windows
    rows = rows_of(tmp_path, "by_count")
    last = {key: int.from_bytes(value) for _, _, key, value, _ in rows}
    assert sum(last.values()) == windows
    assert not any("late" in name for name in totals["by_count"])


def test_catching_up_means_all_flows_of_a_chain(tmp_path: Path) -> None:
    filled(tmp_path, orders(34, 200))
    with chained(tmp_path).start("local", trigger="10ms") as run:
        run.await_caught_up("60s")
        filled(tmp_path, orders(35, 200))
        run.await_caught_up("60s")
        with Log(tmp_path / "log", read_only=True) as log:
            ends = {row["partition"]: row["high_watermark"] for row in log.partition_rows("counts")}
        commit = newest(chained(tmp_path))
        assert {
            line.partition: line.next_offset for line in commit.sources if line.flow == "by_count"
        } == ends
        assert sum(ends.values()) > 0


# -- running on ----------------------------------------------------------------------------------


def test_a_run_goes_on_until_it_is_stopped_and_tells_how_it_goes(tmp_path: Path) -> None:
    filled(tmp_path, orders(8, 100))
    app, seen, metrics = shop(tmp_path), [], Metrics()
    with app.start("local", trigger="20ms", progress=seen.append, metrics=metrics) as run:
        assert run.await_caught_up("60s").caught_up
        filled(tmp_path, orders(9, 50))
        progress = run.await_caught_up("60s")
        assert run.is_running and progress.lag_records == 0
        assert progress.records == newest(app).totals["per_window"]["records"]
        assert progress.duplicates > 0 and progress.backlog_bytes > 0 and progress.verdicts
        assert set(progress.watermarks["per_window"]) == {0, 1}
    assert not run.is_running and run.error is None
    assert seen[-1].records == progress.records
    values = {(sample.name, *sample.labels.values()): sample.value for sample in metrics.samples()}
    read = sum(value for name, value in values.items() if name[0] == "tidegate_records_total")
    assert read == progress.records
    assert values["tidegate_lag_records", "shop", "per_window", "orders", "0"] == 0
    named = "lag_seconds backlog_bytes memory_bytes watermark_seconds late_total rounds_total round_seconds"
    for name in (*named.split(), "duplicates_total", "watermark_age_seconds"):
        assert any(each[0] == f"tidegate_{name}" for each in values), name


def test_an_app_that_reads_a_missing_topic_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="tidegate topic create orders"):
        shop(tmp_path).run("local", until="caught_up")


def test_R_27_a_second_run_of_an_app_fails_fast_and_changes_nothing(tmp_path: Path) -> None:
    filled(tmp_path, orders(10, 50))
    app = shop(tmp_path)
    with app.start("local", trigger="1h") as run:
        run.await_caught_up("60s")
        before = files_of(tmp_path)
        with pytest.raises(ConflictError, match=r"being run by this process already \(generation 1\)"):
            shop(tmp_path).start("local")
        with pytest.raises(ConflictError, match="being run"):
            reset_app(open_backend(app.state), "shop")
        assert files_of(tmp_path) == before
    shop(tmp_path).run("local", until="caught_up")


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith((".lock", "lease"))
    }


# -- definitions ---------------------------------------------------------------------------------


def test_a_new_flow_begins_and_the_others_go_on(tmp_path: Path) -> None:
    filled(tmp_path, orders(11, 100))
    ran(shop(tmp_path))
    filled(tmp_path, orders(12, 20))
    app = shop(tmp_path)
    app.stream("orders", key=String(), value=Json(amount="double")).filter("amount > 5").to_topic("large")
    summary = ran(app)
    assert any("large" in note for note in summary.notes)
    totals = newest(app).totals
    assert totals["large"]["records"] == totals["per_window"]["records"]
    commits = [each.change for each in app_commits(open_backend(app.state), "shop")]
    assert "another definition" in commits


def test_an_incompatible_definition_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    filled(tmp_path, orders(13, 50))
    app = shop(tmp_path)
    ran(app)
    before = newest(app).round
    other = App("shop", data=tmp_path, storage=SMALL)
    stream = other.stream("orders", key=String(), value=Json(order_id="string", amount="double")).validate()
    stream.window(Tumbling("30s")).count().to_topic("per_window")
    with pytest.raises(InvalidError, match="tidegate app reset shop"):
        ran(other)
    assert newest(app).round == before
    reset_app(open_backend(app.state), "shop")
    with pytest.raises(
        InvalidError, match=r"another encoding into topic per_window.*Send the results to another"
    ):
        ran(other)  # the topic holds windows of another size
    elsewhere = App("shop", data=tmp_path, storage=SMALL)
    stream = elsewhere.stream(
        "orders", key=String(), value=Json(order_id="string", amount="double")
    ).validate()
    stream.window(Tumbling("30s")).count().to_topic("per_half_minute")
    summary = ran(elsewhere)
    assert summary.caught_up
    assert newest(app).totals["per_half_minute"]["records"] == summary.records > 50


def test_added_partitions_stop_the_app_with_the_way_out(tmp_path: Path) -> None:
    filled(tmp_path, orders(14, 50))
    ran(shop(tmp_path))
    with Log(tmp_path / "log") as log:
        log.add_partitions("orders", 4)
    with pytest.raises(InvalidError, match=r"had 2 partitions.*now it is 4"):
        ran(shop(tmp_path))


# -- ways out ------------------------------------------------------------------------------------


def test_every_kept_commit_can_be_gone_back_to_and_gives_the_same_table(tmp_path: Path) -> None:
    """R-21: tokens of the last commits are whole, though collection ran after every round."""
    filled(tmp_path, orders(15, 500))
    app = shop(tmp_path)
    ran(app, round_records=40, collect_every_ms=0, grace_ms=1_000_000)
    backend, table, totals = open_backend(app.state), table_of(tmp_path), counters(app)
    chance = random.Random(1)
    for _ in range(4):
        kept = [each.round for each in app_commits(backend, "shop")]
        assert len(kept) <= KEPT + 2 and kept[0] > 0
        changed = replay_app(backend, "shop", to_round=chance.choice(kept[-KEPT:]))
        assert changed.round > kept[-1]
        ran(app, round_records=300)
        assert table_of(tmp_path) == table
        assert counters(app) == totals


def test_a_commit_that_was_undone_is_not_gone_back_to_before_the_app_is_past_it_again(tmp_path: Path) -> None:
    """Its windows are further than what was sent last, and would never be sent again."""
    filled(tmp_path, orders(17, 300))
    app = shop(tmp_path)
    ran(app, round_records=60)
    backend = open_backend(app.state)
    kept = [each.round for each in app_commits(backend, "shop")]
    replay_app(backend, "shop", to_round=kept[-3])
    replay_app(backend, "shop", to_round=kept[-1])  # nothing was sent in between: no harm
    replay_app(backend, "shop", to_round=kept[-3])
    with pytest.raises(Enough):
        ran(app, round_records=20, progress=enough)
    with pytest.raises(InvalidError, match=f"commit {kept[-1]} of app shop was undone"):
        replay_app(backend, "shop", to_round=kept[-1])
    replay_app(backend, "shop", to_round=kept[-4])  # before all of it
    ran(app, round_records=60)
    replay_app(backend, "shop", to_round=kept[-1])  # past it again
    ran(app, round_records=60)


def test_reset_and_replay_start_over(tmp_path: Path) -> None:
    filled(tmp_path, orders(16, 100))
    app = shop(tmp_path, start="latest")
    assert ran(app).records == 0
    backend = open_backend(app.state)
    replay_app(backend, "shop")
    assert ran(app).records > 100
    status = app_status(backend, "shop")
    assert (status.owner, status.stopped) == ("", ()) and status.records > 100
    reset_app(backend, "shop")
    assert ran(app).records == 0
    replay_app(backend, "shop", from_offsets={"per_window": {0: 0, 1: 0}})
    assert ran(app).records > 100
    assert list_apps(backend) == ["shop"]
    with pytest.raises(InvalidError, match="there are: shop"):
        app_status(backend, "shopp")


def test_results_after_a_reset_are_new_to_whoever_validates_the_changelog(tmp_path: Path) -> None:
    filled(tmp_path, orders(17, 100))
    app = shop(tmp_path)
    ran(app)
    sent_first = len(sent(tmp_path))
    reset_app(open_backend(app.state), "shop")
    ran(app)
    assert len(sent(tmp_path)) == 2 * sent_first
    other = App("check", data=tmp_path, storage=SMALL)
    other.stream("per_window", key=String(), value=None).validate("fail").to_topic("copy")
    assert ran(other).stopped == ()
    verdicts = {name for name in newest(other).totals["copy"] if name.startswith("verdict.")}
    assert not any("duplicate" in name.lower() for name in verdicts), verdicts


def test_deleted_records_stop_their_partition_and_the_command_resumes_it(tmp_path: Path) -> None:
    filled(tmp_path, orders(18, 200))
    app = shop(tmp_path)
    ran(app)
    filled(tmp_path, orders(19, 200))
    with Log(tmp_path / "log") as log:
        end = log.partition_rows("orders")[0]["high_watermark"]
        _cut_start(log, "orders", 0, end - 5)
    summary = ran(app)
    (stopped,) = summary.stopped
    assert (stopped.reason, stopped.partition, summary.exit_code) == ("lost", 0, 5)
    assert (
        stopped.command
        == f"tidegate app resume shop --partition per_window:0 --skip-to {end - 5} --state {tmp_path / 'state'}"
    )
    assert stopped.command in str(summary)
    assert summary.caught_up  # with all it may read
    positions = {line.partition: line.next_offset for line in newest(app).sources}
    assert positions[1] > positions[0] or positions[1] > 200
    resume_partition(open_backend(app.state), "shop", "per_window:0", skip_to=end - 5)
    again = ran(app)
    assert again.stopped == () and again.records == 5
    (loss,) = newest(app).losses
    assert (loss.partition, loss.first, loss.end) == (0, positions[0], end - 5)
    with pytest.raises(InvalidError, match="is stopped"):
        resume_partition(open_backend(app.state), "shop", "orders-0")


def test_accepted_losses_are_recorded_for_ever(tmp_path: Path) -> None:
    filled(tmp_path, orders(20, 100))
    app = shop(tmp_path)
    ran(app)
    filled(tmp_path, orders(21, 100))
    with Log(tmp_path / "log") as log:
        end = log.partition_rows("orders")[0]["high_watermark"]
        _cut_start(log, "orders", 0, end - 5)
    assert ran(app).exit_code == 5  # what it stopped for can be accepted afterwards, as its message says
    metrics = Metrics()
    assert ran(app, on_loss="accept", metrics=metrics).exit_code == 0
    (loss,) = newest(app).losses
    lost = metrics.counter("tidegate_lost_records_total", "", ("app", "flow"))
    assert lost.value(app="shop", flow="per_window") == loss.end - loss.first > 0
    filled(tmp_path, orders(22, 10))
    ran(app)
    assert newest(app).losses == (loss,)


def _cut_start(log: Log, topic: str, partition: int, offset: int) -> None:
    """As Kafka's DeleteRecords."""
    log._owned.get(TopicPartition(topic, partition)).log.delete_records_before(offset)


def test_somebody_elses_records_in_an_output_topic_fence_the_app(tmp_path: Path) -> None:
    filled(tmp_path, orders(23, 100))
    app = shop(tmp_path)
    ran(app)
    with Log(tmp_path / "log") as log, log.writer("per_window") as writer:
        writer.write(pa.table({"key": [b"x"], "value": [b"y"]}), partition=0)
    filled(tmp_path, orders(24, 100))
    with pytest.raises(FencedError, match="per_window"):
        ran(app)
    with Log(tmp_path / "log") as log:
        rebase_outputs(open_backend(app.state), "shop", log)
    assert ran(app).caught_up
    assert b"x" in sent(tmp_path)["key"].to_pylist()


# -- faults and limits ---------------------------------------------------------------------------


def test_a_broken_partition_stops_and_the_others_go_on(tmp_path: Path) -> None:
    filled(tmp_path, orders(25, 100))
    app = App("shop", data=tmp_path, storage=SMALL)
    stream = app.stream(
        "orders", key=String(), value=Json(order_id="string", amount="double"), on_error="fail"
    )
    stream.to_topic("copy")
    with Log(tmp_path / "log") as log, log.writer("orders") as writer:
        writer.write(pa.table({"key": [b"k"], "value": [b"not json"]}), partition=1)
    filled(tmp_path, orders(26, 100))
    summary = ran(app)
    (stopped,) = summary.stopped
    assert (stopped.topic, stopped.partition) == ("orders", 1) and summary.exit_code == 5
    positions = {line.partition: line.next_offset for line in newest(app).sources}
    assert positions[1] == stopped.offset
    with Log(tmp_path / "log", read_only=True) as log:
        assert positions[0] == log.partition_rows("orders")[0]["high_watermark"]
    again = ran(app)
    assert again.rounds == 0 and again.exit_code == 5 and again.stopped == summary.stopped
    resume_partition(open_backend(app.state), "shop", "orders-1", skip_to=stopped.offset + 1)
    last = ran(app)
    assert last.exit_code == 0 and last.records > 0


def test_state_that_does_not_fit_ends_with_overload_and_goes_on_with_a_larger_budget(tmp_path: Path) -> None:
    """Half a million ids to remember for an hour, in a budget of two megabytes."""
    rows = 120_000
    filled(
        tmp_path,
        pa.table(
            {
                "key": [f"k{number}" for number in range(rows)],
                "value": [f'{{"order_id":"order-number-{number}"}}' for number in range(rows)],
                "timestamp": np.arange(rows) + START,
            }
        ),
        1,
    )

    def ids(limit: str) -> App:
        storage = StorageConfig.for_tests(
            backlog_limit_bytes=limit, backlog_timeout_ms=500, max_batch_bytes="1MiB"
        )
        app = App("ids", data=tmp_path, storage=storage)
        stream = app.stream("orders", key=String(), value=Json(order_id="string"))
        stream.drop_duplicates("order_id", within="1h").to_topic("first")
        return app

    with pytest.raises(OverloadError) as raised:
        ran(ids("2MiB"), first_round_records=20_000)
    assert raised.value.reason == "retention_exceeds_backlog"
    assert "backlog_limit_bytes" in str(raised.value)
    done = newest(ids("2MiB")).totals["first"]["records"]
    assert 0 < done < rows
    summary = ran(ids("64MiB"))
    assert summary.caught_up and done + summary.records >= rows
    assert len(sent(tmp_path, "first")) >= rows


@pytest.mark.parametrize("rekeyed", [False, True], ids=["co-partitioned", "re-keyed"])
def test_a_tight_budget_brakes_reading_and_the_run_comes_to_its_end(tmp_path: Path, rekeyed: bool) -> None:
    """Twenty thousand ids are kept at a time, of three times as many; more than the budget is never held."""
    rows, limit = 60_000, 1_700 << 10
    columns = {
        "key": [f"k{number % 1000}" for number in range(rows)],
        "value": [f'{{"order_id":"order-number-{number}"}}' for number in range(rows)],
        "timestamp": np.arange(rows) * 30 + START,
    }
    filled(tmp_path, pa.table(columns))
    storage = StorageConfig.for_tests(
        backlog_limit_bytes=limit, backlog_timeout_ms=500, max_batch_bytes="1MiB"
    )
    app = App("ids", data=tmp_path, storage=storage)
    stream = app.stream("orders", key=String(), value=Json(order_id="string"))
    if rekeyed:
        stream = stream.key_by("order_id", String(), shards=2)
    stream.drop_duplicates("order_id", within="5m").to_topic("first")
    seen: list[Progress] = []
    summary = ran(app, first_round_records=20_000, progress=seen.append)
    assert summary.caught_up and len(with_values(sent(tmp_path, "first"))) == rows
    assert max(each.backlog_bytes for each in seen) <= limit
    assert any("backlog" in str(each.waiting_for) for each in seen)
    assert all(each.lag_records > 0 for each in seen if not each.caught_up)


@pytest.mark.parametrize("partitions", [1, 2, 9])
@pytest.mark.parametrize("rekeyed", [False, True])
def test_a_backlog_that_cannot_shrink_is_told_at_once(tmp_path: Path, rekeyed: bool, partitions: int) -> None:
    """No task waits for room that only waiting tasks could make: the bound of that wait is an hour.

    Keys are large, so that rounds are too much for the budget before anybody knows what a record takes.
    """
    rows = 20_000
    filled(
        tmp_path,
        pa.table(
            {
                "key": [f"k{number:0400d}" for number in range(rows)],
                "value": [f'{{"order_id":"o{number:0400d}"}}' for number in range(rows)],
                "timestamp": np.arange(rows) + START,
            }
        ),
        partitions,
    )
    storage = StorageConfig.for_tests(
        backlog_limit_bytes="512KiB", backlog_timeout_ms=3_600_000, max_batch_bytes="64KiB"
    )
    app = App("many", data=tmp_path, storage=storage)
    stream = app.stream("orders", key=String(), value=Json(order_id="string"))
    if rekeyed:
        stream = stream.key_by("order_id", String(), shards=5)
    stream.window(Tumbling("1d")).agg(n=count()).to_topic("per_key")
    run = app.start("local", until="caught_up", first_round_records=rows)
    with pytest.raises(OverloadError, match="Raise backlog_limit_bytes") as raised:
        run.await_termination("300s")
    assert raised.value.reason == "retention_exceeds_backlog"


class SlowEngine:
    """The local engine, on a clock that says that every round took as long as it is told."""

    name, processes = "slow", 1

    def __init__(self, inner: LocalEngine, clock: ManualClock, took_ms: int) -> None:
        self.inner, self.clock, self.took_ms, self.rounds = inner, clock, took_ms, 0
        self.slots = inner.slots

    def place(self, flow: str, task: int) -> int:
        return 0

    def run(self, order: Any) -> Any:
        self.rounds += 1
        result = self.inner.run(order)
        self.clock.advance(self.took_ms)
        return result

    def close(self) -> None:
        self.inner.close()


def test_a_run_that_only_gives_rounds_up_ends_and_says_why(tmp_path: Path) -> None:
    filled(tmp_path, orders(29, 200))
    app, clock, made, seen = shop(tmp_path), ManualClock(START + 3_600_000), [], []
    setup = WorkerSetup(app=app.name, flows=app.flows, log=app.log, state=app.state, storage=app.storage)

    def engine(known: WorkerSetup) -> SlowEngine:
        made.append(SlowEngine(LocalEngine(known, clock=clock), clock, 5001))
        return made[0]

    with pytest.raises(
        OverloadError, match=r"21 rounds in a row .* it took 5\.0 s.*grace_ms \(10000\)"
    ) as raised:
        start_run(
            setup,
            engine,
            settings=RunSettings(until="caught_up", grace_ms=10_000),
            clock=clock,
            progress=seen.append,
        ).await_termination("300s")
    assert raised.value.reason == "rounds_given_up" and made[0].rounds == 21
    assert any("rounds that take longer than half of grace_ms" in str(each.waiting_for) for each in seen)
    filled(tmp_path / "twin", orders(29, 200))
    assert ran(app).caught_up and ran(shop(tmp_path / "twin")).caught_up
    assert table_of(tmp_path) == table_of(tmp_path / "twin"), "it goes on where it stopped"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"grace_ms": 0}, "grace_ms is 0; it must be at least 4 times target_ms"),
        ({"grace_ms": 60_000, "target_ms": 60_000}, "rounds that take longer than half of it"),
        ({"lease_ms": 1}, "lease_ms is 1; it must be at least 100"),
    ],
)
def test_settings_with_which_nothing_would_ever_be_committed_are_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    filled(tmp_path, orders(30, 10))
    with pytest.raises(InvalidError, match=said):
        shop(tmp_path).run("local", until="caught_up", **settings)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("kept_ms", [1, 36_000_000])
def test_tasks_and_collection_go_by_the_grace_of_the_run(tmp_path: Path, kept_ms: int) -> None:
    """Otherwise a task builds on packs that no commit names and that collection has deleted."""
    filled(tmp_path, orders(30, 10))
    app, known = shop(tmp_path), list[int]()
    storage = replace(app.storage, garbage_grace_ms=kept_ms)
    setup = WorkerSetup(app=app.name, flows=app.flows, log=app.log, state=app.state, storage=storage)

    def engine(setup: WorkerSetup) -> LocalEngine:
        known.append(setup.runtime_config.garbage_grace_ms)
        return LocalEngine(setup)

    assert (
        start_run(setup, engine, settings=RunSettings(until="caught_up", grace_ms=10_000))
        .await_termination("300s")
        .caught_up
    )
    assert known == [10_000]


def test_a_late_partition_of_a_rekeyed_flow_closes_windows_when_it_is_silent(tmp_path: Path) -> None:
    """R-16: one of two partitions never brings anything; windows close after the idle time, not before."""
    with Log(tmp_path / "log") as log:
        log.create_topic("orders", 2)
        with log.writer("orders") as writer:
            table = orders(27, 100)
            writer.write(table, partition=0)
    app = App("shop", data=tmp_path, storage=SMALL)
    stream = app.stream("orders", key=String(), value=Json(order_id="string", amount="double"))
    stream = stream.key_by("substr(order_id, 1, 2)", String(), shards=2)
    stream.window(Tumbling("10s", grace="0s"), emit="close").agg(n=count()).to_topic("per_window")
    clock = ManualClock(START + 3_600_000)
    (waits,) = ran(app, clock=clock).progress.waiting_for
    assert waits.startswith("orders-1, which has no more records: windows of per_window stay open")
    assert len(sent(tmp_path)) == 0 and newest(app).watermarks == {}
    ran(app, clock=clock, idle_after_ms=0)
    assert len(sent(tmp_path)) > 0
    assert newest(app).watermarks["per_window"] == max(line.stream_time for line in newest(app).sources)


# -- collection ----------------------------------------------------------------------------------


def test_what_no_kept_commit_names_is_gone(tmp_path: Path) -> None:
    filled(tmp_path, orders(28, 900))
    app, clock = shop(tmp_path), ManualClock(START + 3_600_000)
    ran(app, round_records=30, collect_every_ms=0, grace_ms=10_000, clock=clock)
    backend = open_backend(app.state, clock=clock)
    assert newest(app).round > 25
    parcels = [each.name for each in backend.list("apps/shop/parcels")]
    assert set(parcels) == {each.parcel.name for each in newest(app).deliveries}
    # Without a grace, a last pass leaves exactly what the kept commits reach.
    filled(tmp_path, orders(29, 5))
    ran(app)
    records = Records(backend, "shop")
    Collector(records, clock=clock, grace_ms=0, every_ms=0).run()
    assert len(records.rounds()) <= KEPT
    from tidegate.storage.manifest import Token, reachable

    named = set()
    for round in records.rounds():
        for line in records.read_commit(round)[0].tasks:
            named |= reachable(backend, Token.decode(line.token))
    assert {each.name for each in backend.list("shop")} == named


class HurriedClock(ManualClock):
    """Every look at it takes 15 ms, so that a collection goes on over many rounds."""

    def monotonic_ms(self) -> int:
        self.advance(15)
        return super().monotonic_ms()


@pytest.mark.parametrize("now_ms", [START, 2 * START], ids=["behind", "ahead"])
def test_a_wrong_wall_clock_never_removes_what_a_commit_will_name(tmp_path: Path, now_ms: int) -> None:
    """A pass that lasts several rounds meets objects of rounds that were not committed when it began."""
    filled(tmp_path, orders(34, 900))
    app = shop(tmp_path, rekeyed=True)
    ran(app, round_records=30, collect_every_ms=0, clock=HurriedClock(now_ms))
    backend = open_backend(app.state)
    assert newest(app).round > 25
    assert named_objects(backend, "shop") <= objects_of(backend, "shop")
    filled(tmp_path, orders(35, 50))
    assert ran(app).exit_code == 0  # from what is stored


@pytest.mark.parametrize("jump_ms", [-7_200_000, 7_200_000], ids=["back", "forward"])
def test_after_a_jump_of_the_stores_clock_orphans_wait_for_the_grace(jump_ms: int) -> None:
    ours, stores = ManualClock(START), ManualClock(START)
    backend = MemoryBackend(clock=stores)
    collector = Collector(Records(backend, "shop"), clock=ours, grace_ms=3_600_000, every_ms=0)
    collector.step()
    name = "shop/per_window/0/packs/0/a.pack"
    if jump_ms > 0:
        backend.put(name, [b"before the jump"])
    stores.set_now_ms(START + jump_ms)
    if jump_ms < 0:
        backend.put(name, [b"after the jump"])
    for minutes in (0, 30, 59):
        wait_ms = minutes * 60_000 - ours.monotonic_ms()
        ours.advance(wait_ms), stores.advance(wait_ms)
        collector.run()
        assert [each.name for each in backend.list("shop")] == [name]
    ours.advance(3_600_000), stores.advance(3_600_000)
    collector.run()
    assert not list(backend.list("shop"))


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_letters_of_an_attempt_that_died_are_collected_unless_a_chain_is_broken(
    tmp_path: Path, damaged: bool
) -> None:
    filled(tmp_path, orders(33, 60))
    with Log(tmp_path / "log") as log, log.writer("orders") as writer:
        writer.write(pa.table({"key": [b"k"], "value": [b"not json"]}), partition=1)
    app = App("shop", data=tmp_path, storage=SMALL)
    app.stream("orders", key=String(), value=Json(amount="double"), on_error="keep").to_topic("copy")
    backend = LosingBackend(Path(app.state), {1: "before"})
    with pytest.raises(UnavailableError):
        ran(app, backend=backend, patience_ms=0)
    ran(app, backend=backend)
    written = {each.name for each in backend.list("apps/shop/letters")}
    (kept,) = {name for line in newest(app).sources for name in chain_of(backend, line.state)}
    assert len(written) == 2 and kept in written
    if damaged:
        (Path(app.state) / kept).write_bytes(b"TGDL and nothing else")
    Collector(Records(backend, "shop"), clock=ManualClock(), grace_ms=0, every_ms=0).run()
    left = {each.name for each in backend.list("apps/shop/letters")}
    assert left == (written if damaged else {kept})
    if not damaged:
        assert app.dead_letters("copy")["value"].to_pylist() == [b"not json"]


def test_rounds_of_the_same_plan_count_once_in_totals(tmp_path: Path) -> None:
    filled(tmp_path, orders(30, 200))
    app = shop(tmp_path)
    ran(app, round_records=50)
    rows = sent(tmp_path)
    totals = newest(app).totals["per_window"]
    assert totals["rows_sent"] == len(with_values(rows))
    assert Counter(rows["partition"].to_pylist()) == Counter(newest(app).ends["per_window"])


def test_public_names_run_a_whole_app(tmp_path: Path) -> None:
    filled(tmp_path, orders(31, 50))
    app = tg.App("public", data=tmp_path)
    app.stream("orders", key=String(), value=Json(amount="double")).filter("amount > 10").to_topic("large")
    summary = app.run("local", until="caught_up")
    assert summary.caught_up and "caught up" in str(summary)
