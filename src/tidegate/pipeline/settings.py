"""Settings: where an app's log and state are, how a run behaves, and what a worker needs.

Addresses mean the same in every process: folders are made absolute when the app is defined, because workers start in
other folders. `RunSettings` is validated once. `WorkerSetup` travels to Spark's Python workers in a closure, so it
holds definitions and addresses, never anything open.

Thread rule: immutable values and pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypedDict

from tidegate.durations import DurationLike
from tidegate.errors import InvalidError
from tidegate.log.log import bootstrap_servers, folder_path, is_kafka
from tidegate.pipeline.flow import Flow
from tidegate.storage import StorageConfig, TenantLimits, state_key_id

if TYPE_CHECKING:
    from tidegate.clock import Clock
    from tidegate.metrics import Metrics
    from tidegate.pipeline.progress import Progress

# -- places ---------------------------------------------------------------------------------------


def log_address(data: str | Path | None, log: str | Path | None) -> str:
    """A folder, or `kafka://host:port`."""
    if log is None:
        return str(_in_data(data, "log", "log='kafka://HOST:PORT'") / "log")
    if is_kafka(str(log)):
        bootstrap_servers(str(log))  # refuses what is no address
        return str(log)
    return str(_absolute(folder_path(str(log))))


def state_address(data: str | Path | None, state: str | Path | None) -> str:
    """A folder, or the address of an object store."""
    if state is None:
        return str(_in_data(data, "state", "state='s3://BUCKET/PREFIX'") / "state")
    address = str(state)
    if address.startswith("memory://"):
        raise InvalidError(
            "state in memory:// is gone with the process that holds it; give a folder, like state='./state'"
        )
    if "://" in address and not address.startswith("file://"):
        return address
    return str(_absolute(folder_path(address)))


def _in_data(data: str | Path | None, what: str, other: str) -> Path:
    if data is None:
        raise InvalidError(
            f"the app has no place for its {what}: give data='./data' for both log and state, or {other}"
        )
    if is_kafka(str(data)):
        raise InvalidError(f"data={str(data)!r} is a log; give log={str(data)!r} and a folder as state=")
    return _absolute(folder_path(str(data)))


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


# -- settings -------------------------------------------------------------------------------------

LEAST_LEASE_MS: Final = 100
GRACE_ROUNDS: Final = 4
OnLoss: TypeAlias = Literal["stop", "accept"]


class RunOptions(TypedDict, total=False):
    """The keywords of `App.start` and `App.run`; the more rarely used ones are fields of `RunSettings`."""

    until: Literal["caught_up"] | None
    close: bool
    trigger: DurationLike | Literal["once"]
    round_records: int | None
    on_loss: OnLoss
    maintains_log: bool
    progress: Callable[[Progress], None] | None
    metrics: Metrics | None
    clock: Clock | None
    first_round_records: int
    target_ms: int
    lease_ms: int
    grace_ms: int
    collect_every_ms: int
    attempts: int
    patience_ms: int
    stop_within_ms: int


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a run, in milliseconds and records.

    `round_records` limits how many records a round reads (None: as many as take about `target_ms` while catching
    up). `on_loss` decides about records that were deleted before they were read. `maintains_log`: the run also
    applies retention and compaction to its embedded log. Unavailable resources (a broker that restarts, a full disk)
    are retried for `patience_ms` after the first successful step; a run that cannot begin fails at once.
    `stop_within_ms` is how long an interrupted `App.run` waits for the current round.
    """

    until: Literal["caught_up"] | None = None
    close: bool = False
    trigger_ms: int = 1000
    round_records: int | None = None
    first_round_records: int = 250_000
    target_ms: int = 2000
    on_loss: OnLoss = "stop"
    idle_after_ms: int | None = 30_000
    lease_ms: int = 10_000
    grace_ms: int = (
        3_600_000  # replaces the app's `StorageConfig.garbage_grace_ms`: tasks and collection must agree
    )
    collect_every_ms: int = 60_000
    attempts: int = 4
    patience_ms: int = 60_000
    stop_within_ms: int = 30_000
    maintains_log: bool = False

    def __post_init__(self) -> None:
        if self.until not in (None, "caught_up"):
            raise InvalidError(f"until={self.until!r}: leave it out to run on, or say 'caught_up'")
        if self.close and self.until is None:
            raise InvalidError(
                "close=True says that the input ends with what is there now, so give until='caught_up' too"
            )
        if self.on_loss not in ("stop", "accept"):
            raise InvalidError(f"on_loss={self.on_loss!r}: choose 'stop' or 'accept'")
        not_negative = (
            "trigger_ms",
            "grace_ms",
            "idle_after_ms",
            "collect_every_ms",
            "patience_ms",
            "stop_within_ms",
        )
        positive = ("round_records", "first_round_records", "target_ms", "lease_ms", "attempts")
        for name in (*not_negative, *positive):
            value, least = getattr(self, name), int(name in positive)
            if not isinstance(value, int | None):
                raise TypeError(f"{name} is {value!r}; give a whole number")
            if value is not None and value < least:
                raise InvalidError(f"{name} is {value}; it must be {'at least 1' if least else '0 or more'}")
        if self.lease_ms < LEAST_LEASE_MS:
            raise InvalidError(
                f"lease_ms is {self.lease_ms}; it must be at least {LEAST_LEASE_MS}, or it cannot be renewed in "
                "time, and another run takes the app over"
            )
        if self.grace_ms < GRACE_ROUNDS * self.target_ms:
            raise InvalidError(
                f"grace_ms is {self.grace_ms}; it must be at least {GRACE_ROUNDS} times target_ms ({self.target_ms}): "
                "rounds that take longer than half of it are never committed"
            )


