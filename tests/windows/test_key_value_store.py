"""A key-value store equals a dict: values, ranges in the order of bytes, and the same against it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import TidegateWarning
from tidegate.windows.stores.key_value_store import KeyValueStore
from tidegate.windows.stores.value_store import TimestampedValue
from workers import TASK, Worker

KEYS = st.sampled_from([b"", b"\0", b"a", b"aa", b"ab", b"b", b"\x7f", b"\x80", b"\xff", b"\xff\xff"])
PUTS = st.lists(st.tuples(KEYS, st.none() | st.binary(max_size=3)), max_size=25)
ENDS = st.none() | KEYS


def store_of(**settings_: bool) -> KeyValueStore:
    return KeyValueStore(Worker().runtime.context(TASK), "table", **settings_)


@settings(max_examples=60, deadline=None)
@given(puts=PUTS, cut=st.integers(1, 25), low=ENDS, high=ENDS)
def test_ranges_equal_those_of_a_dict(
    puts: list[tuple[bytes, bytes | None]], cut: int, low: bytes | None, high: bytes | None
) -> None:
    store, known = store_of(), dict[bytes, bytes]()
    for at in range(0, len(puts), cut):
        keys, values = zip(*puts[at : at + cut], strict=True)
        store.put_all(list(keys), list(values))
    for key, value in puts:
        known.pop(key, None)
        if value is not None:
            known[key] = value
    assert list(store.all()) == sorted(known.items())
    assert list(store.reverse_all()) == sorted(known.items(), reverse=True)
    if low is not None and high is not None and low > high:
        with pytest.warns(TidegateWarning, match="is empty"):
            assert list(store.reverse_range(low, high)) == []
        return
    between = sorted(
        (key, value)
        for key, value in known.items()
        if (low is None or key >= low) and (high is None or key <= high)
    )
    assert list(store.range(low, high)) == between
    assert list(store.reverse_range(low, high)) == between[::-1]
    assert {row["key"]: row["value"] for batch in store.batches() for row in batch.to_pylist()} == known


def test_values_come_with_their_timestamps_where_asked() -> None:
    store = store_of(timestamped=True)
    store.put_all([b"b", b"a"], [b"1", b"2"], value_ts=[7, 8])
    assert list(store.reverse_range(b"a", b"b")) == [
        (b"b", TimestampedValue(b"1", 7)),
        (b"a", TimestampedValue(b"2", 8)),
    ]


def test_an_answer_is_the_store_as_it_was_when_asked() -> None:
    store = store_of()
    store.put(b"a", b"1")
    rows = store.reverse_all()
    store.put(b"a", b"2")
    store.put(b"b", b"3")
    assert list(rows) == [(b"a", b"1")]
