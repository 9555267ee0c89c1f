"""Topic names and folder names: nothing leaves the log folder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.log.catalog import (
    TopicPartition,
    check_partition_count,
    check_topic_name,
    deleted_folder_name,
    is_deleted_folder,
    parse_folder_name,
    partition_folder_name,
)

NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,249}", fullmatch=True).filter(lambda name: name not in (".", ".."))


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 249, "...", "-", "_", "orders-0"])
def test_legal_names_pass(name: str) -> None:
    assert check_topic_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "x" * 250,
        "a/b",
        "../a",
        "a\\b",
        "a b",
        "a\n",
        "a\0",
        "ä",
        "a:b",
        "a,b",
        "~",
        "a*",
        "%2e",
    ],
)
def test_names_that_could_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(InvalidError, match="is not allowed") as refused:
        check_topic_name(name)
    assert refused.value.kafka_name == "INVALID_TOPIC_EXCEPTION"


@given(NAMES, st.integers(0, 2**31 - 1))
def test_a_folder_name_gives_topic_and_partition_back(topic: str, partition: int) -> None:
    name = partition_folder_name(topic, partition)
    assert parse_folder_name(name) == TopicPartition(topic, partition)
    assert "/" not in name


@given(st.text(max_size=30))
def test_any_name_is_a_partition_folder_or_is_not(name: str) -> None:
    place = parse_folder_name(name)
    assert place is None or str(place) == name


@pytest.mark.parametrize(
    "name", ["orders", "orders-", "-1", "orders-01", "orders--1x", "orders-1.deadbeef-delete"]
)
def test_other_folders_are_none_of_ours(name: str) -> None:
    assert parse_folder_name(name) is None


@given(NAMES, st.integers(0, 9999))
def test_the_folder_of_a_deleted_partition_fits_and_is_known_as_such(topic: str, partition: int) -> None:
    name = deleted_folder_name(topic, partition, "0123456789abcdef" * 2)
    assert len(name) <= 255
    assert is_deleted_folder(name)
    assert parse_folder_name(name) is None


@pytest.mark.parametrize("count", [0, -1, 100_001])
def test_absurd_partition_counts_are_refused(count: int) -> None:
    with pytest.raises(InvalidError):
        check_partition_count(count)


def test_a_negative_partition_has_no_folder() -> None:
    with pytest.raises(InvalidError):
        partition_folder_name("a", -1)
