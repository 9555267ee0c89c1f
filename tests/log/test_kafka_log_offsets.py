"""Offsets of a cluster: a broker that gives none is out of reach, not at offset -1001."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.errors import UnavailableError
from tidegate.log.kafka.log import Offsets


class Answering:
    """An admin client whose partitions have these offsets."""

    def __init__(self, offsets: dict[int, int]) -> None:
        self._offsets = offsets

    def list_offsets(self, places: dict[Any, Any], **_: Any) -> dict[Any, Any]:
        return {
            place: SimpleNamespace(
                result=lambda offset=self._offsets[place.partition]: SimpleNamespace(offset=offset)
            )
            for place in places
        }


def test_a_partition_without_an_offset_is_out_of_reach() -> None:
    offsets = Offsets("broker:9092", Answering({0: 12, 1: -1001}), "orders", "read_committed")
    assert offsets.end([0]) == {0: 12}
    for ask in (offsets.first, offsets.end):
        with pytest.raises(UnavailableError, match=r"broker:9092 gave no offset of orders-1"):
            ask([0, 1])


def test_no_record_of_a_time_is_an_answer() -> None:
    assert Offsets("broker:9092", Answering({0: -1}), "orders", "read_committed").at({0: 5}) == {0: -1}
