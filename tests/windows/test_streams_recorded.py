"""What the real Kafka Streams wrote, as recorded, is read by our codec; and our codec writes the same bytes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from streams_fixtures import NAMES, Recorded, load_fixture

from tidegate.windows.keys import (
    LENIENT,
    STRICT,
    KeyFormat,
    decode_keys,
    encode_keys,
)

Row = tuple[bytes, int, int, bytes]


def store_format(recorded: Recorded) -> KeyFormat:
    return KeyFormat.SESSION if recorded.store_kind == "session" else KeyFormat.CHANGELOG


def topic_format(recorded: Recorded) -> KeyFormat:
    return KeyFormat.SESSION if recorded.store_kind == "session" else KeyFormat.TOPIC


def readable(recorded: Recorded) -> list[Row]:
    """The rows a store holds after its changelog was put into it in one go, by the rules of reading.

    The last value of each key and window, and of those the ones within retention of the largest start (of a
    session: end) that was ever written.
    """
    keys = decode_keys(
        pa.array([record.key for record in recorded.changelog], pa.binary()),
        store_format(recorded),
        size_ms=recorded.size_ms,
        checks=LENIENT,
    ).require_good()
    inner, sequences = keys.inner.to_pylist(), keys.sequence.tolist()
    starts, ends = keys.start.tolist(), keys.end.tolist()
    times = ends if recorded.store_kind == "session" else starts
    last: dict[tuple[bytes, int, int, int], bytes | None] = {}
    for row, record in enumerate(recorded.changelog):
        last[inner[row], starts[row], ends[row], sequences[row]] = record.value
    oldest = max(times) - retention(recorded) + 1
    return [
        (key, start, end, value)
        for (key, start, end, _), value in last.items()
        if value is not None and (end if recorded.store_kind == "session" else start) >= oldest
    ]


def retention(recorded: Recorded) -> int:
    about = recorded.about
    if "retention" in about:
        return int(about["retention"])
    grace = int(about["grace"])
    if "gap" in about:
        return int(about["gap"]) + grace
    return int(2 * about["difference"] if "difference" in about else about["size"]) + grace


def is_time_ordered(recorded: Recorded) -> bool:
    """Stores of windows that are emitted on close keep one millisecond more, and only these."""
    return recorded.about.get("emit") == "close" and recorded.store_kind == "time"


@pytest.mark.parametrize("name", NAMES)
def test_the_changelog_holds_what_the_store_answers(name: str) -> None:
    recorded = load_fixture(name)
    found = sorted(readable(recorded))
    answered = sorted((row.key, row.start, row.end, row.value) for row in recorded.read("all"))
    if is_time_ordered(recorded):
        extra = [row for row in answered if row not in found]
        assert [row for row in answered if row in found] == found
        newest = max(row[1] for row in answered)
        assert all(row[1] == newest - retention(recorded) for row in extra)
    else:
        assert found == answered


@pytest.mark.parametrize("name", NAMES)
def test_our_codec_writes_the_keys_kafka_streams_wrote(name: str) -> None:
    recorded = load_fixture(name)
    is_session = recorded.store_kind == "session"
    checks = LENIENT if recorded.about.get("retain_duplicates") else STRICT
    for topic, key_format in (
        (recorded.changelog_topic, store_format(recorded)),
        ("out", topic_format(recorded)),
    ):
        raw = pa.array([record.key for record in recorded.written(topic)], pa.binary())
        keys = decode_keys(raw, key_format, size_ms=recorded.size_ms, checks=checks).require_good()
        again = encode_keys(
            keys.inner, keys.start, key_format, end=keys.end if is_session else None,
            sequence=keys.sequence if key_format is KeyFormat.CHANGELOG else None,
        )  # fmt: skip
        assert again.equals(raw)
        assert set(keys.inner.to_pylist()) <= {given.key for given in recorded.inputs}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in NAMES
        if not name.startswith(("papi", "close", "session", "reduce", "tumbling-integer"))
    ],
)
def test_both_formats_of_the_same_updates_say_the_same_windows(name: str) -> None:
    """An aggregation that emits updates writes each change to its changelog and to its topic."""
    recorded = load_fixture(name)
    topic = "raw" if name == "suppress" else "out"
    found = []
    for which, key_format in ((recorded.changelog_topic, KeyFormat.CHANGELOG), (topic, KeyFormat.TOPIC)):
        records = recorded.written(which)
        keys = decode_keys(pa.array([one.key for one in records]), key_format, size_ms=recorded.size_ms)
        rows = zip(keys.inner.to_pylist(), keys.start.tolist(), keys.end.tolist(), records, strict=True)
        found.append([(inner, start, end, one.value, one.timestamp) for inner, start, end, one in rows])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", [name for name in NAMES if load_fixture(name).store_kind == "time"])
def test_a_timestamped_store_is_its_changelogs_values_with_the_records_timestamps(name: str) -> None:
    recorded = load_fixture(name)
    keys = decode_keys(
        pa.array([record.key for record in recorded.changelog]), KeyFormat.CHANGELOG, size_ms=recorded.size_ms
    )
    last: dict[tuple[bytes, int], tuple[bytes | None, int]] = {}
    for inner, start, record in zip(
        keys.inner.to_pylist(), keys.start.tolist(), recorded.changelog, strict=True
    ):
        assert record.timestamp is not None
        last[inner, start] = (record.value, record.timestamp)
    for row in recorded.read("all"):
        assert last[row.key, row.start] == (row.value, row.timestamp)


def test_changelog_bytes_read_in_the_other_format_are_refused_in_every_topology() -> None:
    seen = 0
    for name in NAMES:
        recorded = load_fixture(name)
        if recorded.store_kind == "session":
            continue
        size = recorded.size_ms
        starts = decode_keys(
            pa.array([one.key for one in recorded.changelog]),
            KeyFormat.CHANGELOG,
            size_ms=size,
            checks=LENIENT,
        ).start
        crossed = decode_keys(
            pa.array([one.key for one in recorded.changelog]), KeyFormat.TOPIC, size_ms=size
        )
        if not recorded.about.get("retain_duplicates"):
            assert crossed.bad[starts > 0].all(), name
            seen += int(np.count_nonzero(starts > 0))
        topic = recorded.written("out")
        if topic:
            keys = pa.array([one.key for one in topic])
            right = decode_keys(keys, KeyFormat.TOPIC, size_ms=size)
            crossed = decode_keys(keys, KeyFormat.CHANGELOG, size_ms=size)
            assert crossed.bad[right.start > 0].all(), name
            seen += int(np.count_nonzero(right.start > 0))
    assert seen > 100


def test_a_late_put_is_dropped_by_the_store_and_still_in_its_changelog() -> None:
    recorded = load_fixture("papi-late")
    assert [record.key for record in recorded.changelog] == [
        bytes.fromhex("62000000000000ee4800000000"),
        bytes.fromhex("61000000000000000a00000000"),
    ]
    assert recorded.dropped == 1
    assert recorded.segments == ["store.60000"]


def test_retained_duplicates_are_numbered_from_one_and_a_null_put_takes_a_number_too() -> None:
    recorded = load_fixture("papi-duplicates")
    keys = decode_keys(
        pa.array([one.key for one in recorded.changelog]), KeyFormat.CHANGELOG, size_ms=3, checks=LENIENT
    )
    assert keys.sequence.tolist() == [1, 2, 3, 4, 5]
    assert [one.value for one in recorded.changelog] == [b"one", b"one-2", None, b"two", b"two-2"]
