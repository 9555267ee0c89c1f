"""Records of any bytes are stored, judged, counted and shown as a plain loop does it; see `hostile_records.py`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from forked_cases import told
from hostile_records import REFUSED
from tidegate.cli.main import run
from tidegate.errors import CorruptError
from tidegate.integrity.certificates import parse_certificate
from tidegate.integrity.header import ChainOrigin
from tidegate.log.catalog import Catalog
from tidegate.log.seals import Seal

SCRIPT = Path(__file__).parents[1] / "hostile_records.py"
DEEP = b"[" * 100_000


def swept(folder: Path, cases: int, seed: int) -> Counter[int]:
    lines = told(SCRIPT, folder, cases, seed)
    assert len(lines) == cases
    for line in lines:
        assert line["ended"] == "exit" and line["code"] in (0, REFUSED), line
        assert "Traceback" not in line["said"], line
    return Counter(line["code"] for line in lines)


def test_R_34_records_of_any_bytes(tmp_path: Path, tally: Any) -> None:
    codes = swept(tmp_path, 4, seed=3)
    assert codes[0] >= 1
    tally(4, detected=codes[REFUSED])


@pytest.mark.soak
def test_R_34_hundreds_of_topics_of_any_bytes(tmp_path: Path, tally: Any) -> None:
    codes = swept(tmp_path, 150, seed=4)
    tally(150, detected=codes[REFUSED])


def test_a_record_that_is_nested_too_deep_does_not_keep_an_app_from_starting(tmp_path: Path) -> None:
    with tg.Log(tmp_path / "log") as log:
        log.create_topic("any")
        with log.writer("any") as writer:
            writer.write(pa.table({"key": [b"k", b"k"], "value": [b'{"amount": 2}', DEEP]}))
    app = tg.App("deep", data=tmp_path)
    stream = app.stream("any", value=tg.Json(amount="double"), on_error="keep")
    stream.window(tg.Tumbling("1d")).agg(total=tg.sum("amount")).to_table("days")
    app.run("local", until="caught_up")
    with app.open_table("days") as table:
        assert [row["total"] for row in table.to_arrow().to_pylist()] == [2.0]
        assert table.dead_letters().column("reason").to_pylist() == ["not read: nested too deep"]


def test_nothing_else_that_reads_json_fails_on_what_is_nested_too_deep(tmp_path: Path) -> None:
    from fastcrc import crc32

    sealed = DEEP + b"\ncrc32c:%08x\n" % crc32.iscsi(DEEP)
    with pytest.raises(CorruptError, match="right checksum and cannot be read"):
        Catalog.from_bytes(sealed, tmp_path / "tidegate.topics")
    with pytest.raises(CorruptError, match="right checksum and cannot be read"):
        Seal.from_bytes(sealed, tmp_path / "orders-0" / "0.seal")
    with pytest.raises(tg.TidegateError, match="this is no certificate"):
        parse_certificate(DEEP)
    assert ChainOrigin.from_bytes(DEEP) is None
    assert ChainOrigin.from_bytes(b'{"host": "h", "pid": 1e999, "app": "a"}') is None


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b'{"version": 1}', b'{"version": 1, "topics": 3, "removing": []}']
)
def test_a_catalog_or_seal_with_a_right_checksum_and_other_content_is_damage(
    body: bytes, tmp_path: Path
) -> None:
    from fastcrc import crc32

    sealed = body + b"\ncrc32c:%08x\n" % crc32.iscsi(body)
    for kind in (Catalog, Seal):
        with pytest.raises(CorruptError):
            kind.from_bytes(sealed, tmp_path / "orders-0" / "file")


def test_names_of_files_that_are_no_text_are_shown(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(["log", "dump", "nothing-\udcff\udcfe"]) == 0
    assert b"Dumping nothing-\\udcff\\udcfe" in capfdbinary.readouterr().out
