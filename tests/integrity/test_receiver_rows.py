"""The receiver, row by row of the decision table and its cases: both validators must say the same."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.errors import InvalidError
from tidegate.integrity.header import ChecksumType, ControlType, EndOfChain
from tidegate.integrity.state import Manifest, PartitionState, Phase, ProducerTable, Sent
from tidegate.integrity.validator import OnError, ValidationRules, policy_of
from tidegate.integrity.verdicts import Note, Rule, Tolerance, Verdict

DAY = 24 * 3_600_000
WARN = ValidationRules(during_push=OnError.KEEP)
ALWAYS = Tolerance(always=True)


def pushing(**fields: Any) -> PartitionState:
    return PartitionState(phase=Phase.PUSHING, **fields)


def pushed() -> PartitionState:
    return PartitionState(phase=Phase.PUSHED, end_of_push=0)


def tolerant(**fields: Any) -> ValidationRules:
    return ValidationRules(tolerance=ALWAYS, **fields)


@pytest.mark.parametrize("kind", list(ChecksumType))
@pytest.mark.parametrize("state", [PartitionState, pushing, pushed])
@pytest.mark.parametrize("row", ["DIV-1"])
def test_a_sound_chain_is_ok_and_ended(row: str, streams: Any, kind: ChecksumType, state: Any) -> None:
    both = streams.Both(state=state())
    pen = streams.Pen(kind=kind)
    found = both.feed([pen.start(), pen.put(), pen.put(b"a", None), pen.end()])
    assert [one.rule for one in found] == [Rule.A1, Rule.B1, Rule.B1, Rule.C4]
    (producer,) = both.producers
    assert producer.ended and producer.final and producer.data_records == 2


@pytest.mark.parametrize("row", ["DIV-2+DIV-3"])
def test_a_gap_is_missing_and_the_true_next_record_is_still_accepted(row: str, streams: Any) -> None:
    both, pen = streams.Both(state=pushing()), streams.Pen()
    assert both.verdicts([pen.start(), pen.put()]) == ["OK", "OK"]
    ahead = pen.put(sequence=100)
    (found,) = both.feed([ahead])
    assert (found.verdict, found.rule, found.stops) == (Verdict.MISSING, Rule.B5, True)
    assert next(iter(both.producers)).sequence == 1
    assert both.verdicts([pen.put(sequence=2)]) == ["OK"]
    tolerating = streams.Both(tolerant(), both.vector.state)
    (found,) = tolerating.feed([ahead])
    assert (found.verdict, found.rule, found.note) == (Verdict.OK, Rule.B4, Note.TOLERATED)
    assert next(iter(tolerating.producers)).sequence == 100


@pytest.mark.parametrize(("chain", "sequence"), [(0, 0), (0, 10), (5, 0), (5, 10)])
@pytest.mark.parametrize("row", ["DIV-4"])
def test_after_the_push_a_producer_may_be_met_anywhere(
    row: str, streams: Any, chain: int, sequence: int
) -> None:
    both, pen = streams.Both(state=pushed()), streams.Pen()
    pen.chain = chain
    (found,) = both.feed([pen.put(sequence=sequence)])
    assert found.verdict is Verdict.OK
    assert found.rule is (Rule.A3 if chain == 0 else Rule.A5)
    assert not next(iter(both.producers)).registered


@pytest.mark.parametrize(("first", "rule"), [("put", Rule.A2), ("start", Rule.A4)])
@pytest.mark.parametrize("row", ["DIV-5"])
def test_during_a_push_an_unknown_producer_must_begin_at_the_beginning(
    row: str, streams: Any, first: str, rule: Rule
) -> None:
    both, pen = streams.Both(state=pushing()), streams.Pen()
    pen.chain = 0
    (found,) = both.feed([pen.put() if first == "put" else pen.start(5)])
    assert (found.verdict, found.rule) == (Verdict.UNREGISTERED_PRODUCER, rule)
    assert len(both.producers) == 0


@pytest.mark.parametrize("gone", [False, True])
def test_on_a_live_topic_an_unknown_producer_is_accepted_only_when_the_head_may_be_gone(
    streams: Any, gone: bool
) -> None:
    both, pen = streams.Both(ValidationRules(head_may_be_gone=gone)), streams.Pen()
    pen.chain = 3
    expected = "OK" if gone else "UNREGISTERED_PRODUCER"
    assert both.verdicts([pen.put(sequence=7), pen.put(), pen.end(wrong=True)]) == [expected, "OK", "OK"]
    assert both.judged[0].kept.tolist() == [True, True, False]


@pytest.mark.parametrize("row", ["DIV-6"])
def test_skipped_chains(row: str, streams: Any) -> None:
    both, pen = streams.Both(ValidationRules(otherwise=OnError.FAIL), pushed()), streams.Pen()
    assert both.verdicts([pen.start()]) == ["OK"]
    pen.chain = 2
    late = pen.put(sequence=5)
    (found,) = both.feed([late])
    assert (found.verdict, found.rule) == (Verdict.MISSING, Rule.A12)
    tolerating = streams.Both(tolerant(), both.vector.state)
    found, again = tolerating.feed([late, late])
    assert (found.verdict, found.rule) == (Verdict.OK, Rule.A10)
    assert again.verdict is Verdict.DUPLICATE
    assert [(one.chain, one.sequence) for one in tolerating.producers] == [(2, 5)]


@pytest.mark.parametrize("row", ["DIV-7"])
def test_what_comes_after_a_tolerated_end_with_a_lower_sequence_is_a_duplicate(
    row: str, streams: Any
) -> None:
    both, pen = streams.Both(tolerant()), streams.Pen()
    start, put = pen.start(), pen.put()
    found = both.verdicts([start, pen.end(sequence=5), put, put])
    assert found == ["OK", "OK", "DUPLICATE", "DUPLICATE"]
    assert next(iter(both.producers)).sequence == 5


@pytest.mark.parametrize("row", ["DIV-8"])
def test_a_chain_entered_in_its_middle_has_no_checksum(row: str, streams: Any) -> None:
    both, pen = streams.Both(tolerant(), pushed()), streams.Pen()
    rows = [pen.start()]
    pen.chain, pen.sequence = 1, 0
    assert both.verdicts([*rows, pen.put()]) == ["OK", "OK"]
    (producer,) = both.producers
    assert (producer.checksum_type, producer.checksum, producer.registered) == (ChecksumType.NONE, 0, False)


@pytest.mark.parametrize("kind", [ChecksumType.ADHASH, ChecksumType.ADHASH2])
@pytest.mark.parametrize("row", ["DIV-9"])
def test_after_the_push_a_wrong_sum_is_corrupt_and_the_chain_ended(
    row: str, streams: Any, kind: ChecksumType
) -> None:
    both, pen = streams.Both(state=pushed()), streams.Pen(kind=kind)
    rows = [pen.start(), pen.put(), pen.end(wrong=True), pen.start(), pen.put(), pen.end()]
    assert both.verdicts(rows) == ["OK", "OK", "CORRUPT", "OK", "OK", "OK"]
    assert "certifies" in str(both.judged[0].findings[0])


@pytest.mark.parametrize("row", ["DIV-9"])
def test_an_end_without_a_sum_is_corrupt_where_the_chain_announced_one(row: str, streams: Any) -> None:
    both, pen = streams.Both(state=pushed()), streams.Pen()
    rows = [pen.start(), pen.put()]
    empty = EndOfChain(ChecksumType.NONE, 0, 2, pen.stamp_sum).to_bytes()
    rows += [pen.control(ControlType.END_OF_CHAIN, empty), pen.start()]
    assert both.verdicts(rows) == ["OK", "OK", "CORRUPT", "OK"]


@pytest.mark.parametrize("row", ["DIV-10+DIV-13"])
def test_before_the_end_of_the_push_a_fault_stops_its_partition_only(row: str, streams: Any) -> None:
    bad, good = streams.Both(state=pushing()), streams.Both(state=pushing())
    pen = streams.Pen()
    rows = [pen.start(), pen.put(), pen.end(wrong=True), pen.start()]
    found = bad.feed(rows)
    assert [one.verdict.name for one in found] == ["OK", "OK", "CORRUPT"]
    assert found[-1].stops and bad.judged[-1].stop_at == 2
    assert bad.vector.state.next_offset == 2
    assert not next(iter(bad.producers)).ended
    other = streams.Pen(2)
    sent = Sent(other.guid, 0, 3, 0, 2)
    chain = other.chain_of(2)
    driver = streams.Pen(3)
    rows = [*chain, driver.start(), driver.end_push(Manifest((sent._replace(checksum=other.checksum),)))]
    assert set(good.verdicts(rows)) == {"OK"}
    assert good.vector.state.phase is Phase.PUSHED


@pytest.mark.parametrize("row", ["DIV-11"])
def test_a_next_chain_without_its_start_is_one_fault(row: str, streams: Any) -> None:
    both, pen = streams.Both(state=pushed()), streams.Pen()
    rows = pen.chain_of(1)
    pen.chain, pen.sequence = 1, 1
    found = both.feed([*rows, pen.put(), pen.put(), pen.end(wrong=True), pen.start()])
    assert [one.verdict.name for one in found[3:]] == ["UNREGISTERED_PRODUCER", "OK", "OK", "OK"]
    assert found[3].rule is Rule.A8


@pytest.mark.parametrize("skipped", range(1, 6))
@pytest.mark.parametrize("row", ["DIV-12"])
def test_each_record_skipped_in_turn_is_missing_and_then_accepted(
    row: str, streams: Any, skipped: int
) -> None:
    rows = streams.Pen().chain_of(5)
    both = streams.Both(state=pushing())
    found = both.feed(rows[:skipped] + rows[skipped + 1 :])
    assert (found[-1].verdict, found[-1].rule) == (Verdict.MISSING, Rule.B5)
    assert set(both.verdicts(rows[skipped:])) == {"OK"}


@pytest.mark.parametrize("row", ["DIV-14"])
def test_a_record_delivered_twice_is_kept_once_and_the_sum_is_right(row: str, streams: Any) -> None:
    both, pen = streams.Both(state=pushing()), streams.Pen()
    start, put, end = pen.start(), pen.put(), pen.end()
    found = both.feed([start, start, put, put, end, end, put])
    assert [one.verdict.name for one in found] == [
        "OK",
        "DUPLICATE",
        "OK",
        "DUPLICATE",
        "OK",
        *["DUPLICATE"] * 2,
    ]
    assert both.judged[0].kept.tolist() == [False, False, True, False, False, False, False]


@pytest.mark.parametrize("row", ["DIV-15"])
def test_after_the_push_faults_are_counted_and_good_records_kept(row: str, streams: Any) -> None:
    both, pen = streams.Both(state=pushed()), streams.Pen()
    start, bad, lost, good = pen.start(), pen.put(), pen.put(), pen.put()
    found = both.feed([start, bad._replace(value=b"changed"), good, pen.end()])
    assert [one.rule for one in found] == [Rule.A1, Rule.D1, Rule.B5, Rule.B1]
    counts = both.judged[0].counts
    assert (counts[Verdict.CORRUPT], counts[Verdict.MISSING]) == (1, 1)
    assert both.judged[0].kept.tolist() == [False, False, True, False]  # a corrupt record is never good data
    assert both.judged[0].aside.tolist() == [False, True, False, False]
    assert found[-1].note is Note.TAINTED
    assert lost.stamp is not None


@pytest.mark.parametrize("action", list(OnError))
def test_a_faulty_record_never_goes_on_whatever_the_policy(streams: Any, action: OnError) -> None:
    both, pen = streams.Both(ValidationRules(otherwise=action)), streams.Pen()
    start, bad, good = pen.start(), pen.put(), pen.put()
    both.feed([start, bad._replace(value=b"changed"), good])
    judged = both.judged[0]
    assert (judged.stop_at == 1) == (action is OnError.FAIL)
    assert judged.kept.tolist() == [False, False, True][: len(judged.kept)]
    assert judged.aside.tolist() == [False, action is OnError.KEEP, False][: len(judged.kept)]


@pytest.mark.parametrize("corrupt", list(OnError))
def test_a_corrupt_record_behind_a_gap_is_left_out_though_its_verdict_is_missing(
    streams: Any, corrupt: OnError
) -> None:
    rules = ValidationRules(otherwise={Verdict.CORRUPT: corrupt})
    both, pen = streams.Both(rules), streams.Pen()
    rows = [pen.start(), pen.put(), pen.put(), pen.put()]
    damaged = rows[2]._replace(value=b"changed")
    both.feed([rows[0], damaged, rows[3]])
    judged = both.judged[0]
    assert judged.verdicts[1] == Verdict.MISSING
    assert (judged.stop_at == 1) == (corrupt is OnError.FAIL)
    assert not judged.kept[1]
    assert judged.aside[1] == (corrupt is OnError.KEEP)
    assert "its checksum is" in str(judged.findings[0])


def test_each_kind_of_fault_has_a_policy_of_its_own(streams: Any) -> None:
    rules = ValidationRules(otherwise=policy_of({"missing": "fail", "corrupt": "drop"}))
    both, pen = streams.Both(rules), streams.Pen()
    rows = [pen.start(), pen.put()._replace(value=b"changed"), pen.put(), pen.put(), pen.put()]
    both.feed([*rows[:3], rows[4]])
    judged = both.judged[0]
    assert judged.stop_at == 3
    assert (judged.kept.tolist(), judged.aside.any()) == ([False, False, True, False], False)


@pytest.mark.parametrize(
    ("said", "told"),
    [("stop", "say 'fail'"), ("quarantine", "say 'keep'"), ({"lost": "keep"}, "no kind of fault")],
)
def test_an_old_word_is_refused_with_the_new_one(said: Any, told: str) -> None:
    with pytest.raises(InvalidError, match=told):
        policy_of(said)


@pytest.mark.parametrize("row", ["DIV-16"])
def test_compaction_before_the_end_of_the_push_is_tolerated_by_age(row: str, streams: Any) -> None:
    rules = ValidationRules(tolerance=Tolerance(DAY))
    both, pen = streams.Both(rules, pushing()), streams.Pen(time=streams.NOW - 2 * DAY)
    rows = pen.chain_of(6)
    found = both.feed([rows[0], rows[3], rows[6], rows[7]])
    assert [one.verdict.name for one in found] == ["OK"] * 4
    assert [one.note for one in found] == [Note.NONE, Note.TOLERATED, Note.TOLERATED, Note.TAINTED]


@pytest.mark.parametrize(
    ("age", "expected"), [(DAY + 1, "OK"), (DAY, "OK"), (DAY - 1, "MISSING"), (-5, "MISSING")]
)
@pytest.mark.parametrize("row", ["DIV-17"])
def test_the_gap_of_the_seed_by_its_age(row: str, streams: Any, age: int, expected: str) -> None:
    rules = ValidationRules(tolerance=Tolerance(DAY))
    both, pen = streams.Both(rules), streams.Pen(time=streams.NOW - age)
    start, one, _, _, four, five = (pen.start(), *pen.puts(5))
    assert both.verdicts([start, one, four, five]) == ["OK", "OK", expected, "OK"]


def test_a_gap_in_front_of_a_young_record_is_loss_and_by_the_previous_record_suspect(streams: Any) -> None:
    rows = [*(pen := streams.Pen(time=streams.NOW - 2 * DAY)).puts(0), pen.start(), pen.put()]
    pen.put()
    young = pen.put()._replace(time=streams.NOW - 5)
    both = streams.Both(ValidationRules(tolerance=Tolerance(DAY, anchor="previous")))
    assert both.feed([*rows, young])[-1].note is Note.TOLERATED | Note.TOLERATED_SUSPECT
    incoming = streams.Both(ValidationRules(tolerance=Tolerance(DAY)))
    assert incoming.feed([*rows, young])[-1].verdict is Verdict.MISSING


@pytest.mark.parametrize("row", ["DIV-21"])
def test_a_producer_that_speaks_after_its_expiry_is_unregistered(row: str, streams: Any) -> None:
    both, pen = streams.Both(state=pushing()), streams.Pen()
    both.feed([pen.start(), pen.put()])
    state = both.vector.state
    state.producers = ProducerTable()
    (found,) = streams.Both(state=state).feed([pen.put()])
    assert (found.verdict, found.rule) == (Verdict.UNREGISTERED_PRODUCER, Rule.A2)


@pytest.mark.parametrize("row", ["DIV-33"])
def test_a_heartbeat_leaves_no_trace_and_a_damaged_one_is_seen(row: str, streams: Any) -> None:
    both, pen = streams.Both(), streams.Pen()
    beat = pen.heartbeat()
    rows = [pen.start(), beat, pen.put(), beat, beat._replace(payload=b"\x01\x04"), pen.end()]
    assert both.verdicts(rows) == ["OK", "HEARTBEAT", "OK", "HEARTBEAT", "CORRUPT", "OK"]
    assert len(both.producers) == 1


def test_a_data_record_that_claims_to_be_a_heartbeat_is_judged_all_the_same(streams: Any) -> None:
    both, pen = streams.Both(), streams.Pen()
    rows = [pen.start(), pen.put().stamped(flags=2), pen.put(), pen.end()]
    assert both.verdicts(rows) == ["OK", "OK", "OK", "CORRUPT"]


@pytest.mark.parametrize("row", ["DIV-34"])
def test_after_a_rewind_what_is_behind_the_state_is_a_duplicate(row: str, streams: Any) -> None:
    both, pen = streams.Both(state=pushed()), streams.Pen()
    rows = [*pen.chain_of(2), *pen.chain_of(2)]
    both.feed(rows)
    both.offset = 0
    assert both.verdicts(rows[1:]) == ["DUPLICATE"] * 7


@pytest.mark.parametrize("tolerated", [False, True])
@pytest.mark.parametrize("row", ["DIV-35"])
def test_data_after_the_end_of_its_chain(row: str, streams: Any, tolerated: bool) -> None:
    rules = tolerant() if tolerated else ValidationRules()
    both, pen = streams.Both(rules), streams.Pen()
    (*_, found) = both.feed([*pen.chain_of(1), pen.put()])
    assert found.verdict is (Verdict.OK if tolerated else Verdict.AFTER_END)
    assert both.judged[0].kept[-1] == tolerated
    assert both.judged[0].aside[-1] != tolerated


@pytest.mark.parametrize("damage", [{"kind": 7, "control": 255}, {"control": 4}, {"control": 99}])
@pytest.mark.parametrize("row", ["DIV-36"])
def test_an_unknown_kind_is_a_fault_of_its_own(row: str, streams: Any, damage: dict[str, int]) -> None:
    pen = streams.Pen()
    unknown = [pen.start(), pen.control(7).stamped(**damage), pen.put(), pen.end()]
    assert streams.Both().verdicts(unknown) == ["OK", "UNSUPPORTED", "OK", "OK"]
    assert streams.Both(state=pushing()).verdicts(unknown) == ["OK", "UNSUPPORTED"]


def test_metadata_that_cannot_be_read_is_a_fault(streams: Any) -> None:
    both, pen = streams.Both(), streams.Pen()
    broken = streams.Row(None, b"k", b"v", extra=(("div", b"\x01" * 39),))
    assert both.verdicts([pen.start(), broken, pen.put()]) == ["OK", "UNSUPPORTED", "OK"]


@pytest.mark.parametrize("strict", [False, True])
def test_records_without_metadata_are_counted_or_rejected(streams: Any, strict: bool) -> None:
    both = streams.Both(ValidationRules(strict=strict, otherwise=OnError.FAIL))
    (found,) = both.feed([streams.Row(None, b"k", b"v")])
    assert found.verdict is Verdict.UNMANAGED and found.stops is strict
    assert len(both.judged[0].findings) == int(strict)


@pytest.mark.parametrize("row", ["DIV-44"])
def test_what_the_manifest_lists_and_did_not_arrive_is_missing(row: str, streams: Any) -> None:
    driver, task, absent = streams.Pen(1), streams.Pen(2), streams.Pen(3)
    head = [driver.start(), driver.start_push()]
    rows = task.chain_of(5)
    absent.chain_of(1)
    sent = Sent(task.guid, 0, 6, task.checksum, 5)
    never = Sent(absent.guid, 0, 2, absent.checksum, 1)
    for arrived, listed in ((rows[:-2], (sent,)), (rows, (sent, never))):
        both = streams.Both()
        pen = streams.Pen(1)
        pen.chain, pen.sequence, pen.checksum, pen.stamp_sum = 0, 2, driver.checksum, driver.stamp_sum
        found = both.feed([*head, *arrived, pen.end_push(Manifest(listed))])
        assert (found[-1].verdict, found[-1].rule, found[-1].stops) == (Verdict.MISSING, Rule.M1, True)
        assert both.vector.state.phase is Phase.PUSHING
        assert "arrived" in str(both.judged[-1].findings[0])


@pytest.mark.parametrize("row", ["DIV-45"])
def test_swapped_values_pass_adhash_but_not_the_records_own_checksums(row: str, streams: Any) -> None:
    pen = streams.Pen(kind=ChecksumType.ADHASH)
    start, one, two = pen.start(), pen.put(b"a", b"1"), pen.put(b"b", b"2")
    swapped = [start, one._replace(value=b"2"), two._replace(value=b"1"), pen.end()]
    assert streams.Both().verdicts(swapped) == ["OK", "CORRUPT", "CORRUPT", "OK"]


@pytest.mark.parametrize("row", ["DIV-46"])
def test_a_second_end_or_a_late_start_of_push_says_nothing_new(row: str, streams: Any) -> None:
    rules = ValidationRules(batch_only=True)
    both, pen = streams.Both(rules), streams.Pen()
    rows = [
        pen.start(),
        pen.start_push(),
        pen.end_push(),
        pen.end_push(),
        pen.start_push(),
        pen.put(),
        pen.end(),
    ]
    found = both.feed(rows)
    assert {one.verdict.name for one in found} == {"OK"}
    assert [one.note for one in found[2:]] == [
        Note.NONE, Note.IGNORED, Note.IGNORED, Note.UNEXPECTED, Note.NONE,
    ]  # fmt: skip
    assert both.vector.state.end_of_push == 2
    assert not both.judged[0].kept.any()


def test_the_end_of_push_is_judged_as_before_it_and_what_follows_as_after(streams: Any) -> None:
    both, pen, other = streams.Both(), streams.Pen(), streams.Pen(2)
    other.chain = 4
    rows = [pen.start(), pen.start_push(), pen.end_push(), other.put(sequence=3), pen.end()]
    assert [one.rule for one in both.feed(rows)][2:] == [Rule.B1, Rule.A5, Rule.C4]


def test_during_a_push_told_to_go_on_the_state_moves_past_faults(streams: Any) -> None:
    both, pen = streams.Both(WARN, pushing()), streams.Pen()
    rows = [*pen.chain_of(4), *pen.chain_of(4)]
    found = both.feed([*rows[:2], *rows[4:8], *rows[9:]])
    assert [one.verdict.name for one in found if one.verdict] == ["MISSING", "MISSING"]
    assert all(one.note & Note.DURING_PUSH for one in found if one.verdict)


@pytest.mark.parametrize("lost", range(12))
def test_one_lost_record_is_one_finding(streams: Any, lost: int) -> None:
    pen = streams.Pen()
    rows = [*pen.chain_of(2), *pen.chain_of(2), *pen.chain_of(2)]
    both = streams.Both()
    found = both.feed(rows[:lost] + rows[lost + 1 :])
    faults = [one.verdict for one in found if one.verdict.is_fatal]
    assert len(faults) == (0 if lost == 11 else 1)


def test_no_more_producers_than_allowed_are_tracked(streams: Any) -> None:
    both = streams.Both(ValidationRules(max_producers=20))
    found = both.verdicts([streams.Pen(number).start() for number in range(1, 41)])
    assert found == ["OK"] * 20 + ["UNREGISTERED_PRODUCER"] * 20
    assert len(both.producers) == 20


@pytest.mark.parametrize("sequence", [2**31 - 2, 2**31 - 1])
def test_the_last_sequence_does_not_overflow(streams: Any, sequence: int) -> None:
    both, pen = streams.Both(ValidationRules(head_may_be_gone=True)), streams.Pen()
    pen.chain = 2**31 - 1
    last = pen.put(sequence=sequence)
    assert both.verdicts([last, last, pen.put(sequence=0)]) == ["OK", "DUPLICATE", "DUPLICATE"]


def test_records_out_of_order_are_refused_and_nothing_changes(streams: Any) -> None:
    both, pen = streams.Both(), streams.Pen()
    batch = streams.batch_of(pen.chain_of(3))
    with pytest.raises(InvalidError, match="ascend"):
        both.vector.validate(batch.take([0, 2, 1]), streams.NOW)
    assert len(both.producers) == 0


def test_in_header_sum_mode_a_changed_value_passes_and_a_changed_control_record_does_not(
    streams: Any,
) -> None:
    pen = streams.Pen()
    start, put, end = pen.start(), pen.put()._replace(value=b"changed"), pen.end()
    cheap = streams.Both(ValidationRules(payloads=False)).vector
    assert cheap.validate(streams.batch_of([start, put, end]), streams.NOW).verdicts.tolist() == [0, 0, 0]
    cheap = streams.Both(ValidationRules(payloads=False)).vector
    judged = cheap.validate(streams.batch_of([start._replace(value=b"x")]), streams.NOW)
    assert judged.verdicts.tolist() == [Verdict.CORRUPT]
