"""The same crash, the same recovery: folders a broker recovered, recovered by us (R-5)."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparing import differences, epochs
from kafka_home import FIXTURES
from our_logs import open_partition
from recorded import manifest, names, unpack


@pytest.mark.parametrize("name", names("pairs"))
def test_a_crashed_folder_is_recovered_as_the_broker_recovered_it(name: str, tmp_path: Path) -> None:
    facts = manifest()["pairs"][name]
    stages = unpack("pairs", name, tmp_path)
    ours, theirs = stages / "before" / f"{name}-0", stages / "after" / f"{name}-0"
    partition = open_partition(
        ours,
        facts["config"],
        clean=facts["state"] == "clean",
        recovery_point=facts["recovery_point"],
        log_start=facts["log_start"],
        now_ms=facts["now_ms"],
    )
    assert partition.log.log_end_offset == facts["log_end"]
    partition.close()
    assert differences(ours, theirs) == []
    if name == "later-leader-epoch":  # the broker, leader in an older epoch than the log's last, dropped both
        assert epochs(ours, facts["log_end"]) == [(0, 0), (3, 63)]
    else:
        assert epochs(ours, facts["log_end"]) == epochs(theirs, facts["log_end"])


def test_there_are_enough_recorded_crashes() -> None:
    assert len(names("pairs")) >= 40


def test_the_recorded_bytes_stay_small() -> None:
    assert sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()) <= 2 << 20


def test_an_index_that_grew_too_small_costs_no_record(tmp_path: Path) -> None:
    """A broker does not start on this; a rebuilt index may be sparse, the log must stay whole."""
    facts = manifest()["pairs"]["killed"]
    folder = unpack("pairs", "killed", tmp_path) / "before" / "killed-0"
    before = {path.name: path.read_bytes() for path in folder.glob("*.log")}
    tighter = {**facts["config"], "index.interval.bytes": "1", "segment.index.bytes": "48"}
    partition = open_partition(folder, tighter, clean=False)
    assert partition.log.log_end_offset == facts["log_end"]
    partition.close()
    assert {path.name: path.read_bytes() for path in folder.glob("*.log")} == before
