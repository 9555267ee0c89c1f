"""One replica at work: a drainer for all its partitions, and for each of them a try to lead it.

    materialiser (two threads): version topic ──► rows, commits          conductor (one thread): leases, leading, status

S1  the two sides share a partition's `Following` and nothing else; its lock is theirs.
S2  when the materialiser stops, nothing is led any more; what it drained is served on.
S3  `close` ends chains, gives leases up and commits what is drained, in this order; an end that cannot be written
    within the writer's time is told, and not tried again. With `save=False` nothing is committed: what came since the
    last commit is read again.

Thread rule: `step` on one thread, or `run` for threads of its own; the rest from any.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from tidegate.clock import Clock
from tidegate.errors import TidegateError
from tidegate.integrity import Role
from tidegate.randomness import Randomness
from tidegate.tables.building.lease import Lease
from tidegate.tables.replicas.leading import Leading, Live
from tidegate.tables.replicas.status import ReplicaStatus, StatusBoard, partition_status, replica_status

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend
    from tidegate.tables.building.materialiser import Materialiser

IDLE_MS: Final = 10

logger = logging.getLogger(__name__)


def leader_lease_name(version: str, partition: int) -> str:
    return f"tables/{version}/leader-{partition}"


class Serving:
    """The partitions of a version that one process replicates."""

    def __init__(
        self,
        log: Any,
        builder: Materialiser,
        live: Live,
        backend: StorageBackend,
        replica: str,
        *,
        lease_ttl_ms: int,
        heartbeat_ms: int,
        clock: Clock,
        randomness: Randomness,
    ) -> None:
        shape = builder.source.rules.shape
        self.version, self.replica = shape.topic, replica
        self.live = live
        self.error: BaseException | None = None
        self._log, self._builder, self._backend = log, builder, backend
        self._clock, self._randomness, self._ttl_ms = clock, randomness, lease_ttl_ms
        self._heartbeat_ms = heartbeat_ms
        self._board = StatusBoard(backend, shape.topic, replica)
        self._said_ms: int | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.leading = {
            number: Leading(
                log,
                builder.validations[number],
                live,
                self._lease_of(number),
                every_ms=min(max(lease_ttl_ms // 10, 50), 1000),
                clock=clock,
                randomness=randomness,
            )
            for number in shape.partitions
        }

    @property
    def roles(self) -> dict[int, Role]:
        return {number: each.role for number, each in self.leading.items()}

    def step(self) -> bool:
        """Drain what there is, commit when due, and one step of leading; whether anything was done."""
        builder = self._builder
        did = builder.consume_once()
        while builder.drain_once():
            did = True
        builder.commit_if_due()
        return self.conduct() or did

    def conduct(self, timeout_ms: int = 0) -> bool:
        """One step for every partition, and news now and then."""
        if self._builder.error is not None:
            self._stand_down(graceful=False)
            return False
        did = False
        for each in self.leading.values():
            did |= each.step(timeout_ms)
        self._say()
        return did

    def status(self) -> ReplicaStatus:
        """How every partition stands now."""
        numbers = list(self.leading)
        ends, live_ends = _ends(self._log, self.version, numbers), _ends(self._log, self.live.topic, numbers)
        return replica_status(
            self.replica,
            self._clock.now_ms(),
            {
                number: partition_status(each, ends[number], live_ends[number])
                for number, each in self.leading.items()
            },
        )

    def run(self) -> None:
        """Go on in the background until `stop`."""
        if self._thread is None:
            if not self._builder.is_running:
                self._builder.run()
            self._thread = threading.Thread(
                target=self._conduct_on, name=f"tidegate-{self.version}-conductor", daemon=True
            )
            self._thread.start()

    def stop(self, *, graceful: bool = True) -> None:
        """Lead nothing any more, and say so."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None
        self._stand_down(graceful=graceful)
        self._said_ms = None
        self._say()

    # -- inside ----------------------------------------------------------------------------------

    def _lease_of(self, partition: int) -> Any:
        def make() -> Lease:
            return Lease(
                self._backend,
                leader_lease_name(self.version, partition),
                clock=self._clock,
                randomness=self._randomness,
                ttl_ms=self._ttl_ms,
                duty="leads this partition",
                remedy="this one goes on as a standby",
            )

        return make

    def _stand_down(self, *, graceful: bool) -> None:
        for each in self.leading.values():
            if each.is_standing:
                each.stop(graceful=graceful)

    def _say(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._said_ms is not None and now_ms - self._said_ms < self._heartbeat_ms:
            return
        self._said_ms = now_ms
        try:
            self._board.publish(self.status())
        except (TidegateError, OSError) as error:
            logger.warning("%s: news of replica %s were not published: %s", self.version, self.replica, error)

    def _conduct_on(self) -> None:
        try:
            while not self._stopping.is_set():
                if not self.conduct():
                    self._stopping.wait(IDLE_MS / 1000)
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to tell: kept, and raised to whoever asks
            self.error = error
            logger.error("%s: replica %s leads nothing any more: %s", self.version, self.replica, error)
            self._stand_down(graceful=False)


def _ends(log: Any, topic: str, partitions: Sequence[int]) -> dict[int, int]:
    with log.reader(topic, list(partitions), start="latest") as reader:
        ends: dict[int, int] = reader.end_offsets()
        return ends
