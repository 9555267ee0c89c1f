"""Changelog topics are named and set up as Kafka Streams does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tidegate.windows.changelog import changelog_name, changelog_settings


@pytest.mark.parametrize(
    ("asked", "retention_ms"),
    [
        pytest.param({"retention": 10, "additional": 20}, "30", id="WIN-7.6-11 sum"),
        pytest.param(
            {"retention": 2**63 - 10, "additional": 20},
            str(2**63 - 1),
            id="WIN-7.6-11 never beyond the largest",
        ),
        pytest.param(
            {"retention": 10, "additional": 20, "own": {"retention.ms": "7"}},
            "7",
            id="WIN-7.6-11 the store's own",
        ),
        pytest.param(
            {"retention": 10, "additional": 20, "everywhere": {"retention.ms": "7"}},
            "30",
            id="WIN-7.6-11 not the application's",
        ),
        pytest.param({"retention": "1h"}, str(3_600_000 + 86_400_000), id="WIN-7.6-11 a day more"),
    ],
)
def test_a_topic_keeps_more_than_its_store(asked: dict[str, Any], retention_ms: str) -> None:
    assert changelog_settings("window", **asked)["retention.ms"] == retention_ms


def test_policies_go_by_kind_of_store() -> None:
    policies = {
        "window": changelog_settings("window", retention="1h")["cleanup.policy"],
        "duplicates": changelog_settings("window", retention="1h", retain_duplicates=True)["cleanup.policy"],
        "session": changelog_settings("session", retention="1h")["cleanup.policy"],
        "key-value": changelog_settings("key-value")["cleanup.policy"],
    }
    assert policies == {
        "window": "compact,delete",
        "duplicates": "delete",
        "session": "compact,delete",
        "key-value": "compact",
    }
    assert "retention.ms" not in changelog_settings("key-value")


def test_a_log_takes_the_settings(tmp_path: Path) -> None:
    settings = changelog_settings("session", retention="2h", everywhere={"segment.bytes": "1048576"})
    with tg.Log(tmp_path) as log:
        log.create_topic(changelog_name("shop", "visits"), 2, settings)
        described = log.describe("shop-visits-changelog")
    assert described.config.retention_ms == 2 * 3_600_000 + 86_400_000
    assert described.config.segment_bytes == 1 << 20


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(tg.InvalidError, match="needs the store's retention"):
        changelog_settings("window")
    with pytest.raises(tg.InvalidError, match="has no retention"):
        changelog_settings("key-value", retention="1h")
    with pytest.raises(tg.InvalidError, match="named after"):
        changelog_name("", "counts")
