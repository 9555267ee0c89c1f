"""Where all slots share a machine, blobs lie in its files, and through Spark's shuffle goes only where they lie.

A blob that Spark carries crosses two sockets, the JVM's memory twice and a file of its own; that is more work than all
that is done with the events in it. A session `local[…]` has its slots as processes beside it: what one of them writes
to a file once, another one maps. Everywhere else blobs go through the shuffle themselves.

X1  a file is one attempt's: it has a name of its own, and all of it is there before Spark hears of it. A reader is told
    of files by the attempt that Spark chose.
X2  files stay until the job is over, so that a second attempt of a reader finds them. Then the driver removes all
    there are, also what an attempt left behind that nobody waits for.

Thread rule: one owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from tidegate.errors import TidegateError, UnavailableError
from tidegate.files import Files
from tidegate.randomness import SystemRandomness

ALIGNMENT = 64
Parts = Sequence["bytes | pa.Buffer"]


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a blob lies."""

    path: str
    position: int
    length: int


class Outbox:
    """The blobs of one task's attempt, in a file that is made for the first of them."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / SystemRandomness().uuid().hex
        self._files = Files()
        self._end = 0

    def put(self, parts: Parts) -> Place:
        """Write a blob, given in parts; where it lies."""
        views = [memoryview(part) for part in parts]
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        with self._files.open(self._path, write=True, create=True) as file:
            file.write_parts(start, views)
        self._end = start + sum(view.nbytes for view in views)
        return Place(str(self._path), start, self._end - start)


def fetched(place: Place) -> pa.Buffer:
    """A blob, mapped."""
    try:
        whole = Files().map(Path(place.path))
    except FileNotFoundError as error:
        raise UnavailableError(
            f"{place.path}, written in this round, is gone: keep what cleans temporary files away from folders of a "
            "session that runs (spark.local.dir moves them); nothing of the round counts, it can be done again"
        ) from error
    return whole[place.position : place.position + place.length]


def exchange_folder(context: Any) -> Path | None:
    """A folder for blobs that goes with the session, or None where slots may be on several machines."""
    from pyspark import SparkFiles

    if not str(context.master).startswith("local["):
        return None
    folder = Path(SparkFiles.getRootDirectory()) / f"exchange-{SystemRandomness().uuid().hex}"
    Files().mkdir(folder, private=True)
    return folder


def clear(folder: Path) -> None:
    """Remove all blobs; what cannot be removed goes with the session (X2)."""
    files = Files()
    with suppress(TidegateError, OSError):
        for name in files.list(folder):
            files.unlink(folder / name, missing_ok=True)
