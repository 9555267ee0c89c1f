"""`verify` on folders a broker left: silent where nothing is wrong, exact where the damage stayed."""

from __future__ import annotations

from pathlib import Path

import pytest
from kafka_home import FIXTURES
from recorded import copy_folder, manifest, names, unpack

from tidegate.cli.main import run

# Damage a broker does not see, or sees and keeps: below the recovery point, or under a clean marker.
STILL_DAMAGED = {
    "base-offset-repeated",
    "below-recovery-point-flip",
    "below-recovery-point-index-junk",
    "clean-flip",
    "clean-index-junk",
    "clean-index-seven-bytes",
    "clean-transactions-index-gone",
    "magic-3",
    "middle-log-empty",
    "middle-segment-gone",
}


@pytest.mark.parametrize("topic", [topic for topic in names("folders") if topic != "idempotent"])
def test_no_false_alarm_about_a_brokers_folder(topic: str, tmp_path: Path) -> None:
    copy_folder("folders", topic, tmp_path)
    assert run(["verify", str(tmp_path)]) == 0


def test_a_producer_that_begins_in_the_middle_is_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    copy_folder("folders", "idempotent", tmp_path)
    assert run(["verify", str(tmp_path), "--format", "table"]) == 1
    faults = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fault")]
    assert len(faults) == 1
    assert "producer 1003/0" in faults[0]


def test_no_false_alarm_after_restarts() -> None:
    assert run(["verify", str(FIXTURES / "restarts")]) == 0


@pytest.mark.parametrize("name", names("cleaning"))
def test_no_false_alarm_about_a_cleaned_folder(name: str, tmp_path: Path) -> None:
    unpack("cleaning", name, tmp_path)
    for stage in range(len(manifest()["cleaning"][name]["stages"])):
        assert run(["verify", str(tmp_path / str(stage))]) == 0


@pytest.mark.parametrize("name", names("pairs"))
def test_what_a_broker_recovered_is_sound_unless_damage_stayed(name: str, tmp_path: Path) -> None:
    unpack("pairs", name, tmp_path)
    assert run(["verify", str(tmp_path / "after")]) == int(name in STILL_DAMAGED)
