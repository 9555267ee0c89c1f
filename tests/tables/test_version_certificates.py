"""Certificates of table versions: the records of the version's topic that are in it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.cli.main import run
from tidegate.errors import InvalidError
from tidegate.integrity.certificates import check_certificate, parse_certificate
from tidegate.log.log import Log
from tidegate.storage import open_backend
from tidegate.tables.versions.catalog import PartitionResult, State, Versions
from tidegate.tables.versions.certificates import certify_version


def test_a_version_is_certified_by_its_topic(tmp_path: Path) -> None:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("users_v1", 1)
        with log.writer("users_v1", integrity=True) as sender:
            sender.write(pa.table({"key": ["a", "b"], "value": ["1", "2"]}))
        end = log.partition("users_v1", 0).high_watermark
    state = tmp_path / "state"
    state.mkdir()
    backend = open_backend(str(state))
    versions = Versions(backend, "users")
    made = versions.create("push-1", partitions=1, key_serde="string", value_serde="string")
    with pytest.raises(InvalidError, match="nothing of it was ingested"):
        certify_version(backend, "users_v1", str(tmp_path / "log"), now_ms=5)
    versions.mark(made.number, State.INGESTING)
    result = PartitionResult(0, rows=2, records=2, next_offset=end, is_complete=True)
    versions.mark(made.number, State.READY, results=(result,), rows=2)
    with pytest.raises(InvalidError, match="no current version"):
        certify_version(backend, "users", str(tmp_path / "log"), now_ms=5)
    versions.swap(made.number)
    document = certify_version(backend, "users", str(tmp_path / "log"), now_ms=5)
    assert (
        document["subject"]["number"] == 1 and document["subject"]["complete"] and document["records"] == end
    )
    (checked,) = check_certificate(parse_certificate(json.dumps(document)), str(tmp_path / "log"))
    assert checked.verdict == "proven"
    with pytest.raises(InvalidError, match="no table"):
        certify_version(backend, "orders", str(tmp_path / "log"), now_ms=5)
    backend.close()
    file = tmp_path / "users.json"
    where = ["--log", str(tmp_path / "log"), "--state", str(state)]
    assert run(["certificate", "export", "users", "-o", str(file), *where]) == 0
    assert run(["certificate", "check", str(file), "--log", str(tmp_path / "log")]) == 0
