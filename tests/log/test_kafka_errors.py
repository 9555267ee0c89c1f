"""What a cluster's errors come to: what passes by itself is waited for, what does not is said as what it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from mock_cluster import FETCH, LIST_OFFSETS, PRODUCE, MockCluster
from tidegate.cli.main import run as command_line
from tidegate.errors import AuthenticationError, CorruptError, FencedError, InvalidError, UnavailableError
from tidegate.log.kafka.client import Heard, library, translated
from tidegate.log.kafka.reader import Fetched
from tidegate.log.kafka.writer import KafkaWriter
from tidegate.log.log import open_log

confluent_kafka = pytest.importorskip("confluent_kafka")

FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH, NOT_LEADER, OUT_OF_RANGE, NOT_ALLOWED = 74, 75, 6, 1, 29
PARTITIONS = 4


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    made = MockCluster()
    made.create_topic("t", PARTITIONS)
    yield made
    made.close()


@pytest.fixture
def log(cluster: MockCluster) -> Iterator[Any]:
    with open_log(f"kafka://{cluster.servers}") as log:
        yield log


def rows(first: int, last: int) -> pa.Table:
    return pa.table({"value": [b"%d" % number for number in range(first, last)]})


# -- what passes by itself -----------------------------------------------------------------------


@pytest.mark.parametrize("code", [FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH, NOT_LEADER])
def test_a_leader_that_moves_is_waited_for(
    cluster: MockCluster, log: Any, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with log.writer("t") as writer:
        writer.write(rows(0, 5), partition=0)
    cluster.answer_with(LIST_OFFSETS, [code] * 3)
    assert log.bounds("t", [0]) == {0: (0, 5)}
    cluster.answer_with(LIST_OFFSETS, [code] * 2)
    cluster.answer_with(FETCH, [code] * 2)
    assert command_line(["consume", "t", "-e", "-f", "%s\\n", "--log", f"kafka://{cluster.servers}"]) == 0
    assert capsys.readouterr().out.split() == ["0", "1", "2", "3", "4"]


def test_a_leader_that_never_comes_is_told_after_a_time(
    cluster: MockCluster, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.log.kafka.log.PATIENCE_MS", 500)
    cluster.answer_with(LIST_OFFSETS, [FENCED_LEADER_EPOCH] * 10_000)
    with pytest.raises(UnavailableError, match=r"ask for the offsets of t \(\d+ times") as told:
        log.bounds("t", [0])
    assert told.value.kafka_name == "FENCED_LEADER_EPOCH" and told.value.exit_code == 3


def test_an_offset_that_is_there_and_is_not_found_is_asked_for_again(
    cluster: MockCluster, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with log.writer("t") as writer:
        writer.write(rows(0, 5), partition=0)
    cluster.answer_with(FETCH, [OUT_OF_RANGE] * 3)
    with log.reader("t", [0]) as reader:
        assert sum(batch.num_rows for batch in reader) == 5
    monkeypatch.setattr("tidegate.log.kafka.reader._STALL_MS", 500)
    cluster.answer_with(FETCH, [OUT_OF_RANGE] * 10_000)
    with (
        log.reader("t", [0]) as reader,
        pytest.raises(
            UnavailableError, match=r"did not find offset 0 of t-0 .* though the partition holds 0 to 5"
        ),
    ):
        for _ in range(60):
            reader.poll("1s")


# -- what does not -------------------------------------------------------------------------------


def test_nothing_is_skipped_behind_an_error_and_what_came_before_it_comes_first(
    cluster: MockCluster,
) -> None:
    seen: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
    refused = 0
    small = {
        "fetch.message.max.bytes": "2000",
        "batch.num.messages": "50",
    }  # so that it is fetched piece by piece
    with open_log(f"kafka://{cluster.servers}", client=small) as log, log.writer("t") as writer:
        for number in range(PARTITIONS):
            writer.write(rows(0, 500), partition=number)
        cluster.answer_with(FETCH, [0, NOT_ALLOWED, 0, 0, NOT_ALLOWED])
        reader = log.reader("t")
        for _ in range(200):
            try:
                batch = reader.poll("1s")
            except InvalidError as error:
                assert error.kafka_name == "TOPIC_AUTHORIZATION_FAILED"
                refused += 1
                continue
            if batch is not None:
                seen[batch.column("partition")[0].as_py()] += batch.column("offset").to_pylist()
                assert reader.positions() == {number: len(offsets) for number, offsets in seen.items()}
            if sum(map(len, seen.values())) == 500 * PARTITIONS:
                break
        reader.close()
    assert refused, "the mock did not refuse anything: nothing was tested"
    assert seen == {number: list(range(500)) for number in range(PARTITIONS)}


def test_nothing_is_skipped_behind_records_that_cannot_be_read(
    log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with log.writer("t") as writer:
        for number in range(PARTITIONS):
            writer.write(rows(0, 10), partition=number)
    real, failing = Fetched.batch, [2]

    def batch(self: Fetched, chosen: Any) -> pa.RecordBatch:
        if int(self.rows["partition"][chosen[0]]) in failing:
            raise CorruptError("a header's name is not UTF-8")
        return real(self, chosen)

    monkeypatch.setattr(Fetched, "batch", batch)
    seen: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
    with log.reader("t") as reader:
        with pytest.raises(CorruptError):
            for _ in range(30):
                found = reader.poll("1s")
                if found is not None:
                    seen[found.column("partition")[0].as_py()] += found.column("offset").to_pylist()
        failing.clear()
        for found in reader:
            seen[found.column("partition")[0].as_py()] += found.column("offset").to_pylist()
    assert seen == {number: list(range(10)) for number in range(PARTITIONS)}


def test_a_write_that_timed_out_says_nothing_in_the_next(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has all the time to send it still; the writer has not waited for that."""
    monkeypatch.setattr("tidegate.log.kafka.writer._CLIENT_SECONDS", 0.5)
    settings = {"bootstrap.servers": cluster.servers, "log_level": 0, "message.timeout.ms": 120_000}
    with KafkaWriter(cluster.servers, settings, "t", timeout_seconds=0.5) as writer:
        cluster.slow_down(3000)
        with pytest.raises(UnavailableError, match="7 records for t were not acknowledged"):
            writer.write(rows(0, 7), partition=0)
        cluster.slow_down(0)
        monkeypatch.setattr(writer, "_flush_seconds", 60.0)
        for first in range(3):
            (written,) = writer.write(rows(first, first + 2), partition=1)
            assert (written.partition, written.first_offset, written.records) == (1, 2 * first, 2)


