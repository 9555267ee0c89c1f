"""Ways a partition folder can be found after a crash, and what a broker is given before it starts again.

Each damage gets a topic of its own, so one restarted broker recovers them all. `state` says how the broker
ended before the damage was done:

- `killed`: SIGKILL; indexes are preallocated, there is no marker and no recovery point;
- `unmarked`: clean shutdown, but the marker is gone; recovery points are at the log end unless the damage
  sets one;
- `clean`: clean shutdown, marker kept, so nothing is recovered unless a file is missing.

Not in the list, because a broker does not start on them at all: a batch whose offset lies before its log
segment, and a log segment whose rebuilt index needs more entries than `segment.index.bytes` holds.
"""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kafka_broker import Broker
from kafka_wire import Wire
from raw_batches import Row, batch, heads
from workloads import T0

SETTINGS = {
    "retention.ms": "-1",
    "segment.ms": str(2**63 - 1),
    "segment.bytes": "1500",
    "segment.index.bytes": "240",
    "index.interval.bytes": "200",
}
LOG_SUFFIXES = (".log", ".index", ".timeindex")


def fill_plain(_: Broker, wire: Wire, topic: str) -> None:
    """Four log segments: plain batches and those of two idempotent producers."""
    sequences = {31: 0, 32: 0}
    for index in range(33):
        rows = [
            Row(T0 + 1000 * index + delta, b"k%d" % delta, b"v%d " % index * 4)
            for delta in range(1 + index % 3)
        ]
        producer = (-1, 31, 32)[index % 3]
        if producer < 0:
            wire.produce(topic, batch(rows))
        else:
            sent = batch(rows, producer_id=producer, producer_epoch=1, base_sequence=sequences[producer])
            wire.produce(topic, sent)
            sequences[producer] += len(rows)


def fill_transactional(_: Broker, wire: Wire, topic: str) -> None:
    """Three producers in transactions, aborted ones in every log segment, one open at the end."""
    sequences = {41: 0, 42: 0, 43: 0}
    for index in range(30):
        producer = 41 + index % 3
        rows = [Row(T0 + 1000 * index, b"t%d" % producer, b"v%d " % index * 4)]
        sent = batch(
            rows,
            producer_id=producer,
            producer_epoch=0,
            base_sequence=sequences[producer],
            transactional=True,
        )
        wire.produce(topic, sent, transactional_id=f"id-{producer}")
        sequences[producer] += 1
        if index % 4 == 3:
            wire.write_marker(topic, producer_id=producer, producer_epoch=0, commit=index % 8 == 3)


@dataclass(frozen=True, slots=True)
class Damage:
    """One way to find a folder; `recovery_point` and `log_start` become checkpoint lines when given."""

    state: str
    do: Callable[[Path], object]
    fill: Callable[[Broker, Wire, str], None] = fill_plain
    recovery_point: int | None = None
    log_start: int | None = None
    config: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, str]:
        return {**SETTINGS, **self.config}


DAMAGES: dict[str, Damage] = {}


# -- what to do to files ---------------------------------------------------------------------------


def logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


