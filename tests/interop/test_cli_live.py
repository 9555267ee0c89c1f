"""`--log kafka://…`: the topic, produce and consume verbs against a real broker, and beside a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from consuming import consume
from kafka_broker import Broker
from kafka_home import until
from kafka_wire import Wire
from raw_batches import Row, batch
from workloads import T0

from tidegate.log.writer import partition_of_key

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]

LINES: list[dict[str, Any]] = [
    {"key": "a", "value": "first", "timestamp": T0, "headers": {"h": "1", "none": None}},
    {"key": None, "value": "no key", "timestamp": T0 + 1},
    {"key": "b", "value": None, "timestamp": T0 + 2},
    {"key": {"base64": "//4A"}, "value": {"base64": "gIE="}, "timestamp": T0 + 3},
    {"key": "", "value": "", "timestamp": T0 + 4},
    {"key": "ключ", "value": "値 🌊", "timestamp": T0 + 5},
]


class Shell:
    """Runs `tidegate` against one log."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, *words: str, feed: str = "", code: int = 0) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("tidegate")), *words, "--log", self.url],
            input=feed,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == code, f"{words} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout if code == 0 else done.stderr

    def described(self, topic: str) -> dict[str, Any]:
        return json.loads(self("topic", "describe", topic, "--format", "json"))

    def rows(self, *words: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self(*words).splitlines()]


@pytest.fixture
def shell(broker: Broker) -> Shell:
    return Shell(f"kafka://{broker.address}")


def as_lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_a_topic_is_created_described_altered_and_deleted(shell: Shell) -> None:
    shell("topic", "create", "cli-life", "-p", "3", "-X", "segment.bytes=16KiB", "-X", "retention=10m")
    shell("topic", "create", "cli-life", "--if-not-exists")
    assert "cli-life" in shell("topic", "create", "cli-life", code=4)
    assert "cli-life" in shell("topic", "list", "--format", "jsonl")
    config = {entry["key"]: entry for entry in shell.described("cli-life")["config"]}
    assert (config["segment.bytes"]["value"], config["retention.ms"]["value"]) == ("16384", "600000")
    assert config["segment.bytes"]["source"] == "DYNAMIC_TOPIC_CONFIG"
    shell("topic", "alter", "cli-life", "-X", "retention.ms=-1", "--partitions", "4")
    until(lambda: len(shell.described("cli-life")["partitions"]) == 4, "the fourth partition")
    shell("topic", "delete", "cli-life", "--yes")
    until(lambda: "cli-life" not in shell("topic", "list", "--format", "jsonl"), "the topic to be gone")
    assert "cli-life" in shell("topic", "describe", "cli-life", code=2)


def test_what_is_produced_is_consumed(shell: Shell, broker: Broker) -> None:
    broker.create("cli-round", {"retention.ms": "-1"})
    shell("produce", "cli-round", "--format", "jsonl", feed=as_lines(LINES))
    found = shell.rows("consume", "cli-round", "-e", "-J")
    assert [row["offset"] for row in found] == list(range(len(LINES)))
    for sent, got in zip(LINES, found, strict=True):
        assert {name: got.get(name) for name in sent if name != "headers"} == {
            name: value for name, value in sent.items() if name != "headers"
        }
        assert (got.get("headers") or {}) == sent.get("headers", {})
    theirs = consume(broker.address, "cli-round")
    assert [seen.key for seen in theirs][:4] == [b"a", None, b"b", b"\xff\xfe\x00"]


def test_a_folder_and_a_broker_print_the_same_records(shell: Shell, broker: Broker, tmp_path: Path) -> None:
    folder = Shell(str(tmp_path / "log"))
    folder("topic", "create", "cli-both", "-X", "retention.ms=-1")
    broker.create("cli-both", {"retention.ms": "-1"})
    for one in (folder, shell):
        one("produce", "cli-both", "--format", "jsonl", feed=as_lines(LINES))
    assert folder.rows("consume", "cli-both", "-e", "-J") == shell.rows("consume", "cli-both", "-e", "-J")
    for place in ("@" + str(T0 + 3), "-2", "3"):
        ours, theirs = (one.rows("consume", "cli-both", "-e", "-J", "-o", place) for one in (folder, shell))
        assert ours == theirs
        assert ours, place


