"""The same log, the same cleaning: what a broker's compaction and retention left, and what ours leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comparing import epochs
from our_logs import cleaning_time, open_partition, same_cleaning
from recorded import manifest, names, unpack


def passes() -> list[Any]:
    """Every recorded step from one stage to the next in which the broker alone acted."""
    return [
        pytest.param(name, number, id=f"{name}-{number}")
        for name in names("cleaning")
        for number, stage in enumerate(manifest()["cleaning"][name]["stages"])
        if stage["action"] != "fill"
    ]


@pytest.mark.parametrize(("name", "number"), passes())
def test_our_cleaning_leaves_what_the_brokers_left(name: str, number: int, tmp_path: Path) -> None:
    case = manifest()["cleaning"][name]
    before, stage = case["stages"][number - 1], case["stages"][number]
    config = dict(case["config"])
    for earlier in case["stages"][: number + 1]:
        if earlier["action"] == "clean":
            config |= earlier["config"]
    folder = unpack("cleaning", name, tmp_path)
    ours, theirs = folder / str(number - 1) / f"{name}-0", folder / str(number) / f"{name}-0"

    now_ms = cleaning_time(theirs, int(config.get("delete.retention.ms", 0)), stage["now_ms"])
    partition = open_partition(ours, config, log_start=before["log_start"], now_ms=now_ms)
    if stage["action"] == "delete-records":
        partition.log.delete_records_before(int(stage["config"]["offset"]))
    elif "min.cleanable.dirty.ratio" in stage["config"]:
        assert partition.compact(before["first_dirty"]).next_dirty == stage["first_dirty"]
    partition.retain()
    assert partition.log.log_start_offset == max(stage["log_start"], int(min(theirs.glob("*.log")).stem))
    partition.close()

    assert same_cleaning(ours, theirs) == []
    log_end = partition.log.log_end_offset
    assert epochs(ours, log_end) == epochs(theirs, log_end)
