"""The catalog of topics, and folders that have none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidegate.errors import ConflictError, CorruptError, InvalidError
from tidegate.files import Files
from tidegate.log.catalog import CATALOG_NAME, Catalog, LogFolder, TopicEntry
from tidegate.log.log import Log
from tidegate.log.topic_config import Source
from tidegate.testing.batches import Rec, build_batch

ENTRY = TopicEntry("AAAAAAAAAAAAAAAAAAAAAQ", 3, {"segment.bytes": "16384"})


def broker_folder(path: Path) -> Path:
    """A folder as a broker leaves it: two partitions, checkpoints, no catalog of ours."""
    for number in (0, 2):
        partition = path / f"events-{number}"
        partition.mkdir(parents=True)
        batch = build_batch([Rec(b"k", b"v%d" % number, 1000)], base_offset=5)
        (partition / "00000000000000000005.log").write_bytes(batch)
    (path / "meta.properties").write_text("version=1\nnode.id=1\n")
    return path


def snapshot(path: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and time of change."""
    return {
        str(found.relative_to(path)): (found.stat().st_size, found.stat().st_mtime_ns)
        for found in sorted(path.rglob("*"))
    }


def test_a_catalog_reads_back_what_was_written() -> None:
    catalog = Catalog().with_topic("orders", ENTRY).without_topic("gone", ["gone-0"])
    assert Catalog.from_bytes(catalog.to_bytes(), Path("x")) == catalog


def test_its_bytes_are_one_line_of_json_and_a_checksum() -> None:
    stored = Catalog().with_topic("orders", ENTRY).to_bytes()
    assert stored == (
        b'{"version":1,"topics":{"orders":{"id":"AAAAAAAAAAAAAAAAAAAAAQ","partitions":3,'
        b'"config":{"segment.bytes":"16384"}}},"removing":[]}\ncrc32c:' + stored[-9:]
    )


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    folder = LogFolder(Files(), tmp_path)
    folder.write(Catalog().with_topic("orders", ENTRY))
    stored = (tmp_path / CATALOG_NAME).read_bytes()
    for bit in range(len(stored) * 8):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / CATALOG_NAME).write_bytes(damaged)
        with pytest.raises(CorruptError):
            folder.read()


def test_an_unknown_version_is_refused() -> None:
    from fastcrc import crc32

    line = b'{"version":2,"topics":{},"removing":[]}'
    with pytest.raises(CorruptError, match="version 2"):
        Catalog.from_bytes(line + b"\ncrc32c:%08x\n" % crc32.iscsi(line), Path("x"))


def test_a_topic_that_is_not_there_is_answered_with_one_that_looks_like_it(tmp_path: Path) -> None:
    with Log(tmp_path / "log") as log:
        with pytest.raises(InvalidError, match="there is no log at"):
            log.describe("orders")
        log.create_topic("orders")
        with pytest.raises(InvalidError, match="did you mean orders") as unknown:
            log.describe("order")
        assert unknown.value.kafka_name == "UNKNOWN_TOPIC_OR_PARTITION"
        with pytest.raises(InvalidError, match="topic create zebra"):
            log.describe("zebra")


def test_server_properties_are_the_brokers_settings(tmp_path: Path) -> None:
    (tmp_path / "server.properties").write_text("log.retention.hours=2\nlog.segment.bytes=16384\n")
    with Log(tmp_path) as log:
        config = log.create_topic("orders", 1, {"segment.bytes": "32KiB"}).config
        assert (config.value("retention.ms"), config.source("retention.ms")) == ("7200000", Source.BROKER)
        assert (config.value("segment.bytes"), config.source("segment.bytes")) == ("32768", Source.TOPIC)
        assert config.source("segment.ms") is Source.DEFAULT
        (tmp_path / "server.properties").write_text("log.retention.hour=2\n")
        with pytest.raises(InvalidError, match=r"server\.properties.*log\.retention\.hours"):
            log.describe("orders")


def test_a_foreign_folder_is_read_and_nothing_else(tmp_path: Path) -> None:
    path = broker_folder(tmp_path / "kafka")
    before = snapshot(path)
    with Log(path) as log:
        assert log.topics() == ["events"]
        description = log.describe("events")
        assert description.assumed
        assert description.partition_numbers == (0, 2)
        assert {entry.source for entry in description.settings()} == {Source.ASSUMED}
        table = log.reader("events").read_all()
        assert table.column("value").to_pylist() == [b"v0", b"v2"]
        assert table.column("offset").to_pylist() == [5, 5]
        for change in (
            lambda: log.create_topic("orders"),
            lambda: log.alter_topic("events", {"retention.ms": "1"}),
            lambda: log.add_partitions("events", 5),
            lambda: log.delete_topic("events"),
            lambda: log.partition("events", 0),
            lambda: log.writer("events"),
        ):
            with pytest.raises(ConflictError, match="only read"):
                change()
    assert snapshot(path) == before


def test_a_foreign_folder_can_be_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    path = broker_folder(tmp_path / "kafka")
    for folder in (*path.iterdir(), path):
        if folder.is_dir():
            folder.chmod(0o500)
    try:
        with Log(path) as log:
            assert log.reader("events").read_all().num_rows == 2
    finally:
        for folder in (path, *path.iterdir()):
            if folder.is_dir():
                folder.chmod(0o700)


def test_a_folder_with_other_things_in_it_is_not_made_a_log(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with Log(tmp_path) as log, pytest.raises(InvalidError, match="photos"):
        log.create_topic("orders")
    assert sorted(os.listdir(tmp_path)) == ["photos"]


def test_plain_files_beside_it_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with Log(tmp_path) as log:
        log.create_topic("orders")
    assert (tmp_path / "notes.txt").read_text() == "hello"


def test_a_symlinked_partition_folder_is_refused(tmp_path: Path) -> None:
    with Log(tmp_path / "log") as log:
        log.create_topic("orders", 2)
        real = tmp_path / "elsewhere"
        (tmp_path / "log" / "orders-1").rename(real)
        (tmp_path / "log" / "orders-1").symlink_to(real)
        for use in (
            lambda: log.partition("orders", 1),
            lambda: log.reader("orders", [1]),
            lambda: log.delete_topic("orders"),
        ):
            with pytest.raises(InvalidError, match="not a folder but a link"):
                use()
        (tmp_path / "log" / "orders-1").unlink()
        with pytest.raises(CorruptError, match="is missing"):
            log.reader("orders", [1])


def test_a_symlinked_foreign_partition_is_not_seen(tmp_path: Path) -> None:
    path = broker_folder(tmp_path / "kafka")
    (path / "secret-0").symlink_to(tmp_path)
    with Log(path) as log:
        assert log.topics() == ["events"]