def test_keys_land_where_our_partitioner_says(shell: Shell, broker: Broker) -> None:
    broker.create("cli-keys", {"retention.ms": "-1"}, partitions=5)
    keys = [f"key-{number}" for number in range(40)]
    shell(
        "produce",
        "cli-keys",
        "--format",
        "jsonl",
        feed=as_lines([{"key": key, "value": "v"} for key in keys]),
    )
    found = shell.rows("consume", "cli-keys", "-e", "-J")
    assert {row["key"]: row["partition"] for row in found} == {
        key: partition_of_key(key.encode(), 5) for key in keys
    }


def test_aborted_records_are_shown_only_when_asked_for(shell: Shell, broker: Broker) -> None:
    broker.create("cli-aborted", {"retention.ms": "-1"})
    with Wire(broker.address) as wire:
        for sequence, commit in enumerate((True, False, True)):
            row = Row(T0 + sequence, b"k", b"commit" if commit else b"abort")
            sent = batch([row], producer_id=77, producer_epoch=0, base_sequence=sequence, transactional=True)
            wire.produce("cli-aborted", sent, transactional_id="cli")
            wire.write_marker("cli-aborted", producer_id=77, producer_epoch=0, commit=commit)
    committed = shell.rows("consume", "cli-aborted", "-e", "-J", "--isolation", "read_committed")
    assert [row["value"] for row in committed] == ["commit", "commit"]
    everything = shell.rows("consume", "cli-aborted", "-e", "-J")
    assert [row["value"] for row in everything] == ["commit", "abort", "commit"]


def test_an_offset_that_aged_out_is_an_error(shell: Shell, broker: Broker) -> None:
    broker.create("cli-aged", {"retention.ms": "-1"})
    with Wire(broker.address) as wire:
        for index in range(10):
            wire.produce("cli-aged", batch([Row(T0 + index, b"k", b"v")]))
        wire.delete_records("cli-aged", 6)
    assert [row["offset"] for row in shell.rows("consume", "cli-aged", "-e", "-J")] == [6, 7, 8, 9]
    assert "OFFSET_OUT_OF_RANGE" in shell("consume", "cli-aged", "-e", "-J", "-o", "2", code=2)


def test_a_topic_that_is_not_there_is_an_error(shell: Shell) -> None:
    assert "cli-missing" in shell("consume", "cli-missing", "-e", code=2)
    assert "cli-missing" in shell("produce", "cli-missing", "--format", "jsonl", feed=as_lines(LINES), code=2)


def test_the_timestamp_zero_is_refused_and_nothing_is_written(shell: Shell, broker: Broker) -> None:
    """The client takes 0 for "now": records of 1970-01-01 would be dated today."""
    broker.create("cli-zero", {"retention.ms": "-1"})
    zero = [LINES[0], {"key": "z", "value": "zero", "timestamp": 0}]
    told = shell("produce", "cli-zero", "--format", "jsonl", feed=as_lines(zero), code=2)
    assert "the timestamp 0" in told and "present time" in told
    assert shell.rows("consume", "cli-zero", "-e", "-J") == []
    shell("produce", "cli-zero", "--format", "jsonl", feed=as_lines([{**zero[1], "timestamp": 1}]))
    shell(
        "produce",
        "cli-zero",
        "--format",
        "jsonl",
        feed=as_lines([{"key": "z", "value": "now", "timestamp": None}]),
    )
    one, now = shell.rows("consume", "cli-zero", "-e", "-J")
    assert one["timestamp"] == 1 and now["timestamp"] > T0
    assert consume(broker.address, "cli-zero")[0].timestamp == 1
