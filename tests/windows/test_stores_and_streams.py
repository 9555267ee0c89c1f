"""The stores beside the real Kafka Streams' own, as recorded: same puts, same rows, drops, time segments, changelog."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from streams_fixtures import NAMES, Recorded, load_fixture

from tidegate.windows.keys import LENIENT, KeyFormat, decode_key
from tidegate.windows.stores.segments import Compat
from tidegate.windows.stores.session_store import SessionStore
from tidegate.windows.stores.value_store import TimestampedValue
from tidegate.windows.stores.window_store import WindowStore
from workers import TASK, Worker

Row = tuple[bytes, int, bytes, int | None]


class Opened:
    """A store like the recorded one, and what its changelog was told."""

    def __init__(self, recorded: Recorded) -> None:
        about = recorded.about
        self.recorded = recorded
        self.log: list[tuple[bytes, bytes | None, int]] = []
        grace = int(about.get("grace", 0))
        least = {"session": about.get("gap"), "sliding": 2 * about.get("difference", 0)}
        common: dict[str, Any] = {
            "retention": about.get("retention", (least.get(about["window"]) or about.get("size", 0)) + grace),
            "compat": Compat.KAFKA_STREAMS,
            "changelog": self.changelog,
        }
        if about["name"].startswith("close-"):
            common["compat"] = Compat.KAFKA_STREAMS_TIME_ORDERED
        context = Worker().runtime.context(TASK)
        self.store: Any
        if recorded.store_kind == "session":
            self.store = SessionStore(context, "store", **common)
        else:
            self.store = WindowStore(
                context,
                "store",
                window_size=recorded.size_ms or 0,
                timestamped=recorded.store_kind == "time",
                retain_duplicates=bool(about.get("retain_duplicates")),
                **common,
            )

    def changelog(self, keys: pa.Array, values: pa.Array, timestamps: Any) -> None:
        self.log += list(zip(keys.to_pylist(), values.to_pylist(), timestamps.tolist(), strict=True))

    def put_what_was_logged(self) -> None:
        for record in self.recorded.changelog:
            assert record.timestamp is not None
            if self.recorded.store_kind == "session":
                session = decode_key(record.key, KeyFormat.SESSION)
                assert session is not None
                if record.value is None:
                    self.store.remove(session, value_ts=record.timestamp)
                else:
                    self.store.put(session, record.value, value_ts=record.timestamp)
            else:
                window = decode_key(
                    record.key, KeyFormat.CHANGELOG, size_ms=self.recorded.size_ms, checks=LENIENT
                )
                assert window is not None
                self.store.put(window.key, record.value, window.window.start, value_ts=record.timestamp)

    def restore_what_was_logged(self) -> None:
        records = self.recorded.changelog
        self.store.restore_batch(
            pa.array([each.key for each in records], pa.binary()),
            [each.value for each in records],
            [each.timestamp for each in records],
        )

    def rows(self, read: str) -> list[Row]:
        store, is_session = self.store, self.recorded.store_kind == "session"
        if read == "fetch" and not is_session:
            keys = dict.fromkeys(each.key for each in self.recorded.read("all"))
            return [
                _row(key, start, value) for key in keys for start, value in store.fetch(key, 0, 2**63 - 1)
            ]
        if is_session:
            ways = {"all": store.fetch_range, "backward_all": store.backward_fetch_range}
            found = ways["backward_all" if read == "backward_all" else "all"](None, None)
        else:
            found = {"all": store.all, "backward_all": store.backward_all}[read]()
        return [_row(each.key, each.window.start, value) for each, value in found]


def _row(key: bytes, start: int, value: bytes | TimestampedValue) -> Row:
    return (key, start, *value) if isinstance(value, TimestampedValue) else (key, start, value, None)


def by_key(rows: list[Row]) -> dict[bytes, list[Row]]:
    """Rows key by key: between keys no order is promised."""
    found: dict[bytes, list[Row]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(row)
    return found


def expected(recorded: Recorded, read: str) -> list[Row]:
    return [(each.key, each.start, each.value, each.timestamp) for each in recorded.read(read)]


@pytest.mark.parametrize("way", ["put", "restored"])
@pytest.mark.parametrize("name", NAMES)
def test_a_store_shows_what_the_recorded_one_did(name: str, way: str) -> None:
    recorded = load_fixture(name)
    opened = Opened(recorded)
    if way == "put":
        opened.put_what_was_logged()
        told = [(each.key, each.value, each.timestamp) for each in recorded.changelog]
        assert opened.log == told
    else:
        opened.restore_what_was_logged()
    reads = {each.read for each in recorded.stored}
    for read in sorted(reads & {"all", "backward_all", "fetch"}):
        assert by_key(opened.rows(read)) == by_key(expected(recorded, read)), read
    if recorded.segments:
        assert [opened.store.segments.segment_name(each) for each in opened.store.segments.ids] == sorted(
            recorded.segments, key=lambda folder: int(folder.split(".")[1])
        )


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("papi-")])
def test_the_same_puts_drop_the_same_records(name: str) -> None:
    recorded = load_fixture(name)
    opened = Opened(recorded)
    for each in recorded.inputs:
        opened.store.put(each.key, each.value, each.timestamp)
    assert opened.store.dropped_records == recorded.dropped
    assert opened.log == [(each.key, each.value, each.timestamp) for each in recorded.changelog]