@dataclass(frozen=True)
class WorkerSetup:
    """An app as its workers need it.

    `log` is a folder of an embedded log or `kafka://host:port,…`; `state` a folder or `s3://…`. `client` holds
    settings of the Kafka client, passwords among them, so they are never shown. `partitions` are the numbers of
    partitions of every topic the app reads or writes, as they were when the run started, and `max_batch_bytes` the
    largest batches that the output topics accept. `key_id` is the key that signs state, empty where it is not
    signed: a worker with another key, or none, is refused.
    """

    app: str
    flows: tuple[Flow, ...]
    log: str
    state: str
    storage: StorageConfig
    client: Mapping[str, str] = field(default_factory=dict, repr=False)
    partitions: Mapping[str, int] = field(default_factory=dict)
    max_batch_bytes: Mapping[str, int] = field(default_factory=dict)
    key_id: str = field(default_factory=state_key_id)

    def flow(self, name: str) -> Flow:
        """Return the flow of this name; `InvalidError` if the app has none."""
        for flow in self.flows:
            if flow.name == name:
                return flow
        have = ", ".join(flow.name for flow in self.flows)
        raise InvalidError(f"app {self.app!r} has no flow {name!r}; it has {have or 'none'}")

    @property
    def runtime_config(self) -> StorageConfig:
        """The storage config of one process, which may have all tasks of the app at once; only the coordinator
        deletes.

        What tasks keep under pressure is their share of the available memory, so with more tasks each keeps less.
        """
        tasks = sum(flow.tasks(self.partitions[flow.source.topic]) for flow in self.flows)
        config = replace(self.storage, deleted_by="master")
        if tasks <= config.max_tasks:
            return config
        return replace(config, max_tasks=tasks, **limits_of(config, tasks, config.worker_total_bytes))


def limits_of(config: StorageConfig, tasks: int, total_bytes: int) -> dict[str, TenantLimits]:
    """Return the limits of so many tasks that share so many bytes: each keeps its share under pressure."""
    limits = {name: getattr(config, name) for name in ("write_buffer", "base_runs", "state_cache")}
    wanted = tasks * sum(each.reserve_bytes for each in limits.values())
    share = min(1.0, total_bytes / wanted) if wanted else 1.0
    return {
        name: TenantLimits(int(each.reserve_bytes * share), max(1, min(each.soft_max_bytes, total_bytes)))
        for name, each in limits.items()
    }
