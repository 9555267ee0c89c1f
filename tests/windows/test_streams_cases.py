"""Kafka Streams' documented behaviour of stores and windows, case by case, on every level: store, table, operator, app.

Cases: `streams_store_cases`, `streams_window_cases`. How a level runs one: `streams_levels`. A case that differs on
purpose names its line in the handbook, and `compat="kafka-streams"` is held to what that line says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streams_cases import (
    APP,
    LEVELS,
    OPERATOR,
    RESTART,
    STORE,
    TABLE,
    Counted,
    StoreCase,
    WindowCase,
    documented_differences,
)
from streams_levels import (
    Answers,
    CountedWindows,
    ask_store,
    by_key,
    count_in_app,
    count_in_operator,
    count_in_store,
    count_in_table,
    in_lives,
    open_store,
    put_one,
    put_together,
    run_app,
    run_operator,
    run_table,
    store_by_batches,
    store_by_rows,
    store_restored,
)
from streams_store_cases import STORE_CASES
from streams_window_cases import WINDOW_CASES
from tidegate.errors import InvalidError, WindowedKeyFormatError
from tidegate.windows.kinds import Sliding
from window_oracles import KafkaSlidingOracle, Record
from workers import Worker

CASES: list[StoreCase | WindowCase] = [*STORE_CASES, *WINDOW_CASES]
DIFFERENCES = documented_differences()
TESTED_ELSEWHERE = {
    "order in `collect`, `first`, `last`": "tests/pipeline/definition/test_app_windows.py",
    "updates": "tests/windows/test_streams_windows.py",
    "windows over a table's changes": "tests/pipeline/definition/test_windows_over_changes.py",
    "reading a store that is emitted from on close": "tests/windows/test_window_rules.py",
    "a timestamp in seconds": "tests/pipeline/definition/test_event_time_units.py",
    "a timestamp before the epoch": "tests/windows/test_window_rules.py",
}


def on(level: str, cases: list[Any]) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in cases if level not in case.left_out]


def check(case: StoreCase, found: Answers, *, ours: bool = True, ordered: bool = False) -> None:
    """Every read is answered as the case says; `ours`: as Tidegate does it, where that differs."""
    reads = case.ours if ours and case.ours else case.reads
    assert len(found.rows) == len(reads)
    for read, rows in zip(reads, found.rows, strict=True):
        if rows is ...:
            continue
        exact = ordered and case.kind == "key"
        assert (rows if exact else by_key(rows)) == (read.rows if exact else by_key(read.rows)), (
            read.call,
            read.args,
        )


# ── stores ───────────────────────────────────────────────────────────────────────────────────────────────────────


def without_refused(case: StoreCase) -> StoreCase:
    """The case without what a store refuses, once it was refused: a put without a key or before the epoch, a read."""
    refused = [
        put for life in in_lives(case.puts, RESTART) for put in life if put.key is None or put.start < 0
    ]
    if "key" in case.refused or "put" in case.refused:
        assert refused
        for put in refused:
            for putting in (put_one, lambda case, store, put: put_together(case, store, [put])):
                store = open_store(case, Worker(), "tidegate")
                with pytest.raises(InvalidError):
                    putting(case, store, put)
        return replace(case, puts=tuple(put for put in case.puts if put not in refused))
    return case


@pytest.mark.parametrize("case", on(STORE, STORE_CASES))
def test_a_store_answers_as_kafka_streams_does(case: StoreCase) -> None:
    case = without_refused(case)
    if "get" in case.refused:
        store = open_store(case, Worker(), "tidegate")
        for put in case.puts:
            put_one(case, store, put)
        for read in case.reads:
            with pytest.raises(InvalidError, match="retains duplicates"):
                ask_store(case, store, read)
        return
    expired = case.expired if case.ours_expired is None else case.ours_expired
    asked = replace(case, reads=case.ours or case.reads)
    found = store_by_rows(asked)
    check(case, found, ordered=True)
    assert found.dropped == expired
    assert case.segments is None or found.segments == case.segments
    if not case.while_open:
        in_columns = store_by_batches(asked)
        check(case, in_columns)
        assert (in_columns.dropped, in_columns.segments) == (found.dropped, found.segments)
        # A null among duplicates is logged though the store skips it, and moves the clock of a restore.
        nulls = case.duplicates and any(put.value is None for put in case.puts)
        if RESTART not in case.puts and not case.difference and not nulls:
            check(case, store_restored(asked), ordered=True)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name) for case in STORE_CASES if case.compat is not None]
)
def test_a_store_with_compat_answers_exactly_as_kafka_streams_does(case: StoreCase) -> None:
    assert case.difference is not None and case.compat is not None
    assert DIFFERENCES[case.difference].is_compatible(STORE)
    if set(case.refused) & {read.call for read in case.reads}:
        with pytest.raises(InvalidError):
            store_by_rows(case, case.compat)
        return
    found = store_by_rows(case, case.compat)
    check(case, found, ours=False)
    assert found.dropped == case.expired
    check(case, store_by_batches(case, case.compat), ours=False)


@pytest.mark.parametrize("case", on(TABLE, STORE_CASES))
def test_a_table_over_a_topic_answers_as_kafka_streams_does(case: StoreCase, tmp_path: Path) -> None:
    if "put" in case.refused:
        with pytest.raises(WindowedKeyFormatError):
            run_table(case, tmp_path)
        return
    found = run_table(replace(case, reads=case.ours or case.reads), tmp_path)
    check(case, found, ordered=True)
    assert found.dropped == (case.expired if case.ours_expired is None else case.ours_expired)
    assert found.null_keys == case.refused.count("key")


@pytest.mark.parametrize("case", on(OPERATOR, STORE_CASES))
def test_an_operator_holds_what_kafka_streams_would_store(case: StoreCase) -> None:
    for cut in (1, 1000):
        found = run_operator(replace(case, reads=case.ours or case.reads), cut)
        check(case, found)
        assert found.dropped == (case.late if case.ours_late is None else case.ours_late)
        assert found.null_keys == case.refused.count("key")


@pytest.mark.parametrize("case", on(APP, STORE_CASES))
def test_an_app_answers_as_kafka_streams_does(case: StoreCase, tmp_path: Path) -> None:
    found = run_app(replace(case, reads=case.ours or case.reads), tmp_path)
    check(case, found, ordered=True)
    assert found.dropped in (None, case.late if case.ours_late is None else case.ours_late)
    assert found.null_keys == case.refused.count("key")


# ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────


def ways(case: WindowCase, level: str) -> Iterator[tuple[str | None, list[Counted], int, int]]:
    """Each compat with the rows, dropped windows and skipped records it must come to on this level."""
    theirs = (sorted(case.rows), case.dropped, case.skipped)
    ours = (
        sorted(case.ours),
        case.dropped if case.ours_dropped is None else case.ours_dropped,
        case.skipped if case.ours_skipped is None else case.ours_skipped,
    )
    differs = case.difference is not None and level in case.differs_on
    yield (None, *(ours if differs else theirs))
    if case.difference is not None:
        is_theirs = not differs or DIFFERENCES[case.difference].is_compatible(level)
        yield ("kafka-streams", *(theirs if is_theirs else ours))


def check_counts(case: WindowCase, found: CountedWindows, dropped: int, skipped: int) -> None:
    assert (found.dropped, found.skipped) == (dropped, skipped)
    if found.late is not None:
        assert found.late == (case.records_late if dropped == case.dropped else dropped)


@pytest.mark.parametrize("case", on(STORE, WINDOW_CASES))
def test_kafka_streams_own_steps_over_our_stores_come_to_its_rows(case: WindowCase) -> None:
    found = count_in_store(case)
    assert found.rows == sorted(case.rows)
    assert (found.dropped, found.skipped) == (case.dropped, case.skipped)


@pytest.mark.parametrize("case", on(OPERATOR, WINDOW_CASES))
def test_an_operator_counts_as_kafka_streams_does(case: WindowCase) -> None:
    for compat, rows, dropped, skipped in ways(case, OPERATOR):
        for cut in (1, 1000):
            found = count_in_operator(case, cut, compat)
            assert found.rows == rows, (compat, cut)
            check_counts(case, found, dropped, skipped)


@pytest.mark.parametrize("case", on(TABLE, WINDOW_CASES))
def test_a_table_over_the_changelog_has_the_same_windows(case: WindowCase, tmp_path: Path) -> None:
    for compat, rows, _, _ in ways(case, TABLE):
        assert count_in_table(case, tmp_path / str(compat), compat) == rows, compat


@pytest.mark.parametrize("case", on(APP, WINDOW_CASES))
def test_an_app_counts_as_kafka_streams_does(case: WindowCase, tmp_path: Path) -> None:
    for compat, rows, dropped, skipped in ways(case, APP):
        found = count_in_app(case, tmp_path / str(compat), compat)
        assert found.rows == rows, compat
        check_counts(case, found, dropped, skipped)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name)
        for case in WINDOW_CASES
        if isinstance(case.window, Sliding) and all(event.value is not None for event in case.events)
    ],
)
def test_rows_of_sliding_cases_are_those_that_kafka_streams_derives(case: WindowCase) -> None:
    oracle = KafkaSlidingOracle(case.window, case.emit)
    oracle.run(Record(event.key, event.ts, 1, at) for at, event in enumerate(case.events))
    found = [(*window, len(records), ts) for window, (ts, records) in oracle.table.items()]
    assert sorted(found) == sorted(case.rows)
    assert len(oracle.late) == case.dropped


# ── the table of cases itself ────────────────────────────────────────────────────────────────────────────────────


def test_every_case_runs_on_two_levels_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    names = Counter(case.name for case in CASES)
    assert [name for name, times in names.items() if times > 1] == []
    runs: Counter[tuple[str, str]] = Counter()
    for case in CASES:
        assert set(case.left_out) <= set(LEVELS) and all(case.left_out.values())
        assert set(case.left_out) < set(LEVELS), f"{case.name} runs nowhere"
        family = case.name.split(":")[0] if isinstance(case, StoreCase) else "windows"
        for level in LEVELS:
            runs[family, level] += level not in case.left_out
        runs[family, "cases"] += 1
    with capsys.disabled():
        print()
        for family in dict.fromkeys(family for family, _ in runs):
            told = ", ".join(f"{level} {runs[family, level]}" for level in LEVELS)
            print(f"kafka streams cases, {family}: {runs[family, 'cases']} ({told})")
        total = sum(number for (_, level), number in runs.items() if level in LEVELS)
        few = sum(len(case.left_out) > len(LEVELS) - 2 for case in CASES)
        differing = sum(case.difference is not None for case in CASES)
        print(
            f"kafka streams cases: {len(CASES)} cases, {total} runs (case x level), {differing} kept differences,"
            f" {few} on one level with a reason"
        )


def test_every_kept_difference_has_its_line_in_the_handbook() -> None:
    named = {case.difference for case in CASES if case.difference is not None}
    assert named <= set(DIFFERENCES), f"no line in the handbook: {sorted(named - set(DIFFERENCES))}"
    for case in CASES:
        if isinstance(case, WindowCase):
            assert bool(case.ours) is (case.difference is not None), case.name


def test_every_line_of_the_handbook_has_a_case() -> None:
    lines = {name for name, line in DIFFERENCES.items() if line.streams}
    named = {case.difference for case in CASES}
    assert lines - named == set(TESTED_ELSEWHERE)
    for place in TESTED_ELSEWHERE.values():
        assert (Path(__file__).parents[2] / place).exists()
