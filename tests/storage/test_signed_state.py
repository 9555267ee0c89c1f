"""Signed state: with a key nothing is read that the key did not sign under that name; without one all is as before."""

from __future__ import annotations

import base64
import hmac
import re
import secrets
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from remedies import typed
from tidegate.errors import ConflictError, InvalidError, SignatureError
from tidegate.files import Files
from tidegate.storage import open_backend, resign, state_key_id
from tidegate.storage.backends.base import StorageBackend, put_all
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.signed import HEAD_BYTES, MAGIC, SignedBackend, StateKeys, state_keys
from tidegate.testing.crash_states import Recorder, crash_states

FIRST, SECOND = (bytes((7 * i + n) % 256 for i in range(32)) for n in (1, 2))
OBJECTS = {"t/packs/a.pack": b"a pack" * 50, "t/packs/b.pack": b"b pack" * 50, "t/letters": b""}
PUBLISHED = {"apps/x/app": b"record", "apps/x/commits/0000000001": b"commit"}


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEGATE_STATE_KEY", raising=False)
    monkeypatch.delenv("TIDEGATE_STATE_KEY_FILE", raising=False)


@pytest.fixture(params=["folder", "objects-over-s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "state") if request.param == "folder" else request.getfixturevalue("s3").url


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TIDEGATE_STATE_KEY", FIRST.hex())
    yield


def fill(backend: StorageBackend) -> None:
    put_all(backend, [(name, [data[:100], pa.py_buffer(data[100:])]) for name, data in OBJECTS.items()])
    for name, data in PUBLISHED.items():
        backend.publish(name, data, expected=None)


def read_all(backend: StorageBackend) -> dict[str, bytes]:
    objects = {name: backend.read(name).to_pybytes() for name in OBJECTS}
    found = {name: backend.read_published(name) for name in PUBLISHED}
    return objects | {name: each[0] for name, each in found.items() if each is not None}


# -- keys ----------------------------------------------------------------------------------------


def test_keys_are_hex_or_base64_from_a_variable_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{FIRST.hex()}\n{base64.b64encode(SECOND).decode()}\n")
    url_safe = base64.urlsafe_b64encode(SECOND).decode().rstrip("=")
    given = {"TIDEGATE_STATE_KEY": f"{FIRST.hex()}, {url_safe}"}
    for environment in (given, {"TIDEGATE_STATE_KEY_FILE": str(file)}):
        keys = state_keys(environment)
        assert keys is not None and keys.keys == (FIRST, SECOND)
        assert keys.id == StateKeys((FIRST,), "").id != StateKeys((SECOND,), "").id
        assert not re.search("01|" + FIRST.hex()[:6], repr(keys)) and FIRST.hex()[:16] not in keys.id
    assert state_keys({}) is None and state_key_id() == ""


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        (
            {"TIDEGATE_STATE_KEY": FIRST.hex()[:-2]},
            r"TIDEGATE_STATE_KEY: key 1 has 31 bytes.*openssl rand -hex 32",
        ),
        ({"TIDEGATE_STATE_KEY": f"{FIRST.hex()},x!y"}, "key 2 is neither hex nor base64"),
        ({"TIDEGATE_STATE_KEY": "deadbeef" * 16}, "is not random"),
        ({"TIDEGATE_STATE_KEY": "00" * 64}, "is not random"),
        ({"TIDEGATE_STATE_KEY": "correct horse"}, "key 1"),
        ({"TIDEGATE_STATE_KEY": " , "}, "holds no key"),
        ({"TIDEGATE_STATE_KEY_FILE": "/nowhere/key"}, "/nowhere/key, which does not exist"),
        ({"TIDEGATE_STATE_KEY_FILE": "/"}, "cannot be read"),
        ({"TIDEGATE_STATE_KEY_FILE": "/x", "TIDEGATE_STATE_KEY": FIRST.hex()}, "keep one of them"),
    ],
)
def test_a_key_that_is_no_good_is_refused_and_not_shown(environment: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidError, match=why) as told:
        state_keys(environment)
    written = environment.get("TIDEGATE_STATE_KEY", "").split(",")
    assert not any(len(each.strip()) > 3 and each.strip() in str(told.value) for each in written)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(secrets.token_bytes(20) + b"\xff" * 12)
    with pytest.raises(InvalidError, match="holds no hex or base64"):
        state_keys({"TIDEGATE_STATE_KEY_FILE": str(tmp_path / "key")})


