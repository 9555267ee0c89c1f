"""Warnings about records that go into no result, or not into all: late, expired, without a key, set aside.

A warning is logged for the 1st, 2nd, 4th, 8th, … such record of a kind in a task, so that the first is heard of and a
flood stays a few lines. Each names topic, partition and offset of the very record.

Thread rule: pure functions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

logger = logging.getLogger("tidegate.dropped_records")
LONGEST_REASON: Final = 200


def told(before: int, count: int) -> Iterator[int]:
    """Of the next `count` occurrences after `before` earlier ones, the numbers of those that are told, from 1."""
    number = 1 << before.bit_length()
    while number <= before + count:
        yield number
        number <<= 1


def warn_dropped(
    who: str,
    why: str,
    topic: str,
    partitions: Sequence[int] | Any,
    offsets: Sequence[int] | Any,
    *,
    before: int,
    reasons: Sequence[str] | None = None,
) -> None:
    """Warn about records of one kind, in the order they came; `before` is how many there were before them.

    `partitions` and `offsets` may be arrays; `reasons` says more of each record.
    """
    for number in told(before, len(offsets)):
        row = number - before - 1
        more = "" if reasons is None else f": {_plain(reasons[row])}"
        logger.warning(
            "%s: %s-%d offset %d %s%s (%s)",
            who,
            topic,
            int(partitions[row]),
            int(offsets[row]),
            why,
            more,
            "the first" if number == 1 else f"{number:,} so far",
        )


def _plain(reason: str) -> str:
    """A reason as the end of a line: it may quote what somebody wrote into a record."""
    text = " ".join(reason.split())[:LONGEST_REASON]
    return text if text.isprintable() else ascii(text)[1:-1]
