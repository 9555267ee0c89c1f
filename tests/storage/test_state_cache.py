"""Operator state: nothing is lost between memory and shelf, whoever writes, flushes, evicts or loads when."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from storage_oracles import keys_of_one_hash
from threads import Beside, until
from tidegate.clock import Clock, ManualClock, SystemClock
from tidegate.errors import InvalidError, OverloadError, UnavailableError
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import Tenant
from tidegate.storage.memory.key_lru import KeyLru
from tidegate.storage.memory.pool import WorkerMemoryPool
from tidegate.storage.parts import TaskStorage
from tidegate.storage.runs.columns import hash_keys
from tidegate.storage.state import ENTRY_BYTES, BytesCodec, NamedValues, StateHandle, hash_of, hot_state
from tidegate.storage.state_store import StateStore

STATE = Tenant.STATE_CACHE
State = dict[str, int]


class JsonCodec:
    """State as a small dict; `during_encode` runs between encoding and answering."""

    during_encode: Callable[[], None] | None = None

    def encode(self, value: State) -> bytes:
        blob = json.dumps(value, sort_keys=True).encode()
        if self.during_encode is not None:
            self.during_encode()
        return blob

    def decode(self, blob: bytes) -> State:
        decoded: State = json.loads(blob)
        return decoded

    def estimate(self, value: State) -> int:
        return 100 * len(value)


class MemoryShelf(StateStore):
    """Blobs in a dict, with hooks before a read and a write."""

    def __init__(self) -> None:
        self.blobs: dict[tuple[str, str, bytes], bytes] = {}
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.before_read: Callable[[], None] | None = None
        self.before_write: Callable[[], None] | None = None

    def write(
        self, task: str, namespace: str, keys: pa.BinaryArray, blobs: pa.BinaryArray, deleted: pa.BooleanArray
    ) -> None:
        if self.before_write is not None:
            self.before_write()
        self.writes.append(len(keys))
        for key, blob, gone in zip(keys.to_pylist(), blobs.to_pylist(), deleted.to_pylist(), strict=True):
            if gone:
                self.blobs.pop((task, namespace, key), None)
            else:
                assert blob is not None
                self.blobs[task, namespace, key] = blob

    def read(self, task: str, namespace: str, keys: pa.BinaryArray) -> tuple[Any, pa.BinaryArray]:
        self.reads.append(len(keys))
        found = [self.blobs.get((task, namespace, key)) for key in keys.to_pylist()]
        if self.before_read is not None:
            self.before_read()  # after the look: what it answers is from before what happens here
        return np.array([blob is not None for blob in found], bool), pa.array(found, pa.binary())


class Bench:
    """The states of tasks over a shelf in memory."""

    def __init__(self, clock: Clock | None = None, timeout_ms: int = 600_000) -> None:
        self.shelf = MemoryShelf()
        self.codec = JsonCodec()
        self.overloads: list[tuple[str, str | None]] = []
        config, clock = StorageConfig.for_tests(load_timeout_ms=timeout_ms), clock or ManualClock()
        self.pool = WorkerMemoryPool(config, clock)
        self.parts: Any = SimpleNamespace(
            shelf=self.shelf,
            pool=self.pool,
            clock=clock,
            config=config,
            stats=SimpleNamespace(overloaded=lambda task, reason: self.overloads.append((task, reason))),
        )
        self.tasks: dict[str, TaskStorage] = {}

    def task(self, task: str = "t") -> TaskStorage:
        if task not in self.tasks:
            named = NamedValues(task, self.pool)
            self.tasks[task] = TaskStorage(self.parts, task, KeyLru(task), None, named)  # type: ignore[arg-type]
        return self.tasks[task]

    def weight(self, task: str = "t") -> int:
        """What all resident values weigh, as relief sees it."""
        return int(hot_state(self.task(task).handles()).nbytes.sum())

    def handle(self, task: str = "t", namespace: str = "op") -> StateHandle[State]:
        return self.task(task).handle(namespace, self.codec)

    def cache(self, task: str = "t") -> StateHandle[State]:
        return self.task(task).handles()[0]

    def evict(self, *keys: bytes, task: str = "t") -> int:
        hashes = hash_keys(pa.array(keys, pa.binary()))
        return sum(handle.evict(hashes) for handle in self.task(task).handles())

    def clear(self, task: str = "t") -> None:
        for handle in self.task(task).handles():
            handle.clear()

    def dirty(self) -> int:
        return sum(handle.dirty for handle in self.task().handles())

    def coldest(self, need_bytes: int) -> list[int]:
        task = self.task()
        return task.key_lru.coldest(hot_state(task.handles()), need_bytes).tolist()  # type: ignore[no-any-return]

    def stored(self, key: bytes, task: str = "t", namespace: str = "op") -> State | None:
        blob = self.shelf.blobs.get((task, namespace, key))
        return None if blob is None else self.codec.decode(blob)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def fail(*_: object) -> State:
    raise AssertionError("made anew though it is on the shelf")


@pytest.mark.parametrize(
    "leave", [pytest.param(how, id=f"WS-T60-{how}") for how in ("restart", "clear", "evict")]
)
def test_what_was_flushed_is_loaded_equal(bench: Bench, leave: str) -> None:
    handle, values = bench.handle(), {b"key-%d" % i: {"count": i} for i in range(20)}
    for key, value in values.items():
        handle.put(key, value)
    assert handle.flush_all() == 20 and handle.flush_all() == 0
    if leave == "restart":
        shelf, bench = bench.shelf, Bench()
        bench.shelf.blobs = shelf.blobs
        handle = bench.handle()
    elif leave == "clear":
        bench.clear()
    else:
        assert bench.evict(*values) > 0
    assert bench.pool.used("t", STATE) == 0
    assert {key: handle.get(key) for key in values} == values
    assert handle.get(b"never") is None
    assert bench.dirty() == 0, "what was loaded is as the shelf has it"


def test_loads_and_flushes_of_two_keys_at_once_keep_both() -> None:
    """WS-T60: threads load, change and evict their own key while others flush all."""
    bench = Bench(SystemClock())
    handle = bench.handle()
    keys = [b"A", b"B", b"C"]
    for key in keys:
        handle.put(key, {"n": 0})
    handle.flush_all()
    stop = threading.Event()

    def change(key: bytes) -> None:
        for _ in range(200):
            with handle.use(key, fail) as held:
                held.value["n"] += 1
                held.changed()
            bench.evict(key)

    def flush() -> None:
        while not stop.is_set():
            handle.flush_all()

    flusher = Beside(flush)
    for thread in [Beside(lambda key=key: change(key)) for key in keys]:
        thread.result()
    stop.set()
    flusher.result()
    handle.flush_all()
    assert [bench.stored(key) for key in keys] == [{"n": 200}] * 3
    bench.evict(*keys)
    assert bench.pool.total == 0


@pytest.mark.parametrize("on_shelf", [pytest.param(True, id="WS-T61"), pytest.param(False, id="WS-T61-made")])
def test_concurrent_loads_of_one_key_are_one_read_one_object_one_reservation(on_shelf: bool) -> None:
    bench = Bench(SystemClock())
    handle = bench.handle()
    if on_shelf:
        handle.put(b"k", {"n": 5})
        handle.flush_all()
        bench.evict(b"k")
    gate, made = threading.Event(), []
    bench.shelf.before_read = lambda: gate.wait(20) and None

    def make() -> State:
        made.append(1)
        return {"n": 0}

    loads = [Beside(lambda: handle.get_or_load(b"k", make)) for _ in range(4)]
    until(lambda: len(bench.shelf.reads) == 1)
    gate.set()
    values = [load.result() for load in loads]
    assert all(value is values[0] for value in values)
    assert values[0] == {"n": 5 if on_shelf else 0} and len(made) == (0 if on_shelf else 1)
    assert bench.shelf.reads == [1]
    assert bench.pool.used("t", STATE) == 100 + 1 + ENTRY_BYTES


def test_a_failed_load_fails_its_caller_only_and_the_next_one_tries_again(bench: Bench) -> None:
    handle = bench.handle()
    handle.put(b"k", {"n": 1})
    handle.flush_all()
    bench.evict(b"k")

    def broken() -> None:
        bench.shelf.before_read = None
        raise UnavailableError("the shelf is down")

    bench.shelf.before_read = broken
    with pytest.raises(UnavailableError):
        handle.get_or_load(b"k", fail)
    assert handle.get_or_load(b"k", fail) == {"n": 1}


def test_a_load_that_never_ends_does_not_hold_others_for_ever() -> None:
    bench = Bench(SystemClock(), timeout_ms=50)
    handle, gate = bench.handle(), threading.Event()
    bench.shelf.before_read = lambda: gate.wait(20) and None
    stuck = Beside(lambda: handle.get(b"k"))
    until(lambda: len(bench.shelf.reads) == 1)
    with pytest.raises(OverloadError, match="load_timeout_ms") as caught:
        handle.get(b"k")
    assert caught.value.reason == "state_load" and bench.overloads == [("t", "state_load")]
    gate.set()
    assert stuck.result() is None


@pytest.mark.parametrize("act", [pytest.param(how, id=f"WS-T61-{how}") for how in ("put", "delete", "clear")])
def test_a_change_during_a_load_is_not_overwritten_by_it(bench: Bench, act: str) -> None:
    handle = bench.handle()
    handle.put(b"k", {"n": 1})
    handle.flush_all()
    bench.evict(b"k")

    def meanwhile() -> None:
        bench.shelf.before_read = None
        if act == "put":
            handle.put(b"k", {"n": 2})
        elif act == "delete":
            handle.delete(b"k")
        else:
            bench.shelf.blobs["t", "op", b"k"] = b'{"n": 2}'
            bench.clear()

    bench.shelf.before_read = meanwhile
    assert handle.get(b"k") == (None if act == "delete" else {"n": 2})
    handle.flush_all()
    assert bench.stored(b"k") == (None if act == "delete" else {"n": 2})


@pytest.mark.parametrize(
    "moment", [pytest.param("encode", id="WS-T62"), pytest.param("write", id="WS-T62-during-write")]
)
@pytest.mark.parametrize("act", ["change", "put", "delete", "delete and put"])
def test_a_write_during_a_flush_stays_dirty_and_is_saved_by_the_next(
    bench: Bench, moment: str, act: str
) -> None:
    handle = bench.handle()
    handle.put(b"k", {"n": 1})

    def meanwhile() -> None:
        bench.codec.during_encode = bench.shelf.before_write = None
        if act == "change":
            value = handle.get(b"k")
            assert value is not None
            value["n"] = 2
            handle.mark_dirty(b"k")
        elif act == "put":
            handle.put(b"k", {"n": 2})
        else:
            handle.delete(b"k")
            if act == "delete and put":
                handle.put(b"k", {"n": 2})

    if moment == "encode":
        bench.codec.during_encode = meanwhile
    else:
        bench.shelf.before_write = meanwhile
    handle.flush_all()
    assert bench.stored(b"k") == {"n": 1}, "what was encoded before the change"
    assert bench.dirty() == 1
    assert handle.flush_all() == 1 and handle.flush_all() == 0
    assert bench.stored(b"k") == (None if act == "delete" else {"n": 2})


def test_a_new_value_during_the_flush_of_its_deletion_survives(bench: Bench) -> None:
    """WS-T62 for a deletion."""
    handle = bench.handle()
    handle.put(b"k", {"n": 1})
    handle.flush_all()
    handle.delete(b"k")
    bench.shelf.before_write = lambda: handle.put(b"k", {"n": 2})
    handle.flush_all()
    bench.shelf.before_write = None
    assert handle.flush_all() == 1 and bench.stored(b"k") == {"n": 2}


@pytest.mark.parametrize("row", [pytest.param("two handles", id="WS-T96")])
def test_two_handles_of_one_namespace_see_each_others_writes(bench: Bench, row: str) -> None:
    one, other = bench.handle(), bench.handle()
    one.put(b"k", {"n": 1})
    assert other.get(b"k") is one.get(b"k")
    other.put(b"k", {"n": 2})
    assert one.get(b"k") == {"n": 2}
    other.delete(b"k")
    assert one.get(b"k") is None


@pytest.mark.parametrize(
    ("task", "namespace"),
    [pytest.param("u", "op", id="WS-T98-task"), pytest.param("t", "other", id="WS-T98-namespace")],
)
def test_the_same_key_elsewhere_is_another_state(bench: Bench, task: str, namespace: str) -> None:
    here, there = bench.handle(), bench.handle(task, namespace)
    here.put(b"k", {"n": 1})
    assert there.get(b"k") is None
    there.put(b"k", {"n": 9})
    here.flush_all()
    there.flush_all()
    here.delete(b"k")
    here.flush_all()
    bench.evict(b"k")
    bench.evict(b"k", task="u")
    assert here.get(b"k") is None and there.get(b"k") == {"n": 9}
    bench.clear(task)
    assert there.get(b"k") == {"n": 9}


@pytest.mark.parametrize("how", ["get_or_load", "get_or_insert", "use", "get"])
def test_an_evicted_key_is_loaded_never_made_anew(bench: Bench, how: str) -> None:
    """WS-INV-20, WS-T42 for the state: what comes after an eviction goes on from what was there."""
    handle = bench.handle()
    handle.put(b"A", {"seq": 41})
    assert bench.evict(b"A") > 0 and handle.task == "t"
    if how == "use":
        with handle.use(b"A", fail) as held:
            assert held.value == {"seq": 41}
    elif how == "get":
        assert handle.get(b"A") == {"seq": 41}
    else:
        assert getattr(handle, how)(b"A", fail) == {"seq": 41}


def test_a_flush_after_an_eviction_leaves_evicted_keys_on_the_shelf(bench: Bench) -> None:
    """WS-T43 for the state: not resident does not mean deleted."""
    handle = bench.handle()
    for key in (b"A", b"B"):
        handle.put(key, {"n": 1})
    bench.evict(b"A")
    handle.put(b"B", {"n": 2})
    handle.flush_all()
    assert (bench.stored(b"A"), bench.stored(b"B")) == ({"n": 1}, {"n": 2})


def test_only_dirty_values_are_written(bench: Bench) -> None:
    handle = bench.handle()
    for number in range(10):
        handle.put(b"%d" % number, {"n": number})
    handle.flush_all()
    handle.put(b"3", {"n": 33})
    handle.delete(b"4")
    assert handle.flush(b"9") == 0 and handle.flush(b"3") == 1 and handle.flush_all() == 1
    assert bench.shelf.writes == [10, 1, 1]


def test_eviction_takes_these_keys_and_no_others_and_gives_their_bytes_back(bench: Bench) -> None:
    """WS-T41 for the state."""
    handle = bench.handle()
    for key in (b"A", b"B"):
        handle.put(key, {"n": 1})
    before = bench.pool.used("t", STATE)
    assert bench.weight() == before == 2 * (101 + ENTRY_BYTES)
    assert bench.evict(b"A", b"unknown") == before // 2
    assert len(bench.cache()) == 1 and bench.weight() == bench.pool.used("t", STATE) == before // 2


def test_the_longest_unused_key_is_the_one_the_clock_names(bench: Bench) -> None:
    handle = bench.handle()
    for number in range(5):
        handle.put(b"%d" % number, {"n": 1})
    handle.get(b"0")
    assert bench.coldest(1) == [hash_of(b"1")]


def test_a_held_key_is_not_evicted_and_the_clock_knows(bench: Bench) -> None:
    """WS-T44 for the state."""
    handle = bench.handle()
    handle.put(b"B", {"n": 2})
    with handle.use(b"A", lambda: {"n": 0}) as held:
        held.value["n"] = 1
        held.changed()
        assert bench.evict(b"A") == 0 and bench.stored(b"A") is None
        assert bench.coldest(10**6) == [hash_of(b"B")]
        held.set({"n": 7})
    assert bench.evict(b"A") > 0 and bench.stored(b"A") == {"n": 7}


def test_an_error_inside_use_lets_the_key_go(bench: Bench) -> None:
    handle = bench.handle()
    with pytest.raises(ZeroDivisionError), handle.use(b"A", dict):
        raise ZeroDivisionError
    assert bench.evict(b"A") > 0


def test_a_flush_that_fails_drops_nothing(bench: Bench) -> None:
    """WS-INV-20: out of memory only after the shelf has it."""
    handle = bench.handle()
    handle.put(b"A", {"n": 1})

    def broken() -> None:
        raise UnavailableError("disk full")

    bench.shelf.before_write = broken
    for act in (lambda: bench.evict(b"A"), handle.flush_all):
        with pytest.raises(UnavailableError):
            act()
        assert handle.get(b"A") == {"n": 1} and bench.dirty() == 1
    bench.shelf.before_write = None
    assert bench.evict(b"A") > 0 and bench.stored(b"A") == {"n": 1}


def test_an_encoder_that_fails_blocks_nobody(bench: Bench) -> None:
    handle = bench.handle()
    handle.put(b"A", {"n": 1})

    def broken() -> None:
        raise ZeroDivisionError

    bench.codec.during_encode = broken
    with pytest.raises(ZeroDivisionError):
        handle.flush_all()
    bench.codec.during_encode = None
    with handle.use(b"A", fail) as held:
        assert held.value == {"n": 1}
    assert handle.flush_all() == 1


def test_relief_from_inside_a_write_drops_clean_values_and_leaves_dirty_ones(bench: Bench) -> None:
    """A flush may itself need memory, whose relief evicts state: no deadlock, no value out of order."""
    handle, freed = bench.handle(), []
    handle.put(b"clean", {"n": 1})
    handle.flush_all()
    handle.put(b"dirty", {"n": 2})
    bench.shelf.before_write = lambda: freed.append((bench.evict(b"dirty"), bench.evict(b"clean")))
    handle.flush_all()
    assert freed[0][0] == 0 and freed[0][1] > 0
    assert bench.stored(b"dirty") == {"n": 2} and handle.get(b"clean") == {"n": 1}


def test_while_the_shelf_works_other_keys_are_read_and_written() -> None:
    """WS-INV-16: no lock of the cache is held during IO."""
    bench = Bench(SystemClock())
    handle, gate = bench.handle(), threading.Event()
    handle.put(b"A", {"n": 1})
    bench.shelf.before_write = bench.shelf.before_read = lambda: gate.wait(20) and None
    flush, load = Beside(handle.flush_all), Beside(lambda: handle.get(b"elsewhere"))
    until(lambda: len(bench.shelf.reads) == 1)
    handle.put(b"B", {"n": 2})
    assert handle.get(b"A") == {"n": 1} and handle.get(b"B") == {"n": 2}
    with handle.use(b"B", fail) as held:
        held.changed()
    handle.delete(b"B")
    assert not flush.is_done and not load.is_done
    gate.set()
    flush.result()
    assert load.result() is None


def test_a_value_grown_in_place_is_estimated_again(bench: Bench) -> None:
    handle = bench.handle()
    with handle.use(b"k", lambda: {"n": 1}) as held:
        for change in ({"a": 1, "b": 2}, {}):
            held.value.clear()
            held.value.update(change)
            held.changed()
            expected = 100 * len(change) + 1 + ENTRY_BYTES
            assert bench.pool.used("t", STATE) == expected
    handle.delete(b"k")
    assert bench.pool.total == bench.weight() == 0


def test_marking_a_key_dirty_that_is_not_resident_is_refused(bench: Bench) -> None:
    handle = bench.handle()
    handle.put(b"k", {"n": 1})
    bench.evict(b"k")
    with pytest.raises(InvalidError, match="inside `use`"):
        handle.mark_dirty(b"k")


def test_keys_with_one_hash_stay_two_keys(bench: Bench) -> None:
    """WS-INV-25 for the state."""
    handle, keys = bench.handle(), keys_of_one_hash(2)
    for number, key in enumerate(keys):
        handle.put(key, {"n": number})
    assert hash_of(keys[0]) == hash_of(keys[1]) and len(hot_state(bench.task().handles()).hashes) == 1
    with handle.use(keys[0], fail):
        assert bench.evict(keys[0]) > 0
        assert len(bench.cache()) == 1, "the held one stays"
    assert [handle.get(key) for key in keys] == [{"n": 0}, {"n": 1}]
    handle.delete(keys[0])
    assert bench.evict(keys[1]) > 0 and bench.pool.total == 0
    assert [handle.get(key) for key in keys] == [None, {"n": 1}]


@pytest.mark.parametrize("namespace", ["", "a/b"])
def test_a_namespace_is_a_plain_name(bench: Bench, namespace: str) -> None:
    with pytest.raises(InvalidError, match="namespace"):
        bench.handle(namespace=namespace)


def test_one_namespace_has_one_codec(bench: Bench) -> None:
    bench.handle()
    with pytest.raises(InvalidError, match="BytesCodec"):
        bench.task().handle("op", BytesCodec())
    plain = bench.task().handle("raw", BytesCodec())
    plain.put(b"k", b"blob")
    plain.flush_all()
    bench.clear()
    assert bench.pool.total == 0
    assert bench.task().handle("raw", BytesCodec()).get(b"k") == b"blob"


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_equal_a_dict(seed: int) -> None:
    """WS-T60, WS-INV-20: whatever is evicted, flushed or restored in between, a dict knows the answer."""
    chance, bench = random.Random(seed), Bench()
    handle, model = bench.handle(), dict[bytes, State]()
    keys = [b"k%d" % number for number in range(12)]
    for step in range(400):
        key = chance.choice(keys)
        match chance.randrange(7):
            case 0:
                handle.put(key, {"n": step})
                model[key] = {"n": step}
            case 1:
                handle.delete(key)
                model.pop(key, None)
            case 2:
                value = {"made": step}
                assert handle.get_or_load(key, lambda value=value: dict(value)) == model.setdefault(
                    key, value
                )
            case 3:
                with handle.use(key, lambda: {"n": 0}) as held:
                    bench.evict(*keys)
                    held.value["n"] = step
                    held.changed()
                model[key] = {**model.get(key, {}), "n": step}
            case 4:
                bench.evict(*chance.sample(keys, 4))
            case 5:
                handle.flush_all()
                bench.clear()  # a restore: all that was flushed is there again
            case _:
                assert handle.get(key) == model.get(key)
        resident = bench.cache()
        assert bench.pool.used("t", STATE) == bench.weight()
        assert (len(resident) == 0) == (bench.pool.total == 0)
    handle.flush_all()
    assert {key: bench.stored(key) for key in keys if bench.stored(key) is not None} == model
