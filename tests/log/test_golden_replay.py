"""The same batches, the same bytes: what a broker was sent, appended by us under the same settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparing import differences, epochs
from kafka_home import FIXTURES
from our_logs import open_partition
from raw_batches import as_sent, stored_batches
from recorded import manifest, names

from tidegate.log.producer_state import Origin

CONTROL = 0x20


@pytest.mark.parametrize(
    "topic", [topic for topic in names("folders") if manifest()["folders"][topic]["replayable"]]
)
def test_the_same_batches_give_the_same_files(topic: str, tmp_path: Path) -> None:
    theirs = FIXTURES / "folders" / f"{topic}-0"
    ours = tmp_path / theirs.name
    partition = open_partition(ours, manifest()["folders"][topic]["config"])
    for head, raw in stored_batches(theirs):
        origin = Origin.COORDINATOR if head.attributes & CONTROL else Origin.CLIENT
        done = partition.log.append(as_sent(raw), origin=origin, leader_epoch=head.leader_epoch)
        assert (done.first_offset, done.last_offset) == (head.base_offset, head.last_offset)
        partition.log.acknowledge(sync=False)
    partition.close()
    assert differences(ours, theirs) == []
    log_end = partition.log.log_end_offset
    assert epochs(ours, log_end) == epochs(theirs, log_end)


@pytest.mark.parametrize("part", ["folders", "restarts"])
def test_a_replica_copies_every_recorded_log_byte_for_byte(part: str, tmp_path: Path) -> None:
    for topic in names(part):
        theirs = FIXTURES / part / f"{topic}-0"
        ours = tmp_path / theirs.name
        partition = open_partition(ours, {"segment.bytes": str(2**30), "segment.ms": str(2**63 - 1)})
        for _, raw in stored_batches(theirs):
            partition.log.append(raw, origin=Origin.REPLICATION)
        partition.close()
        copied = b"".join(path.read_bytes() for path in sorted(ours.glob("*.log")))
        assert copied == b"".join(path.read_bytes() for path in sorted(theirs.glob("*.log")))
        if topic != "trimmed":  # there the log starts inside a log segment, and so do its epochs
            log_end = partition.log.log_end_offset
            assert epochs(ours, log_end) == epochs(theirs, log_end)
