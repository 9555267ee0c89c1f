"""How long until a task goes on: opening storage, restoring a large task, asking whether it is there already?

Back of the envelope: a restore reads one manifest (100 bytes a run) and opens no pack, so 10 M rows in 100 runs take
some milliseconds; opening is making objects, well under one. A task at its token has a dozen numbers to compare.

    python benchmarks/storage_restore.py [--rows N] [--full] [--json]
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import pyarrow as pa

from _report import Report, best_of, demand
from _storage import TASK, Store, batches, events_spec, roomy, scratch_folder
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.index import BucketIndex, PlainState
from tidegate.storage.runtime import WorkerStorageRuntime


def opened(folder: Path) -> WorkerStorageRuntime:
    return WorkerStorageRuntime.open(roomy(deleted_by="master"), FolderBackend(folder))


def restored(folder: Path, token: bytes, first: pa.RecordBatch) -> tuple[WorkerStorageRuntime, PlainState]:
    """A new process's way to its first append."""
    runtime, state = opened(folder), PlainState(BucketIndex(events_spec()))
    runtime.apply_checkpoint(TASK, token)
    runtime.attach(TASK, state)
    state.index.insert(runtime.writer().append(TASK, state, first))
    return runtime, state


def main() -> None:
    report = Report(__doc__.splitlines()[0] if __doc__ else "", rows=10_000_000)
    rows = report.numbers["rows"]
    with scratch_folder(2 << 30) as folder:
        store = Store(events_spec(), FolderBackend(folder), roomy(deleted_by="master"))
        for batch in batches(rows, 100_000, 100_000):
            store.append(batch)
        token = store.runtime.checkpoint(TASK)
        first = next(batches(1000, 100, 1000))
        runtime, state = restored(folder, token, first)
        demand(state.index.total_rows == rows + 1000, "rows are missing")

        def back() -> float:
            state.index.insert(runtime.writer().append(TASK, state, first))
            began = perf_counter()
            runtime.apply_checkpoint(TASK, token)
            return perf_counter() - began

        def milliseconds(what: str, seconds: float, limit: float) -> None:
            report.figure(what, f"{seconds * 1e3:.2f} ms", "", f"< {limit:g} ms", seconds * 1e3 < limit)

        milliseconds("open", best_of(20, lambda: opened(folder).close(), perf_counter), 5)
        whole = best_of(7, lambda: restored(folder, token, first)[0].close(), perf_counter)
        milliseconds(f"restore {rows / 1e6:g} M rows, to the first append", whole, 100)
        milliseconds("go back from a round that failed", min(back() for _ in range(7)), 100)
        demand(runtime.is_at(TASK, token), "the task went back")
        milliseconds("is it there", best_of(20, lambda: runtime.is_at(TASK, token), perf_counter), 1)
        milliseconds(
            "restore what is there",
            best_of(20, lambda: runtime.apply_checkpoint(TASK, token), perf_counter),
            1,
        )
        demand(store.runtime.checkpoint(TASK) == token, "nothing changed")
        milliseconds(
            "checkpoint of nothing new", best_of(20, lambda: store.runtime.checkpoint(TASK), perf_counter), 1
        )
        kept = best_of(5, lambda: runtime.collect_garbage(TASK, [token], dry_run=True), perf_counter)
        milliseconds("collect garbage", kept, 100)


if __name__ == "__main__":
    main()
