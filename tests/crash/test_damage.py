"""One damaged file: every flipped bit is harmless, repaired or named, and never a wrong record (R-7, R-8, R-10).

A closed log of two log segments is damaged in one place and used again: opened for writing, read from the
start, looked up by time. Allowed are the right answer and a typed error; forbidden are another answer and an
error of any other kind.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.clock import ManualClock
from tidegate.errors import CorruptError, TidegateError
from tidegate.log.format.batch import BatchHeader
from tidegate.log.log import Log
from tidegate.log.verify.verify import verify
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler
from tidegate.testing.batches import CANARY_START_MS

# A damaged hint is told as a warning, which the rest of the suite treats as an error.
pytestmark = pytest.mark.filterwarnings("ignore::tidegate.errors.TidegateWarning")

RECORDS = 12
VALUES = [b"value-%02d" % number for number in range(RECORDS)]
TIMES = [CANARY_START_MS + 5000 * number for number in range(RECORDS)]


def open_log(path: Path, **options: object) -> Log:
    clock = ManualClock(CANARY_START_MS)
    return Log(path, clock=clock, scheduler=ManualScheduler(clock), randomness=SeededRandomness(1), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "log"
    with open_log(path) as log:
        log.create_topic(
            "orders", config={"segment.bytes": 600, "index.interval.bytes": 60, "retention.ms": -1}
        )
        stamps = pa.array(TIMES, pa.int64()).cast(pa.timestamp("ms", "UTC"))
        writer = log.writer("orders", batch_records=1, producer_id=7, producer_epoch=0)
        writer.write(pa.table({"value": VALUES, "timestamp": stamps}))
    assert len(list((path / "orders-0").glob("*.log"))) >= 2
    return path


def used(path: Path) -> tuple[list[bytes], list[int | None]]:
    """What a user sees: all values, and the offset of each time."""
    with open_log(path) as log:
        log.partition("orders", 0)
        view = log.view("orders", 0)
        found = [view.offset_for_time(time, view.bounds()) for time in TIMES]
        values = log.reader("orders").read_all().column("value").to_pylist()
    return values, found


RIGHT = (VALUES, list(range(RECORDS)))


def flips(content: bytes, step: int) -> Iterator[tuple[int, bytes]]:
    for bit in range(0, len(content) * 8, step):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(damaged)


def names(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def outcome(path: Path, work: Path, name: str, content: bytes | None) -> str:
    """`ok` or `detected`; anything else raises."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(path, work)
    if content is None:
        (work / name).unlink()
    else:
        (work / name).write_bytes(content)
    try:
        seen = used(work)
    except TidegateError:
        return "detected"
    assert seen == RIGHT, f"{name}: another answer"
    return "ok"


@pytest.mark.parametrize("kind", [".index", ".timeindex", ".snapshot", ".seal", "-checkpoint", "tidegate."])
def test_a_flip_in_anything_but_the_records_never_changes_an_answer(
    sound: Path, tmp_path: Path, kind: str
) -> None:
    damaged = [name for name in names(sound) if name.endswith(kind) or (kind == "tidegate." and kind in name)]
    assert damaged
    for name in damaged:
        content = (sound / name).read_bytes()
        for bit, bad in flips(content, max(1, len(content) * 8 // 40)):
            assert outcome(sound, tmp_path / "log", name, bad) in ("ok", "detected"), (name, bit)


def test_a_hint_that_is_gone_is_done_without(sound: Path, tmp_path: Path) -> None:
    for name in names(sound):
        found = outcome(sound, tmp_path / "log", name, None)
        if name.endswith(
            (".index", ".timeindex", ".seal", ".snapshot", "checkpoint", ".watermark", ".closed")
        ):
            assert found == "ok", name


@pytest.mark.parametrize("batch", [0, 5, RECORDS - 1])
def test_every_flipped_header_bit_is_named_or_harmless_and_the_audit_finds_it(
    sound: Path, tmp_path: Path, batch: int
) -> None:
    """The one stretch no read can see is the leader epoch, bytes 12 to 15; there the seal tells the audit."""
    logs = sorted((sound / "orders-0").glob("*.log"))
    size = BatchHeader.parse(logs[0].read_bytes()).size
    file = next(file for file in reversed(logs) if int(file.stem) <= batch)
    within = batch - int(file.stem)
    content = file.read_bytes()
    work = tmp_path / "log"
    for bit in range(0, 61 * 8, 3):
        damaged = bytearray(content)
        damaged[within * size + bit // 8] ^= 1 << bit % 8
        name = str(file.relative_to(sound))
        found = outcome(sound, work, name, bytes(damaged))
        assert found == "detected" or 12 <= bit // 8 < 16, f"bit {bit}"
        shutil.copytree(sound, work, dirs_exist_ok=True)
        (work / name).write_bytes(damaged)
        report = verify("orders", log=work)
        assert report.all_findings().faults, f"bit {bit} escaped the audit"


def test_what_is_sound_before_the_damage_is_handed_out_first(sound: Path, tmp_path: Path) -> None:
    work = tmp_path / "log"
    shutil.copytree(sound, work)
    file = sorted((work / "orders-0").glob("*.log"))[1]
    content = bytearray(file.read_bytes())
    content[70] ^= 1
    file.write_bytes(content)
    got: list[bytes] = []
    with open_log(work, read_only=True) as log:
        reader = iter(log.reader("orders"))
        with pytest.raises(CorruptError, match="offset") as caught:
            while True:
                got += next(reader).column("value").to_pylist()
        damaged = int(file.stem)
        assert got == VALUES[:damaged]
        assert caught.value.offset == damaged
        rest = log.reader("orders", start=damaged + 1).read_all().column("value").to_pylist()
    assert rest == VALUES[damaged + 1 :]
