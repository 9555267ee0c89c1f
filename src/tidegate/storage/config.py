"""The settings of a worker's storage: memory, backlog, slots, timeouts and intervals, in one validated value.

All limits are per worker process except the tenants' (`write_buffer`, `base_runs`, `state_cache`), which apply
to each task. Sizes are bytes or `"64MiB"`, durations milliseconds or `"5s"`.

    memory ceiling ≥ worker total (the pool) + largest batch      the most memory of the process
    (memory ceiling − worker total) / 2                           the most memory to merge one window's state
    worker total   ≥ max tasks × (sum of a task's reserves)       so that every reserve can be kept
    soft max       ≥ reserve                                      writes above it succeed and trigger relief

The backlog limit is a *disk* budget: data accepted and not yet pruned, in memory or on the backend.

C1  a `StorageConfig` is validated on construction, before anything is opened; each error names the setting to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from tidegate.durations import DurationLike, SizeLike, duration_ms, size_bytes
from tidegate.errors import InvalidError
from tidegate.storage.index import Tenant

DELETERS = ("worker", "master")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """One tenant's memory limits per task: what it keeps under pressure, and where relief starts."""

    reserve_bytes: int
    soft_max_bytes: int


RUN_LIMITS = TenantLimits(64 * MIB, 256 * MIB)
STATE_LIMITS = TenantLimits(16 * MIB, 64 * MIB)


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Every setting of a worker's storage. `of` parses sizes and durations."""

    memory_ceiling_bytes: int = 2 * GIB
    worker_total_bytes: int = 896 * MIB
    max_tasks: int = 4
    write_buffer: TenantLimits = RUN_LIMITS
    base_runs: TenantLimits = RUN_LIMITS
    state_cache: TenantLimits = STATE_LIMITS
    low_watermark_permille: int = 700  # relief goes down to this share of the soft max

    backlog_limit_bytes: int = 64 * GIB
    max_batch_bytes: int = 64 * MIB  # the writer splits what is larger
    max_run_rows: int = 262_144

    max_inflight_loads: int = 4  # scratch slots of readers
    max_inflight_maintenance: int = 2  # scratch slots of maintenance, so that neither starves the other
    load_io_parallelism: int = 16  # packs one load reads at once from a remote backend
    max_open_packs: int = 256

    backlog_timeout_ms: int = 60_000
    memory_timeout_ms: int = 30_000
    scratch_timeout_ms: int = 30_000
    load_timeout_ms: int = 30_000  # how long a caller waits for another caller's load of the same state blob

    compaction_interval_ms: int = 250
    dump_interval_ms: int = 1000
    hot_bucket_count: int = 2  # the newest buckets, which periodic compaction and dumping skip
    max_deltas: int = 8  # a bucket with more unmerged runs than this is compacted
    repack_live_permille: int = 300  # a pack with a smaller share of live bytes is rewritten; 0: never
    delete_budget: int = 1024  # packs deleted in one tick
    delete_parallelism: int = 8  # deletes in flight at once on a remote backend
    delete_backoff_ms: int = 1000
    delete_backoff_max_ms: int = 60_000
    retained_checkpoints: int = 2  # per task; older ones are released when the next one begins
    deleted_by: str = "worker"  # or "master": then only `collect_garbage` deletes
    garbage_grace_ms: int = 3_600_000

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name not in _NO_NUMBERS:
                self._check_number(each.name)
        if self.deleted_by not in DELETERS:
            raise InvalidError(
                f"deleted_by is {self.deleted_by!r}; say 'worker' when one process at a time has a task, 'master' "
                "when several may and only their master knows which checkpoints count"
            )
        for tenant in Tenant:
            self._check_tenant(tenant)
        for name, whole in (("low_watermark_permille", "soft max"), ("repack_live_permille", "pack")):
            if getattr(self, name) > 1000:
                raise InvalidError(
                    f"{name} is {getattr(self, name)}; it is a share of the {whole} in thousandths, so at most 1000"
                )
        reserves = self.max_tasks * sum(self.limits(tenant).reserve_bytes for tenant in Tenant)
        if reserves > self.worker_total_bytes:
            raise InvalidError(
                f"worker_total_bytes is {self.worker_total_bytes}, but {self.max_tasks} tasks reserve {reserves} "
                "bytes: raise worker_total_bytes, or lower max_tasks or the reserves"
            )
        if self.max_batch_bytes > self.largest_append_bytes:
            raise InvalidError(
                f"max_batch_bytes is {self.max_batch_bytes}, but only {self.largest_append_bytes} bytes lie between "
                f"worker_total_bytes and memory_ceiling_bytes ({self.memory_ceiling_bytes}): raise "
                "memory_ceiling_bytes, or lower one of the others"
            )
        if self.delete_backoff_max_ms < self.delete_backoff_ms:
            raise InvalidError("delete_backoff_max_ms is below delete_backoff_ms: raise it")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> StorageConfig:
        """Create from settings by name; sizes and durations may be written `"64MiB"` and `"5s"`.

        A tenant is a mapping with `reserve_bytes` and `soft_max_bytes`, or one of them.
        """
        known = {each.name: each for each in fields(cls)}
        typed: dict[str, Any] = {}
        for name, value in settings.items():
            _known(name, tuple(known))
            default = known[name].default
            typed[name] = (
                _tenant_of(name, value, default)
                if isinstance(default, TenantLimits)
                else _number(name, value)
            )
        return cls(**typed)

    @classmethod
    def for_tests(cls, **changes: Any) -> StorageConfig:
        """Small limits, so that tests reach them with little data; `changes` as in `of`."""
        small: dict[str, Any] = {
            "memory_ceiling_bytes": 64 * MIB,
            "worker_total_bytes": 8 * MIB,
            "write_buffer": {"reserve_bytes": 64 * KIB, "soft_max_bytes": MIB},
            "base_runs": {"reserve_bytes": 64 * KIB, "soft_max_bytes": MIB},
            "state_cache": {"reserve_bytes": 16 * KIB, "soft_max_bytes": 256 * KIB},
            "backlog_limit_bytes": 32 * MIB,
            "max_batch_bytes": 4 * MIB,
            "max_run_rows": 4096,
            "max_open_packs": 16,
        }
        return cls.of(small | changes)

    def limits(self, tenant: Tenant) -> TenantLimits:
        limits: TenantLimits = getattr(self, tenant.value)
        return limits

    @property
    def deletes(self) -> bool:
        """Whether the worker deletes objects that its own checkpoints no longer need."""
        return self.deleted_by == "worker"

    @property
    def largest_append_bytes(self) -> int:
        """The most backlog one append may acquire: the memory outside the pool."""
        return self.memory_ceiling_bytes - self.worker_total_bytes

    @property
    def working_bytes(self) -> int:
        """The most memory of merges and results together: half of the memory outside the pool.

        The other half is for the current batch and the process itself. Limited so that the columns of one merge,
        copied three times, stay below Arrow's 2 GiB.
        """
        return min(self.largest_append_bytes // 2, 3 * (2**31 - 1))

    def relief_target(self, tenant: Tenant) -> int:
        """The bytes at which relief of a tenant above its soft max stops."""
        return self.limits(tenant).soft_max_bytes * self.low_watermark_permille // 1000

    def _check_number(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidError(f"{name} is {value!r}; give it as a whole number")
        lowest = 0 if name.endswith("_ms") or name in _MAY_BE_ZERO else 1
        if value < lowest:
            raise InvalidError(f"{name} is {value}; it must be at least {lowest}")

    def _check_tenant(self, tenant: Tenant) -> None:
        limits = self.limits(tenant)
        if not isinstance(limits, TenantLimits):
            raise InvalidError(
                f"{tenant} is {limits!r}; give it as TenantLimits(reserve_bytes, soft_max_bytes)"
            )
        reserve, soft_max = limits.reserve_bytes, limits.soft_max_bytes
        for name, value, lowest in (("soft_max_bytes", soft_max, 1), ("reserve_bytes", reserve, 0)):
            if value < lowest:
                raise InvalidError(f"{tenant}: {name} is {value}; it must be at least {lowest}")
        if reserve > soft_max:
            raise InvalidError(
                f"{tenant}: reserve_bytes {reserve} is above soft_max_bytes {soft_max}: what is reserved cannot be "
                "relieved, so lower the one or raise the other"
            )


_NO_NUMBERS = {"deleted_by", *Tenant}
_MAY_BE_ZERO = {"low_watermark_permille", "hot_bucket_count", "delete_budget", "repack_live_permille"}


def _known(name: str, names: tuple[str, ...]) -> None:
    if name in names:
        return
    near = get_close_matches(name, names, 1)
    raise InvalidError(f"unknown storage setting {name!r}" + (f"; did you mean {near[0]}?" if near else ""))


def _number(name: str, value: SizeLike | DurationLike) -> Any:
    if isinstance(value, bool):
        raise InvalidError(f"{name} is {value!r}; give it as a whole number")
    if name.endswith("_bytes") and isinstance(value, str):
        return size_bytes(value)
    if name.endswith("_ms") and not isinstance(value, int):
        return duration_ms(value)
    return value


def _tenant_of(name: str, value: Any, default: TenantLimits) -> TenantLimits:
    if isinstance(value, TenantLimits):
        return value
    if not isinstance(value, Mapping):
        raise InvalidError(f"{name} is {value!r}; give it as a mapping with reserve_bytes and soft_max_bytes")
    for part in value:
        _known(part, ("reserve_bytes", "soft_max_bytes"))
    return TenantLimits(
        _number("reserve_bytes", value.get("reserve_bytes", default.reserve_bytes)),
        _number("soft_max_bytes", value.get("soft_max_bytes", default.soft_max_bytes)),
    )
