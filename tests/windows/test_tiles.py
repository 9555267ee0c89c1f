"""Tiles: which pieces cover a range, and that their sum is the range's."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.storage import StorageConfig, Sum, WorkerStorageRuntime
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.windows.events import EventBatch
from tidegate.windows.operators.tiles import Stretch, Tiles, cover, tile_widths

MINUTE = 60_000
POINTS = {1: 10, 3: 20, 5: 25, 7: 35, 9: 45, 12: 55, 16: 75, 18: 95, 22: 110, 28: 120}  # minute: value


def filled() -> Tiles:
    runtime = WorkerStorageRuntime.open(StorageConfig.for_tests(), MemoryBackend())
    tiles = Tiles(runtime, "task", "tiles", [Sum("sum", "value", pa.int64())], ["1m", "5m", "1h"])
    count = len(POINTS)
    tiles.add(
        EventBatch(
            key=pa.array([b"k"] * count, pa.binary()),
            ts=np.array([minute * MINUTE + 7 for minute in POINTS], np.int64),
            offset=np.arange(count),
            partition=np.zeros(count, np.int32),
            stream_time=np.full(count, -1, np.int64),
            values=pa.record_batch({"value": pa.array(list(POINTS.values()))}),
        )
    )
    return tiles


@pytest.mark.parametrize(
    ("first", "last", "count", "total"),
    [
        pytest.param(2, 8, 3, 80, id="WS-T85 2 to 8 minutes"),
        pytest.param(5, 18, 3, 235, id="WS-T85 5 to 18 minutes"),
        pytest.param(0, 30, 6, 590, id="WS-T85 0 to 30 minutes"),
    ],
)
def test_a_range_is_the_sum_of_its_tiles(first: int, last: int, count: int, total: int) -> None:
    keys = pa.array([b"k", b"absent"], pa.binary())
    results, records, tiles = filled().total(keys, first * MINUTE, last * MINUTE)
    assert results["sum"].to_pylist() == [total, None]
    assert tiles.tolist() == [count, 0]
    assert records.tolist() == [sum(first <= minute < last for minute in POINTS), 0]


def test_the_head_of_an_unaligned_range_is_not_dropped() -> None:
    """WS-T86: 2 to 18 minutes."""
    chosen = cover(tile_widths(["1m", "5m", "1h"]), 2 * MINUTE, 18 * MINUTE)
    assert [(width // MINUTE, at // MINUTE) for width, at in chosen.tiles] == [
        (1, 2), (1, 3), (1, 4), (5, 5), (5, 10), (1, 15), (1, 16), (1, 17),
    ]  # fmt: skip
    results, _, _ = filled().total(pa.array([b"k"], pa.binary()), 2 * MINUTE, 18 * MINUTE)
    assert results["sum"].to_pylist() == [sum(value for at, value in POINTS.items() if 2 <= at < 18)]


def test_a_window_that_ends_at_a_row_keeps_its_edges_as_rows() -> None:
    """WS-T87: [0, 5000], tiles of a second."""
    chosen = cover((1000,), 0, 5001, after_start=True)
    assert [at for _, at in chosen.tiles] == [1000, 2000, 3000, 4000]
    assert (chosen.front, chosen.back) == (Stretch(0, 1000), Stretch(5000, 5001))


@pytest.mark.parametrize(
    "widths",
    [
        pytest.param(["1m", "7m", "1h"], id="WS-T88 no multiple"),
        pytest.param(["5m", "1m"], id="WS-T88 descending"),
        pytest.param(["1m", "1m"], id="WS-T88 twice"),
        pytest.param([], id="WS-T88 none"),
        pytest.param([0], id="WS-T88 zero"),
    ],
)
def test_widths_that_do_not_fit_each_other_are_refused(widths: list[str]) -> None:
    with pytest.raises(InvalidError):
        tile_widths(widths)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 500), st.integers(0, 500), st.booleans())
def test_a_cover_is_the_range_once_in_tiles_that_lie_where_tiles_may(
    start: int, length: int, after: bool
) -> None:
    end = start + length
    chosen = cover((4, 12, 60), start, end, after_start=after)
    stretches = [chosen.front, *(Stretch(at, at + width) for width, at in chosen.tiles), chosen.back]
    at = start
    for stretch in stretches:
        assert stretch.start == at <= stretch.end
        at = stretch.end
    assert at == end
    assert all(start % width == 0 for width, start in chosen.tiles)
    assert chosen.front.end - chosen.front.start < 8 or not chosen.tiles
