"""The completeness manifest: its bytes, and what it sees."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.integrity.state import Manifest, Received, Sent, check_manifest

A, B = b"a" * 16, b"b" * 16
SENT_A = Sent(A, 0, 11, 0xABC, 10)
SENT_B = Sent(B, 2, 5, 0xDEF, 1000)
BOTH = Manifest.of([SENT_B, SENT_A])
ARRIVED = {A: Received(0, 11, 0xABC, 10), B: Received(2, 5, 0xDEF, 1000)}

sent = st.builds(
    Sent,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
)


def test_the_bytes_are_these() -> None:
    assert Manifest.of([SENT_A]).to_bytes().hex() == (
        "01" + "000000000000000a" + "00000001" + A.hex() + "00000000" + "0000000b"
        + "0000000000000abc" + "000000000000000a"
    )  # fmt: skip


@given(st.lists(sent, max_size=8, unique_by=lambda one: one.guid))
def test_any_manifest_comes_back_from_its_bytes(producers: list[Sent]) -> None:
    manifest = Manifest.of(producers)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert manifest.records == sum(one.records for one in producers)


@settings(max_examples=200)
@given(st.binary(max_size=120))
def test_any_other_bytes_are_an_error_and_nothing_else(data: bytes) -> None:
    try:
        manifest = Manifest.from_bytes(data)
    except InvalidError:
        return
    assert manifest.to_bytes() == data


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_manifest_is_an_error_or_another_manifest(draw: st.DataObject) -> None:
    data = bytearray(BOTH.to_bytes())
    data[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    try:
        assert Manifest.from_bytes(bytes(data)) != BOTH
    except InvalidError:
        pass


def test_attempts_that_share_a_guid_are_one_sender_and_must_agree() -> None:
    assert Manifest.of([SENT_A, SENT_A]) == Manifest.of([SENT_A])
    with pytest.raises(InvalidError, match="share a GUID"):
        Manifest.of([SENT_A, SENT_A._replace(records=9)])


def test_everything_that_arrived_is_complete() -> None:
    found = check_manifest(BOTH, ARRIVED)
    assert found.is_complete and found.unlisted == ()
    assert check_manifest(BOTH, {A: Received(0, 11), B: Received(2, 5)}).is_complete


@pytest.mark.parametrize(
    ("arrived", "reason"),
    [
        pytest.param(
            {**ARRIVED, A: Received(0, 8, None, 8)}, "up to chain 0 sequence 8", id="DIV-44-tail-lost"
        ),
        pytest.param({B: ARRIVED[B]}, "never arrived", id="DIV-44-producer-absent"),
        pytest.param({**ARRIVED, A: Received(0, 11, 0xABC, 9)}, "9 arrived", id="DIV-44-fewer-records"),
        pytest.param({**ARRIVED, A: Received(0, 11, 0xABD, 10)}, "certified", id="DIV-44-other-checksum"),
        pytest.param({**ARRIVED, A: Received(1, 2, 0, 12)}, "up to chain 1", id="DIV-44-more-than-sent"),
    ],
)
def test_whatever_did_not_arrive_as_sent_is_a_shortfall(arrived: dict[bytes, Received], reason: str) -> None:
    found = check_manifest(BOTH, arrived)
    assert [shortfall.guid for shortfall in found.shortfalls] == [A]
    assert reason in found.shortfalls[0].reason
    assert found.shortfalls[0].expected == SENT_A


@pytest.mark.parametrize("row", ["DIV-42"])
def test_an_attempt_that_lost_is_named_and_no_fault(row: str) -> None:
    found = check_manifest(Manifest.of([SENT_A]), ARRIVED)
    assert found.is_complete and found.unlisted == (B,)


def test_a_shortfall_is_told_in_words_and_of_many_only_the_first_few() -> None:
    sent = [Sent(bytes([number]) * 16, 0, 3, 7, 2) for number in range(20)]
    found = check_manifest(Manifest(tuple(sent)), {sent[0].guid: Received(0, 3, 7, 2)})
    assert str(found).startswith(f"producer {sent[1].guid.hex()} never arrived; it sent 2 records; producer ")
    assert str(found).endswith("; and 14 more producers")
    assert (
        str(check_manifest(Manifest((sent[0],)), {sent[0].guid: Received(0, 3, 7, 2)}))
        == "all that was sent arrived"
    )
