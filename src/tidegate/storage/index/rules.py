"""What a change of the index must keep, and when a bucket is worth merging. Pure: nothing here is locked.

A broken rule is a mistake of the caller, raised before anything changes; a lost compare-and-swap is not one,
and not found here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from tidegate.errors import InvalidError
from tidegate.storage.index.entries import AppendBatch, Bucket, Pruned, RunEntry, without_hot
from tidegate.storage.spec import Merge, StoreSpec

MAX_DELTAS = 8
WORTH_MERGING = (
    4  # deltas below a quarter of their base wait: rewriting the base for them costs more than it saves
)


def pays_to_compact(bucket: Bucket, max_deltas: int = MAX_DELTAS) -> bool:
    """Whether merging the bucket's runs pays.

    Too many deltas always do. Fewer do when two hot runs overlap in time and the deltas together weigh
    enough beside the bases they would be merged into. Without deltas there is nothing to merge.
    """
    deltas = [run for run in bucket.runs if not run.base]
    if not deltas or len(bucket.runs) < 2:
        return False
    if len(deltas) > max_deltas:
        return True
    base_bytes = sum(run.nbytes for run in bucket.runs if run.base)
    if sum(run.nbytes for run in deltas) * WORTH_MERGING < base_bytes:
        return False
    spans = sorted((run.min_ts, run.max_ts) for run in bucket.runs if run.hot is not None)
    return any(after[0] <= before[1] for before, after in pairwise(spans))


def check_parts(spec: StoreSpec, parts: Sequence[AppendBatch]) -> None:
    """Parts to insert lie in their buckets and are whole."""
    for part in parts:
        whole = part.rows > 0 and part.hot.complete and part.charge >= 0
        if not whole or {spec.bucket_of(part.min_ts), spec.bucket_of(part.max_ts)} != {part.bucket}:
            raise InvalidError(
                f"store {spec.name}: a part of bucket {part.bucket} with {part.rows} rows of ts {part.min_ts} to "
                f"{part.max_ts} cannot be inserted; parts come from StorageWriter.append as they are"
            )


def check_replacement(spec: StoreSpec, bucket: int, old: Sequence[RunEntry], new: Sequence[RunEntry]) -> None:
    """`new` can stand where `old` stood: same bucket, no row made up, orders inside, readable."""
    where = f"store {spec.name}, bucket {bucket}"
    if not old:
        raise InvalidError(f"{where}: a publish replaces at least one run")
    if any(entry.bucket != bucket for entry in (*old, *new)):
        raise InvalidError(f"{where}: a publish may not move runs between buckets")
    before, after = sum(run.rows for run in old), sum(run.rows for run in new)
    if after > before or (spec.merge is Merge.APPEND and after != before):
        raise InvalidError(f"{where}: {before} rows became {after} in a merge")
    low, high = min(run.order for run in old), max(run.order for run in old)
    orders = [run.order for run in new]
    if orders != sorted(orders) or any(not low <= order <= high for order in orders):
        raise InvalidError(f"{where}: orders {orders} do not fit in the place of {low} to {high}")
    _check_readable(where, new)


def check_places(spec: StoreSpec, bucket: int, pairs: Sequence[tuple[RunEntry, RunEntry]]) -> None:
    """The second of each pair is the first at other places."""
    where = f"store {spec.name}, bucket {bucket}"
    if any(_facts(old) != _facts(new) for old, new in pairs):
        raise InvalidError(f"{where}: a change of places changed the run itself")
    _check_readable(where, [new for _, new in pairs])


def stored_cells(
    spec: StoreSpec, entries: Iterable[RunEntry], next_order: int
) -> dict[int, tuple[RunEntry, ...]]:
    """A manifest's entries by ascending bucket, each bucket's by order."""
    cells: dict[int, list[RunEntry]] = {}
    for entry in entries:
        if entry.stored is None or entry.order >= next_order or entry.rows <= 0:
            raise InvalidError(
                f"store {spec.name}, bucket {entry.bucket}: a run of order {entry.order} (next is {next_order}) with "
                f"{entry.rows} rows at {entry.stored} cannot be loaded"
            )
        cells.setdefault(entry.bucket, []).append(without_hot(entry))
    return {start: tuple(sorted(cells[start], key=lambda run: run.order)) for start in sorted(cells)}


def pruned(runs: Sequence[RunEntry], emptied: Sequence[int]) -> Pruned:
    """What these runs held, each counted once."""
    return Pruned(
        hot=tuple(run.hot for run in runs if run.hot is not None),
        stored=tuple(run.stored for run in runs if run.stored is not None),
        charge=sum(run.charge for run in runs),
        rows=sum(run.rows for run in runs),
        nbytes=sum(run.nbytes for run in runs),
        buckets=tuple(emptied),
    )


def _check_readable(where: str, entries: Iterable[RunEntry]) -> None:
    for entry in entries:
        if entry.stored is None and not entry.is_hot:
            raise InvalidError(
                f"{where}: the run of order {entry.order} would be nowhere: without a stored copy the hot one "
                f"must be complete"
            )


def _facts(entry: RunEntry) -> tuple[object, ...]:
    sizes = (entry.rows, entry.keys, entry.nbytes, entry.charge)
    return (entry.bucket, entry.order, *sizes, entry.min_ts, entry.max_ts, entry.base)
