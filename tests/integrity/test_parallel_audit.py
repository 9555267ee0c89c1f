"""An audit in ranges says what the serial one says, whatever is damaged and wherever it is cut."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.clock import ManualClock
from tidegate.integrity import partition_audit
from tidegate.integrity.audit import Cutting, FullReport, audit
from tidegate.integrity.control_records import Push
from tidegate.integrity.fault_injection import DamageKind, break_topic
from tidegate.integrity.header import ChecksumType, ControlType, Stamp
from tidegate.integrity.partition_audit import judged_through_reader
from tidegate.integrity.sender import ChainLimits
from tidegate.integrity.state import Manifest, Sent
from tidegate.log.log import Log
from tidegate.log.verify import ranges, scan
from tidegate.testing.batches import Rec, build_batch, end_transaction_batch

NOW_MS = 1_800_000_000_000
TOPICS = 240
GROUPS = 8
DAMAGES = ("drop", "repeat", "flip", "swap", "reorder", "truncate-tail", "forget-producer", "future-clock")


class Travelling:
    """A runner in this process: items and results are sent as Spark or another process would get them, in any order."""

    workers = 3

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.folded = 0

    def run(self, work: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        shuffled = self._chance.sample(list(items), len(items))
        self.folded += work is not partition_audit.audit_range
        for item in shuffled:
            yield pickle.loads(pickle.dumps(work(pickle.loads(pickle.dumps(item)))))


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of some KiB then have several windows, as large ones do."""
    for module in (scan, ranges):
        monkeypatch.setattr(module, "WINDOW_BYTES", 900)


# -- random topics -----------------------------------------------------------------------------------


def records(streams: Any, chance: random.Random) -> list[Any]:
    """Chains of several producers, interleaved; maybe a push with its manifest; maybe plain records between."""
    parts, sent = [], []
    for number in range(chance.randint(1, 4)):
        kind = chance.choice([ChecksumType.ADHASH2, ChecksumType.ADHASH2, *ChecksumType])
        pen = streams.Pen(number + 1, kind, time=streams.NOW - chance.choice([0, 0, 2]) * streams.HOUR)
        rows = [row for _ in range(chance.randint(1, 3)) for row in pen.chain_of(chance.randint(0, 14))]
        if chance.random() < 0.3:
            rows = rows[: chance.randint(1, len(rows))]
        elif rows:
            sent.append(Sent(pen.guid, pen.chain, pen.sequence - 1, pen.checksum, pen.data))
        parts.append(rows)
    mixed: list[Any] = []
    while any(parts):
        mixed.append(chance.choice([part for part in parts if part]).pop(0))
    for _ in range(chance.choice([0, 0, 3, 12])):
        mixed.insert(chance.randint(0, len(mixed)), streams.Row(None, b"k", b"plain"))
    for _ in range(chance.choice([0, 0, 2])):
        mixed.insert(chance.randint(0, len(mixed)), streams.Pen().heartbeat())
    if chance.random() < 0.3:
        driver = streams.Pen(9)
        end = driver.start(), driver.start_push(), driver.end_push(Manifest.of(sent)), driver.end()
        mixed = [*end[:2], *mixed, *end[2:], *(streams.Pen(8).chain_of(4) if chance.random() < 0.5 else [])]
    return mixed


