"""An idempotent writer under failures: acknowledged rows are stored once, nothing else is called a duplicate."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.clock import ManualClock
from tidegate.errors import InvalidError, TidegateError, UnavailableError
from tidegate.files import Effect, Files
from tidegate.log.format.records import coerce
from tidegate.log.log import Log
from tidegate.log.writer import Writer, Written
from tidegate.scheduling import ManualScheduler
from tidegate.testing.faults import FailAt


class Trouble:
    """Fails one of the effects that come after `at` or `at_batch`."""

    def __init__(self) -> None:
        self._fault: FailAt | None = None
        self._only_batches = False

    def __call__(self, effect: Effect) -> None:
        is_batch = effect.kind == "write" and effect.path.suffix == ".log"
        if self._fault is not None and effect.mutates and (is_batch or not self._only_batches):
            self._fault(effect)

    def at(self, number: int) -> None:
        self._fault, self._only_batches = FailAt(number), False

    def at_batch(self, number: int) -> None:
        self._fault, self._only_batches = FailAt(number), True

    def over(self) -> None:
        self._fault = None


def rows(*values: bytes, **columns: object) -> pa.Table:
    return pa.table({"value": pa.array(values, pa.binary()), **columns})


def stored(log: Log) -> list[bytes]:
    return log.reader("t").read_all().column("value").to_pylist()


def failing_writer(path: Path, **settings: object) -> tuple[Log, Writer, Trouble]:
    trouble = Trouble()
    log = Log(path, durability="os", files=Files(trouble), clock=ManualClock())
    log.create_topic("t")
    return log, log.writer("t", producer_id=5, batch_records=1, **settings), trouble


def test_a_first_write_that_failed_half_way_is_repeated_without_doubling(tmp_path: Path) -> None:
    log, writer, trouble = failing_writer(tmp_path / "log")
    with log:
        log.partition("t", 0)
        trouble.at_batch(3)
        with pytest.raises(UnavailableError):
            writer.write(rows(b"a", b"b", b"c"))
        trouble.over()
        again = writer.write(rows(b"a", b"b", b"c"))
        assert [(batch.first_offset, batch.duplicate) for batch in again] == [
            (0, True),
            (1, True),
            (2, False),
        ]
        assert stored(log) == [b"a", b"b", b"c"]


def test_other_rows_after_a_failure_are_stored_and_no_duplicate(tmp_path: Path) -> None:
    log, writer, trouble = failing_writer(tmp_path / "log")
    with log:
        writer.write(rows(b"first"))
        trouble.at_batch(3)
        with pytest.raises(UnavailableError):
            writer.write(rows(b"a", b"b", b"c"))
        trouble.over()
        written = writer.write(rows(b"x", b"y", b"z"))
        assert [batch.duplicate for batch in written] == [False, False, False]
        assert stored(log) == [b"first", b"a", b"b", b"x", b"y", b"z"]


def test_a_repetition_is_recognised_behind_another_threads_write(tmp_path: Path) -> None:
    log, writer, trouble = failing_writer(tmp_path / "log")
    with log:
        writer.write(rows(b"first"))
        trouble.at_batch(2)
        with pytest.raises(UnavailableError):
            writer.write(rows(b"a", b"b"))
        trouble.over()
        writer.write(rows(b"between"))
        again = writer.write(rows(b"a", b"b"))
        assert [(batch.first_offset, batch.duplicate) for batch in again] == [(1, True), (3, False)]
        assert stored(log) == [b"first", b"a", b"between", b"b"]
        third = writer.write(rows(b"a", b"b"))  # the failed call was made good: these are new rows
        assert [batch.duplicate for batch in third] == [False, False]


def test_rows_without_a_key_are_repeated_into_the_partitions_they_went_to(tmp_path: Path) -> None:
    trouble = Trouble()
    with Log(tmp_path / "log", durability="os", files=Files(trouble), clock=ManualClock()) as log:
        log.create_topic("t", 3)
        writer = log.writer("t", producer_id=5, batch_records=1)
        for number in range(3):
            writer.write(rows(b"first"), partition=number)
        trouble.at_batch(2)
        with pytest.raises(UnavailableError):
            writer.write(rows(b"a", b"b"))
        trouble.over()
        writer.write(rows(b"a", b"b"))
        assert Counter(stored(log)) == {b"first": 3, b"a": 1, b"b": 1}


def test_bytes_that_arrived_before_a_failed_sync_are_known_after_reopening(tmp_path: Path) -> None:
    trouble = Trouble()
    with Log(tmp_path / "log", files=Files(trouble), clock=ManualClock()) as log:
        log.create_topic("t", config={"flush.messages": "2"})
        writer = log.writer("t", producer_id=5, batch_records=1)
        writer.write(rows(b"first"))
        trouble.at(3)  # two appends, then the sync that flush.messages asks for
        with pytest.raises(UnavailableError):
            writer.write(rows(b"a", b"b", b"c"))
        trouble.over()
        with pytest.raises(TidegateError):
            writer.write(rows(b"a", b"b", b"c"))  # after a failed sync the partition has to be reopened
        log.release("t", 0)
        again = writer.write(rows(b"a", b"b", b"c"))
        assert [batch.duplicate for batch in again] == [True, True, False]
        assert stored(log) == [b"first", b"a", b"b", b"c"]


@pytest.mark.parametrize(
    "other",
    [
        rows(b"b", b"x"),
        rows(b"b", b"c", key=pa.array([b"k", None], pa.binary())),
        rows(b"b", b"c", timestamp=pa.array([1, 2], pa.int64())),
    ],
    ids=["value", "key", "timestamp"],
)
def test_a_number_that_other_rows_have_is_refused(tidegate_log: Log, other: pa.Table) -> None:
    """The log alone would call them a duplicate, and they would be lost."""
    tidegate_log.create_topic("t")
    writer = tidegate_log.writer("t", producer_id=1)
    writer.write(rows(b"a"))
    writer.write(rows(b"b", b"c"))
    with pytest.raises(InvalidError, match="belongs to other records, stored at offset 1") as refused:
        writer.write(other, first_sequences={0: 1})
    assert refused.value.kafka_name == "OUT_OF_ORDER_SEQUENCE_NUMBER"
    assert [batch.duplicate for batch in writer.write(rows(b"b", b"c"), first_sequences={0: 1})] == [True]
    assert [batch.duplicate for batch in writer.write(other)] == [False]


def test_a_prepared_write_whose_numbers_were_used_meanwhile_is_refused(tidegate_log: Log) -> None:
    tidegate_log.create_topic("t")
    writer = tidegate_log.writer("t", producer_id=1)
    late = writer.prepare([coerce(rows(b"late"))], 0)
    writer.write(rows(b"soon"))
    with pytest.raises(InvalidError, match="belongs to other records"):
        late.append()
    assert stored(tidegate_log) == [b"soon"]


# -- any failure, anywhere -----------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.integers(1, 6),  # rows
        st.booleans(),  # the same rows as the write before
        st.one_of(st.none(), st.integers(1, 14)),  # the effect that fails
        st.sampled_from(["repeat", "give up", "reopen"]),  # what the caller does about it
    ),
    min_size=1,
    max_size=6,
)


@given(STEPS, st.integers(1, 3), st.integers(1, 3), st.sampled_from(["os", "disk"]))
@settings(max_examples=50, deadline=None)
def test_nothing_acknowledged_is_lost_stored_twice_or_called_a_duplicate(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[int, bool, int | None, str]],
    partitions: int,
    batch_records: int,
    durability: str,
) -> None:
    """Every acknowledged write has a copy of its own; a write that was given up has at most one."""
    trouble = Trouble()
    least: Counter[bytes] = Counter()
    most: Counter[bytes] = Counter()
    files, clock = Files(trouble), ManualClock()
    path, scheduler = tmp_path_factory.mktemp("log") / "log", ManualScheduler(clock)
    with Log(path, durability=durability, files=files, clock=clock, scheduler=scheduler) as log:  # type: ignore[arg-type]
        config = {"segment.bytes": "400", "index.interval.bytes": "100"}
        log.create_topic("t", partitions, config)
        writer = log.writer("t", producer_id=5, batch_records=batch_records)
        values: list[bytes] = [b"start"]
        for number, (count, is_same, failing, reaction) in enumerate(steps):
            if not is_same:
                values = [b"%d-%d" % (number, row) for row in range(count)]
            if failing is not None:
                trouble.at(failing)
            written = _attempt(writer, values)
            trouble.over()
            while written is None and reaction != "give up":
                clock.advance(7)
                if reaction == "reopen" or log.partition("t", 0).read_only_reason or _any_read_only(log):
                    _release_all(log, partitions)
                written = _attempt(writer, values)
            most.update(values)
            if written is None:
                _release_all(log, partitions)
                continue
            least.update(values)
            assert Counter(_at(log, written)) == Counter(values)
        _release_all(log, partitions)
        for number in range(partitions):
            log.partition("t", number)  # recovers what the last failure left
        found = Counter(stored(log))
    assert least <= found <= most


def _attempt(writer: Writer, values: list[bytes]) -> list[Written] | None:
    try:
        return writer.write(rows(*values))
    except UnavailableError:
        return None


def _any_read_only(log: Log) -> bool:
    return any(partition.read_only_reason is not None for partition in log.open_partitions)


def _release_all(log: Log, partitions: int) -> None:
    for number in range(partitions):
        log.release("t", number)


def _at(log: Log, written: list[Written]) -> list[bytes]:
    """The values at the offsets that a write says it has."""
    found = log.reader("t").read_all()
    values = {
        (partition, offset): value
        for partition, offset, value in zip(
            found.column("partition").to_pylist(),
            found.column("offset").to_pylist(),
            found.column("value").to_pylist(),
            strict=True,
        )
    }
    return [
        values[batch.partition, offset]
        for batch in written
        for offset in range(batch.first_offset, batch.last_offset + 1)
    ]
