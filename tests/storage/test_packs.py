"""Packs: every Arrow type comes back as it was, without a copy; what does not belong is refused."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from column_cases import EVEN, MANY, TYPED, VALUES, run_with
from storage_oracles import write_pack
from tidegate.errors import CorruptError, InvalidError
from tidegate.files import Effect, Files
from tidegate.storage.backends.base import MissingObjectError, total_size
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.backends.sealed import belongs_to, escape, manifest_name, pack_name, task_prefix
from tidegate.storage.index import StoredRef
from tidegate.storage.pack import NewPack, PackCache, PackReader, pack_parts
from tidegate.storage.runs.build import build_runs
from tidegate.storage.runs.run import DIRECTORY, Run
from tidegate.storage.slots import STEPS, BadSlot, read_slot, slot_parts
from tidegate.storage.spec import Merge, StoreSpec

TASK = "app/join/3"
SPEC = StoreSpec("events", Merge.APPEND, pa.schema([("amount", pa.float64()), ("note", pa.string())]))


def make_runs(spec: StoreSpec, rows: int, *, first_ts: int = 0, step: int = 10) -> list[Run]:
    batch = pa.record_batch(
        {
            "key": pa.array([b"key-%d" % (i % 7) for i in range(rows)], pa.binary()),
            "ts": pa.array([first_ts + i * step for i in range(rows)], pa.int64()),
            "amount": pa.array([i / 3 if i % 5 else None for i in range(rows)], pa.float64()),
            "note": pa.array([f"note {i}" if i % 3 else None for i in range(rows)], pa.string()),
        }
    )
    return build_runs(spec, batch, first_seq=0, max_rows=1 << 20)


def stored_and_loaded(spec: StoreSpec, run: Run) -> Run:
    backend = MemoryBackend()
    name = pack_name(TASK, spec.name, spec.segment_of(run.bucket), "u")
    (ref,) = write_pack(backend, TASK, spec, spec.segment_of(run.bucket), [run], name)
    return PackCache(backend).load(TASK, spec, ref)


# -- round trips ---------------------------------------------------------------------------------


def test_runs_come_back_equal_from_the_slots_they_were_given(tmp_path: Path) -> None:
    runs = make_runs(SPEC, 5_000)
    backend = FolderBackend(tmp_path)
    name = pack_name(TASK, SPEC.name, 0, "u")
    refs = write_pack(backend, TASK, SPEC, 0, runs[:1], name)
    assert refs == [StoredRef(name, 0)]
    loaded = PackCache(backend).load(TASK, SPEC, refs[0])
    assert loaded.bucket == runs[0].bucket
    assert loaded.rows.equals(runs[0].rows)
    assert loaded.directory.equals(runs[0].directory)
    assert loaded.rows.schema.equals(SPEC.rows)
    loaded.rows.validate(full=True)


def test_a_pack_holds_many_buckets_of_one_time_segment() -> None:
    spec = StoreSpec("events", Merge.APPEND, SPEC.payload, bucket_ms=1000, segment_ms=10_000)
    runs = make_runs(spec, 1_000)
    assert len(runs) == 10
    backend = MemoryBackend()
    refs = write_pack(backend, TASK, spec, 0, runs, pack_name(TASK, spec.name, 0, "u"))
    cache = PackCache(backend)
    for run, ref in zip(runs, refs, strict=True):
        loaded = cache.load(TASK, spec, ref)
        assert loaded.bucket == run.bucket
        assert loaded.rows.equals(run.rows)
    assert cache.opened == 1


@pytest.mark.parametrize("slice_from", [0, 1])
@pytest.mark.parametrize("kind", TYPED)
def test_every_type_comes_back_as_it_was_sliced_or_not(kind: str, slice_from: int) -> None:
    column = TYPED[kind].slice(slice_from)
    spec, run = run_with(column)
    loaded = stored_and_loaded(spec, run).rows.column("value")
    loaded.validate(full=True)
    assert loaded.type == column.type
    assert loaded.equals(column) or loaded.to_pylist() == column.to_pylist()
    assert loaded.null_count == column.null_count


@pytest.mark.parametrize(
    "kind",
    [pa.string_view(), pa.run_end_encoded(pa.int32(), pa.int64()), pa.list_view(pa.int64()), pa.uuid()],
    ids=str,
)
def test_a_type_without_a_layout_is_refused_before_anything_is_written(kind: pa.DataType) -> None:
    for inside in (kind, pa.list_(kind), pa.struct([("a", kind)])):
        spec = StoreSpec("odd", Merge.APPEND, pa.schema([("value", inside)]))
        with pytest.raises(InvalidError, match="column value has the Arrow type"):
            pack_parts(TASK, NewPack(spec, 0, [], "x"))


@settings(max_examples=150, deadline=None)
@given(VALUES, st.integers(0, 40), st.integers(0, 40))
def test_any_slice_of_any_column_survives(column: pa.Array, start: int, length: int) -> None:
    column = column.slice(min(start, len(column)), length)
    spec, run = run_with(column, keys=min(1, len(column)))
    slot = b"".join(bytes(part) for part in slot_parts(run))
    assert len(slot) % 64 == 0
    loaded = read_slot(pa.py_buffer(slot), spec.rows, 0)
    loaded.rows.validate(full=True)
    assert loaded.rows.column("value").equals(column)


# -- no copies -----------------------------------------------------------------------------------


def test_writing_shares_the_runs_memory_and_reading_shares_the_files(tmp_path: Path) -> None:
    run = make_runs(SPEC, 5_000)[0]
    before = pa.total_allocated_bytes()
    parts, _ = pack_parts(TASK, NewPack(SPEC, 0, [run], pack_name(TASK, SPEC.name, 0, "u")))
    assert pa.total_allocated_bytes() - before < 4096
    values = run.rows.column("amount").buffers()[1]
    assert values.address in {part.address for part in parts if isinstance(part, pa.Buffer)}

    backend = FolderBackend(tmp_path)
    backend.put("p", parts)
    mapped = backend.read("p")
    reader = PackReader(_renamed(backend, run), pack_name(TASK, SPEC.name, 0, "v"))
    reader.check(TASK, SPEC)
    loaded = reader.load(0)
    for batch in (loaded.rows, loaded.directory):
        for column in batch.columns:
            for buffer in column.buffers():
                assert buffer is None or buffer.address % 8 == 0
    assert mapped.size == total_size(parts)


def _renamed(backend: FolderBackend, run: Run) -> pa.Buffer:
    name = pack_name(TASK, SPEC.name, 0, "v")
    write_pack(backend, TASK, SPEC, 0, [run], name)
    return backend.read(name)


def test_a_slot_is_verified_once_and_a_pack_opened_once(tmp_path: Path) -> None:
    seen: list[Effect] = []
    backend = FolderBackend(tmp_path, files=Files(watch=seen.append))
    name = pack_name(TASK, SPEC.name, 0, "u")
    (ref,) = write_pack(backend, TASK, SPEC, 0, make_runs(SPEC, 100)[:1], name)
    cache = PackCache(backend)
    first = cache.load(TASK, SPEC, ref)
    assert cache.load(TASK, SPEC, ref) is first
    del first
    cache.load(TASK, SPEC, ref)
    assert sum(effect.kind == "map" for effect in seen) == 1


def test_the_cache_keeps_a_bounded_number_of_packs_open_and_runs_survive_that() -> None:
    backend = MemoryBackend()
    run = make_runs(SPEC, 100)[0]
    refs = [
        write_pack(backend, TASK, SPEC, 0, [run], pack_name(TASK, SPEC.name, 0, f"{i}"))[0] for i in range(10)
    ]
    cache = PackCache(backend, max_open=3)
    loaded = [cache.load(TASK, SPEC, ref) for ref in refs]
    assert len(cache) == 3
    assert cache.opened == 10
    cache.load(TASK, SPEC, refs[-1])
    assert cache.opened == 10
    cache.load(TASK, SPEC, refs[0])
    assert cache.opened == 11
    assert all(each.rows.equals(run.rows) for each in loaded)
    cache.forget(refs[0].pack)
    assert len(cache) == 2
    cache.close()
    assert len(cache) == 0


def test_runs_of_open_packs_are_kept_up_to_a_bound_and_go_with_their_pack() -> None:
    backend = MemoryBackend()
    run = make_runs(SPEC, 100)[0]
    refs = write_pack(backend, TASK, SPEC, 0, [run] * 5, pack_name(TASK, SPEC.name, 0, "u"))
    own = 4096 + 4 * run.key_count
    cache = PackCache(backend, kept_bytes=3 * own)
    first = id(cache.load(TASK, SPEC, refs[0]))
    assert id(cache.load(TASK, SPEC, refs[0])) == first
    alive = [weakref.ref(cache.load(TASK, SPEC, ref)) for ref in refs]
    assert [each() is not None for each in alive] == [False, False, True, True, True]
    assert cache.used_bytes == 3 * own
    cache.forget(refs[0].pack)
    assert cache.used_bytes == 0
    assert all(each() is None for each in alive)
    cache = PackCache(backend, max_open=1)
    alive = [weakref.ref(cache.load(TASK, SPEC, ref)) for ref in refs]
    write_pack(backend, TASK, SPEC, 0, [run], pack_name(TASK, SPEC.name, 0, "v"))
    cache.load(TASK, SPEC, StoredRef(pack_name(TASK, SPEC.name, 0, "v"), 0))
    assert cache.used_bytes == own
    assert all(each() is None for each in alive)


def test_many_threads_load_through_one_cache() -> None:
    backend = MemoryBackend()
    run = make_runs(SPEC, 2_000)[0]
    refs = [
        write_pack(backend, TASK, SPEC, 0, [run] * 3, pack_name(TASK, SPEC.name, 0, f"{i}")) for i in range(4)
    ]
    cache = PackCache(backend, max_open=2)
    wrong: list[Any] = []

    def read() -> None:
        for _ in range(20):
            for pack in refs:
                for ref in pack:
                    if not cache.load(TASK, SPEC, ref).rows.equals(run.rows):
                        wrong.append(ref)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not wrong


# -- what does not belong ------------------------------------------------------------------------


def test_a_run_of_another_time_segment_or_with_other_columns_is_refused() -> None:
    run = make_runs(SPEC, 10)[0]
    with pytest.raises(InvalidError, match="does not belong into a pack of time segment"):
        pack_parts(TASK, NewPack(SPEC, 60_000, [run], "x"))
    other = StoreSpec("events", Merge.APPEND, pa.schema([("amount", pa.float64())]))
    with pytest.raises(InvalidError, match="has columns"):
        pack_parts(TASK, NewPack(other, 0, [run], "x"))
    with pytest.raises(InvalidError, match="at least one run"):
        write_pack(MemoryBackend(), TASK, SPEC, 0, [], "x")


def test_a_missing_pack_and_a_missing_slot_are_errors_that_name_them() -> None:
    backend = MemoryBackend()
    name = pack_name(TASK, SPEC.name, 0, "u")
    cache = PackCache(backend)
    with pytest.raises(MissingObjectError, match=name):
        cache.load(TASK, SPEC, StoredRef(name, 0))
    write_pack(backend, TASK, SPEC, 0, make_runs(SPEC, 10)[:1], name)
    for slot in (1, -1, 10**9):
        with pytest.raises(CorruptError, match=f"slot {slot} is asked for, and it has 1"):
            cache.load(TASK, SPEC, StoredRef(name, slot))


def test_a_pack_of_another_task_or_store_is_refused_also_when_it_is_open() -> None:
    backend = MemoryBackend()
    name = pack_name(TASK, SPEC.name, 0, "u")
    (ref,) = write_pack(backend, TASK, SPEC, 0, make_runs(SPEC, 10)[:1], name)
    cache = PackCache(backend)
    cache.load(TASK, SPEC, ref)
    with pytest.raises(CorruptError, match="it belongs to task app/join/3, store events, not to app/join/4"):
        cache.load("app/join/4", SPEC, ref)
    other = StoreSpec("orders", Merge.APPEND, SPEC.payload)
    with pytest.raises(CorruptError, match="not to app/join/3, orders"):
        cache.load(TASK, other, ref)


def test_a_store_that_is_declared_differently_now_is_told_so() -> None:
    backend = MemoryBackend()
    name = pack_name(TASK, SPEC.name, 0, "u")
    (ref,) = write_pack(backend, TASK, SPEC, 0, make_runs(SPEC, 10)[:1], name)
    changed = StoreSpec(SPEC.name, Merge.APPEND, pa.schema([("amount", pa.int64()), ("note", pa.string())]))
    with pytest.raises(InvalidError, match="declare it as before"):
        PackCache(backend).load(TASK, changed, ref)


# -- names ---------------------------------------------------------------------------------------


def test_names_are_as_documented() -> None:
    assert pack_name("app/op/3", "events", -60_000, "u") == "app/op/3/packs/events/-60000-u.pack"
    assert manifest_name("app/op/3", 7, "u") == "app/op/3/manifests/000000000007-u.manifest"
    assert task_prefix("../..") == "%2E./%2E."
    assert escape("a b/c%") == "a%20b%2Fc%25"
    with pytest.raises(InvalidError):
        task_prefix("a//b")
    with pytest.raises(InvalidError):
        pack_name("x" * 200, "s", 0, "u")


@settings(max_examples=200, deadline=None)
@given(st.text(min_size=1, max_size=8), st.text(min_size=1, max_size=8))
def test_different_names_never_escape_to_the_same(first: str, second: str) -> None:
    if first != second:
        assert escape(first) != escape(second)
    assert not escape(first).startswith(".")


@pytest.mark.parametrize(
    ("task", "other", "store"),
    [
        ("a", "a/b", "s"),
        ("a", "ab", "s"),
        ("a/1", "a/10", "s"),
        ("a", "a/packs", "packs"),
        ("a", "a/manifests", "s"),
    ],
)
def test_objects_of_a_task_are_told_from_those_of_a_task_whose_id_starts_the_same(
    task: str, other: str, store: str
) -> None:
    for mine, theirs in ((task, other), (other, task)):
        for name in (pack_name(mine, store, 0, "u"), manifest_name(mine, 1, "u")):
            assert belongs_to(mine, name)
            assert belongs_to(mine, name + ".x.tmp")
            assert not belongs_to(theirs, name)


# -- buffers that are described ------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 3])
@pytest.mark.parametrize("kind", EVEN)
def test_numbers_in_even_steps_come_back_without_having_been_stored(kind: str, cut: int) -> None:
    column = pa.array(EVEN[kind]).slice(cut)
    spec, run = run_with(column)
    slot = pa.py_buffer(b"".join(bytes(part) for part in slot_parts(run)))
    loaded = read_slot(slot, spec.rows, 0).rows.column("value")
    loaded.validate(full=True)
    assert loaded.equals(column)
    is_even = len(column) >= 256 and len(set(np.diff(EVEN[kind][cut:].astype(object)).tolist())) == 1
    assert ("value" in stored_columns(slot)) is not is_even
    assert ("seq" in stored_columns(slot)) is (len(column) < 256), "the column seq counts up"


def stored_columns(slot: pa.Buffer) -> list[str]:
    """The columns of the rows, as any reader of Arrow IPC finds them."""
    source = pa.BufferReader(slot)
    pa.ipc.open_stream(source).read_all()
    return list(pa.ipc.open_stream(source).schema.names)


@pytest.mark.parametrize("width", [0, 1, 12])
def test_values_of_one_width_and_numbers_with_nulls_are_stored_as_they_are(width: int) -> None:
    values = [None if at % 5 == 0 else bytes([at % 256]) * width for at in range(MANY)]
    for column in (
        pa.array([b"x" * width] * MANY, pa.binary()),
        pa.array(values, pa.large_binary()),
        pa.array(range(MANY), pa.int64(), mask=np.arange(MANY) % 3 == 0),
    ):
        spec, run = run_with(column)
        slot = b"".join(bytes(part) for part in slot_parts(run))
        loaded = read_slot(pa.py_buffer(slot), spec.rows, 0).rows.column("value")
        loaded.validate(full=True)
        assert loaded.equals(column)


def test_every_flipped_byte_of_a_pack_with_computed_columns_is_found() -> None:
    backend = MemoryBackend()
    spec, run = run_with(pa.array(np.zeros(300, np.int64)))
    name = pack_name(TASK, spec.name, spec.segment_of(run.bucket), "u")
    (ref,) = write_pack(backend, TASK, spec, spec.segment_of(run.bucket), [run], name)
    good = backend.read(name).to_pybytes()
    foot = good.index(b"TG-FOOT\n")
    assert good[foot + 8 : foot + 10] == b"\3\0"
    assert PackCache(backend).load(TASK, spec, ref).rows.equals(run.rows)
    for position in range(len(good)):
        damaged = bytearray(good)
        damaged[position] ^= 0x41
        with pytest.raises((CorruptError, InvalidError)):
            reader = PackReader(pa.py_buffer(bytes(damaged)), name)
            reader.check(TASK, spec)
            reader.load(ref.slot)


IN_STEPS = pa.array(np.zeros(300, np.int64))


@pytest.mark.parametrize(
    "steps",
    [
        [[0, 0, 2**62]],
        [[0, 2**63 - 1, 1]],
        [[0, -(2**63), -1]],
        [[0, 0, 2**64 - 1]],
        [[0, 0, 1], [0, 0, 1]],
        [[-1, 0, 0]],
        [[9, 0, 0]],
        [[2, 0, 0]],
        [["value", 0, 0]],
        [[0, 0]],
        {},
        "steps",
        [],
    ],
    ids=str,
)
def test_steps_that_do_not_fit_the_schema_are_refused(steps: Any) -> None:
    """`ts` is computed: what the steps say must be a column of integers that the batch lacks, within its numbers."""
    spec = StoreSpec("typed", Merge.APPEND, pa.schema([("note", pa.string())]))
    _, run = run_with(IN_STEPS)
    rows = pa.RecordBatch.from_arrays([IN_STEPS, pa.array(["x"] * 300)], names=["seq", "note"])
    rows = rows.cast(pa.schema([spec.rows.field("seq"), spec.rows.field("note")]))
    assert read_slot(forged_slot(run.directory, rows, [[0, 0, 1]]), spec.rows, 0).row_count == 300
    with pytest.raises(BadSlot):
        read_slot(forged_slot(run.directory, rows, steps), spec.rows, 0)


def forged_slot(directory: pa.RecordBatch, rows: pa.RecordBatch, steps: Any, **options: Any) -> pa.Buffer:
    """A slot of these batches, however wrong."""
    sink = pa.BufferOutputStream()
    for batch, said in ((directory, None), (rows, steps)):
        metadata = None if said is None else {STEPS: msgspec.json.encode(said)}
        with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as stream:
            stream.write_batch(batch, custom_metadata=metadata)
    return sink.getvalue()


def test_a_slot_of_other_streams_is_refused() -> None:
    spec, run = run_with(pa.array([1, 2, 3]))
    good = forged_slot(run.directory, run.rows, None)
    assert read_slot(good, spec.rows, 0).rows.equals(run.rows)
    other = run.rows.rename_columns(["ts", "seq", "other"])
    twice = pa.BufferOutputStream()
    for batch in (run.directory, run.rows):
        with pa.ipc.new_stream(twice, batch.schema) as stream:
            stream.write_batch(batch)
            stream.write_batch(batch)
    _, large = run_with(pa.array(["x" * 50] * 3000))
    for forged in (
        pa.py_buffer(b""),
        pa.py_buffer(bytes(64)),
        good.slice(0, good.size - 100),
        good.slice(8),
        forged_slot(run.rows, run.directory, None),
        forged_slot(run.directory, other, None),
        forged_slot(run.directory, run.rows.slice(0, 0), None),
        twice.getvalue(),
    ):
        with pytest.raises(BadSlot):
            read_slot(forged, spec.rows, 0)
    for codec in ("lz4", "zstd"):  # it could take any amount of memory
        compressed = forged_slot(large.directory, large.rows, None, compression=codec)
        with pytest.raises(BadSlot, match="takes more bytes"):
            read_slot(compressed, large.rows.schema, 0)


def test_what_is_made_anew_counts_among_the_kept_bytes_and_shared_zeros_do_not() -> None:
    backend = MemoryBackend()
    cache, sizes = PackCache(backend), []
    for unique, value in (("zeros", 0), ("ones", 1)):
        spec, run = run_with(pa.array(np.full(10_000, value)))
        segment = spec.segment_of(run.bucket)
        (ref,) = write_pack(backend, TASK, spec, segment, [run], pack_name(TASK, spec.name, segment, unique))
        before = cache.used_bytes
        cache.load(TASK, spec, ref)
        sizes.append(cache.used_bytes - before)
    assert sizes[1] - sizes[0] == 80_000


def test_a_pack_that_is_opened_again_is_not_verified_again_unless_it_was_damaged() -> None:
    backend = MemoryBackend()
    cache = PackCache(backend, max_open=1)
    spec, run = run_with(pa.array([1, 2, 3]))
    segment = spec.segment_of(run.bucket)
    names = [pack_name(TASK, spec.name, segment, unique) for unique in ("a", "b")]
    refs = [write_pack(backend, TASK, spec, segment, [run], name)[0] for name in names]
    for ref in (*refs, *refs):
        assert cache.load(TASK, spec, ref).rows.equals(run.rows)
    assert cache.opened == 4
    assert cache._verified == {names[0]: {0}}
    cache.forget(names[0])
    assert cache._verified == {}


# -- forged: bytes that contradict themselves under checksums that are right --------------------


@pytest.mark.parametrize("kind", TYPED)
def test_any_number_in_a_slot_that_leads_out_of_it_is_refused(kind: str) -> None:
    """Offsets and indexes used to be taken as they were under a right checksum: reading then ended the process."""
    spec, run = run_with(TYPED[kind])
    slot = b"".join(bytes(part) for part in slot_parts(run))
    refused = 0
    for position in range(0, len(slot), 4):
        for absurd in (-1, 1, 1 << 30):
            changed = bytearray(slot)
            changed[position : position + 4] = absurd.to_bytes(4, "little", signed=True)
            try:
                loaded = read_slot(pa.py_buffer(bytes(changed)), spec.rows, 0)
            except BadSlot:
                refused += 1
                continue
            everything = pa.array(range(loaded.row_count))
            assert len(loaded.rows.take(everything).column("value")) == loaded.row_count
    assert refused > 100, "most numbers of the streams, and of hash, key and start in the directory"


def test_rows_and_keys_out_of_order_are_refused() -> None:
    spec, run = run_with(pa.array([1, 2, 3]), keys=3)
    swapped = pa.array([1, 0, 2])
    of_other_keys = pa.RecordBatch.from_arrays(
        [run.directory.column(0), run.keys.take(swapped), run.directory.column(2)], schema=DIRECTORY
    )
    other_order = pa.RecordBatch.from_arrays(
        [run.directory.column(0).take(swapped), run.keys.take(swapped), run.directory.column(2)],
        schema=DIRECTORY,
    )
    twice = pa.RecordBatch.from_arrays(
        [run.directory.column(at).take(pa.array([0, 0])) for at in (0, 1)] + [pa.array([0, 1], pa.int32())],
        schema=DIRECTORY,
    )
    one_key, numbers = run_with(pa.array([1, 2, 3]))[1], pa.array([0, 2, 1])
    wrong = {
        "hashes are not those": Run(0, of_other_keys, run.rows),
        "keys are not in order": Run(0, other_order, run.rows),
        "keys are not in": Run(0, twice, run.rows),
        "rows of a key": Run(0, one_key.directory, one_key.rows.take(numbers)),
    }
    for why, forged in wrong.items():
        with pytest.raises(BadSlot, match=why):
            read_slot(pa.py_buffer(b"".join(bytes(part) for part in slot_parts(forged))), spec.rows, 0)


def test_a_null_where_none_may_be_is_refused() -> None:
    spec, run = run_with(pa.array([1, 2, 3]))
    for place in (0, 1):
        columns = run.rows.columns
        columns[place] = pa.array([0, None, 2], pa.int64())
        forged = Run(0, run.directory, pa.RecordBatch.from_arrays(columns, schema=spec.rows))
        with pytest.raises(BadSlot, match="nulls and may have none"):
            read_slot(pa.py_buffer(b"".join(bytes(part) for part in slot_parts(forged))), spec.rows, 0)
