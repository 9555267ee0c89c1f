"""The errors, their exit codes and what they carry."""

from __future__ import annotations

from pathlib import Path

import pytest

import tidegate
from tidegate import errors


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [
        ("TidegateError", 1),
        ("IntegrityError", 1),
        ("InvalidError", 2),
        ("OverloadError", 3),
        ("UnavailableError", 3),
        ("FencedError", 4),
        ("ConflictError", 4),
        ("CorruptError", 5),
        ("WindowedKeyFormatError", 5),
    ],
)
def test_each_error_has_its_exit_code_and_one_root(kind: str, exit_code: int) -> None:
    error = getattr(errors, kind)
    assert error.exit_code == exit_code
    assert issubclass(error, errors.TidegateError)
    assert getattr(tidegate, kind) is error
    assert str(error("what, where, what to do")) == "what, where, what to do"


def test_a_wrong_call_is_also_a_value_error() -> None:
    assert issubclass(errors.InvalidError, ValueError)


def test_an_offset_out_of_range_says_which_ones_would_do() -> None:
    error = errors.OffsetOutOfRangeError("gone", offset=5, first=10, end=20)
    assert (error.offset, error.first, error.end) == (5, 10, 20)
    assert error.kafka_name == "OFFSET_OUT_OF_RANGE"
    assert error.exit_code == 2


def test_corruption_names_the_file_and_the_place() -> None:
    error = errors.CorruptError("bad", path="a/b.log", position=17, offset=3)
    assert (error.path, error.position, error.offset) == (Path("a/b.log"), 17, 3)
    assert error.kafka_name == "CORRUPT_MESSAGE"
    assert errors.CorruptError("bad").path is None


def test_public_names_are_all_there_and_nothing_else_is_invented() -> None:
    assert dir(tidegate) == sorted(tidegate.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        tidegate.nonsense  # noqa: B018
