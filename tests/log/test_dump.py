"""The dump, line for line: the golden text, the canary's published lines, stop rules, flags, old messages."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path

import pytest
from kafka.record.legacy_records import LegacyRecordBatchBuilder

from tidegate.errors import InvalidError
from tidegate.log.dump.decoders import (
    find_decoder,
    parse_offsets_record,
    parse_transaction_record,
    parse_with,
)
from tidegate.log.dump.dump import DumpOptions, Target, dump
from tidegate.log.dump.json import JsonSink
from tidegate.log.dump.records import BatchWalk
from tidegate.log.dump.text import TextSink
from tidegate.log.format.batch import HEADER_SIZE, LENGTH_OVERHEAD, BatchHeader, Codec
from tidegate.log.format.compression import compress
from tidegate.testing.batches import CODECS, Rec, build_batch, canary_batch, end_transaction_batch

BASE = "00000000000000000000"

GOLDEN = """\
Dumping {path}
Log starting offset: 0
baseOffset: 10 lastOffset: 10 count: 1 baseSequence: -1 lastSequence: -1 producerId: 98323 producerEpoch: 99 \
partitionLeaderEpoch: 7 isTransactional: true isControl: true deleteHorizonMs: OptionalLong.empty position: 0 \
CreateTime: 1639133049552 size: 78 magic: 2 compresscodec: none crc: 3679295762 isvalid: true
| offset: 10 CreateTime: 1639133049552 keySize: 4 valueSize: 6 sequence: -1 headerKeys: [] \
endTxnMarker: COMMIT coordinatorEpoch: 100
baseOffset: 15 lastOffset: 37 count: 0 baseSequence: 983 lastSequence: 1005 producerId: 23423 \
producerEpoch: 145 partitionLeaderEpoch: 15 isTransactional: false isControl: false \
deleteHorizonMs: OptionalLong.empty position: 78 CreateTime: 1639133049552 size: 61 magic: 2 \
compresscodec: none crc: 1469308350 isvalid: true
baseOffset: 100 lastOffset: 101 count: 2 baseSequence: 5 lastSequence: 6 producerId: 7 producerEpoch: 0 \
partitionLeaderEpoch: 3 isTransactional: false isControl: false deleteHorizonMs: OptionalLong.empty \
position: 139 CreateTime: 1005 size: 88 magic: 2 compresscodec: none crc: 3319513931 isvalid: true
| offset: 100 CreateTime: 1000 keySize: 2 valueSize: 2 sequence: 5 headerKeys: [h,n] key: k1 payload: v1
| offset: 101 CreateTime: 1005 keySize: 2 valueSize: -1 sequence: 6 headerKeys: [] key: k2
"""


def golden_bytes() -> bytes:
    marker = end_transaction_batch(
        "COMMIT",
        producer_id=98323,
        producer_epoch=99,
        coordinator_epoch=100,
        timestamp=1639133049552,
        base_offset=10,
        leader_epoch=7,
    )
    empty = build_batch(
        [],
        base_offset=15,
        leader_epoch=15,
        producer_id=23423,
        producer_epoch=145,
        base_sequence=983,
        last_offset_delta=22,
        base_timestamp=-1,
        max_timestamp=1639133049552,
    )
    two = build_batch(
        [Rec(b"k1", b"v1", 1000, (("h", b"x"), ("n", None))), Rec(b"k2", None, 1005)],
        base_offset=100,
        leader_epoch=3,
        producer_id=7,
        producer_epoch=0,
        base_sequence=5,
    )
    return marker + empty + two


def run(*paths: Path | str, sink: str = "text", **options) -> tuple[str, str, list]:
    chosen = DumpOptions(**options)
    out, err = io.StringIO(), io.StringIO()
    into = TextSink(chosen, out, err) if sink == "text" else JsonSink(chosen, out)
    faults = dump([Target.of(str(path)) for path in paths], chosen, into)
    return out.getvalue(), err.getvalue(), faults


def rows(*paths: Path, **options) -> list[dict]:
    return [json.loads(line) for line in run(*paths, sink="json", **options)[0].splitlines()]


def write(folder: Path, content: bytes, name: str = f"{BASE}.log") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


# -- golden text ----------------------------------------------------------------------------------


def test_the_golden_file_dumps_to_the_golden_text(tmp_path):
    path = write(tmp_path, golden_bytes())
    out, err, faults = run(path, print_data=True)
    assert out == GOLDEN.format(path=path)
    assert err == f"Non-consecutive offsets in {path}\n  10 is followed by 100\n"
    assert faults == []


def test_the_canarys_lines_are_the_published_ones_in_the_seed_profile(tmp_path):
    path = write(tmp_path, b"".join(canary_batch(i) for i in range(109)))
    lines = run(path, print_data=True, profile="seed")[0].splitlines()
    assert lines[1] == "Starting offset: 0"
    assert lines[2] == (
        "baseOffset: 0 lastOffset: 0 count: 1 baseSequence: 0 lastSequence: 0 producerId: -1 producerEpoch: -1 "
        "partitionLeaderEpoch: 0 isTransactional: false isControl: false position: 0 CreateTime: 1639132508991 "
        "size: 148 magic: 2 compresscodec: NONE crc: 2142666254 isvalid: true"
    )
    assert lines[3] == (
        "| offset: 0 CreateTime: 1639132508991 keysize: -1 valuesize: 78 sequence: 0 headerKeys: [] payload: "
        '{"producerId":"strimzi-canary-client","messageId":1,"timestamp":1639132508991}'
    )
    assert lines[-2] == (
        "baseOffset: 108 lastOffset: 108 count: 1 baseSequence: 0 lastSequence: 0 producerId: -1 "
        "producerEpoch: -1 partitionLeaderEpoch: 0 isTransactional: false isControl: false position: 16164 "
        "CreateTime: 1639133049552 size: 150 magic: 2 compresscodec: NONE crc: 1749984078 isvalid: true"
    )
    assert lines[-1] == (
        "| offset: 108 CreateTime: 1639133049552 keysize: -1 valuesize: 80 sequence: 0 headerKeys: [] payload: "
        '{"producerId":"strimzi-canary-client","messageId":325,"timestamp":1639133049552}'
    )
    assert len(lines) == 2 + 2 * 109


def test_the_canarys_indexes_print_the_published_entries(tmp_path):
    content = b"".join(canary_batch(i) for i in range(109))
    write(tmp_path, content)
    index = write(tmp_path, struct.pack(">6i", 28, 4169, 56, 8364, 84, 12564), f"{BASE}.index")
    out, err, faults = run(index)
    assert out.splitlines()[1:] == [
        "offset: 28 position: 4169",
        "offset: 56 position: 8364",
        "offset: 84 position: 12564",
    ]
    assert (err, faults) == ("", [])


# -- flags and stop rules -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "records", "contents"),
    [
        pytest.param({}, False, False, id="LS-D2-no-flags"),
        pytest.param({"deep": True}, True, False, id="LS-D2-deep"),
        pytest.param({"print_data": True}, True, True, id="LS-D2-print-data"),
        pytest.param(
            {"parser": parse_with(find_decoder("IntegerDecoder"), None)}, True, True, id="LS-D2-decoder"
        ),
    ],
)
def test_records_and_their_contents_appear_only_when_asked_for(tmp_path, options, records, contents):
    path = write(tmp_path, build_batch([Rec(b"\0\0\0\7", b"v", 1), Rec(b"\0\0\0\x08", b"w", 2)]))
    lines = run(path, **options)[0].splitlines()
    assert sum(line.startswith("baseOffset") for line in lines) == 1
    assert sum(line.startswith("| offset") for line in lines) == (2 if records else 0)
    assert sum(" payload: " in line for line in lines) == (2 if contents else 0)
    if "parser" in options:
        assert lines[-1].endswith(" key: 8 payload: w")


@pytest.mark.parametrize(
    "trailing", [pytest.param(0, id="LS-D1-trimmed"), pytest.param(4096, id="LS-D1-untrimmed")]
)
def test_an_untrimmed_index_dumps_without_mismatches_and_stops_at_the_zero_tail(tmp_path, trailing):
    batches = [build_batch([Rec(None, b"x" * 50, 10 + i)], base_offset=i) for i in range(6)]
    write(tmp_path, b"".join(batches))
    size = len(batches[0])
    index = write(
        tmp_path, struct.pack(">4i", 2, 2 * size, 4, 4 * size) + bytes(8 * trailing), f"{BASE}.index"
    )
    times = write(tmp_path, struct.pack(">qiqi", 12, 2, 14, 4) + bytes(12 * trailing), f"{BASE}.timeindex")
    out, err, faults = run(index, times)
    assert [line for line in out.splitlines() if not line.startswith("Dumping")] == [
        f"offset: 2 position: {2 * size}",
        f"offset: 4 position: {4 * size}",
        "timestamp: 12 offset: 2",
        "timestamp: 14 offset: 4",
    ]
    assert (err, faults) == ("", [])
    assert run(index, times, verify_index_only=True)[0].count("\n") == 2


def test_sanity_check_prints_one_line_and_a_broken_index_is_a_fault(tmp_path):
    write(tmp_path, build_batch([Rec()]))
    good = write(tmp_path, struct.pack(">2i", 5, 0), f"{BASE}.index")
    assert run(good, index_sanity_check=True)[0] == f"Dumping {good}\n{good} passed sanity check.\n"
    bad = write(tmp_path, b"\0" * 13, f"{BASE}.timeindex")
    out, err, faults = run(bad, index_sanity_check=True)
    assert out == f"Dumping {bad}\n"
    assert "13 bytes" in str(faults[0])
    assert str(bad) in err


def test_an_empty_index_says_so_in_the_modern_profile_only(tmp_path):
    write(tmp_path, build_batch([Rec()]))
    index = write(tmp_path, b"", f"{BASE}.index")
    assert run(index, index_sanity_check=True)[0] == f"Dumping {index}\n{index} is empty.\n"
    assert run(index, profile="seed")[0] == f"Dumping {index}\n"
    times = write(tmp_path, b"", f"{BASE}.timeindex")
    assert run(times)[0] == f"Dumping {times}\n"


def test_index_mismatches_are_listed_newest_first_on_stderr(tmp_path):
    batches = [build_batch([Rec(None, b"x", 10 * i)], base_offset=i) for i in range(4)]
    write(tmp_path, b"".join(batches))
    size = len(batches[0])
    index = write(tmp_path, struct.pack(">6i", 1, size, 7, 2 * size, 9, 3 * size), f"{BASE}.index")
    out, err, _ = run(index)
    assert out.count("offset: ") == 3
    assert (
        err == f"Mismatches in :{index}\n  Index offset: 9, log offset: 3\n  Index offset: 7, log offset: 2\n"
    )


def test_time_index_faults_are_told_apart_and_in_kafkas_order(tmp_path):
    batches = [build_batch([Rec(None, b"x", 10 * i)], base_offset=i) for i in range(4)]
    write(tmp_path, b"".join(batches))
    write(tmp_path, b"", f"{BASE}.index")
    times = write(tmp_path, struct.pack(">qiqiqiqi", 10, 1, 99, 2, 30, 3, 40, 9), f"{BASE}.timeindex")
    _, err, _ = run(times)
    assert err == (
        f"Found timestamp mismatch in :{times}\n  Index timestamp: 99, log timestamp: 20\n"
        f"Found out of order timestamp in :{times}\n  Index timestamp: 30, Previously indexed timestamp: 99\n"
        "The following indexed offsets are not found in the log.\nIndexed offset: 9, found log offset: -1\n"
    )


def test_an_index_without_its_log_names_the_missing_file(tmp_path):
    index = write(tmp_path, struct.pack(">2i", 5, 0), f"{BASE}.index")
    with pytest.raises(InvalidError, match=rf"{BASE}\.log"):
        run(index)


@pytest.mark.parametrize("junk", [1, 17, 18, 40])
def test_trailing_junk_is_counted_and_only_with_the_default_limit(tmp_path, junk):
    batch = build_batch([Rec(None, b"v")])
    path = write(tmp_path, batch + batch[: min(junk, 17)] + b"\x7f" * (junk - min(junk, 17)))
    assert run(path)[0].splitlines()[-1] == f"Found {junk} invalid bytes at the end of {BASE}.log"
    assert "invalid" not in run(path, max_bytes=len(batch) + junk)[0]


def test_max_bytes_stops_before_the_batch_that_does_not_fit(tmp_path):
    batch = build_batch([Rec(None, b"v")])
    path = write(tmp_path, batch * 3)
    assert run(path, max_bytes=2 * len(batch) + 5)[0].count("baseOffset") == 2


def test_a_tail_of_zeros_is_a_fault_that_says_where_the_records_end(tmp_path):
    batch = build_batch([Rec(None, b"v")])
    path = write(tmp_path, batch + bytes(100))
    out, err, faults = run(path)
    assert out.count("baseOffset") == 1
    assert (faults[0].position, "zeros" in err) == (len(batch), True)


def test_skipping_metadata_leaves_key_and_payload_alone(tmp_path):
    data = build_batch([Rec(b"k", b"v"), Rec(None, b"w"), Rec(b"x", None)])
    marker = end_transaction_batch("COMMIT", producer_id=1, producer_epoch=0, base_offset=3)
    path = write(tmp_path, data + marker)
    lines = run(path, print_data=True, skip_record_metadata=True)[0].splitlines()
    assert lines[3:6] == ["| key: k payload: v", " payload: w", "| key: x"]
    assert lines[7] == ""


def test_unknown_files_are_ignored_aloud_and_the_others_still_dumped(tmp_path):
    other = write(tmp_path, b"", "notes.txt")
    log = write(tmp_path, build_batch([Rec()]))
    out, err, _ = run(other, log)
    assert err == f"Ignoring unknown file {other}\n"
    assert out.startswith(f"Dumping {other}\nDumping {log}\n")


def test_a_path_is_printed_as_given_and_made_absolute_for_findings(tmp_path, monkeypatch):
    write(tmp_path, build_batch([Rec(offset_delta=0), Rec(offset_delta=5)]))
    monkeypatch.chdir(tmp_path)
    out, err, _ = run(f".//{BASE}.log", deep=True)
    assert out.startswith(f"Dumping ./{BASE}.log\n")
    assert err.startswith(f"Non-consecutive offsets in {tmp_path}/./{BASE}.log\n  0 is followed by 5\n")


# -- contents -------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_is_named_and_its_records_shown(tmp_path, codec):
    path = write(tmp_path, build_batch([Rec(b"a", b"b" * 100, 7)] * 3, codec=codec, base_offset=4))
    lines = run(path, print_data=True)[0].splitlines()
    assert f"compresscodec: {codec} " in lines[2]
    assert lines[3:] == [
        f"| offset: {4 + i} CreateTime: 7 keySize: 1 valueSize: 100 sequence: -1 headerKeys: [] key: a "
        f"payload: {'b' * 100}"
        for i in range(3)
    ]


def test_labels_follow_each_batch_and_horizons_are_shown(tmp_path):
    path = write(
        tmp_path,
        build_batch([Rec(None, b"v", 5)])
        + build_batch([Rec(None, b"v", 5)], base_offset=1, log_append_time=900)
        + build_batch([Rec(b"k", None, 5)], base_offset=2, delete_horizon_ms=777),
    )
    lines = run(path, deep=True)[0].splitlines()
    assert " CreateTime: 5 " in lines[2]
    assert " LogAppendTime: 900 " in lines[4]
    assert lines[5].startswith("| offset: 1 LogAppendTime: 900 ")
    assert "deleteHorizonMs: OptionalLong[777]" in lines[6]


def test_sequences_wrap_and_a_wrong_crc_is_shown_not_hidden(tmp_path):
    batch = build_batch(
        [Rec(None, b"v"), Rec(None, b"w")], producer_id=5, producer_epoch=0, base_sequence=2**31 - 1, crc=1
    )
    lines = run(write(tmp_path, batch), deep=True)[0].splitlines()
    assert "baseSequence: 2147483647 lastSequence: 0 " in lines[2]
    assert lines[2].endswith("crc: 1 isvalid: false")
    assert [line.split("sequence: ")[1].split()[0] for line in lines[3:]] == ["2147483647", "0"]


def test_bytes_that_are_no_text_become_replacement_characters_as_in_java(tmp_path):
    path = write(tmp_path, build_batch([Rec(b"\xff\xfe", "süß".encode()), Rec(b"\xed\xa0\x80!", b"ok")]))
    lines = run(path, print_data=True)[0].splitlines()
    assert lines[3].endswith("key: \ufffd\ufffd payload: süß")
    assert lines[4].endswith("key: \ufffd! payload: ok")


def test_records_before_a_malformed_batch_are_still_printed(tmp_path):
    good, bad = build_batch([Rec(None, b"v")]), build_batch([Rec(None, b"w")], base_offset=1, count=3)
    path = write(tmp_path, good + bad + build_batch([Rec(None, b"x")], base_offset=4))
    out, err, faults = run(path, print_data=True)
    lines = out.splitlines()
    assert lines[3].endswith("payload: v")
    assert lines[-2].startswith("baseOffset: 1 ")
    assert lines[-1].endswith("payload: w")  # the one of its three records that is there
    assert faults[0].position == len(good)
    assert str(path) in err


@pytest.mark.parametrize("codec", ["none", "gzip", "zstd"])
def test_the_readable_records_of_a_damaged_batch_are_printed_as_kafkas_tool_does(tmp_path, codec):
    plain = bytearray(build_batch([Rec(b"k%d" % number, b"v%d" % number, number) for number in range(4)]))
    plain[plain.index(b"v2") - 1] = 0x7F  # the length of the third value
    body = bytes(plain[HEADER_SIZE:])
    header = BatchHeader.parse(plain)
    kind = Codec[codec.upper()]
    packed = body if kind is Codec.NONE else bytes(compress(kind, body))
    header = header._replace(attributes=int(kind), length=HEADER_SIZE + len(packed) - LENGTH_OVERHEAD)
    path = write(tmp_path, header.pack() + packed)
    out, _, faults = run(path, print_data=True)
    assert [line.split("payload: ")[1] for line in out.splitlines() if "payload" in line] == ["v0", "v1"]
    assert [fault.position for fault in faults] == [0]
    assert "count: 4" in out


def test_a_large_file_streams_in_windows_with_the_same_text(tmp_path, monkeypatch):
    content = b"".join(build_batch([Rec(None, b"v" * 300, i)] * 3, base_offset=3 * i) for i in range(200))
    path = write(tmp_path, content)
    whole = run(path, print_data=True)
    monkeypatch.setitem(BatchWalk.__init__.__kwdefaults__, "window_bytes", 1000)
    assert run(path, print_data=True) == whole


# -- other files ----------------------------------------------------------------------------------


def test_a_transaction_index_and_a_snapshot_print_one_line_an_entry(tmp_path):
    index = write(tmp_path, struct.pack(">hqqqq", 0, 7, 10, 20, 5), f"{BASE}.txnindex")
    assert run(index)[0].splitlines()[1] == (
        "version: 0 producerId: 7 firstOffset: 10 lastOffset: 20 lastStableOffset: 5"
    )
    stored = bytes.fromhex(
        "0001e41ea7f500000001000000000000000100020000000500000000000000140000000400"
        "00017da3f172d0ffffffffffffffffffffffff"
    )
    snapshot = write(tmp_path, stored, f"{21:020d}.snapshot")
    assert run(snapshot)[0].splitlines()[1] == (
        "producerId: 1 producerEpoch: 2 coordinatorEpoch: -1 currentTxnFirstOffset: OptionalLong.empty "
        "lastTimestamp: 1639133049552 firstSequence: 1 lastSequence: 5 lastOffset: 20 offsetDelta: 4 "
        "timestamp: 1639133049552"
    )
    assert run(snapshot, profile="seed")[0].splitlines()[1] == (
        "producerId: 1 producerEpoch: 2 coordinatorEpoch: -1 currentTxnFirstOffset: None firstSequence: 1 "
        "lastSequence: 5 lastOffset: 20 offsetDelta: 4 timestamp: 1639133049552"
    )


def test_a_corrupt_snapshot_is_told_on_stderr_and_is_no_failure(tmp_path):
    snapshot = write(tmp_path, b"\0\1" + bytes(8), f"{21:020d}.snapshot")
    out, err, faults = run(snapshot)
    assert (out, faults) == (f"Dumping {snapshot}\n", [])
    assert "checksum" in err


def test_control_records_of_raft_are_read_by_schema(tmp_path):
    def control(kind: int, value: bytes, offset: int) -> bytes:
        return build_batch([Rec(struct.pack(">hh", 0, kind), value)], control=True, base_offset=offset)

    path = write(
        tmp_path,
        control(2, b"", 0)
        + control(3, struct.pack(">hqb", 0, 42, 0), 1)
        + control(4, struct.pack(">hb", 0, 0), 2)
        + control(5, struct.pack(">hhb", 0, 1, 0), 3)
        + control(9, b"", 4),
        f"{7:020d}-{3:010d}.checkpoint",
    )
    lines = run(path, print_data=True)[0].splitlines()
    assert lines[1] == "Snapshot end offset: 7, epoch: 3"
    assert [line.partition("headerKeys: []")[2] for line in lines if line.startswith("|")] == [
        " controlType: LEADER_CHANGE(2)",
        ' SnapshotHeader {"version":0,"lastContainedLogTimestamp":42}',
        ' SnapshotFooter {"version":0}',
        ' KRaftVersion {"version":0,"kRaftVersion":1}',
        " controlType: UNKNOWN(9)",
    ]
    bootstrap = write(tmp_path, b"", "bootstrap.checkpoint")
    assert run(bootstrap)[0].splitlines()[1] == "KRaft bootstrap snapshot"


# -- messages of before 0.11 ----------------------------------------------------------------------


def legacy(magic: int, codec: int = 0, count: int = 3) -> bytes:
    if (magic, codec) == (0, 3):
        return _old_lz4(legacy(0, 0, count), count - 1)
    builder = LegacyRecordBatchBuilder(magic=magic, compression_type=codec, batch_size=1 << 20)
    for offset in range(count):
        builder.append(offset, timestamp=1000 + offset, key=b"k%d" % offset, value=b"v%d" % offset)
    built = bytes(builder.build())
    # A broker stamps the last inner offset on a compressed set; the builder, a producer, leaves 0.
    return struct.pack(">q", count - 1) + built[8:] if codec else built


def _old_lz4(inner: bytes, last_offset: int) -> bytes:
    """A magic 0 set whose LZ4 frame has the wrong header checksum that producers of the time wrote."""
    frame = bytearray(compress(Codec.LZ4, inner))
    frame[6] ^= 0x55
    body = struct.pack(">bbii", 0, 3, -1, len(frame)) + bytes(frame)
    return struct.pack(">qiI", last_offset, len(body) + 4, zlib.crc32(body)) + body


@pytest.mark.parametrize("codec", [0, 1, 2, 3], ids=["none", "gzip", "snappy", "lz4"])
@pytest.mark.parametrize("magic", [0, 1])
def test_old_messages_print_their_own_batch_and_record_lines(tmp_path, magic, codec):
    path = write(tmp_path, legacy(magic, codec))
    lines = run(path, print_data=True)[0].splitlines()
    label = "CreateTime" if magic else "NoTimestampType"
    batches = [line for line in lines if line.startswith("offset: ")]
    records = [line for line in lines if line.startswith("| ")]
    assert len(batches) == (1 if codec else 3)
    assert all(
        f"magic: {magic} compresscodec: {('none', 'gzip', 'snappy', 'lz4')[codec]} crc: " in b
        for b in batches
    )
    assert all(b.endswith("isvalid: true") for b in batches)
    assert f" position: 0 {label}: " in batches[0]
    for offset, line in enumerate(records):
        stamp = 1000 + offset if magic else -1
        assert line.startswith(
            f"| offset: {offset} {label}: {stamp} keySize: 2 valueSize: 2 isValid: true crc: "
        )
        assert line.endswith(f"}} key: k{offset} payload: v{offset}")
    assert len(records) == 3


def test_old_and_new_batches_may_share_a_file(tmp_path):
    path = write(tmp_path, legacy(1, count=2) + build_batch([Rec(None, b"new")], base_offset=2))
    lines = run(path, print_data=True)[0].splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["offset:", "|", "offset:", "|", "baseOffset:", "|"]


# -- internal topics ------------------------------------------------------------------------------


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def test_offset_commits_are_shown_as_json():
    key = struct.pack(">h", 1) + _string("g") + _string("t") + struct.pack(">i", 3)
    value = struct.pack(">hqi", 3, 42, -1) + _string("m") + struct.pack(">q", 99)
    assert parse_offsets_record(0, key, value) == (
        '{"type":"1","data":{"group":"g","topic":"t","partition":3}}',
        '{"version":"3","data":{"offset":42,"leaderEpoch":-1,"metadata":"m","commitTimestamp":99}}',
    )
    assert parse_offsets_record(0, key, None)[1] == "<DELETE>"
    assert parse_offsets_record(8, struct.pack(">h", 77), None) == (
        "Unknown record type 77 at offset 8, skipping.",
        None,
    )
    assert parse_offsets_record(9, key, b"\0\3")[0].startswith("Error at offset 9, skipping.")


def test_transaction_states_are_shown_as_text():
    key = struct.pack(">h", 0) + _string("tx")
    value = struct.pack(">hqhib", 0, 5, 2, 60000, 1) + struct.pack(">i", 1) + _string("t")
    value += struct.pack(">i2i", 2, 0, 1) + struct.pack(">qq", 111, 100)
    assert parse_transaction_record(0, key, value) == (
        "transaction_metadata::transactionalId=tx",
        "producerId:5,producerEpoch:2,state=Ongoing,partitions=[t-0,t-1],txnLastUpdateTimestamp=111,txnTimeoutMs=60000",
    )
    assert parse_transaction_record(0, key, None)[1] == "<DELETE>"


@pytest.mark.parametrize(
    "name", ["LongDecoder", "kafka.serializer.DefaultDecoder", "org.apache.kafka.tools.api.IntegerDecoder"]
)
def test_decoders_are_known_by_class_name(name):
    assert find_decoder(name)(b"\0" * 7 + b"\5") in ("5", "0000000000000005", "0")


def test_a_foreign_decoder_is_refused_with_the_ones_there_are():
    with pytest.raises(InvalidError, match="StringDecoder"):
        find_decoder("com.example.MyDecoder")


# -- for machines ---------------------------------------------------------------------------------


def test_json_lines_hold_batches_records_and_findings(tmp_path):
    path = write(tmp_path, golden_bytes())
    found = rows(path, print_data=True)
    assert [row["type"] for row in found] == [
        "file",
        "batch",
        "record",
        "batch",
        "batch",
        "record",
        "record",
        "offset_gap",
    ]
    assert found[2]["control"] == {"kind": "COMMIT", "type_id": 1, "coordinator_epoch": 100}
    assert found[5] | {"key": "k1", "value": "v1", "header_keys": ["h", "n"], "sequence": 5} == found[5]
    assert found[6]["value"] is None
    assert found[-1] == {"type": "offset_gap", "file": str(path), "offset": 10, "next_offset": 100}


def test_json_keeps_bytes_that_are_no_text(tmp_path):
    path = write(tmp_path, build_batch([Rec(b"\xff", b"v")]))
    assert rows(path, print_data=True)[-1]["key"] == {"base64": "/w=="}
    assert "key" not in rows(path, deep=True)[-1]


def test_json_tells_faults_and_small_files(tmp_path):
    log = write(tmp_path, build_batch([Rec()]) + bytes(50))
    index = write(tmp_path, struct.pack(">2i", 0, 0), f"{BASE}.index")
    found = rows(log, index)
    assert [row["type"] for row in found] == ["file", "batch", "fault", "file", "offset_index"]
    assert found[2]["position"] == 68
    assert found[4] == {"type": "offset_index", "offset": 0, "position": 0}
