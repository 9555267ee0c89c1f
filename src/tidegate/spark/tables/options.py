"""The options of `format("tidegate.table")`, read and checked before anything is opened.

| option | means | default |
|---|---|---|
| `state` (or the path given to `load`) | the folder or the object store's address the table is kept in | required |
| `table` | its name | the only one there |
| `key`, `value` | serdes, as `string`, `long`, `Json(amount='double')` | as the table was made |
| `columns` | which columns to make, with commas between | all |
| `versionAsOf` | the number of a commit | the last commit |
| `timestampAsOf` | instead: the last commit at or before this moment | |
| `batchRows` | at most so many rows in one Arrow batch | 65536 |
| `cache` | a local folder for copies, where `state` is an object store; one on every executor | `TIDEGATE_CACHE` |
| `storage.…` | settings of the object store, as `storage.region` | the environment's |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import InvalidError
from tidegate.spark.options import GivenOptions

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend
    from tidegate.tables.serdes.base import Serde

NAMES = (
    *("state", "path", "table", "key", "value", "columns"),
    *("versionAsOf", "timestampAsOf", "batchRows", "cache"),
)
STORAGE = "storage."
BATCH_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class TableOptions:
    """What the user asked for. None means not asked for."""

    state: str
    table: str | None = None
    key: str | None = None
    value: str | None = None
    columns: tuple[str, ...] = ()
    version: int | None = None
    moment_ms: int | None = None
    batch_rows: int = BATCH_ROWS
    cache: str | None = None
    storage: Mapping[str, str] = field(default_factory=dict)
    key_id: str = ""
    """The key that the state is verified with, as the driver has it; empty where it has none."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> TableOptions:
        from tidegate.storage import state_key_id

        given = GivenOptions(
            options, NAMES, source="tidegate.table source", aliases={"path": "state"}, prefixes=(STORAGE,)
        )
        found = cls(
            state=_address(
                given.required("state", "where the table is kept, as in .option('state', './data/state')")
            ),
            table=given.text("table"),
            key=given.text("key"),
            value=given.text("value"),
            columns=given.words("columns"),
            version=given.count("versionAsOf"),
            moment_ms=given.moment("timestampAsOf"),
            batch_rows=given.count("batchRows") or BATCH_ROWS,
            cache=given.text("cache"),
            storage=given.below(STORAGE),
            key_id=state_key_id(),
        )
        if found.version is not None and found.moment_ms is not None:
            raise InvalidError("versionAsOf and timestampAsOf both choose a commit; keep one")
        return found

    @contextmanager
    def opened(self) -> Iterator[StorageBackend]:
        """The backend, for a while; it must be there: reading makes nothing."""
        from tidegate.storage import open_backend

        cache = None if self.cache is None else Path(self.cache)
        backend = open_backend(
            self.state, read_only=True, cache=cache, options=self.storage or None, key_id=self.key_id
        )
        try:
            yield backend
        finally:
            backend.close()

    def serde(self, option: str, stored: str) -> Serde[Any]:
        """The serde asked for, else the stored one where its name says all, else bytes."""
        from tidegate.tables.serdes.base import Bytes
        from tidegate.tables.serdes.json import require_serde, serde_from

        asked = self.key if option == "key" else self.value
        return require_serde(asked, option) if asked is not None else serde_from(stored) or Bytes()


def is_folder(address: str) -> bool:
    return "://" not in address


def _address(text: str) -> str:
    if text.startswith("memory://"):
        raise InvalidError(
            "a table in memory is seen by its own process alone; keep it in a folder for Spark"
        )
    if text.startswith("file:///"):
        return text.removeprefix("file://")
    return str(Path(text).absolute()) if is_folder(text) else text
