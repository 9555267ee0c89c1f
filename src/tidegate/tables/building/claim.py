"""Becoming the builder of a table: the lease first, then the last commit restored, then reading on from there.

A claim may be tried again and again: it answers None while another process has the lease, and a builder as soon as
that one has ended, given up or died. Everything that can be refused is refused before the lease is taken, and a claim
that fails gives the lease back.

Thread rule: one thread at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.clock import Clock
from tidegate.errors import FencedError, InvalidError
from tidegate.metrics import Metrics
from tidegate.randomness import Randomness
from tidegate.scheduling import Scheduler
from tidegate.storage import StorageConfig, WorkerStorageRuntime
from tidegate.tables.building.commits import Commits, lease_name, next_epoch
from tidegate.tables.building.consuming import TopicWatch
from tidegate.tables.building.lease import Held, Lease
from tidegate.tables.building.materialiser import Cadence, Materialiser, ValidationOf, kept_checkpoints
from tidegate.tables.building.shape import TableRules
from tidegate.tables.building.source import attach, kept_open, task_of

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend


class Claim:
    """All that is needed to build one table here, once nobody else does."""

    def __init__(
        self,
        log: Any,
        rules: TableRules,
        backend: StorageBackend,
        *,
        cadence: Cadence,
        storage: StorageConfig | None,
        lease_ttl_ms: int,
        clock: Clock,
        randomness: Randomness,
        scheduler: Scheduler | None,
        validation_of: ValidationOf | None = None,
    ) -> None:
        if lease_ttl_ms <= 0:
            raise InvalidError("lease_ttl is 0: a lease that ends at once protects nothing")
        self._storage = storage or StorageConfig(retained_checkpoints=kept_checkpoints())
        if self._storage.retained_checkpoints < kept_checkpoints():
            raise InvalidError(
                f"retained_checkpoints is {self._storage.retained_checkpoints}; a table keeps its last commits "
                f"readable and needs at least {kept_checkpoints()}"
            )
        self._log, self._rules, self._backend = log, rules, backend
        self._cadence, self._ttl_ms = cadence, lease_ttl_ms
        self._clock, self._randomness, self._scheduler = clock, randomness, scheduler
        self._validation_of = validation_of
        self.held: Held | None = None
        """Who had the lease when it was asked for last, if somebody else did."""

    @property
    def retry_ms(self) -> int:
        """How often it makes sense to ask again."""
        return min(max(self._ttl_ms // 10, 50), 1000)

    def attempt(self) -> Materialiser | None:
        """The builder, if the table is ours to build now."""
        lease = Lease(
            self._backend,
            lease_name(self._rules.shape.name),
            clock=self._clock,
            randomness=self._randomness,
            ttl_ms=self._ttl_ms,
        )
        self.held = lease.acquire(at_least=next_epoch(self._backend, self._rules.shape.name))
        if self.held is not None:
            return None
        try:
            return self._build(lease)
        except FencedError:
            return None  # another one was quicker, and has put the commits under its name already
        except BaseException:
            lease.release()
            raise

    def _build(self, lease: Lease) -> Materialiser:
        rules, clock = self._rules, self._clock
        topic = TopicWatch(self._log, rules.shape)
        commits = Commits(self._backend, rules.shape, lease.epoch, topic.topic_id)
        known = commits.take_over()
        metrics = getattr(self._log, "metrics", None) or Metrics()
        runtime = WorkerStorageRuntime.open(
            self._storage,
            kept_open(self._backend),
            clock=clock,
            randomness=self._randomness,
            scheduler=self._scheduler,
            metrics=metrics,
        )
        runtime.backlog.expect_jobs(1, 1)  # the drainer appends and prunes: while it waits, nobody makes room
        try:
            task = task_of(rules.shape)
            tokens = [commit.token for commit in known]
            if known:
                runtime.apply_checkpoint(task, tokens[-1], retained=tokens[:-1])
            source = attach(runtime, rules)
            runtime.collect_garbage(task, tokens)
            return Materialiser(
                self._log,
                source,
                commits,
                lease,
                clock=clock,
                metrics=metrics,
                cadence=self._cadence,
                validation_of=self._validation_of,
                topic=topic,
            )
        except BaseException:
            runtime.close()
            raise
