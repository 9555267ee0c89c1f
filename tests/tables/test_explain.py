"""Why a window has the value it has: told from the offsets kept of it and from those alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from table_records import Said, session_record, window_record, write_records
from tidegate.clock import ManualClock
from tidegate.log.log import Log
from tidegate.tables.factories import WindowedTable, sessioned_table, windowed_table
from tidegate.tables.factories import table as key_table
from tidegate.tables.options import Consumed
from tidegate.tables.serdes.base import Bytes, Long
from window_oracles import ms

MINUTE = 60_000
TOPIC = "windows-changelog"


class Watched:
    """A log that notes which offsets its readers were asked for."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.asked: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def reader(self, topic: str, partitions: Any = None, **settings: Any) -> Any:
        if isinstance(settings.get("stop"), dict):
            ((number, stop),) = settings["stop"].items()
            self.asked.append((settings["start"][number], stop))
        return self._log.reader(topic, partitions, **settings)


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with Log(tmp_path / "log", durability="os", clock=ManualClock()) as opened_log:
        yield Watched(opened_log)


def opened(log: Any, tmp_path: Path, records: list[Said], size: int = 10, **settings: Any) -> WindowedTable:
    write_records(log, TOPIC, records)
    return windowed_table(log, TOPIC, ms(size), state=tmp_path / "state", **settings)


def outcomes(found: Any) -> list[tuple[int, str]]:
    return [(each.offset, each.outcome) for each in found.contributions]


def test_the_records_are_named_with_what_became_of_them(log: Any, tmp_path: Path) -> None:
    said = [
        window_record(b"a", MINUTE, b"1"),
        window_record(b"b", MINUTE, b"other"),
        window_record(b"a", MINUTE, None),
        window_record(b"a", MINUTE, b"2"),
        window_record(b"z", 20 * MINUTE, b"jump"),
        window_record(b"a", MINUTE, b"too late"),
    ]
    with opened(log, tmp_path, said[:4], MINUTE, retention="2m") as table:
        write_records(log, TOPIC, said[4:])
        found = table.explain(b"a", MINUTE)
        assert outcomes(found) == [(0, "replaced"), (2, "deletion"), (3, "current"), (5, "waiting")]
        assert found.value == b"2"
        assert found.waiting_offsets == 2
        assert not found.aged_out
        assert "waits for 2 more offsets" in str(found)
        table.catch_up()
        found = table.explain(b"a", MINUTE)
        assert found.value is None
        assert found.is_expired
        assert outcomes(found) == [(0, "replaced"), (2, "deletion"), (3, "replaced"), (5, "expired")]
        assert "beyond the table's retention" in str(found)
        assert "offset 5 timestamp 60000: expired (it came when" in str(found)


