"""Random schedules: small steps drawn from a seed, and the shortest part of one that still fails.

A step is a name and three numbers, and what the numbers mean is decided when the step runs (the second of the
keys there are, one of the operations under way). So any step can be taken out of a schedule and the rest still
makes sense, which is all that shrinking needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tidegate.randomness import SeededRandomness

NUMBERS_BELOW = 1 << 16


class Step(NamedTuple):
    """One thing to do; `a`, `b`, `c` choose to what."""

    name: str
    a: int
    b: int
    c: int


class ScheduleFailure(AssertionError):
    """A schedule went wrong; the message holds what is needed to run it again."""


def draw(seed: int, length: int, weights: Mapping[str, int]) -> list[Step]:
    """A schedule: the same one for the same seed, on every machine."""
    randomness = SeededRandomness(seed)
    names = [name for name, weight in weights.items() for _ in range(weight)]
    return [
        Step(
            names[randomness.below(len(names))],
            randomness.below(NUMBERS_BELOW),
            randomness.below(NUMBERS_BELOW),
            randomness.below(NUMBERS_BELOW),
        )
        for _ in range(length)
    ]


def shrink(steps: Sequence[Step], fails: Callable[[list[Step]], bool], *, attempts: int = 400) -> list[Step]:
    """Steps taken out, large pieces first, as long as what is left still fails."""
    kept = list(steps)
    size = max(1, len(kept) // 2)
    while attempts > 0:
        removed = False
        start = 0
        while start < len(kept) and attempts > 0:
            fewer = kept[:start] + kept[start + size :]
            attempts -= 1
            if fewer and fails(fewer):
                kept, removed = fewer, True
            else:
                start += size
        if size == 1 and not removed:
            break
        size = max(1, size // 2)
    return kept


def check_schedules(
    run: Callable[[int, Sequence[Step]], None],
    seeds: Sequence[int],
    *,
    length: int,
    weights: Mapping[str, int],
) -> None:
    """Run one schedule a seed; a failing one is shrunk and raised with its seed and its steps.

    `run(seed, steps)` raises when something is wrong. Deaths that a test made up on purpose are its own matter.
    """
    for seed in seeds:
        steps = draw(seed, length, weights)
        try:
            run(seed, steps)
        except Exception as error:
            shown = shrink(steps, lambda fewer, seed=seed: _fails(run, seed, fewer))  # type: ignore[misc]
            lines = "\n".join(f"    Step({step.name!r}, {step.a}, {step.b}, {step.c})," for step in shown)
            raise ScheduleFailure(
                f"schedule of seed {seed} ({len(steps)} steps) failed: {type(error).__name__}: {error}\n"
                f"  shortest part that still fails ({len(shown)} steps):\n{lines}\n"
                f"  it fails with: {_failure(run, seed, shown)}"
            ) from error


def _fails(run: Callable[[int, Sequence[Step]], None], seed: int, steps: Sequence[Step]) -> bool:
    return _failure(run, seed, steps) is not None


def _failure(run: Callable[[int, Sequence[Step]], None], seed: int, steps: Sequence[Step]) -> str | None:
    try:
        run(seed, steps)
    except Exception as error:  # noqa: BLE001 - as above
        return f"{type(error).__name__}: {error}"
    return None
