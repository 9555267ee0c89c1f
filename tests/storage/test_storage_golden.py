"""Files of each format version, written once and kept: every later release reads them, and writes the newest alike.

Published objects are of version 1, manifests of version 1 or 2, packs of versions 1 to 3 (version 2 is read by
`test_earlier_slots`).

`python tests/storage/test_storage_golden.py` writes them anew, which is right only together with a new version number.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from storage_oracles import write_pack
from tidegate.clock import ManualClock
from tidegate.randomness import SeededRandomness
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.backends.sealed import pack_name, seal_published, unseal_published
from tidegate.storage.index import RunEntry, StoredRef
from tidegate.storage.manifest import Manifest, ManifestChain, StoreState, Token
from tidegate.storage.pack import PackCache, PackReader, Slot
from tidegate.storage.runs.build import build_runs
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Merge, StoreSpec

FOLDER = Path(__file__).parents[1] / "fixtures" / "storage-1"
NEWER = FOLDER.with_name("storage-2")
NEWEST = FOLDER.with_name("storage-3")
PROGRESS = {"state/progress/orders": b"x"}
TASK = "shop/orders/0"
SPEC = StoreSpec(
    "orders", Merge.LAST, pa.schema([("amount", pa.float64()), ("note", pa.string())]), bucket_ms=1000
)
PACK = pack_name(TASK, "orders", 1000, "golden")


def golden_run() -> Run:
    rows = pa.record_batch(
        {
            "key": pa.array([b"alice", b"bob", b"alice", b""], pa.binary()),
            "ts": pa.array([1000, 1500, 1999, 1000], pa.int64()),
            "seq": pa.array([0, 1, 2, 3], pa.int64()),
            "deleted": pa.array([False, False, True, False]),
            "amount": pa.array([1.5, None, 2.5, -0.0], pa.float64()),
            "note": pa.array(["a", "ä", None, ""], pa.string()),
        }
    )
    (run,) = build_runs(SPEC, rows, first_seq=None, max_rows=100)
    return run


def golden_manifests() -> list[Manifest]:
    entries = [
        RunEntry(b * 1000, 1, 4, 3, 100, 100, b * 1000, b * 1000 + 9, stored=StoredRef(PACK, b + 2))
        for b in range(-2, 20)
    ]
    first = Manifest(TASK, 1, {"orders": StoreState("f00d", 4, 2, entries)}, {"time": b"\1", **PROGRESS})
    changed = [
        *entries[1:-1],
        RunEntry(19_000, 3, 1, 1, 9, 9, 19_000, 19_000, base=True, stored=StoredRef(PACK, 77)),
    ]
    return [first, Manifest(TASK, 2, {"orders": StoreState("f00d", 5, 3, changed)}, PROGRESS)]


def write_all(backend: StorageBackend) -> dict[str, bytes]:
    """The bytes of every kind of file."""
    write_pack(backend, TASK, SPEC, 1000, [golden_run()], PACK)
    chain = ManifestChain(backend, TASK)
    tokens = [chain.write(manifest, "golden") for manifest in golden_manifests()]
    return {
        "pack": backend.read(PACK).to_pybytes(),
        "manifest-full": backend.read(tokens[0].manifest).to_pybytes(),
        "manifest-delta": backend.read(tokens[1].manifest).to_pybytes(),
        "token": tokens[1].encode(),
        "published": seal_published("t/current", "nonce", b"bytes"),
    }


def memory() -> MemoryBackend:
    return MemoryBackend(clock=ManualClock(), randomness=SeededRandomness(1))


@pytest.mark.parametrize("folder", [FOLDER, NEWEST], ids=["version 1", "version 3"])
def test_packs_of_earlier_releases_are_read(folder: Path) -> None:
    backend = memory()
    backend.put(PACK, [(folder / "pack").read_bytes()])
    loaded = PackCache(backend).load(TASK, SPEC, StoredRef(PACK, 0))
    assert loaded.rows.equals(golden_run().rows)
    assert loaded.directory.equals(golden_run().directory)


def test_what_version_1_wrote_is_still_read() -> None:
    backend = memory()
    token = Token.decode((FOLDER / "token").read_bytes())
    assert (token.kind, token.task, token.number) == ("memory", TASK, 2)
    backend.put(token.manifest.replace("002-", "001-"), [(FOLDER / "manifest-full").read_bytes()])
    backend.put(token.manifest, [(FOLDER / "manifest-delta").read_bytes()])
    chain, manifest = ManifestChain.load(backend, token)
    assert len(chain.names()) == 2
    expected = golden_manifests()[1]
    orders = [(each.bucket, each.order, each.stored) for each in manifest.stores["orders"].entries]
    assert orders == [(each.bucket, each.order, each.stored) for each in expected.stores["orders"].entries]
    assert dict(manifest.extras) == PROGRESS, "version 1 kept it beside the runs"

    assert unseal_published("t/current", (FOLDER / "published").read_bytes()).data == b"bytes"


def test_the_same_content_still_gives_the_same_bytes() -> None:
    written = write_all(memory())
    for name in ("manifest-full", "manifest-delta", "token"):
        assert written[name] == (NEWER / name).read_bytes(), name
    assert written["published"] == (FOLDER / "published").read_bytes()
    # Arrow's own bytes, of slots and of the columns in the foot, may change with its release; nothing else may.
    reader = PackReader(pa.py_buffer(written["pack"]), PACK)
    golden = PackReader(pa.py_buffer((NEWEST / "pack").read_bytes()), PACK)
    (slot,), (expected,) = reader.foot.slots, golden.foot.slots
    assert (slot.position, *facts(slot)) == (expected.position, *facts(expected))
    assert (reader.foot.head, reader.foot.fingerprint) == (golden.foot.head, golden.foot.fingerprint)
    assert written["pack"][: slot.position] == (NEWEST / "pack").read_bytes()[: slot.position]


def facts(slot: Slot) -> tuple[int, ...]:
    return slot.bucket, slot.rows, slot.keys, slot.min_ts, slot.max_ts


if __name__ == "__main__":
    files = write_all(memory())
    (NEWEST / "pack").write_bytes(files["pack"])
    for file in ("manifest-full", "manifest-delta", "token"):
        (NEWER / file).write_bytes(files[file])
