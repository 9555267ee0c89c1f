"""A broker compacts and ages out while we watch; given the same folder, we leave the same one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cleaning_cases import (
    COMPACT,
    DELETE,
    Cleaning,
    Stage,
    age_out,
    compact,
    compressed,
    keyed,
    rest,
    transactional,
)
from kafka_broker import Broker, read_lines
from kafka_wire import Wire
from our_logs import cleaning_time, open_partition, same_cleaning

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]

SOON = {**COMPACT, "delete.retention.ms": "1"}
# Other seeds than the recorded cases have, so that these are other logs.
CASES = {
    "live-keys": Cleaning(
        (keyed(21, 70, producers=(81, -1, 82)), compact, rest(keyed(22, 30)), compact), SOON
    ),
    "live-transactions": Cleaning((transactional(23), compact, rest(transactional(24)), compact), SOON),
    "live-codecs": Cleaning((compressed(25), compact, rest(compressed(26)), compact), SOON),
    "live-retention": Cleaning((keyed(27, 80), age_out("retention.bytes", lambda now: 2000)), DELETE),
}


def test_our_cleaning_leaves_what_the_brokers_leaves(broker: Broker, tmp_path: Path) -> None:
    stages: dict[str, list[Stage]] = {name: [] for name in CASES}
    broker.create_all({name: case.settings for name, case in CASES.items()})
    for number in range(4):
        with Wire(broker.address) as wire:
            for name, case in CASES.items():
                if number < len(case.steps):
                    stages[name].append(case.steps[number](broker, wire, name))
        broker.stop()
        checkpoint = read_lines(broker.data / "cleaner-offset-checkpoint")
        for name in CASES:
            shutil.copytree(broker.partition(name), tmp_path / str(number) / f"{name}-0")
            stages[name][-1].first_dirty = checkpoint.get((name, 0))
        broker.start()

    for name, case in CASES.items():
        config = case.settings
        for number, stage in enumerate(stages[name]):
            if stage.action == "fill":
                continue
            config |= stage.config
            theirs = tmp_path / str(number) / f"{name}-0"
            ours = shutil.copytree(
                tmp_path / str(number - 1) / f"{name}-0", tmp_path / f"ours-{number}" / f"{name}-0"
            )
            now_ms = cleaning_time(theirs, int(config.get("delete.retention.ms", 0)), stage.now_ms)
            partition = open_partition(ours, config, now_ms=now_ms)
            if "min.cleanable.dirty.ratio" in stage.config:
                report = partition.compact(stages[name][number - 1].first_dirty)
                assert report.next_dirty == stage.first_dirty
            partition.retain()
            partition.close()
            assert same_cleaning(ours, theirs) == [], f"{name} stage {number}"
