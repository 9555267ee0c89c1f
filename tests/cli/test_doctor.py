"""`tidegate doctor`: it says what is there and what is missing, and can be pasted anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidegate.cli import doctor
from tidegate.cli.main import run


def checks(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, dict[str, str]]:
    assert run(["doctor", "--format", "json", *arguments]) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is (code == 0)
    return {row["check"]: row for row in answer["checks"]}


@pytest.fixture(autouse=True)
def _kernels_loaded_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the kernels in a fresh interpreter takes a second; one test does it for all."""
    if request.node.name != "test_a_machine_that_runs_these_tests_is_healthy":
        monkeypatch.setattr(doctor, "_kernels", lambda: doctor.Check("kernels", "ok", "not asked"))


def test_a_machine_that_runs_these_tests_is_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = checks(capsys, "--log", str(tmp_path / "log"))
    for name in ("python", "pyarrow", "numba", "kernels", "disk sync", "java", "spark", "open files"):
        assert found[name]["verdict"] in ("ok", "note"), found[name]
    assert "does not exist yet" in found["log folder"]["found"]
    assert not (tmp_path / "log").exists()
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_for_people_and_ends_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == ["CHECK", "VERDICT", "FOUND", "REMEDY"]
    assert printed.rstrip().endswith("the log tools can work")


def test_missing_extras_are_no_fault_and_come_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "pyspark" else real(name))
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    found = checks(capsys)
    assert found["pyspark"]["verdict"] == found["spark"]["verdict"] == "missing"
    assert "tidegate[spark]" in found["spark"]["remedy"]
    assert found["java"]["verdict"] in ("missing", "ok")  # ok where the environment has the shim
    assert found["java"]["verdict"] == "ok" or "tidegate[java]" in found["java"]["remedy"]


def test_a_missing_core_package_is_a_fault_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "cramjam" else real(name))
    found = checks(capsys, code=1)
    assert found["cramjam"]["verdict"] == "fault"
    assert found["cramjam"]["remedy"].startswith("pip install")


def test_a_file_where_the_log_folder_should_be_is_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text("not a folder")
    assert checks(capsys, "--log", str(tmp_path / "log"), code=1)["log folder"]["verdict"] == "fault"


def test_the_kind_of_log_folder_is_recognised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "orders-0").mkdir()
    assert "a Kafka data folder" in checks(capsys, "--log", str(tmp_path))["log folder"]["found"]


def test_settings_of_the_broker_that_do_nothing_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "server.properties"
    assert "broker settings" not in checks(capsys, "--log", str(tmp_path))
    settings.write_text("log.retention.hours=2\n")
    assert checks(capsys, "--log", str(tmp_path))["broker settings"]["verdict"] == "ok"
    settings.write_text(
        "listeners=PLAINTEXT://:9092\nnum.recovery.threads.per.data.dir=4\nlog.retention.hours=2\n"
    )
    found = checks(capsys, "--log", str(tmp_path))["broker settings"]
    assert found["found"] == "ignored here: listeners, num.recovery.threads.per.data.dir"
    settings.write_text("log.retention.hour=2\n")
    found = checks(capsys, "--log", str(tmp_path), code=1)["broker settings"]
    assert found["verdict"] == "fault" and "did you mean log.retention.hours" in found["found"]


def test_a_user_without_a_home_folder_is_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def homeless(cls: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(homeless))
    assert checks(capsys)["python"]["verdict"] == "ok"


def test_nothing_of_the_home_folder_or_the_environment_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SECRET_TOKEN", "canary-secret-5150")
    assert run(["doctor", "--log", str(tmp_path / "private" / "log")]) == 0
    printed = capsys.readouterr().out
    assert str(tmp_path) not in printed
    assert "~/private/log" in printed
    assert "canary-secret-5150" not in printed


def test_a_broker_is_not_mistaken_for_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert "log folder" not in checks(capsys, "--log", "kafka://broker:9092")
