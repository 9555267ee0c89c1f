"""The record of a table's versions: what may change, what may go, and its bytes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tidegate.clock import ManualClock
from tidegate.errors import ConflictError, CorruptError, InvalidError
from tidegate.storage import open_backend
from tidegate.tables.versions import catalog
from tidegate.tables.versions.catalog import (
    State,
    VersionList,
    Versions,
    load_versions,
    version_named,
    versions_name,
)

SERDES = {"partitions": 2, "key_serde": "String()", "value_serde": "Bytes()"}


def listed(*states: State, current: int = 0, previous: int = 0) -> VersionList:
    """A list whose versions stand where the states say."""
    known = VersionList(catalog.VERSION, "users")
    for number, state in enumerate(states, 1):
        known = catalog.created(known, f"push-{number}", 1000 * number, **SERDES)
        steps = [State.INGESTING, State.READY] if state in (State.READY, State.RETIRED) else []
        for step in (*steps, state) if state is not State.PUSHING else ():
            known = catalog.marked(known, number, step)
    return msgspec.structs.replace(known, current=current, previous=previous)


def test_only_a_ready_version_is_ever_shown() -> None:
    for state in State:
        known = listed(state)
        if state is State.READY:
            assert catalog.swapped(known, 1, "swap", 5).current == 1
        else:
            with pytest.raises(ConflictError, match="only a version that is ready"):
                catalog.swapped(known, 1, "swap", 5)


def test_states_go_forward_only() -> None:
    order = [State.PUSHING, State.INGESTING, State.READY, State.FAILED, State.RETIRED]
    allowed = {
        (State.PUSHING, State.INGESTING), (State.PUSHING, State.FAILED), (State.INGESTING, State.READY),
        (State.INGESTING, State.FAILED), (State.READY, State.RETIRED), (State.FAILED, State.RETIRED),
    }  # fmt: skip
    for before in order:
        for after in order:
            known = listed(before)
            if before is after or (before, after) in allowed:
                assert catalog.marked(known, 1, after).get(1).state is after
            else:
                with pytest.raises(ConflictError):
                    catalog.marked(known, 1, after)


def test_a_rollback_shows_the_one_before_and_another_one_takes_it_back() -> None:
    known = listed(State.READY, State.READY)
    known = catalog.swapped(catalog.swapped(known, 1, "push", 1), 2, "push", 2)
    once = catalog.rolled_back(known, 3)
    assert (once.current, once.previous) == (1, 2)
    assert catalog.rolled_back(once, 4).current == 2
    with pytest.raises(ConflictError, match="nothing to go back to"):
        catalog.rolled_back(listed(State.READY, current=1), 5)


@pytest.mark.parametrize(
    ("retain", "gone"),
    [(1, [1, 2, 4]), (2, [1, 2, 4]), (3, [1, 2, 4]), (4, [1, 4]), (9, [4])],
)
def test_current_previous_waiting_and_the_newest_failed_version_stay(retain: int, gone: list[int]) -> None:
    ready, failed = State.READY, State.FAILED
    known = listed(ready, ready, ready, failed, ready, failed, ready, current=5, previous=3)
    assert catalog.superfluous(known, retain) == gone  # 7 is ready and waits for its swap
    with pytest.raises(InvalidError):
        catalog.superfluous(known, 0)


def test_numbers_are_never_given_twice(tmp_path: Path) -> None:
    versions = Versions(open_backend(str(tmp_path)), "users", clock=ManualClock(now_ms=5))
    versions.create("a", **SERDES)
    versions.mark(1, State.FAILED)
    versions.retire(1)
    versions.forget(1)
    assert versions.create("b", **SERDES).number == 2


def test_of_two_who_change_the_record_at_once_both_come_through(tmp_path: Path) -> None:
    backend = open_backend(str(tmp_path))
    versions, other = Versions(backend, "users"), Versions(backend, "users")
    changed: list[int] = []

    def slowly(known: VersionList) -> VersionList:
        if not changed:
            changed.append(other.create("meanwhile", **SERDES).number)
        return catalog.created(known, "mine", 1, **SERDES)

    assert [each.push for each in versions._change(slowly).versions] == ["meanwhile", "mine"]


def test_a_name_means_a_table_or_one_of_its_versions(tmp_path: Path) -> None:
    backend = open_backend(str(tmp_path))
    Versions(backend, "users").create("a", **SERDES)
    assert version_named(backend, "users") == ("users", None)
    assert version_named(backend, "users_v1") == ("users", 1)
    assert [version_named(backend, name) for name in ("users_v2", "users_vx", "others_v1", "_v1")] == [
        None
    ] * 4


def test_the_records_bytes_are_these(tmp_path: Path) -> None:
    known = catalog.created(VersionList(1, "t"), "p", 7, partitions=1, key_serde="k", value_serde="v")
    assert msgspec.msgpack.encode(known) == GOLDEN
    assert msgspec.msgpack.decode(GOLDEN, type=VersionList) == known


def test_a_record_of_another_release_or_table_is_refused(tmp_path: Path) -> None:
    backend = open_backend(str(tmp_path))
    for data in (
        b"\x00",
        msgspec.msgpack.encode(VersionList(2, "t")),
        msgspec.msgpack.encode(VersionList(1, "u")),
    ):
        found = backend.read_published(versions_name("t"))
        backend.publish(versions_name("t"), data, expected=None if found is None else found[1])
        with pytest.raises(CorruptError, match="tables/t/versions"):
            load_versions(backend, "t")


GOLDEN = bytes.fromhex(
    "87a776657273696f6e01a57461626c65a174ab6e6578745f6e756d62657202a763757272656e7400a870726576696f757300"
    "a876657273696f6e7391de0012a66e756d62657201a5746f706963a4745f7631a470757368a170a57374617465a770757368"
    "696e67aa706172746974696f6e7301a96b65795f7365726465a16bab76616c75655f7365726465a176a6736f75726365a0aa"
    "637265617465645f6d7307a97075736865645f6d7300a8656e6465645f6d7300a4726f777300a66e627974657300ad726570"
    "65617465645f6b65797300ab776974686f75745f6b657900a8766572646963747380a7726573756c747390a66661756c7473"
    "90a5737761707390"
)
