"""The store of state blobs: an internal `last` store of the task, handled like any other rows.

One store per namespace, named `state.<namespace>`, with one bucket: a blob is a row at ts 0 whose key is the state's
key. Blobs are thereby stored in packs, evicted with their key's other rows, compacted, checkpointed and restored by
the same code. A write never waits for backlog, because it is a flush, which frees memory.

Thread rule: writes of one namespace one at a time (the cache sees to it), reads from any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InvalidError
from tidegate.storage.index import BucketIndex, PlainState
from tidegate.storage.parts import STATE_PREFIX, AttachedStore, Tasks, TaskStorage
from tidegate.storage.reader import RangeRequest, StorageReader
from tidegate.storage.runs.build import build_runs
from tidegate.storage.spec import Merge, StoreSpec

if TYPE_CHECKING:
    from tidegate.storage.writer import StorageWriter

BUCKET_MS = 2**62  # one bucket: state has no time


def state_store_of(namespace: str) -> PlainState:
    """A new, empty store of one namespace."""
    spec = StoreSpec(
        name=STATE_PREFIX + namespace,
        merge=Merge.LAST,
        payload=pa.schema([pa.field("blob", pa.binary())]),
        bucket_ms=BUCKET_MS,
    )
    return PlainState(BucketIndex(spec))


class StateStore:
    """The blobs of state by (task, namespace, key), in columns.

    What was written is read from then on, by any thread; inside one write the later row of a key wins. A blob that is
    not there is a False in the mask of `read`, one that could not be read an error (INV-24).
    """

    writer: StorageWriter  # set by the runtime, because the writer is made later

    def __init__(self, tasks: Tasks, reader: StorageReader, max_run_rows: int) -> None:
        self._tasks = tasks
        self._reader = reader
        self._max_run_rows = max_run_rows

    def write(
        self, task: str, namespace: str, keys: pa.BinaryArray, blobs: pa.BinaryArray, deleted: pa.BooleanArray
    ) -> None:
        """Set the blob of each key, or remove it where `deleted`; atomic."""
        storage = self._tasks[task]
        store = _store(storage, namespace)
        zeros = pa.array(np.zeros(len(keys), np.int64))
        rows = pa.RecordBatch.from_arrays(
            [keys, zeros, zeros, deleted, blobs], names=["key", "ts", "seq", "deleted", "blob"]
        )
        runs = build_runs(store.spec, rows, first_seq=None, max_rows=self._max_run_rows)
        store.state.index.insert(self.writer.accept(store, runs, rows.num_rows, forced=True))

    def read(
        self, task: str, namespace: str, keys: pa.BinaryArray
    ) -> tuple[npt.NDArray[np.bool_], pa.BinaryArray]:
        """Return a mask of the keys with a blob, and the blobs, null where there is none."""
        state = _store(self._tasks[task], namespace).state
        plan = self._reader.plan(task, state, [RangeRequest(keys)])
        with self._reader.load(plan) as loaded:
            table = loaded.to_table().combine_chunks()
        places = pc.index_in(keys, value_set=table.column("key"))
        found: npt.NDArray[np.bool_] = places.is_valid().to_numpy(zero_copy_only=False)
        return found, table.column("blob").take(places).combine_chunks()


def _store(storage: TaskStorage, namespace: str) -> AttachedStore:
    found = storage.stores.get(STATE_PREFIX + namespace)
    if found is None:
        raise InvalidError(
            f"state {namespace} of task {storage.task} has no values by key: open its handle with keyed=True"
        )
    return found
