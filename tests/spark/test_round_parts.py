"""The parts of rounds on Spark that need no Spark: places of tasks, errors as values, events as blobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelines import every_kind
from tidegate import errors
from tidegate.errors import (
    CorruptError,
    InternalError,
    OffsetOutOfRangeError,
    OverloadError,
    TidegateError,
    UnavailableError,
)
from tidegate.pipeline.rounds.orders import SourceResult, decode, encode
from tidegate.spark.rounds import shuffle
from tidegate.spark.rounds.exchange import Outbox, clear, exchange_folder
from tidegate.spark.rounds.failures import Failure, describe, rebuild
from tidegate.spark.rounds.placing import places, share_of
from tidegate.storage import StorageConfig
from tidegate.storage.backends.base import MissingObjectError
from tidegate.windows.events import EventBatch

RAISED = [
    *(
        kind("what happened")
        for kind in (
            errors.InvalidError,
            errors.FencedError,
            errors.ConflictError,
            errors.UnavailableError,
            errors.WindowedKeyFormatError,
        )
    ),
    OffsetOutOfRangeError("gone", offset=3, first=5, end=9),
    CorruptError("torn", path=Path("a/b"), position=7, offset=8),
    OverloadError("too much", reason="backlog_full"),
    errors.IntegrityError("lost", topic="t", partition=1, offset=2, producer="p", kind="missing"),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_an_error_comes_back_as_the_same_class_with_its_fields(error: TidegateError) -> None:
    again = rebuild(decode(encode(describe(error)), Failure))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again).items() >= vars(error).items()
    assert again.__notes__


def test_a_class_that_one_module_knows_comes_back_as_the_nearest_that_all_know() -> None:
    again = rebuild(describe(MissingObjectError("not there", name="x")))
    assert type(again) is CorruptError and again.path == Path("x")


def test_what_is_not_ours_comes_back_as_itself_or_is_named() -> None:
    class OddError(Exception):
        pass

    assert type(rebuild(describe(ZeroDivisionError("by zero")))) is ZeroDivisionError
    odd = rebuild(describe(OddError("strange")))
    assert type(odd) is InternalError and "OddError: strange" in str(odd)
    undecodable = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")
    assert "UnicodeDecodeError" in repr(rebuild(describe(undecodable)))


def test_tasks_are_dealt_out_to_all_slots_and_always_the_same_way(tmp_path: Path) -> None:
    from tidegate.pipeline.tasks.setup import WorkerSetup

    app = every_kind(tmp_path)
    partitions = {"orders": 5}
    setup = WorkerSetup(app.name, app.flows, app.log, app.state, app.storage, partitions=partitions)
    found = places(setup, 3)
    assert found == places(setup, 3)
    assert len(found) == 6 * 5 + 3 + 3
    counts = [list(found.values()).count(slot) for slot in range(3)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("processes", [1, 2, 8, 64])
def test_processes_share_what_one_may_use(processes: int) -> None:
    whole = StorageConfig()
    share = share_of(whole, processes)
    assert processes * share.worker_total_bytes <= whole.worker_total_bytes
    assert processes * share.memory_ceiling_bytes <= whole.memory_ceiling_bytes
    assert share.backlog_limit_bytes == whole.backlog_limit_bytes


def events(rows: int, partition: int, first: int) -> EventBatch:
    return EventBatch(
        key=pa.array([b"key-%d" % number for number in range(rows)], pa.binary()),
        ts=np.arange(rows, dtype=np.int64),
        offset=np.arange(first, first + rows, dtype=np.int64),
        partition=np.full(rows, partition, np.int32),
        stream_time=np.arange(rows, dtype=np.int64),
        values=pa.record_batch({"amount": pa.array(np.arange(rows) * 0.5)}),
    )


def test_events_results_and_failures_cross_the_shuffle_in_any_order() -> None:
    parts = [(2, events(5, 0, 0)), (0, events(3, 0, 5)), (2, events(4, 0, 8))]
    gathered = dict(shuffle.gathered(parts))
    assert [len(gathered[task]) for task in (2, 0)] == [9, 3]
    result = SourceResult("flow-ä", 0, 12, b"state", 4, 12, 100)
    rows = [shuffle.pack("flow-ä", task, each) for task, each in gathered.items()]
    found = shuffle.arrived([shuffle.pack_result(result), *rows[::-1], b""])
    assert found.sources == [result] and found.failure is None
    (two,) = found.take("flow-ä", 2)
    assert two.offset.tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 11]
    assert two.key.to_pylist()[5] == b"key-0"
    assert two.values.column(0).to_pylist()[:3] == [0.0, 0.5, 1.0]
    assert found.take("flow-ä", 2) == [] and len(found.take("flow-ä", 0)) == 1
    failed = shuffle.arrived([shuffle.pack_failure(Failure("InvalidError", "no"))])
    assert failed.failure == Failure("InvalidError", "no")
    with pytest.raises(InternalError, match="none of ours"):
        shuffle.arrived([b"?what"])


def test_blobs_of_one_machine_lie_in_a_file_and_only_their_places_cross(tmp_path: Path) -> None:
    outbox = Outbox(str(tmp_path))
    rows = [shuffle.pack("flow-ä", task, events(1000 + task, 0, 10 * task), outbox) for task in (2, 0, 1)]
    assert max(map(len, rows)) < 200
    assert len(list(tmp_path.iterdir())) == 1, "one file for an attempt"
    found = shuffle.arrived(rows)
    again = shuffle.arrived(rows)  # another attempt of the reader
    clear(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for each in (found, again):
        for task in (0, 1, 2):
            (batch,) = each.take("flow-ä", task)
            sent = events(1000 + task, 0, 10 * task)
            assert batch.key == sent.key and batch.values == sent.values
            assert batch.offset.tolist() == sent.offset.tolist()
    with pytest.raises(UnavailableError, match=r"is gone: .*spark\.local\.dir"):
        shuffle.arrived(rows)


def test_a_place_that_holds_something_else_is_not_taken_for_events(tmp_path: Path) -> None:
    place = Outbox(str(tmp_path)).put([b"?" * 100])
    with pytest.raises(InternalError, match="no events are there"):
        shuffle.arrived([b"P" + encode(place)])


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "k8s://host", "local-cluster[2,1,1024]"])
def test_slots_that_may_be_on_several_machines_share_no_files(master: str) -> None:
    class Context:
        pass

    context: Any = Context()
    context.master = master
    assert exchange_folder(context) is None


def test_large_sources_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "GATHERED_ROWS", 10)
    parts = [(number % 2, events(4, 0, 4 * number)) for number in range(6)]
    assert [(task, len(each)) for task, each in shuffle.gathered(parts)] == [(0, 8), (1, 4), (1, 8), (0, 4)]


def test_only_a_task_sets_objects_aside_and_never_the_driver_that_loads_its_module() -> None:
    """What a driver has frozen is not taken apart at its end, and libraries say so (DuckDB: `leaked instances`)."""
    counts = (
        "import gc; before = gc.get_freeze_count()\n"
        "import tidegate.spark.rounds.work as work; print(gc.get_freeze_count() - before)\n"
        "with work.own_garbage(): print(gc.get_freeze_count() - before > 1000)"
    )
    done = subprocess.run([sys.executable, "-c", counts], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["0", "True"], done.stderr
