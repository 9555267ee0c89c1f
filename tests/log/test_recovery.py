"""Safe recovery: a torn tail is cut, damage is kept, and what is sound is served around it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from log_partitions import Place, one_record
from tidegate.errors import CorruptError
from tidegate.log.fetch import Isolation
from tidegate.log.log import Log
from tidegate.log.partition import PartitionLog
from tidegate.log.recovery import SafeRecovery

SIZE = 72  # one_record's


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def crashed(place: Place, count: int = 10, **settings: int) -> Path:
    """A log of `count` batches of one record, left as SIGKILL would; the path of its last `.log`."""
    log = place.open(**settings)
    for _ in range(count):
        log.append(one_record())
    log.flush()
    path = log.active_segment.path
    log.close(clean=False)
    return path


def safely(
    place: Place, *, durable: int, acknowledged: int | None = None
) -> tuple[PartitionLog, SafeRecovery]:
    recovery = SafeRecovery(place.files, durable, durable if acknowledged is None else acknowledged)
    return place.open(clean=False, recovery=recovery), recovery


def flip(path: Path, position: int, bit: int = 1) -> bytes:
    """Damage one bit; the whole file as it is afterwards."""
    content = bytearray(path.read_bytes())
    content[position] ^= bit
    path.write_bytes(content)
    return bytes(content)


def readable(log: PartitionLog) -> list[int]:
    """Offsets of all batches that can be fetched, one at a time."""
    found = []
    for offset in range(log.log_start_offset, log.log_end_offset):
        try:
            data = log.fetch(offset, max_bytes=1, isolation=Isolation.LOG_END).data
        except CorruptError:
            continue
        found.append(int.from_bytes(data[:8]))
    return found


@pytest.mark.parametrize("cut", [1, 10, 17, 61, 71])
def test_a_torn_last_batch_is_cut_when_it_was_never_acknowledged(place: Place, cut: int) -> None:
    path = crashed(place)
    path.write_bytes(path.read_bytes()[:-cut])
    log, recovery = safely(place, durable=9)
    assert (log.log_end_offset, recovery.damages, log.read_only_reason) == (9, [], None)
    log.append(one_record())
    assert log.log_end_offset == 10


def test_a_torn_last_batch_that_was_synced_is_damage(place: Place) -> None:
    path = crashed(place)
    before = path.read_bytes()[:-5]
    path.write_bytes(before)
    log, recovery = safely(place, durable=10)
    assert path.read_bytes() == before
    assert [(damage.position, damage.offset) for damage in recovery.damages] == [(9 * SIZE, 9)]
    assert readable(log) == list(range(9))
    with pytest.raises(CorruptError, match=r"read-only: .* is damaged at position 648"):
        log.append(one_record())


@pytest.mark.parametrize("position", [0, 8, 11, 16, 17, 21, 40, 57, 65])
def test_a_flip_in_the_middle_keeps_every_other_batch_readable(place: Place, position: int) -> None:
    """Offset, length, magic, CRC, attributes, timestamps, count, record: Kafka would cut six good batches."""
    path = crashed(place)
    before = flip(path, 4 * SIZE + position, 0x40 if position == 0 else 2)
    log, recovery = safely(place, durable=10)
    assert path.read_bytes() == before, "damage is never cut"
    assert log.log_end_offset == 10
    assert [damage.resume_offset for damage in recovery.damages] == [5]
    assert set(readable(log)) >= {0, 1, 2, 3, 5, 6, 7, 8, 9}
    assert log.read_only_reason is not None
    assert "verify" in log.read_only_reason


@pytest.mark.parametrize("byte", range(8))
@pytest.mark.parametrize("batch", [0, 4, 9])
def test_a_flipped_offset_is_damage_though_no_checksum_covers_it(place: Place, batch: int, byte: int) -> None:
    path = crashed(place)
    before = flip(path, batch * SIZE + byte, 0x20)
    log, recovery = safely(place, durable=10)
    assert path.read_bytes() == before
    assert len(recovery.damages) == 1
    assert log.log_end_offset == (9 if batch == 9 else 10)
    assert [offset for offset in readable(log) if offset != batch] == [n for n in range(10) if n != batch]


def test_reading_into_damage_names_the_place_and_where_to_go_on(place: Place) -> None:
    path = crashed(place)
    flip(path, 4 * SIZE + 8, 0x40)  # the length
    log, _ = safely(place, durable=10)
    with pytest.raises(CorruptError, match="reading can go on at 5") as caught:
        log.fetch(4, max_bytes=1000, isolation=Isolation.LOG_END)
    assert (caught.value.path, caught.value.position) == (path, 4 * SIZE)


def test_damage_in_an_older_segment_does_not_take_the_younger_ones_along(place: Place) -> None:
    crashed(place, 10, segment_bytes=3 * SIZE)
    first = place.folder / f"{3:020d}.log"
    flip(first, SIZE + 30)
    log, recovery = safely(place, durable=10)
    assert [segment.base_offset for segment in log.segments] == [0, 3, 6, 9]
    assert log.log_end_offset == 10
    assert [damage.offset for damage in recovery.damages] == [4]


def test_a_hole_in_what_nobody_was_promised_is_cut_and_kept_beside_the_log(place: Place) -> None:
    """Power loss may keep a later page and lose an earlier one; none of it was acknowledged."""
    path = crashed(place)
    content = flip(path, 6 * SIZE + 30)
    log, recovery = safely(place, durable=6)
    assert recovery.damages == []
    assert log.log_end_offset == 6
    kept = place.folder / f"{path.name}.{6 * SIZE}.cut"
    assert kept.read_bytes() == content[6 * SIZE :]


def test_what_was_acknowledged_without_a_sync_is_not_cut_while_it_has_sound_followers(place: Place) -> None:
    path = crashed(place)
    flip(path, 6 * SIZE + 30)
    _, recovery = safely(place, durable=6, acknowledged=10)
    assert [damage.offset for damage in recovery.damages] == [6]


def test_a_preallocated_tail_of_zeros_is_no_damage(place: Place) -> None:
    path = crashed(place)
    path.write_bytes(path.read_bytes() + bytes(5000))
    log, recovery = safely(place, durable=10)
    assert (log.log_end_offset, recovery.damages) == (10, [])


def test_recovering_twice_changes_nothing_more(place: Place) -> None:
    path = crashed(place)
    flip(path, 4 * SIZE + 30)
    safely(place, durable=10)[0].close(clean=False)
    before = {name: (place.folder / name).read_bytes() for name in place.names()}
    safely(place, durable=10)[0].close(clean=False)
    assert {name: (place.folder / name).read_bytes() for name in place.names()} == before


def test_kafkas_recovery_cuts_but_keeps_a_copy_of_the_sound_batches_it_takes_along(place: Place) -> None:
    path = crashed(place)
    content = flip(path, 4 * SIZE + 30)
    log = place.open(clean=False, recovery="kafka")
    assert log.log_end_offset == 4
    assert (place.folder / f"{path.name}.{4 * SIZE}.cut").read_bytes() == content[4 * SIZE :]


def test_a_log_hurt_while_its_writer_was_dead_still_answers_and_refuses_writes(tmp_path: Path) -> None:
    """Through `Log`: the durable end comes from the watermark file the dead writer left."""
    script = (
        "import os, sys, pyarrow as pa, tidegate as tg\n"
        "log = tg.Log(sys.argv[1]); log.create_topic('orders')\n"
        "log.writer('orders', batch_records=1).write(pa.table({'value': [b'x' * 20] * 5}))\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "log")], check=True, timeout=600)
    path = tmp_path / "log" / "orders-0" / f"{0:020d}.log"
    before = flip(path, len(path.read_bytes()) // 2)
    with Log(tmp_path / "log") as log, pytest.raises(CorruptError, match="read-only"):
        log.writer("orders").write(pa.table({"value": [b"y"]}))
    assert path.read_bytes() == before
