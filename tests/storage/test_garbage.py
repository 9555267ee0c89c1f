"""Garbage collection removes what no retained checkpoint names, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.clock import ManualClock
from tidegate.errors import CorruptError, InvalidError, UnavailableError
from tidegate.storage.backends.base import MissingObjectError
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.backends.sealed import belongs_to, pack_name
from tidegate.storage.index import RunEntry, StoredRef
from tidegate.storage.manifest import Manifest, ManifestChain, StoreState, Token, collect_garbage

HOUR_MS = 3_600_000


class World:
    """A task that writes packs and checkpoints over a memory backend with a clock of its own."""

    def __init__(self, task: str = "app/1", backend: MemoryBackend | None = None) -> None:
        self.task = task
        self.clock = ManualClock()
        self.backend = backend or MemoryBackend(clock=self.clock)
        self.chain = ManifestChain(self.backend, task)
        self.number = 0
        self.entries: dict[int, RunEntry] = {}

    def pack(self, unique: str) -> str:
        name = pack_name(self.task, "s", 0, unique)
        self.backend.put(name, [unique.encode()])
        return name

    def checkpoint(self, *packs: str) -> bytes:
        """The state is what it was and the given packs; many runs lie in the first ones."""
        for pack in packs:
            for _ in range(40 if not self.entries else 1):
                bucket = len(self.entries) * 100
                ref = StoredRef(pack, 0)
                self.entries[bucket] = RunEntry(bucket, 1, 1, 1, 1, 1, bucket, bucket, stored=ref)
        self.number += 1
        state = StoreState("f", 0, 0, list(self.entries.values()))
        return self.chain.write(Manifest(self.task, self.number, {"s": state}), f"u{self.number}").encode()

    def names(self) -> set[str]:
        return {each.name for each in self.backend.list("")}


def test_orphans_older_than_grace_go_and_everything_a_token_names_stays() -> None:
    world = World()
    live = world.pack("live")
    token = world.checkpoint(live)
    orphan = world.pack("orphan")
    world.clock.advance("2h")
    young = world.pack("young")
    report = collect_garbage(
        world.backend, world.task, [token], grace_ms=HOUR_MS, now_ms=world.clock.now_ms()
    )
    assert report.removed == (orphan,)
    assert (report.kept, report.young) == (2, 1)
    assert world.names() == {live, young, *world.chain.names()}


def test_a_dry_run_tells_the_same_and_removes_nothing() -> None:
    world = World()
    token = world.checkpoint(world.pack("live"))
    orphan = world.pack("orphan")
    before = world.names()
    world.clock.advance("2h")
    now = world.clock.now_ms()
    dry = collect_garbage(world.backend, world.task, [token], grace_ms=0, now_ms=now, dry_run=True)
    assert world.names() == before
    assert dry.removed == (orphan,)
    wet = collect_garbage(world.backend, world.task, [token], grace_ms=0, now_ms=now)
    assert wet == dry


def test_the_chain_of_a_retained_delta_stays_and_released_checkpoints_go() -> None:
    world = World()
    tokens = [world.checkpoint(world.pack("p1"))]
    tokens += [world.checkpoint(world.pack(f"p{number}")) for number in range(2, 6)]
    assert len(world.chain.names()) > 1
    every = {each for each in world.names() if each.endswith(".manifest")}
    world.clock.advance("2h")
    report = collect_garbage(
        world.backend, world.task, [tokens[-1]], grace_ms=HOUR_MS, now_ms=world.clock.now_ms()
    )
    kept = {each for each in world.names() if each.endswith(".manifest")}
    assert kept == set(world.chain.names())
    assert set(report.removed) == every - kept
    assert report.removed
    assert len([name for name in world.names() if name.endswith(".pack")]) == 5


def test_packs_only_an_older_retained_checkpoint_names_stay() -> None:
    world = World()
    old = world.pack("old")
    first = world.checkpoint(old)
    world.entries.clear()
    second = world.checkpoint(world.pack("new"))
    world.clock.advance("2h")
    now = world.clock.now_ms()
    assert not collect_garbage(world.backend, world.task, [first, second], grace_ms=0, now_ms=now).removed
    report = collect_garbage(world.backend, world.task, [second], grace_ms=0, now_ms=now)
    assert old in report.removed


def test_what_a_live_task_holds_stays_although_no_token_names_it() -> None:
    world = World()
    token = world.checkpoint(world.pack("live"))
    dumped = world.pack("dumped")
    unacknowledged = world.checkpoint(dumped)
    world.clock.advance("2h")
    keep = {dumped, *world.chain.names()}
    now = world.clock.now_ms()
    report = collect_garbage(world.backend, world.task, [token], grace_ms=0, now_ms=now, keep=keep)
    assert not report.removed
    third = world.checkpoint(world.pack("third"))
    assert unacknowledged != third
    _, restored = ManifestChain.load(world.backend, Token.decode(third))
    assert dumped in restored.packs()


def test_without_a_retained_token_everything_old_goes_manifests_first() -> None:
    world = World()
    world.checkpoint(world.pack("a"))
    world.clock.advance("2h")
    report = collect_garbage(world.backend, world.task, [], grace_ms=HOUR_MS, now_ms=world.clock.now_ms())
    assert [name.rsplit(".", 1)[1] for name in report.removed] == ["manifest", "pack"]
    assert world.names() == set()


@pytest.mark.parametrize("other", ["app/10", "app", "app/1/x", "app/1/packs"])
def test_tasks_are_kept_apart_also_when_their_names_start_the_same(other: str) -> None:
    mine = World("app/1")
    theirs = World(other, mine.backend)
    mine.checkpoint(mine.pack("a"))
    theirs.checkpoint(theirs.pack("a"))
    before = theirs.names()
    mine.clock.advance("2h")
    report = collect_garbage(mine.backend, "app/1", [], grace_ms=0, now_ms=mine.clock.now_ms())
    assert len(report.removed) == 2
    assert theirs.names() == before - set(report.removed)
    assert all(belongs_to(other, name) for name in theirs.names())


def test_nothing_is_removed_when_a_retained_token_cannot_be_followed() -> None:
    world = World()
    tokens = [world.checkpoint(world.pack("a")), world.checkpoint(world.pack("b"))]
    world.pack("orphan")
    world.backend.delete(world.chain.names()[0])
    before = world.names()
    with pytest.raises(MissingObjectError):
        collect_garbage(world.backend, world.task, tokens, grace_ms=0, now_ms=world.clock.now_ms() + 1)
    with pytest.raises(CorruptError):
        collect_garbage(
            world.backend, world.task, [b"not a token"], grace_ms=0, now_ms=world.clock.now_ms() + 1
        )
    assert world.names() == before


def test_tokens_of_other_tasks_and_a_negative_grace_are_refused() -> None:
    world = World()
    token = world.checkpoint(world.pack("a"))
    with pytest.raises(InvalidError, match="is of task app/1"):
        collect_garbage(world.backend, "app/2", [token], grace_ms=0, now_ms=0)
    with pytest.raises(InvalidError, match="grace_ms"):
        collect_garbage(world.backend, "app/1", [token], grace_ms=-1, now_ms=0)


def test_an_object_from_the_future_is_young() -> None:
    world = World()
    world.pack("a")
    now = world.clock.now_ms() - HOUR_MS
    report = collect_garbage(world.backend, world.task, [], grace_ms=0, now_ms=now)
    assert (report.removed, report.young) == ((), 1)


def test_a_delete_that_fails_is_reported_and_the_others_go_on() -> None:
    class Stubborn(MemoryBackend):
        def delete(self, name: str) -> None:
            if "stubborn" in name:
                raise UnavailableError("no")
            super().delete(name)

    world = World(backend=Stubborn(clock=ManualClock()))
    stubborn = world.pack("stubborn")
    other = world.pack("weak")
    report = collect_garbage(world.backend, world.task, [], grace_ms=0, now_ms=world.clock.now_ms())
    assert report.failed == (stubborn,)
    assert report.removed == (other,)


def test_what_a_died_put_left_in_a_folder_is_collected(tmp_path: Path) -> None:
    backend = FolderBackend(tmp_path)
    name = pack_name("app/1", "s", 0, "u")
    backend.put(name, [b"x"])
    leftover = tmp_path / f"{name}.0123456789abcdef0123456789abcdef.tmp"
    leftover.write_bytes(b"half")
    later = max(each.modified_ms for each in backend.list("")) + HOUR_MS
    report = collect_garbage(backend, "app/1", [], grace_ms=HOUR_MS, now_ms=later, keep=[name])
    assert [each.endswith(".tmp") for each in report.removed] == [True]
    assert not leftover.exists()
    assert backend.read(name).to_pybytes() == b"x"
