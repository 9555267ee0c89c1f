"""Storage settings: the defaults stand, each wrong value is refused by name before anything is opened."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.errors import InvalidError
from tidegate.storage.config import GIB, MIB, StorageConfig, TenantLimits
from tidegate.storage.index import Tenant


def test_the_defaults_are_valid_and_are_those_of_the_reference() -> None:
    config = StorageConfig()
    assert config.worker_total_bytes == 896 * MIB
    assert (
        config.limits(Tenant.WRITE_BUFFER)
        == config.limits(Tenant.BASE_RUNS)
        == TenantLimits(64 * MIB, 256 * MIB)
    )
    assert config.limits(Tenant.STATE_CACHE) == TenantLimits(16 * MIB, 64 * MIB)
    assert (config.low_watermark_permille, config.load_io_parallelism) == (700, 16)
    assert (config.compaction_interval_ms, config.dump_interval_ms, config.delete_budget) == (250, 1000, 1024)
    assert config.largest_append_bytes == config.memory_ceiling_bytes - config.worker_total_bytes
    assert config.relief_target(Tenant.STATE_CACHE) == 64 * MIB * 7 // 10
    assert StorageConfig.for_tests().worker_total_bytes < config.worker_total_bytes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"worker_total_bytes": 0}, "worker_total_bytes", id="WS-T59-total-0"),
        pytest.param({"low_watermark_permille": 1001}, "low_watermark_permille", id="WS-T59-low-watermark"),
        pytest.param(
            {"write_buffer": {"soft_max_bytes": 0}}, "write_buffer: soft_max", id="WS-T59-soft-max-0"
        ),
        pytest.param(
            {"state_cache": {"reserve_bytes": "1MiB", "soft_max_bytes": "1KiB"}},
            "state_cache: reserve_bytes",
            id="WS-T59-reserve-above-soft-max",
        ),
        pytest.param(
            {"base_runs": {"reserve_bytes": -1}}, "base_runs: reserve_bytes", id="WS-T59-reserve-negative"
        ),
        pytest.param({"max_inflight_loads": 0}, "max_inflight_loads", id="WS-T59-inflight-0"),
        pytest.param(
            {"max_inflight_maintenance": 0}, "max_inflight_maintenance", id="WS-T59-inflight-maintenance-0"
        ),
        pytest.param({"load_io_parallelism": 0}, "load_io_parallelism", id="WS-T59-io-0"),
        pytest.param({"backlog_limit_bytes": 0}, "backlog_limit_bytes", id="WS-T59-backlog-0"),
        pytest.param({"max_tasks": 1000}, "worker_total_bytes", id="WS-T59-reserves-above-total"),
        pytest.param(
            {"memory_ceiling_bytes": "8MiB"}, "memory_ceiling_bytes", id="WS-T59-no-room-for-a-batch"
        ),
        pytest.param({"backlog_timeout_ms": -1}, "backlog_timeout_ms", id="WS-T59-timeout-negative"),
        pytest.param({"max_tasks": 1.5}, "max_tasks", id="WS-T59-not-whole"),
        pytest.param({"max_tasks": True}, "max_tasks", id="WS-T59-not-a-number"),
        pytest.param({"write_buffer": 7}, "write_buffer", id="WS-T59-tenant-not-a-mapping"),
        pytest.param({"delete_backoff_max_ms": 1}, "delete_backoff_max_ms", id="WS-T59-backoff"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidError, match=named):
        StorageConfig.for_tests(**changes)


def test_sizes_and_durations_are_read_as_people_write_them() -> None:
    config = StorageConfig.of(
        {
            "memory_ceiling_bytes": "3GiB",
            "backlog_timeout_ms": "5s",
            "state_cache": {"soft_max_bytes": "32MiB"},
        }
    )
    assert (config.memory_ceiling_bytes, config.backlog_timeout_ms) == (3 * GIB, 5000)
    assert config.state_cache == TenantLimits(16 * MIB, 32 * MIB)


@pytest.mark.parametrize(
    ("settings", "near"),
    [({"backlog_limit": 1}, "backlog_limit_bytes"), ({"write_buffer": {"soft_max": 1}}, "soft_max_bytes")],
)
def test_an_unknown_setting_is_refused_with_the_nearest_known_one(
    settings: dict[str, Any], near: str
) -> None:
    with pytest.raises(InvalidError, match=f"did you mean {near}"):
        StorageConfig.of(settings)
