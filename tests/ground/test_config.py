"""Settings as people type them, and the files they keep them in."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.config import Kind, Setting, Settings, parse_assignments, parse_properties
from tidegate.errors import InvalidError

SETTINGS = Settings(
    [
        Setting("retention.ms", Kind.LONG, 5, "age", -1),
        Setting("retention.bytes", Kind.LONG, -1, "size"),
        Setting("segment.bytes", Kind.INT, 100, "size", 14),
        Setting("ratio", Kind.DOUBLE, 0.5, "share", 0, 1),
        Setting("on", Kind.BOOLEAN, False, "switch"),
        Setting("codec", Kind.WORD, "none", "codec", choices=("none", "zstd")),
        Setting("policy", Kind.LIST, frozenset({"delete"}), "policy", choices=("compact", "delete")),
    ],
    noun="thing",
)


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [
        ({"retention.ms": "600000"}, "retention.ms", 600_000),
        ({"retention.ms": 600_000}, "retention.ms", 600_000),
        ({"retention.ms": "10m"}, "retention.ms", 600_000),
        ({"retention.ms": timedelta(minutes=10)}, "retention.ms", 600_000),
        ({"retention.ms": "-1"}, "retention.ms", -1),
        ({"retention": "10m"}, "retention.ms", 600_000),
        ({"retention": "1GiB"}, "retention.bytes", 1 << 30),
        ({"retention": timedelta(seconds=1)}, "retention.ms", 1000),
        ({"segment": "16KiB"}, "segment.bytes", 16384),
        ({"segment.bytes": "9223372036854775807"}, "segment.bytes", None),
        ({"ratio": "0.25"}, "ratio", 0.25),
        ({"on": "TRUE"}, "on", True),
        ({"codec": "zstd"}, "codec", "zstd"),
        ({"policy": "delete, compact"}, "policy", frozenset({"delete", "compact"})),
        ({"policy": ""}, "policy", frozenset()),
    ],
)
def test_typed_settings_become_checked_values(typed: dict[str, object], name: str, value: object) -> None:
    if value is None:
        with pytest.raises(InvalidError, match="out of range"):
            SETTINGS.parse(typed)
    else:
        assert SETTINGS.parse(typed) == {name: value}


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ({"retention.msec": "1"}, "did you mean retention.ms"),
        ({"zzz": "1"}, "the nearest is"),
        ({"retention": "5"}, "does not say its unit"),
        ({"retention.ms": "5 fortnights"}, "retention.ms=5 fortnights"),
        ({"retention.ms": "-2"}, "valid is -1 or more"),
        ({"segment.bytes": "3"}, "valid is 14 or more"),
        ({"segment.bytes": "1.5"}, "segment.bytes"),
        ({"ratio": "2"}, "valid is 0 to 1"),
        ({"ratio": "nan"}, "not a number"),
        ({"on": "yes"}, "true or false"),
        ({"codec": "lzma"}, "none, zstd"),
        ({"policy": "shred"}, "compact, delete"),
        ({"segment.bytes": True}, "not bytes"),
        ({"retention.ms": "1s", "retention": "2s"}, "given twice"),
    ],
)
def test_wrong_settings_are_refused_with_the_way_out(typed: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidError, match=says) as refused:
        SETTINGS.parse(typed)
    assert refused.value.kafka_name == "INVALID_CONFIG"


def test_a_value_printed_is_the_value_read_again() -> None:
    for setting in SETTINGS:
        assert setting.parse(setting.format(setting.default)) == setting.default


def test_assignments_are_key_equals_value() -> None:
    assert parse_assignments(["a=1", "b = x=y"]) == {"a": "1", "b": "x=y"}
    for wrong in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(InvalidError):
            parse_assignments(wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=b", {"a": "b"}),
        ("a : b\nc d e", {"a": "b", "c": "d e"}),
        ("# no\n! no\n\n  a=b", {"a": "b"}),
        ("a=x\\\n   y\\\n z", {"a": "xyz"}),
        ("a\\ b\\=c=d\\u0041\\n", {"a b=c": "dA\n"}),
        ("path=C:\\\\dir\\\\", {"path": "C:\\dir\\"}),
        ("a=", {"a": ""}),
        ("lonely", {"lonely": ""}),
        ("a=1\na=2", {"a": "2"}),
        ("a=b \t", {"a": "b"}),
    ],
)
def test_properties_files_are_read_as_java_writes_them(text: str, expected: dict[str, str]) -> None:
    assert parse_properties(text) == expected


@given(st.text(max_size=200))
def test_any_text_is_a_properties_file(text: str) -> None:
    assert isinstance(parse_properties(text), dict)
