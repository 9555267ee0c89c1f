"""What does it cost to sum up a range of a partition, so that ranges can be audited apart and merged?

Two cases: a range that is read batch by batch from a chain's start (`extend`), and the worst one, where every batch
is summed up alone and begins in the middle of all chains, so that ADHASH's sums cannot be spared.
The merged summary is held against the serial validator before any figure is printed.
"""

from __future__ import annotations

from functools import partial, reduce

import pyarrow as pa

from _report import Report, best_of, demand
from integrity_validate import HEADS, NOW_MS, batches
from tidegate.integrity.summary import RangeSummary, extend, merge, summarise
from tidegate.integrity.validator import PartitionValidator


def check(given: list[pa.RecordBatch]) -> None:
    """One pass, ranges merged, and the validator say the same: of sound records, and of ones with a hole."""
    whole = reduce(extend, given, RangeSummary())
    demand(reduce(merge, [summarise(batch) for batch in given]) == whole, "merged ranges are not one pass")
    demand(whole.is_clean, "a sound range is flagged")
    validator = PartitionValidator("orders", 0, rules=HEADS)
    demand(not any(validator.validate(batch, NOW_MS).is_fatal.any() for batch in given), "it has faults")
    hole = given[0].num_rows // 2
    first = pa.Table.from_batches([given[0].slice(0, hole), given[0].slice(hole + 1)]).combine_chunks()
    found = summarise(first.to_batches()[0]).departures()
    judged = PartitionValidator("orders", 0, rules=HEADS).validate(first.to_batches()[0], NOW_MS)
    demand(list(found.values()) == [finding.offset for finding in judged.findings], "a hole")


def main() -> None:
    report = Report("What does a range summary cost?")
    rows, repetitions = (1_000_000, 20) if report.full else (200_000, 10)
    for what, producers in (("4 producers", 4), ("200 producers", 200)):
        given = batches(rows, 100, producers, 0.0)
        check(given)
        for case, seconds in (
            (f"one range, batch by batch, {what}", _extending(given, repetitions)),
            (f"each batch alone, headless, {what}", _alone(given, repetitions)),
        ):
            each = seconds / sum(batch.num_rows for batch in given) * 1e9
            report.figure(case, f"{each:.0f} ns/record", "", "<= 120 ns/record", each <= 120)
        parts = [summarise(batch) for batch in given]
        seconds = best_of(repetitions, lambda parts=parts: reduce(merge, parts)) / max(1, len(parts) - 1)
        report.figure(f"merge of two ranges, {what}", f"{seconds * 1e6:.0f} us")


def _extending(given: list[pa.RecordBatch], repetitions: int) -> float:
    summary, total = RangeSummary(), 0.0
    for batch in given:
        total += best_of(repetitions, partial(extend, summary, batch))
        summary = extend(summary, batch)
    return total


def _alone(given: list[pa.RecordBatch], repetitions: int) -> float:
    return sum(best_of(repetitions, partial(summarise, batch)) for batch in given)


if __name__ == "__main__":
    main()