def last_log(folder: Path) -> Path:
    """The last log segment that holds a batch."""
    return [path for path in logs(folder) if path.stat().st_size][-1]


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def extend(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def patch(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def sibling(log: Path, suffix: str) -> Path:
    return log.with_suffix(suffix)


def last_head_position(path: Path, back: int = 1) -> int:
    return list(heads(path.read_bytes()))[-back].position


def patch_last(field_position: int, data: bytes) -> Callable[[Path], None]:
    """Overwrite bytes of the last batch's header."""

    def act(folder: Path) -> None:
        log = last_log(folder)
        patch(log, last_head_position(log) + field_position, data)

    return act


def tear_last(keep: int | None = None, *, lose: int | None = None) -> Callable[[Path], None]:
    """Cut the last batch: keep that many of its bytes, or lose that many."""

    def act(folder: Path) -> None:
        log = last_log(folder)
        cut(log, last_head_position(log) + keep if keep is not None else log.stat().st_size - (lose or 0))

    return act


def junk(length: int, seed: int = 3) -> bytes:
    return random.Random(seed).randbytes(length)


def on_last(suffix: str, act: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: act(sibling(last_log(folder), suffix))


def on_segment(number: int, suffix: str, act: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: act(sibling(logs(folder)[number], suffix))


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def on_every(pattern: str, act: Callable[[Path], object]) -> Callable[[Path], None]:
    def on_each(folder: Path) -> None:
        for path in list(folder.glob(pattern)):
            act(path)

    return on_each


def every(*patterns: str) -> Callable[[Path], None]:
    """Remove every file of these patterns."""

    def act(folder: Path) -> None:
        for pattern in patterns:
            on_every(pattern, Path.unlink)(folder)

    return act


def overwrite(length: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(junk(length))


def flip(path: Path, position: int) -> None:
    patch(path, position, bytes([path.read_bytes()[position] ^ 0x10]))


def merged(folder: Path, numbers: tuple[int, ...], suffix: str) -> None:
    """Write log segments joined into one, as a cleaner would, under the first one's name + suffix."""
    chosen = [logs(folder)[number] for number in numbers]
    base = int(chosen[0].stem)
    log, index, times = b"", b"", b""
    for path in chosen:
        shift = int(path.stem) - base
        for offset, position in struct.iter_unpack(">ii", sibling(path, ".index").read_bytes()):
            index += struct.pack(">ii", offset + shift, position + len(log))
        for time, offset in struct.iter_unpack(">qi", sibling(path, ".timeindex").read_bytes()):
            times += struct.pack(">qi", time, offset + shift)
        log += path.read_bytes()
    for kind, data in zip(LOG_SUFFIXES, (log, index, times), strict=True):
        (folder / f"{chosen[0].stem}{kind}{suffix}").write_bytes(data)


def rename_segment(folder: Path, number: int, suffix: str, kinds: tuple[str, ...] = LOG_SUFFIXES) -> None:
    log = logs(folder)[number]
    for kind in kinds:
        sibling(log, kind).rename(folder / f"{log.stem}{kind}{suffix}")


def copy_as(folder: Path, number: int, stem: str, kinds: tuple[str, ...] = LOG_SUFFIXES) -> None:
    """Copy files of a log segment under another base offset."""
    for kind in kinds:
        shutil.copyfile(sibling(logs(folder)[number], kind), folder / f"{stem}{kind}")


def leave_deleted(folder: Path) -> None:
    """A log segment that was being deleted."""
    copy_as(folder, 0, f"{1:020d}")
    rename_segment(folder, 1, ".deleted")


# -- the list: ended by SIGKILL --------------------------------------------------------------------


def _killed() -> None:
    def add(name: str, do: Callable[[Path], object], **more: object) -> None:
        DAMAGES[name] = Damage("killed", do, **more)  # type: ignore[arg-type]

    add("killed", lambda folder: None)
    add("killed-transactions", lambda folder: None, fill=fill_transactional)
    for keep in (1, 12, 17, 18, 60, 61):
        add(f"torn-keep-{keep}", tear_last(keep))
    add("torn-one-byte", tear_last(lose=1))
    for size in (1, 17, 18, 61, 500):
        add(f"zero-tail-{size}", on_last(".log", lambda path, size=size: extend(path, bytes(size))))
    for size in (9, 64, 700):
        add(f"junk-tail-{size}", on_last(".log", lambda path, size=size: extend(path, junk(size, size))))
    add("flip-last-batch", on_last(".log", lambda path: flip(path, path.stat().st_size - 5)))
    add("flip-second-to-last", on_last(".log", lambda path: flip(path, last_head_position(path, 2) + 70)))
    add(
        "flip-first-segment", on_segment(0, ".log", lambda path: flip(path, last_head_position(path, 3) + 65))
    )
    add("flip-first-batch", on_segment(0, ".log", lambda path: flip(path, 65)))
    add("magic-3", patch_last(16, b"\x03"))
    add("length-10", patch_last(8, struct.pack(">i", 10)))
    add("length-48", patch_last(8, struct.pack(">i", 48)))
    add("length-negative", patch_last(8, struct.pack(">i", -5)))
    add("length-huge", patch_last(8, struct.pack(">i", 2**31 - 1)))
    add("later-leader-epoch", patch_last(12, struct.pack(">i", 3)))
    add("base-offset-far", patch_last(0, struct.pack(">q", 9_000)))
    add("base-offset-overflow", patch_last(0, struct.pack(">q", 2**40)))
    add("index-junk", on_last(".index", lambda path: path.write_bytes(junk(120))))
    add("time-index-junk", on_last(".timeindex", lambda path: path.write_bytes(junk(120))))
    add("indexes-empty", on_every("*.*index", lambda path: cut(path, 0)))
    add(
        "indexes-two-bytes",
        on_every("*.*index", lambda path: path.write_bytes(b"xy")),
    )
    add("indexes-gone", every("*.index", "*.timeindex"))
    add("snapshots-gone", every("*.snapshot"))
    add("snapshot-torn", on_every("*.snapshot", lambda path: cut(path, 31)))
    add(
        "snapshot-zeros",
        on_every("*.snapshot", lambda path: path.write_bytes(bytes(56))),
    )
    add(
        "snapshot-stray",
        lambda folder: shutil.copy(max(folder.glob("*.snapshot")), folder / f"{7:020d}.snapshot"),
    )
    add(
        "active-gone",
        lambda folder: on_every(f"{logs(folder)[-1].stem}.log", Path.unlink)(folder),
    )
    add("active-log-empty", on_last(".log", lambda path: cut(path, 0)))
    add("middle-log-empty", on_segment(1, ".log", lambda path: cut(path, 0)))
    add("epochs-gone", every("leader-epoch-checkpoint"))
    add(
        "epochs-beyond-end",
        lambda folder: (folder / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n1 5000\n"),
    )
    add("start-beyond-end", on_segment(1, ".log", lambda path: extend(path, junk(40))), log_start=60)
    add("transactions-index-gone", every("*.txnindex"), fill=fill_transactional)
    add(
        "transactions-torn",
        lambda folder: cut(last_log(folder), last_log(folder).stat().st_size - 100),
        fill=fill_transactional,
    )
    add("deleted-leftovers", leave_deleted)
    add("base-offset-repeated", patch_last(0, struct.pack(">q", 61)))
    add("preallocated", lambda folder: None, config={"preallocate": "true"})
    add(
        "preallocated-torn",
        lambda folder: patch(last_log(folder), 600, bytes(900)),
        config={"preallocate": "true"},
    )
    add("transactions-index-junk", on_every("*.txnindex", overwrite(68)), fill=fill_transactional)
    add("snapshot-empty", on_every("*.snapshot", lambda path: cut(path, 0)))
    add("snapshots-deleted", on_every("*.snapshot", lambda path: path.rename(f"{path}.deleted")))
    add("several-bad-batches", lambda folder: [flip(log, 65) for log in logs(folder)])
    add("middle-segment-gone", lambda folder: every(f"{logs(folder)[1].stem}.*")(folder))
    add("first-segment-gone", lambda folder: every(f"{logs(folder)[0].stem}.*")(folder))
    add("append-time", lambda folder: None, config={"message.timestamp.type": "LogAppendTime"})


# -- the list: clean, the marker gone --------------------------------------------------------------


def _unmarked() -> None:
    def add(name: str, do: Callable[[Path], object], **more: object) -> None:
        DAMAGES[name] = Damage("unmarked", do, **more)  # type: ignore[arg-type]

    add("unmarked", lambda folder: None)
    add("unmarked-recovery-point-0", lambda folder: None, recovery_point=0)
    add("unmarked-torn", tear_last(lose=20))
    add("below-recovery-point-flip", on_segment(0, ".log", lambda path: flip(path, 65)))
    add("recovery-point-0-flip", on_segment(1, ".log", lambda path: flip(path, 65)), recovery_point=0)
    add("below-recovery-point-index-gone", on_segment(0, ".index", remove))
    add("below-recovery-point-index-junk", on_segment(0, ".index", lambda path: path.write_bytes(junk(24))))
    add("recovery-point-beyond-end", tear_last(lose=1), recovery_point=5_000)
    add("recovery-point-middle-snapshots-gone", every("*.snapshot"), recovery_point=30)
    add(
        "unmarked-preallocated-zeros",
        on_last(".log", lambda path: extend(path, bytes(3000))),
        recovery_point=0,
    )


# -- the list: clean, the marker there -------------------------------------------------------------


def _clean() -> None:
    def add(name: str, do: Callable[[Path], object], **more: object) -> None:
        DAMAGES[name] = Damage("clean", do, **more)  # type: ignore[arg-type]

    def swap_half_cleaned(folder: Path) -> None:
        merged(folder, (0, 1), ".cleaned")
        merged(folder, (2,), ".swap")

    def swap_with_deleted(folder: Path) -> None:
        merged(folder, (0, 1), ".swap")
        for number in (1, 0):
            rename_segment(folder, number, ".deleted")

    def swap_part_final(folder: Path) -> None:
        swap_with_deleted(folder)
        log = next(folder.glob("*.log.swap"))
        log.rename(log.with_suffix(""))

    add("clean", lambda folder: None)
    add("clean-transactions", lambda folder: None, fill=fill_transactional)
    add("clean-index-gone", on_segment(1, ".index", remove))
    add("clean-active-index-gone", on_last(".index", remove))
    add("clean-time-index-gone", on_segment(1, ".timeindex", remove))
    add("clean-all-indexes-gone", every("*.index", "*.timeindex"))
    add("clean-snapshots-gone", every("*.snapshot"))
    add("clean-last-snapshot-gone", lambda folder: max(folder.glob("*.snapshot")).unlink())
    add("clean-snapshot-corrupt", lambda folder: flip(max(folder.glob("*.snapshot")), 20))
    add("clean-index-orphans", lambda folder: copy_as(folder, 0, f"{5:020d}", (".index", ".timeindex")))
    add("clean-torn", tear_last(lose=7))
    add("clean-junk-tail", on_last(".log", lambda path: extend(path, junk(12))))
    add("clean-flip", on_segment(1, ".log", lambda path: flip(path, 65)))
    add("clean-index-junk", on_segment(0, ".index", overwrite(24)))
    add("clean-index-seven-bytes", on_segment(0, ".index", lambda path: cut(path, 7)))
    add("clean-transactions-index-gone", every("*.txnindex"), fill=fill_transactional)
    add(
        "clean-transactions-index-stale",
        on_every("*35.txnindex", lambda path: path.write_bytes(struct.pack(">hqqqq", 0, 41, 0, 3, 4))),
        fill=fill_transactional,
    )
    add("clean-epochs-gone", every("leader-epoch-checkpoint"))
    add("clean-first-segment-gone", lambda folder: every(f"{logs(folder)[0].stem}.*")(folder))
    add("clean-preallocated", lambda folder: None, config={"preallocate": "true"})
    add("swap-cleaned-only", lambda folder: merged(folder, (0, 1), ".cleaned"))
    add("swap-half-cleaned", swap_half_cleaned)
    add("swap-complete", lambda folder: merged(folder, (0, 1), ".swap"))
    add("swap-with-deleted", swap_with_deleted)
    add("swap-part-final", swap_part_final)
    add("clean-start-inside", lambda folder: None, log_start=20)
    add("clean-start-at-end", lambda folder: None, log_start=64)


_killed()
_unmarked()
_clean()
