"""What the next round is to do, from a commit and a look at the log; no files, no engine."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from tidegate.errors import OverloadError
from tidegate.pipeline.backpressure import BUCKETS_MS, THRESHOLD_PERMILLE, Backpressure
from tidegate.pipeline.checkpoint import VERSION, CommitRecord, PlanRecord, SourceLine, TaskLine
from tidegate.pipeline.flow import FlowFacts
from tidegate.pipeline.log_end_offsets import Head
from tidegate.pipeline.messages import Held, Stop, Tick
from tidegate.pipeline.planner import (
    LEAST,
    TICK_EVERY_MS,
    Planned,
    Rest,
    RoundSizes,
    SilenceClock,
    Situation,
    plan_round,
    share_out,
)

NOW = 1_000_000_000
IDLE = 30_000
FLOW = FlowFacts("f", "in", 2, 2, kept_ms=60_000)
ORDERED = FlowFacts("f", "in", 3, 2, is_rekeyed=True, is_ordered=True, kept_ms=60_000)
REKEYED = FlowFacts("f", "in", 3, 4, is_rekeyed=True, kept_ms=60_000)
LIMIT = 1_000_000


def commit_with(*sources: SourceLine, tasks: tuple[TaskLine, ...] = (), **changes: Any) -> CommitRecord:
    values: dict[str, Any] = {
        "version": VERSION, "app": "a", "round": 4, "generation": 1, "base": b"b", "plan": b"p", "definition": "d",
        "incarnation": "l", "tick": Tick(NOW - 1), "committed_ms": NOW, "sources": sources, "tasks": tasks,
    }  # fmt: skip
    return CommitRecord(**(values | changes))


def planned(
    commit: CommitRecord,
    ends: Mapping[int, int | Head],
    *,
    flow: FlowFacts = FLOW,
    size: int = 1000,
    silent_ms: Mapping[int, int] | None = None,
    now_ms: int = NOW,
    backpressure: Backpressure | None = None,
    idle: int | None = IDLE,
    **changes: Any,
) -> Planned | Rest:
    heads = {number: end if isinstance(end, Head) else Head(0, end) for number, end in ends.items()}
    silent = {("f", number): ms for number, ms in (silent_ms or {}).items()}
    situation = Situation(
        flows={"f": flow},
        commit=commit,
        base=b"digest",
        heads={"in": heads},
        watch=SilenceClock(now_ms, idle, silent),
        generation=3,
        size=size,
        **changes,
    )
    return plan_round(situation, backpressure or Backpressure(LIMIT, lambda flow, task: 0))


def plan_of(outcome: Planned | Rest) -> PlanRecord:
    assert isinstance(outcome, Planned), outcome
    return outcome.plan


def line(partition: int, next_offset: int = 0, **values: Any) -> SourceLine:
    return SourceLine("f", partition, next_offset, **values)


# -- ranges --------------------------------------------------------------------------------------


def test_a_round_reads_from_the_commit_to_the_end_within_its_size() -> None:
    outcome = planned(commit_with(line(0, 10), line(1, 0)), {0: 15, 1: 5000}, size=105)
    plan = plan_of(outcome)
    assert [(each.partition, each.start, each.stop) for each in plan.ranges] == [(0, 10, 15), (1, 0, 100)]
    assert plan.tasks == (("f", 0), ("f", 1))
    assert (plan.round, plan.base, plan.generation, plan.tick) == (5, b"digest", 3, Tick(NOW))
    assert isinstance(outcome, Planned)


def test_a_task_without_records_and_without_a_tick_takes_no_part() -> None:
    plan = plan_of(planned(commit_with(line(0, 10), line(1, 7)), {0: 15, 1: 7}))
    assert plan.tasks == (("f", 0),)


def test_with_nothing_to_read_and_no_tick_there_is_no_round() -> None:
    assert planned(commit_with(line(0, 15), line(1, 7)), {0: 15, 1: 7}) == Rest(None, 0)


def test_all_tasks_of_a_rekeyed_flow_take_part_together() -> None:
    plan = plan_of(planned(commit_with(line(0), line(1), line(2)), {0: 5, 1: 0, 2: 0}, flow=REKEYED))
    assert [task for _, task in plan.tasks] == [0, 1, 2, 3]


def test_a_stopped_partition_leaves_later_plans_and_the_others_go_on() -> None:
    stop = Stop("integrity", "a gap", 3, "")
    plan = plan_of(planned(commit_with(line(0, 3, stopped=stop), line(1, 0)), {0: 15, 1: 7}))
    assert [each.partition for each in plan.ranges] == [1]
    rest = planned(commit_with(line(0, 3, stopped=stop), line(1, 7)), {0: 15, 1: 7})
    assert rest == Rest(None, 0)


def test_every_partition_with_something_to_read_reads_something() -> None:
    plan = plan_of(planned(commit_with(line(0), line(1)), {0: 10, 1: 10}, size=1))
    assert [(each.stop - each.start) for each in plan.ranges] == [1, 1]


def test_shares_are_even_and_nothing_is_left_where_somebody_wants_it() -> None:
    assert share_out({"a": 10, "b": 1000, "c": 1000}, 610) == {"a": 10, "b": 300, "c": 300}
    for seed in range(200):
        chance = random.Random(seed)
        wanted = {number: chance.randrange(100) for number in range(chance.randrange(1, 6))}
        total = chance.randrange(300)
        shares = share_out(wanted, total)
        assert all(shares[name] <= most for name, most in wanted.items()), seed
        assert min(total, sum(wanted.values())) - sum(shares.values()) < len(wanted), seed


# -- offsets that are gone -----------------------------------------------------------------------


def test_deleted_offsets_stop_the_partition_with_the_command_that_resumes_it() -> None:
    plan = plan_of(planned(commit_with(line(0, 10), line(1, 0)), {0: Head(40, 90), 1: 5}))
    (halt,) = plan.halts
    assert (halt.partition, halt.stop.reason, halt.stop.offset) == (0, "lost", 10)
    assert "offsets 10 to 39 of in-0" in halt.stop.message
    assert halt.stop.remedy == "tidegate app resume a --partition f:0 --skip-to 40"
    assert halt.stop.remedy in halt.stop.message
    assert [each.partition for each in plan.ranges] == [1]


def test_an_accepted_loss_is_recorded_and_reading_goes_on_behind_it() -> None:
    plan = plan_of(planned(commit_with(line(0, 10), line(1, 5)), {0: Head(40, 90), 1: 5}, on_loss="accept"))
    assert [(each.first, each.end, each.round) for each in plan.losses] == [(10, 40, 5)]
    assert [(each.start, each.stop) for each in plan.ranges] == [(40, 90)]
    assert not plan.halts


def test_a_topic_that_was_made_anew_stops_the_partition() -> None:
    plan = plan_of(planned(commit_with(line(0, 10), line(1, 0)), {0: 4, 1: 0}))
    assert "ends at offset 4" in plan.halts[0].stop.message


# -- time ----------------------------------------------------------------------------------------


def three(*times: int, next_offset: int = 9, **values: Any) -> list[SourceLine]:
    return [line(number, next_offset, stream_time=time, **values) for number, time in enumerate(times)]


ENDS = {0: 9, 1: 9, 2: 9}


def watermark(outcome: Planned | Rest) -> int | None:
    return plan_of(outcome).ticks["f"].watermark


def test_the_watermark_is_the_least_time_of_partitions_that_are_not_silent() -> None:
    outcome = planned(commit_with(*three(500, 300, 900)), ENDS, flow=REKEYED)
    assert watermark(outcome) == 300
    outcome = planned(commit_with(*three(500, 300, 900)), ENDS, flow=REKEYED, silent_ms={1: IDLE})
    assert watermark(outcome) == 500


def test_R_16_a_partition_with_something_to_read_is_never_silent() -> None:
    commit = commit_with(*three(500, 300, 900), watermarks={"f": 300})
    outcome = planned(commit, ENDS | {1: 50}, flow=REKEYED, silent_ms={1: 10 * IDLE})
    assert watermark(outcome) == 300


def test_R_16_a_silent_partition_is_waited_for_until_a_known_moment() -> None:
    commit = commit_with(*three(500, 300, 900), watermarks={"f": 300})
    rest = planned(commit, ENDS, flow=REKEYED, silent_ms={0: 100, 1: 5000, 2: 100})
    assert isinstance(rest, Rest) and (rest.until_ms, rest.lag_records) == (NOW + IDLE - 5000, 0)
    until = "windows of f stay open until it has, or has been silent for 30 s"
    assert rest.waiting_for == tuple(
        f"in-{number}, which has no more records: {until}" for number in (1, 0)
    ), "the one that is furthest behind comes first; the furthest one holds nothing"


def test_R_16_when_all_are_silent_the_furthest_counts() -> None:
    everybody = dict.fromkeys(range(3), IDLE)
    outcome = planned(commit_with(*three(500, 300, 900)), ENDS, flow=REKEYED, silent_ms=everybody)
    assert watermark(outcome) == 900


def test_R_16_a_flow_that_never_had_a_record_has_no_watermark() -> None:
    everybody = dict.fromkeys(range(3), IDLE)
    assert planned(commit_with(*three(-1, -1, -1)), ENDS, flow=REKEYED, silent_ms=everybody) == Rest(None, 0)
    one = planned(commit_with(*three(-1, -1, 77)), ENDS, flow=REKEYED)
    assert isinstance(one, Rest) and one.until_ms == NOW + IDLE


def test_R_16_a_stopped_partition_holds_the_watermark_and_is_named() -> None:
    sources = three(500, 300, 900)
    sources[1] = line(1, 9, stream_time=300, stopped=Stop("integrity", "", 9, ""))
    commit = commit_with(*sources, watermarks={"f": 300})
    rest = planned(commit, ENDS, flow=REKEYED, silent_ms=dict.fromkeys(range(3), 9 * IDLE))
    assert rest == Rest(None, 0, ("in-1, which is stopped",))


def test_a_watermark_never_falls() -> None:
    commit = commit_with(*three(500, 300, 900), watermarks={"f": 800})
    outcome = planned(commit, ENDS | {0: 12}, flow=REKEYED)
    assert watermark(outcome) == 800


def test_windows_of_a_rekeyed_flow_close_by_the_clock_until_nothing_is_left() -> None:
    flow = FlowFacts("f", "in", 3, 4, is_rekeyed=True, kept_ms=60_000, idle_close_ms=5_000)
    times = {}
    for silent in (5_000, 20_000, 65_000, 500_000):
        everybody = dict.fromkeys(range(3), silent)
        times[silent] = watermark(
            planned(commit_with(*three(500, 300, 900)), ENDS, flow=flow, silent_ms=everybody)
        )
    assert times == {5_000: 5_900, 20_000: 20_900, 65_000: 65_900, 500_000: 65_900}


def test_a_copartitioned_flow_ticks_only_to_close_by_the_clock_and_not_for_ever() -> None:
    flow = FlowFacts("f", "in", 1, 1, kept_ms=10_000, idle_close_ms=5_000)
    seen = NOW - 100_000
    task = TaskLine("f", 0, ticked_ms=seen)
    ticks, now = [], seen
    for _ in range(100):
        commit = commit_with(line(0, 9, stream_time=5, seen_ms=seen), tasks=(task,))
        outcome = planned(commit, {0: 9}, flow=flow, now_ms=now)
        if isinstance(outcome, Planned):
            ticks.append(now - seen)
            task = TaskLine("f", 0, ticked_ms=now)
        elif outcome.until_ms is None:
            break
        else:
            now = outcome.until_ms
    assert ticks[0] == 5_000 and ticks[-1] == 15_000
    assert len(ticks) == 1 + 10_000 // TICK_EVERY_MS


def test_the_end_of_input_reaches_every_task_once_when_all_is_read() -> None:
    commit = commit_with(line(0, 9), line(1, 9))
    plan = plan_of(planned(commit, {0: 9, 1: 9}, closing=True))
    assert plan.ticks["f"].closing and len(plan.tasks) == 2
    early = plan_of(planned(commit, {0: 9, 1: 12}, closing=True))
    assert "f" not in early.ticks
    assert planned(commit_with(line(0, 9), line(1, 9), closed=("f",)), {0: 9, 1: 9}, closing=True) == Rest(
        None, 0
    )


def test_the_end_of_input_is_not_told_to_those_whose_input_was_stopped() -> None:
    stop = Stop("integrity", "", 3, "")
    plan = plan_of(planned(commit_with(line(0, 3, stopped=stop), line(1, 9)), {0: 9, 1: 9}, closing=True))
    assert plan.tasks == (("f", 1),)
    sources = [*three(5, 5)[:2], line(2, 3, stream_time=5, stopped=stop)]
    rest = planned(commit_with(*sources, watermarks={"f": 5}), ENDS, flow=REKEYED, closing=True)
    assert isinstance(rest, Rest)


# -- the brake -----------------------------------------------------------------------------------


def held(*sizes: int) -> tuple[TaskLine, ...]:
    return tuple(TaskLine("f", number, b"t", backlog_bytes=size) for number, size in enumerate(sizes))


def test_a_round_reads_no_more_than_the_free_backlog_takes() -> None:
    backpressure = Backpressure(LIMIT, lambda flow, task: 0, growth={"f": 100.0})
    commit = commit_with(line(0), line(1), tasks=held(300_000, 300_000))
    plan = plan_of(planned(commit, {0: 10_000, 1: 10_000}, size=20_000, backpressure=backpressure))
    read = sum(each.stop - each.start for each in plan.ranges)
    assert read * 100 <= LIMIT * THRESHOLD_PERMILLE // 1000 - 600_000
    assert read > 1000


def test_processes_have_budgets_of_their_own() -> None:
    backpressure = Backpressure(LIMIT, lambda flow, task: task, growth={"f": 100.0})
    commit = commit_with(line(0), line(1), tasks=held(800_000, 0))
    plan = plan_of(planned(commit, {0: 10_000, 1: 10_000}, size=4_000, backpressure=backpressure))
    assert [(each.partition, each.stop) for each in plan.ranges] == [(1, 2_000)]


def test_over_budget_reading_goes_on_in_small_steps_and_never_says_caught_up() -> None:
    backpressure = Backpressure(LIMIT, lambda flow, task: 0, growth={"f": 100.0})
    commit = commit_with(line(0), line(1), tasks=held(400_000, 400_000))
    outcome = planned(commit, {0: 10_000, 1: 10_000}, size=20_000, backpressure=backpressure)
    assert [each.stop for each in plan_of(outcome).ranges] == [500, 500]  # half of the room there is
    assert isinstance(outcome, Planned)
    assert "backlog" in outcome.waiting_for[0]


def test_over_budget_a_tick_that_can_free_something_comes_before_any_record() -> None:
    backpressure = Backpressure(LIMIT, lambda flow, task: 0, growth={"f": 100.0})
    commit = commit_with(*three(500, 300, 900), tasks=held(900_000), watermarks={"f": 100})
    plan = plan_of(planned(commit, ENDS | {1: 5000}, flow=REKEYED, backpressure=backpressure))
    assert plan.ranges == () and plan.ticks["f"].watermark == 300 and len(plan.tasks) == 4


def test_over_budget_a_partition_about_to_count_as_silent_is_waited_for() -> None:
    backpressure = Backpressure(LIMIT, lambda flow, task: 0, growth={"f": 100.0})
    commit = commit_with(*three(500, 300, 900), tasks=held(900_000), watermarks={"f": 300})
    rest = planned(commit, ENDS | {0: 5000}, flow=REKEYED, backpressure=backpressure, silent_ms={1: 1000})
    assert isinstance(rest, Rest) and rest.lag_records == 4991
    assert rest.until_ms == NOW + IDLE - 1000
    assert any("in-1" in each for each in rest.waiting_for)


def test_R_16_what_is_kept_and_does_not_fit_ends_with_what_to_change() -> None:
    """Time passes over more than all that is kept and nothing is freed; or nothing ever frees anything."""
    backpressure = Backpressure(LIMIT, lambda flow, task: 0, growth={"f": 100.0})
    with pytest.raises(OverloadError) as raised:
        for step in range(1000):
            tasks = held(400_000, 400_000)
            commit = commit_with(
                line(0, stream_time=step * 10_000), line(1, stream_time=step * 10_000), tasks=tasks
            )
            planned(commit, {0: 10_000, 1: 10_000}, size=20_000, backpressure=backpressure)
    assert raised.value.reason == "retention_exceeds_backlog"
    assert step == (2 * 60_000 + BUCKETS_MS) // 10_000 + 1
    for word in ("backlog_limit_bytes", "grace", "flow f", "800000", "goes on where it stopped"):
        assert word in str(raised.value)


def test_R_16_a_full_backlog_ends_though_time_stands_still() -> None:
    backpressure = Backpressure(LIMIT, lambda flow, task: 0, growth={"f": 100.0})
    with pytest.raises(OverloadError, match="does not fit"):
        planned(commit_with(line(0), line(1), tasks=held(980_000)), {0: 10, 1: 10}, backpressure=backpressure)


def test_a_flow_without_state_is_not_braked_by_others() -> None:
    backpressure = Backpressure(LIMIT, lambda flow, task: 0)
    flow = FlowFacts("f", "in", 2, 2, is_stateful=False)
    commit = commit_with(line(0), line(1), tasks=held(990_000))
    plan = plan_of(planned(commit, {0: 400, 1: 400}, flow=flow, backpressure=backpressure))
    assert sum(each.stop for each in plan.ranges) == 800


@pytest.mark.parametrize("seed", range(300))
def test_R_16_planning_ends_for_any_backlog_watermark_and_silence(seed: int) -> None:
    """A simulated task that frees what is older than it keeps: reading comes to the end, or ends with an error that
    says why; it never rests without a moment while something is left."""
    chance = random.Random(seed)
    flow = chance.choice(
        [
            FlowFacts("f", "in", 2, 2, kept_ms=chance.choice([10, 1000, 100_000])),
            FlowFacts("f", "in", 2, 1, is_rekeyed=True, kept_ms=chance.choice([10, 1000, 100_000])),
        ]
    )
    records = {
        p: sorted(chance.randrange(50_000) for _ in range(chance.randrange(0, 4000))) for p in range(2)
    }
    weight = chance.choice([10, 100, 1000])
    backpressure = Backpressure(LIMIT, lambda flow, task: 0)
    commit = commit_with(line(0), line(1), watermarks={})
    inside: list[int] = []
    now, silent = NOW, {0: 0, 1: 0}
    for _ in range(2000):
        try:
            outcome = planned(
                commit,
                {p: len(records[p]) for p in range(2)},
                flow=flow,
                backpressure=backpressure,
                now_ms=now,
                silent_ms=silent,
            )
        except OverloadError as error:
            assert error.reason == "retention_exceeds_backlog"
            assert len(inside) * weight * 1000 >= LIMIT * THRESHOLD_PERMILLE
            return
        if isinstance(outcome, Rest):
            if outcome.lag_records == 0:
                assert [each.next_offset for each in commit.sources] == [len(records[0]), len(records[1])]
                return
            assert outcome.until_ms is not None and outcome.until_ms > now, (
                "it rests with something left, for ever"
            )
            passed = outcome.until_ms - now
            now, silent = outcome.until_ms, {p: ms + passed for p, ms in silent.items()}
            continue
        lines = {each.partition: each for each in commit.sources}
        for each in outcome.plan.ranges:
            taken = records[each.partition][each.start : each.stop]
            inside += taken
            time = max([lines[each.partition].stream_time, *taken])
            lines[each.partition] = line(each.partition, each.stop, stream_time=time)
        mark = (outcome.plan.ticks.get("f") or Tick(0, -1)).watermark
        assert mark is not None
        least = mark if flow.is_rekeyed else min(each.stream_time for each in lines.values())
        inside = [ts for ts in inside if flow.kept_ms is None or ts > least - flow.kept_ms]
        after = commit_with(
            *lines.values(), tasks=held(len(inside) * weight), watermarks={"f": mark} if mark >= 0 else {}
        )
        read = sum(each.stop - each.start for each in outcome.plan.ranges)
        backpressure.note(commit, after, {"f": read})
        commit = after
    raise AssertionError("it never ended")


# -- sizes ---------------------------------------------------------------------------------------


def test_round_sizes_follow_the_target_and_grow_a_step_at_a_time() -> None:
    sizes = RoundSizes(fixed=None, first=50_000, target_ms=2000)
    for _ in range(12):  # a million records a second, and a tenth of a second for nothing
        sizes.note(sizes.records, 100 + sizes.records // 1000)
    assert 1_500_000 < sizes.records < 2_200_000
    sizes.note(sizes.records, 20_000)
    assert sizes.records > 150_000


def test_a_round_that_read_all_there_was_says_nothing_about_larger_ones() -> None:
    sizes = RoundSizes(fixed=None, first=50_000, target_ms=2000)
    sizes.note(10, 500)
    assert sizes.records == 50_000


def test_fixed_sizes_stay_and_large_records_begin_small() -> None:
    fixed = RoundSizes(fixed=250_000, first=50_000, target_ms=2000)
    fixed.note(250_000, 60_000)
    fixed.begin_with(1_000_000.0)
    assert fixed.records == 250_000
    large = RoundSizes(fixed=None, first=50_000, target_ms=2000)
    large.begin_with(1_000_000.0)
    assert large.records < 100


def test_a_round_that_was_too_much_is_halved_until_it_cannot_be() -> None:
    sizes = RoundSizes(fixed=None, first=LEAST, target_ms=2000)
    seen = []
    while sizes.cut():
        seen.append(sizes.records)
    assert seen[-1] == 1


# -- one order of all partitions -----------------------------------------------------------------


def holding(events: int, waits_for: tuple[int, int, int], *partitions: int) -> tuple[TaskLine, ...]:
    return (TaskLine("f", 0), TaskLine("f", 1, held=Held(events, waits_for, dict.fromkeys(partitions, 0))))


def test_an_ordered_flow_waits_for_all_but_silent_partitions() -> None:
    lines = (line(0, 5, stream_time=50), line(1, 7, stream_time=70), line(2, 0))
    plan = plan_of(planned(commit_with(*lines), {0: 9, 1: 7, 2: 0}, flow=ORDERED))
    assert plan.ticks["f"].waits == (0, 1, 2)
    plan = plan_of(
        planned(commit_with(*lines), {0: 9, 1: 7, 2: 0}, flow=ORDERED, silent_ms={0: IDLE, 2: IDLE})
    )
    assert plan.ticks["f"].waits == (0, 1), "what has records to read is never silent"


def test_what_waits_makes_a_round_only_when_it_need_not_wait_any_more() -> None:
    lines = (line(0, 5, stream_time=50), line(1, 7, stream_time=70), line(2, 9, stream_time=80))
    commit = commit_with(*lines, tasks=holding(3, (50, 0, 5), 1, 2), watermarks={"f": 50})
    ends = {0: 5, 1: 7, 2: 9}
    rest = planned(commit, ends, flow=ORDERED, silent_ms={0: 10_000})
    assert isinstance(rest, Rest) and rest.until_ms == NOW + IDLE - 10_000
    assert rest.waiting_for == (
        "in-0, which has no more records: 3 records of f are held back until it has come as far as they are",
    )
    plan = plan_of(planned(commit, ends, flow=ORDERED, silent_ms={0: IDLE}))
    assert plan.tasks == (("f", 0), ("f", 1)) and plan.ticks["f"].waits == (1, 2) and not plan.ranges


def test_partitions_at_the_same_time_are_waited_for_too() -> None:
    lines = (line(0, 5, stream_time=70), line(1, 7, stream_time=70), line(2, 9, stream_time=70))
    commit = commit_with(*lines, tasks=holding(1, (70, 0, 5), 1), watermarks={"f": 70})
    rest = planned(commit, {0: 5, 1: 7, 2: 9}, flow=ORDERED)
    assert isinstance(rest, Rest) and rest.until_ms == NOW + IDLE, "the watermark stands, but a record waits"


def test_the_end_of_a_run_waits_for_nothing_but_stopped_partitions() -> None:
    lines = (line(0, 5, stream_time=50), line(1, 7, stream_time=70), line(2, 9, stream_time=80))
    commit = commit_with(*lines, tasks=holding(3, (50, 0, 5), 1, 2), watermarks={"f": 50})
    ends = {0: 5, 1: 7, 2: 9}
    plan = plan_of(planned(commit, ends, flow=ORDERED, ending=True))
    assert plan.ticks["f"].waits == () and len(plan.tasks) == 2
    still = plan_of(planned(commit, {**ends, 1: 8}, flow=ORDERED, ending=True))
    assert still.ticks["f"].waits == (0, 1, 2), "there is something left to read"
    assert isinstance(planned(commit, ends, flow=ORDERED, ending=True, idle=None), Rest)
    assert isinstance(planned(commit, ends, flow=ORDERED, ending=True, closes=True), Rest), (
        "the end comes first"
    )
    closing = plan_of(planned(commit, ends, flow=ORDERED, closing=True, idle=None))
    assert closing.ticks["f"] == Tick(NOW, 50, closing=False, waits=()), (
        "what waits goes before windows close"
    )
    stop = Stop("integrity", "a gap", 5, "")
    stopped = commit_with(
        line(0, 5, stream_time=50, stopped=stop), *lines[1:], tasks=commit.tasks, watermarks={"f": 50}
    )
    rest = planned(stopped, ends, flow=ORDERED, ending=True)
    assert isinstance(rest, Rest) and "in-0, which is stopped" in rest.waiting_for[-1]


def test_partitions_that_are_ahead_are_read_when_nobody_waits_for_what_they_bring() -> None:
    lines = (line(0, 5, stream_time=50), line(1, 7, stream_time=70), line(2, 9, stream_time=80))
    ends = {0: 500, 1: 700, 2: 900}
    few = commit_with(*lines, tasks=holding(90, (50, 0, 5), 1, 2))
    assert [each.partition for each in plan_of(planned(few, ends, flow=ORDERED, size=90)).ranges] == [0, 1, 2]
    many = commit_with(*lines, tasks=holding(91, (50, 0, 5), 1, 2))
    plan = plan_of(planned(many, ends, flow=ORDERED, size=90))
    assert [(each.partition, each.stop - each.start) for each in plan.ranges] == [(0, 90)]
    ended = plan_of(planned(many, {**ends, 0: 5}, flow=ORDERED, size=90))
    assert [each.partition for each in ended.ranges] == [1, 2], "who is waited for has nothing to read"


def test_a_partition_that_goes_on_behind_the_end_of_a_run_is_not_silent() -> None:
    lines = (line(0, 5, stream_time=50), line(1, 7, stream_time=70), line(2, 9, stream_time=80))
    ends = {0: Head(0, 5, goes_on=True), 1: 7, 2: 9}
    silent = dict.fromkeys(range(3), IDLE)
    assert isinstance(
        planned(commit_with(*lines, watermarks={"f": 50}), ends, flow=REKEYED, silent_ms=silent), Rest
    )
    held = commit_with(*lines, tasks=holding(3, (50, 0, 5), 1, 2), watermarks={"f": 50})
    rest = planned(held, ends, flow=ORDERED, silent_ms=silent, ending=True)
    assert isinstance(rest, Rest) and "in-0, which goes on behind what this run reads" in rest.waiting_for[0]
    assert plan_of(planned(held, ends, flow=ORDERED, closing=True)).ticks["f"].waits == (), (
        "the input ends there"
    )


def test_a_full_backlog_of_what_waits_is_no_reason_to_read_more_of_it() -> None:
    lines = (line(0, 5, stream_time=50), line(1, 7, stream_time=70), line(2, 9, stream_time=80))
    full = TaskLine("f", 1, backlog_bytes=LIMIT * 8 // 10, held=Held(5000, (50, 0, 5), {1: 0, 2: 0}))
    commit = commit_with(*lines, tasks=(TaskLine("f", 0), full), watermarks={"f": 50})
    rest = planned(commit, {0: 5, 1: 700, 2: 900}, flow=ORDERED, idle=None)
    assert isinstance(rest, Rest) and rest.lag_records == 693 + 891
    assert "in-0, which has no more records" in rest.waiting_for[0] and "backlog" in rest.waiting_for[1]
    plan = plan_of(planned(commit, {0: 6, 1: 700, 2: 900}, flow=ORDERED, idle=None))
    assert [each.partition for each in plan.ranges] == [0], "who is waited for is always read"
    ending = plan_of(planned(commit, {0: 5, 1: 700, 2: 900}, flow=ORDERED, idle=None, ending=True))
    assert [each.partition for each in ending.ranges] == [1, 2], "a run that ends fills the rest, and says so"
