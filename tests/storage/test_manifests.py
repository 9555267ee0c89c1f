"""Manifests: what a checkpoint names comes back; bytes follow what changed; chains stay short."""

from __future__ import annotations

import random
import weakref
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import ConflictError, InvalidError, UnavailableError
from tidegate.storage.backends.base import Part
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.index import HotCopy, RunEntry, StoredRef, Tenant
from tidegate.storage.manifest import Manifest, ManifestChain, StoreState, Token
from tidegate.storage.runs.run import DIRECTORY, Run

TASK = "app/3"
LOWEST, HIGHEST = -(2**63), 2**63 - 1


def entry(bucket: int, order: int = 0, pack: str = "p", slot: int = 0, **fields: int) -> RunEntry:
    sizes = {
        "rows": 10,
        "keys": 2,
        "nbytes": 100,
        "charge": 100,
        "min_ts": bucket,
        "max_ts": bucket + 9,
    } | fields
    return RunEntry(bucket=bucket, order=order, base=order == 0, stored=StoredRef(pack, slot), **sizes)


def state(entries: list[RunEntry], number: int = 1) -> StoreState:
    return StoreState("f" * 32, number * 100, number, entries)


def content(manifest: Manifest) -> object:
    """Everything of a manifest, comparable."""
    stores = {}
    for name, each in manifest.stores.items():
        runs = [
            (
                e.bucket,
                e.order,
                e.rows,
                e.keys,
                e.nbytes,
                e.charge,
                e.min_ts,
                e.max_ts,
                e.base,
                e.stored,
                e.hot,
            )
            for e in sorted(each.entries, key=lambda e: (e.bucket, e.order))
        ]
        stores[name] = (each.fingerprint, each.next_seq, each.next_order, runs)
    return manifest.task, manifest.number, stores, dict(manifest.extras)


def reload(backend: MemoryBackend, token: Token) -> tuple[ManifestChain, Manifest]:
    return ManifestChain.load(backend, Token.decode(token.encode()))


def size_of(backend: MemoryBackend, token: Token) -> int:
    return int(backend.read(token.manifest).size)


def test_a_manifest_comes_back_with_everything_it_names() -> None:
    backend = MemoryBackend()
    manifest = Manifest(
        TASK,
        7,
        {
            "events": StoreState(
                "abc",
                HIGHEST,
                3,
                [
                    entry(-100, 1, "t/p1", 4),
                    entry(-100, 2, "t/p2", 0, rows=0, keys=0, nbytes=0, charge=0),
                    entry(0, 1, "t/p1", 5, min_ts=LOWEST, max_ts=HIGHEST, nbytes=2**40),
                ],
            ),
            "empty": StoreState("def", 0, 0),
        },
        {"watermark": b"\1\2", "none": b""},
    )
    token = ManifestChain(backend, TASK).write(manifest, "u")
    assert token.number == 7
    assert token.manifest == "app/3/manifests/000000000007-u.manifest"
    _, loaded = reload(backend, token)
    assert content(loaded) == content(manifest)
    assert loaded.packs() == manifest.packs() == {"t/p1", "t/p2"}


def test_a_run_that_is_only_in_memory_is_a_mistake_and_hot_copies_are_left_out() -> None:
    run = Run(0, pa.RecordBatch.from_pylist([], DIRECTORY), pa.record_batch([], []))
    hot = HotCopy(Tenant.WRITE_BUFFER, 1, run)
    chain = ManifestChain(MemoryBackend(), TASK)
    with pytest.raises(InvalidError, match="only in memory"):
        chain.write(Manifest(TASK, 1, {"s": state([replace(entry(0), stored=None, hot=hot)])}), "u")
    backend = MemoryBackend()
    token = ManifestChain(backend, TASK).write(
        Manifest(TASK, 1, {"s": state([replace(entry(0), hot=hot)])}), "u"
    )
    _, loaded = reload(backend, token)
    assert loaded.stores["s"].entries[0].hot is None


@pytest.mark.parametrize("field", ["rows", "keys", "nbytes", "charge"])
def test_what_could_not_be_loaded_again_is_not_written(field: str) -> None:
    backend = MemoryBackend()
    for wrong in (entry(0, **{field: -1}), entry(0, slot=-1)):
        with pytest.raises(InvalidError, match="cannot be"):
            ManifestChain(backend, TASK).write(Manifest(TASK, 1, {"s": state([wrong])}), "u")
    assert list(backend.list("")) == []


def test_a_manifest_belongs_to_its_task_and_numbers_grow() -> None:
    chain = ManifestChain(MemoryBackend(), TASK)
    with pytest.raises(InvalidError, match="does not belong into"):
        chain.write(Manifest("app/4", 1), "u")
    chain.write(Manifest(TASK, 5), "u")
    with pytest.raises(InvalidError, match="numbers must grow"):
        chain.write(Manifest(TASK, 5), "v")


