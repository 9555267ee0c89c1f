"""`--spark`, `--master` and `--jobs`: who does the reading of a large check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.options import AnyFunction
from tidegate.errors import InvalidError

if TYPE_CHECKING:
    from tidegate.integrity.auditing import Runner


def parallel_options(command: AnyFunction) -> AnyFunction:
    """`--spark`, `--master` and `--jobs` as parameters `spark`, `master` and `jobs`."""
    command = click.option(
        "--jobs",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Processes of this machine that read at once.",
    )(command)
    command = click.option(
        "--master", metavar="URL", help="Spark's master with --spark; every core of this machine without it."
    )(command)
    return click.option("--spark", is_flag=True, help="Read in ranges on Spark; the result is the same.")(
        command
    )


@contextmanager
def parallel_runner(spark: bool, master: str | None, jobs: int) -> Iterator[Runner | None]:
    """Who does the work; None for this process alone."""
    if spark and jobs > 1:
        raise InvalidError("--spark and --jobs both say who reads; keep one")
    if master is not None and not spark:
        raise InvalidError("--master is Spark's; add --spark")
    if spark:
        from tidegate.spark.audit import SCHEDULES_ONLY, SparkRunner
        from tidegate.spark.session import session

        where: dict[str, Any] = {} if master is None else {"master": master}
        made = session("tidegate-audit", config=SCHEDULES_ONLY, **where)
        try:
            yield SparkRunner(made)
        finally:
            made.stop()
    elif jobs > 1:
        from tidegate.integrity.runners import Processes

        with Processes(jobs) as processes:
            yield processes
    else:
        yield None
