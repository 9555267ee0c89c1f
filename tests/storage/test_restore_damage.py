"""One wrong bit, anywhere, in any kind of file: a restore and a read find it, or it makes no difference.

Never a wrong row, never a crash of the process, never an error without a type. Every byte of every object that a
checkpoint needs is tried, through the same calls a task makes: `apply_checkpoint`, then reading every row and
every state blob. (That each file kind refuses every bit, cut and swap by itself is shown with the packs.)
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from backend_faults import BackendEffect, WatchedBackend
from simulated_worker import SimulatedWorker
from tidegate.errors import CorruptError, InvalidError, TidegateError
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.manifest import Token, reachable

TASK = "t"
Saved = tuple[SimulatedWorker, "DamagedBackend"]


class DamagedBackend(WatchedBackend):
    """Hands out one object with other bytes than were put."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner, self._nothing)
        self.name, self.data = "", b""

    def _nothing(self, effect: BackendEffect) -> None:
        pass

    def read(self, name: str) -> pa.Buffer:
        return pa.py_buffer(self.data) if name == self.name else self.inner.read(name)


def saved_worker() -> Saved:
    """A task with a few rows of every kind, blobs, and a checkpoint that builds on another."""
    backend = DamagedBackend(MemoryBackend())
    worker = SimulatedWorker(1, backend, tasks=(TASK,))
    task = worker.tasks[0]
    for number in range(2):
        for store in task.stores.values():
            rows = [
                {"key": b"a", "ts": 5 + 100 * number, "value": 7, "note": "x", "weight": 0.5},
                {"key": b"bb", "ts": 6, "value": number, "note": None, "weight": 1.5},
            ]
            worker.write(task, store, rows)
        task.handle.put(b"a", b"blob %d" % number)
        task.blobs[b"a"] = b"blob %d" % number
        task.kept = [task.saved(worker.runtime.checkpoint(task.name))]
    return worker, backend


@pytest.fixture(scope="module")
def saved() -> Saved:
    return saved_worker()


def outcome(worker: SimulatedWorker) -> str:
    """What a new process makes of it: `detected`, or `harmless` when everything is as it should be."""
    try:
        worker.crash()
        worker.check_everything()
    except (CorruptError, InvalidError) as error:
        assert str(error)
        return "detected"
    return "harmless"


def flips(data: bytes, bits: range, step: int = 1) -> Iterator[bytes]:
    """The bytes with one bit changed: of every `step`-th byte, as many bits as asked for."""
    for position in range(0, len(data), step):
        for bit in bits:
            changed = bytearray(data)
            changed[position] ^= 1 << (bit + position) % 8
            yield bytes(changed)


def kinds_of(worker: SimulatedWorker, backend: DamagedBackend) -> dict[str, list[str]]:
    names = sorted(reachable(backend, Token.decode(worker.tasks[0].kept[-1].token)))
    found: dict[str, list[str]] = {"pack": [], "manifest": []}
    for name in names:
        found[name.rpartition(".")[2]].append(name)
    return found


def missed(
    worker: SimulatedWorker, backend: DamagedBackend, name: str, bits: range, step: int = 1
) -> list[int]:
    """Which flips made no difference; one that changes an answer fails."""
    data = backend.inner.read(name).to_pybytes()
    harmless = []
    for number, changed in enumerate(flips(data, bits, step)):
        backend.name, backend.data = name, changed
        try:
            if outcome(worker) == "harmless":
                harmless.append(number)
        except AssertionError as error:
            raise AssertionError(f"{name}, flip {number} of {len(data)} bytes: {error}") from error
    backend.name = ""
    assert outcome(worker) == "harmless"
    return harmless


@pytest.mark.parametrize("store", ["events", "latest", "totals", "state.operator", "manifests"])
def test_a_flip_at_any_byte_of_any_kind_of_object_is_found(store: str, saved: Saved) -> None:
    worker, backend = saved
    everything = [name for names in kinds_of(worker, backend).values() for name in names]
    names = [name for name in everything if f"/{store}/" in name]
    assert names
    for name in names if store == "manifests" else names[:1]:
        step = 1 if store in ("events", "manifests") else 5  # packs are alike; `make soak` does all of all
        assert missed(worker, backend, name, range(1), step) == [], "every byte is covered by a check"


@pytest.mark.soak
def test_a_flip_of_any_bit_of_any_object_is_found() -> None:
    worker, backend = saved_worker()
    for names in kinds_of(worker, backend).values():
        for name in names:
            assert missed(worker, backend, name, range(8)) == []


def test_a_flip_of_any_bit_of_a_token_is_found(saved: Saved) -> None:
    worker, _ = saved
    task = worker.tasks[0]
    for changed in flips(task.kept[-1].token, range(8)):
        with pytest.raises(TidegateError):
            worker.runtime.apply_checkpoint(task.name, changed)
    worker.check_everything()


@pytest.mark.parametrize("cut", ["empty", "half", "one byte less", "one byte more"])
def test_objects_of_another_length_are_found(cut: str, saved: Saved) -> None:
    worker, backend = saved
    for names in kinds_of(worker, backend).values():
        for name in names:
            data = backend.inner.read(name).to_pybytes()
            backend.name = name
            backend.data = {
                "empty": b"", "half": data[: len(data) // 2], "one byte less": data[:-1],
                "one byte more": data + b"\0",
            }[cut]  # fmt: skip
            assert outcome(worker) == "detected", name
    backend.name = ""


def test_a_good_object_in_the_place_of_another_is_found(saved: Saved) -> None:
    worker, backend = saved
    for names in kinds_of(worker, backend).values():
        for name in names:
            for other in names:
                if other != name:
                    backend.name, backend.data = name, backend.inner.read(other).to_pybytes()
                    assert outcome(worker) == "detected", (name, other)
    backend.name = ""


def test_a_missing_object_is_found(saved: Saved) -> None:
    worker, backend = saved
    for names in kinds_of(worker, backend).values():
        for name in names:
            data = backend.inner.read(name).to_pybytes()
            backend.inner.delete(name)
            assert outcome(worker) == "detected", name
            backend.inner.put(name, [data])
    assert outcome(worker) == "harmless"
