"""What `tidegate push` says while it goes: how much of a step is done, in per cent, and how long the rest takes."""

from __future__ import annotations

from tidegate.cli.versions import push_line
from tidegate.spark.push import PushProgress


def test_the_line_and_the_heartbeat_say_percent_and_what_is_left() -> None:
    seen = PushProgress("users", 4, "sending", 3, 12, 5_000, 10_000, 30_000)
    assert push_line(seen) == "users_v4  sending ▰▱▱▱▱ 25%  10s  5,000 records  30s left"
    beat = seen.to_dict()
    assert (beat["percent"], beat["left_ms"]) == (25, 30_000)


def test_a_step_that_has_not_begun_promises_nothing() -> None:
    seen = PushProgress("users", 4, "starting", 0, 0, 0, 10, None)
    assert push_line(seen) == "users_v4  starting ▱▱▱▱▱ 0%  1s"
    assert (seen.to_dict()["percent"], seen.to_dict()["left_ms"]) == (None, None)
