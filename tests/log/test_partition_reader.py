"""Readers in one process while another appends, rolls, ages, compacts and dies."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.clock import ManualClock
from tidegate.errors import CorruptError, InvalidError, OffsetOutOfRangeError, UnavailableError
from tidegate.files import Effect, Files
from tidegate.log.log import Log
from tidegate.log.reader import Reader
from tidegate.log.watermark import WATERMARK_NAME, WatermarkFile, boot_mark, read_watermark
from tidegate.testing.batches import Rec, build_batch

WRITER = """
import sys
import pyarrow as pa
from tidegate.log.log import Log
from tidegate.log.maintenance import Housekeeping
from tidegate.testing.batches import Rec, build_batch

log = Log(sys.argv[1], durability="os")
writer = log.writer("t", batch_records=10)

def write(first, last):
    writer.write(pa.table({
        "key": [b"%d" % (number % 7) for number in range(first, last)],
        "value": [b"%d" % number for number in range(first, last)],
    }), partition=0)

def unacknowledged(number):
    log.partition("t", 0).append(build_batch([Rec(b"k", b"%d" % number, 1)]))

def delete_before(offset):
    log.partition("t", 0).delete_records_before(offset)
    return log.partition("t", 0).log_start_offset

def clean():
    keeper = Housekeeping(log, broker=log.contents.broker_config(), files=log.files, clock=log.clock,
                          randomness=log.randomness)
    return [outcome.compaction is not None for outcome in keeper.clean_once()]

def compact():
    log.partition("t", 0).roll()
    return clean()

def stream(first, last, step):
    for number in range(first, last, step):
        write(number, min(number + step, last))

print("ready", flush=True)
for line in sys.stdin:
    name, *numbers = line.split()
    if name == "delete_topic":
        log.delete_topic("t")
        print("done", flush=True)
    elif name == "close":
        log.close()
        print("done", flush=True)
    else:
        print(globals()[name](*map(int, numbers)), flush=True)
"""


class Elsewhere:
    """A writer in another process, told what to do."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def begin(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def tell(self, command: str) -> str:
        self.begin(command)
        return self._answer()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def start(tmp_path: Path, **settings: str) -> Iterator[Elsewhere]:
    path = tmp_path / "log"
    with Log(path) as log:
        log.create_topic("t", 1, {"segment.bytes": "1KiB", "index.interval.bytes": "64", **settings})
    writer = Elsewhere(path)
    try:
        yield writer
    finally:
        writer.process.kill()
        writer.process.wait(60)
        for stream in (writer.process.stdin, writer.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Elsewhere]:
    yield from start(tmp_path)


@pytest.fixture
def compacting(tmp_path: Path) -> Iterator[Elsewhere]:
    settings = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0", "file.delete.delay.ms": "0"}
    yield from start(tmp_path, **settings)


def values(batch: pa.RecordBatch | pa.Table) -> list[int]:
    return [int(value) for value in batch.column("value").to_pylist()]


def follow(reader: Reader, last: int) -> Iterator[list[int]]:
    """What arrives, until the value `last` did."""
    seen = -1
    while seen < last:
        batch = reader.poll("20s")
        assert batch is not None, f"nothing came after {seen}"
        numbers = values(batch)
        seen = numbers[-1]
        yield numbers