def test_the_bytes_of_a_delta_follow_the_number_of_changed_buckets() -> None:
    def written(buckets: int, changed: int) -> int:
        backend = MemoryBackend()
        chain = ManifestChain(backend, TASK)
        entries = [entry(b * 100, 1, f"app/3/packs/s/{b // 10}-unique.pack") for b in range(buckets)]
        chain.write(Manifest(TASK, 1, {"s": state(entries)}), "u")
        entries[:changed] = [entry(b * 100, 2, "app/3/packs/s/0-new.pack", b) for b in range(changed)]
        return size_of(backend, chain.write(Manifest(TASK, 2, {"s": state(entries, 2)}), "v"))

    assert written(10_000, 1) < 500
    assert written(10_000, 1) <= written(1_000, 1) + 4
    one, hundred, thousand = written(10_000, 1), written(10_000, 100), written(10_000, 1_000)
    assert 5 * (hundred - one) < thousand - one < 15 * (hundred - one)


def test_an_unchanged_store_costs_nothing_and_a_changed_counter_next_to_nothing() -> None:
    backend = MemoryBackend()
    chain = ManifestChain(backend, TASK)
    stores = {f"s{i}": state([entry(b) for b in range(0, 5_000, 100)]) for i in range(20)}
    chain.write(Manifest(TASK, 1, stores, {"big": bytes(10_000)}), "u1")
    same = chain.write(Manifest(TASK, 2, stores, {"big": bytes(10_000)}), "u2")
    assert size_of(backend, same) < 200
    counted = {**stores, "s3": replace(stores["s3"], next_seq=10**12)}
    token = chain.write(Manifest(TASK, 3, counted, {"big": bytes(10_000)}), "u3")
    assert size_of(backend, token) < 300
    _, loaded = reload(backend, token)
    assert content(loaded) == content(Manifest(TASK, 3, counted, {"big": bytes(10_000)}))


def test_chains_stay_short_and_no_full_manifest_is_written_because_time_passed() -> None:
    backend = MemoryBackend()
    chain = ManifestChain(backend, TASK)
    entries = {b: entry(b * 100, 1, f"p{b}") for b in range(2_000)}
    full = size_of(backend, chain.write(Manifest(TASK, 1, {"s": state(list(entries.values()))}), "u1"))
    written, longest = 0, 0
    for number in range(2, 500):
        bucket = number * 7 % 50  # the work is in a few buckets
        entries[bucket] = entry(bucket * 100, number, f"q{number}")
        token = chain.write(
            Manifest(TASK, number, {"s": state(list(entries.values()), number)}), f"u{number}"
        )
        written += size_of(backend, token)
        longest = max(longest, len(chain.names()))
        assert size_of(backend, token) < full / 2
    assert longest <= 10  # log2(500) deltas and the full one
    assert written / 498 < 1_000  # bytes a checkpoint, of a state of `full` bytes
    assert full > 50_000
    _, loaded = reload(backend, token)
    assert content(loaded) == content(Manifest(TASK, 499, {"s": state(list(entries.values()), 499)}))


def test_a_full_manifest_is_written_when_most_has_changed() -> None:
    backend = MemoryBackend()
    chain = ManifestChain(backend, TASK)
    chain.write(Manifest(TASK, 1, {"s": state([entry(b * 100) for b in range(100)])}), "u1")
    chain.write(Manifest(TASK, 2, {"s": state([entry(b * 100, 9) for b in range(100)])}), "u2")
    assert chain.names() == ["app/3/manifests/000000000002-u2.manifest"]


def test_a_restored_chain_goes_on_with_deltas() -> None:
    backend = MemoryBackend()
    chain = ManifestChain(backend, TASK)
    entries = [entry(b * 100, 1, f"p{b}") for b in range(500)]
    for number in range(1, 6):
        entries[number] = entry(number * 100, number + 1, f"q{number}")
        token = chain.write(Manifest(TASK, number, {"s": state(entries, number)}), f"u{number}")
    restored, manifest = reload(backend, token)
    assert restored.names() == chain.names()
    entries = list(manifest.stores["s"].entries)
    entries[9] = entry(900, 77, "new")
    after = restored.write(Manifest(TASK, 6, {"s": state(entries, 6)}), "v")
    assert size_of(backend, after) < 1_000
    assert content(reload(backend, after)[1]) == content(Manifest(TASK, 6, {"s": state(entries, 6)}))


