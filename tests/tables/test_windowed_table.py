"""What a windowed table does with its records, and what it answers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from table_records import Said, session_record, window_record, windows_in, write_records
from tidegate.clock import ManualClock
from tidegate.errors import (
    CorruptError,
    InvalidError,
    OffsetOutOfRangeError,
    OverloadError,
    TidegateWarning,
    UnavailableError,
    WindowedKeyFormatError,
)
from tidegate.log.log import Log
from tidegate.storage import StorageConfig
from tidegate.tables.factories import WindowedTable, sessioned_table, windowed_table
from tidegate.tables.options import Consumed
from tidegate.tables.serdes.base import Int, Long, String
from tidegate.tables.serdes.json import Json
from tidegate.windows.keys import KeyFormat, SessionWindow, TimeWindow
from window_oracles import ms

MINUTE = 60_000


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with Log(tmp_path / "log", durability="os", clock=ManualClock()) as opened:
        yield opened


def opened(log: Log, tmp_path: Path, records: list[Said], size: int = 10, **settings: Any) -> WindowedTable:
    write_records(log, "windows-changelog", records)
    return windowed_table(log, "windows-changelog", ms(size), state=tmp_path / "state", **settings)


# -- records -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "read"), [(KeyFormat.CHANGELOG, "topic"), (KeyFormat.TOPIC, "changelog")]
)
def test_WIN_7_7_02_the_other_key_format_is_an_error_and_never_silent_rows(
    log: Log, tmp_path: Path, written: KeyFormat, read: Any
) -> None:
    """WIN-7.7-02"""
    record = window_record(b"user-1", 1_700_000_040_000, b"v", key_format=written)
    with pytest.raises(WindowedKeyFormatError, match=r"partition 0 offset 0.*format"):
        opened(log, tmp_path, [record], MINUTE, key_format=read)


def test_WIN_7_7_03_a_tombstone_deletes_and_tells_the_old_value(log: Log, tmp_path: Path) -> None:
    """WIN-7.7-03"""
    with opened(log, tmp_path, [window_record(b"a", 0, b"one")]) as table, table.changes() as changes:
        write_records(log, "windows-changelog", [window_record(b"a", 0, None, 7)])
        table.catch_up()
        (change,) = changes.take()
        assert (change.key, change.window, change.new, change.old) == (b"a", TimeWindow(0, 10), None, b"one")
        assert table.get(b"a", 0) is None
        assert len(table.all()) == 0
        assert table.counts.deleted == 1


def test_WIN_7_7_03_deleting_an_unknown_window_is_nothing(log: Log, tmp_path: Path) -> None:
    """WIN-7.7-03"""
    with opened(log, tmp_path, [window_record(b"a", 0, b"one")]) as table, table.changes() as changes:
        write_records(log, "windows-changelog", [window_record(b"a", 10, None), window_record(b"z", 0, None)])
        table.catch_up()
        assert changes.take() == []
        assert windows_in(table) == {(b"a", 0, 10): (b"one", 0)}


def test_WIN_7_7_03_a_null_key_is_skipped_and_counted(log: Log, tmp_path: Path) -> None:
    """WIN-7.7-03"""
    with opened(log, tmp_path, [Said(None, b"lost"), window_record(b"a", 0, b"one")]) as table:
        assert len(table.all()) == 1
        assert table.counts.null_keys == 1
        assert table.counts.applied == 1
        sample = log.metrics.counter(
            "tidegate_table_records_total", "records of tables by outcome", ("table", "outcome")
        )
        assert sample.value(table="windows-changelog", outcome="null_keys") == 1


def test_WIN_7_7_03_a_key_of_seven_bytes_is_no_windowed_key(log: Log, tmp_path: Path) -> None:
    """WIN-7.7-03"""
    with pytest.raises(WindowedKeyFormatError, match=r"offset 1.*7 bytes.*too short"):
        opened(log, tmp_path, [window_record(b"a", 0, b"one"), Said(b"1234567", b"x")])


def test_WIN_7_7_05_a_window_older_than_the_retention_is_neither_stored_nor_told(
    log: Log, tmp_path: Path
) -> None:
    """WIN-7.7-05: R = 2 minutes, so I = 1 minute; at 5:00 all before 3:00 is gone."""
    first = [window_record(b"a", 5 * MINUTE, b"new")]
    with opened(log, tmp_path, first, MINUTE, retention="2m") as table, table.changes() as changes:
        late = [window_record(b"a", 2 * MINUTE, b"old"), window_record(b"b", 3 * MINUTE, b"edge")]
        write_records(log, "windows-changelog", [*late, window_record(b"b", 4 * MINUTE, b"in time")])
        table.catch_up()
        assert table.counts.expired == 1
        assert [(each.key, each.window.start) for each in changes.take() if each.window] == [
            (b"b", 3 * MINUTE),
            (b"b", 4 * MINUTE),
        ]
        # 3:00 lies in a live time segment, but before 5:00 - 2:00 + 1 ms: stored, and not answered.
        assert sorted(start for _, start, _ in windows_in(table)) == [4 * MINUTE, 5 * MINUTE]


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_what_expires_does_not_depend_on_how_the_topic_is_cut(log: Log, tmp_path: Path, cut: int) -> None:
    starts = [0, 1, 9, 3, 12, 4, 11, 20, 10, 17, 2, 18, 30, 20]
    records = [window_record(b"k%d" % (n % 3), start * MINUTE, b"%d" % n) for n, start in enumerate(starts)]
    with opened(log, tmp_path, records[:1], MINUTE, retention="5m") as table:
        for at in range(1, len(records), cut):
            write_records(log, "windows-changelog", records[at : at + cut])
            table.catch_up()
        counts = table.counts
        observed, expired = -1, 0
        stored = {}
        for record, start in zip(records, starts, strict=True):
            observed = max(observed, start * MINUTE)
            width = 150_000
            if start * MINUTE // width < max(0, observed - 5 * MINUTE) // width:
                expired += 1
            else:
                stored[record.key[:2], start * MINUTE] = record.value  # type: ignore[index]
        assert counts.expired == expired > 0
        readable = {key: value for key, value in stored.items() if key[1] > observed - 5 * MINUTE}
        assert {(key, start): value for (key, start, _), (value, _) in windows_in(table).items()} == readable


def test_the_later_offset_wins_whatever_the_timestamps_say(
    log: Log, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [window_record(b"a", 0, b"%d" % n, 100 - n) for n in range(20)]
    with caplog.at_level(logging.WARNING), opened(log, tmp_path, records) as table:
        write_records(log, "windows-changelog", [window_record(b"a", 0, b"last", 1)])
        table.catch_up()
        assert windows_in(table) == {(b"a", 0, 10): (b"last", 1)}
        told = [each for each in caplog.records if "replaces a value" in each.getMessage()]
        assert len(told) == 1, "once a minute for each partition"


def test_an_older_update_of_another_window_is_nothing_to_tell(
    log: Log, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        opened(log, tmp_path, [window_record(b"a", 10, b"x", 15), window_record(b"a", 0, b"y", 5)]).close()
    assert not [each for each in caplog.records if "replaces a value" in each.getMessage()]


def test_bad_values_stop_the_table_or_become_dead_letters(log: Log, tmp_path: Path) -> None:
    good, bad = window_record(b"a", 0, b"\0" * 8), window_record(b"b", 0, b"short")
    with pytest.raises(CorruptError, match=r"offset 1.*5 bytes") as caught:
        opened(log, tmp_path, [good, bad], consumed=Consumed(String(), Long()))
    assert caught.value.offset == 1
    skipping = Consumed(String(), Long(), on_value_error="keep")
    for _ in range(2):  # they are kept across a restart
        with windowed_table(
            log, "windows-changelog", "10ms", state=tmp_path / "state", consumed=skipping
        ) as table:
            assert windows_in(table) == {("a", 0, 10): (0, 0)}
            assert table.counts.bad_values == 1
            (letter,) = table.dead_letters().to_pylist()
            assert (letter["offset"], letter["value"]) == (1, b"short")
            assert "5 bytes" in letter["reason"]


def test_json_values_become_columns(log: Log, tmp_path: Path) -> None:
    records = [window_record(b"a", 0, b'{"n":1,"who":"x"}'), window_record(b"a", 10, b'{"n":2,"who":null}')]
    serdes = Consumed(String(), Json(n="int64", who="string"))
    with opened(log, tmp_path, records, consumed=serdes) as table:
        found = table.fetch("a")
        assert [row.value for row in found] == [{"n": 1, "who": "x"}, {"n": 2, "who": None}]
        assert found.to_arrow().column("value").type == pa.struct([("n", pa.int64()), ("who", pa.string())])


# -- queries -------------------------------------------------------------------------------------


@pytest.fixture
def table(log: Log, tmp_path: Path) -> Any:
    records = [
        window_record(key.encode(), start, value.to_bytes(8, "big"))
        for value, (key, start) in enumerate(
            (key, start) for start in (0, 10, 20, 30) for key in ("a", "aa", "b")
        )
    ]
    with opened(log, tmp_path, records, consumed=Consumed(String(), Long())) as found:
        yield found


def starts(rows: Any) -> list[tuple[Any, int]]:
    return [(row.key, row.window.start) for row in rows]


def test_queries_have_inclusive_bounds_and_both_directions(table: WindowedTable) -> None:
    assert starts(table.fetch("a", 10, 20)) == [("a", 10), ("a", 20)]
    assert starts(table.fetch("a", -5)) == [("a", 0), ("a", 10), ("a", 20), ("a", 30)]
    assert starts(table.backward_fetch("a", 10)) == [("a", 30), ("a", 20), ("a", 10)]
    assert starts(table.fetch("a", 21, 29)) == []
    assert starts(table.fetch_range("a", "aa", 30, 40)) == [("a", 30), ("aa", 30)]
    assert starts(table.fetch_range(None, "a", 0, 0)) == [("a", 0)]
    assert starts(table.fetch_range("b", None, 0, 10)) == [("b", 0), ("b", 10)]
    assert starts(table.fetch_all(5, 15)) == [("a", 10), ("aa", 10), ("b", 10)]
    assert starts(table.backward_fetch_all(5, 15)) == [("b", 10), ("aa", 10), ("a", 10)]
    assert len(table.all()) == 12
    assert starts(table.backward_all()) == starts(table.all())[::-1]
    assert starts(table.fetch_many(["b", "a", "none"], 0, 0)) == [("a", 0), ("b", 0)]
    assert table.get("aa", 20) == 7
    assert table.get("aa", 21) is None
    assert table.get("none", 0) is None
    with pytest.raises(TypeError, match="None"):
        table.get(None, 0)


def test_a_range_that_is_turned_round_is_empty_with_a_warning(log: Log, tmp_path: Path) -> None:
    record = window_record((4).to_bytes(4, "big"), 0, b"v")
    with opened(log, tmp_path, [record], consumed=Consumed(Int())) as table:
        with pytest.warns(TidegateWarning, match="larger"):
            assert len(table.fetch_range(-1, 5)) == 0
        assert len(table.fetch_range(1, 5)) == 1


def test_answers_are_python_values_arrow_and_pandas(table: WindowedTable) -> None:
    rows = table.fetch("b")
    assert (rows[0].key, rows[0].window, rows[0].value, rows[0].timestamp) == ("b", TimeWindow(0, 10), 2, 0)
    assert rows[-1].value == 11
    assert [row.value for row in rows[1:3]] == [5, 8]
    arrow = rows.to_arrow()
    assert arrow.column_names == [
        "key", "window_start", "window_end", "value", "timestamp", "partition", "offset",
    ]  # fmt: skip
    assert arrow.column("value").to_pylist() == [2, 5, 8, 11]
    assert rows.to_pandas()["window_end"].tolist() == [10, 20, 30, 40]
    assert rows.to_polars()["value"].to_list() == [2, 5, 8, 11]
    assert table.to_arrow().equals(table.all().to_arrow())
    assert (len(table.to_pandas()), len(table.to_polars())) == (12, 12)
    assert sum(batch.num_rows for batch in table.batches(batch_rows=5)) == 12
    with pytest.raises(IndexError):
        rows[4]


def test_sql_and_parquet_have_the_same_rows(table: WindowedTable, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    found = table.sql(
        "SELECT key, sum(value) AS total, max(window_end) AS last FROM rows GROUP BY key ORDER BY key"
    )
    assert found.to_pylist() == [
        {"key": "a", "total": 0 + 3 + 6 + 9, "last": 40},
        {"key": "aa", "total": 1 + 4 + 7 + 10, "last": 40},
        {"key": "b", "total": 2 + 5 + 8 + 11, "last": 40},
    ]
    with pytest.raises(InvalidError, match=r"(?s)cannot be answered.*called `rows`"):
        table.sql("SELECT nothing FROM nowhere")
    secret = tmp_path / "secret.csv"
    secret.write_text("a,b")
    with pytest.raises(InvalidError, match="disabled"):
        table.sql(f"SELECT * FROM read_csv('{secret}')")
    assert table.export(tmp_path / "rows.parquet") == 12
    assert sorted(pq.read_table(tmp_path / "rows.parquet")["value"].to_pylist()) == list(range(12))
    assert not list(tmp_path.glob("*.tmp"))


def test_sessions_are_found_by_the_moments_they_touch(log: Log, tmp_path: Path) -> None:
    bounds = [(0, 100), (101, 200), (201, 300), (301, 400), (401, 500)]
    write_records(log, "sessions", [session_record(b"a", start, end, b"%d" % end) for start, end in bounds])
    with sessioned_table(log, "sessions", state=tmp_path / "state") as table:
        assert [row.window for row in table.fetch(b"a", 150, 300)] == [
            SessionWindow(101, 200),
            SessionWindow(201, 300),
        ]
        assert [row.window.end for row in table.backward_fetch(b"a", 150, 300) if row.window] == [300, 200]
        assert table.get(b"a", 301, 400) == b"400"
        assert table.get(b"a", 300, 400) is None
        assert len(table.find_sessions(b"a")) == 5
        assert len(table.fetch_all(0, 0)) == 1


def test_a_table_shows_a_few_rows_and_escapes_them(log: Log, tmp_path: Path) -> None:
    records = [window_record(b"<script>%03d" % n, 0, b"<b>&") for n in range(500)]
    with opened(log, tmp_path, records, consumed=Consumed(String(), String())) as table:
        shown = table._repr_html_()
        assert "<script>" not in shown
        assert "&lt;script&gt;" in shown
        assert shown.count("<tr>") <= 12 and "the first 10 rows" in shown
        assert "… 490 more rows" in table.all()._repr_html_()


def test_keys_of_several_partitions_are_one_table(log: Log, tmp_path: Path) -> None:
    log.create_topic("wide", 3)
    for partition in range(3):
        write_records(log, "wide", [window_record(b"p%d" % partition, 0, b"v")], partition=partition)
    with windowed_table(log, "wide", "10ms", state=tmp_path / "state") as table:
        assert [(row.key, row.partition) for row in table.all()] == [(b"p0", 0), (b"p1", 1), (b"p2", 2)]
        assert table.position == {0: 1, 1: 1, 2: 1}


# -- positions -----------------------------------------------------------------------------------


def test_a_query_waits_for_the_position_it_asks_for(log: Log, tmp_path: Path) -> None:
    with opened(log, tmp_path, [window_record(b"a", 0, b"one")]) as table:
        write_records(log, "windows-changelog", [window_record(b"a", 0, b"two")])
        assert table.lag == 1
        assert table.get(b"a", 0) == b"one"
        assert table.get(b"a", 0, at_least={0: 2}) == b"two"
        with pytest.raises(UnavailableError, match="not yet"):
            table.get(b"a", 0, at_least={0: 3}, timeout="50ms")


def test_records_that_aged_out_are_told_or_refused(log: Log, tmp_path: Path) -> None:
    records = [window_record(b"a", n * 10, b"%d" % n) for n in range(4)]
    opened(log, tmp_path, records[:1]).close()
    write_records(log, "windows-changelog", records[1:])
    log.partition("windows-changelog", 0).delete_records_before(3)
    with pytest.raises(OffsetOutOfRangeError):
        windowed_table(
            log, "windows-changelog", "10ms", state=tmp_path / "state", consumed=Consumed(on_gap="fail")
        )
    with pytest.warns(TidegateWarning, match="2 offsets"):
        table = windowed_table(log, "windows-changelog", "10ms", state=tmp_path / "state")
    with table:
        assert [value for value, _ in windows_in(table).values()] == [b"0", b"3"]
        assert table.counts.skipped_offsets == 2


def test_a_topic_that_was_made_anew_is_refused(log: Log, tmp_path: Path) -> None:
    opened(log, tmp_path, [window_record(b"a", n, b"v") for n in range(5)]).close()
    log.delete_topic("windows-changelog")
    write_records(log, "windows-changelog", [window_record(b"a", 0, b"v")])
    with pytest.raises(InvalidError, match="deleted and created again"):
        windowed_table(log, "windows-changelog", "10ms", state=tmp_path / "state")


def test_a_closed_table_says_so(log: Log, tmp_path: Path) -> None:
    table = opened(log, tmp_path, [window_record(b"a", 0, b"one")])
    table.close()
    table.close()
    with pytest.raises(InvalidError, match="closed"):
        table.all()


# -- what is kept, and by whom it is dropped ------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_dead_letters_are_kept_up_to_their_bytes_and_counted_beyond(
    log: Log, tmp_path: Path, cut: int
) -> None:
    records = [window_record(b"k%02d" % n, 0, b"x" * (n % 5 + 1)) for n in range(40)]
    log.create_topic("windows-changelog")
    serdes = Consumed(String(), Long(), on_value_error="keep", dead_letter_bytes=1500)
    sizes = {}
    for at in range(0, len(records), cut):
        write_records(log, "windows-changelog", records[at : at + cut])
        with windowed_table(
            log, "windows-changelog", "10ms", state=tmp_path / "state", consumed=serdes
        ) as table:
            letters = table.dead_letters()
            counts = table.counts
            sizes = {row["offset"]: row for row in letters.to_pylist()}
    assert counts.bad_values == 40
    assert counts.letters_not_kept == 40 - len(sizes) > 0
    assert sorted(sizes) == list(range(len(sizes))), "the first ones are kept, however the topic was cut"
    taken = sum(64 + sum(len(row[name]) for name in ("reason", "key", "value")) for row in sizes.values())
    assert 1500 - 200 < taken <= 1500


def test_a_table_drops_time_segments_by_the_rule_of_all_stores(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drainer's put enters time segments as a store's does, and that is what cleans up; opening does it too."""
    import sys

    from tidegate.windows.stores.segments import TimeSegments

    callers: list[list[str]] = []
    really = TimeSegments.cleanup_expired_segments

    def noted(self: TimeSegments, observed_time: int) -> list[int]:
        frame, chain = sys._getframe(1), []
        while frame is not None and len(chain) < 3:
            chain.append(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        callers.append(chain)
        return really(self, observed_time)

    monkeypatch.setattr(TimeSegments, "cleanup_expired_segments", noted)
    first = [window_record(b"a", n * MINUTE, b"x") for n in range(6)]
    with opened(log, tmp_path, first, MINUTE, retention="4m") as table:
        assert callers[0][0] == "open_existing"
        assert {tuple(chain) for chain in callers[1:]} == {
            ("get_or_create_segment_if_live", "enter_segments", "_insert")
        }
        assert table._builder is not None
        (state,) = table._builder.source.partitions
        callers.clear()
        assert len(table.all()) == 4
        table.get(b"a", 0)
        table.commit()
        assert callers == [], "reads and commits drop nothing"
        write_records(log, "windows-changelog", [window_record(b"a", 20 * MINUTE, b"y")])
        table.catch_up()
        assert state.index.all_buckets() == [20 * MINUTE], "older time segments are given back"


def test_records_after_a_pause_make_room_for_themselves(log: Log, tmp_path: Path) -> None:
    """A backlog that is full of windows which the next records make old does not stop the table."""
    from tidegate.storage import StorageConfig

    small = StorageConfig.for_tests(backlog_limit_bytes=30_000, backlog_timeout_ms=0, retained_checkpoints=12)
    first = [window_record(b"a", n * MINUTE, b"x" * 5_000) for n in range(4)]
    with opened(log, tmp_path, first, MINUTE, retention="4m", storage=small) as table:
        later = [window_record(b"a", (60 + n) * MINUTE, b"y" * 5_000) for n in range(4)]
        write_records(log, "windows-changelog", later)
        table.catch_up()
        assert [row.window.start for row in table.all()] == [(60 + n) * MINUTE for n in range(4)]
        assert table.counts.expired == 0


def test_bounds_are_taken_as_people_write_them(log: Log, tmp_path: Path) -> None:
    from datetime import UTC, datetime, timedelta, timezone

    start = 1_767_225_600_000  # 2026-01-01T00:00Z
    records = [window_record(b"a", start + n * MINUTE, b"%d" % n) for n in range(5)]
    with opened(log, tmp_path, records, MINUTE) as table:
        moments: list[Any] = [
            start + MINUTE,
            "2026-01-01T00:01Z",
            "2026-01-01T00:01",
            datetime(2026, 1, 1, 0, 1, tzinfo=UTC),
            datetime(2026, 1, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))),
        ]
        for moment in moments:
            assert table.get(b"a", moment) == b"1"
            assert [row.value for row in table.fetch(b"a", moment, "2026-01-01T00:02Z")] == [b"1", b"2"]
            assert [row.value for row in table.fetch_all(0, moment, backward=True)] == [b"1", b"0"]
            assert table.explain(b"a", moment).value == b"1"
        with pytest.raises(InvalidError, match="is not a moment"):
            table.fetch(b"a", "yesterday")
        with pytest.raises(TypeError):
            table.fetch(b"a", backwards=True)  # type: ignore[call-arg]
        assert [row.value for row in table.backward_fetch_range(b"a", b"a", start, start + MINUTE)] == [
            b"1",
            b"0",
        ]


