"""Every wait that ends in an error is counted, by task and reason, and once."""

from __future__ import annotations

from typing import Any

import pytest

from maintenance_steps import dumping
from threads import Beside
from tidegate.errors import OverloadError
from tidegate.storage.index import PlainState
from tidegate.storage.reader import RangeRequest
from tidegate.storage.scratch import Scratch
from workers import TASK, Worker, readings, store

ROWS = [(b"k%d" % number, 1000, number) for number in range(200)]


def overloads(worker: Worker) -> dict[str, float]:
    counted = readings(worker.metrics)["overloads"]
    return {reason: value for (task, reason), value in counted.items() if task == TASK}


def overload(worker: Worker, state: PlainState, reason: str) -> None:
    """Run into this limit."""
    if reason == "retention_exceeds_backlog":
        worker.runtime.writer().nothing_left_to_prune(TASK)
    worker.append(state, ROWS)


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("backlog_full", {"backlog_limit_bytes": 4096}),
        ("retention_exceeds_backlog", {"backlog_limit_bytes": 4096}),
        (
            "worker_memory",
            {
                "worker_total_bytes": 65536,
                "max_tasks": 1,
                "write_buffer": {"reserve_bytes": 65536},
                "base_runs": {"reserve_bytes": 0},
                "state_cache": {"reserve_bytes": 0},
            },
        ),
    ],
)
def test_an_append_that_finds_no_room_is_counted(reason: str, settings: dict[str, Any]) -> None:
    worker = Worker(**settings)
    state = worker.attach(store())
    with pytest.raises(OverloadError) as caught:
        for _ in range(100):
            overload(worker, state, reason)
    assert caught.value.reason == reason
    assert overloads(worker) == {reason: 1}


def test_a_load_that_finds_no_slot_is_counted() -> None:
    worker = Worker(max_inflight_loads=1)
    state = worker.attach(store())
    worker.append(state, ROWS)
    worker.run(dumping(worker.runtime, TASK, state, [1000], evict=True))
    reader = worker.runtime.reader()
    with worker.runtime.scratch.permit(Scratch.READER), pytest.raises(OverloadError):
        Beside(lambda: reader.load(reader.plan(TASK, state, [RangeRequest(b"k1")]))).result()
    assert overloads(worker) == {"scratch": 1}


def test_a_checkpoint_that_is_kept_waiting_is_counted() -> None:
    worker = Worker(max_inflight_maintenance=1)
    state = worker.attach(store())
    worker.append(state, ROWS)
    with worker.runtime.scratch.permit(Scratch.MAINTENANCE), pytest.raises(OverloadError):
        worker.runtime.checkpoint(TASK)
    assert overloads(worker) == {"maintenance_blocked": 1}
    assert worker.runtime.checkpoint(TASK)
    assert overloads(worker) == {"maintenance_blocked": 1}