def damage(streams: Any, chance: random.Random, rows: list[Any], kind: str) -> None:
    """What `tidegate break` does, and worse."""
    at = chance.randrange(len(rows))
    row = rows[at]
    guid = None if row.stamp is None else row.stamp.guid
    behind = [n for n in range(at, len(rows)) if rows[n].stamp is not None and rows[n].stamp.guid == guid]
    match kind:
        case "drop":
            del rows[at : at + chance.choice([1, 1, 3])]
        case "repeat":
            rows[at:at] = [row] * chance.choice([1, 1, 40])
        case "flip" if row.value:
            rows[at] = row._replace(value=bytes([row.value[0] ^ 1]) + row.value[1:])
        case "swap":
            other = chance.randrange(len(rows))
            rows[at], rows[other] = (
                row._replace(key=rows[other].key, value=rows[other].value),
                rows[other]._replace(key=row.key, value=row.value),
            )
        case "reorder":
            other = min(len(rows) - 1, at + chance.randint(1, 9))
            rows[at], rows[other] = rows[other], rows[at]
        case "truncate-tail":
            for number in reversed(behind):
                del rows[number]
        case "forget-producer":
            rows[:] = [each for each in rows if each.stamp is None or each.stamp.guid != guid] or [row]
        case "future-clock" if row.stamp is not None:
            rows[at] = row.stamped(timestamp=row.stamp.timestamp + 86_400_000)
        case "bit" if row.stamp is not None:
            data = bytearray(row.stamp.to_bytes())
            data[chance.randrange(1, 40)] ^= 1 << chance.randrange(8)
            rows[at] = row._replace(stamp=Stamp.from_bytes(bytes(data)))
        case "after-end" if row.stamp is not None and row.stamp.control == ControlType.END_OF_CHAIN:
            rows.insert(at + 1, row.stamped(kind=0, control=255, sequence=row.stamp.sequence + 1))
        case _:
            rows.insert(at, streams.Row(None, b"k", b"v", extra=(("div", b"short"),)))
    if not rows:
        rows.append(row)


class NativeProducers:
    """Producer ids, epochs and sequences for batches, with a fault now and then; and transactions."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._sequences: dict[int, int] = {}
        self._open: set[int] = set()
        self.faulty = chance.random() < 0.4

    def fields(self, count: int) -> dict[str, Any]:
        chance = self._chance
        if chance.random() < 0.3:
            return {}
        number = chance.randint(1, 3)
        sequence = self._sequences.get(number, 0)
        if self.faulty and chance.random() < 0.08:
            sequence = max(0, sequence + chance.choice([-count, -1, 1, 5]))
        self._sequences[number] = sequence + count
        transactional = number == 3
        if transactional:
            self._open.add(number)
        return {
            "producer_id": 1000 + number,
            "producer_epoch": 0,
            "base_sequence": sequence,
            "transactional": transactional,
        }

    def marker(self, offset: int) -> bytes | None:
        if not self._open or self._chance.random() < 0.6:
            return None
        self._open.clear()
        kind = self._chance.choice(["COMMIT", "ABORT"])
        return end_transaction_batch(kind, producer_id=1003, producer_epoch=0, base_offset=offset)


def write_partition(folder: Path, rows: Sequence[Any], chance: random.Random, first: int) -> None:
    """Batches of the records in a few log segments, as a broker's folder has them."""
    folder.mkdir(parents=True)
    offset, number, native = first, 0, NativeProducers(chance)
    content, base = bytearray(), first
    thins = chance.random() < 0.15
    while number < len(rows):
        chosen = rows[number : number + chance.randint(1, 7)]
        number += len(chosen)
        given = [
            Rec(row.key, row.value, row.time, tuple((each["key"], each["value"]) for each in row.headers))
            for row in chosen
        ]
        fields = native.fields(len(given))
        if thins and len(given) > 2:
            del given[1]
            given = [
                Rec(one.key, one.value, one.timestamp, one.headers, offset_delta=place + (place > 0))
                for place, one in enumerate(given)
            ]
        codec = chance.choice(["none", "none", "lz4", "zstd"])
        content += build_batch(
            given, base_offset=offset, codec=codec, last_offset_delta=len(chosen) - 1, **fields
        )
        offset += len(chosen)
        if (marker := native.marker(offset)) is not None:
            content += marker
            offset += 1
        if chance.random() < 0.08:
            (folder / f"{base:020d}.log").write_bytes(content)
            content, base = bytearray(), offset
    (folder / f"{base:020d}.log").write_bytes(content)


