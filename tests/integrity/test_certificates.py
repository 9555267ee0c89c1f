"""Certificates: made of a topic or a round, checked by anybody, and never more proven than was read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.cli.main import run
from tidegate.errors import InvalidError
from tidegate.integrity import certificates
from tidegate.integrity.audit import Processes
from tidegate.integrity.certificates import (
    canonical,
    certify_topic,
    check_certificate,
    make_certificate,
    parse_certificate,
)
from tidegate.integrity.sender import ChainLimits
from tidegate.log.log import Log

NOW = 1_800_000_000_000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "SMALLEST_BLOCK", 16)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    fill(folder)
    return folder


def fill(folder: Path, values: bytes = b"v", records: int = 100) -> None:
    with Log(folder, durability="os") as log:
        log.create_topic("orders", 2, {"segment.bytes": 4000})
        with log.writer(
            "orders", integrity={"limits": ChainLimits(max_records=30), "guid": b"g" * 16}
        ) as sender:
            for number in range(2):
                keys = [b"k%d" % n for n in range(records)]
                table = pa.table({"key": keys, "value": [values] * records})
                sender.write(table, partition=number)


def test_a_certificate_says_what_was_read_and_is_proven_by_the_same_log(log: Path) -> None:
    made = certify_topic(str(log), "orders", now_ms=NOW)
    assert made["subject"]["kind"] == "topic" and made["faults"] == [] and made["tolerated"] == []
    assert [each["next"] - each["first"] for each in made["ranges"]] == [
        each["records"] for each in made["ranges"]
    ]
    assert [chain["chain"] for chain in made["ranges"][0]["chains"]] == [0, 1, 2, 3]
    (checked,) = check_certificate(parse_certificate(json.dumps(made, indent=3)), str(log))
    assert (checked.verdict, checked.proven, checked.aged_out) == ("proven", made["records"], 0)


def test_its_digest_is_of_the_canonical_form() -> None:
    made = make_certificate({"kind": "topic"}, [], made_ms=5, base="é")
    assert canonical(made) == canonical(json.loads(json.dumps(made)))
    assert b" " not in canonical(made).replace(made["software"].encode(), b"") and b"\\u00e9" in canonical(
        made
    )
    for change in ({"made_ms": 6}, {"subject": {}}, {"digest": "0"}):
        with pytest.raises(InvalidError, match="digest is another"):
            parse_certificate(json.dumps(made | change))
    with pytest.raises(InvalidError, match="version 9"):
        parse_certificate(json.dumps(made | {"version": 9}))
    for text in ("", "[]", "{}", "{", '{"format":"else"}'):
        with pytest.raises(InvalidError, match="no certificate"):
            parse_certificate(text)


def test_a_signature_is_asked_for_by_those_who_have_the_key() -> None:
    made = make_certificate({}, [], made_ms=5, key=b"secret")
    assert parse_certificate(json.dumps(made), key=b"secret") == made == parse_certificate(json.dumps(made))
    for other in (made, make_certificate({}, [], made_ms=5)):
        with pytest.raises(InvalidError, match="not signed"):
            parse_certificate(json.dumps(other), key=b"other")


def test_a_log_that_changed_is_named_by_its_ranges(log: Path, tmp_path: Path) -> None:
    made = certify_topic(str(log), "orders", now_ms=NOW)
    fill(tmp_path / "other", b"w")
    (checked,) = check_certificate(made, str(tmp_path / "other"))
    assert checked.verdict == "changed" and {each.partition for each in checked.changed} == {0, 1}
    fill(tmp_path / "short", records=40)
    (checked,) = check_certificate(made, str(tmp_path / "short"))
    assert any("the log ends at" in each.reason for each in checked.changed)


def test_one_changed_record_costs_one_block(log: Path) -> None:
    made = certify_topic(str(log), "orders", now_ms=NOW)
    ranges = made["ranges"]
    at, count, digits = ranges[1]["blocks"][2]
    ranges[1]["blocks"][2] = [at, count, digits[:-1] + ("0" if digits[-1] != "0" else "1")]
    (checked,) = check_certificate(made, str(log))
    (changed,) = checked.changed
    assert (changed.partition, changed.first, changed.next) == (1, 32, 48)
    assert checked.proven == made["records"] - count


def test_what_aged_out_is_counted_and_the_rest_is_proven(log: Path) -> None:
    made = certify_topic(str(log), "orders", now_ms=NOW)
    with Log(log, durability="os") as opened:
        for number in range(2):
            opened.partition("orders", number).delete_records_before(50)
    (checked,) = check_certificate(made, str(log))
    assert checked.verdict == "partly aged out" and checked.aged_out == 2 * 64
    assert checked.proven == made["records"] - 2 * 64
    with Log(log, durability="os") as opened:
        for number in range(2):
            end = opened.partition("orders", number).high_watermark
            opened.partition("orders", number).delete_records_before(end)
    (checked,) = check_certificate(made, str(log))
    assert checked.verdict == "aged out" and checked.proven == 0


def test_a_topic_that_is_gone_is_an_error_and_a_partition_that_is_gone_a_change(log: Path) -> None:
    made = certify_topic(str(log), "orders", now_ms=NOW)
    made["ranges"].append({**made["ranges"][0], "partition": 7})
    (checked,) = check_certificate(made, str(log))
    assert [each.reason for each in checked.changed] == ["the partition is gone"]
    made["ranges"][0]["topic"] = "nosuch"
    with pytest.raises(InvalidError, match="nosuch"):
        check_certificate(made, str(log))


def test_faults_and_their_producers_are_in_it(log: Path, tmp_path: Path) -> None:
    assert (
        run(
            ["break", "orders", "--kind", "drop", "--log", str(log), "--into", str(tmp_path / "broken"), "-q"]
        )
        == 0
    )
    made = certify_topic(str(tmp_path / "broken"), "orders", now_ms=NOW)
    assert {each["kind"] for each in made["faults"]} == {"missing"}


def test_processes_give_the_same_certificate(log: Path) -> None:
    with Processes(2) as processes:
        assert certify_topic(str(log), "orders", now_ms=NOW, runner=processes) == certify_topic(
            str(log), "orders", now_ms=NOW
        )


def test_the_commands_export_and_check(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, key = tmp_path / "orders.json", tmp_path / "key"
    key.write_bytes(b"secret")
    common = ["--log", str(log), "--key-file", str(key)]
    state = ["--state", str(tmp_path / "nothing")]
    assert run(["certificate", "export", "orders", "-o", str(file), *common, *state]) == 0
    assert run(["certificate", "check", str(file), *common, "--format", "json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["topics"][0]["verdict"] == "proven"
    with Log(log, durability="os") as opened:
        opened.partition("orders", 0).delete_records_before(50)
    assert run(["certificate", "check", str(file), *common]) == 0
    assert run(["certificate", "check", str(file), *common, "--complete"]) == 1
    fill(tmp_path / "other", b"w")
    assert run(["certificate", "check", str(file), "--log", str(tmp_path / "other")]) == 1
    assert "changed: orders-0 offsets" in capsys.readouterr().out
