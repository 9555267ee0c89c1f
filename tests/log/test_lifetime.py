"""The life of a record: the worked examples, the formula against a naive simulation, forecasts and traps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.log.lifetime.facts import find_traps
from tidegate.log.lifetime.lifetime import (
    PartitionFacts,
    Rule,
    SegmentFacts,
    Workload,
    forecast,
    lifetime_of_offset,
    workload_lifetime,
)
from tidegate.log.topic_config import BrokerConfig, TopicConfig

MINUTE = 60_000
CANARY = Workload(record_bytes=150, interval_ms=5000)
CANARY_TOPIC = TopicConfig.of({"retention.ms": "600000", "segment.bytes": "16384"})
BROKER = BrokerConfig()


# -- worked examples ------------------------------------------------------------------------------


def test_the_canarys_ten_minutes_become_nineteen_then_twenty_four_then_twenty_five():
    lifetime = workload_lifetime(CANARY, CANARY_TOPIC, BROKER)
    answer = lifetime.as_dict()
    assert answer["records_per_segment"] == 109
    assert answer["guaranteed_ms"] == 600_000 == 10 * MINUTE
    assert answer["oldest_at_expiry_ms"] == 1_140_000 == 19 * MINUTE
    assert answer["visible_max_ms"] == 1_440_000 == 24 * MINUTE
    assert answer["disk_max_ms"] == 1_500_000 == 25 * MINUTE
    assert answer["fill_ms"] == 540_000, "109 records span 108 intervals, not 109"
    assert answer["roll_rule"] == "size"
    assert {entry["rule"] for entry in answer["rules"].values()} == {"time"}


def test_a_full_time_index_shortens_the_segment_to_49_records_and_every_bound_with_it():
    config = TopicConfig.of(
        {
            "retention.ms": "600000",
            "segment.bytes": "16384",
            "index.interval.bytes": "150",
            "segment.index.bytes": "300",
        }
    )
    answer = workload_lifetime(CANARY, config, BROKER).as_dict()
    assert answer["records_per_segment"] == 49
    assert answer["roll_rule"] == "time_index_full"
    assert answer["oldest_at_expiry_ms"] == 48 * 5000 + 600_000
    assert answer["visible_max_ms"] == 48 * 5000 + 600_000 + 300_000
    assert answer["disk_max_ms"] == 48 * 5000 + 600_000 + 300_000 + 60_000


def test_a_timed_roll_decides_when_it_comes_before_the_size():
    config = TopicConfig.of({"retention.ms": "600000", "segment.ms": "60000"})
    answer = workload_lifetime(CANARY, config, BROKER).as_dict()
    assert (answer["records_per_segment"], answer["roll_rule"]) == (13, "time")
    assert answer["visible_max_ms"] == 12 * 5000 + 600_000 + 300_000


def test_retention_by_bytes_counts_the_later_records_it_needs():
    config = TopicConfig.of({"retention.bytes": "15000", "retention.ms": "-1", "segment.bytes": "16384"})
    answer = workload_lifetime(CANARY, config, BROKER).as_dict()
    assert answer["guaranteed_ms"] == 100 * 5000
    assert answer["visible_max_ms"] == 108 * 5000 + 100 * 5000 + 300_000
    assert answer["rules"]["visible_max_ms"]["rule"] == "size"


def test_without_any_limit_or_anybody_to_check_the_answer_is_never():
    unlimited = workload_lifetime(CANARY, TopicConfig.of({"retention.ms": "-1"}), BROKER)
    assert (unlimited.guaranteed.ms, unlimited.visible_max.ms) == (None, None)
    assert unlimited.visible_max.rule is Rule.UNLIMITED
    unattended = workload_lifetime(CANARY, CANARY_TOPIC, BROKER, attended=False)
    assert (unattended.guaranteed.ms, unattended.oldest_at_expiry.ms) == (600_000, 1_140_000)
    assert (unattended.visible_max.ms, unattended.disk_max.ms) == (None, None)
    assert unattended.visible_max.rule is Rule.UNATTENDED


def test_compact_only_promises_nothing_to_superseded_records_and_ever_to_the_newest():
    config = TopicConfig.of({"cleanup.policy": "compact", "min.compaction.lag.ms": "1000"})
    lifetime = workload_lifetime(CANARY, config, BROKER)
    assert (lifetime.guaranteed.ms, lifetime.guaranteed.rule) == (1000, Rule.COMPACTION)
    assert (lifetime.visible_max.ms, lifetime.visible_max.rule) == (None, Rule.COMPACTION)


def test_topics_that_also_compact_are_swept_by_the_cleaner_every_fifteen_seconds():
    config = CANARY_TOPIC.altered({"cleanup.policy": "compact,delete"})
    assert workload_lifetime(CANARY, config, BROKER).visible_max.ms == 1_140_000 + 15_000


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_with_the_cleaner_off_no_record_of_a_compacted_topic_goes(policy: str) -> None:
    config = TopicConfig.of({"cleanup.policy": policy, "retention.ms": "600000"})
    off = BrokerConfig.of({"log.cleaner.enable": "false"})
    answer = workload_lifetime(CANARY, config, off).as_dict()
    assert answer["check_interval_ms"] is None
    assert answer["visible_max_ms"] is None and answer["disk_max_ms"] is None
    for bound in ("visible_max_ms", "disk_max_ms"):
        assert answer["rules"][bound]["rule"] == "unattended"
        assert "log.cleaner.enable=false" in answer["rules"][bound]["because"]
    assert answer["guaranteed_ms"] == (None if policy == "compact" else 600_000)
    assert answer["rules"]["guaranteed_ms"]["rule"] != "compaction"
    (trap,) = [trap for trap in find_traps(config, off, CANARY) if trap.name == "cleaner-off"]
    assert trap.fix == "log.cleaner.enable=true (broker)"
    assert "cleaner-off" not in {trap.name for trap in find_traps(config, BROKER, CANARY)}
    assert "cleaner-off" not in {trap.name for trap in find_traps(CANARY_TOPIC, off, CANARY)}
    assert workload_lifetime(CANARY, CANARY_TOPIC, off) == workload_lifetime(CANARY, CANARY_TOPIC, BROKER)


def test_a_producer_slower_than_retention_and_check_never_fills_a_segment():
    config = CANARY_TOPIC
    lifetime = workload_lifetime(Workload(150, 3_600_000), config, BROKER)
    assert lifetime.visible_max.ms == 600_000 + 300_000


def test_a_record_that_fits_no_segment_is_refused_with_the_setting_to_raise():
    with pytest.raises(InvalidError, match=r"raise segment\.bytes"):
        workload_lifetime(Workload(20_000, 5000), CANARY_TOPIC, BROKER)


def test_the_advice_really_brings_the_maximum_nearer():
    lifetime = workload_lifetime(CANARY, CANARY_TOPIC, BROKER)
    size = next(change for change in lifetime.changes if change.startswith("segment.bytes="))
    smaller = CANARY_TOPIC.altered({"segment.bytes": size.split()[0].partition("=")[2]})
    assert workload_lifetime(CANARY, smaller, BROKER).oldest_at_expiry.ms <= 660_000


# -- the formula against a simulation -------------------------------------------------------------


@dataclass
class _Segment:
    births: list[int]
    size: int = 0
    since_entry: int = 0
    entries: int = 0
    time_entries: int = 0
    last_entry_time: int = -1


def _simulate(workload, config, interval, phase, rolls=5):
    """Append, roll and check millisecond by millisecond; how long each record stayed readable."""
    segments = [_Segment([])]
    lives: dict[int, int] = {}
    rolled, now = 0, 0
    while rolled < rolls or len(lives) < 3:
        if now % workload.interval_ms == 0:
            active = segments[-1]
            full = active.size > config.segment_bytes - workload.record_bytes
            old = active.births and now - active.births[0] > config.segment_ms
            indexed = active.entries >= config.segment_index_bytes // 8
            timed = active.time_entries >= config.segment_index_bytes // 12 - 1
            if full or old or ((indexed or timed) and active.births):
                segments.append(_Segment([]))
                rolled += 1
                active = segments[-1]
            if active.since_entry > config.index_interval_bytes:
                active.entries += 1
                active.time_entries += now > active.last_entry_time
                active.last_entry_time, active.since_entry = now, 0
            active.since_entry += workload.record_bytes
            active.size += workload.record_bytes
            active.births.append(now)
        if now % interval == phase:
            _check(segments, config, now, lives)
        now += 1
        if now > 20_000:
            break
    return lives


def _check(segments, config, now, lives):
    def drop():
        gone = segments.pop(0)
        lives.update({birth: now - birth for birth in gone.births})
        if not segments:
            segments.append(_Segment([]))

    if config.retention_bytes >= 0:
        surplus = sum(segment.size for segment in segments) - config.retention_bytes
        while surplus >= 0 and segments[0].births and surplus - segments[0].size >= 0:
            surplus -= segments[0].size
            drop()
    if config.retention_ms >= 0:
        while segments[0].births and now - segments[0].births[-1] > config.retention_ms:
            drop()


@settings(max_examples=120, deadline=None)
@given(
    record=st.integers(1, 6),
    period=st.integers(1, 6),
    segment_bytes=st.integers(14, 50),
    segment_ms=st.integers(1, 60),
    index_interval=st.integers(0, 12),
    index_bytes=st.integers(24, 80),
    retention_ms=st.integers(-1, 30),
    retention_bytes=st.integers(-1, 80),
    interval=st.integers(1, 9),
)
def test_no_simulated_record_outlives_or_undercuts_the_formula_at_any_phase(
    record,
    period,
    segment_bytes,
    segment_ms,
    index_interval,
    index_bytes,
    retention_ms,
    retention_bytes,
    interval,
):
    if retention_ms < 0 and retention_bytes < 0:
        retention_ms = 5
    workload = Workload(record, period)
    config = TopicConfig(
        segment_bytes=segment_bytes,
        segment_ms=segment_ms,
        index_interval_bytes=index_interval,
        segment_index_bytes=index_bytes,
        retention_ms=retention_ms,
        retention_bytes=retention_bytes,
    )
    broker = BrokerConfig(log_retention_check_interval_ms=interval)
    lifetime = workload_lifetime(workload, config, broker)
    longest, shortest = 0, 10**9
    for phase in range(interval):
        lives = _simulate(workload, config, interval, phase)
        longest = max(longest, *lives.values())
        shortest = min(shortest, *lives.values())
    assert shortest >= lifetime.guaranteed.ms
    assert longest <= lifetime.visible_max.ms
    by_size_ms = -(-retention_bytes // record) * period if retention_bytes >= 0 else 10**9
    if period <= retention_ms < by_size_ms:  # there the bounds are reached
        assert longest == lifetime.visible_max.ms
        assert shortest == lifetime.guaranteed.ms + 1, (
            "a check sees a record older than retention at 1 ms over"
        )


@settings(max_examples=40, deadline=None)
@given(record=st.integers(1, 6), period=st.integers(1, 6), index_bytes=st.integers(24, 80))
def test_the_simulated_segment_holds_as_many_records_as_the_formula_says(record, period, index_bytes):
    config = TopicConfig(
        segment_bytes=50,
        segment_ms=60,
        index_interval_bytes=4,
        segment_index_bytes=index_bytes,
        retention_ms=200,
    )
    lifetime = workload_lifetime(
        Workload(record, period), config, BrokerConfig(log_retention_check_interval_ms=7)
    )
    lives = _simulate(Workload(record, period), config, 7, 3)
    births = sorted(lives)
    first = [birth for birth in births if birth + lives[birth] == births[0] + lives[births[0]]]
    assert len(first) >= lifetime.capacity.records, "the first removal takes at least one whole segment"
    assert first[lifetime.capacity.records - 1] == lifetime.fill_ms


# -- segments that exist --------------------------------------------------------------------------

NOW = 1_767_225_600_000


def _segment(base, count, size, first_age_ms, last_age_ms, active=False):
    return SegmentFacts(base, base + count, size, NOW - first_age_ms, NOW - last_age_ms, False, active)


def _facts(*segments, interval=300_000, start=None, watermark=None):
    end = segments[-1].next_offset
    return PartitionFacts(
        "canary",
        0,
        tuple(segments),
        segments[0].base_offset if start is None else start,
        end if watermark is None else watermark,
        end,
        NOW,
        interval,
    )


def test_a_closed_segment_goes_between_its_expiry_and_one_check_later():
    facts = _facts(
        _segment(0, 109, 16314, 700_000, 160_000), _segment(109, 31, 4650, 155_000, 5000, active=True)
    )
    closed, active = forecast(facts, CANARY_TOPIC)
    due = NOW - 160_000 + 600_000 + 1
    assert (closed.rule, closed.due_ms) == (Rule.TIME, due)
    assert (closed.gone_earliest_ms, closed.gone_latest_ms) == (due, due + 300_000)
    assert (closed.disk_earliest_ms, closed.disk_latest_ms) == (due + 60_000, due + 360_000)
    assert active.gone_earliest_ms == NOW - 5000 + 600_001, "should production stop now"
    hard = NOW - 155_000 + CANARY_TOPIC.segment_ms + 600_001 + 300_000
    assert active.gone_latest_ms == hard, "segment.ms bounds how long it can keep filling"


def test_an_expired_segment_is_due_at_the_next_check():
    facts = _facts(_segment(0, 9, 900, 900_000, 700_000), _segment(9, 1, 100, 5000, 5000, active=True))
    assert forecast(facts, CANARY_TOPIC)[0].gone_earliest_ms == NOW
    assert forecast(facts, CANARY_TOPIC)[0].gone_latest_ms == NOW + 300_000


def test_one_future_dated_segment_holds_back_everything_newer():
    day = 86_400_000
    facts = _facts(
        _segment(0, 10, 1000, 900_000, 800_000),
        _segment(10, 10, 1000, 800_000, -day),
        _segment(20, 10, 1000, 790_000, 700_000),
        _segment(30, 1, 100, 0, 0, active=True),
    )
    first, future, behind, active = forecast(facts, CANARY_TOPIC)
    assert first.gone_latest_ms == NOW + 300_000, "older than the blocker, so not held back"
    assert (future.rule, behind.rule, active.rule) == (Rule.FUTURE_DATED,) * 3
    assert (behind.blocked_by, active.blocked_by) == (10, 10)
    assert behind.gone_earliest_ms == future.gone_earliest_ms == NOW + day + 600_001
    assert "message.timestamp.after.max.ms" in future.change


def test_a_younger_looking_older_segment_delays_the_next():
    facts = _facts(
        _segment(0, 10, 1000, 900_000, 10_000),
        _segment(10, 10, 1000, 900_000, 500_000),
        _segment(20, 1, 9, 0, 0, True),
    )
    first, second, _ = forecast(facts, CANARY_TOPIC)
    assert (second.rule, second.blocked_by) == (Rule.OLDER_SEGMENT, 0)
    assert second.gone_earliest_ms == first.gone_earliest_ms


def test_size_takes_what_has_enough_newer_bytes_and_tells_the_headroom_of_the_rest():
    config = TopicConfig.of({"retention.bytes": "1500", "retention.ms": "-1"})
    facts = _facts(
        _segment(0, 10, 1000, 300_000, 200_000),
        _segment(10, 10, 1000, 200_000, 100_000),
        _segment(20, 6, 600, 100_000, 40_000, active=True),
    )
    first, second, active = forecast(facts, config)
    assert (first.rule, first.gone_earliest_ms, first.headroom_bytes) == (Rule.SIZE, NOW, 0)
    assert (second.headroom_bytes, active.headroom_bytes) == (900, 1500)
    assert second.gone_earliest_ms == NOW + 90_000, "2600 bytes in 260 s so far, 900 to come"
    assert second.gone_latest_ms is None, "should no more records arrive, it stays"


def test_segments_below_the_log_start_offset_are_due_whatever_the_policy():
    config = TopicConfig.of({"cleanup.policy": "compact"})
    facts = _facts(_segment(0, 10, 100, 10, 5), _segment(10, 10, 100, 4, 0, active=True), start=10)
    first, active = forecast(facts, config)
    assert (first.rule, first.gone_latest_ms) == (Rule.START_OFFSET, NOW + 300_000)
    assert (active.rule, active.gone_latest_ms) == (Rule.COMPACTION, None)


def test_nobody_checking_means_never_and_says_what_a_check_would_do():
    facts = _facts(_segment(0, 9, 900, 900_000, 700_000), _segment(9, 1, 9, 1, 0, True), interval=None)
    first = forecast(facts, CANARY_TOPIC)[0]
    assert (first.rule, first.gone_earliest_ms, first.gone_latest_ms) == (Rule.UNATTENDED, None, None)
    assert first.due_ms == NOW - 700_000 + 600_001
    assert "tidegate log clean" in first.change


def test_nothing_above_the_high_watermark_expires():
    facts = _facts(
        _segment(0, 9, 900, 900_000, 700_000), _segment(9, 1, 9, 700_000, 700_000, True), watermark=5
    )
    assert [life.rule for life in forecast(facts, CANARY_TOPIC)] == [Rule.HIGH_WATERMARK, Rule.HIGH_WATERMARK]


def test_an_offset_is_answered_by_the_segment_that_holds_it():
    lifetimes = forecast(_facts(_segment(0, 10, 9, 9, 8), _segment(10, 5, 9, 7, 0, True)), CANARY_TOPIC)
    assert lifetime_of_offset(lifetimes, 9).segment.base_offset == 0
    assert lifetime_of_offset(lifetimes, 10).segment.base_offset == 10
    assert lifetime_of_offset(lifetimes, 15) is None


# -- traps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings_", "workload", "name", "fix"),
    [
        pytest.param(
            {"retention.ms": 600_000}, None, "segment-outlives-retention", "segment.ms=60000", id="roll"
        ),
        pytest.param(
            {"index.interval.bytes": 150, "segment.index.bytes": 300, "segment.bytes": 16384},
            CANARY,
            "time-index-fills-first",
            "segment.index.bytes=660",
            id="time-index",
        ),
        pytest.param(
            {"segment.index.bytes": 1_000_000},
            None,
            "time-index-fills-first",
            "segment.index.bytes=3106308",
            id="index",
        ),
        pytest.param(
            {"retention.ms": 60_000, "segment.ms": 6000},
            None,
            "check-slower-than-retention",
            "log.retention.check.interval.ms=6000 (broker)",
            id="check",
        ),
        pytest.param(
            {"retention.bytes": 1 << 20},
            None,
            "retention-below-one-segment",
            "segment.bytes=104857",
            id="bytes",
        ),
        pytest.param(
            {"segment.ms": 60_000, "segment.jitter.ms": 60_000},
            None,
            "jitter",
            "segment.jitter.ms=6000",
            id="jitter",
        ),
        pytest.param(
            {"cleanup.policy": "compact", "retention.ms": 1000},
            None,
            "compact-only",
            "cleanup.policy=compact,delete",
            id="compact",
        ),
        pytest.param({}, None, "future-timestamps", "message.timestamp.after.max.ms=3600000", id="future"),
        pytest.param(
            {"segment.index.bytes": 20},
            None,
            "index-too-small",
            "segment.index.bytes=10485760",
            id="one-record",
        ),
        pytest.param(
            {"segment.index.bytes": 8}, None, "index-too-small", "segment.index.bytes=10485760", id="no-entry"
        ),
        pytest.param({"retention.ms": -1}, None, "no-limit", "retention.ms=604800000", id="no-limit"),
        pytest.param(
            {"retention.ms": 1000, "segment.ms": 100},
            CANARY,
            "slower-than-retention",
            "retention.ms=10000",
            id="slow",
        ),
    ],
)
def test_each_trap_is_named_with_its_fix_and_the_fix_removes_it(settings_, workload, name, fix):
    config = TopicConfig.of(settings_)
    found = {trap.name: trap for trap in find_traps(config, BROKER, workload)}
    assert found[name].fix == fix
    key, _, value = fix.removesuffix(" (broker)").partition("=")
    broker = BrokerConfig.of({key: value}) if fix.endswith("(broker)") else BROKER
    fixed = config if fix.endswith("(broker)") else config.altered({key: value})
    assert name not in {trap.name for trap in find_traps(fixed, broker, workload)}


def test_careful_settings_hold_no_trap():
    config = TopicConfig.of(
        {
            "retention.ms": 86_400_000,
            "segment.ms": 3_600_000,
            "message.timestamp.after.max.ms": 3_600_000,
        }
    )
    assert find_traps(config, BROKER) == []
