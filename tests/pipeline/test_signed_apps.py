"""Apps and tables whose state is signed, as users meet it: the key is set, state is taken over, and forgeries stop."""

from __future__ import annotations

import logging
import pickle
import shutil
from pathlib import Path

import pytest

from hostile_state import KEY, define, make, seen
from remedies import typed
from tidegate.cli.main import run
from tidegate.errors import InvalidError, SignatureError
from tidegate.pipeline.tasks.setup import WorkerSetup
from tidegate.pipeline.tasks.worker import Worker
from tidegate.storage import StorageConfig
from tidegate.storage.backends.folder import OWN_FILES, FolderBackend
from tidegate.storage.backends.signed import MAGIC
from tidegate.tables.versions.reader import versioned_table


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEGATE_STATE_KEY", raising=False)
    monkeypatch.delenv("TIDEGATE_STATE_KEY_FILE", raising=False)


def unsigned_files(state: Path) -> list[str]:
    """The files of a state without a signature; its identity, which every signature covers, has none."""
    raw, found = FolderBackend(state), []
    for path in sorted(each for each in state.rglob("*") if each.is_file() and each.name not in OWN_FILES):
        data = path.read_bytes()
        name = str(path.relative_to(state))
        if data.startswith(b"TG-PUBL\n"):
            data = (raw.read_published(name) or (b"",))[0]
        if not data.startswith(MAGIC):
            found.append(name)
    return found


def test_every_file_of_apps_tables_and_versions_is_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_KEY", KEY.hex())
    make(tmp_path)
    first = seen(tmp_path, runs=True)
    assert unsigned_files(tmp_path / "state") == []
    names = [str(path.relative_to(tmp_path / "state")) for path in (tmp_path / "state").rglob("*")]
    kinds = (
        "/commits/",
        "/plans/",
        "/letters/",
        "/parcels/",
        ".manifest",
        ".pack",
        "/app",
        "/lease",
        "tables/users",
    )
    assert [kind for kind in kinds if not any(kind in name for name in names)] == [], names
    monkeypatch.delenv("TIDEGATE_STATE_KEY")  # readers need no key
    assert seen(tmp_path, runs=False) == first


def test_an_app_takes_its_old_state_over_when_the_key_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    expected = seen(tmp_path / "one", runs=True)
    monkeypatch.setenv("TIDEGATE_STATE_KEY", KEY.hex())
    for doing in (lambda: seen(tmp_path / "two", runs=False), lambda: seen(tmp_path / "two", runs=True)):
        with pytest.raises(SignatureError, match="is not signed") as told:
            doing()
    typed(told.value, "storage.backends.signed.unsigned: state sign")
    assert unsigned_files(tmp_path / "two" / "state") == []
    assert seen(tmp_path / "two", runs=True) == expected
    assert unsigned_files(tmp_path / "two" / "state") == []


@pytest.mark.parametrize("what", ["lease", "commits", "app", "versions"])
def test_a_record_of_an_app_or_table_that_is_not_signed_keeps_its_type(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads a record tells its damage in words of its own; a signature's own words must come through."""
    make(tmp_path)
    monkeypatch.setenv("TIDEGATE_STATE_KEY", KEY.hex())
    assert run(["state", "sign", "--state", str(tmp_path / "state")]) == 0
    raw = FolderBackend(tmp_path / "state")
    for path in (tmp_path / "state").rglob("*"):
        if path.is_file() and (path.name == what or path.parent.name == what):
            name = str(path.relative_to(tmp_path / "state"))
            data, version = raw.read_published(name) or (b"", "")
            raw.publish(name, data[:-1] + b"x", expected=version)
    with pytest.raises(SignatureError, match="not what was signed"):
        if what == "versions":
            versioned_table("users", state=tmp_path / "state").to_arrow()
        seen(tmp_path, runs=True)


def test_the_key_is_nowhere_to_be_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_KEY", KEY.hex())
    caplog.set_level(logging.DEBUG)
    make(tmp_path)
    app = define(tmp_path)
    shown = [repr(app), str(app.explain()), repr(seen(tmp_path, runs=True))]
    state = str(tmp_path / "state")
    for arguments in (["doctor"], ["app", "status", "--state", state], ["state", "sign", "--state", state]):
        assert run(arguments) == 0, arguments
    printed = capsys.readouterr()
    setup = WorkerSetup("shop", app.flows, "log", state, StorageConfig())
    said = "".join([*shown, printed.out, printed.err, caplog.text, repr(setup)])
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert setup.key_id and setup.key_id in printed.out
    assert KEY.hex() not in said and KEY.hex()[:16] not in said and repr(KEY)[2:-1] not in said
    assert KEY not in stored and KEY.hex().encode() not in stored
    assert KEY not in pickle.dumps(setup) and KEY.hex().encode() not in pickle.dumps(setup)


def test_a_worker_without_the_drivers_key_is_refused_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    monkeypatch.setenv("TIDEGATE_STATE_KEY", KEY.hex())
    app = define(tmp_path)
    setup = WorkerSetup("shop", app.flows, str(tmp_path / "log"), str(tmp_path / "new"), StorageConfig())
    monkeypatch.delenv("TIDEGATE_STATE_KEY")
    with pytest.raises(InvalidError, match=r"the driver signs .*and this process with no key"):
        Worker(setup)
    assert not (tmp_path / "new").exists()


def test_doctor_says_whether_state_is_signed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tidegate.cli import doctor

    def said() -> doctor.Check:
        return doctor._state_key()

    assert said().verdict == "ok" and "are not signed" in said().found
    monkeypatch.setenv("TIDEGATE_STATE_KEY", KEY.hex())
    assert "signed with key" in said().found and KEY.hex()[:8] not in said().found
    monkeypatch.setenv("TIDEGATE_STATE_KEY", f"{KEY.hex()},{KEY[::-1].hex()}")
    assert "also accepted" in said().found
    monkeypatch.setenv("TIDEGATE_STATE_KEY", "abcd")
    assert said().verdict == "note" and "has 2 bytes" in said().found and "openssl" in said().remedy


def test_without_a_key_nothing_can_be_signed_and_with_one_nothing_unsigned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    state = str(tmp_path / "state")
    assert run(["state", "sign", "--state", state]) == 2
    assert "openssl rand -hex 32" in capsys.readouterr().err
    monkeypatch.setenv("TIDEGATE_STATE_KEY", KEY.hex())
    assert run(["state", "unsign", "--state", state]) == 2
    assert "unset it first" in capsys.readouterr().err
    assert run(["state", "sign", "--state", str(tmp_path / "nothing")]) == 2
