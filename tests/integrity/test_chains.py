"""The sender's state machine, without a log: which records go out for which event."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from receiving import Arrived, arrived, verdicts
from tidegate.errors import InvalidError
from tidegate.integrity.header import MAX_SEQUENCE, ChecksumType, ControlType
from tidegate.integrity.sender import ChainLimits, Chains, ChainState, Planned, table_of
from tidegate.integrity.verdicts import Verdict
from tidegate.log.format.records import RecordColumns, coerce

GUID = bytes(range(1, 17))
NOW = 1_767_225_600_000


def rows(count: int, size: int = 10) -> RecordColumns:
    return coerce(pa.table({"key": [f"k{n}" for n in range(count)], "value": [b"v" * (size - 2)] * count}))


def records(plan: Planned) -> list[Arrived]:
    batches = []
    for piece in plan.pieces:
        batch = table_of(piece)
        batches.append(batch.append_column("offset", pa.array(range(len(piece)), pa.int64())))
    return arrived(batches)


def names(found: list[Arrived]) -> list[str]:
    """`S0.0` a start, `E0.3` an end (`F` when final), `.` data, `c` other control."""
    letters = []
    for record in found:
        stamp = record.stamp
        assert stamp is not None
        if stamp.is_start_of_chain:
            letters.append(f"S{stamp.chain}.{stamp.sequence}")
        elif stamp.is_end_of_chain:
            letters.append(f"{'F' if stamp.is_final else 'E'}{stamp.chain}.{stamp.sequence}")
        else:
            letters.append("c" if stamp.kind == 2 else ".")
    return letters


def test_the_first_record_opens_chain_0_and_the_next_ones_go_on() -> None:
    chains = Chains(GUID)
    first = chains.data(ChainState(), rows(2), NOW)
    second = chains.data(first.after, rows(1), NOW)
    assert names(records(first)) == ["S0.0", ".", "."]
    assert names(records(second)) == ["."]
    assert [record.position for record in records(first) + records(second)] == [(0, n) for n in range(4)]
    assert second.after.sequence == 4 and second.after.records == 3


def test_nothing_is_sent_for_no_rows_and_for_the_end_of_nothing() -> None:
    chains = Chains(GUID)
    assert chains.data(ChainState(), rows(0), NOW) == Planned([], ChainState())
    assert chains.end(ChainState(), NOW) == Planned([], ChainState())


@pytest.mark.parametrize(
    ("age", "passed", "expected"),
    [
        pytest.param(0, 10**9, ["."], id="DIV-37-no-limit"),
        pytest.param(-1, 10**9, ["."], id="DIV-37-negative-is-no-limit"),
        pytest.param("1ms", 1, ["."], id="DIV-37-exactly-the-limit"),
        pytest.param("1ms", 2, ["E0.2", "S1.0", "."], id="DIV-37-older"),
        pytest.param("5m", 300_001, ["E0.2", "S1.0", "."], id="DIV-37-five-minutes"),
        pytest.param("5m", -10_000, ["."], id="DIV-37-clock-went-back"),
    ],
)
def test_a_chain_that_is_too_old_ends_before_the_next_record(
    age: int | str, passed: int, expected: list[str]
) -> None:
    chains = Chains(GUID, limits=ChainLimits(max_age=age))
    state = chains.data(ChainState(), rows(1), NOW).after
    assert names(records(chains.data(state, rows(1), NOW + passed))) == expected


@pytest.mark.parametrize("row", ["DIV-37"])
def test_the_end_itself_never_ends_a_chain_again(row: str) -> None:
    chains = Chains(GUID, limits=ChainLimits(max_age="1ms"))
    state = chains.data(ChainState(), rows(1), NOW).after
    ended = chains.end(state, NOW + 1000)
    assert names(records(ended)) == ["F0.2"]
    assert names(records(chains.data(ended.after, rows(1), NOW + 5000))) == ["S1.0", "."]


@pytest.mark.parametrize("row", ["DIV-37"])
def test_without_a_time_limit_a_thousand_writes_are_one_chain(row: str) -> None:
    chains, state = Chains(GUID, limits=ChainLimits(max_age=0)), ChainState()
    for number in range(1000):
        state = chains.data(state, rows(1), NOW + number * 60_000).after
    assert (state.chain, state.sequence, state.records) == (0, 1001, 1000)


def test_a_chain_ends_after_so_many_records() -> None:
    chains = Chains(GUID, limits=ChainLimits(max_records=3))
    plan = chains.data(ChainState(), rows(7), NOW)
    assert names(records(plan)) == [
        "S0.0", ".", ".", ".", "E0.4", "S1.0", ".", ".", ".", "E1.4", "S2.0", ".",
    ]  # fmt: skip
    assert verdicts(records(plan)) == [Verdict.OK] * 12


def test_a_chain_ends_before_the_record_that_would_make_it_too_large() -> None:
    chains = Chains(GUID, limits=ChainLimits(max_bytes=25))
    plan = chains.data(ChainState(), rows(3, size=10), NOW)
    assert names(records(plan)) == ["S0.0", ".", ".", "E0.3", "S1.0", "."]


def test_a_record_larger_than_a_chain_gets_one_of_its_own() -> None:
    chains = Chains(GUID, limits=ChainLimits(max_bytes=5))
    plan = chains.data(ChainState(), rows(2, size=10), NOW)
    assert names(records(plan)) == ["S0.0", ".", "E0.2", "S1.0", "."]
    with_control = chains.control(plan.after, ControlType.VERSION_SWAP, None, NOW)
    assert names(records(with_control)) == ["c"]


def test_a_chain_ends_before_its_sequence_could_overflow() -> None:
    chains = Chains(GUID, limits=ChainLimits(max_records=MAX_SEQUENCE - 2, max_bytes=2**60))
    near = ChainState(chain=0, sequence=MAX_SEQUENCE - 2, is_open=True, started_ms=NOW)
    plan = chains.data(near, rows(2), NOW)
    assert names(records(plan)) == [".", f"E0.{MAX_SEQUENCE - 1}", "S1.0", "."]
    with pytest.raises(InvalidError, match="max_records"):
        ChainLimits(max_records=MAX_SEQUENCE - 1)


def test_chain_numbers_run_out_with_an_error() -> None:
    last = ChainState(chain=MAX_SEQUENCE, sequence=3, is_open=False)
    with pytest.raises(InvalidError, match="make a new one"):
        Chains(GUID).data(last, rows(1), NOW)


@pytest.mark.parametrize("kind", list(ChecksumType))
def test_every_checksum_type_certifies_what_a_receiver_finds(kind: ChecksumType) -> None:
    chains = Chains(GUID, checksum_type=kind)
    first = chains.data(ChainState(), rows(3), NOW)
    swap = chains.control(first.after, ControlType.VERSION_SWAP, b"anything", NOW + 5)
    end = chains.end(swap.after, NOW + 7)
    assert verdicts(records(first) + records(swap) + records(end)) == [Verdict.OK] * 6


@pytest.mark.parametrize("row", ["DIV-45"])
@pytest.mark.parametrize(
    ("kind", "last"), [(ChecksumType.ADHASH, Verdict.OK), (ChecksumType.ADHASH2, Verdict.CORRUPT)]
)
def test_swapped_values_inside_a_chain(row: str, kind: ChecksumType, last: Verdict) -> None:
    """Both records' own checksums are put right, as a program that rewrites headers would."""
    from tidegate.integrity.columns import checksum_of

    table = pa.table({"key": ["a", "b"], "value": ["1", "2"]})
    chains = Chains(GUID, checksum_type=kind)
    plan = chains.data(ChainState(), coerce(table), NOW)
    start, one, two, end = records(plan) + records(chains.end(plan.after, NOW))

    def with_value(record: Arrived, value: bytes | None) -> Arrived:
        assert record.stamp is not None
        crc = checksum_of(record.stamp, record.key, value)
        return record._replace(value=value, stamp=record.stamp._replace(crc=crc))

    swapped = [start, with_value(one, two.value), with_value(two, one.value), end]
    assert verdicts(swapped)[-1] is last
    assert verdicts([start, one, two, end]) == [Verdict.OK] * 4


