"""Plans and commits as they are kept: made once, taken over or refused, and read back as they were."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import msgspec
import pytest

from tidegate.clock import ManualClock
from tidegate.errors import ConflictError, CorruptError, FencedError, InvalidError
from tidegate.pipeline.checkpoint import (
    INLINE_BYTES,
    VERSION,
    AppRecord,
    CommitRecord,
    FlowLine,
    Halt,
    Loss,
    PlanRecord,
    Range,
    Records,
    SourceLine,
    TaskLine,
)
from tidegate.pipeline.coordinator import split_deliveries
from tidegate.pipeline.lease import AppLease
from tidegate.pipeline.messages import Delivery, Parcel, Section, Stop, Tick, decode, encode
from tidegate.pipeline.settings import RunSettings
from tidegate.randomness import SeededRandomness
from tidegate.storage.backends.memory import MemoryBackend


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


@pytest.fixture
def records(backend: MemoryBackend) -> Records:
    return Records(backend, "app")


def plan(**changes: Any) -> PlanRecord:
    values: dict[str, Any] = {
        "version": VERSION, "app": "app", "round": 5, "generation": 2, "base": b"b4", "definition": "d",
        "tick": Tick(1), "ranges": (), "tasks": (),
    }  # fmt: skip
    return PlanRecord(**(values | changes))


def commit(**changes: Any) -> CommitRecord:
    values: dict[str, Any] = {
        "version": VERSION, "app": "app", "round": 5, "generation": 2, "base": b"b4", "plan": b"p5",
        "definition": "d", "incarnation": "l", "tick": Tick(1), "committed_ms": 7, "sources": (), "tasks": (),
    }  # fmt: skip
    return CommitRecord(**(values | changes))


def test_the_first_plan_of_a_round_is_its_plan(records: Records) -> None:
    first, digest = records.put_plan(plan(tick=Tick(1)))
    assert records.put_plan(plan(tick=Tick(2), generation=3)) == (first, digest)
    assert records.load_plan(5) == (first, digest)
    assert records.load_plan(6) is None


@pytest.mark.parametrize("later", [{"generation": 9}, {"base": b"another"}], ids=["generation", "base"])
def test_a_plan_of_a_later_master_or_another_base_fences(records: Records, later: dict[str, Any]) -> None:
    records.put_plan(plan(**later))
    with pytest.raises(FencedError, match="round 5 was planned by generation"):
        records.put_plan(plan())


def test_a_commit_of_the_same_plan_is_taken_over(records: Records) -> None:
    first, digest = records.put_commit(commit(committed_ms=1))
    assert records.put_commit(commit(committed_ms=2, generation=7)) == (first, digest)


@pytest.mark.parametrize("other", [{"plan": b"x"}, {"base": b"x"}, {"plan": b"", "change": "reset"}])
def test_any_other_commit_fences(records: Records, other: dict[str, Any]) -> None:
    records.put_commit(commit(**other)) if other.get("plan") != b"" else records.put_change(commit(**other))
    with pytest.raises(FencedError, match="nothing of its work counts"):
        records.put_commit(commit())


def test_a_change_from_outside_gives_way_to_a_round(records: Records) -> None:
    records.put_commit(commit())
    with pytest.raises(ConflictError, match="committed round 5 meanwhile"):
        records.put_change(commit(plan=b"", change="reset"))


def test_rounds_are_found_by_number_and_not_by_what_else_lies_there(
    records: Records, backend: MemoryBackend
) -> None:
    for round in (3, 11, 4):
        records.put_change(commit(round=round, plan=b""))
    backend.put("apps/app/commits/0000000099.tmp1", [b""])
    assert records.rounds() == [3, 4, 11] and records.newest() == 11
    with pytest.raises(InvalidError, match=r"commit 12 of app app is not kept.*from 3 to 11"):
        records.read_commit(12)


def test_a_damaged_record_is_named_with_the_way_out(records: Records, backend: MemoryBackend) -> None:
    backend.publish("apps/app/commits/0000000001", b"\x81\xa1x", expected=None)
    with pytest.raises(CorruptError, match="tidegate app reset app"):
        records.load_commit(1)
    backend.publish("apps/app/commits/0000000002", encode(commit(version=9)), expected=None)
    with pytest.raises(InvalidError, match="format version 9"):
        records.load_commit(2)


def test_large_states_of_sources_lie_beside_and_are_checked(records: Records, backend: MemoryBackend) -> None:
    small, large = b"s" * INLINE_BYTES, b"l" * (INLINE_BYTES + 1)
    assert records.store_state("flow/é", 3, 5, "u", small) == (small, "")
    kept, name = records.store_state("flow/é", 3, 5, "u", large)
    assert len(kept) == 16
    line = SourceLine("flow/é", 3, 9, kept, name)
    assert records.state_of(line) == large
    assert records.state_of(SourceLine("f", 0, 0, small)) == small
    backend.delete(name)
    backend.put(name, [b"other"])
    with pytest.raises(CorruptError, match="is not what app app committed"):
        records.state_of(line)


@pytest.mark.parametrize("name", ["", "a/b", ".x", "apps", "tables", "ä", "a b", "x" * 151])
def test_names_that_cannot_be_a_folder_are_refused(backend: MemoryBackend, name: str) -> None:
    with pytest.raises(InvalidError, match="app name"):
        Records(backend, name)


def test_records_survive_their_own_encoding() -> None:
    parcel = Parcel("p", 3, b"d", (Section("t", 0, 0, 3, 2),))
    whole = commit(
        sources=(SourceLine("f", 0, 9, b"s"),),
        deliveries=(Delivery(5, parcel, (7,), "f", 0),),
        ends={"t": {0: 9}},
    )
    assert msgspec.msgpack.decode(encode(whole), type=CommitRecord) == whole


# -- who runs the app ----------------------------------------------------------------------------


def turn(records: Records, now_ms: int, seed: int) -> AppLease:
    return AppLease(records, clock=ManualClock(now_ms), randomness=SeededRandomness(seed), lease_ms=1000)


def test_a_turn_is_refused_taken_over_when_it_ended_and_then_fenced(
    backend: MemoryBackend, records: Records
) -> None:
    first = turn(records, 1_000, 1)
    first.check()
    with pytest.raises(ConflictError, match="generation 1"):
        turn(records, 1_500, 2)
    second = turn(records, 2_001, 3)
    assert second.number == 2
    with pytest.raises(FencedError, match="generation 1"):
        first.check()
    first.release()  # gives nothing up: it is not its own any more
    second.check()
    second.release()
    assert turn(records, 2_002, 4).number == 3


def test_keeping_a_turn_renews_it_in_time(backend: MemoryBackend, records: Records) -> None:
    clock = ManualClock(1_000)
    held = AppLease(records, clock=clock, randomness=SeededRandomness(1), lease_ms=1000)
    for _ in range(5):
        clock.advance(400)
        held.keep()
    with pytest.raises(ConflictError):
        turn(records, 3_500, 2)


# -- who delivers --------------------------------------------------------------------------------


def delivery(flow: str, task: int, *partitions: int) -> Delivery:
    sections = tuple(Section("out", partition, 0, 1, 1) for partition in partitions)
    return Delivery(4, Parcel(f"{flow}{task}", 1, b"", sections), tuple(range(len(sections))), flow, task)


def test_tasks_of_the_next_round_deliver_their_own_and_the_master_the_rest() -> None:
    a, b = delivery("f", 0, 0), delivery("f", 1, 1)
    assert split_deliveries([a, b], {("f", 0)}) == ({("f", 0): (a,)}, (b,))


def test_where_tasks_share_a_partition_the_master_delivers_in_order() -> None:
    a, b = delivery("f", 0, 0, 1), delivery("f", 1, 1)
    assert split_deliveries([b, a], {("f", 0), ("f", 1)}) == ({}, (a, b))


# -- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"until": "later"}, "until='later'"),
        ({"close": True}, "until='caught_up' too"),
        ({"on_loss": "ignore"}, "'stop' or 'accept'"),
        ({"round_records": 0}, "round_records is 0"),
        ({"trigger_ms": -1}, "trigger_ms is -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidError, match=said):
        RunSettings(**wrong)


@pytest.mark.parametrize("wrong", [{"grace_ms": "1h"}, {"lease_ms": 10.5}, {"round_records": "5"}])
def test_a_setting_that_is_no_whole_number_is_named(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(TypeError, match=f"{name} is {value!r}; give a whole number"):
        RunSettings(**wrong)


# -- bytes ---------------------------------------------------------------------------------------


def test_the_stored_form_of_records_is_what_it_was() -> None:
    """Apps of older releases must open: whoever changes these bytes raises VERSION and reads both."""
    parcel = Parcel("p", 3, b"d", (Section("t", 0, 0, 3, 2),))
    stop = Stop("lost", "gone", 3, "resume")
    lines = (SourceLine("f", 0, 9, b"s", "", 5, 6, stop), SourceLine("f", 1, 9, b"d", "apart"))
    whole = commit(
        sources=lines,
        tasks=(TaskLine("f", 0, b"token", 5, 10, 20, 6),),
        deliveries=(Delivery(5, parcel, (7,), "f", 0),),
        ends={"t": {0: 9}},
        totals={"f": {"records": 9}},
        watermarks={"f": 5},
        losses=(Loss("f", 0, 1, 3, 4),),
        closed=("f",),
        change="",
    )
    planned = plan(
        ranges=(Range("f", 0, 1, 3),),
        tasks=(("f", 0),),
        ticks={"f": Tick(1, 5, True)},
        losses=(Loss("f", 0, 1, 3, 4),),
        halts=(Halt("f", 1, stop),),
        lookups={"prices": 3},
    )
    app = AppRecord(VERSION, "app", 1, {"d": (FlowLine("f", "x", b"{}", "in", 2, 2),)})
    found = {
        type(each).__name__: hashlib.sha256(encode(each)).hexdigest()[:16] for each in (whole, planned, app)
    }
    assert found == GOLDEN
    for each in (whole, planned, app):
        before = decode(base64.b64decode(V1[type(each)]), type(each))
        assert msgspec.structs.replace(before, version=VERSION) == each
    second = decode(base64.b64decode(V2_COMMIT), CommitRecord)
    assert hashlib.sha256(base64.b64decode(V2_COMMIT)).hexdigest()[:16] == "6e0a232dcca5ab11"
    assert second.limits is None and msgspec.structs.replace(second, version=VERSION) == whole
    assert hashlib.sha256(base64.b64decode(V3_COMMIT)).hexdigest()[:16] == "2dc4c93fab540037"
    third = decode(base64.b64decode(V3_COMMIT), CommitRecord)
    assert msgspec.structs.replace(third, version=VERSION) == whole


def test_a_record_of_a_later_release_is_told_from_a_damaged_one() -> None:
    backend = MemoryBackend()
    records = Records(backend, "app")
    backend.publish(records.commit_name(0), msgspec.msgpack.encode({"version": 9, "new": 1}), expected=None)
    with pytest.raises(InvalidError, match="has format version 9; this release reads up to version 4"):
        records.load_commit(0)


V1 = {
    CommitRecord: (
        "3gATp3ZlcnNpb24Bo2FwcKNhcHClcm91bmQFqmdlbmVyYXRpb24CpGJhc2XEAmI0pHBsYW7EAnA1qmRlZmluaXRpb26hZKRsaWZl"
        "oWykdGlja4Ombm93X21zAal3YXRlcm1hcmvAp2Nsb3NpbmfCrGNvbW1pdHRlZF9tcwenc291cmNlc5KIpGZsb3ehZqlwYXJ0aXRp"
        "b24Aq25leHRfb2Zmc2V0CaVzdGF0ZcQBc6VhcGFydKCrc3RyZWFtX3RpbWUFp3NlZW5fbXMGp3N0b3BwZWSEpnJlYXNvbqRsb3N0"
        "p21lc3NhZ2WkZ29uZaZvZmZzZXQDpnJlbWVkeaZyZXN1bWWIpGZsb3ehZqlwYXJ0aXRpb24Bq25leHRfb2Zmc2V0CaVzdGF0ZcQB"
        "ZKVhcGFydKVhcGFydKtzdHJlYW1fdGltZf+nc2Vlbl9tc/+nc3RvcHBlZMCldGFza3ORh6RmbG93oWakdGFzawCldG9rZW7EBXRv"
        "a2Vuq3N0cmVhbV90aW1lBa1iYWNrbG9nX2J5dGVzCqxtZW1vcnlfYnl0ZXMUqXRpY2tlZF9tcwaqZGVsaXZlcmllc5GFpXJvdW5k"
        "BaZwYXJjZWyEpG5hbWWhcKRzaXplA6ZkaWdlc3TEAWSoc2VjdGlvbnORhaV0b3BpY6F0qXBhcnRpdGlvbgCocG9zaXRpb24ApHNp"
        "emUDp3JlY29yZHMCpWJhc2VzkQekZmxvd6FmpHRhc2sApGVuZHOBoXSBAAmmdG90YWxzgaFmgadyZWNvcmRzCap3YXRlcm1hcmtz"
        "gaFmBaZsb3NzZXORhaRmbG93oWapcGFydGl0aW9uAKVmaXJzdAGjZW5kA6Vyb3VuZASmY2xvc2VkkaFmpmNoYW5nZaA="
    ),
    PlanRecord: (
        "jad2ZXJzaW9uAaNhcHCjYXBwpXJvdW5kBapnZW5lcmF0aW9uAqRiYXNlxAJiNKpkZWZpbml0aW9uoWSkdGlja4Ombm93X21zAal3"
        "YXRlcm1hcmvAp2Nsb3NpbmfCpnJhbmdlc5GEpGZsb3ehZqlwYXJ0aXRpb24ApXN0YXJ0AaRzdG9wA6V0YXNrc5GSoWYApXRpY2tz"
        "gaFmg6Zub3dfbXMBqXdhdGVybWFyawWnY2xvc2luZ8OmbG9zc2VzkYWkZmxvd6FmqXBhcnRpdGlvbgClZmlyc3QBo2VuZAOlcm91"
        "bmQEpWhhbHRzkYOkZmxvd6FmqXBhcnRpdGlvbgGkc3RvcISmcmVhc29upGxvc3SnbWVzc2FnZaRnb25lpm9mZnNldAOmcmVtZWR5"
        "pnJlc3VtZadsb29rdXBzgaZwcmljZXMD"
    ),
    AppRecord: (
        "hKd2ZXJzaW9uAaNhcHCjYXBwqmNyZWF0ZWRfbXMBq2RlZmluaXRpb25zgaFkkYakbmFtZaFmq2ZpbmdlcnByaW50oXirZGVzY3Jp"
        "cHRpb27EAnt9pXRvcGljomluqnBhcnRpdGlvbnMCpXRhc2tzAg=="
    ),
}
"""The same records as the release before topic ids wrote them."""
V2_COMMIT = (
    "3gATp3ZlcnNpb24Co2FwcKNhcHClcm91bmQFqmdlbmVyYXRpb24CpGJhc2XEAmI0pHBsYW7EAnA1qmRlZmluaXRpb26hZKRsaWZl"
    "oWykdGlja4Smbm93X21zAal3YXRlcm1hcmvAp2Nsb3NpbmfCpXdhaXRzkKxjb21taXR0ZWRfbXMHp3NvdXJjZXOSiaRmbG93oWap"
    "cGFydGl0aW9uAKtuZXh0X29mZnNldAmlc3RhdGXEAXOlYXBhcnSgq3N0cmVhbV90aW1lBadzZWVuX21zBqdzdG9wcGVkhKZyZWFz"
    "b26kbG9zdKdtZXNzYWdlpGdvbmWmb2Zmc2V0A6ZyZW1lZHmmcmVzdW1lqHRvcGljX2lkoImkZmxvd6FmqXBhcnRpdGlvbgGrbmV4"
    "dF9vZmZzZXQJpXN0YXRlxAFkpWFwYXJ0pWFwYXJ0q3N0cmVhbV90aW1l/6dzZWVuX21z/6dzdG9wcGVkwKh0b3BpY19pZKCldGFz"
    "a3ORiKRmbG93oWakdGFzawCldG9rZW7EBXRva2Vuq3N0cmVhbV90aW1lBa1iYWNrbG9nX2J5dGVzCqxtZW1vcnlfYnl0ZXMUqXRp"
    "Y2tlZF9tcwakaGVsZMCqZGVsaXZlcmllc5GFpXJvdW5kBaZwYXJjZWyEpG5hbWWhcKRzaXplA6ZkaWdlc3TEAWSoc2VjdGlvbnOR"
    "haV0b3BpY6F0qXBhcnRpdGlvbgCocG9zaXRpb24ApHNpemUDp3JlY29yZHMCpWJhc2VzkQekZmxvd6FmpHRhc2sApGVuZHOBoXSB"
    "AAmmdG90YWxzgaFmgadyZWNvcmRzCap3YXRlcm1hcmtzgaFmBaZsb3NzZXORhaRmbG93oWapcGFydGl0aW9uAKVmaXJzdAGjZW5k"
    "A6Vyb3VuZASmY2xvc2VkkaFmpmNoYW5nZaA="
)
"""The same commit as version 2 wrote it: it had no limits."""
V3_COMMIT = (
    "3gAUp3ZlcnNpb24Do2FwcKNhcHClcm91bmQFqmdlbmVyYXRpb24CpGJhc2XEAmI0pHBsYW7EAnA1qmRlZmluaXRpb26hZKRsaWZloWykdGlj"
    "a4Smbm93X21zAal3YXRlcm1hcmvAp2Nsb3NpbmfCpXdhaXRzkKxjb21taXR0ZWRfbXMHp3NvdXJjZXOSiaRmbG93oWapcGFydGl0aW9uAKtu"
    "ZXh0X29mZnNldAmlc3RhdGXEAXOlYXBhcnSgq3N0cmVhbV90aW1lBadzZWVuX21zBqdzdG9wcGVkhKZyZWFzb26kbG9zdKdtZXNzYWdlpGdv"
    "bmWmb2Zmc2V0A6ZyZW1lZHmmcmVzdW1lqHRvcGljX2lkoImkZmxvd6FmqXBhcnRpdGlvbgGrbmV4dF9vZmZzZXQJpXN0YXRlxAFkpWFwYXJ0"
    "pWFwYXJ0q3N0cmVhbV90aW1l/6dzZWVuX21z/6dzdG9wcGVkwKh0b3BpY19pZKCldGFza3ORiKRmbG93oWakdGFzawCldG9rZW7EBXRva2Vu"
    "q3N0cmVhbV90aW1lBa1iYWNrbG9nX2J5dGVzCqxtZW1vcnlfYnl0ZXMUqXRpY2tlZF9tcwakaGVsZMCqZGVsaXZlcmllc5GFpXJvdW5kBaZw"
    "YXJjZWyEpG5hbWWhcKRzaXplA6ZkaWdlc3TEAWSoc2VjdGlvbnORhaV0b3BpY6F0qXBhcnRpdGlvbgCocG9zaXRpb24ApHNpemUDp3JlY29y"
    "ZHMCpWJhc2VzkQekZmxvd6FmpHRhc2sApGVuZHOBoXSBAAmmdG90YWxzgaFmgadyZWNvcmRzCap3YXRlcm1hcmtzgaFmBaZsb3NzZXORhaRm"
    "bG93oWapcGFydGl0aW9uAKVmaXJzdAGjZW5kA6Vyb3VuZASmY2xvc2VkkaFmpmNoYW5nZaCmbGltaXRzwA=="
)
"""The same commit as version 3 wrote it: its stops named no held-back record."""
GOLDEN = {
    "CommitRecord": "05ddb9cac0c39c3e",
    "PlanRecord": "c96a108fec2e8a2a",
    "AppRecord": "1d4187e740e9d953",
}
