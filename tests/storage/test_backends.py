"""One suite over every backend: memory, a folder, object stores in memory and over S3's real HTTP."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from s3_server import BUCKET, SETTINGS, Place
from tidegate.clock import ManualClock
from tidegate.errors import ConflictError, CorruptError, InvalidError, TidegateError, UnavailableError
from tidegate.files import Effect, Files
from tidegate.randomness import SeededRandomness
from tidegate.storage.backends.base import (
    MissingObjectError,
    NoStateError,
    StorageBackend,
    chunks,
    put_all,
    same_bytes,
)
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.backends.objects import ObjectsBackend
from tidegate.storage.backends.opening import copies_folder, open_backend
from tidegate.storage.backends.signed import HEAD_BYTES, SignedBackend, StateKeys
from tidegate.storage.manifest import Token

OpenBackend = Callable[[], StorageBackend]
KINDS = ["memory", "folder", "folder-signed", "objects-in-memory", "objects-signed", "objects-over-s3"]
KEYS = StateKeys((bytes(range(32)),), "a test")
_bucket_prefixes = itertools.count()


@pytest.fixture(params=KINDS)
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> OpenBackend:
    """Opens the same backend again and again, as processes do that come and go."""
    match request.param:
        case "memory":
            kept = MemoryBackend()
            return lambda: kept
        case "folder":
            return lambda: FolderBackend(tmp_path / "storage")
        case "folder-signed":
            return lambda: SignedBackend(FolderBackend(tmp_path / "storage"), KEYS, where="here")
        case "objects-in-memory":
            from obstore.store import MemoryStore

            store = MemoryStore()
            return lambda: ObjectsBackend(store, where="memory", cache=tmp_path / "cache")
        case "objects-signed":
            from obstore.store import MemoryStore

            signed = MemoryStore()
            return lambda: SignedBackend(
                ObjectsBackend(signed, where="memory", cache=tmp_path / "cache"), KEYS, where="here"
            )
        case _:
            endpoint = request.getfixturevalue("s3_endpoint")
            url = f"s3://{BUCKET}/{os.getpid()}/{next(_bucket_prefixes)}"
            options = {"endpoint": endpoint, **SETTINGS}
            return lambda: ObjectsBackend.open(url, cache=tmp_path / "cache", options=options)


@pytest.fixture
def backend(reopen: OpenBackend) -> Iterator[StorageBackend]:
    opened = reopen()
    yield opened
    opened.close()


def names(backend: StorageBackend, prefix: str = "") -> list[str]:
    return sorted(each.name for each in backend.list(prefix))


# -- objects -------------------------------------------------------------------------------------


def test_an_object_is_read_back_as_it_was_put_in_parts(backend: StorageBackend, reopen: OpenBackend) -> None:
    parts = [b"abc", bytearray(b"de"), memoryview(b"f" * 300_000), pa.py_buffer(b"ghi"), b""]
    backend.put("task/packs/a.pack", parts)
    expected = b"abcde" + b"f" * 300_000 + b"ghi"
    assert backend.read("task/packs/a.pack").to_pybytes() == expected
    assert backend.read("task/packs/a.pack").address % 64 == 0
    assert reopen().read("task/packs/a.pack").to_pybytes() == expected


def test_an_object_of_many_megabytes_is_read_back(backend: StorageBackend) -> None:
    piece = os.urandom(1 << 20)
    backend.put("t/large", [piece] * 20)
    content = backend.read("t/large")
    assert content.size == 20 << 20
    assert same_bytes([piece] * 20, content)
    assert content.address % 64 == 0
    backend.put("t/large", [piece] * 20)
    with pytest.raises(ConflictError):
        backend.put("t/large", [piece] * 19 + [piece[::-1]])


def test_an_empty_object_is_an_object(backend: StorageBackend) -> None:
    backend.put("t/empty", [])
    assert backend.read("t/empty").size == 0
    assert names(backend) == ["t/empty"]


def test_putting_the_same_bytes_again_is_harmless_however_they_are_cut(backend: StorageBackend) -> None:
    backend.put("t/a", [b"hello ", b"world"])
    backend.put("t/a", [b"hello", b" ", b"world"])
    assert backend.read("t/a").to_pybytes() == b"hello world"


@pytest.mark.parametrize("other", [b"hello worle", b"hello", b"hello world!", b""])
def test_a_taken_name_refuses_other_bytes_and_keeps_its_own(backend: StorageBackend, other: bytes) -> None:
    backend.put("t/a", [b"hello world"])
    with pytest.raises(ConflictError, match="t/a exists already"):
        backend.put("t/a", [other])
    assert backend.read("t/a").to_pybytes() == b"hello world"
    assert names(backend) == ["t/a"]


@pytest.mark.parametrize("id_", ["WS-INV-24"])
def test_absent_is_told_as_missing_with_its_name(backend: StorageBackend, id_: str) -> None:
    with pytest.raises(MissingObjectError, match="t/nothing is missing from") as caught:
        backend.read("t/nothing")
    assert caught.value.name == "t/nothing"
    assert isinstance(caught.value, CorruptError)
    assert not isinstance(caught.value, UnavailableError)


def test_deleting_is_idempotent_and_spares_who_is_reading(backend: StorageBackend) -> None:
    backend.put("t/a", [b"x" * 500_000])
    held = backend.read("t/a")
    backend.delete("t/a")
    backend.delete("t/a")
    backend.delete("t/never")
    assert held.to_pybytes() == b"x" * 500_000
    with pytest.raises(MissingObjectError):
        backend.read("t/a")
    backend.put("t/a", [b"another"])
    assert backend.read("t/a").to_pybytes() == b"another"


def test_a_listing_goes_by_folder_and_tells_size_and_age(backend: StorageBackend) -> None:
    for name in ("a/1/x", "a/1/y/z", "a/10/x", "a/1x", "b/1/x"):
        backend.put(name, [name.encode()])
    assert names(backend, "a/1") == names(backend, "a/1/") == ["a/1/x", "a/1/y/z"]
    assert names(backend, "a") == ["a/1/x", "a/1/y/z", "a/10/x", "a/1x"]
    assert names(backend) == ["a/1/x", "a/1/y/z", "a/10/x", "a/1x", "b/1/x"]
    assert names(backend, "c") == []
    (found,) = backend.list("b")
    assert found.size == 5 + (HEAD_BYTES if isinstance(backend, SignedBackend) else 0)
    assert found.modified_ms > 1_600_000_000_000


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "/",
            "/etc/passwd",
            "a/",
            "a//b",
            ".",
            "..",
            "../a",
            "a/../b",
            "a/..",
            "a/./b",
            ".hidden",
            "a/.b",
        ),
        *("a\\b", "a\0b", "a b", "a\nb", "ä", "C:", "a/b.tmp", "x" * 181, "a/" * 500 + "b", "~a/b?c", "a*b"),
    ],
)
def test_names_that_could_lead_elsewhere_are_refused(backend: StorageBackend, name: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: backend.put(name, [b"x"]),
        lambda: backend.read(name),
        lambda: backend.publish(name, b"x", expected=None),
        lambda: backend.read_published(name),
    ]
    if not name.endswith(".tmp"):
        calls.append(lambda: backend.delete(name))
    for call in calls:
        with pytest.raises(InvalidError):
            call()
    assert names(backend) == []


@pytest.mark.parametrize("name", ["a%2Fb/c%20d", "%2E%2E/x", "a=b,c+d@e~f/-_.x", "x" * 180])
def test_odd_but_plain_names_are_kept_as_they_are(backend: StorageBackend, name: str) -> None:
    backend.put(name, [b"x"])
    assert names(backend) == [name]
    assert backend.read(name).to_pybytes() == b"x"
    backend.delete(name)
    assert names(backend) == []


def test_many_threads_putting_one_name_leave_one_whole_object(backend: StorageBackend) -> None:
    outcomes = race(8, lambda number: backend.put("t/a", [bytes([number]) * 10_000]))
    content = backend.read("t/a").to_pybytes()
    assert len(set(content)) == 1
    assert len(content) == 10_000
    winners = [number for number, outcome in outcomes.items() if outcome is None]
    assert winners == [content[0]]
    assert all(isinstance(each, ConflictError) for each in outcomes.values() if each is not None)


# -- published -----------------------------------------------------------------------------------


def test_a_publish_is_a_compare_and_swap(backend: StorageBackend, reopen: OpenBackend) -> None:
    assert backend.read_published("t/current") is None
    first = backend.publish("t/current", b"one", expected=None)
    assert backend.read_published("t/current") == (b"one", first)
    with pytest.raises(ConflictError):
        backend.publish("t/current", b"two", expected=None)
    second = backend.publish("t/current", b"two", expected=first)
    with pytest.raises(ConflictError):
        backend.publish("t/current", b"three", expected=first)
    assert reopen().read_published("t/current") == (b"two", second)


def test_equal_bytes_published_twice_are_two_versions(backend: StorageBackend) -> None:
    first = backend.publish("t/current", b"same", expected=None)
    second = backend.publish("t/current", b"same", expected=first)
    assert second != first
    with pytest.raises(ConflictError):
        backend.publish("t/current", b"other", expected=first)


def test_an_expected_version_of_an_absent_name_is_a_conflict(backend: StorageBackend) -> None:
    version = backend.publish("t/current", b"one", expected=None)
    backend.delete("t/current")
    assert backend.read_published("t/current") is None
    with pytest.raises(ConflictError):
        backend.publish("t/current", b"two", expected=version)
    again = backend.publish("t/current", b"two", expected=None)
    assert again != version


@pytest.mark.parametrize("fresh", [True, False], ids=["creating", "updating"])
def test_of_racing_publishers_exactly_one_wins(reopen: OpenBackend, fresh: bool) -> None:
    backends = [reopen() for _ in range(6)]
    expected = None if fresh else backends[0].publish("t/current", b"old", expected=None)
    versions: dict[int, str] = {}

    def publish(number: int) -> None:
        versions[number] = backends[number].publish("t/current", b"%d" % number, expected=expected)

    outcomes = race(6, publish)
    winners = [number for number, outcome in outcomes.items() if outcome is None]
    assert len(winners) == 1
    assert all(isinstance(each, ConflictError) for each in outcomes.values() if each is not None)
    assert backends[0].read_published("t/current") == (b"%d" % winners[0], versions[winners[0]])


def test_a_counter_incremented_by_many_loses_no_step(reopen: OpenBackend) -> None:
    start = reopen()
    start.publish("t/counter", b"0", expected=None)

    def increment(_: int) -> None:
        mine = reopen()
        for _ in range(3):
            while True:
                found = mine.read_published("t/counter")
                assert found is not None
                try:
                    mine.publish("t/counter", b"%d" % (int(found[0]) + 1), expected=found[1])
                    break
                except ConflictError:
                    continue

    outcomes = race(4, increment)
    assert set(outcomes.values()) == {None}
    found = start.read_published("t/counter")
    assert found is not None
    assert found[0] == b"12"


def test_what_is_too_large_to_publish_is_refused(backend: StorageBackend) -> None:
    with pytest.raises(InvalidError, match="too many to publish"):
        backend.publish("t/current", bytes((16 << 20) + 1), expected=None)


def race(count: int, act: Callable[[int], None]) -> dict[int, TidegateError | None]:
    """Run `act` in threads that start together; what each one raised."""
    gate, outcomes = threading.Barrier(count), dict[int, TidegateError | None]()

    def run(number: int) -> None:
        gate.wait()
        try:
            act(number)
            outcomes[number] = None
        except TidegateError as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(outcomes) == count
    return outcomes


# -- identity ------------------------------------------------------------------------------------


def token_of(backend: StorageBackend, task: str = "t") -> Token:
    return Token(backend.kind, backend.identity, task, 1, f"{task}/manifests/1-x.manifest", b"0" * 16)


def test_the_identity_stays_for_life(backend: StorageBackend, reopen: OpenBackend) -> None:
    assert reopen().identity == backend.identity
    token = Token.decode(token_of(backend).encode())
    token.check(reopen(), "t")


@pytest.mark.parametrize("id_", ["WS-T65"])
def test_a_token_of_another_backend_is_refused(backend: StorageBackend, tmp_path: Path, id_: str) -> None:
    others: list[StorageBackend] = [MemoryBackend(), FolderBackend(tmp_path / "other")]
    for other in others:
        with pytest.raises(InvalidError, match="open the backend it was written to"):
            token_of(other).check(backend, "t")
        with pytest.raises(InvalidError, match="open the backend it was written to"):
            token_of(backend).check(other, "t")
    with pytest.raises(InvalidError, match="is of task t, not u"):
        token_of(backend).check(backend, "u")


def test_the_backends_own_names_cannot_be_used_nor_seen(backend: StorageBackend) -> None:
    if backend.kind == "memory":
        pytest.skip("keeps its identity outside")
    for call in (backend.read, backend.delete, lambda name: backend.put(name, [b"x"])):
        with pytest.raises(InvalidError, match="the backend's own"):
            call("tidegate-storage")
    assert names(backend) == []


# -- one kind alone ------------------------------------------------------------------------------


def test_a_folder_with_objects_but_no_identity_is_not_given_a_new_one(tmp_path: Path) -> None:
    FolderBackend(tmp_path).put("t/a", [b"x"])
    (tmp_path / "tidegate-storage").unlink()
    with pytest.raises(CorruptError, match="is missing although"):
        FolderBackend(tmp_path)


def test_a_folder_that_comes_to_life_while_it_is_opened_is_not_taken_for_damaged(tmp_path: Path) -> None:
    """The identity is not there yet, and then the first objects are: another process has begun in between."""
    made: list[FolderBackend] = []

    def begin(effect: Effect) -> None:
        if effect.kind == "list" and not made:
            made.append(FolderBackend(tmp_path))
            made[0].put("task/object", [b"x"])

    opened = FolderBackend(tmp_path, files=Files(watch=begin))
    assert opened.identity == made[0].identity
    assert bytes(opened.read("task/object")) == b"x"


@pytest.mark.parametrize("damage", [b"", b"x", b"TG-IDENT" + bytes(40)])
def test_a_damaged_identity_is_told(tmp_path: Path, damage: bytes) -> None:
    FolderBackend(tmp_path)
    (tmp_path / "tidegate-storage").write_bytes(damage)
    with pytest.raises(CorruptError, match="backend identity"):
        FolderBackend(tmp_path)


def test_links_inside_a_folder_do_not_lead_out_of_it(tmp_path: Path) -> None:
    backend = FolderBackend(tmp_path / "storage")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"s")
    (tmp_path / "storage" / "t").symlink_to(tmp_path / "outside")
    (tmp_path / "storage" / "link").symlink_to(tmp_path / "outside" / "secret")
    for name in ("t/secret", "link"):
        with pytest.raises(InvalidError):
            backend.read(name)
    with pytest.raises(InvalidError):
        backend.put("t/new", [b"x"])
    with pytest.raises(InvalidError):
        backend.delete("t/secret")
    assert names(backend) == []
    assert (tmp_path / "outside" / "secret").exists()


def test_a_folder_holds_no_temporary_file_after_a_refused_put(tmp_path: Path) -> None:
    backend = FolderBackend(tmp_path)
    backend.put("t/a", [b"x"])
    with pytest.raises(ConflictError):
        backend.put("t/a", [b"y"])
    assert names(backend) == ["t/a"]


def test_a_publisher_gives_up_after_a_bounded_wait_for_the_lock(tmp_path: Path) -> None:
    clock = ManualClock()
    backend = FolderBackend(tmp_path, clock=clock)
    held = Files().lock(tmp_path / "tidegate-storage.lock")
    with pytest.raises(UnavailableError, match="was held by another process"):
        backend.publish("t/current", b"x", expected=None)
    assert clock.monotonic_ms() == 5000
    held.release()
    backend.publish("t/current", b"x", expected=None)


def test_unique_names_of_temporaries_come_from_the_randomness_handed_in(tmp_path: Path) -> None:
    first = FolderBackend(tmp_path / "a", randomness=SeededRandomness(7))
    second = FolderBackend(tmp_path / "b", randomness=SeededRandomness(7))
    assert first.identity == second.identity


def test_a_store_without_conditional_update_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    with pytest.raises(InvalidError, match="has no conditional put"):
        ObjectsBackend.open(f"file://{tmp_path}/local", cache=tmp_path / "cache")
    assert [path for path in (tmp_path / "local").rglob("*") if path.is_file()] == []


def test_a_missing_bucket_is_not_an_absent_object(s3_endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no such bucket"):
        ObjectsBackend.open(
            "s3://no-such-bucket/x", cache=tmp_path, options={"endpoint": s3_endpoint, **SETTINGS}
        )


def test_an_unreachable_store_is_unavailable_after_bounded_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.storage.backends.objects.MAX_RETRIES", 1)
    with pytest.raises(UnavailableError, match="could not open"):
        ObjectsBackend.open(
            "s3://bucket/x", cache=tmp_path, options={"endpoint": "http://127.0.0.1:1", **SETTINGS}
        )


@pytest.mark.parametrize(
    ("address", "options"),
    [("ftp://a/b", {}), ("az://container/x", {}), ("s3://bucket", {"endpointt": "http://x"})],
)
def test_a_wrong_address_or_option_is_invalid(tmp_path: Path, address: str, options: dict[str, str]) -> None:
    with pytest.raises(InvalidError, match="cannot be opened"):
        open_backend(address, cache=tmp_path, options=options)


def test_an_address_says_which_backend_it_is(tmp_path: Path) -> None:
    assert open_backend(tmp_path / "a").kind == "folder"
    assert open_backend(str(tmp_path / "a")).kind == "folder"
    by_url = open_backend(f"file://{tmp_path}/with%20space")
    assert (by_url.kind, by_url.address) == ("folder", str(tmp_path / "with space"))
    assert open_backend("memory://").kind == "memory"


def test_an_object_store_is_opened_by_its_address_alone(s3: Place) -> None:
    with closing(open_backend(s3.url)) as backend:
        assert (backend.kind, backend.address) == ("objects", s3.url)
        backend.put("t/a", [b"x" * 300_000])
        assert backend.read("t/a").size == 300_000
    assert copies_folder(s3.url).is_relative_to(s3.environment["TIDEGATE_CACHE"])
    assert any(copies_folder(s3.url).rglob("*.copy"))


def test_a_folder_of_copies_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEGATE_CACHE", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    shared = copies_folder("s3://bucket/a").parent
    assert shared.parent == tmp_path and shared.stat().st_mode & 0o777 == 0o700
    assert copies_folder("s3://bucket/b").parent == shared
    shared.chmod(0o777)  # as somebody would leave it who was first here
    with pytest.raises(InvalidError, match=r"changed by other users.*TIDEGATE_CACHE"):
        copies_folder("s3://bucket/a")
    shared.rmdir()
    shared.symlink_to(tmp_path)
    with pytest.raises(InvalidError, match="TIDEGATE_CACHE"):
        copies_folder("s3://bucket/a")


def test_without_a_folder_for_temporary_files_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDEGATE_CACHE", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "nothing" / "here"))
    with pytest.raises(InvalidError, match="name one that can be written in TIDEGATE_CACHE"):
        open_backend("s3://bucket/prefix")


# -- reading only --------------------------------------------------------------------------------


@pytest.fixture(params=["folder", "objects-over-s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "state") if request.param == "folder" else request.getfixturevalue("s3").url


@pytest.mark.parametrize("given", [{"create": False}, {"read_only": True}], ids=str)
def test_what_is_not_there_is_told_and_not_made(address: str, tmp_path: Path, given: dict[str, bool]) -> None:
    for _ in range(2):
        with pytest.raises(NoStateError, match="there is no state in"):
            open_backend(address, **given)
    assert not (tmp_path / "state").exists()
    with closing(open_backend(address)) as made:
        made.put("t/a", [b"abc"])
    with closing(open_backend(address, **given)) as opened:
        assert (opened.identity, opened.read("t/a").to_pybytes()) == (made.identity, b"abc")


def test_opened_to_be_read_nothing_is_written(address: str) -> None:
    with closing(open_backend(address)) as made:
        made.put("t/a", [b"abc"])
        version = made.publish("t/current", b"one", expected=None)
    opened = open_backend(address, read_only=True)
    writes: list[Callable[[], object]] = [
        lambda: opened.put("t/b", [b"x"]),
        lambda: put_all(opened, [("t/b", [b"x"])]),
        lambda: opened.publish("t/current", b"two", expected=version),
        lambda: opened.publish("t/other", b"two", expected=None),
        lambda: opened.delete("t/a"),
    ]
    for write in writes:
        with pytest.raises(InvalidError, match="was opened to be read"):
            write()
    assert names(opened) == ["t/a", "t/current"]
    assert opened.read_published("t/current") == (b"one", version)


def test_a_folder_without_the_right_to_write_can_be_read(tmp_path: Path) -> None:
    with closing(open_backend(tmp_path / "state")) as made:
        made.put("t/a", [b"abc"])
    watched = Files(watch=_refuse)
    with closing(open_backend(tmp_path / "state", read_only=True, files=watched)) as opened:
        assert opened.read("t/a").to_pybytes() == b"abc"
        assert names(opened) == ["t/a"]


def _refuse(effect: Effect) -> None:
    if effect.kind not in ("open", "read", "map", "list", "stat"):
        raise AssertionError(f"reading does {effect}")


def test_to_read_an_object_store_takes_one_request_and_to_write_six(s3: Place) -> None:
    with s3.counted() as made:
        open_backend(s3.url).close()
    with s3.counted() as to_write:
        open_backend(s3.url).close()
    with s3.counted() as to_read:
        open_backend(s3.url, read_only=True).close()
    assert to_read == {"GET": 1}
    assert to_write == {"PUT": 4, "DELETE": 1, "GET": 1}
    assert made == {"PUT": 5, "DELETE": 1, "GET": 1, "LIST": 1}


def test_a_lost_identity_is_damage_and_never_made_anew(address: str, tmp_path: Path) -> None:
    with closing(open_backend(address)) as made:
        made.put("t/a", [b"abc"])
    if address.startswith("s3://"):
        import obstore

        obstore.delete(made.inside._store, "tidegate-storage")  # type: ignore[attr-defined]
    else:
        (tmp_path / "state" / "tidegate-storage").unlink()
    for given in ({}, {"read_only": True}):
        with pytest.raises(CorruptError, match="tidegate-storage is missing although"):
            open_backend(address, **given)


def test_parts_are_gathered_when_small_and_passed_on_when_large() -> None:
    large = os.urandom(1 << 18)
    parts = [b"a" * 10, b"b" * 10, large, b"c", b"d" * (1 << 16), b"e" * (1 << 16)]
    pieces = list(chunks(parts, 1 << 17))
    assert b"".join(pieces) == b"".join(parts)
    assert [len(piece) for piece in pieces] == [20, 1 << 18, 1, 1 << 16, 1 << 16]
    assert pieces[1].obj is large


# -- several objects of a folder -----------------------------------------------------------------


def test_objects_put_together_are_all_there_and_nothing_else(tmp_path: Path) -> None:
    backend = FolderBackend(tmp_path)
    chance = SeededRandomness(3)
    many = [bytes([chance.below(256)]) * chance.below(40) for _ in range(5000)]
    large = [b"x" * (3 << 20), b"", b"y" * 700_001, b"z"]
    objects = {"a/packs/s/1": many, "a/packs/s/2": large, "a/packs/t/3": [b"3"], "a/packs/t/4": [b""]}
    put_all(backend, iter(objects.items()))
    for name, parts in objects.items():
        assert backend.read(name).to_pybytes() == b"".join(parts)
    assert {each.name for each in backend.list("")} == set(objects)
    put_all(backend, objects.items())  # the same bytes again
    put_all(backend, [])


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_of_objects_put_together_none_is_there_before_all_could_be_written(tmp_path: Path, bad: int) -> None:
    backend = FolderBackend(tmp_path)

    def objects() -> Iterator[tuple[str, list[bytes]]]:
        for number in range(3):
            if number == bad:
                raise UnavailableError("the next one could not be made")
            yield f"a/{number}", [b"%d" % number]

    with pytest.raises(UnavailableError):
        put_all(backend, objects())
    assert list(backend.list("")) == []


def test_a_taken_name_among_objects_put_together_is_a_conflict_and_leaves_no_temporary(
    tmp_path: Path,
) -> None:
    backend = FolderBackend(tmp_path)
    backend.put("a/1", [b"mine"])
    with pytest.raises(ConflictError):
        put_all(backend, [("a/0", [b"0"]), ("a/1", [b"other"]), ("a/2", [b"2"])])
    assert backend.read("a/1").to_pybytes() == b"mine"
    assert not [each.name for each in backend.list("") if each.name.endswith(".tmp")]


def test_a_sync_that_fails_beside_others_fails_the_put_and_nothing_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FolderBackend(tmp_path)
    backend.put("a/before", [b"x"])
    sync, calls = os.fsync, itertools.count()

    def fail(descriptor: int) -> None:
        if next(calls) == 2:
            raise OSError(errno.EIO, "no")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(UnavailableError):
            put_all(backend, [(f"a/{number}", [b"y"]) for number in range(5)])
    assert [each.name for each in backend.list("")] == ["a/before"]
