"""`--state`, and the backend it names: what every verb about apps and stored tables shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from tidegate.cli.options import AnyFunction

if TYPE_CHECKING:
    from tidegate.storage.backends.port import StorageBackend


def state_option(command: AnyFunction) -> AnyFunction:
    """`--state URL` as parameter `state`."""
    return click.option(
        "--state", "state", metavar="URL", envvar="TIDEGATE_STATE", show_envvar=True, default="./data/state",
        show_default=True, help="Where apps and tables are kept: a folder, or s3://BUCKET/PATH.",
    )(command)  # fmt: skip


@contextmanager
def opened_backend(state: str, *, read_only: bool = True) -> Iterator[StorageBackend]:
    """The backend at an address; it must be there, and one that is read is left as it is."""
    from tidegate.storage import open_backend

    backend = open_backend(state, create=False, read_only=read_only)
    try:
        yield backend
    finally:
        backend.close()
