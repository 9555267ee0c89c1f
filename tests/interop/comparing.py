"""Two partition folders beside each other: what must be equal, in bytes or as a set, and how they differ."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from raw_batches import Head, heads

BYTES = (".log", ".index", ".timeindex", ".txnindex")
SNAPSHOT_ENTRY = 46
CODEC = 0x07


def partition_files(folder: Path) -> dict[str, bytes]:
    """Kafka's files of a partition folder; whatever else lies there is not Kafka's business."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix in (*BYTES, ".snapshot") or path.suffix in (".deleted", ".swap", ".cleaned")
    }


def snapshot_entries(data: bytes) -> frozenset[bytes]:
    """The producers of a snapshot; their order says nothing."""
    version, _, count = struct.unpack_from(">hIi", data)
    if version != 1 or len(data) != 10 + SNAPSHOT_ENTRY * count:
        raise AssertionError(f"not a snapshot: {data.hex()}")
    return frozenset(data[start : start + SNAPSHOT_ENTRY] for start in range(10, len(data), SNAPSHOT_ENTRY))


def differences(ours: Path, theirs: Path, *, ignore: Iterable[str] = ()) -> list[str]:
    """What differs between two folders, one line each; nothing when they are equal."""
    left, right = partition_files(ours), partition_files(theirs)
    found = [f"only we have {name} ({len(left[name])} bytes)" for name in left.keys() - right.keys()]
    found += [f"only Kafka has {name} ({len(right[name])} bytes)" for name in right.keys() - left.keys()]
    for name in sorted(left.keys() & right.keys()):
        if name.endswith(tuple(ignore)) or left[name] == right[name]:
            continue
        if name.endswith(".snapshot"):
            if snapshot_entries(left[name]) != snapshot_entries(right[name]):
                found.append(
                    f"{name}: producers {_producers(left[name])} ≠ Kafka's {_producers(right[name])}"
                )
        else:
            found.append(f"{name}: {_explain(name, left[name], right[name])}")
    return sorted(found)


def epochs(folder: Path, log_end: int) -> list[tuple[int, int]]:
    """The leader epochs that own records, as (epoch, start offset).

    A broker that has just become leader opens an epoch at the log end; we open one with its first record.
    """
    path = folder / "leader-epoch-checkpoint"
    rows = path.read_text().split()[2:] if path.exists() else []
    entries = [(int(epoch), int(start)) for epoch, start in zip(rows[::2], rows[1::2], strict=True)]
    return [entry for entry in entries if entry[1] < log_end]


def batch_heads(folder: Path) -> list[Head]:
    """The headers of all batches of a folder."""
    return [head for path in sorted(folder.glob("*.log")) for head in heads(path.read_bytes())]


def is_compressed(folder: Path) -> bool:
    return any(head.attributes & CODEC for head in batch_heads(folder))


def cleaned_heads(folder: Path) -> list[Head]:
    """Headers without what depends on the compressor: a rebuilt batch may have another size than Java's."""
    if not is_compressed(folder):
        return batch_heads(folder)
    return [replace(head, position=0, length=0, crc=0) for head in batch_heads(folder)]


def _producers(data: bytes) -> list[tuple[int, ...]]:
    return sorted(struct.unpack(">qhiqiqiq", entry) for entry in snapshot_entries(data))


def _explain(name: str, ours: bytes, theirs: bytes) -> str:
    layout = {".index": ">ii", ".timeindex": ">qi", ".txnindex": ">hqqqq"}.get(Path(name).suffix)
    if layout is not None and not len(ours) % struct.calcsize(layout):
        left, right = list(struct.iter_unpack(layout, ours)), list(struct.iter_unpack(layout, theirs))
        return f"{left} ≠ Kafka's {right}"
    where = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    return f"{len(ours)} bytes ≠ Kafka's {len(theirs)}, first difference at {where}"