def test_a_changed_clock_or_flag_in_a_header_is_seen_at_the_end() -> None:
    chains = Chains(GUID)
    plan = chains.data(ChainState(), rows(2), NOW)
    start, one, two, end = records(plan) + records(chains.end(plan.after, NOW))
    assert one.stamp is not None
    for change in ({"timestamp": NOW + 1}, {"flags": 1}, {"flags": 4}):
        damaged = one._replace(stamp=one.stamp._replace(**change))
        assert verdicts([start, damaged, two, end])[-1] is Verdict.CORRUPT


def test_rows_without_a_timestamp_get_the_senders_time_so_that_repeats_are_equal() -> None:
    table = pa.table({"value": ["a", "b"], "timestamp": pa.array([5, None], pa.int64())})
    found = records(Chains(GUID).data(ChainState(), coerce(table), NOW))
    assert [record.timestamp for record in found] == [NOW, 5, NOW]


def test_control_records_have_a_reserved_key_and_an_empty_value() -> None:
    found = records(Chains(GUID, nonce=7).data(ChainState(), rows(1), NOW))
    assert found[0].key == b"\x00DIV\x00" + GUID + bytes(8) + b"\x00\x00\x00\x07"
    assert found[0].value == b""


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.integers(1, 6),
    st.integers(1, 60),
    st.data(),
)
def test_where_chains_end_does_not_depend_on_how_rows_are_cut_into_calls(
    sizes: list[int], max_records: int, max_bytes: int, draw: st.DataObject
) -> None:
    table = coerce(pa.table({"value": pa.array([b"v" * size for size in sizes], pa.binary())}))
    chains = Chains(GUID, limits=ChainLimits(max_age=0, max_records=max_records, max_bytes=max_bytes))
    whole = chains.data(ChainState(), table, NOW)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(sizes)), max_size=4)))
    state, pieces = ChainState(), []
    for start, stop in zip([0, *cuts], [*cuts, len(sizes)], strict=True):
        part = chains.data(state, table.slice(start, stop - start), NOW)
        state, pieces = part.after, pieces + part.pieces
    assert state == whole.after
    plain = [record._replace(offset=0) for record in records(Planned(pieces, state))]
    assert plain == [record._replace(offset=0) for record in records(whole)]
    assert set(verdicts(plain + records(chains.end(state, NOW)))) == {Verdict.OK}


def test_a_position_comes_back_from_its_bytes() -> None:
    state = ChainState(3, 9, True, 2**64 - 1, 2**63, 100, NOW, 55)
    assert ChainState.from_bytes(state.to_bytes()) == state
    for data in (b"", state.to_bytes()[:-1], b"\x07" + state.to_bytes()[1:]):
        with pytest.raises(InvalidError, match="position"):
            ChainState.from_bytes(data)


@pytest.mark.parametrize("control", [ControlType.START_OF_CHAIN, ControlType.END_OF_CHAIN])
def test_starts_and_ends_cannot_be_sent_by_hand(control: ControlType) -> None:
    with pytest.raises(InvalidError, match="close_partition"):
        Chains(GUID).control(ChainState(), control, b"", NOW)


@pytest.mark.parametrize("wrong", [{"max_records": 0}, {"max_bytes": 0}, {"max_records": 2**31}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidError):
        ChainLimits(**wrong)