# -- reading and writing ---------------------------------------------------------------------------


def test_what_is_signed_is_read_with_the_key_and_by_readers_without_one(
    address: str, key: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(open_backend(address))
    expected = OBJECTS | PUBLISHED
    assert read_all(open_backend(address)) == read_all(open_backend(address, read_only=True)) == expected
    assert open_backend(address).read("t/packs/a.pack").address % 64 == 0
    monkeypatch.delenv("TIDEGATE_STATE_KEY")
    assert read_all(open_backend(address, read_only=True)) == expected


def test_every_stored_file_begins_with_its_signature(tmp_path: Path, key: None) -> None:
    fill(open_backend(tmp_path / "state"))
    raw = FolderBackend(tmp_path / "state")
    stored = [raw.read(name).to_pybytes() for name in OBJECTS]
    stored += [found[0] for name in PUBLISHED if (found := raw.read_published(name)) is not None]
    assert len(stored) == 5 and all(each.startswith(MAGIC) and len(each) >= HEAD_BYTES for each in stored)
    assert FIRST not in b"".join(stored)


def test_the_bytes_of_a_signature_are_these(tmp_path: Path) -> None:
    """As docs/reference/storage-formats.md says, computed apart from the code."""
    inside = FolderBackend(tmp_path / "state")
    SignedBackend(inside, StateKeys((FIRST,), ""), where="").put("t/a", [b"con", b"tent"])
    identity = inside.identity.encode()
    covered = struct.pack("<HI", 1, len(identity)) + identity + struct.pack("<HI", 1, 3) + b"t/a" + b"content"
    head = b"TG-SIGN\n\1\0" + bytes(6) + hmac.digest(FIRST, b"tidegate state key id", "sha256")[:8] + bytes(8)
    stored = (tmp_path / "state" / "t/a").read_bytes()
    assert stored == head + hmac.digest(FIRST, covered, "sha256") + b"content"


def test_a_writer_without_the_key_is_refused_and_can_take_the_signatures_off(
    address: str, key: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(open_backend(address))
    monkeypatch.delenv("TIDEGATE_STATE_KEY")
    with pytest.raises(InvalidError, match="is signed, and no key is set") as told:
        open_backend(address).read("t/packs/a.pack")
    with pytest.raises(InvalidError, match="is signed, and no key is set"):
        open_backend(address).read_published("apps/x/app")
    assert "5 files" in typed(told.value, "storage.backends.signed.unkeyed: state unsign")
    assert read_all(open_backend(address)) == OBJECTS | PUBLISHED
    assert "0 files" in typed(told.value, "storage.backends.signed.unkeyed: state unsign")


def test_state_from_before_the_key_is_refused_until_it_is_signed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(open_backend(address))
    monkeypatch.setenv("TIDEGATE_STATE_KEY", FIRST.hex())
    for read in (lambda it: it.read("t/packs/a.pack"), lambda it: it.read_published("apps/x/app")):
        with pytest.raises(SignatureError, match=r"(a\.pack|app) in .* is not signed") as told:
            read(open_backend(address, read_only=True))
        assert told.value.path is not None and told.value.exit_code == 5
    place = "storage.backends.signed.unsigned: state sign"
    assert "5 files" in typed(told.value, place, "--dry-run")
    with pytest.raises(SignatureError):
        read_all(open_backend(address))
    assert "were signed with key" in typed(told.value, place)
    assert read_all(open_backend(address)) == OBJECTS | PUBLISHED
    assert "0 files (0 B) were signed" in typed(told.value, place)
    monkeypatch.setenv("TIDEGATE_STATE", address)
    assert "5 were already" in typed(told.value.remedy, "errors.SignatureError.remedy: state sign")


def test_keys_are_replaced_while_state_is_read(
    address: str, key: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(open_backend(address))
    monkeypatch.setenv("TIDEGATE_STATE_KEY", SECOND.hex())
    with pytest.raises(SignatureError, match=r"is signed with key .*Add the key it was signed with") as told:
        open_backend(address).read("t/packs/a.pack")
    monkeypatch.setenv("TIDEGATE_STATE_KEY", f"{SECOND.hex()},{FIRST.hex()}")
    both = open_backend(address)
    assert read_all(both) == OBJECTS | PUBLISHED
    both.put(
        "t/packs/a.pack", [OBJECTS["t/packs/a.pack"]]
    )  # again, as attempts do: the same, whoever signed it
    with pytest.raises(ConflictError):
        both.put("t/packs/a.pack", [b"other"])
    assert resign(both).changed == 5
    monkeypatch.setenv("TIDEGATE_STATE_KEY", SECOND.hex())
    assert read_all(open_backend(address)) == OBJECTS | PUBLISHED
    monkeypatch.setenv("TIDEGATE_STATE_KEY", FIRST.hex())  # the old one alone: as if the new one were lost
    with pytest.raises(SignatureError):
        open_backend(address).read("t/packs/a.pack")
    monkeypatch.delenv("TIDEGATE_STATE_KEY")
    assert "5 files" in typed(told.value, "storage.backends.signed.unknown_key: state unsign")
    assert read_all(open_backend(address)) == OBJECTS | PUBLISHED


# -- what somebody else left there ------------------------------------------------------------------


def test_no_changed_byte_of_a_signed_file_is_read(tmp_path: Path, key: None) -> None:
    fill(open_backend(tmp_path / "state"))
    backend = open_backend(tmp_path / "state", read_only=True)
    path = tmp_path / "state" / "t/packs/a.pack"
    content, refused = path.read_bytes(), 0
    changes = [content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
               for at in range(len(content)) for bit in (0, 7)]  # fmt: skip
    changes += [content[:at] for at in range(0, len(content), 5)] + [content + b"\0", content * 2]
    for changed in changes:
        path.write_bytes(changed)
        with pytest.raises(SignatureError):
            backend.read("t/packs/a.pack")
        refused += 1
    assert refused == len(changes) > 700


def test_a_sound_file_in_another_place_is_not_read(tmp_path: Path, key: None) -> None:
    fill(open_backend(tmp_path / "state"))
    fill(open_backend(tmp_path / "other"))
    state, other = tmp_path / "state", tmp_path / "other"
    shutil.copy(state / "t/packs/a.pack", state / "t/packs/b.pack")
    shutil.copy(other / "t/packs/a.pack", state / "t/packs/a.pack")  # same name, same bytes, another state
    shutil.copy(other / "apps/x/app", state / "apps/x/app")
    backend = open_backend(state)
    with pytest.raises(SignatureError, match="changed, or put in the place of another") as told:
        backend.read("t/packs/b.pack")
    with pytest.raises(SignatureError):
        backend.read("t/packs/a.pack")
    with pytest.raises(SignatureError):
        backend.read_published("apps/x/app")
    named = typed(told.value, "storage.backends.signed.forged: state sign", expect=1)
    assert all(name in named for name in ("t/packs/a.pack", "t/packs/b.pack", "apps/x/app"))
    assert "3 were left as they are" in named


def test_a_published_object_moved_with_its_envelope_made_anew_is_not_read(tmp_path: Path, key: None) -> None:
    """The envelope has a checksum only, so a forger can write one; the signature names the object as well."""
    fill(open_backend(tmp_path / "state"))
    raw = FolderBackend(tmp_path / "state")
    data, version = raw.read_published("apps/x/app") or (b"", "")
    raw.publish("apps/x/app", data, expected=version)
    assert (open_backend(tmp_path / "state").read_published("apps/x/app") or ("",))[0] == b"record"
    raw.publish("apps/x/commits/0000000002", data, expected=None)
    with pytest.raises(SignatureError):
        open_backend(tmp_path / "state").read_published("apps/x/commits/0000000002")


def test_a_damaged_local_copy_is_fetched_again(s3: object, key: None) -> None:
    large = secrets.token_bytes(400_000)
    backend = open_backend(s3.url)  # type: ignore[attr-defined]
    backend.put("t/a", [large])
    assert backend.read("t/a").to_pybytes() == large
    (copy,) = Path(s3.environment["TIDEGATE_CACHE"]).rglob("*.copy")  # type: ignore[attr-defined]
    assert isinstance(backend, SignedBackend)
    content = bytearray(copy.read_bytes())
    content[5000] ^= 1
    copy.write_bytes(content)
    assert open_backend(s3.url).read("t/a").to_pybytes() == large  # type: ignore[attr-defined]


# -- signing all of a state -------------------------------------------------------------------------


def test_signing_can_die_anywhere_and_be_run_again(tmp_path: Path) -> None:
    fill(open_backend(tmp_path / "state"))
    recorder = Recorder(tmp_path / "state")
    keys, cases = StateKeys((FIRST,), "a test"), 0

    def keyed(root: Path, files: Files | None = None) -> SignedBackend:
        return SignedBackend(FolderBackend(root, files=files), keys, where=str(root))

    assert resign(keyed(tmp_path / "state", Files(watch=recorder))).changed == 5
    for number, left in enumerate(crash_states(recorder.recording, model="weak", limit=8)):
        root = left.write_to(tmp_path / f"left-{number}")
        assert not resign(keyed(root)).refused
        assert read_all(keyed(root)) == OBJECTS | PUBLISHED, left.story
        shutil.rmtree(root)
        cases += 1
    assert cases > 20


def test_signing_waits_for_nobody_and_says_who_writes(
    tmp_path: Path, key: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDEGATE_STATE_KEY")
    fill(open_backend(tmp_path / "state"))
    monkeypatch.setenv("TIDEGATE_STATE_KEY", FIRST.hex())
    backend, raw = open_backend(tmp_path / "state"), FolderBackend(tmp_path / "state")
    assert isinstance(backend, SignedBackend)
    publish = backend.inside.publish

    def changed_first(name: str, data: bytes, *, expected: str | None) -> str:
        raw.publish(name, b"newer", expected=expected)
        return publish(name, data, expected=expected)

    monkeypatch.setattr(backend.inside, "publish", changed_first)
    with pytest.raises(ConflictError, match="end what writes there"):
        resign(backend)


def test_state_in_memory_is_not_signed(key: None) -> None:
    backend = open_backend("memory://")
    backend.put("a", [b"x"])
    assert backend.read("a").to_pybytes() == b"x"
    with pytest.raises(InvalidError, match="state in memory is not signed"):
        resign(backend)


def test_a_process_that_signs_with_another_key_is_refused(
    tmp_path: Path, key: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = state_key_id()
    open_backend(tmp_path / "state", key_id=there)
    with pytest.raises(InvalidError, match=r"the driver signs .* with no key, and this process with key"):
        open_backend(tmp_path / "state", key_id="")
    monkeypatch.delenv("TIDEGATE_STATE_KEY")
    open_backend(tmp_path / "state", key_id="")
    with pytest.raises(
        InvalidError, match=rf"with key {there}, .*spark\.executorEnv\.TIDEGATE_STATE_KEY_FILE"
    ):
        open_backend(tmp_path / "state", key_id=there)
