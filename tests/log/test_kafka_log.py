"""`kafka://` against librdkafka's own mock cluster; what it cannot do is tested with a real broker elsewhere."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from tidegate.errors import ConflictError, FencedError, InvalidError, OffsetOutOfRangeError, UnavailableError
from tidegate.log.format.records import RECORD_SCHEMA
from tidegate.log.kafka.client import client_settings, load_client, translated
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import open_log

confluent_kafka = pytest.importorskip("confluent_kafka")


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    """A mock cluster with topic `t`, four partitions."""
    owner = confluent_kafka.Producer(
        {"test.mock.num.brokers": 1, "bootstrap.servers": "replaced", "log_level": 0}
    )
    broker = next(iter(owner.list_topics(timeout=120).brokers.values()))
    owner.produce("t", b"first", partition=0, timestamp=1000)
    owner.flush(20)
    yield f"127.0.0.1:{broker.port}"
    del owner


@pytest.fixture
def log(servers: str) -> Iterator[KafkaLog]:
    with open_log(f"kafka://{servers}") as log:
        assert isinstance(log, KafkaLog)
        yield log


def test_topics_are_listed_with_their_partitions(log: KafkaLog) -> None:
    assert log.topics() == ["t"]
    assert log.partition_counts() == {"t": 4}


def test_a_closed_log_or_writer_lets_go_of_its_client_and_says_so(servers: str) -> None:
    """Its client ends with it, in this thread, whoever still holds the log."""
    log = open_log(f"kafka://{servers}")
    assert isinstance(log, KafkaLog)
    writer = log.writer("t")
    client = weakref.ref(log._held)
    writer.close()
    with pytest.raises(InvalidError, match="open another"):
        writer.write(pa.table({"value": [b"v"]}))
    log.close()
    log.close()
    assert client() is None
    with pytest.raises(InvalidError, match="was closed; open it again"):
        log.topics()


def test_an_unknown_topic_is_said_and_not_made(log: KafkaLog) -> None:
    for use in (
        lambda: log.writer("tt"),
        lambda: log.reader("tt"),
        lambda: log.describe("tt"),
        lambda: log.delete_topic("tt"),
    ):
        with pytest.raises(InvalidError, match="did you mean t") as unknown:
            use()
        assert unknown.value.kafka_name == "UNKNOWN_TOPIC_OR_PARTITION"
    assert log.topics() == ["t"]


def test_records_go_there_and_come_back(log: KafkaLog) -> None:
    table = pa.table(
        {
            "key": pa.array([b"k", None, b""], pa.binary()),
            "value": pa.array([b"v", None, b"\x00\xff"], pa.binary()),
            "timestamp": [5000, 6000, 7000],
            "partition": pa.array([2, 2, 3], pa.int32()),
            "headers": pa.array(
                [[("h", b"1"), ("n", None)], [], None],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
        }
    )
    with log.writer("t", compression="gzip") as writer:
        written = writer.write(table)
    assert sum(run.records for run in written) == 3
    assert {run.partition for run in written} == {2, 3}
    with log.reader("t", [2, 3]) as reader:
        batches = list(reader)
        assert all(batch.schema == RECORD_SCHEMA for batch in batches)
        read = pa.Table.from_batches(batches, RECORD_SCHEMA).sort_by(
            [("partition", "ascending"), ("offset", "ascending")]
        )
        assert reader.poll() is None and not reader.is_done, "it can be polled on: there was no stop"
    assert read.column("value").to_pylist()[-3:] == [b"v", None, b"\x00\xff"]
    assert read.column("key").to_pylist()[-3:] == [b"k", None, b""]
    assert read.column("timestamp").cast(pa.int64()).to_pylist()[-3:] == [5000, 6000, 7000]
    assert read.column("headers").to_pylist()[-3] == [
        {"key": "h", "value": b"1"},
        {"key": "n", "value": None},
    ]


def test_keys_are_placed_as_kafkas_java_clients_do(log: KafkaLog) -> None:
    from tidegate.log.writer import partition_of_key

    keys = [b"key-%d" % number for number in range(20)]
    with log.writer("t") as writer:
        writer.write(pa.table({"key": keys, "value": keys}))
    with log.reader("t") as reader:
        for batch in reader:
            for key, partition in zip(
                batch.column("key").to_pylist(), batch.column("partition").to_pylist(), strict=True
            ):
                if key in keys:
                    assert partition == partition_of_key(key, 4)


def test_where_to_start_and_stop(log: KafkaLog) -> None:
    with log.writer("t") as writer:
        (written,) = writer.write(pa.table({"value": [b"%d" % number for number in range(10)]}), partition=1)
    first, last = written.first_offset, written.last_offset

    def values(**settings: Any) -> list[bytes]:
        with log.reader("t", [1], **settings) as reader:
            return [value for batch in reader for value in batch.column("value").to_pylist()]

    assert values(start=first + 7) == [b"7", b"8", b"9"]
    assert values(start=-2) == [b"8", b"9"]
    assert values(start=first + 2, stop=first + 5) == [b"2", b"3", b"4"]
    assert values(start="latest") == []
    with log.reader("t", [1], start="latest") as reader:
        assert reader.end_offsets() == {1: last + 1}
        assert reader.poll() is None
        with log.writer("t") as writer:
            writer.write(pa.table({"value": [b"more"]}), partition=1)
        batch = reader.poll("20s")
        assert batch is not None
        assert batch.column("value").to_pylist() == [b"more"]
        reader.seek(1, last)
        batch = reader.poll("20s")
        assert batch is not None
        assert batch.column("offset")[0].as_py() == last
        assert reader.positions()[1] > last


def test_an_offset_that_is_not_there_is_an_error_with_the_way_out(log: KafkaLog) -> None:
    with log.reader("t", [0], start=999) as reader, pytest.raises(OffsetOutOfRangeError, match="-o start"):
        for _ in range(30):
            reader.poll("1s")


def test_reading_a_range_of_which_nothing_comes_ends(log: KafkaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.log.kafka.reader._STALL_MS", 300)
    end = log.bounds("t", [3])[3][1]
    with (
        log.reader("t", [3], start={3: end}, stop={3: end + 5}) as reader,
        pytest.raises(UnavailableError, match=f"sent nothing of t-3 from offset {end} on"),
    ):
        list(reader)


def test_where_partitions_begin_and_end_is_asked_without_reading(log: KafkaLog) -> None:
    with log.writer("t", idempotent=True) as writer:
        (written,) = writer.write(pa.table({"value": [b"a", b"b"]}), partition=2)
    assert log.bounds("t", [2, 3], isolation="read_committed")[2] == (0, written.last_offset + 1)
    assert list(log.bounds("t", [3, 1])) == [3, 1]


def test_what_a_broker_decides_itself_is_refused(log: KafkaLog) -> None:
    with pytest.raises(InvalidError, match=r"enable\.idempotence"):
        log.writer("t", producer_id=3)
    with log.writer("t") as writer, pytest.raises(InvalidError, match="sequence"):
        writer.write(pa.table({"value": [b"x"]}), first_sequences={0: 1})
    with pytest.raises(InvalidError, match="has no partition 9"):
        log.reader("t", [9])


def test_nobody_there_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.log.kafka.log.TIMEOUT_SECONDS", 0.5)
    with open_log("kafka://127.0.0.1:1") as log, pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        log.topics()


def test_settings_of_javas_tools_are_translated_or_named() -> None:
    jaas = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="me" password="a\\"b";'
    made = client_settings(
        "h:1", {"sasl.jaas.config": jaas, "security.protocol": "SASL_SSL", "bootstrap.servers": "x"}
    )
    assert (made["sasl.username"], made["sasl.password"]) == ("me", 'a"b')
    assert made["bootstrap.servers"] == "h:1"
    assert made["security.protocol"] == "SASL_SSL"
    with pytest.raises(InvalidError, match=r"ssl\.ca\.location"):
        client_settings("h:1", {"ssl.truststore.location": "x.jks"})
    with pytest.raises(InvalidError, match=r"sasl\.username"):
        client_settings("h:1", {"sasl.jaas.config": "nonsense"})
    with pytest.raises(InvalidError, match="No such configuration property"):
        open_log("kafka://h:1", client={"no.such.setting": "1"})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_TRANSPORT", UnavailableError),
        ("REQUEST_TIMED_OUT", UnavailableError),
        ("TOPIC_ALREADY_EXISTS", ConflictError),
        ("INVALID_PRODUCER_EPOCH", FencedError),
        ("TOPIC_AUTHORIZATION_FAILED", InvalidError),
    ],
)
def test_the_clients_errors_become_ours(name: str, kind: type[Exception]) -> None:
    error = confluent_kafka.KafkaError(getattr(confluent_kafka.KafkaError, name))
    ours = translated(error, "do it", "h:1")
    assert type(ours) is kind
    assert ours.kafka_name == name
    assert "h:1" in str(ours)


def test_a_missing_client_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(InvalidError, match=r"tidegate\[kafka\]"):
        load_client()
