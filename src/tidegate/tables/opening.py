"""Opening a table: decide who builds it, restore its last commit, go on from there.

    read_only=True           a reader of what another process commits
    lease free               this process builds: takes the lease, fences the one before, restores, reads on
    lease held               a reader too; the table says so in `role`

Everything that can be refused is refused before anything is created.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tidegate.clock import Clock, SystemClock
from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import InvalidError
from tidegate.files import Files
from tidegate.metrics import Metrics
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.scheduling import Scheduler
from tidegate.storage import StorageConfig, WorkerStorageRuntime, open_backend
from tidegate.tables.building.commits import Commits, lease_name
from tidegate.tables.building.lease import DEFAULT_TTL_MS, Lease
from tidegate.tables.building.materialiser import Cadence, Materialiser, kept_checkpoints
from tidegate.tables.building.shape import TableRules
from tidegate.tables.building.source import attach, kept_open, task_of
from tidegate.tables.table import Table

if TYPE_CHECKING:
    from tidegate.storage.backends.port import StorageBackend

AnyTable = TypeVar("AnyTable", bound=Table)
logger = logging.getLogger(__name__)


def open_table(
    kind: type[AnyTable],
    log: Any,
    rules: TableRules,
    state: str | Path | StorageBackend,
    *,
    read_only: bool = False,
    follow: bool = False,
    bootstrap: bool = True,
    cadence: Cadence | None = None,
    storage: StorageConfig | None = None,
    lease_ttl: DurationLike = DEFAULT_TTL_MS,
    files: Files | None = None,
    clock: Clock | None = None,
    randomness: Randomness | None = None,
    scheduler: Scheduler | None = None,
) -> AnyTable:
    """Open the table in `state`: a folder, a backend's address, or a backend.

    `bootstrap` reads the topic up to its end before returning; `follow` goes on in the background. `files`, `clock`
    and `randomness` default to the log's.
    """
    clock = clock or getattr(log, "clock", None) or SystemClock()
    randomness = randomness or getattr(log, "randomness", None) or SystemRandomness()
    owns = isinstance(state, str | Path)
    backend = (
        open_backend(state, files=files, clock=clock, randomness=randomness)  # type: ignore[arg-type]
        if owns
        else state
    )
    try:
        builder = None
        if not read_only:
            ttl_ms = duration_ms(lease_ttl)
            if ttl_ms <= 0:
                raise InvalidError("lease_ttl is 0: a lease that ends at once protects nothing")
            lease = Lease(
                backend,  # type: ignore[arg-type]
                lease_name(rules.shape.name),
                clock=clock,
                randomness=randomness,
                ttl_ms=ttl_ms,
            )
            held = lease.acquire()
            if held is None:
                builder = _build(
                    log, rules, backend, lease, cadence or Cadence(), storage, clock, randomness, scheduler
                )
            else:
                logger.info(
                    "table %s is built by process %d on %s; reading it here",
                    rules.shape.name,
                    held.pid,
                    held.host,
                )
        table = kind(rules, backend, log, builder=builder, clock=clock, owns_backend=owns)  # type: ignore[arg-type]
    except BaseException:
        if owns:
            backend.close()  # type: ignore[union-attr]
        raise
    if builder is not None:
        try:
            if bootstrap:
                table.catch_up()
            elif builder.commits.newest is None:
                builder.commit()  # so that readers find the table
            if follow:
                builder.run()
        except BaseException:
            table.close()
            raise
    return table


def _build(
    log: Any,
    rules: TableRules,
    backend: Any,
    lease: Lease,
    cadence: Cadence,
    storage: StorageConfig | None,
    clock: Clock,
    randomness: Randomness,
    scheduler: Scheduler | None,
) -> Materialiser:
    commits = Commits(backend, rules.shape, lease.epoch)
    try:
        known = commits.take_over()
    except BaseException:
        lease.release()
        raise
    config = storage or StorageConfig(retained_checkpoints=kept_checkpoints())
    if config.retained_checkpoints < kept_checkpoints():
        raise InvalidError(
            f"retained_checkpoints is {config.retained_checkpoints}; a table keeps its last commits readable and needs "
            f"at least {kept_checkpoints()}"
        )
    metrics = getattr(log, "metrics", None) or Metrics()
    runtime = WorkerStorageRuntime.open(
        config,
        kept_open(backend),
        clock=clock,
        randomness=randomness,
        scheduler=scheduler,
        metrics=metrics,
    )
    try:
        task = task_of(rules.shape)
        tokens = [commit.token for commit in known]
        if known:
            runtime.apply_checkpoint(task, tokens[-1], retained=tokens[:-1])
        source = attach(runtime, rules)
        runtime.collect_garbage(task, tokens)
        return Materialiser(log, source, commits, lease, clock=clock, metrics=metrics, cadence=cadence)
    except BaseException:
        runtime.close()
        lease.release()
        raise
