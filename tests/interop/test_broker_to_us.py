"""A broker writes, we read: every record, every line of the dump, and the same bytes for the same batches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from comparing import differences
from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec
from consuming import consume, read
from dumping import comparable, our_dump
from java_dump import dumpable, java_dump
from kafka_broker import Broker
from kafka_home import KafkaHome
from kafka_wire import Wire
from our_logs import open_partition
from raw_batches import as_sent, stored_batches
from workloads import T0, WORKLOADS

from tidegate.log.producer_state import Origin

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]


@pytest.fixture(scope="module")
def written(module_broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The broker's data folder after it has written every workload and stopped cleanly; it runs again."""
    broker = module_broker
    broker.create_all({name: load.settings for name, load in WORKLOADS.items()})
    with Wire(broker.address) as wire:
        for name, load in WORKLOADS.items():
            load.fill(broker, wire, name)
    broker.stop()
    copy = tmp_path_factory.mktemp("written") / "data"
    shutil.copytree(broker.data, copy, ignore=shutil.ignore_patterns(".lock"))
    broker.start()
    return copy


@pytest.mark.parametrize("committed", [False, True], ids=["uncommitted", "committed"])
def test_we_read_what_an_ordinary_client_reads(written: Path, broker: Broker, committed: bool) -> None:
    for topic in WORKLOADS:
        theirs = consume(broker.address, topic, committed=committed)
        assert read(written, topic, committed=committed) == theirs, topic
        assert theirs or topic == "empty"


def test_a_folder_is_read_while_the_broker_has_it_open(broker: Broker) -> None:
    broker.create("open", {"segment.bytes": "4096", "retention.ms": "-1"})
    with Wire(broker.address) as wire:
        WORKLOADS["mixed"].fill(broker, wire, "open")
    assert read(broker.data, "open") == consume(broker.address, "open")


@pytest.mark.parametrize(
    "options", [(), ("--print-data-log",), ("--deep-iteration",), ("--verify-index-only",)]
)
def test_our_dump_is_the_java_dump(
    written: Path, kafka: KafkaHome, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written)
    files = [name for topic in WORKLOADS for name in dumpable(written / f"{topic}-0")]
    theirs = java_dump(kafka, written, files, *options)
    out, err = our_dump(written, files, list(options))
    assert comparable(out) == comparable(theirs.out)
    assert sorted(err.splitlines()) == sorted(theirs.err.splitlines())


def test_the_same_batches_give_the_same_files(written: Path, tmp_path: Path) -> None:
    for topic, load in WORKLOADS.items():
        if not load.replayable:
            continue
        theirs, ours = written / f"{topic}-0", tmp_path / f"{topic}-0"
        partition = open_partition(ours, load.settings)
        for head, raw in stored_batches(theirs):
            origin = Origin.COORDINATOR if head.attributes & 0x20 else Origin.CLIENT
            partition.log.append(as_sent(raw), origin=origin, leader_epoch=head.leader_epoch)
        partition.close()
        assert differences(ours, theirs) == [], topic


def test_look_ups_by_time_find_what_the_broker_finds(written: Path, broker: Broker, tmp_path: Path) -> None:
    admin = broker.admin()
    for topic in ("mixed", "slow", "transactions", "shapes", "codecs"):
        folder = shutil.copytree(written / f"{topic}-0", tmp_path / f"{topic}-0")
        log = open_partition(folder, WORKLOADS[topic].settings).log
        with Wire(broker.address) as wire:
            for timestamp in (0, T0 - 1, *range(T0, T0 + 20_000, 523), T0 + 10**6, 2**41, 2**42):
                found = log.offset_for_timestamp(timestamp)
                theirs = wire.offset_for(topic, timestamp)
                assert (-1 if found is None else found.offset) == theirs, (topic, timestamp)
        latest = admin.list_offsets({TopicPartition(topic, 0): OffsetSpec.max_timestamp()})
        largest = log.offset_for_timestamp(-3)
        assert largest is not None
        assert largest.offset == next(iter(latest.values())).result(30).offset
        log.close()
