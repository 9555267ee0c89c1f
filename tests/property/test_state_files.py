"""Index and state files against naive lists, through any mix of appending, truncating and reopening; and
readers against any bytes at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.log import checkpoints
from tidegate.log.checkpoints import LeaderEpochs
from tidegate.log.format.batch import BatchHeader
from tidegate.log.indexes import (
    AbortedTxn,
    OffsetIndex,
    OffsetPosition,
    TimeIndex,
    TransactionIndex,
)
from tidegate.log.producer_state import (
    BatchMetadata,
    Origin,
    ProducerEntry,
    ProducerStates,
    decode_snapshot,
    encode_snapshot,
)

FILES = Files()
BASE = 1000
LIMITED = settings(max_examples=60, deadline=None)

steps = st.integers(min_value=0, max_value=5)
targets = st.integers(min_value=BASE - 3, max_value=BASE + 60)
maintenance = st.sampled_from(["reopen", "trim", "reset", "release"])
operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), steps, steps),
        st.tuples(st.just("truncate"), targets, st.just(0)),
        st.tuples(maintenance, st.just(0), st.just(0)),
    ),
    max_size=40,
)


@LIMITED
@given(operations, st.lists(targets, min_size=1, max_size=8), st.integers(min_value=8, max_value=120))
def test_the_offset_index_agrees_with_a_list(
    steps_taken: list[tuple[str, int, int]], asked: list[int], max_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.index"
        index = OffsetIndex(path, BASE, max_bytes, files=FILES)
        oracle: list[tuple[int, int]] = []
        for kind, first, second in steps_taken:
            if kind == "append":
                index.prepare()
                offset = (oracle[-1][0] if oracle else BASE) + 1 + first
                position = (oracle[-1][1] if oracle else 0) + 1 + second
                if len(oracle) == max_bytes // 8:
                    assert index.is_full
                    continue
                index.append(offset, position)
                oracle.append((offset, position))
            elif kind == "truncate":
                index.truncate_to(first)
                oracle = [entry for entry in oracle if entry[0] < first]
            elif kind == "reset":
                index.reset()
                oracle = []
            elif kind == "trim":
                index.trim()
                assert path.stat().st_size == 8 * len(oracle)
            elif kind == "release":
                index.release()
            else:
                index.close()
                index = OffsetIndex(path, BASE, max_bytes, files=FILES)
            reader = OffsetIndex(path, BASE, max_bytes, files=FILES, read_only=True)
            assert list(index) == oracle == list(reader)
            assert index.last_offset == (oracle[-1][0] if oracle else BASE)
        for target in asked:
            floor = [entry for entry in oracle if entry[0] <= target]
            assert index.lookup(target) == (floor[-1] if floor else (BASE, 0))
            above = [entry for entry in oracle if entry[1] >= target - BASE]
            assert index.upper_bound(OffsetPosition(BASE, 0), target - BASE) == (above[0] if above else None)
        index.close()


@LIMITED
@given(operations, st.lists(targets, min_size=1, max_size=8), st.integers(min_value=24, max_value=200))
def test_the_time_index_agrees_with_a_list(
    steps_taken: list[tuple[str, int, int]], asked: list[int], max_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.timeindex"
        index = TimeIndex(path, BASE, max_bytes, files=FILES)
        oracle: list[tuple[int, int]] = []
        for kind, first, second in steps_taken:
            if kind == "append":
                index.prepare()
                timestamp = (oracle[-1][0] if oracle else 0) + first
                offset = (oracle[-1][1] if oracle else BASE) + second
                if len(oracle) >= max_bytes // 12 - 1:
                    assert index.is_full
                    continue
                added = index.maybe_append(timestamp, offset)
                assert added is (not oracle or timestamp > oracle[-1][0])
                oracle += [(timestamp, offset)] if added else []
            elif kind == "truncate":
                index.truncate_to(first)
                oracle = [entry for entry in oracle if entry[1] < first]
            elif kind == "reset":
                index.reset()
                oracle = []
            elif kind == "trim":
                index.trim()
                assert path.stat().st_size == 12 * len(oracle)
            elif kind == "release":
                index.release()
            else:
                index.close()
                index = TimeIndex(path, BASE, max_bytes, files=FILES)
            assert list(index) == oracle
            assert index.last_entry == (oracle[-1] if oracle else (-1, BASE))
        for target in asked:
            floor = [entry for entry in oracle if entry[0] <= target - BASE]
            assert index.lookup(target - BASE) == (floor[-1] if floor else (-1, BASE))
        index.close()


@LIMITED
@given(operations, st.lists(st.tuples(targets, steps), min_size=1, max_size=6))
def test_the_transaction_index_agrees_with_a_list(
    steps_taken: list[tuple[str, int, int]], asked: list[tuple[int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.txnindex"
        index = TransactionIndex(path, BASE, files=FILES)
        oracle: list[AbortedTxn] = []
        for number, (kind, first, second) in enumerate(steps_taken):
            if kind == "append":
                last = (oracle[-1].last_offset if oracle else BASE) + 1 + first
                oracle.append(AbortedTxn(number, last - 4 * second, last, last - first))
                index.append(oracle[-1])
            elif kind == "truncate":
                index.truncate_to(first)
                oracle = [txn for txn in oracle if txn.last_offset < first]
            elif kind == "reset":
                index.reset()
                oracle = []
            elif kind in ("trim", "release"):
                index.release()
            else:
                index.close()
                index = TransactionIndex(path, BASE, files=FILES)
            assert list(index) == oracle
            assert index.last_offset == (oracle[-1].last_offset if oracle else None)
        for start, width in asked:
            upper = start + 5 * width
            complete = next((n for n, txn in enumerate(oracle, 1) if txn.last_stable_offset >= upper), None)
            found = [t for t in oracle[:complete] if t.last_offset >= start and t.first_offset < upper]
            assert index.collect_aborted(start, upper) == (found, complete is not None)
        index.sanity_check()
        index.close()


epoch_operations = st.lists(
    st.one_of(
        st.tuples(st.just("assign"), st.integers(0, 12), st.integers(0, 30)),
        st.tuples(st.sampled_from(["start", "end"]), st.just(0), st.integers(-1, 30)),
        st.tuples(st.just("reopen"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@LIMITED
@given(epoch_operations)
def test_leader_epochs_agree_with_a_list(steps_taken: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "leader-epoch-checkpoint"
        epochs = LeaderEpochs(path, files=FILES)
        oracle: list[tuple[int, int]] = []
        for kind, epoch, offset in steps_taken:
            if kind == "assign":
                news = not oracle or oracle[-1][0] != epoch or offset < oracle[-1][1]
                assert epochs.assign(epoch, offset) is news
                if news:
                    oracle = [entry for entry in oracle if entry[0] < epoch and entry[1] < offset]
                    oracle.append((epoch, offset))
            elif kind == "start":
                epochs.truncate_from_start(offset)
                covered = [entry for entry in oracle if entry[1] <= offset]
                if covered:
                    oracle = [(covered[-1][0], offset), *(entry for entry in oracle if entry[1] > offset)]
            elif kind == "end":
                epochs.truncate_from_end(offset)
                oracle = [entry for entry in oracle if offset < 0 or entry[1] < offset]
            else:
                epochs = LeaderEpochs(path, files=FILES)
            assert list(epochs.entries) == oracle
        for asked in range(-1, 14):
            higher = [entry for entry in oracle if entry[0] > asked]
            lower = [entry for entry in oracle if entry[0] <= asked]
            if asked >= 0 and oracle and oracle[-1][0] == asked:
                expected = (asked, 99)
            elif asked < 0 or not higher:
                expected = (-1, -1)
            else:
                expected = (lower[-1][0] if lower else asked, higher[0][1])
            assert epochs.end_offset_for(asked, 99) == expected


int64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)
int32 = st.integers(min_value=-(2**31), max_value=2**31 - 1)


@st.composite
def producer_entries(draw: st.DrawFn) -> ProducerEntry:
    timestamp = draw(int64)
    batch = BatchMetadata(draw(int32), draw(st.integers(0, 2**63 - 1)), draw(int32), timestamp)
    return ProducerEntry(
        draw(int64),
        draw(st.integers(-(2**15), 2**15 - 1)),
        draw(int32),
        timestamp,
        draw(st.none() | st.integers(0, 2**63 - 1)),
        draw(st.sampled_from([(), (batch,)])),
    )


@LIMITED
@given(st.lists(producer_entries(), max_size=8, unique_by=lambda entry: entry.producer_id))
def test_snapshots_survive_a_round_trip(entries: list[ProducerEntry]) -> None:
    assert decode_snapshot(encode_snapshot(entries)) == sorted(entries, key=lambda entry: entry.producer_id)


arbitrary = st.one_of(
    st.binary(max_size=200),
    st.text(alphabet="0123456789 \n-+x", max_size=60).map(lambda text: text.encode()),
    st.text(alphabet="0123456789 \n-+x", max_size=60).map(lambda text: b"0\n1\n" + text.encode()),
)


@settings(max_examples=250, deadline=None)
@given(arbitrary, int64)
def test_any_bytes_are_a_value_or_a_typed_error(data: bytes, target: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "file"
        path.write_bytes(data)
        (folder / checkpoints.PARTITION_METADATA).write_bytes(data)
        (folder / checkpoints.CLEAN_SHUTDOWN).write_bytes(data)
        offsets = OffsetIndex(path, BASE, 4096, files=FILES)
        times = TimeIndex(path, BASE, 4096, files=FILES)
        aborted = TransactionIndex(path, BASE, files=FILES)
        for use in (
            lambda: decode_snapshot(data),
            lambda: checkpoints.read_offsets(path, files=FILES),
            lambda: checkpoints.read_topic_id(folder, files=FILES),
            lambda: LeaderEpochs(path, files=FILES),
            lambda: offsets.lookup(target),
            lambda: offsets.upper_bound(OffsetPosition(BASE, 0), 100),
            offsets.sanity_check,
            lambda: times.lookup(target),
            times.sanity_check,
            lambda: aborted.collect_aborted(0, target),
            aborted.sanity_check,
        ):
            try:
                use()
            except CorruptError as error:
                assert error.position is None or 0 <= error.position <= max(len(data), 8)
        assert path.read_bytes() == data, "reading changes nothing"


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans()), max_size=25),
    st.integers(min_value=0, max_value=24),
)
def test_a_snapshot_and_the_rest_of_the_log_equal_the_whole_log(
    batches: list[tuple[int, int, bool]], cut: int
) -> None:
    """Reloading at any snapshot and replaying gives the state of a full run."""
    with tempfile.TemporaryDirectory() as folder:
        whole = ProducerStates(Path(folder), files=FILES)
        replay: list[BatchHeader] = []
        sequences = dict.fromkeys(range(3), 0)
        offset = 0
        for number, (pid, count, transactional) in enumerate(batches):
            header = BatchHeader(
                base_offset=offset,
                length=49,
                leader_epoch=0,
                magic=2,
                crc=0,
                attributes=0x10 if pid == 2 or (transactional and pid == 1) else 0,
                last_offset_delta=count - 1,
                base_timestamp=number,
                max_timestamp=number,
                producer_id=pid,
                producer_epoch=0,
                base_sequence=sequences[pid],
                count=count,
            )
            sequences[pid] += count
            offset = header.next_offset
            replay.append(header)
            apply(whole, header)
            if number == cut:
                whole.take_snapshot()
        again = ProducerStates(Path(folder), files=FILES)
        again.truncate_and_reload(0, offset, now_ms=0)
        for header in replay:
            if header.base_offset >= again.map_end_offset:
                apply(again, header)
        assert again.map_end_offset == whole.map_end_offset
        assert again.first_unstable_offset == whole.first_unstable_offset
        assert encode_snapshot(again.active_producers.values()) == encode_snapshot(
            whole.active_producers.values()
        )


def apply(states: ProducerStates, header: BatchHeader) -> None:
    states.update(states.check_data(header, Origin.REPLICATION))
    states.update_map_end_offset(header.next_offset)
