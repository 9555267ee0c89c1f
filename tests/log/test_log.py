"""`Log`: topics' lives, what is left on disk, and what a crash in between leaves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.clock import ManualClock
from tidegate.errors import ConflictError, InvalidError, TidegateError
from tidegate.files import Effect, Files
from tidegate.log.catalog import CATALOG_NAME
from tidegate.log.checkpoints import CLEAN_SHUTDOWN, read_topic_id, was_closed_cleanly
from tidegate.log.format.batch import iter_headers
from tidegate.log.locks import owner_status
from tidegate.log.log import Log
from tidegate.log.producer_state import Origin
from tidegate.log.topic_config import Source
from tidegate.log.verify.verify import verify
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler
from tidegate.testing.batches import Rec, build_batch
from tidegate.testing.faults import CrashAt, FailAt, SimulatedCrash, count_effects


def values(log: Log, topic: str) -> list[bytes]:
    return log.reader(topic).read_all().column("value").to_pylist()


def rows(*values_of_rows: bytes) -> pa.Table:
    return pa.table({"value": pa.array(values_of_rows, pa.binary())})


def test_reading_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    with Log(path) as log:
        assert log.topics() == []
        with pytest.raises(InvalidError, match="there is no log at"):
            log.reader("orders")
    assert not path.exists()
    with Log(path, durability="os") as log:
        log.create_topic("orders")
        log.writer("orders").write(rows(b"x"))
    before = {name.name: name.stat().st_mtime_ns for name in path.rglob("*")}
    changes: list[Effect] = []

    def watch(effect: Effect) -> None:
        if effect.mutates:
            changes.append(effect)

    with Log(path, files=Files(watch), read_only=True) as log:
        assert values(log, "orders") == [b"x"]
        assert log.partition_rows("orders")[0]["high_watermark"] == 1
    assert changes == []
    assert {name.name: name.stat().st_mtime_ns for name in path.rglob("*")} == before


def test_a_created_topic_has_its_folders_and_its_identity(tmp_path: Path) -> None:
    with Log(tmp_path / "log", randomness=SeededRandomness(1)) as log:
        description = log.create_topic("orders", 3, {"segment.bytes": "16KiB", "retention": "10m"})
        assert description.partition_numbers == (0, 1, 2)
        assert description.config.segment_bytes == 16384
        assert description.config.source("retention.ms") is Source.TOPIC
        for number in range(3):
            identity = read_topic_id(tmp_path / "log" / f"orders-{number}", files=Files())
            assert str(identity) == description.topic_id
        assert log.describe("orders") == description
        assert log.topics() == ["orders"]
    with Log(tmp_path / "log") as log:
        assert log.describe("orders") == description


def test_a_topic_is_created_once(tmp_path: Path) -> None:
    with Log(tmp_path / "log") as log:
        log.create_topic("orders", 2)
        with pytest.raises(ConflictError) as twice:
            log.create_topic("orders", 2)
        assert twice.value.kafka_name == "TOPIC_ALREADY_EXISTS"
        assert log.create_topic("orders", 5, if_not_exists=True).partitions == 2
    for wrong in ("../x", "", ".", "a/b"):
        with Log(tmp_path / "log") as log, pytest.raises(InvalidError, match="not allowed"):
            log.create_topic(wrong)
    with Log(tmp_path / "log") as log:
        for partitions in (0, -1):
            with pytest.raises(InvalidError):
                log.create_topic("new", partitions)
        with pytest.raises(InvalidError, match="did you mean"):
            log.create_topic("new", 1, {"retention.msec": "1"})
        assert log.topics() == ["orders"]
    assert sorted(os.listdir(tmp_path)) == ["log"]


def test_altering_takes_effect_on_open_partitions_at_once(tmp_path: Path) -> None:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("orders", 1, {"retention.ms": "1000"})
        partition = log.partition("orders", 0)
        described = log.alter_topic("orders", {"segment.bytes": "1KiB"}, unset=["retention.ms"])
        assert described.config.overrides() == {"segment.bytes": "1024"}
        assert partition.config.segment_bytes == 1024
        assert partition.config.retention_ms == 604_800_000
        with pytest.raises(InvalidError):
            log.alter_topic("orders", {"segment.bytes": "1"})
        assert log.describe("orders") == described


def test_altering_reaches_a_writer_in_another_log_within_a_second(tmp_path: Path) -> None:
    clock = ManualClock()
    with Log(tmp_path / "log", durability="os", clock=clock) as writing:
        writing.create_topic("orders")
        writer = writing.writer("orders")
        writer.write(rows(b"x"))
        with Log(tmp_path / "log") as other:
            other.alter_topic("orders", {"max.message.bytes": "70"})
        clock.advance("1s")
        with pytest.raises(InvalidError) as refused:
            writer.write(rows(b"x" * 100))
        assert refused.value.kafka_name == "MESSAGE_TOO_LARGE"


def test_partitions_can_be_added_never_taken(tmp_path: Path) -> None:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("orders", 2)
        assert log.add_partitions("orders", 4).partition_numbers == (0, 1, 2, 3)
        log.writer("orders").write(rows(b"x"), partition=3)
        for total in (4, 1):
            with pytest.raises(InvalidError, match="only get more"):
                log.add_partitions("orders", total)
        with pytest.raises(InvalidError, match="has no partition 4; it has 0 to 3"):
            log.partition("orders", 4)


def test_a_deleted_topic_is_gone_and_its_name_is_free(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Log(path, durability="os") as log:
        first = log.create_topic("orders", 2)
        log.create_topic("kept")
        log.writer("orders").write(rows(b"old"), partition=1)
        log.delete_topic("orders")
        assert log.topics() == ["kept"]
        assert sorted(name for name in os.listdir(path) if "orders" in name) == []
        with pytest.raises(InvalidError, match="does not exist"):
            log.delete_topic("orders")
        assert log.create_topic("orders", 1).topic_id != first.topic_id
        log.writer("orders").write(rows(b"new"))
        assert values(log, "orders") == [b"new"]
    assert "orders 1" not in (path / "recovery-point-offset-checkpoint").read_text()


def test_folders_of_unknown_topics_are_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Log(path) as log:
        log.create_topic("other")
        stray = path / "orders-0"
        stray.mkdir()
        (stray / "00000000000000000000.log").write_bytes(b"somebody's records")
        with pytest.raises(ConflictError, match="not in the catalog"):
            log.create_topic("orders")
        assert (stray / "00000000000000000000.log").read_bytes() == b"somebody's records"


def test_a_crash_anywhere_in_creating_leaves_no_topic_or_the_whole_topic(tmp_path: Path) -> None:
    def create(files: Files, path: Path) -> None:
        with Log(path, files=files) as log:
            log.create_topic("orders", 2)

    effects = count_effects(lambda files: create(files, tmp_path / "count"))
    assert effects > 5
    for number in range(1, effects + 1):
        path = tmp_path / f"crash-{number}"
        with pytest.raises(SimulatedCrash):
            create(Files(CrashAt(number)), path)
        with Log(path, durability="os") as log:
            description = log.create_topic("orders", 2, if_not_exists=True)
            assert description.partitions == 2
            log.writer("orders").write(rows(b"x"), partition=1)
            assert values(log, "orders") == [b"x"]


def test_a_crash_anywhere_in_deleting_leaves_the_topic_or_nothing_of_it(tmp_path: Path) -> None:
    def prepare(path: Path) -> None:
        with Log(path, durability="os") as log:
            log.create_topic("orders", 2)
            log.create_topic("kept")
            log.writer("orders").write(rows(b"x"), partition=1)

    def delete(files: Files, path: Path) -> None:
        with Log(path, files=files, durability="os") as log:
            log.delete_topic("orders")

    prepare(tmp_path / "count")
    effects = count_effects(lambda files: delete(files, tmp_path / "count"))
    for number in range(1, effects + 1):
        path = tmp_path / f"crash-{number}"
        prepare(path)
        with pytest.raises(SimulatedCrash):
            delete(Files(CrashAt(number)), path)
        with Log(path, durability="os") as log:
            if "orders" in log.topics():
                assert values(log, "orders") == [b"x"]
            log.create_topic("orders", 2, if_not_exists=True)  # whoever changes the catalog next cleans up
            assert values(log, "kept") == []
            folders = sorted(name for name in os.listdir(path) if "orders" in name)
            assert folders == ["orders-0", "orders-1"]


def test_a_failed_write_of_the_catalog_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Log(path) as log:
        log.create_topic("orders")
    stored = (path / CATALOG_NAME).read_bytes()

    def create(files: Files) -> None:
        with Log(path, files=files) as log:
            log.create_topic("more")

    for number in range(1, 60):
        failing = FailAt(number)
        try:
            create(Files(failing))
        except TidegateError:
            with Log(path) as log:
                assert "orders" in log.topics()
        else:
            break
    assert (path / CATALOG_NAME).read_bytes() != stored


def test_closing_twice_is_fine_and_a_closed_log_says_so(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", durability="os")
    log.create_topic("orders")
    writer = log.writer("orders")
    writer.write(rows(b"x"))
    log.close()
    log.close()
    for use in (
        lambda: writer.write(rows(b"y")),
        lambda: log.create_topic("more"),
        lambda: log.writer("orders"),
    ):
        with pytest.raises(InvalidError, match="is closed"):
            use()


def test_read_only_refuses_every_change(tmp_path: Path) -> None:
    with Log(tmp_path / "log") as log:
        log.create_topic("orders")
    with Log(tmp_path / "log", read_only=True) as log:
        for use in (
            lambda: log.create_topic("more"),
            lambda: log.alter_topic("orders", {"retention.ms": "1"}),
            lambda: log.delete_topic("orders"),
            lambda: log.partition("orders", 0),
            lambda: log.writer("orders"),
        ):
            with pytest.raises(InvalidError, match="read_only"):
                use()
        assert values(log, "orders") == []


@pytest.mark.parametrize("settings", [{"durability": "paper"}, {"recovery": "hope"}])
def test_wrong_arguments_are_refused(tmp_path: Path, settings: dict[str, str]) -> None:
    with pytest.raises(InvalidError):
        Log(tmp_path, **settings)  # type: ignore[arg-type]


def test_a_borrowed_partition_is_closed_unless_somebody_asked_for_it(tmp_path: Path) -> None:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("orders", 2)
        assert len(log.idle_partitions()) == 2
        with log.borrowed("orders", 0) as partition:
            assert partition is not None
            assert log.open_partitions == [partition]
        assert log.open_partitions == []
        with log.borrowed("orders", 0) as partition:
            assert log.partition("orders", 0) is partition
        assert log.open_partitions == [partition]
        assert log.idle_partitions() == [("orders", 1)]
        with log.borrowed("gone", 0) as partition:
            assert partition is None
        with Log(tmp_path / "log") as other, other.borrowed("orders", 0) as partition:
            assert partition is None


def test_released_partitions_can_be_written_by_another_log(tmp_path: Path) -> None:
    with Log(tmp_path / "log", durability="os") as first, Log(tmp_path / "log", durability="os") as second:
        first.create_topic("orders")
        first.writer("orders").write(rows(b"a"))
        first.release("orders", 0)
        second.writer("orders").write(rows(b"b"))
        assert values(first, "orders") == [b"a", b"b"]


def test_a_log_with_maintenance_ages_its_records_and_says_that_it_does(
    tmp_path: Path, manual_clock: ManualClock
) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "server.properties").write_text(
        "log.retention.check.interval.ms=300000\nlog.initial.task.delay.ms=30000\n"
    )
    scheduler = ManualScheduler(manual_clock)
    with Log(
        tmp_path / "log", durability="os", maintenance=True, clock=manual_clock, scheduler=scheduler
    ) as log:
        log.create_topic(
            "t", 1, {"segment.bytes": "200", "retention.ms": "10m", "file.delete.delay.ms": "1m"}
        )
        writer = log.writer("t", batch_records=1)
        for number in range(12):
            writer.write(rows(b"%d" % number + b"x" * 60))
            manual_clock.advance("1m")
        assert len(values(log, "t")) == 12
        for _ in range(10):
            manual_clock.advance("1m")
            scheduler.run_due()
        left = values(log, "t")
        assert 0 < len(left) < 12
        assert left[-1] == b"11" + b"x" * 60
        for _ in range(30):
            manual_clock.advance("1m")
            scheduler.run_due()
        assert values(log, "t") == []
        assert not list((tmp_path / "log" / "t-0").glob("*.deleted"))
        status = owner_status(tmp_path / "log", files=Files())
        assert status is not None and status.running
    status = owner_status(tmp_path / "log", files=Files())
    assert status is not None and not status.running


@pytest.mark.parametrize("checkpoint", ["kept", "lost", "damaged"])
def test_the_leader_epoch_of_a_broker_is_kept_when_we_write_on(tmp_path: Path, checkpoint: str) -> None:
    """A broker may open the folder, and numbers its leaders; a log whose epoch went back would be cut by it."""
    path = tmp_path / "log"
    with Log(path) as log:
        log.create_topic("t")
        log.writer("t").write(pa.table({"value": [b"a"]}))
        theirs = build_batch([Rec(value=b"b", timestamp=1)], base_offset=1, leader_epoch=5)
        log.partition("t", 0).append(theirs, origin=Origin.REPLICATION)
        log.partition("t", 0).acknowledge(sync=True)
    epochs = path / "t-0" / "leader-epoch-checkpoint"
    if checkpoint == "lost":
        epochs.unlink()
    elif checkpoint == "damaged":
        epochs.write_bytes(b"rubbish")
    with Log(path) as log:
        log.writer("t").write(pa.table({"value": [b"c"]}))
    data = (path / "t-0" / f"{0:020d}.log").read_bytes()
    assert [header.leader_epoch for _, header in iter_headers(data)] == [0, 5, 5]
    assert epochs.read_text().split() == ["0", "2", "0", "0", "5", "1"]
    assert verify("t", log=path).all_findings().counts == {}


def test_a_log_closes_though_another_topics_folder_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Log(path) as log:
        log.create_topic("here")
        log.create_topic("gone")
        log.writer("here").write(rows(b"a"))
        shutil.rmtree(path / "gone-0")
    assert not (path / CLEAN_SHUTDOWN).exists()
    with Log(path) as log:
        assert values(log, "here") == [b"a"]
        assert log.writer("here").write(rows(b"b"))[0].first_offset == 1


def test_one_missing_folder_does_not_keep_the_others_from_being_closed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(path)
    for topic in ("a-gone", "kept"):
        log.create_topic(topic)
        log.writer(topic).write(rows(b"a"))
    shutil.rmtree(path / "a-gone-0")
    with pytest.raises((TidegateError, OSError)):
        log.close()
    assert was_closed_cleanly(Files(), path / "kept-0")
    with Log(path) as again:
        again.writer("kept").write(rows(b"b"))


def test_settings_changed_elsewhere_are_noticed_though_size_and_time_are_the_same(tmp_path: Path) -> None:
    path, clock = tmp_path / "log", ManualClock(10_000)
    with Log(path, clock=clock) as log:
        log.create_topic("t", config={"segment.bytes": "1000000"})
        clock.advance(2000)
        log.writer("t").write(rows(b"a"))
        catalog = path / CATALOG_NAME
        stamp = catalog.stat().st_mtime_ns
        with Log(path) as other:
            other.alter_topic("t", {"segment.bytes": "2000000"})
        os.utime(catalog, ns=(stamp, stamp))  # an edit within the same tick of the clock
        clock.advance(2000)
        log.writer("t").write(rows(b"b"))
        assert log.partition("t", 0).config.segment_bytes == 2_000_000
