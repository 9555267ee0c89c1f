"""State files of a real broker: read, checked, rewritten to the same bytes, derived again from its log."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tidegate.files import Files
from tidegate.log import checkpoints
from tidegate.log.checkpoints import LeaderEpochs
from tidegate.log.format.batch import BatchHeader, iter_headers
from tidegate.log.indexes import AbortedTxn, OffsetIndex, TimeIndex, TransactionIndex
from tidegate.log.producer_state import Origin, ProducerStates, check_batch, decode_snapshot, encode_snapshot

FILES = Files()
RECORDED = Path(__file__).parents[1] / "fixtures" / "kafka-3.9" / "folders"
FOLDERS = sorted(path for path in RECORDED.iterdir() if path.is_dir())


def batches_of(folder: Path) -> list[tuple[Path, int, bytes, BatchHeader]]:
    found = []
    for path in sorted(folder.glob("*.log")):
        data = path.read_bytes()
        found += [(path, position, data, header) for position, header in iter_headers(data)]
    return found


def named(paths: list[Path]) -> list[object]:
    return [pytest.param(path, id=path.name) for path in paths]


@pytest.mark.parametrize("folder", named(FOLDERS))
def test_indexes_of_a_broker_are_sane_and_lead_to_their_batches(folder: Path) -> None:
    starts = {(path.stem, position): header for path, position, _, header in batches_of(folder)}
    for path in folder.glob("*.log"):
        base = int(path.stem)
        offsets = OffsetIndex(path.with_suffix(".index"), base, 4096, files=FILES)
        times = TimeIndex(path.with_suffix(".timeindex"), base, 4096, files=FILES)
        aborted = TransactionIndex(path.with_suffix(".txnindex"), base, files=FILES)
        for index in (offsets, times):
            index.sanity_check()
            assert list(index) == sorted(set(index))
        aborted.sanity_check()
        for offset, position in offsets:
            assert starts[path.stem, position].last_offset == offset
            assert offsets.lookup(offset) == (offset, position)
        for timestamp, offset in times:
            assert any(
                header.last_offset == offset and header.max_timestamp == timestamp
                for (stem, _), header in starts.items()
                if stem == path.stem
            )
            assert times.lookup(timestamp) == (timestamp, offset)


@pytest.mark.parametrize("folder", named(FOLDERS))
def test_text_files_of_a_broker_are_rewritten_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    topic_id = checkpoints.read_topic_id(folder, files=FILES)
    assert topic_id is not None
    checkpoints.write_topic_id(tmp_path, topic_id, files=FILES)
    name = checkpoints.PARTITION_METADATA
    assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    recorded = LeaderEpochs(folder / checkpoints.LEADER_EPOCHS, files=FILES)
    again = LeaderEpochs(tmp_path / checkpoints.LEADER_EPOCHS, files=FILES)
    for entry in recorded.entries:
        again.assign(*entry)
    if recorded.entries:
        assert again.path.read_bytes() == recorded.path.read_bytes()
    for _, _, _, header in batches_of(folder):
        writers = [entry.epoch for entry in recorded.entries if entry.start_offset <= header.base_offset]
        assert writers[-1] == header.leader_epoch


@pytest.mark.parametrize(
    "path", named([RECORDED / name for name in (checkpoints.RECOVERY_POINTS, checkpoints.HIGH_WATERMARKS)])
)
def test_offset_checkpoints_of_a_broker_hold_the_same_lines(path: Path, tmp_path: Path) -> None:
    offsets = checkpoints.read_offsets(path, files=FILES)
    assert offsets
    checkpoints.write_offsets(tmp_path / "again", offsets, files=FILES)
    assert sorted((tmp_path / "again").read_bytes().splitlines()) == sorted(path.read_bytes().splitlines())


@pytest.mark.parametrize("folder", named(FOLDERS))
def test_snapshots_and_aborted_transactions_of_a_broker_follow_from_its_log(
    folder: Path, tmp_path: Path
) -> None:
    snapshots = {int(path.stem): path.read_bytes() for path in folder.glob("*.snapshot")}
    states = ProducerStates(tmp_path, files=FILES)
    derived: list[AbortedTxn] = []
    checked = 0
    for _, position, data, header in batches_of(folder):
        checked += compare(states, snapshots.get(header.base_offset))
        content = data[position : position + header.size]
        if (step := check_batch(states, header, partial(bytes, content), Origin.REPLICATION)) is not None:
            states.update(step)
            if step.aborted is not None:
                derived.append(step.aborted)
        states.update_map_end_offset(header.next_offset)
    checked += compare(states, snapshots.get(states.map_end_offset))
    assert checked == len(snapshots)
    recorded = [
        txn
        for path in sorted(folder.glob("*.txnindex"))
        for txn in TransactionIndex(path, int(path.stem), files=FILES)
    ]
    assert derived == recorded


def compare(states: ProducerStates, recorded: bytes | None) -> int:
    if recorded is None:
        return 0
    entries = decode_snapshot(recorded)
    assert encode_snapshot(entries) == encode_snapshot(states.active_producers.values())
    if len(entries) <= 1:
        assert encode_snapshot(entries) == recorded
    return 1
