"""Durations, sizes and moments: what people write and what it means."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.durations import (
    duration_ms,
    format_duration,
    format_moment,
    format_size,
    moment_ms,
    size_bytes,
)
from tidegate.errors import InvalidError

LONG_MAX = 2**63 - 1


@pytest.mark.parametrize(
    ("written", "milliseconds"),
    [
        ("500ms", 500),
        ("30s", 30_000),
        ("5m", 300_000),
        ("1h30m", 5_400_000),
        ("1h 30m", 5_400_000),
        ("7d", 604_800_000),
        ("2w", 1_209_600_000),
        ("0ms", 0),
        ("0.5s", 500),
        ("1.001s", 1001),
        (" 10 minutes ", 600_000),
        ("5 MINUTES", 300_000),
        ("1 hour 30 minutes", 5_400_000),
        ("PT5M", 300_000),
        ("pt5m", 300_000),
        ("P1DT12H", 129_600_000),
        ("P2W", 1_209_600_000),
        ("PT0.001S", 1),
        (f"{LONG_MAX}ms", LONG_MAX),
        (0, 0),
        (timedelta(minutes=1, milliseconds=1), 60_001),
    ],
)
def test_durations_as_people_write_them(written: int | str | timedelta, milliseconds: int) -> None:
    assert duration_ms(written) == milliseconds


@pytest.mark.parametrize(
    "written",
    [
        *["", " ", "5", "600000", "m", "5x", "1m1h", "5m5m", "-5m", "1.5ms", "P", "PT", "P1Y", "P1M"],
        *["1month", "5m extra", "5 m m", "١", "1e3s", "9" * 400 + "ms", "nan", "infs", -1],
        timedelta(days=-1),
    ],
)
def test_what_is_not_a_duration_is_refused_with_an_example(written: int | str | timedelta) -> None:
    with pytest.raises(InvalidError) as caught:
        duration_ms(written)
    assert str(caught.value)


@pytest.mark.parametrize("written", [True, None, b"5m", ["5m"]])
def test_a_wrong_kind_is_a_type_error(written: object) -> None:
    with pytest.raises(TypeError):
        duration_ms(written)  # type: ignore[arg-type]


@given(st.integers(0, LONG_MAX))
@settings(max_examples=200)
def test_the_normal_form_reads_back_as_itself(milliseconds: int) -> None:
    assert duration_ms(format_duration(milliseconds)) == milliseconds


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0ms"),
        (1, "1ms"),
        (5_400_000, "1h30m"),
        (604_800_000, "7d"),
        (90_061_001, "1d1h1m1s1ms"),
        (-5_400_000, "-1h30m"),
    ],
)
def test_durations_are_printed_largest_unit_first(milliseconds: int, text: str) -> None:
    assert format_duration(milliseconds) == text


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("16384", 16384),
        (16384, 16384),
        ("16KiB", 16384),
        ("16 kib", 16384),
        ("64 MiB", 64 * 2**20),
        ("1GB", 10**9),
        ("1.5KiB", 1536),
        ("10b", 10),
        ("2TiB", 2**41),
        (str(LONG_MAX), LONG_MAX),
        (0, 0),
    ],
)
def test_sizes_as_people_write_them(written: int | str, size: int) -> None:
    assert size_bytes(written) == size


@pytest.mark.parametrize("written", ["", "16k", "KiB", "-1", "0.3KiB", "1e3", "1 2", "9" * 400, -5])
def test_what_is_not_a_size_is_refused(written: int | str) -> None:
    with pytest.raises(InvalidError):
        size_bytes(written)


@pytest.mark.parametrize("written", [False, 2.0, None])
def test_a_size_of_a_wrong_kind_is_a_type_error(written: object) -> None:
    with pytest.raises(TypeError):
        size_bytes(written)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *[(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (16384, "16 KiB"), (16314, "15.9 KiB")],
        *[(2**30, "1 GiB"), (3 * 2**50, "3072 TiB")],
    ],
)
def test_sizes_are_printed_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("written", "epoch_ms"),
    [
        (0, 0),
        ("1970-01-01T00:00:01Z", 1000),
        ("2026-01-01T10:00Z", 1_767_261_600_000),
        ("2026-01-01T10:00", 1_767_261_600_000),
        ("2026-01-01 12:00:00.5+02:00", 1_767_261_600_500),
        (datetime(2026, 1, 1, 10, tzinfo=UTC), 1_767_261_600_000),
        (datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=2))), 1_767_261_600_000),
        (datetime(2026, 1, 1, 10), 1_767_261_600_000),
    ],
)
def test_moments_without_a_zone_are_utc(written: int | str | datetime, epoch_ms: int) -> None:
    assert moment_ms(written) == epoch_ms


@pytest.mark.parametrize("written", ["yesterday", "", "2026-13-01", "2026-01-01T25:00Z"])
def test_what_is_not_a_moment_is_refused(written: str) -> None:
    with pytest.raises(InvalidError, match="not a moment"):
        moment_ms(written)


@pytest.mark.parametrize("written", [True, 1.0, None])
def test_a_moment_of_a_wrong_kind_is_a_type_error(written: object) -> None:
    with pytest.raises(TypeError):
        moment_ms(written)  # type: ignore[arg-type]


@given(st.integers(-62_135_596_800_000, 253_402_300_799_999))
@settings(max_examples=200)
def test_a_printed_moment_reads_back_as_itself(epoch_ms: int) -> None:
    assert moment_ms(format_moment(epoch_ms)) == epoch_ms


@pytest.mark.parametrize("epoch_ms", [LONG_MAX, -LONG_MAX, 2**62])
def test_a_moment_no_calendar_holds_is_printed_as_its_number(epoch_ms: int) -> None:
    assert format_moment(epoch_ms) == f"{epoch_ms}ms"


@pytest.mark.parametrize("written", [60, 1, 600_000, 1.5, "60", "1.5"])
def test_a_duration_without_a_unit_is_refused_with_both_readings(written: object) -> None:
    with pytest.raises(
        InvalidError, match=rf"{written} seconds or {written} milliseconds.*'{written}s' or '{written}ms'"
    ):
        duration_ms(written)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "days"), [("1M", "30d"), ("3M", "90d"), ("1.5M", "30d"), ("1h5M", "150d")]
)
def test_an_upper_case_m_is_refused_with_both_readings(written: str, days: str) -> None:
    with pytest.raises(InvalidError, match=rf"m for minutes, or {days} for months"):
        duration_ms(written)


@pytest.mark.parametrize(
    ("written", "expected"), [("1H", 3_600_000), ("5 MINUTES", 300_000), ("2D", 172_800_000)]
)
def test_other_units_may_be_upper_case(written: str, expected: int) -> None:
    assert duration_ms(written) == expected


@pytest.mark.parametrize(
    "written",
    [
        "2026-01-01T10:00:00.123456+00:00", "2026-01-01 10:00:00.123456+00:00",  # Python
        "2026-01-01T10:00:00.123Z",  # JavaScript
        "2026-01-01T10:00:00.123456789Z", "2026-01-01T12:00:00.123+02:00", "2026-01-01T12:00:00.123+0200",  # Java
        "2026-01-01T12:00:00.123+02:00[Europe/Berlin]", "2026-01-01T10:00:00.123Z[UTC]",
        "2026-01-01T10:00:00.123Z[Etc/GMT+1]", "2026-01-01T12:00:00.123456+02",
    ],
)  # fmt: skip
def test_moments_as_python_java_and_javascript_write_them(written: str) -> None:
    assert moment_ms(written) == 1_767_261_600_123


@pytest.mark.parametrize(
    ("number", "unit"),
    [
        (1_767_261_600, "seconds"),
        (1_767_261_600_000_000, "microseconds"),
        (1_767_261_600 * 10**9, "nanoseconds"),
    ],
)
def test_a_number_in_another_unit_is_refused_as_a_moment(number: int, unit: str) -> None:
    with pytest.raises(InvalidError, match=rf"looks like {unit}: 2026-01-01T10:00:00"):
        moment_ms(number)


@pytest.mark.parametrize("number", [0, -1, 1500, 10**8, 1_767_261_600_123, 2**63 - 1])
def test_other_numbers_are_epoch_milliseconds(number: int) -> None:
    assert moment_ms(number) == number
