"""The audit: every planted fault found at its place, nothing found where nothing is wrong, nothing written."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from tidegate.errors import InvalidError
from tidegate.files import Effect, Files
from tidegate.log.log import Log
from tidegate.log.producer_state import BatchMetadata, Origin, ProducerEntry, encode_snapshot
from tidegate.log.verify.findings import MAX_KEPT_PER_KIND, Finding, Severity, parse_fail_on
from tidegate.log.verify.scan import Compaction
from tidegate.log.verify.verify import verify
from tidegate.testing.batches import (
    CODECS,
    Rec,
    build_batch,
    canary_batch,
    end_transaction_batch,
)

BASE = "00000000000000000000"


class Builder:
    """A partition folder written by hand: batches, the indexes they deserve, checkpoints."""

    def __init__(self, log: Path, topic: str = "t") -> None:
        self.log = log
        self.folder = log / f"{topic}-0"
        self.folder.mkdir(parents=True)
        (log / "cleaner-offset-checkpoint").write_text("0\n0\n")
        self.next_offset = 0
        self.timestamp = 1000

    def batch(self, records: int = 2, **fields) -> bytes:
        first = fields.pop("base_offset", self.next_offset)
        self.timestamp += 10
        made = [Rec(b"k", b"v%d" % (first + i), self.timestamp + i) for i in range(records)]
        built = build_batch(made, base_offset=first, leader_epoch=0, **fields)
        self.next_offset = first + fields.get("last_offset_delta", records - 1) + 1
        return built

    def sent(self, first: int, records: int = 2, producer: int = 7, epoch: int = 0, **fields) -> bytes:
        return self.batch(records, producer_id=producer, producer_epoch=epoch, base_sequence=first, **fields)

    def segment(self, *batches: bytes, base: int = 0, indexed: bool = True) -> Path:
        path = self.folder / f"{base:020d}.log"
        path.write_bytes(b"".join(batches))
        index, times, position, newest = b"", b"", 0, -1
        for number, batch in enumerate(batches):
            first, delta = struct.unpack_from(">q", batch)[0], struct.unpack_from(">i", batch, 23)[0]
            stamp = struct.unpack_from(">q", batch, 35)[0]
            if number:
                index += struct.pack(">ii", first + delta - base, position)
            if stamp > newest:
                newest = stamp
                times += struct.pack(">qi", stamp, first + delta - base)
            position += len(batch)
        if indexed:
            path.with_suffix(".index").write_bytes(index)
            path.with_suffix(".timeindex").write_bytes(times)
        return path

    def findings(self, **options) -> list[Finding]:
        return verify(str(self.folder), log=self.log, **options).all_findings().kept


@pytest.fixture
def built(tmp_path):
    return Builder(tmp_path / "log")


def kinds(findings: list[Finding]) -> list[str]:
    return [finding.kind for finding in findings]


def only(findings: list[Finding], kind: str) -> Finding:
    assert kinds(findings) == [kind], findings
    return findings[0]


# -- nothing wrong --------------------------------------------------------------------------------


def test_a_sound_partition_has_no_findings_and_its_share_of_evidence_is_told(built):
    built.segment(built.sent(0, 5), built.batch(1), built.sent(5, 4))
    report = verify(str(built.folder), log=built.log)
    assert report.all_findings().kept == []
    partition = report.partitions[0]
    assert (partition.records, partition.records_with_sequence, partition.producers) == (10, 9, 1)
    assert report.evidence == (
        "checked 90 % of records by producer sequence; 10 % carry no sequence; all batches by CRC"
    )


@pytest.mark.parametrize("codec", CODECS)
def test_compressed_batches_are_sound_too(built, codec):
    built.segment(*(built.sent(3 * i, 3, codec=codec) for i in range(5)))
    assert built.findings() == []


def test_the_canary_with_producer_minus_one_and_sequence_zero_is_sound(built):
    path = built.folder / f"{BASE}.log"
    path.write_bytes(b"".join(canary_batch(i) for i in range(109)))
    path.with_suffix(".index").write_bytes(struct.pack(">6i", 28, 4169, 56, 8364, 84, 12564))
    path.with_suffix(".timeindex").write_bytes(b"")
    report = verify(str(built.folder), log=built.log)
    assert report.all_findings().kept == []
    assert report.records_checked == 0


def test_sequences_wrap_epochs_restart_and_producers_interleave_without_a_finding(built):
    wrap = 2**31 - 2
    built.segment(
        built.sent(0, 2, producer=1),
        built.sent(0, 2, producer=2),
        built.sent(2, 1, producer=1),
        built.sent(0, 3, producer=1, epoch=1),
        built.sent(2, 1, producer=2),
        built.sent(3, 1, producer=1, epoch=1),
    )
    assert built.findings() == []
    built.next_offset = 0
    built.segment(*(built.sent((wrap + 2 * i) % 2**31, 2) for i in range(3)))
    assert only(built.findings(), "missing").offset == 0, (
        "the wrap itself is no finding, only the missing start"
    )


def test_what_compaction_leaves_behind_is_no_finding(built):
    (built.log / "cleaner-offset-checkpoint").write_text("0\n1\nt 0 90\n")
    built.segment(
        built.sent(4, 2, base_offset=10, last_offset_delta=5),
        build_batch(
            [],
            base_offset=20,
            leader_epoch=0,
            last_offset_delta=3,
            base_timestamp=-1,
            max_timestamp=1050,
            producer_id=7,
            producer_epoch=0,
            base_sequence=40,
        ),
        build_batch(
            [Rec(b"k", None, 1060, offset_delta=2)],
            base_offset=40,
            leader_epoch=0,
            last_offset_delta=4,
            delete_horizon_ms=9_999_999,
            max_timestamp=1060,
            producer_id=7,
            producer_epoch=0,
            base_sequence=0,
        ),
        build_batch([Rec(b"k", b"v", 1070)], base_offset=60, leader_epoch=0, base_sequence=0),
    )
    built.segment(base=70)
    built.segment(build_batch([Rec(b"x", b"y", 1100)], base_offset=90, leader_epoch=0), base=80)
    report = verify(str(built.folder), log=built.log)
    assert report.all_findings().kept == []
    assert report.partitions[0].compaction is Compaction.YES
    assert "compacted partitions" in report.evidence


def test_compaction_shows_itself_where_no_settings_are_known(built):
    (built.log / "cleaner-offset-checkpoint").unlink()
    built.segment(
        built.sent(0, 1),
        built.sent(9, 1, base_offset=9),
        built.sent(20, 2, base_offset=20, last_offset_delta=4),
    )
    report = verify(str(built.folder), log=built.log)
    assert report.all_findings().kept == [], "the gap in sequences was met before the evidence, and withdrawn"
    assert report.partitions[0].compaction_because == "batches hold fewer records than offsets"


def test_a_live_partition_with_preallocated_indexes_is_sound(built):
    path = built.segment(built.sent(0), built.sent(2))
    for suffix, entry in ((".index", 8), (".timeindex", 12)):
        index = path.with_suffix(suffix)
        index.write_bytes(index.read_bytes() + bytes(entry * 1000))
    assert built.findings() == []


# -- damaged bytes --------------------------------------------------------------------------------


def test_a_flipped_bit_costs_one_batch_and_the_audit_goes_on_behind_it(built):
    batches = [built.sent(2 * i) for i in range(6)]
    path = built.segment(*batches)
    damaged = bytearray(path.read_bytes())
    at = sum(map(len, batches[:2]))
    damaged[at + 70] ^= 4
    path.write_bytes(damaged)
    report = verify(str(built.folder), log=built.log)
    corrupt, missing = report.all_findings().kept
    assert (corrupt.kind, corrupt.position, corrupt.offset) == ("corrupt", at, 4)
    assert "offsets 4 to 5 cannot be read" in corrupt.message
    assert (missing.kind, missing.severity) == ("missing", Severity.WARNING), "explained by the damage"
    assert report.partitions[0].records == 10


@pytest.mark.parametrize("length", [-1, 0, 10, 48, 2**31 - 1, 5000])
def test_a_wrong_length_loses_the_way_and_the_next_sound_batch_is_found(built, length):
    batches = [built.sent(2 * i) for i in range(6)]
    path = built.segment(*batches)
    damaged = bytearray(path.read_bytes())
    at = sum(map(len, batches[:3]))
    struct.pack_into(">i", damaged, at + 8, length)
    path.write_bytes(damaged)
    report = verify(str(built.folder), log=built.log)
    assert (report.all_findings().kept[0].kind, report.all_findings().kept[0].position) == ("corrupt", at)
    assert report.partitions[0].batches == 5


@pytest.mark.parametrize(
    ("at", "value"),
    [(16, 3), (16, 255), (8, 0x7F), (11, 1)],
    ids=["magic", "magic-ff", "length", "length-low"],
)
def test_a_wrong_header_of_the_last_batch_is_damage_and_not_a_torn_tail(built, at, value):
    batches = [built.sent(2 * i) for i in range(3)]
    path = built.segment(*batches)
    damaged = bytearray(path.read_bytes())
    damaged[sum(map(len, batches[:2])) + at] = value
    path.write_bytes(damaged)
    found = built.findings()
    assert (found[0].kind, found[0].severity, found[0].offset) == ("corrupt", Severity.FAULT, 4)


def test_a_torn_tail_is_a_warning_unless_it_was_acknowledged(built):
    batches = [built.sent(2 * i) for i in range(3)]
    path = built.segment(*batches)
    path.write_bytes(b"".join(batches)[:-5])
    assert {f.severity for f in built.findings()} == {Severity.WARNING}
    assert built.findings()[0].kind == "tail"
    (built.log / "replication-offset-checkpoint").write_text("0\n1\nt 0 6\n")
    torn = built.findings()[0]
    assert (torn.kind, torn.severity, torn.offset) == ("corrupt", Severity.FAULT, 4)
    assert "offsets 4 to 5 cannot be read" in torn.message


def test_zeros_behind_the_last_batch_are_told_as_such(built):
    path = built.segment(built.sent(0))
    path.write_bytes(path.read_bytes() + bytes(500))
    assert "500 zero bytes" in only(built.findings(), "tail").message


def test_records_that_do_not_parse_behind_a_right_crc_are_found_unless_shallow(built):
    built.segment(built.sent(0), built.batch(2, count=3), built.batch(1))
    found = only(built.findings(), "corrupt")
    assert found.offset == 2
    assert built.findings(deep=False) == []


def test_old_messages_are_checked_too(built):
    from kafka.record.legacy_records import LegacyRecordBatchBuilder

    builder = LegacyRecordBatchBuilder(magic=1, compression_type=0, batch_size=1 << 20)
    for offset in range(3):
        builder.append(offset, timestamp=1000, key=b"k", value=b"v")
    built.segment(indexed=True)
    path = built.folder / f"{BASE}.log"
    path.write_bytes(bytes(builder.build()))
    assert built.findings() == []
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert built.findings()[0].position == 2 * (len(damaged) // 3)


# -- offsets --------------------------------------------------------------------------------------


def test_falling_and_overlapping_offsets_are_found_at_the_later_batch(built):
    first = built.batch(3)
    built.segment(first, built.batch(2, base_offset=1), built.batch(1, base_offset=9), indexed=False)
    found = [f for f in built.findings() if f.kind == "offset"]
    assert [(f.offset, f.position) for f in found] == [(1, len(first))]


def test_offsets_outside_their_segment_are_found(built):
    built.segment(built.batch(3), built.batch(2), indexed=False)
    built.segment(built.batch(1, base_offset=4), base=4, indexed=False)
    found = [f for f in built.findings() if f.kind == "offset"]
    assert found[0].offset == 3
    assert "not of log segment 0" in found[0].message


@pytest.mark.parametrize(
    ("known", "severity"),
    [(True, Severity.FAULT), (False, Severity.WARNING)],
    ids=["not-compacted", "unknown"],
)
def test_a_missing_segment_in_the_middle_shows_as_skipped_offsets(built, known, severity):
    if not known:
        (built.log / "cleaner-offset-checkpoint").unlink()
    built.segment(built.batch(5))
    built.segment(built.batch(5, base_offset=10), base=10)
    gap = only(built.findings(), "offset-gap")
    assert (gap.offset, gap.severity) == (5, severity)
    assert "offsets 5 to 9 are not there" in gap.message


# -- producers ------------------------------------------------------------------------------------


def test_a_gap_in_the_sequence_is_missing_records_with_their_number(built):
    built.segment(built.sent(0, 4), built.sent(10, 2))
    gap = only(built.findings(), "missing")
    assert (gap.offset, gap.producer, gap.severity) == (4, "7/0", Severity.FAULT)
    assert "6 records, numbers 4 to 9" in gap.message


def test_a_producer_that_begins_late_lost_its_first_records_unless_retention_took_them(built):
    built.segment(built.sent(4, 2))
    assert "begins with 4" in only(built.findings(), "missing").message
    (built.folder / f"{BASE}.log").unlink()
    built.next_offset = 20
    built.segment(built.sent(4, 2), base=20)
    head = only(built.findings(), "head")
    assert head.severity is Severity.NOTICE


def test_an_epoch_that_does_not_begin_with_zero_is_missing_records(built):
    built.segment(built.sent(0, 2), built.sent(3, 2, epoch=1))
    assert "3 records, numbers 0 to 2" in only(built.findings(), "missing").message


def test_a_late_batch_is_out_of_order_and_its_gap_no_loss(built):
    built.segment(built.sent(0, 2), built.sent(4, 2), built.sent(2, 2), built.sent(6, 1))
    late = only(built.findings(), "order")
    assert late.offset == 4


def test_a_gap_that_is_filled_in_part_stays_missing_for_the_rest(built):
    built.segment(built.sent(0, 2), built.sent(8, 2), built.sent(4, 2))
    found = built.findings()
    assert kinds(found) == ["order", "missing", "missing"]
    assert "numbers 2 to 3" in found[1].message
    assert "numbers 6 to 7" in found[2].message


def test_a_repeated_batch_is_a_duplicate_with_its_cause_and_not_a_gap(built):
    built.segment(built.sent(0, 2), built.sent(2, 2), built.sent(2, 2), built.sent(4, 2))
    duplicate = only(built.findings(), "duplicate")
    assert (duplicate.offset, duplicate.severity) == (4, Severity.NOTICE)
    assert "first at offset 2" in duplicate.message
    assert "same epoch" in duplicate.message


def _same_records(builder: Builder, sequence: int, producer: int, epoch: int, value: bytes) -> bytes:
    batch = build_batch(
        [Rec(b"k", value, 5000)],
        base_offset=builder.next_offset,
        leader_epoch=0,
        producer_id=producer,
        producer_epoch=epoch,
        base_sequence=sequence,
    )
    builder.next_offset += 1
    return batch


@pytest.mark.parametrize(
    ("producer", "epoch", "cause"), [(7, 1, "epoch bump"), (8, 0, "new producer")], ids=["bump", "new"]
)
def test_the_same_records_under_a_new_name_are_a_duplicate_with_that_cause(built, producer, epoch, cause):
    built.segment(
        built.sent(0, 1),
        _same_records(built, 1, 7, 0, b"paid"),
        _same_records(built, 0, producer, epoch, b"paid"),
        _same_records(built, 1, producer, epoch, b"other"),
    )
    duplicate = only(built.findings(), "duplicate")
    assert (duplicate.offset, cause in duplicate.message) == (2, True)
    assert "offset 1 again" in duplicate.message


def test_a_restart_at_zero_is_a_notice(built):
    built.segment(built.sent(0, 3), built.sent(3, 3), built.sent(0, 2), built.sent(2, 1))
    assert only(built.findings(), "restart").offset == 6


def test_a_fenced_epoch_behind_a_newer_one_is_a_fault_also_when_a_marker_bumped_it(built):
    built.segment(built.sent(0, 2, epoch=3), built.sent(0, 2, epoch=4), built.sent(2, 2, epoch=3))
    assert only(built.findings(), "epoch").offset == 4
    built.next_offset = 0
    data = built.sent(0, 2, epoch=3, transactional=True)
    marker = end_transaction_batch(
        "COMMIT", producer_id=7, producer_epoch=4, base_offset=2, leader_epoch=0, timestamp=1030
    )
    built.next_offset = 3
    built.segment(data, marker, built.sent(2, 2, epoch=3))
    assert "epoch" in kinds(built.findings())


def test_many_producers_over_many_windows_are_judged_as_in_one(built, monkeypatch):
    batches = [built.sent(2 * (i // 5), producer=i % 5) for i in range(300)]
    del batches[150]  # producer 0 loses numbers 60 and 61
    built.segment(*batches, indexed=False)
    whole = [f.as_dict() for f in built.findings()]
    monkeypatch.setattr("tidegate.log.verify.scan.WINDOW_BYTES", 700)
    assert [f.as_dict() for f in built.findings()] == whole
    missing = [f for f in whole if f["kind"] == "missing"]
    assert [(f["producer"], f["offset"]) for f in missing] == [("0/0", 310)]
    assert "numbers 60 to 61" in missing[0]["message"]


def test_more_producers_than_fit_in_memory_are_forgotten_without_a_false_alarm(built, monkeypatch):
    monkeypatch.setattr("tidegate.log.verify.producer_checks.MAX_TRACKS", 10)
    monkeypatch.setattr("tidegate.log.verify.scan.WINDOW_BYTES", 500)
    batches = [built.sent(0, producer=i) for i in range(40)] + [built.sent(2, producer=i) for i in range(40)]
    built.segment(*batches, indexed=False)
    found = [finding for finding in built.findings() if finding.kind != "index"]
    assert {finding.kind for finding in found} == {"head"}
    assert {finding.severity for finding in found} == {Severity.NOTICE}


# -- indexes and state ----------------------------------------------------------------------------


def _entry(path: Path, number: int, layout: str, *values: int) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into(layout, content, number * struct.calcsize(layout), *values)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("suffix", "number", "layout", "values", "said"),
    [
        pytest.param(".index", 1, ">ii", (5, 3), "inside a batch", id="inside"),
        pytest.param(".index", 3, ">ii", (9, 10_000), "behind the last", id="behind"),
        pytest.param(".index", 2, ">ii", (1, 5), "does not follow", id="order"),
        pytest.param(".timeindex", 1, ">qi", (1, 3), "does not follow", id="time-order"),
        pytest.param(".timeindex", 4, ">qi", (10**12, 9), "expire too late", id="time-future"),
        pytest.param(".timeindex", 4, ">qi", (1052, 90), "behind the end", id="time-behind"),
        pytest.param(".timeindex", 1, ">qi", (1012, 5), "would skip it", id="time-skips"),
    ],
)
def test_a_misleading_index_entry_is_found(built, suffix, number, layout, values, said):
    path = built.segment(*(built.batch(2) for _ in range(5)))
    index = path.with_suffix(suffix)
    content = bytearray(index.read_bytes())
    if said == "inside a batch":  # the position of a batch, plus a few bytes
        values = (values[0], struct.unpack_from(">i", content, 8 * number + 4)[0] + values[1])
    _entry(index, number, layout, *values)
    found = built.findings()
    assert all(f.kind == "index" and f.path == index for f in found)
    assert any(said in f.message for f in found), found


def test_an_index_entry_that_skips_records_is_found(built):
    path = built.segment(*(built.batch(2) for _ in range(5)))
    first = struct.unpack(">ii", path.with_suffix(".index").read_bytes()[:8])
    _entry(path.with_suffix(".index"), 0, ">ii", first[0] - 2, first[1])
    assert any("would skip records" in f.message for f in built.findings())


def test_multi_batch_entries_whose_offset_is_not_the_batchs_last_are_fine(built):
    path = built.segment(*(built.batch(2) for _ in range(5)), indexed=True)
    position = struct.unpack(">ii", path.with_suffix(".index").read_bytes()[8:16])[1]
    path.with_suffix(".index").write_bytes(struct.pack(">ii", 8, position))
    assert built.findings() == []


def test_missing_indexes_are_warnings_and_zero_tails_of_closed_ones_faults(built):
    path = built.segment(built.batch(2), built.batch(2))
    built.segment(built.batch(1), base=4)
    path.with_suffix(".timeindex").unlink()
    index = path.with_suffix(".index")
    index.write_bytes(index.read_bytes() + bytes(80))
    found = {f.path.suffix: f for f in built.findings()}
    assert found[".timeindex"].severity is Severity.WARNING
    assert (found[".index"].severity, found[".index"].position) == (Severity.FAULT, 8)
    index.write_bytes(b"\0\0")
    assert any("not a multiple of 8" in f.message for f in built.findings())


def test_aborted_transactions_and_their_index_must_agree(built):
    data = built.sent(0, 2, transactional=True)
    abort = end_transaction_batch(
        "ABORT", producer_id=7, producer_epoch=0, base_offset=2, leader_epoch=0, timestamp=1030
    )
    path = built.segment(data, abort)
    assert "was aborted but is not listed" in only(built.findings(), "index").message
    index = path.with_suffix(".txnindex")
    index.write_bytes(struct.pack(">hqqqq", 0, 7, 0, 2, 3))
    assert built.findings() == []
    index.write_bytes(struct.pack(">hqqqq", 0, 7, 1, 2, 3))
    assert "began at 1, the log says 0" in only(built.findings(), "index").message
    index.write_bytes(struct.pack(">hqqqq", 0, 9, 0, 2, 3))
    assert "where the log has none" in built.findings()[0].message


def test_an_open_transaction_is_a_notice(built):
    built.segment(built.sent(0, 2, transactional=True))
    assert only(built.findings(), "open-transaction").offset == 0


def test_snapshots_must_be_sound_and_say_what_the_log_says(built):
    built.segment(built.sent(0, 2))
    built.segment(built.sent(2, 2), base=2)
    snapshot = built.folder / f"{2:020d}.snapshot"
    entry = ProducerEntry(7, 0, -1, 1020, None, (BatchMetadata(1, 1, 1, 1011),))
    snapshot.write_bytes(encode_snapshot([entry]))
    assert built.findings() == []
    wrong = ProducerEntry(7, 0, -1, 1020, None, (BatchMetadata(0, 0, 0, 1010),))
    snapshot.write_bytes(encode_snapshot([wrong]))
    assert "the log has 1 at 1" in only(built.findings(), "snapshot").message
    snapshot.write_bytes(encode_snapshot([entry])[:-1] + b"\1")
    assert "checksum" in only(built.findings(), "snapshot").message


def test_a_leader_epoch_outside_the_crc_is_compared_with_its_checkpoint(built):
    path = built.segment(built.batch(2), built.batch(2))
    (built.folder / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
    assert built.findings() == []
    damaged = bytearray(path.read_bytes())
    damaged[15] ^= 1
    path.write_bytes(damaged)
    found = only(built.findings(), "leader-epoch")
    assert (found.offset, found.severity) == (0, Severity.WARNING)


def test_checkpoints_that_do_not_parse_are_warnings(built):
    built.segment(built.batch(1))
    (built.folder / "leader-epoch-checkpoint").write_text("7\n")
    (built.log / "replication-offset-checkpoint").write_text("0\n9\n")
    assert kinds(built.findings()) == ["checkpoint", "checkpoint"]


# -- every bit of a header ------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 54, 108], ids=["first", "middle", "last"])
def test_every_flip_of_a_canary_header_is_found_but_for_those_no_evidence_covers(built, which):
    """Base offset and leader epoch are outside the CRC: the checkpoint and the neighbours cover them."""
    content = b"".join(canary_batch(i) for i in range(109))
    path = built.folder / f"{BASE}.log"
    path.with_suffix(".index").write_bytes(b"")
    path.with_suffix(".timeindex").write_bytes(b"")
    (built.folder / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
    (built.log / "replication-offset-checkpoint").write_text("0\n1\nt 0 109\n")
    start = sum(len(canary_batch(i)) for i in range(which))
    missed = []
    for bit in range(61 * 8):
        damaged = bytearray(content)
        damaged[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        if not built.findings(deep=False):
            missed.append(bit // 8)
    negative_epoch = 12  # the sign bit makes the leader epoch negative: "none", which is legal
    assert set(missed) <= {negative_epoch}


# -- the whole --------------------------------------------------------------------------------------


def _digest(folder: Path) -> str:
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        info = path.stat()
        state.update(f"{path} {info.st_mtime_ns} {info.st_size}".encode())
        if path.is_file():
            state.update(path.read_bytes())
    return state.hexdigest()


def test_an_audit_changes_nothing_and_takes_no_lock(built):
    path = built.segment(built.sent(0), built.sent(5), indexed=False)
    path.write_bytes(path.read_bytes()[:-3])
    before = _digest(built.log)
    seen = []
    verify(str(built.log), log=built.log, files=Files(watch=seen.append))
    assert _digest(built.log) == before
    assert not [effect for effect in seen if effect.mutates]


def test_a_folder_of_topics_a_partition_and_a_bare_folder_can_be_named(built, tmp_path):
    built.segment(built.batch(1))
    other = Builder(tmp_path / "log2", "u")
    other.segment(other.batch(1))
    other.folder.rename(built.log / "u-3")
    places = [str(p.target.place) for p in verify(str(built.log), log=built.log).partitions]
    assert places == ["t-0", "u-3"]
    bare = tmp_path / "backup of monday"
    (built.log / "u-3").rename(bare)
    assert verify(str(bare), log=built.log).records == 1


def test_a_partition_that_was_never_written_is_sound_and_one_that_is_gone_is_not(tmp_path):
    log = tmp_path / "log"
    with Log(log) as made:
        made.create_topic("orders", partitions=2)
    report = verify("orders", log=log)
    assert (report.records, report.all_findings().total, report.evidence) == (0, 0, "no records to check")
    (log / "orders-1").rename(tmp_path / "elsewhere")
    gone = only(verify("orders", log=log).all_findings().kept, "corrupt")
    assert "gone" in gone.message


def test_what_is_no_log_is_refused_with_what_to_name(tmp_path):
    with pytest.raises(InvalidError, match="no partition folders"):
        verify(str(tmp_path), log=tmp_path)
    with pytest.raises(InvalidError, match="not a folder"):
        verify("no/such/folder", log=tmp_path)


def test_findings_are_counted_beyond_what_is_kept(built):
    built.segment(*(built.sent(10 * i, 1) for i in range(MAX_KEPT_PER_KIND + 150)), indexed=False)
    findings = verify(str(built.folder), log=built.log).all_findings()
    assert findings.counts["missing", Severity.FAULT] == MAX_KEPT_PER_KIND + 149
    assert len([f for f in findings.kept if f.kind == "missing"]) == MAX_KEPT_PER_KIND


def test_fail_on_takes_kinds_and_groups_and_refuses_others():
    assert parse_fail_on(["gap,corrupt"]) == {"missing", "offset-gap", "corrupt"}
    assert parse_fail_on(["none"]) == frozenset()
    assert parse_fail_on(["fault"]) is None
    with pytest.raises(InvalidError, match="there are corrupt"):
        parse_fail_on(["typo"])


# -- sound folders of a broker -------------------------------------------------------------------


def offset_commit(producer: int, records: int) -> bytes:
    """As a group coordinator writes the offsets of a transaction: with its producer, always from sequence 0."""
    return build_batch(
        [Rec(b"group-%d" % number, b"offset", 1) for number in range(records)],
        producer_id=producer,
        producer_epoch=0,
        base_sequence=0,
        transactional=True,
    )


def test_offset_commits_within_transactions_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Log(path, durability="os") as log:
        log.create_topic("__consumer_offsets", config={"segment.bytes": "900"})
        partition = log.partition("__consumer_offsets", 0)
        for number in range(30):
            producer = 4000 + number % 2
            partition.append(offset_commit(producer, 1 + number % 3), origin=Origin.COORDINATOR)
            kind: Literal["ABORT", "COMMIT"] = "ABORT" if number % 5 == 0 else "COMMIT"
            marker = end_transaction_batch(kind, producer_id=producer, producer_epoch=0, timestamp=1)
            partition.append(marker, origin=Origin.COORDINATOR)
        partition.acknowledge(sync=False)
        assert len(partition.segments) > 2
    found = verify("__consumer_offsets", log=path).all_findings()
    assert found.counts == {}


def grown(tmp_path: Path) -> tuple[Path, Callable[[], None]]:
    """A partition with an aborted transaction, and what a broker does that aborts one more."""
    path = tmp_path / "log"
    log = Log(path, durability="os")
    log.create_topic("t")
    partition = log.partition("t", 0)

    def abort() -> None:
        batch = build_batch(
            [Rec(b"k", b"v", 1)], producer_id=7, producer_epoch=0,
            base_sequence=partition.log_end_offset // 2, transactional=True,
        )  # fmt: skip
        partition.append(batch)
        marker = end_transaction_batch("ABORT", producer_id=7, producer_epoch=0, timestamp=1)
        partition.append(marker, origin=Origin.COORDINATOR)
        partition.acknowledge(sync=False)

    abort()
    return path, abort


def test_transactions_that_abort_during_an_audit_are_no_fault(tmp_path: Path) -> None:
    """The walk ends before the new marker, the transaction index is read after it."""
    path, abort = grown(tmp_path)
    left = [1]

    def watch(effect: Effect) -> None:
        if effect.kind == "open" and effect.path.suffix == ".txnindex" and left:
            left.pop()
            abort()

    found = verify("t", log=path, files=Files(watch)).all_findings()
    assert not left
    assert found.faults == 0
    assert verify("t", log=path).all_findings().faults == 0


def test_a_marker_whose_index_entry_is_still_to_be_written_is_no_fault(tmp_path: Path) -> None:
    path, abort = grown(tmp_path)
    index = path / "t-0" / f"{0:020d}.txnindex"
    before = index.read_bytes()
    abort()
    index.write_bytes(before)
    assert verify("t", log=path).all_findings().faults == 0
    index.write_bytes(b"")
    assert verify("t", log=path).all_findings().faults == 1  # the first one is behind us: its entry is lost


def test_an_index_entry_without_a_marker_is_a_fault_where_nobody_writes(tmp_path: Path) -> None:
    path, _ = grown(tmp_path)
    index = path / "t-0" / f"{0:020d}.txnindex"
    index.write_bytes(index.read_bytes() + struct.pack(">hqqqq", 0, 7, 2, 3, 0))
    assert verify("t", log=path).all_findings().faults == 1
