"""What errors of tables, of errors' classes, the page and the doctor tell people to do is typed as it is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from push_kit import damage, push_here, rows

import tidegate as tg
from remedies import keyword, typed, written
from tidegate.cli.main import run as cli
from tidegate.errors import CorruptError, IntegrityError, InternalError, OffsetOutOfRangeError
from tidegate.integrity.fault_injection import DamageKind
from tidegate.tables.versions.catalog import PushFailedError
from tidegate.tables.versions.reader import versioned_table
from tidegate.web.failures import failure_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands are typed in: without more they mean ./data/log and ./data/state."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def failed_push() -> PushFailedError:
    """A push of which a record is lost on its way."""

    def strike(step: str) -> None:
        if step == "ended":
            damage(Path("data/log"), "users_v1", DamageKind.DROP, Path("copy"), partition=1)

    with pytest.raises(PushFailedError) as told:
        push_here(Path("data"), rows(100), watch=strike)
    return told.value


def test_a_push_that_failed_is_looked_into_and_sent_again() -> None:
    told = failed_push()
    assert "missing" in typed(told, "tables.versions.catalog.look_closer: verify", expect=1)
    shown = typed(told, "tables.versions.catalog.look_closer: consume")
    assert told.report.version.faults[0].offset in [
        json.loads(line)["offset"] for line in shown.splitlines() if line[0] == "{"
    ]
    assert push_here(Path("data"), rows(100)).is_current
    with versioned_table("users", state="data/state") as table:
        assert len(list(table.all())) == 100


def test_a_version_that_failed_is_not_served_and_the_one_that_is_current_is() -> None:
    failed_push()
    push_here(Path("data"), rows(100))
    with tg.Log("data/log") as log:
        log.create_topic("live", 2)
    with pytest.raises(tg.InvalidError) as told:
        tg.hybrid_table("data/log", "users_v1", live="live", rewind="1h", state="data/state")
    shown = typed(told.value, "tables.hybrid.status.served_version: table info")
    assert "users_v2" in shown or '"current": 2' in shown
    tg.hybrid_table("data/log", "users", live="live", rewind="1h", state="data/state").close()


def test_a_version_that_nobody_shows_yet_is_found_and_swapped_in() -> None:
    push_here(Path("data"), rows(10), swap=False)
    with pytest.raises(tg.UnavailableError) as told:
        versioned_table("users", state="data/state")
    listed = typed(told.value, "tables.versions.reader.VersionCommits._wanted: table versions")
    assert "ready" in listed
    assert cli(["table", "swap", "users", "1"]) == 0
    with versioned_table("users", state="data/state") as table:
        assert len(list(table.all())) == 10


# -- what helps against any error of a class -----------------------------------------------------


def integrity_topic() -> None:
    with tg.Log("data/log") as log:
        log.create_topic("orders", 1, {"retention.ms": "600000"})
        with log.writer("orders", integrity=True, batch_records=5) as writer:
            writer.write(pa.table({"key": ["k"] * 20, "value": [b"v"] * 20}))


def test_an_offset_that_is_gone_is_explained_by_its_lifetime() -> None:
    integrity_topic()
    with tg.Log("data/log") as log:
        log.partition("orders", 0).delete_records_before(8)
        with pytest.raises(OffsetOutOfRangeError) as told:
            log.reader("orders", start={0: 2})
        assert log.reader("orders", start={0: told.value.first}).read_all().num_rows > 0
    shown = typed(told.value.remedy, "errors.OffsetOutOfRangeError.remedy: log lifetime", TOPIC="orders")
    assert "retention" in shown


def flip() -> Path:
    segment = Path("data/log/orders-0/00000000000000000000.log")
    content = bytearray(segment.read_bytes())
    content[len(content) - 5] ^= 4
    segment.write_bytes(content)
    return segment


def test_stored_bytes_that_are_wrong_are_named_by_the_audit() -> None:
    integrity_topic()
    sound = Path("data/log/orders-0/00000000000000000000.log").read_bytes()
    segment = flip()
    with tg.Log("data/log", read_only=True) as log, pytest.raises(CorruptError) as told:
        log.reader("orders").read_all()
    assert segment.name in typed(told.value.remedy, "errors.CorruptError.remedy: verify", expect=1)
    status, failure = failure_of(CorruptError("a batch does not match its CRC"))
    assert status == 422
    assert segment.name in typed(failure.remedy, "web.failures._KINDS: verify", expect=1)
    segment.write_bytes(sound)
    typed(told.value.remedy, "errors.CorruptError.remedy: verify")
    with tg.Log("data/log", read_only=True) as log:
        assert log.reader("orders").read_all().num_rows == 20


def test_a_broken_stream_of_a_producer_is_shown_by_the_audit() -> None:
    with tg.Log("whole") as log:
        log.create_topic("orders", 1)
        with log.writer("orders", integrity=True) as writer:
            writer.write(pa.table({"key": ["k"] * 20, "value": [b"v"] * 20}))
    assert (
        cli(["break", "orders", "--log", "whole", "--kind", "drop", "--offset", "6", "--into", "data/log"])
        == 0
    )
    found = typed(IntegrityError.remedy, "errors.IntegrityError.remedy: verify", expect=1, TOPIC="orders")
    assert "missing" in found
    told = failure_of(IntegrityError("records are missing"))[1]
    assert "missing" in typed(told.remedy, "web.failures._KINDS: verify", expect=1)


def test_what_the_doctor_prints_is_printed() -> None:
    assert "python" in typed(InternalError.remedy, "errors.InternalError.remedy: doctor")


# -- Python that a table's errors name -----------------------------------------------------------


DAYS = tg.Tumbling("1d", retention="30d")
STRINGS = tg.Consumed(tg.String(), tg.String())


def counts(kind: Any = DAYS, topic: str = "counts") -> None:
    """An app counts five orders into a topic."""
    with tg.Log("data/log") as log:
        log.create_topic("orders", if_not_exists=True)
        rows = {"key": ["k"] * 5, "value": ['{"amount":1.0}'] * 5, "timestamp": [1_767_261_600_000] * 5}
        log.writer("orders").write(pa.table(rows))
    app = tg.App(topic, data="./data")
    stream = app.stream("orders", value=tg.Json(amount="double"))
    (stream if kind is None else stream.window(kind).agg(n=tg.count())).to_topic(topic)
    app.run("local", until="caught_up")


def refused(make: Callable[[], Any]) -> str:
    with pytest.raises(tg.TidegateError) as told:
        make().close()
    return str(told.value)


def test_windows_are_read_with_the_size_that_they_have() -> None:
    counts()
    told = refused(lambda: tg.windowed_table("data/log", "counts", "1h", state="s"))
    size = keyword(told, "window_size='1d'")
    consumed = tg.Consumed(value=tg.Long())
    with tg.windowed_table("data/log", "counts", state="s", consumed=consumed, **size) as table:
        assert [row.value for row in table.all()] == [5]


KINDS: dict[str, tuple[Any, Callable[[], Any], str, str]] = {
    "sessions": (
        tg.Session("1m", retention="30d"),
        lambda: tg.windowed_table("data/log", "counts", "1h", state="s"),
        "sessioned_table('counts', …)",
        "state='s'",
    ),
    "windows": (
        DAYS,
        lambda: tg.sessioned_table("data/log", "counts", state="s"),
        "windowed_table('counts', …)",
        "window_size='1d', state='s'",
    ),
    "plain records": (
        None,
        lambda: tg.windowed_table("data/log", "counts", "1h", state="s"),
        "table('counts', …)",
        "state='s'",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_topic_is_read_as_what_it_holds(kind: str) -> None:
    made, wrong, code, rest = KINDS[kind]
    counts(made)
    told = refused(wrong)
    with written(told, code, **{"'counts'": "'data/log', 'counts'", "…": rest}) as table:
        assert len(list(table.all())) == 1


def test_records_that_aged_out_before_they_were_read_are_passed() -> None:
    def opened(**given: Any) -> Any:
        return tg.table(
            "data/log", "users", state="s", consumed=tg.Consumed(tg.String(), tg.String(), **given)
        )

    def users(first: int) -> None:
        with tg.Log("data/log") as log:
            log.create_topic("users", if_not_exists=True)
            keys = [f"u{number}" for number in range(first, first + 5)]
            log.writer("users").write(pa.table({"key": keys, "value": keys}))

    users(0)
    with opened(on_gap="fail") as table:
        table.catch_up()
    users(5)
    with tg.Log("data/log") as log:
        log.partition("users", 0).delete_records_before(8)

    def caught_up(**given: Any) -> list[str]:
        with opened(**given) as table:
            table.catch_up()
            return sorted(row.key for row in table.all())

    with pytest.raises(OffsetOutOfRangeError) as told:
        caught_up(on_gap="fail")
    with pytest.warns(tg.errors.TidegateWarning, match="aged out before they were read"):
        assert caught_up(**keyword(str(told.value), "on_gap='earliest'")) == [
            "u0",
            "u1",
            "u2",
            "u3",
            "u4",
            "u8",
            "u9",
        ]


@pytest.mark.parametrize("what", ["key", "value"])
def test_records_that_cannot_be_read_are_set_aside(what: str) -> None:
    with tg.Log("data/log") as log:
        log.create_topic("users")
        bad = (
            {"key": [b"\xff", b"u1"], "value": [b"v", b"v1"]}
            if what == "key"
            else {"key": [b"u0", b"u1"], "value": [b"\xff", b"v1"]}
        )
        log.writer("users").write(pa.table(bad))

    def rows_of(consumed: Any = STRINGS, **given: Any) -> list[str]:
        with tg.table("data/log", "users", state="s", consumed=consumed, **given) as table:
            table.catch_up()
            return [row.key for row in table.all()]

    with pytest.raises(tg.TidegateError) as told:
        rows_of()
    if what == "key":
        assert rows_of(**keyword(str(told.value), "on_key_error='keep'")) == ["u1"]
    else:
        code = "Consumed(…, on_value_error='keep')"
        assert rows_of(written(str(told.value), code, **{"…": "String(), String()"})) == ["u1"]
