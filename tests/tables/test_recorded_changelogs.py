"""Changelogs that Kafka Streams itself wrote, read as tables: equal to what its own store answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from streams_fixtures import NAMES, Recorded, load_fixture

from table_records import Said, windows_in, write_records
from tidegate.clock import ManualClock
from tidegate.errors import WindowedKeyFormatError
from tidegate.log.log import Log
from tidegate.tables.factories import sessioned_table, windowed_table
from window_oracles import ms

SESSIONS = [name for name in NAMES if load_fixture(name).store_kind == "session"]
TIMES = [name for name in NAMES if name not in SESSIONS and name != "papi-duplicates"]
# Emitting on close needs the row at the very edge, so that layout shows one more millisecond than all others.
EDGE_ROWS = {"close-sliding", "close-tumbling"}


def retention_of(recorded: Recorded) -> int:
    about = recorded.about
    if "retention" in about:
        return int(about["retention"])
    grace = int(about["grace"])
    if about["window"] == "session":
        return int(about["gap"]) + grace
    return (2 if about["window"] == "sliding" else 1) * int(recorded.size_ms or 0) + grace


def stored(recorded: Recorded) -> dict[tuple[bytes, int, int], tuple[bytes, int | None]]:
    return {(row.key, row.start, row.end or 0): (row.value, row.timestamp) for row in recorded.read("all")}


def answered(table: Any, recorded: Recorded) -> dict[tuple[bytes, int, int], tuple[bytes, int | None]]:
    """Without timestamps where Kafka Streams' store keeps none."""
    has_times = recorded.store_kind == "time"
    return {
        window: (value, timestamp if has_times else None)
        for window, (value, timestamp) in windows_in(table).items()
    }


def open_recorded(log: Log, state: Path, recorded: Recorded, **settings: Any) -> Any:
    topic = recorded.changelog_topic
    write_records(log, topic, [Said(r.key, r.value, r.timestamp) for r in recorded.changelog])
    retention = settings.pop("retention", retention_of(recorded))
    if recorded.store_kind == "session":
        return sessioned_table(log, topic, state=state, retention=ms(retention), **settings)
    return windowed_table(
        log, topic, ms(recorded.size_ms or 1), state=state, retention=ms(retention), **settings
    )


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with Log(tmp_path / "log", durability="os", clock=ManualClock()) as opened:
        yield opened


@pytest.mark.parametrize("name", [*TIMES, *SESSIONS])
def test_WIN_7_7_01_a_recorded_changelog_equals_the_store_it_came_from(
    log: Log, tmp_path: Path, name: str
) -> None:
    """WIN-7.7-01"""
    recorded = load_fixture(name)
    with open_recorded(log, tmp_path / "state", recorded) as table:
        found, expected = answered(table, recorded), stored(recorded)
        if name in EDGE_ROWS:
            assert expected.items() >= found.items()
            edge = max(start for _, start, _ in expected) - retention_of(recorded)
            assert all(start <= edge for _, start, _ in expected.keys() - found.keys())
        else:
            assert found == expected
        backward = [(row.key, row.window) for row in table.backward_all()]
        assert backward == [(row.key, row.window) for row in table.all()][::-1]


@pytest.mark.parametrize("name", [*TIMES, *SESSIONS])
def test_a_restart_in_the_middle_changes_nothing(log: Log, tmp_path: Path, name: str) -> None:
    recorded = load_fixture(name)
    half = len(recorded.changelog) // 2
    said = [Said(r.key, r.value, r.timestamp) for r in recorded.changelog]
    topic, state = recorded.changelog_topic, tmp_path / "state"
    write_records(log, topic, said[:half])
    kind: dict[str, Any] = {"retention": ms(retention_of(recorded))}

    def opened() -> Any:
        if recorded.store_kind == "session":
            return sessioned_table(log, topic, state=state, **kind)
        return windowed_table(log, topic, ms(recorded.size_ms or 1), state=state, **kind)

    with opened() as table:
        assert table.position == {0: half}
    write_records(log, topic, said[half:])
    with opened() as table:
        found = windows_in(table)
    log.create_topic("whole-changelog")
    write_records(log, "whole-changelog", said)
    if recorded.store_kind == "session":
        whole: Any = sessioned_table(log, "whole-changelog", state=tmp_path / "whole", **kind)
    else:
        whole = windowed_table(
            log, "whole-changelog", ms(recorded.size_ms or 1), state=tmp_path / "whole", **kind
        )
    with whole:
        assert found == windows_in(whole)


def test_session_merges_leave_the_final_sessions_and_forward_the_deletions(log: Log, tmp_path: Path) -> None:
    """WIN-7.7-01"""
    recorded = load_fixture("session-merge")
    log.create_topic(recorded.changelog_topic)
    with (
        sessioned_table(
            log, recorded.changelog_topic, state=tmp_path / "state", retention=ms(retention_of(recorded))
        ) as table,
        table.changes() as changes,
    ):
        write_records(
            log, recorded.changelog_topic, [Said(r.key, r.value, r.timestamp) for r in recorded.changelog]
        )
        table.catch_up()
        seen = changes.take()
        assert answered(table, recorded) == stored(recorded)
        deleted = [(each.window, each.old) for each in seen if each.new is None]
        tombstones = sum(record.value is None for record in recorded.changelog)
        assert len(deleted) == tombstones == 2
        assert all(old is not None for _, old in deleted)


def test_retained_duplicates_are_no_table(log: Log, tmp_path: Path) -> None:
    recorded = load_fixture("papi-duplicates")
    with pytest.raises(WindowedKeyFormatError, match=r"offset 0.*sequence 1"):
        open_recorded(log, tmp_path / "state", recorded)


@pytest.mark.parametrize("name", ["tumbling-count", "hopping-keys", "sliding-count"])
def test_what_a_windowed_serde_wrote_is_read_in_topic_format(log: Log, tmp_path: Path, name: str) -> None:
    recorded = load_fixture(name)
    topics = {r.topic for r in recorded.produced} - {recorded.changelog_topic}
    written = [r for topic in topics for r in recorded.written(topic)]
    write_records(log, "windows", [Said(r.key, r.value, r.timestamp) for r in written])
    with windowed_table(
        log, "windows", ms(recorded.size_ms or 1), state=tmp_path / "state", key_format="topic",
        retention=ms(retention_of(recorded)),
    ) as table:  # fmt: skip
        assert {key: value for key, (value, _) in windows_in(table).items()} == {
            key: value for key, (value, _) in stored(recorded).items()
        }