def test_a_failure_of_one_write_is_not_raised_by_the_next_and_its_client_is_ended(
    cluster: MockCluster, log: Any
) -> None:
    with log.writer("t") as writer:
        cluster.answer_with(PRODUCE, [NOT_ALLOWED])
        failed = writer._held
        with pytest.raises(InvalidError, match="could not write to topic t") as refused:
            writer.write(pa.table({"value": [b"a-value-nobody-else-may-see"]}), partition=0)
        assert "a-value" not in str(refused.value), "an error says nothing of what was written"
        assert not failed.is_open
        (written,) = writer.write(rows(0, 2), partition=1)
        assert (written.partition, written.records) == (1, 2)


def test_a_closed_reader_says_so(log: Any) -> None:
    reader = log.reader("t", [0])
    reader.close()
    with pytest.raises(InvalidError, match="the reader of t was closed"):
        reader.poll()


# -- names ---------------------------------------------------------------------------------------

RETRIABLE = [  # org.apache.kafka.common.errors.RetriableException, by the client's codes
    5, 6, 7, 8, 9, 13, 14, 15, 16, 19, 20, 41, 51, 56, 70, 71, 72, 74, 75, 78, 80, 83, 88, 89, 100,
]  # fmt: skip


@pytest.mark.parametrize("code", RETRIABLE)
def test_what_kafka_calls_retriable_is_out_of_reach_and_no_wrong_call(code: int) -> None:
    assert isinstance(translated(library().error(code), "read", "b:1"), UnavailableError)


@pytest.mark.parametrize(
    ("code", "kind", "name"),
    [
        (3, InvalidError, "UNKNOWN_TOPIC_OR_PARTITION"),
        (6, UnavailableError, "NOT_LEADER_OR_FOLLOWER"),
        (10, InvalidError, "MESSAGE_TOO_LARGE"),
        (29, InvalidError, "TOPIC_AUTHORIZATION_FAILED"),
        (58, AuthenticationError, "SASL_AUTHENTICATION_FAILED"),
        (90, FencedError, "PRODUCER_FENCED"),
    ],
)
def test_errors_have_kafkas_own_names(code: int, kind: type, name: str) -> None:
    error = translated(library().error(code), "read", "b:1")
    assert type(error) is kind and error.kafka_name == name


def test_being_refused_is_heard_beside_the_answers_and_forgotten_when_one_comes() -> None:
    heard = Heard({"sasl.username": "ann", "sasl.mechanism": "PLAIN", "security.protocol": "SASL_SSL"})
    heard(library().error(-195))  # transport: says nothing of why
    assert heard.refusal("list topics", "b:1") is None
    heard(library().error(-169, "SASL authentication error"))
    refusal = heard.refusal("list topics", "b:1")
    assert refusal is not None and refusal.exit_code == 2
    for said in ("'ann'", "sasl.mechanism=PLAIN", "SASL_SSL", "sasl.password", "SASL authentication error"):
        assert said in str(refusal)
