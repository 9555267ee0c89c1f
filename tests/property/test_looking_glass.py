"""Whatever the bytes, the dump and the audit end with an answer or a typed error, and never change a file."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.errors import TidegateError
from tidegate.log.dump.decoders import parse_offsets_record, parse_transaction_record
from tidegate.log.dump.dump import DumpOptions, Target, dump
from tidegate.log.dump.json import JsonSink
from tidegate.log.dump.text import TextSink
from tidegate.log.verify.verify import verify
from tidegate.testing.batches import CODECS, Rec, build_batch, end_transaction_batch

BASE = "00000000000000000000"


def _log() -> bytes:
    batches = [
        build_batch(
            [Rec(b"k", b"v" * 20, 1000 + i, (("h", b"x"),))] * 2,
            base_offset=2 * i,
            codec=CODECS[i % 5],
            producer_id=7,
            producer_epoch=0,
            base_sequence=2 * i,
            transactional=i > 5,
        )
        for i in range(8)
    ]
    marker = end_transaction_batch("ABORT", producer_id=7, producer_epoch=0, base_offset=16, timestamp=1010)
    return b"".join(batches) + marker


LOG = _log()
FILES = {
    ".log": LOG,
    ".index": struct.pack(">4i", 3, 100, 9, 400),
    ".timeindex": struct.pack(">qiqi", 1001, 3, 1004, 9),
    ".txnindex": struct.pack(">hqqqq", 0, 7, 12, 16, 17),
}

damage = st.lists(
    st.tuples(
        st.sampled_from(sorted(FILES)),
        st.integers(0, len(LOG) + 40),
        st.one_of(st.binary(min_size=1, max_size=12), st.just(b"\0" * 30), st.just(b"\xff" * 9)),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


def _damaged(changes) -> dict[str, bytes]:
    contents = {suffix: bytearray(content) for suffix, content in FILES.items()}
    for suffix, at, junk, insert in changes:
        content = contents[suffix]
        at %= len(content) + 1
        content[at : at if insert else at + len(junk)] = junk
    return {suffix: bytes(content) for suffix, content in contents.items()}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes=damage)
def test_any_damage_ends_in_an_answer_or_a_typed_error(changes):
    with TemporaryDirectory() as place:
        folder = Path(place) / "t-0"
        folder.mkdir()
        contents = _damaged(changes)
        for suffix, content in contents.items():
            (folder / f"{BASE}{suffix}").write_bytes(content)
        report = verify(str(folder), log=Path(place))
        assert report.partitions[0].bytes == len(contents[".log"])
        targets = [Target.of(str(folder / f"{BASE}{suffix}")) for suffix in FILES]
        for options in (DumpOptions(print_data=True), DumpOptions(deep=True, profile="seed")):
            out = io.StringIO()
            try:
                dump(targets, options, TextSink(options, out, io.StringIO()))
                dump(targets, options, JsonSink(options, io.StringIO()))
            except TidegateError:
                pass
        for suffix, content in contents.items():
            assert (folder / f"{BASE}{suffix}").read_bytes() == content


@settings(max_examples=100, deadline=None)
@given(changes=damage.map(lambda changes: [change for change in changes if change[0] == ".log"]))
def test_a_changed_log_is_never_called_sound(changes):
    content = _damaged(changes)[".log"]
    if content == LOG:
        return
    with TemporaryDirectory() as place:
        folder = Path(place) / "t-0"
        folder.mkdir()
        (Path(place) / "cleaner-offset-checkpoint").write_text("0\n0\n")
        (Path(place) / "replication-offset-checkpoint").write_text("0\n1\nt 0 17\n")
        (folder / "leader-epoch-checkpoint").write_text("0\n0\n")
        (folder / f"{BASE}.log").write_bytes(content)
        found = verify(str(folder), log=Path(place)).all_findings()
        kinds = {finding.kind for finding in found.kept if finding.path.suffix == ".log"}
        # Bytes 12 to 15 of a batch, its leader epoch, are outside every checksum; no checkpoint entry covers them.
        spared = [at for at, (old, new) in enumerate(zip(LOG, content, strict=False)) if old != new]
        if len(content) == len(LOG) and all(_is_leader_epoch(at) for at in spared):
            return
        assert kinds, "damage passed for sound"


def _is_leader_epoch(at: int) -> bool:
    position = 0
    while position < len(LOG):
        if position + 12 <= at < position + 16:
            return True
        position += struct.unpack_from(">i", LOG, position + 8)[0] + 12
    return False


@settings(max_examples=200, deadline=None)
@given(key=st.binary(max_size=40), value=st.none() | st.binary(max_size=80))
def test_internal_records_of_any_bytes_are_shown_or_refused(key, value):
    for parse in (parse_offsets_record, parse_transaction_record):
        for version in (b"", b"\0\0", b"\0\1", b"\0\2", b"\0\5"):
            try:
                shown = parse(5, version + key, value)
            except TidegateError:
                continue
            assert shown[0]
