"""The options of the Spark source: what is understood, and what is refused with a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.errors import InvalidError
from tidegate.spark.options import SourceOptions

LEAST = {"log": "./data/log", "topic": "orders"}


def test_the_least_that_must_be_said() -> None:
    options = SourceOptions.parse(LEAST)
    assert options.log == str(Path("data/log").absolute())
    assert options.topics == ("orders",)
    assert options.fail_on_data_loss
    assert (options.max_records, options.max_bytes, options.min_partitions) == (None, None, 0)


def test_everything_that_can_be_said_in_any_case() -> None:
    options = SourceOptions.parse(
        {
            "PATH": "file:///data/log",
            "Subscribe": "b, a,b",
            "startingtimestamp": "2026-01-01T00:00Z",
            "endingTimestamp": "1767225600000",
            "MAXOFFSETSPERTRIGGER": "500",
            "maxBytesPerTrigger": "64MiB",
            "minPartitions": "8",
            "failOnDataLoss": "FALSE",
            "isolation": "read_committed",
        }
    )
    assert options == SourceOptions(
        log="/data/log",
        topics=("b", "a"),
        starting_timestamp=1_767_225_600_000,
        ending_timestamp=1_767_225_600_000,
        max_records=500,
        max_bytes=64 << 20,
        min_partitions=8,
        fail_on_data_loss=False,
        isolation="read_committed",
    )


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"startingOffset": "earliest"}, "did you mean startingOffsets"),
        ({"kafka.security.protocol": "SSL"}, "is a folder"),
        ({"startingOffsets": "latest", "startingTimestamp": "0"}, "keep one"),
        ({"endingOffsets": "latest", "endingTimestamp": "0"}, "keep one"),
        ({"maxRecordsPerTrigger": "0"}, "at least 1"),
        ({"maxRecordsPerTrigger": "-5"}, "at least 1"),
        ({"maxBytesPerTrigger": "lots"}, "not a size"),
        ({"maxBytesPerTrigger": "0"}, "nothing"),
        ({"minPartitions": "two"}, "minPartitions"),
        ({"failOnDataLoss": "yes"}, "neither true nor false"),
        ({"isolation": "serializable"}, "none of"),
        ({"startingTimestamp": "yesterday"}, "not a moment"),
        ({"path": "elsewhere"}, "given twice"),
        ({"log": "kafka://broker:9092", "maxBytesPerTrigger": "1"}, "maxRecordsPerTrigger"),
        ({"log": ""}, "option log is missing"),
        ({"topic": " , "}, "option topic is missing"),
    ],
)
def test_what_is_wrong_is_said(wrong: dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidError, match=complaint):
        SourceOptions.parse(LEAST | wrong)


@pytest.mark.parametrize("end", [{"endingOffsets": "latest"}, {"endingTimestamp": "5"}])
def test_a_stream_has_no_end(end: dict[str, str]) -> None:
    with pytest.raises(InvalidError, match="a stream does not end"):
        SourceOptions.parse(LEAST | end).check_streaming()
