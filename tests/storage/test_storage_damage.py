"""R-9 and R-10 for packs, manifests, tokens and published objects: damage is found before it is decoded.

Everything runs in this process: nothing reaches Arrow before its checksum was right, so a signal here would end
the whole run and be noticed.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from storage_oracles import write_pack
from tidegate.errors import CorruptError, InvalidError, TidegateError, UnavailableError
from tidegate.storage.backends.base import MissingObjectError, StorageBackend
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.backends.sealed import pack_name, seal_published, unseal_published
from tidegate.storage.index import RunEntry, StoredRef
from tidegate.storage.manifest import Manifest, ManifestChain, StoreState, Token
from tidegate.storage.pack import PackCache, PackReader
from tidegate.storage.runs.build import build_runs
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Merge, StoreSpec

TASK = "app/3"
SPEC = StoreSpec("s", Merge.APPEND, pa.schema([("v", pa.string())]), bucket_ms=100, segment_ms=1000)
NAME = pack_name(TASK, "s", 0, "u")


def make_runs(spec: StoreSpec = SPEC, count: int = 2, word: str = "v") -> list[Run]:
    batch = pa.record_batch(
        {
            "key": pa.array([b"a", b"b"] * count, pa.binary()),
            "ts": pa.array([i // 2 * 100 for i in range(2 * count)], pa.int64()),
            "v": pa.array([f"{word}{i}" if i % 3 else None for i in range(2 * count)], pa.string()),
        }
    )
    return build_runs(spec, batch, first_seq=0, max_rows=100)


def small_pack(name: str = NAME, *, task: str = TASK, spec: StoreSpec = SPEC, word: str = "v") -> bytes:
    backend = MemoryBackend()
    write_pack(backend, task, spec, 0, make_runs(spec, word=word), name)
    return backend.read(name).to_pybytes()


# -- the ways bytes go wrong ---------------------------------------------------------------------


def flips(content: bytes, bits: Iterator[int] | range | None = None) -> Iterator[bytes]:
    for bit in range(8 * len(content)) if bits is None else bits:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def cuts(content: bytes) -> Iterator[bytes]:
    yield from (content[:length] for length in range(len(content)))
    yield from (content[start:] for start in range(1, len(content), 7))


def extensions(content: bytes) -> Iterator[bytes]:
    noise = random.Random(5)
    for extra in range(1, 65):
        yield content + bytes(extra)
        yield content + noise.randbytes(extra)
        yield bytes(extra) + content
    yield content + content
    yield content + content[-64:]


def swaps(content: bytes, size: int = 64) -> Iterator[bytes]:
    blocks = [content[i : i + size] for i in range(0, len(content), size)]
    for i in range(len(blocks)):
        for j in range(i):
            if blocks[i] != blocks[j]:
                changed = list(blocks)
                changed[i], changed[j] = changed[j], changed[i]
                yield b"".join(changed)


def losses(content: bytes) -> Iterator[bytes]:
    """Blocks that became zeros, or hold what their neighbour holds."""
    for start in range(0, len(content), 64):
        block = content[start : start + 64]
        for other in (bytes(len(block)), b"\xff" * len(block), content[start - 64 : start]):
            if other != block and len(other) == len(block):
                yield content[:start] + other + content[start + 64 :]


WAYS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "R-9 every bit": flips,
    "R-9 every length": cuts,
    "R-9 longer": extensions,
    "R-9 swapped blocks": swaps,
    "R-9 lost blocks": losses,
}


# -- packs ---------------------------------------------------------------------------------------


def found_damage(content: bytes, good: list[Run]) -> bool:
    """Whether it is refused as a whole or in a slot; what is served all the same must be right."""
    try:
        reader = PackReader(pa.py_buffer(content), NAME)
        reader.check(TASK, SPEC)
    except CorruptError as error:
        assert NAME in str(error)
        return True
    refused = 0
    for number, run in enumerate(good):
        try:
            loaded = reader.load(number)
        except CorruptError as error:
            refused += 1
            position = reader.foot.slots[number].position
            assert error.position == position
            assert f"slot {number} " in str(error) and f"at byte {position} of pack {NAME}" in str(error)
            assert "restore the file from a copy" in str(error)
            continue
        assert loaded.rows.equals(run.rows)
        assert loaded.directory.equals(run.directory)
        assert loaded.bucket == run.bucket
    return refused > 0


@pytest.mark.parametrize("way", WAYS)
def test_every_damage_to_a_pack_is_found_and_none_is_served(way: str) -> None:
    content, good = small_pack(), make_runs()
    assert not found_damage(content, good)
    tried = missed = 0
    for changed in WAYS[way](content):
        tried += 1
        missed += not found_damage(changed, good)
    assert missed == 0
    assert tried > 60


def test_a_damaged_slot_leaves_the_others_readable() -> None:
    content, good = small_pack(), make_runs()
    reader = PackReader(pa.py_buffer(content), NAME)
    for number, slot in enumerate(reader.foot.slots):
        changed = bytearray(content)
        changed[slot.position + slot.length // 2] ^= 0x10
        damaged = PackReader(pa.py_buffer(bytes(changed)), NAME)
        damaged.check(TASK, SPEC)
        for other in range(len(good)):
            if other == number:
                with pytest.raises(CorruptError, match="the other slots are not affected"):
                    damaged.load(other)
            else:
                assert damaged.load(other).rows.equals(good[other].rows)


def test_swapped_slots_are_found() -> None:
    content = small_pack()
    first, second = PackReader(pa.py_buffer(content), NAME).foot.slots
    assert first.length == second.length
    one = content[first.position : first.position + first.length]
    two = content[second.position : second.position + second.length]
    changed = content.replace(one, b"?" * len(one)).replace(two, one).replace(b"?" * len(one), two)
    damaged = PackReader(pa.py_buffer(changed), NAME)
    damaged.check(TASK, SPEC)
    for number in (0, 1):
        with pytest.raises(CorruptError):
            damaged.load(number)


OTHER_STORE = StoreSpec("other", Merge.APPEND, SPEC.payload, bucket_ms=100, segment_ms=1000)
MISPLACED = {
    "R-9 pack of another task": small_pack(pack_name("app/4", "s", 0, "u"), task="app/4"),
    "R-9 pack of another store": small_pack(pack_name(TASK, "other", 0, "u"), spec=OTHER_STORE),
    "R-9 older pack renamed": small_pack(pack_name(TASK, "s", 0, "older")),
    "R-9 not a pack": Token("a", "b", "c", 1, "d", b"e").encode(),
    "R-9 empty": b"",
}


@pytest.mark.parametrize("which", MISPLACED)
def test_a_good_file_in_the_wrong_place_is_found(which: str) -> None:
    backend = MemoryBackend()
    backend.put(NAME, [MISPLACED[which]])
    with pytest.raises(CorruptError, match=NAME):
        PackCache(backend).load(TASK, SPEC, StoredRef(NAME, 0))


def test_head_of_one_pack_and_slots_of_another_do_not_mix() -> None:
    first, second = small_pack(), small_pack(pack_name(TASK, "s", 0, "w"), word="w")
    start = PackReader(pa.py_buffer(first), NAME).foot.slots[0].position
    for mixed in (first[:start] + second[start:], second[:start] + first[start:]):
        assert found_damage(mixed, make_runs())


# -- manifests and tokens ------------------------------------------------------------------------


def entry(bucket: int, order: int, pack: str, slot: int = 0) -> RunEntry:
    return RunEntry(bucket, order, 10, 2, 100, 100, bucket, bucket + 9, stored=StoredRef(pack, slot))


def checkpoints(backend: StorageBackend, task: str = TASK, count: int = 3) -> list[Token]:
    """A full manifest and deltas on top of it."""
    chain = ManifestChain(backend, task)
    entries = [entry(bucket * 100, 0, f"{task}/packs/s/0-{bucket}.pack") for bucket in range(40)]
    tokens = []
    for number in range(1, count + 1):
        changed = entry(number * 100, number, f"{task}/packs/s/0-new{number}.pack")
        entries = [changed if each.bucket == changed.bucket else each for each in entries]
        state = StoreState(SPEC.fingerprint, number * 10, number, entries)
        tokens.append(chain.write(Manifest(task, number, {"s": state}, {"e": b"y"}), f"u{number}"))
    return tokens


@pytest.mark.parametrize("link", ["full", "delta"])
@pytest.mark.parametrize("way", WAYS)
def test_every_damage_to_a_manifest_of_a_chain_is_found(way: str, link: str) -> None:
    backend = MemoryBackend()
    token = checkpoints(backend, count=2)[-1]
    chain, _ = ManifestChain.load(backend, token)
    full, delta = chain.names()
    name = full if link == "full" else delta
    content = backend.read(name).to_pybytes()
    missed = 0
    for changed in WAYS[way](content):
        backend.delete(name)
        backend.put(name, [changed])
        try:
            ManifestChain.load(backend, token)
            missed += 1
        except CorruptError as error:
            assert name in str(error)
    assert missed == 0


def test_manifests_of_other_tasks_and_other_checkpoints_are_not_taken() -> None:
    backend = MemoryBackend()
    tokens = checkpoints(backend) + checkpoints(backend, "app/4")
    contents = {token.manifest: backend.read(token.manifest).to_pybytes() for token in tokens}
    for token in tokens:
        for other, content in contents.items():
            if other == token.manifest:
                continue
            backend.delete(token.manifest)
            backend.put(token.manifest, [content])
            with pytest.raises(CorruptError, match="under another name"):
                ManifestChain.load(backend, token)
        backend.delete(token.manifest)
        backend.put(token.manifest, [contents[token.manifest]])
        ManifestChain.load(backend, token)


def test_a_manifest_written_again_under_its_name_has_another_digest() -> None:
    backend = MemoryBackend()
    token = checkpoints(backend, count=1)[0]
    backend.delete(token.manifest)
    chain = ManifestChain(backend, TASK)
    chain.write(Manifest(TASK, 1), "u1")
    with pytest.raises(CorruptError, match="its digest is not the one"):
        ManifestChain.load(backend, token)


def test_every_missing_link_of_a_chain_is_named() -> None:
    backend = MemoryBackend()
    token = checkpoints(backend, count=4)[-1]
    chain, _ = ManifestChain.load(backend, token)
    assert len(chain.names()) == 3
    for name in chain.names():
        content = backend.read(name).to_pybytes()
        backend.delete(name)
        with pytest.raises(MissingObjectError, match=name):
            ManifestChain.load(backend, token)
        backend.put(name, [content])


@pytest.mark.parametrize("way", WAYS)
def test_every_damage_to_a_token_is_found(way: str) -> None:
    token = Token("folder", "f" * 32, TASK, 7, f"{TASK}/manifests/7-u.manifest", bytes(range(16)))
    content = token.encode()
    assert Token.decode(content) == token
    assert len(content) < 256
    for changed in WAYS[way](content):
        with pytest.raises(CorruptError, match="checkpoint token"):
            Token.decode(changed)


def test_a_token_is_refused_for_its_size_before_it_is_read() -> None:
    with pytest.raises(CorruptError, match="above"):
        Token.decode(bytes(1 << 20))


@pytest.mark.parametrize("way", WAYS)
def test_every_damage_to_a_published_object_is_found(way: str) -> None:
    content = seal_published("t/current", "nonce", b"some published bytes" * 5)
    for changed in WAYS[way](content):
        with pytest.raises(CorruptError):
            unseal_published("t/current", changed)
    with pytest.raises(CorruptError, match="it is t/current under another name"):
        unseal_published("u/current", content)


def test_a_later_format_is_told_from_damage() -> None:
    from tidegate.storage.backends.sealed import seal, unseal
    from tidegate.storage.manifest import TOKEN

    later = seal(TOKEN._replace(version=2), ["x"])
    with pytest.raises(InvalidError, match="has format version 2; this release reads version 1"):
        unseal(TOKEN, later, list, name="x")


# -- one missing or odd file ---------------------------------------------------------------

ODD = ["missing", "empty", "folder in its place", "link in its place", "another good file"]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"R-10 {odd}")
def test_any_one_missing_or_odd_file_is_told_when_a_checkpoint_is_read(tmp_path: Path, odd: str) -> None:
    good = tmp_path / "good"
    backend = FolderBackend(good)
    token = _real_checkpoint(backend)
    restore_and_read(good, token)
    files = sorted(
        p.relative_to(good) for p in good.rglob("*") if p.is_file() and not p.name.endswith(".lock")
    )
    assert len(files) == 6  # identity, a full manifest, two deltas, two packs: the chain leaves one delta out
    noticed = 0
    for file in files:
        root = tmp_path / "damaged"
        shutil.copytree(good, root)
        make_odd(root / file, odd, good / next(each for each in files if each != file))
        try:
            restore_and_read(root, token)
        except (CorruptError, InvalidError, UnavailableError) as error:
            assert str(file).rsplit("/", 1)[-1] in str(error) or "backend" in str(error)
            noticed += 1
        shutil.rmtree(root)
    assert noticed == 5  # the manifest of the checkpoint in between is not needed by the last one


def _real_checkpoint(backend: StorageBackend) -> Token:
    refs = []
    for number, run in enumerate(make_runs()):
        refs += write_pack(backend, TASK, SPEC, 0, [run], pack_name(TASK, "s", 0, f"p{number}"))
    real = [
        RunEntry(
            run.bucket,
            0,
            run.row_count,
            run.key_count,
            run.nbytes,
            run.nbytes,
            run.min_ts,
            run.max_ts,
            stored=ref,
        )
        for run, ref in zip(make_runs(), refs, strict=True)
    ]
    padding = [entry(10_000 + 100 * each, 0, refs[0].pack) for each in range(40)]
    chain = ManifestChain(backend, TASK)
    token: Token | None = None
    for number in range(1, 4):
        state = StoreState(SPEC.fingerprint, number, 1, [*real, *padding])
        token = chain.write(Manifest(TASK, number, {"s": state}), f"u{number}")
    assert token is not None
    return token


def restore_and_read(root: Path, token: Token) -> None:
    backend = FolderBackend(root)
    token.check(backend, TASK)
    _, manifest = ManifestChain.load(backend, token)
    cache = PackCache(backend)
    runs = [each for each in manifest.stores["s"].entries if each.bucket < 10_000]
    for each, expected in zip(runs, make_runs(), strict=True):
        assert each.stored is not None
        assert cache.load(TASK, SPEC, each.stored).rows.equals(expected.rows)


def make_odd(path: Path, odd: str, other: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    match odd:
        case "empty":
            path.touch()
        case "folder in its place":
            path.mkdir()
        case "link in its place":
            elsewhere = path.with_name("elsewhere")
            elsewhere.write_bytes(content)
            path.symlink_to(elsewhere)
        case "another good file":
            shutil.copy(other, path)


# -- larger files --------------------------------------------------------------------------------


@pytest.mark.soak
def test_sampled_damage_to_a_large_pack_is_found() -> None:
    backend = MemoryBackend()
    spec = StoreSpec("s", Merge.APPEND, SPEC.payload, bucket_ms=1000, segment_ms=10_000)
    batch = pa.record_batch(
        {
            "key": pa.array([b"k%d" % (i % 997) for i in range(100_000)], pa.binary()),
            "ts": pa.array([i % 10_000 for i in range(100_000)], pa.int64()),
            "v": pa.array([f"value {i}" for i in range(100_000)], pa.string()),
        }
    )
    runs = build_runs(spec, batch, first_seq=0, max_rows=1 << 20)
    write_pack(backend, TASK, spec, 0, runs, NAME)
    content = bytearray(backend.read(NAME).to_pybytes())
    chance, missed = random.Random(9), 0
    for _ in range(20_000):
        bit = chance.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        try:
            reader = PackReader(pa.py_buffer(content), NAME)
            reader.check(TASK, spec)
            for number, slot in enumerate(reader.foot.slots):
                if slot.position <= bit // 8 < slot.position + slot.length:
                    reader.load(number)
            missed += 1
        except TidegateError:
            pass
        content[bit // 8] ^= 1 << bit % 8
    assert missed == 0
