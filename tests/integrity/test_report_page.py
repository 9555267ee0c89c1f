"""The audit as a page: whole, self-contained, and safe whatever names and messages say."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.cli.main import run
from tidegate.clock import ManualClock
from tidegate.files import Files
from tidegate.integrity import report_page
from tidegate.integrity.report import BY_METADATA, AuditReport, PartitionAudit
from tidegate.integrity.report_page import page
from tidegate.integrity.verdicts import Verdict
from tidegate.log.catalog import TopicPartition
from tidegate.log.checkpoints import CleanerCheckpoint
from tidegate.log.format.batch import iter_headers
from tidegate.log.log import Log
from tidegate.log.verify.findings import Severity
from tidegate.log.verify.scan import Compaction, PartitionTarget
from tidegate.log.verify.verify import PartitionReport, Report
from tidegate.testing.faults import FailAt

NOW_MS = 1_767_225_600_000
HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202egnp\udcff\n"
VOID = {"meta", "br", "img", "link"}


class Page(HTMLParser):
    """The tags, attributes and visible text of a page; fails where tags do not match."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.sections: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log with a clean topic, and a copy of it with holes, changes, repeats and a broken batch."""
    folder = tmp_path / "log"
    with Log(folder, durability="os") as log:
        for topic in ("orders", "broken"):
            log.create_topic(topic, 1)
        rows = pa.table({"key": [b"k%d" % n for n in range(50)], "value": [b"v%d" % n for n in range(50)]})
        for _ in range(2):
            with log.writer("orders", integrity=True) as sender:
                sender.write(rows)
        sent = (
            log.reader("orders", control_records=True)
            .read_all()
            .select(("key", "value", "headers", "timestamp"))
        )
        changed = sent.to_pylist()
        changed[7]["value"] = b"other"
        changed[30], changed[31] = changed[31], changed[30]
        del changed[20], changed[60]
        with log.writer("broken", batch_records=10) as writer:
            writer.write(pa.Table.from_pylist(changed, sent.schema))
    path = next((folder / "broken-0").glob("*.log"))
    content = bytearray(path.read_bytes())
    starts = [start for start, _ in iter_headers(bytes(content))]
    content[starts[9] + 70] ^= 1
    path.write_bytes(content)
    return folder


def shown(folder: Path, topic: str, tmp_path: Path, *options: str) -> tuple[int, str]:
    file = tmp_path / f"{topic}.html"
    code = run(["verify", topic, "--log", str(folder), "--html", str(file), "-q", *options])
    return code, file.read_text(encoding="utf-8")


def test_a_clean_topic_says_so_in_one_sentence(folder: Path, tmp_path: Path) -> None:
    code, html = shown(folder, "orders", tmp_path)
    found = Page(html)
    assert code == 0
    assert "✓ Nothing wrong found in 104 records of 1 partition; 100 % were checked" in found.text
    assert 'class="health good"' in html
    assert "Found by" not in found.text and "Expected gaps" not in found.text
    assert found.text.count("orders-0") == 3, "two producers and the partition"


def test_every_fault_of_the_report_is_on_the_page(folder: Path, tmp_path: Path, capsys: Any) -> None:
    code, html = shown(folder, "broken", tmp_path, "--format", "json")
    report = json.loads(capsys.readouterr().out)
    found = Page(html)
    assert code == 1 and 'class="health bad"' in html
    assert {finding["kind"] for finding in report["findings"]} >= {"corrupt", "missing", "duplicate"}
    for finding in report["findings"]:
        message = finding["message"].removeprefix(BY_METADATA)
        assert " ".join(message.split()) in found.text
        assert finding["offset"] is None or str(finding["offset"]) in found.text
    assert "Found by integrity metadata" in found.text and "Found by native evidence" in found.text
    for producer in report["integrity"]["partitions"][0]["producers"]:
        assert producer["producer"] in found.text
        for offsets in producer["first_offsets"].values():
            assert ", ".join(map(str, offsets)) in found.text
    assert "damage from offset" in found.text


def test_no_name_becomes_markup_and_nothing_unprintable_passes(tmp_path: Path) -> None:
    report, integrity = hostile(tmp_path)
    html = page(report, integrity, where=HOSTILE, now_ms=NOW_MS)
    html.encode("utf-8")
    found = Page(html)
    assert found.tags["script"] == 0 and "alert" not in str(found.attributes)
    assert not any(name.startswith("on") for name, _ in found.attributes)
    assert not [char for char in html if not char.isprintable() and char != "\n"]
    assert found.text.count("<script>alert(1)<") == html.count("&lt;script&gt;") >= 8
    assert r"\x1b[31m\u202egnp\udcff\n" in found.text


def hostile(folder: Path) -> tuple[Report, AuditReport]:
    """Reports in which every text from outside wants to be markup."""
    target = PartitionTarget(
        folder, TopicPartition(HOSTILE, 0), Compaction.UNKNOWN, HOSTILE, log_start=0, acknowledged=0
    )
    partition = PartitionReport(target, records=3, first_offset=0, next_offset=3)
    for severity, start in ((Severity.FAULT, BY_METADATA), (Severity.FAULT, ""), (Severity.NOTICE, "")):
        path = folder / "x-0" / HOSTILE.replace("/", "_")
        partition.findings.add(
            "corrupt", path, start + HOSTILE, HOSTILE, severity=severity, offset=1, producer=HOSTILE
        )
    audit = PartitionAudit(HOSTILE, 0, compaction=HOSTILE, unread=HOSTILE, managed=3)
    audit.compacted.count, audit.compacted.first, audit.compacted.reason = 1, [2], HOSTILE
    tally = audit._tally(HOSTILE)
    for each in (tally, audit.total):
        each.add(Verdict.CORRUPT, 3)
        each.note(Verdict.CORRUPT, [0, 1, 2])
    return Report([partition]), AuditReport([audit])


