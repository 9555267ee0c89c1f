"""The completeness manifest: its bytes, and what it sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.integrity.state import Manifest, Producer, Sent, compare_manifest

A, B = b"a" * 16, b"b" * 16
SENT_A = Sent(A, 0, 11, 0xABC, 10)
SENT_B = Sent(B, 2, 5, 0xDEF, 1000)
BOTH = Manifest.of([SENT_B, SENT_A])


def producer(sent: Sent) -> Producer:
    """The state of a producer of which all arrived."""
    guid, chain, sequence, checksum, records = sent
    return Producer(guid, chain, sequence, registered=True, checksum=checksum, data_records=records)


ARRIVED = {sent.guid: producer(sent) for sent in (SENT_A, SENT_B)}

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


def missing(manifest: Manifest, arrived: dict[bytes, Producer]) -> str:
    return compare_manifest(manifest.to_bytes(), arrived.get)


def test_everything_that_arrived_is_complete() -> None:
    assert missing(BOTH, ARRIVED) == ""
    gaps = {guid: replace(one, tainted=True, checksum=1, data_records=-1) for guid, one in ARRIVED.items()}
    assert missing(BOTH, gaps) == ""


@pytest.mark.parametrize(
    ("arrived", "reason"),
    [
        pytest.param({"sequence": 8, "data_records": 8}, "up to chain 0 sequence 8", id="DIV-44-tail-lost"),
        pytest.param(None, "never arrived", id="DIV-44-producer-absent"),
        pytest.param({"data_records": 9}, "9 arrived", id="DIV-44-fewer-records"),
        pytest.param({"checksum": 0xABD}, "certified", id="DIV-44-other-checksum"),
        pytest.param({"chain": 1, "sequence": 2}, "up to chain 1", id="DIV-44-more-than-sent"),
    ],
)
def test_whatever_did_not_arrive_as_sent_is_a_shortfall(arrived: dict[str, Any] | None, reason: str) -> None:
    came = {A: replace(ARRIVED[A], **arrived)} if arrived is not None else {}
    found = missing(BOTH, {B: ARRIVED[B], **came})
    assert found.startswith(f"producer {A.hex()} ") and reason in found and B.hex() not in found


@pytest.mark.parametrize("row", ["DIV-42"])
def test_an_attempt_that_lost_is_no_fault(row: str) -> None:
    assert missing(Manifest.of([SENT_A]), ARRIVED) == ""


def test_of_many_shortfalls_only_the_first_few_are_told() -> None:
    sent = [Sent(bytes([number]) * 16, 0, 3, 7, 2) for number in range(20)]
    found = missing(Manifest(tuple(sent)), {sent[0].guid: producer(sent[0])})
    assert found.startswith(f"producer {sent[1].guid.hex()} never arrived; it sent 2 records; producer ")
    assert found.endswith("; and 14 more producers")