def test_a_reader_follows_appends_and_rolls_and_sees_whole_batches_only(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    with Log(tmp_path / "log", read_only=True) as log, log.reader("t", max_bytes=700) as reader:
        elsewhere.begin("stream 0 3000 30")
        seen: list[int] = []
        for numbers in follow(reader, 2999):
            assert len(numbers) % 10 == 0
            seen += numbers
        assert seen == list(range(3000))
        assert len(list((tmp_path / "log" / "t-0").glob("*.log"))) > 10


def test_what_is_not_acknowledged_is_not_seen_and_what_is_survives_the_writers_death(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    elsewhere.tell("write 0 25")
    elsewhere.tell("unacknowledged 777")
    with Log(tmp_path / "log", read_only=True) as log:
        assert values(log.reader("t").read_all()) == list(range(25))
        elsewhere.kill()
        assert values(log.reader("t").read_all()) == list(range(25))
    with Log(tmp_path / "log", durability="os") as log:  # recovery keeps what was written, and shows it
        log.writer("t").write(pa.table({"key": [b"k"], "value": [b"26"]}))
        assert values(log.reader("t").read_all()) == [*range(25), 777, 26]


def test_deleted_records_are_never_returned_though_their_file_is_open(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    elsewhere.tell("write 0 200")
    with Log(tmp_path / "log", read_only=True) as log:
        reader = log.reader("t", max_bytes=200)
        first = reader.poll()
        assert first is not None
        assert values(first)[0] == 0
        assert elsewhere.tell("delete_before 105") == "105"
        elsewhere.tell("clean")
        with pytest.raises(OffsetOutOfRangeError, match="moved the log's start to 105"):
            for _ in reader:
                pytest.fail("a deleted record was returned")
        assert values(log.reader("t").read_all()) == list(range(105, 200))
        assert list((tmp_path / "log" / "t-0").glob("*.log.deleted"))


def test_a_reader_ahead_of_the_deleted_part_notices_nothing(elsewhere: Elsewhere, tmp_path: Path) -> None:
    elsewhere.tell("write 0 200")
    with Log(tmp_path / "log", read_only=True) as log:
        reader = log.reader("t", start=150, max_bytes=200)
        seen = values(reader.poll() or pytest.fail("nothing"))
        elsewhere.tell("delete_before 120")
        elsewhere.tell("clean")
        elsewhere.tell("write 200 230")
        while (batch := reader.poll()) is not None:
            seen += values(batch)
        assert seen == list(range(150, 230))


def test_a_reader_goes_on_in_the_new_files_after_a_compaction(compacting: Elsewhere, tmp_path: Path) -> None:
    compacting.tell("write 0 300")
    with Log(tmp_path / "log", read_only=True) as log:
        reader = log.reader("t", max_bytes=150)
        seen = values(reader.poll() or pytest.fail("nothing"))
        position = reader.positions()[0]
        assert compacting.tell("compact") == "[True]"
        compacting.tell("write 300 310")
        rest: list[int] = []
        for batch in reader:
            rest += values(batch)
        assert seen == list(range(len(seen)))
        assert rest == values(log.reader("t", start=position).read_all())
        assert rest[-10:] == list(range(300, 310))
        assert len(rest) < 100  # what compaction removed is not shown from the old, still open file
        survivors = {number % 7: number for number in range(300)}
        assert set(survivors.values()) <= set(rest)


def test_a_reader_never_skips_while_compactions_and_appends_go_on(
    compacting: Elsewhere, tmp_path: Path
) -> None:
    """The newest value of each key is there whenever it is looked for, in the middle of swaps too."""
    compacting.tell("write 0 200")
    with Log(tmp_path / "log", read_only=True) as log:
        for turn in range(6):
            first = 200 + 100 * turn
            compacting.begin(f"write {first} {first + 100}")
            compacting.begin("compact")
            for _ in range(12):
                table = log.reader("t").read_all()
                offsets = table.column("offset").to_pylist()
                assert offsets == sorted(set(offsets))
                newest: dict[bytes, int] = {}
                for key, value in zip(table.column("key").to_pylist(), values(table), strict=True):
                    newest[key] = value
                assert len(newest) == 7
                assert min(newest.values()) >= max(newest.values()) - 7
            compacting._answer()
            compacting._answer()


def test_a_writer_that_died_in_the_middle_of_a_swap_does_not_make_readers_skip(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    elsewhere.tell("write 0 200")
    elsewhere.tell("close")
    folder = tmp_path / "log" / "t-0"
    middle = sorted(folder.glob("*.log"))[2]
    mark = WatermarkFile(Files(), folder)
    mark.begin_change()
    mark.close()
    middle.rename(middle.with_name(middle.name + ".swap"))  # between two names
    clock = ManualClock()
    with Log(tmp_path / "log", read_only=True, clock=clock) as log:
        seen: list[int] = []
        with pytest.raises(UnavailableError, match="open the log for writing once"):
            for batch in log.reader("t"):
                seen += values(batch)
        assert seen == list(range(int(middle.name[:20])))
        assert clock.monotonic_ms() >= 10_000


def test_a_topic_deleted_meanwhile_is_said_to_be(elsewhere: Elsewhere, tmp_path: Path) -> None:
    elsewhere.tell("write 0 50")
    with Log(tmp_path / "log", read_only=True) as log:
        reader = log.reader("t", max_bytes=100)
        assert reader.poll() is not None
        elsewhere.tell("delete_topic")
        with pytest.raises(InvalidError, match="was deleted while it was being read"):
            for _ in range(5):
                reader.poll()


def after_power_cut(folder: Path, *, high_watermark: int, durable_end: int) -> None:
    """What a machine that lost its power may find: a watermark of an earlier start, behind or ahead."""
    mark = read_watermark(Files(), folder)
    assert mark is not None
    old = mark._replace(
        sequence=mark.sequence + 1,
        high_watermark=high_watermark,
        durable_end=durable_end,
        boot=boot_mark(Files()) ^ 1,
    )
    (folder / WATERMARK_NAME).write_bytes(old.pack() * 2)


@pytest.mark.skipif(boot_mark(Files()) == 0, reason="this system does not tell one start from another")
def test_after_a_power_cut_readers_see_what_is_sound_and_at_least_what_was_durable(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    elsewhere.tell("write 0 100")
    elsewhere.kill()
    folder = tmp_path / "log" / "t-0"
    last = max(folder.glob("*.log"))
    after_power_cut(folder, high_watermark=40, durable_end=40)  # behind
    with Log(tmp_path / "log", read_only=True) as log:
        assert values(log.reader("t").read_all()) == list(range(100))
    after_power_cut(folder, high_watermark=500, durable_end=40)  # ahead, and never durable
    with last.open("ab") as file:
        file.write(last.read_bytes()[:200])  # and a torn tail
    with Log(tmp_path / "log", read_only=True) as log:
        assert values(log.reader("t").read_all()) == list(range(100))
    after_power_cut(folder, high_watermark=100, durable_end=100)
    content = bytearray(last.read_bytes())
    content[80] ^= 1  # what was durable is damaged
    last.write_bytes(content)
    with Log(tmp_path / "log", read_only=True) as log, pytest.raises(CorruptError):
        log.reader("t").read_all()


def test_many_readers_at_once(elsewhere: Elsewhere, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom tidegate.log.log import Log\n"
        "with Log(sys.argv[1], read_only=True) as log:\n"
        "    reader, seen = log.reader('t', max_bytes=500), []\n"
        "    while len(seen) < 1000:\n"
        "        batch = reader.poll('20s')\n"
        "        seen += batch.column('value').to_pylist()\n"
        "    print(seen == [b'%d' % n for n in range(1000)])\n"
    )
    elsewhere.begin("stream 0 1000 20")
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for reader in readers:
        output, _ = reader.communicate(timeout=600)
        assert output.strip() == "True"


def test_readers_take_no_lock_and_write_nothing(elsewhere: Elsewhere, tmp_path: Path) -> None:
    elsewhere.tell("write 0 50")
    changes: list[Effect] = []

    def watch(effect: Effect) -> None:
        if effect.mutates:
            changes.append(effect)

    with Log(tmp_path / "log", files=Files(watch)) as log:
        assert values(log.reader("t").read_all()) == list(range(50))
        assert log.partition_rows("t")[0]["high_watermark"] == 50
    assert changes == []
    mark = read_watermark(Files(), tmp_path / "log" / "t-0")
    assert mark is not None
    assert mark.high_watermark == 50


def test_what_a_broker_added_behind_our_clean_close_is_read_too(tmp_path: Path) -> None:
    """A broker keeps no watermark of ours; the sizes noted at our close tell that somebody went on."""
    with Log(tmp_path) as log:
        log.create_topic("orders")
        log.writer("orders").write(pa.table({"value": [b"ours"]}))
    last = tmp_path / "orders-0" / f"{0:020d}.log"
    last.write_bytes(
        last.read_bytes() + build_batch([Rec(value=b"the broker's")], base_offset=1, leader_epoch=1)
    )
    with Log(tmp_path, read_only=True) as log:
        assert log.reader("orders").read_all().column("value").to_pylist() == [b"ours", b"the broker's"]