# -- what must be kept is more than may be --------------------------------------------------------


def test_windows_that_do_not_fit_the_backlog_are_told_at_once(log: Log, tmp_path: Path) -> None:
    """The drainer is the only one who could make room, and it waits: no minute passes before the answer."""
    records = [window_record(b"k%0200d" % n, n * MINUTE, b"v" * 200) for n in range(300)]
    storage = StorageConfig(retained_checkpoints=12, backlog_limit_bytes=64 << 10, max_batch_bytes=16 << 10)
    with (
        opened(log, tmp_path, records[:1], MINUTE, retention="1d", storage=storage) as table,
        pytest.raises(OverloadError, match="shorten the retention") as raised,
    ):
        for at in range(1, len(records), 20):
            write_records(log, "windows-changelog", records[at : at + 20])
            table.catch_up()
    assert raised.value.reason == "retention_exceeds_backlog"
    write_records(log, "windows-changelog", records[at + 20 :])
    with opened(log, tmp_path, [], MINUTE, retention="1d") as table:
        assert len(table.all()) == 300, "with more room it goes on where it stopped"


def test_updates_of_few_windows_fit_a_small_backlog(log: Log, tmp_path: Path) -> None:
    """Overwritten rows are merged away when there is no room, and are no reason to stop."""
    records = [window_record(b"k%d" % (n % 20), 0, b"%0400d" % n) for n in range(2000)]
    storage = StorageConfig(retained_checkpoints=12, backlog_limit_bytes=256 << 10, max_batch_bytes=16 << 10)
    with opened(log, tmp_path, records[:100], MINUTE, retention="1d", storage=storage) as table:
        for at in range(100, len(records), 100):
            write_records(log, "windows-changelog", records[at : at + 100])
            table.catch_up()
        assert sorted(int(value) for value, _ in windows_in(table).values()) == list(range(1980, 2000))
