"""One result, however an app is run: sizes of rounds, restarts, numbers of partitions, a log that grows meanwhile.

In full (`make soak`) every step and pair of steps that the API accepts goes through all ways; `make test` has those
where order matters most. What is simple enough is also compared with the slow way in plain Python.

The full form takes about an hour of one core. With `TIDEGATE_MATRIX=covering` each chain still meets every number of
partitions, every size of rounds, every restart and every way of growing, but not all of them with each other: about
two fifths of the cases.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from determinism import GROUPS, KINDS, WINDOWS, Line, Way, chains, defined, differing, lines, ran
from window_oracles import Clock, Record, oracle_of

PARTITIONS = (1, 3, 5)
SIZES = (7, 12, 23, 45, 1000)
SOME: tuple[tuple[str, ...], ...] = (
    ("re-keyed", "dedupe"),
    ("re-keyed", "dedupe", "tumbling-close-mergeable"),
    ("re-keyed", "session-update-mergeable"),
    ("re-keyed", "hopping-update-ordered"),
    ("re-keyed", "sliding-close-mergeable"),
    ("co-partitioned", "dedupe", "session-close-mergeable"),
)


OPEN_ENDED = [*(Way(size) for size in reversed(SIZES)), Way(13, stops=2), Way(9, stops=4)]
ENDED = [
    Way(1000, closes=True),
    Way(17, pieces=3, closes=True),
    Way(10, pieces=2, closes=True),
    Way(25, stops=1, pieces=4, closes=True),
]


def covering(turn: int, partitions: int) -> tuple[list[Way], list[Way]]:
    """A share of the ways for one number of partitions; those of all numbers together are all ways."""
    part = (PARTITIONS.index(partitions) + turn) % len(PARTITIONS)
    first, *others = OPEN_ENDED
    return [first, *others[part :: len(PARTITIONS)]], ENDED if part == 0 else []


def agree(
    folder: Path, flows: list[tuple[str, ...]], partitions: int, events: int, *all_ways: list[Way]
) -> int:
    """Run the flows in these ways, which must agree; how many cases there were: a flow run in one way."""
    log = lines(partitions, partitions, events)
    cases = 0
    for ways in all_ways:
        expected: dict[str, Any] | None = None
        for number, way in enumerate(ways):
            place = folder / f"{way.closes}-{number}"
            found = ran(place, flows, log, partitions, way, "local")
            expected = found if expected is None else expected
            assert differing(found, expected) == [], way
            cases += len(found)
    return cases


@pytest.mark.parametrize("partitions", PARTITIONS)
def test_flows_that_depend_on_order_come_to_one_result(tmp_path: Path, partitions: int) -> None:
    cases = agree(tmp_path, list(SOME), partitions, 24, OPEN_ENDED[:-1], ENDED[:2])
    assert cases == len(SOME) * (len(SIZES) + 3)


def test_windows_over_changes_come_to_one_result(tmp_path: Path) -> None:
    flows = [
        (key, f"{kind}-mergeable", "changes", "tumbling-update-mergeable")
        for key, kind in (
            ("re-keyed", "tumbling-close"),
            ("co-partitioned", "session-close"),
            ("re-keyed", "tumbling-update"),
            ("co-partitioned", "hopping-update"),
        )
    ]
    log, expected = lines(5, 3, 30), None
    for number, way in enumerate(
        (Way(1000, closes=True), Way(8, closes=True), Way(15, stops=2, closes=True))
    ):
        found = ran(tmp_path / str(number), flows, log, 3, way, "local")
        expected = found if expected is None else expected
        assert differing(found, expected) == [], way
        assert all(rows["table"] for rows in found.values())


MATRIX = list(chains(full=False))
GROUP = 25
# All chains with one number of partitions, then all with the next: a run that is cut short has seen every chain.
IN_TURN = [
    (group, PARTITIONS[(group // GROUP + turn) % len(PARTITIONS)])
    for turn in range(len(PARTITIONS))
    for group in range(0, len(MATRIX), GROUP)
]


@pytest.mark.soak
@pytest.mark.parametrize(("group", "partitions"), IN_TURN)
def test_every_step_and_pair_of_steps_comes_to_one_result(
    tmp_path: Path, group: int, partitions: int, record_property: Any
) -> None:
    is_covering = os.environ.get("TIDEGATE_MATRIX") == "covering"
    ways = covering(group // GROUP, partitions) if is_covering else (OPEN_ENDED, ENDED)
    cases = agree(tmp_path, MATRIX[group : group + GROUP], partitions, 60, *ways)
    record_property("cases", cases)
    print(
        f"determinism: {cases} cases of {len(MATRIX[group : group + GROUP])} chains, {partitions} partitions"
    )


def test_the_covering_form_has_every_way_for_every_chain() -> None:
    for turn in range(len(PARTITIONS)):
        chosen = [covering(turn, partitions) for partitions in PARTITIONS]
        assert {way for each in chosen for ways in each for way in ways} == {*OPEN_ENDED, *ENDED}
        assert all(each[0][0] == OPEN_ENDED[0] and len(each[0]) == 3 for each in chosen)


def test_the_matrix_has_every_step_and_pair_and_the_api_refuses_few(tmp_path: Path) -> None:
    app = tg.App("all", data=tmp_path)
    refused = Counter(
        ("close-unlimited" if "unlimited-close" in chain[-1] else chain[-1])
        for chain in MATRIX
        if defined(app, chain) is None
    )
    assert len(MATRIX) == 2 * (1 + 6 + 36) + 2 * (1 + 6) * len(WINDOWS)
    # an unlimited window never closes, and validate comes first
    assert refused == {"close-unlimited": 28, "validate": 12}, refused


# -- the slow way --------------------------------------------------------------------------------


def in_order(log: list[Line]) -> list[tuple[int, int, int, Line]]:
    """All records by (stream time at their own place, partition, offset)."""
    times: dict[int, int] = defaultdict(lambda: -1)
    offsets: Counter[int] = Counter()
    found = []
    for line in log:
        times[line.partition] = max(times[line.partition], line.ts)
        found.append((times[line.partition], line.partition, offsets[line.partition], line))
        offsets[line.partition] += 1
    return sorted(found)


def deduplicated(log: list[Line], within_ms: int, grace_ms: int) -> list[tuple[int, int, int, Line]]:
    """Of copies that lie less than `within_ms` apart the first; records too late to tell are left out."""
    kept: dict[tuple[str, str], list[int]] = defaultdict(list)
    found = []
    for stamp, partition, offset, line in in_order(log):
        if line.ts < stamp - grace_ms:
            continue
        known = kept[line.group, line.id]
        if all(abs(line.ts - ts) >= within_ms for ts in known):
            known.append(line.ts)
            found.append((stamp, partition, offset, line))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_copies_in_other_partitions_are_found_as_the_slow_way_finds_them(tmp_path: Path, seed: int) -> None:
    log = lines(seed, 4, 60)
    found = ran(tmp_path, [("re-keyed", "dedupe")], log, 4, Way(9), "local")["re-keyed.dedupe"]
    sent = [json.loads(value) for _, _, value, _ in found["topic"]]
    for number in range(GROUPS):
        expected = [line for *_, line in deduplicated(log, 6_000, 4_000) if line.group == f"g{number}"]
        got = [(row["id"], row["x"]) for row in sent if row["group"] == f"g{number}"]
        assert got == [(line.id, line.x) for line in expected]
    assert found["totals"]["dedupe.duplicates"] > 10


@pytest.mark.parametrize("kind", ["tumbling", "hopping", "sliding", "session"])
def test_windows_behind_a_key_by_are_those_of_the_slow_way(tmp_path: Path, kind: str) -> None:
    log = lines(7, 3, 60)
    chain = ("re-keyed", f"{kind}-update-mergeable")
    found = ran(tmp_path, [chain], log, 3, Way(11), "local")[".".join(chain)]
    kept = in_order(log)
    oracle = oracle_of(KINDS[kind])
    oracle.clock = AtSource({(partition, offset): stamp for stamp, partition, offset, _ in kept})
    oracle.run(
        Record(line.group.encode(), line.ts, line.x, offset, partition) for _, partition, offset, line in kept
    )
    expected = {
        (key.decode(), start, end): (len(values), min(values), max(values))
        for (key, start, end), (_, records) in oracle.table.items()
        if (values := [each.value or 0 for each in records])
    }
    assert expected == {
        (row["key"], row["window_start"], row["window_end"]): (row["n"], row["low"], row["high"])
        for row in found["table"]
    }
    assert oracle.late, "nothing was too late: the log is too tame"


class AtSource(Clock):
    """Stream times as they were where records were read, before some were left out."""

    def __init__(self, stamps: dict[tuple[int, int], int]) -> None:
        super().__init__()
        self._stamps = stamps

    def judge(self, record: Record) -> int:
        return self._stamps[record.partition, record.offset]