def test_a_failed_put_leaves_the_chain_as_it_was() -> None:
    class Failing(MemoryBackend):
        fails = False

        def put(self, name: str, parts: list[Part]) -> None:  # type: ignore[override]
            if self.fails:
                raise UnavailableError("the disk is full")
            super().put(name, parts)

    backend = Failing()
    chain = ManifestChain(backend, TASK)
    entries = [entry(b * 100) for b in range(300)]
    chain.write(Manifest(TASK, 1, {"s": state(entries)}), "u1")
    before = chain.names()
    backend.fails = True
    with pytest.raises(UnavailableError):
        chain.write(Manifest(TASK, 2, {"s": state(entries[1:], 2)}), "u2")
    assert chain.names() == before
    backend.fails = False
    token = chain.write(Manifest(TASK, 2, {"s": state(entries[2:], 2)}), "u3")
    assert content(reload(backend, token)[1]) == content(Manifest(TASK, 2, {"s": state(entries[2:], 2)}))


def test_two_checkpoints_of_one_name_cannot_both_be_written() -> None:
    backend = MemoryBackend()
    ManifestChain(backend, TASK).write(Manifest(TASK, 1, {"s": state([entry(0)])}), "u")
    with pytest.raises(ConflictError):
        ManifestChain(backend, TASK).write(Manifest(TASK, 1, {"s": state([entry(100)])}), "u")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_any_history_of_checkpoints_and_restores_comes_back_exactly(seed: int) -> None:
    chance = random.Random(seed)
    backend = MemoryBackend()
    chain = ManifestChain(backend, TASK)
    stores: dict[str, dict[int, list[RunEntry]]] = {}
    extras: dict[str, bytes] = {}
    taken: list[tuple[Token, object]] = []
    before: dict[str, dict[int, list[RunEntry]]] = {}
    number = 0
    for _ in range(12):
        for _ in range(chance.randrange(6)):
            _change(chance, stores, extras)
        number += chance.randrange(1, 4)
        states = {
            name: state([each for runs in cells.values() for each in runs], number)
            for name, cells in stores.items()
        }
        manifest = Manifest(TASK, number, states, dict(extras))
        hint = None if chance.random() < 0.5 else _touched(before, stores)
        before = {
            name: {bucket: list(runs) for bucket, runs in cells.items()} for name, cells in stores.items()
        }
        taken.append((chain.write(manifest, f"{number}", touched=hint), content(manifest)))
        if chance.random() < 0.2:
            chain, _ = reload(backend, taken[-1][0])
    for token, expected in taken:
        assert content(reload(backend, token)[1]) == expected


def _change(
    chance: random.Random, stores: dict[str, dict[int, list[RunEntry]]], extras: dict[str, bytes]
) -> None:
    name = f"s{chance.randrange(3)}"
    match chance.randrange(6):
        case 0:
            stores[name] = {b * 100: [entry(b * 100, 1, f"p{b}")] for b in range(chance.randrange(60))}
        case 1:
            stores.pop(name, None)
        case 2 if stores.get(name):
            stores[name].pop(chance.choice(list(stores[name])))
        case 3:
            extras[name] = chance.randbytes(3)
        case 4:
            extras.pop(name, None)
        case _:
            bucket = chance.randrange(60) * 100
            runs = stores.setdefault(name, {}).setdefault(bucket, [])
            runs.append(entry(bucket, len(runs) + 1, f"q{chance.randrange(5)}", chance.randrange(9)))


def _touched(
    before: dict[str, dict[int, list[RunEntry]]], after: dict[str, dict[int, list[RunEntry]]]
) -> dict[str, set[int]]:
    """What a careful caller would say: the buckets whose runs are not the same objects."""
    found = {}
    for name, cells in after.items():
        old = before.get(name, {})
        found[name] = {bucket for bucket in old.keys() | cells.keys() if old.get(bucket) != cells.get(bucket)}
    return found


def test_a_chain_keeps_no_run_alive() -> None:
    run = Run(0, pa.RecordBatch.from_pylist([], DIRECTORY), pa.record_batch([], []))
    hot = HotCopy(Tenant.WRITE_BUFFER, 1, run)
    alive = weakref.ref(run)
    chain = ManifestChain(MemoryBackend(), TASK)
    chain.write(Manifest(TASK, 1, {"s": state([replace(entry(0), hot=hot)])}), "u")
    del run, hot
    assert alive() is None


def test_only_touched_buckets_are_looked_at_when_the_caller_names_them() -> None:
    backend = MemoryBackend()
    chain = ManifestChain(backend, TASK)
    entries = [entry(b * 100) for b in range(100)]
    chain.write(Manifest(TASK, 1, {"s": state(entries)}), "u1")
    entries[3], entries[4] = entry(300, 5), entry(400, 5)
    token = chain.write(Manifest(TASK, 2, {"s": state(entries, 2)}), "u2", touched={"s": [300]})
    _, loaded = reload(backend, token)
    orders = {each.bucket: each.order for each in loaded.stores["s"].entries}
    assert (orders[300], orders[400]) == (5, 0)