def spoil(folder: Path, chance: random.Random) -> None:
    """Damage of the bytes themselves."""
    path = chance.choice(sorted(folder.glob("*.log")))
    data = bytearray(path.read_bytes())
    if not data:
        return
    match chance.randrange(6):
        case 0 | 1:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case 2:
            del data[chance.randrange(len(data)) :]
        case 3:
            at = chance.randrange(len(data))
            data[at : at + chance.randint(1, 400)] = b""
        case 4:
            data += bytes(chance.randint(1, 300))
        case 5:
            at = chance.randrange(len(data))
            data[at:at] = bytes(chance.getrandbits(8) for _ in range(chance.randint(1, 50)))
    path.write_bytes(data)


def make_topic(streams: Any, chance: random.Random, log: Path) -> None:
    for partition in range(chance.choice([1, 1, 2])):
        rows = records(streams, chance)
        for _ in range(chance.choice([0, 0, 1, 1, 2, 3])):
            damage(streams, chance, rows, chance.choice([*DAMAGES, "bit", "after-end", "malformed"]))
        folder = log / f"orders-{partition}"
        write_partition(folder, rows, chance, first=chance.choice([0, 0, 0, 500]))
        for _ in range(chance.choice([0, 0, 0, 1, 2])):
            spoil(folder, chance)
    if chance.random() < 0.4:
        cleaned = chance.random() < 0.5
        lines = ["0", "1", "orders 0 5"] if cleaned else ["0", "0"]
        (log / "cleaner-offset-checkpoint").write_text("\n".join(lines) + "\n")


def same(parallel: FullReport, serial: FullReport) -> None:
    assert parallel.native.partitions == serial.native.partitions
    assert parallel.native.general == serial.native.general
    assert parallel.metadata == serial.metadata
    assert parallel.as_dict() == serial.as_dict()


def compare(log: Path, chance: random.Random, now_ms: int, where: str | None = None) -> FullReport:
    serial = audit(where or str(log), log=log, now_ms=now_ms)
    for cuts in (
        lambda _, size: [chance.randrange(1, max(2, size)) for _ in range(chance.randint(0, 6))],
        lambda _, size: range(1, size, 400),
    ):
        cutting = Cutting(cuts=cuts)
        parallel = audit(
            where or str(log), log=log, now_ms=now_ms, runner=Travelling(chance), cutting=cutting
        )
        same(parallel, serial)
    assert serial.metadata is not None
    for native, metadata in zip(serial.native.partitions, serial.metadata.partitions, strict=True):
        assert metadata == judged_through_reader(native, now_ms), "one pass says what a reader's pass says"
    return serial


