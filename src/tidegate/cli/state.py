"""`--state`, and the backend it names: what every verb about stored tables shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from tidegate.cli.options import AnyFunction
from tidegate.errors import InvalidError


def state_option(command: AnyFunction) -> AnyFunction:
    """`--state FOLDER` as parameter `state`."""
    return click.option(
        "--state", "state", metavar="FOLDER", envvar="TIDEGATE_STATE", show_envvar=True, default="./data/state",
        show_default=True, help="The folder the table is kept in.",
    )(command)  # fmt: skip


@contextmanager
def opened_backend(state: str) -> Iterator[Any]:
    """The backend at an address; a folder must be there."""
    from tidegate.storage import open_backend

    if "://" not in state and not Path(state).is_dir():
        raise InvalidError(f"{state} is no folder; say where the table is kept with --state")
    backend = open_backend(state)
    try:
        yield backend
    finally:
        backend.close()