def test_only_the_offsets_of_the_window_are_read_again(log: Any, tmp_path: Path) -> None:
    said = [window_record(b"k%d" % (n % 5), n // 100 * MINUTE, b"%d" % n) for n in range(2000)]
    with opened(log, tmp_path, said, MINUTE, retention="30m") as table:
        log.asked.clear()
        found = table.explain(b"k3", 7 * MINUTE)
        assert outcomes(found) == [*((n, "replaced") for n in range(703, 798, 5)), (798, "current")]
        assert log.asked == [(700, 800)]
        (reach,) = found.reach
        assert (reach.low_offset, reach.high_offset, reach.records) == (700, 799, 100)
        log.asked.clear()
        nothing = table.explain(b"k3", 25 * MINUTE)
        assert (nothing.contributions, log.asked) == ((), []), "nothing ever came for it: nothing is read"


def test_a_restart_and_a_reader_know_the_offsets_too(log: Any, tmp_path: Path) -> None:
    said = [window_record(b"k%d" % (n % 5), n // 100 * MINUTE, b"%d" % n) for n in range(500)]
    settings: dict[str, Any] = {"state": tmp_path / "state", "retention": "30m"}
    write_records(log, TOPIC, said)
    with windowed_table(log, TOPIC, ms(MINUTE), **settings) as table:
        told = table.explain(b"k1", 2 * MINUTE)
        with windowed_table(log, TOPIC, ms(MINUTE), read_only=True, **settings) as reader:
            assert reader.explain(b"k1", 2 * MINUTE) == told
    with windowed_table(log, TOPIC, ms(MINUTE), bootstrap=False, **settings) as table:
        log.asked.clear()
        assert table.explain(b"k1", 2 * MINUTE) == told
        assert log.asked == [(200, 300)]


def test_what_aged_out_is_said(log: Any, tmp_path: Path) -> None:
    records = [window_record(b"a", 0, b"1"), window_record(b"b", 0, b"2")]
    with opened(log, tmp_path, records) as table:
        log.partition(TOPIC, 0).delete_records_before(1)
        found = table.explain(b"a", 0)
        assert found.aged_out
        assert found.contributions == ()
        assert found.current is not None
        assert found.current.offset == 0
        assert "offset 0, which has aged out of the topic" in str(found)
        assert "offsets 0 to 0 may speak of it and have aged out" in str(found)
        assert outcomes(table.explain(b"b", 0)) == [(1, "current")]


def test_what_aged_out_before_the_window_was_spoken_of_does_not_matter(log: Any, tmp_path: Path) -> None:
    with opened(log, tmp_path, [window_record(b"a", 0, b"1")], MINUTE, retention="10m") as table:
        write_records(log, TOPIC, [window_record(b"a", 9 * MINUTE, b"2")])
        table.catch_up()
        log.partition(TOPIC, 0).delete_records_before(1)
        assert not table.explain(b"a", 9 * MINUTE).aged_out


def test_records_that_could_not_be_read_are_told_with_the_reason(log: Any, tmp_path: Path) -> None:
    said = [
        window_record(b"a", 0, (7).to_bytes(8, "big")),
        window_record(b"a", 0, b"no long"),
        window_record(b"b", 0, b"neither"),
    ]
    serdes = Consumed(Bytes(), Long(), on_value_error="keep")
    with opened(log, tmp_path, said, consumed=serdes) as table:
        found = table.explain(b"a", 0)
        assert outcomes(found) == [(0, "current"), (1, "unreadable")]
        assert found.value == 7
        assert found.contributions[1].reason is not None
        assert "7 bytes" in found.contributions[1].reason
        assert "offset 1" in str(found)


def test_a_merged_session_is_explained_by_its_own_record(log: Any, tmp_path: Path) -> None:
    said = [
        session_record(b"a", 0, 10, b"1"),
        session_record(b"a", 0, 10, None, 15),
        session_record(b"a", 0, 15, b"2"),
    ]
    write_records(log, "sessions", said)
    with sessioned_table(log, "sessions", state=tmp_path / "state") as table:
        assert outcomes(table.explain(b"a", 0, 15)) == [(2, "current")]
        gone = table.explain(b"a", 0, 10)
        assert gone.value is None
        assert outcomes(gone) == [(0, "replaced"), (1, "deletion")]


def test_of_a_plain_key_the_record_that_set_it_is_read_again(log: Any, tmp_path: Path) -> None:
    write_records(log, "plain", [Said(b"a", b"1"), Said(b"b", b"2"), Said(b"a", b"3"), Said(b"c", b"4")])
    with key_table(log, "plain", state=tmp_path / "state") as table:
        write_records(log, "plain", [Said(b"a", b"5")])
        log.asked.clear()
        found = table.explain(b"a")
        assert outcomes(found) == [(2, "current"), (4, "waiting")]
        assert log.asked == [(2, 3), (4, 5)]
        assert found.value == b"3"


def test_a_record_that_was_compacted_away_is_said_to_be_gone(log: Any, tmp_path: Path) -> None:
    from tidegate.tables.explain import Contribution, Explanation, Reach

    current = Contribution(0, 5, 1, "current", b"v")
    told = Explanation(b"a", None, b"v", False, (), (Reach(0, 2, 9, 9, 5, 5, 1),), current)
    assert "offset 5, which was compacted away" in str(told)
    assert not told.aged_out