def test_the_page_needs_nothing_but_itself(folder: Path, tmp_path: Path) -> None:
    for topic in ("orders", "broken"):
        _, html = shown(folder, topic, tmp_path)
        found = Page(html)
        assert not re.search(r"https?:|//[a-z]|url\(|@import", html, re.IGNORECASE)
        assert not {"script", "link", "img", "iframe", "a", "form"} & set(found.tags)
        assert not {"src", "href", "srcset"} & {name for name, _ in found.attributes}
        assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes


def test_the_page_is_for_light_and_dark_and_for_a_phone(folder: Path, tmp_path: Path) -> None:
    _, html = shown(folder, "broken", tmp_path)
    assert "@media (prefers-color-scheme: dark)" in html and 'name="color-scheme"' in html
    assert 'name="viewport" content="width=device-width' in html and "@media (max-width:" in html
    light, dark = (set(re.findall(r"(--[a-z-]+): #", part)) for part in html.split("prefers-color-scheme", 1))
    assert light == dark, "each colour has its twin"
    assert set(re.findall(r"var\((--[a-z-]+)\)", html)) <= light
    assert "data-label=" in html, "narrow tables name their cells"


def test_expected_gaps_stand_there_with_their_reason(tmp_path: Path) -> None:
    clock = ManualClock()
    with Log(tmp_path / "log", clock=clock, durability="os") as log:
        settings = {"cleanup.policy": "compact", "min.compaction.lag.ms": "0"}
        log.create_topic("orders", 1, config=settings)
        log.create_topic("sent", 1)
        with log.writer("sent", integrity=True) as sender:
            sender.write(pa.table({"key": [b"k%d" % n for n in range(9)], "value": [b"v"] * 9}))
        sent = (
            log.reader("sent", control_records=True)
            .read_all()
            .select(("key", "value", "headers", "timestamp"))
        )
        with log.writer("orders") as writer:
            writer.write(pa.concat_tables([sent[:4], sent[6:]]))
        CleanerCheckpoint(log.path, files=log.files, clock=clock).put("orders", 0, 9)
    code, html = shown(tmp_path / "log", "orders", tmp_path)
    found = Page(html)
    assert code == 0 and "Expected gaps" in found.text
    assert "health unsure" in html and "below offset 9, so loss there would not show" in found.text
    assert "cleanup.policy=compact, min.compaction.lag.ms=0" in found.text


def test_what_was_not_read_is_said(folder: Path, tmp_path: Path) -> None:
    code, html = shown(folder, "orders", tmp_path, "--shallow")
    assert code == 0 and "integrity metadata was not read" in Page(html).text
    report, integrity = hostile(tmp_path)
    report.partitions[0].findings.counts.clear()
    assert 'class="health unsure"' in page(report, integrity, where="x", now_ms=NOW_MS)
    interrupted = Page(page(report, integrity, where="x", now_ms=NOW_MS, interrupted=True))
    assert "The audit was interrupted: not all was read." in interrupted.text
    assert "There are no records to check" in Page(page(Report(), None, where="x", now_ms=NOW_MS)).text


def test_of_many_producers_those_with_faults_come_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report_page, "MOST_ROWS", 2)
    audit = PartitionAudit("orders", 0)
    for number in range(5):
        audit._tally(f"producer-{number}").add(Verdict.OK, 3)
    audit.producers["producer-4"].add(Verdict.MISSING, 1)
    text = Page(page(Report(), AuditReport([audit]), where="x", now_ms=NOW_MS)).text
    assert "5 producers; here are the 2 with the most faults" in text
    assert "producer-4" in text and "producer-3" not in text


def test_the_file_is_replaced_whole_or_not_at_all(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    _, before = shown(folder, "orders", tmp_path)
    effects: list[str] = []
    watching = Files.__init__

    def watched(self: Files, watch: Any = None) -> None:
        watching(self, lambda effect: effects.append(effect.kind) if effect.mutates else None)

    monkeypatch.setattr(Files, "__init__", watched)
    assert shown(folder, "orders", tmp_path)[0] == 0
    assert effects.count("rename") == 1 and "sync" in effects
    for number in range(1, len(effects) + 1):
        failing = FailAt(number)
        monkeypatch.setattr(Files, "__init__", lambda self, watch=None, to=failing: watching(self, to))
        assert (
            run(["verify", "broken", "--log", str(folder), "--html", str(tmp_path / "orders.html"), "-q"])
            == 3
        )
        now = (tmp_path / "orders.html").read_text(encoding="utf-8")
        assert "Audit of orders" in now or now.endswith("</html>\n")
        assert [each.name for each in tmp_path.iterdir() if each.name.startswith("orders")] == ["orders.html"]
    assert before.endswith("</html>\n")


def test_a_folder_that_is_not_there_is_said_before_anything_is_read(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run(["verify", "orders", "--log", str(folder), "--html", str(tmp_path / "no" / "x.html")]) == 2
    told = capsys.readouterr()
    assert "does not exist; create it first" in told.err and told.out == ""