@pytest.mark.parametrize("group", range(GROUPS))
def test_ranges_cut_anywhere_give_the_serial_report(streams: Any, group: int, tmp_path: Path) -> None:
    chance = random.Random(group)
    seen = {"clean": 0, "native": 0, "metadata": 0, "tolerated": 0, "skipped": 0}
    for number in range(TOPICS // GROUPS):
        log = tmp_path / f"{number}"
        make_topic(streams, chance, log)
        report = compare(log, chance, streams.NOW + chance.choice([0, 1]) * streams.HOUR)
        assert report.metadata is not None
        seen["clean"] += report.native.all_findings().faults == 0
        seen["metadata"] += report.metadata.faults > 0
        seen["native"] += report.native.all_findings().has("corrupt")
        seen["tolerated"] += any(each.compacted.count for each in report.metadata.partitions)
        seen["skipped"] += any(each.skipped for each in report.metadata.partitions)
    assert min(seen.values()) > 0, seen


@pytest.mark.parametrize("kind", list(DamageKind), ids=lambda kind: kind.value)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_kind_of_break_in_a_log_of_ours(kind: DamageKind, seed: int, tmp_path: Path) -> None:
    """A push with its manifest, two tasks and a driver, then live records; segments rolled, indexes and seals there."""
    chance = random.Random(seed)
    with Log(tmp_path / "log", durability="os", clock=ManualClock(NOW_MS)) as log:
        log.create_topic("orders", 2, {"segment.bytes": 5000, "compression.type": "uncompressed"})
        limits = ChainLimits(max_age=0, max_records=23)
        push = Push(log.writer("orders", integrity={"limits": limits}))
        push.start()
        sent: dict[int, list[Sent]] = {0: [], 1: []}
        for task in range(2):
            sender = log.writer("orders", integrity={"limits": limits})
            for number in range(2):
                keys = [b"%d-%d" % (task, n) for n in range(80)]
                sender.write(pa.table({"key": keys, "value": keys}), partition=number)
            sender.close()
            for number, each in sender.sent().items():
                sent[number].append(each)
        push.end({number: Manifest.of(each) for number, each in sent.items()})
        push.sender.close()
        with log.writer("orders", integrity={"limits": limits}) as live:
            live.write(pa.table({"key": [b"live"] * 60, "value": [b"v"] * 60}))
        break_topic(log, "orders", kind, into=tmp_path / "broken", seed=seed)
    before = audit("orders", log=tmp_path / "log", now_ms=NOW_MS)
    assert before.native.all_findings().faults == 0
    report = compare(tmp_path / "broken", chance, NOW_MS, "orders")
    assert report.metadata is not None
    assert report.native.all_findings().total > 0 or kind is DamageKind.TRUNCATE_TAIL


def test_sound_ranges_are_not_read_again(
    streams: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the equality above would prove nothing about summaries; and one fault costs one range."""
    pen = streams.Pen()
    rows = [row for _ in range(30) for row in pen.chain_of(9)]
    read: list[int] = []

    class Counted(partition_audit.JudgingTap):
        def __init__(self, plan: Any, audit: Any, state: Any = None) -> None:
            super().__init__(plan, audit, state)
            if state is not None:
                read.append(state.next_offset)

    monkeypatch.setattr(partition_audit, "JudgingTap", Counted)
    for name, lost in (("sound", None), ("damaged", 200)):
        chosen = rows if lost is None else rows[:lost] + rows[lost + 1 :]
        write_partition(tmp_path / name / "orders-0", chosen, random.Random(3), first=0)
        log = tmp_path / name
        cutting = Cutting(cuts=lambda _, size: range(700, size, 700))
        parallel = audit(
            str(log), log=log, now_ms=NOW_MS, runner=Travelling(random.Random(1)), cutting=cutting
        )
        same(parallel, audit(str(log), log=log, now_ms=NOW_MS))
        ranges_read = set(read)
        assert len(ranges_read) == (0 if lost is None else 1), ranges_read
        assert parallel.metadata is not None and parallel.metadata.managed == len(chosen)
        read.clear()


def test_a_batch_inside_a_record_is_not_taken_for_the_start_of_a_range(streams: Any, tmp_path: Path) -> None:
    """A sound batch in a value looks like one of the file; where a range is cut inside it, nobody is fooled."""
    inner = build_batch([Rec(b"inner", b"x" * 40, 5)], base_offset=3)
    rows = [streams.Row(None, b"k", inner * 3) for _ in range(12)]
    folder = tmp_path / "orders-0"
    folder.mkdir()
    content = b"".join(
        build_batch([Rec(row.key, row.value, row.time)], base_offset=number)
        for number, row in enumerate(rows)
    )
    (folder / f"{0:020d}.log").write_bytes(content)
    serial = audit(str(tmp_path), log=tmp_path, now_ms=NOW_MS)
    assert serial.native.records == 12 and serial.native.all_findings().faults == 0
    for cut in range(1, len(content), 173):
        cutting = Cutting(cuts=lambda _path, _size, cut=cut: [cut])
        runner = Travelling(random.Random(cut))
        same(audit(str(tmp_path), log=tmp_path, now_ms=NOW_MS, runner=runner, cutting=cutting), serial)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_many_more_topics(streams: Any, seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    for number in range(100):
        make_topic(streams, chance, tmp_path / f"{number}")
        compare(tmp_path / f"{number}", chance, streams.NOW)
