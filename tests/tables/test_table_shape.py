"""What a table may be: the four cases, and every check with its error, before anything is read or created."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from table_records import Said, session_record, window_record, windows_in, write_records
from tidegate.errors import InvalidError, TidegateWarning, WindowedKeyFormatError
from tidegate.log.log import Log
from tidegate.tables.factories import sessioned_table, table, windowed_table
from tidegate.tables.options import (
    DEFAULT_RETENTION_MS,
    Consumed,
    KeyValueSupplier,
    Materialized,
    SessionSupplier,
    WindowSupplier,
)
from tidegate.tables.serdes.base import Int, Long, String, windowed


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with Log(tmp_path / "log", durability="os") as opened:
        write_records(opened, "counts", [window_record(b"key", 50, b"\0" * 7 + b"\2", 60)])
        write_records(opened, "sessions", [session_record(b"key", 50, 100, b"\0" * 7 + b"\2")])
        write_records(opened, "plain", [Said(b"key", b"one"), Said(b"key", b"two"), Said(b"gone", None)])
        yield opened


SERDES = Consumed(String(), Long())
STORE = Materialized("mine")


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"consumed": SERDES, "materialized": STORE}, id="KIP-300-W1"),
        pytest.param({}, id="KIP-300-W2"),
        pytest.param({"consumed": SERDES}, id="KIP-300-W3"),
        pytest.param({"materialized": STORE}, id="KIP-300-W4"),
    ],
)
def test_each_form_of_windowed_table(log: Log, tmp_path: Path, given: dict[str, Any]) -> None:
    with windowed_table(log, "counts", "10ms", state=tmp_path / "state", **given) as opened:
        key, value = ("key", 2) if "consumed" in given else (b"key", b"\0" * 7 + b"\2")
        assert windows_in(opened) == {(key, 50, 60): (value, 60)}
        assert opened.name == ("mine" if "materialized" in given else "counts")
        assert opened.rules.shape.retention_ms == DEFAULT_RETENTION_MS


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"consumed": SERDES, "materialized": STORE}, id="KIP-300-S1"),
        pytest.param({}, id="KIP-300-S2"),
        pytest.param({"consumed": SERDES}, id="KIP-300-S3"),
        pytest.param({"materialized": STORE}, id="KIP-300-S4"),
    ],
)
def test_each_form_of_sessioned_table(log: Log, tmp_path: Path, given: dict[str, Any]) -> None:
    with sessioned_table(log, "sessions", state=tmp_path / "state", **given) as opened:
        key, value = ("key", 2) if "consumed" in given else (b"key", b"\0" * 7 + b"\2")
        assert windows_in(opened) == {(key, 50, 100): (value, 100)}


def test_case_1_a_plain_topic_becomes_a_table_of_keys(log: Log, tmp_path: Path) -> None:
    store = Materialized(store=KeyValueSupplier("last"))
    with table(
        log, "plain", state=tmp_path / "state", consumed=Consumed(String(), String()), materialized=store
    ) as opened:
        assert opened.get("key") == "two"
        assert opened.get("gone") is None
        assert [row.key for row in opened.all()] == ["key"]
        assert [row.key for row in opened.fetch_range("a", "j")] == []


def test_case_2_a_plain_topic_is_no_windowed_table(log: Log, tmp_path: Path) -> None:
    with pytest.raises(WindowedKeyFormatError, match=r"plain.*offset 0.*agg"):
        windowed_table(log, "plain", "10ms", state=tmp_path / "state")


def test_case_3_windows_in_a_key_value_store_are_refused(log: Log, tmp_path: Path) -> None:
    for open_it in (lambda m: windowed_table(log, "counts", "10ms", state=tmp_path / "s", materialized=m),
                    lambda m: sessioned_table(log, "sessions", state=tmp_path / "s", materialized=m)):  # fmt: skip
        with pytest.raises(TypeError, match="never expire"):
            open_it(Materialized(store=KeyValueSupplier("store")))
    assert not (tmp_path / "s").exists()


def test_case_3_table_with_a_windowed_serde_works_with_a_warning(log: Log, tmp_path: Path) -> None:
    serde = windowed(String(), size="10ms", key_format="changelog")
    with pytest.warns(TidegateWarning, match="without an end"):
        opened = table(
            log, "counts", state=tmp_path / "state", windowed_key=serde, consumed=Consumed(value=Long())
        )
    with opened:
        (row,) = opened.all()
        assert (row.key.key, row.key.window.end, row.value) == ("key", 60, 2)


def _windowed(**given: Any) -> Any:
    return lambda log, state: windowed_table(
        log, given.pop("topic", "counts"), **{"window_size": "10ms", "state": state} | given
    )


def _sessioned(**given: Any) -> Any:
    return lambda log, state: sessioned_table(log, "sessions", **{"state": state} | given)


@pytest.mark.parametrize(
    ("open_it", "error"),
    [
        pytest.param(
            lambda log, state: windowed_table(log, "counts", state=state), TypeError, id="size-missing"
        ),
        pytest.param(_windowed(window_size=None), TypeError, id="size-none"),
        pytest.param(_windowed(window_size=0), ValueError, id="WIN-7.7-04-size-0"),
        pytest.param(_windowed(window_size=-1), ValueError, id="size-negative"),
        pytest.param(_windowed(window_size=timedelta(microseconds=1500)), ValueError, id="size-below-a-ms"),
        pytest.param(_windowed(window_size=2**63), ValueError, id="size-above-64-bits"),
        pytest.param(_sessioned(window_size=10), TypeError, id="size-for-sessions"),
        pytest.param(
            _windowed(materialized=Materialized(store=SessionSupplier("s", "1d"))),
            TypeError,
            id="session-store-for-windows",
        ),
        pytest.param(
            _sessioned(materialized=Materialized(store=WindowSupplier("s", "1d", 10))),
            TypeError,
            id="window-store-for-sessions",
        ),
        pytest.param(
            _windowed(materialized=Materialized(store=KeyValueSupplier("s"))),
            TypeError,
            id="WIN-7.7-04-key-value-store",
        ),
        pytest.param(
            lambda log, state: _windowed(consumed=Consumed(windowed(String(), size="10ms")))(log, state),
            TypeError,
            id="wrapped-twice-consumed",
        ),
        pytest.param(
            lambda log, state: _windowed(materialized=Materialized(key=windowed(String())))(log, state),
            TypeError,
            id="wrapped-twice-materialized",
        ),
        pytest.param(
            _windowed(materialized=Materialized(store=WindowSupplier("s", "1d", 11))),
            ValueError,
            id="store-for-another-size",
        ),
        pytest.param(
            _windowed(materialized=Materialized(store=WindowSupplier("s", "1d", 10, retain_duplicates=True))),
            ValueError,
            id="WIN-7.7-04-store-of-duplicates",
        ),
        pytest.param(_windowed(retention=-1), ValueError, id="retention-negative"),
        pytest.param(_windowed(retention="9ms"), ValueError, id="retention-below-size"),
        pytest.param(
            _windowed(retention="1d", materialized=Materialized(retention="2d")),
            ValueError,
            id="retention-twice",
        ),
        pytest.param(_windowed(topic=""), ValueError, id="topic-empty"),
        pytest.param(_windowed(topic="a/b"), ValueError, id="topic-illegal"),
        pytest.param(_windowed(materialized=Materialized(".checkpoint")), ValueError, id="name-.checkpoint"),
        pytest.param(_windowed(key_format="avro"), ValueError, id="key-format"),
        pytest.param(_windowed(on_key_error="ignore"), ValueError, id="on-bad-key"),
        pytest.param(_windowed(consumed=String()), TypeError, id="consumed-is-a-serde"),
    ],
)
def test_what_cannot_be_a_table_is_refused_and_leaves_nothing_behind(
    log: Log, tmp_path: Path, open_it: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        open_it(log, tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_a_name_that_another_table_has_is_refused(log: Log, tmp_path: Path) -> None:
    with windowed_table(log, "counts", "10ms", state=tmp_path / "state", materialized=STORE):
        pass
    with pytest.raises(InvalidError, match="size_ms"):
        windowed_table(log, "counts", "20ms", state=tmp_path / "state", materialized=STORE)
    with windowed_table(log, "counts", "10ms", state=tmp_path / "state", materialized=STORE) as again:
        assert again.role == "builder"


@pytest.mark.parametrize(
    ("record", "settings"),
    [
        pytest.param(
            window_record(b"k", 50, b"v")._replace(key=b"k" + (50).to_bytes(8, "big") + b"\0\0\0\7"),
            {},
            id="sequence",
        ),
        pytest.param(
            Said(b"k" + (417 << 32 | 7).to_bytes(8, "big") + bytes(4), b"v"),
            {"key_format": "topic"},
            id="low-half-zero",
        ),
        pytest.param(
            Said(b"k" + (-5).to_bytes(8, "big", signed=True), b"v"),
            {"key_format": "topic"},
            id="negative-start",
        ),
        pytest.param(
            Said(b"k" + bytes(8) + (-1).to_bytes(4, "big", signed=True), b"v"), {}, id="negative-sequence"
        ),
        pytest.param(window_record(b"abc", 50, b"v"), {"consumed": Consumed(Int())}, id="inner-length"),
        pytest.param(
            window_record(b"abc", 55, b"v"),
            {"consumed": Consumed(advance=10)},
            id="not-a-multiple-of-advance",
        ),
        pytest.param(
            window_record(b"\xff\xfe", 50, b"v"), {"consumed": Consumed(String())}, id="key-is-no-text"
        ),
    ],
)
def test_strict_reading_refuses_keys_of_another_kind(
    log: Log, tmp_path: Path, record: Said, settings: dict[str, Any]
) -> None:
    write_records(log, "odd", [record])
    with pytest.raises(WindowedKeyFormatError, match="offset 0"):
        windowed_table(log, "odd", "10ms", state=tmp_path / "state", **settings)
    with windowed_table(
        log, "odd", "10ms", state=tmp_path / "state", on_key_error="keep", **settings
    ) as opened:
        assert len(opened.all()) == 0
        assert opened.counts.bad_keys == 1
        (letter,) = opened.dead_letters().to_pylist()
        assert (letter["partition"], letter["offset"], letter["key"]) == (0, 0, record.key)


@pytest.mark.parametrize("day", range(1, 130 * 365, 1777))
def test_topics_of_another_kind_of_window_are_refused_at_any_date(log: Log, tmp_path: Path, day: int) -> None:
    start = day * 86_400_000
    write_records(log, "windows", [window_record(b"customer-1", start, b"v")])
    write_records(log, "sessions", [session_record(b"customer-1", start, start + 9000, b"v")])
    with pytest.raises(WindowedKeyFormatError, match="offset 0"):
        sessioned_table(log, "windows", state=tmp_path / "a")
    for key_format in ("changelog", "topic"):
        with pytest.raises(WindowedKeyFormatError, match="offset 0"):
            windowed_table(log, "sessions", "1m", key_format=key_format, state=tmp_path / key_format)
    with pytest.raises(WindowedKeyFormatError, match="offset 0"):
        windowed_table(log, "windows", "1m", key_format="topic", state=tmp_path / "b")
    with windowed_table(log, "windows", "1m", state=tmp_path / "c") as table:
        assert len(table.all()) == 1
    with sessioned_table(log, "sessions", state=tmp_path / "d") as table:
        assert len(table.all()) == 1


@pytest.mark.parametrize(
    ("call", "now"),
    [
        (lambda *_: Consumed(on_fault="stop"), r"Consumed\(…, on_fault='stop'\).*on_error='fail'"),
        (lambda *_: Consumed(on_bad_value="skip"), r"on_bad_value='skip'\).*on_value_error='keep'"),
        (_windowed(on_bad_key="skip"), r"on_bad_key='skip'\).*on_key_error='keep'"),
    ],
    ids=["on_fault", "on_bad_value", "on_bad_key"],
)
def test_old_names_are_refused_with_the_new_one(log: Log, tmp_path: Path, call: Any, now: str) -> None:
    with pytest.raises(InvalidError, match=now):
        call(log, tmp_path / "state")
    assert not (tmp_path / "state").exists()
