"""One partition of a table in storage: its rows, and beside them in every checkpoint how far they go.

Rows: key = inner key, ts = window start (session end; 0 for plain keys), seq = 0 (session start), and

    value      the record's value, as it came
    value_ts   the record's timestamp, -1 for none
    offset     where the record lies in its partition

The extra of a checkpoint is msgpack of `Progress`: the next offset, the observed time, the drainer's validation
state and the cells of offsets belong to exactly these rows (I1), so a restart neither reads twice nor leaves out. So
does `live`, what a replica of a hybrid table knows of its live topic (`replicas.upstream`); other tables have none. And
`verdicts`, how many records of each verdict a push came to so far (`versions.ingesting`): whoever goes on from a commit
goes on counting there. None is not zero: such a progress was saved by somebody who does not count them.

A partition that stopped at a fault is *frozen*: its progress stays as it was saved last, while others go on. Rows it
stored since are written again when it is read again, and are the same.

Thread rule: changed by the draining thread alone; `observed_ms` and `next_offset` may be read from any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import pyarrow as pa

from tidegate.errors import CorruptError
from tidegate.storage import Merge, RuntimeContext, StoreSpec
from tidegate.tables.building.cells import Cell, OffsetCells
from tidegate.tables.building.shape import TableShape
from tidegate.windows.stores.key_value_store import KeyValueStore
from tidegate.windows.stores.segmented_store import StoreState
from tidegate.windows.stores.segments import NOTHING_OBSERVED
from tidegate.windows.stores.session_store import SessionStore
from tidegate.windows.stores.window_store import WindowStore

NEVER: Final = -1
EARLIEST: Final = -(2**63)
PAYLOAD: Final = pa.schema(
    [
        pa.field("value", pa.binary()),
        pa.field("value_ts", pa.int64(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
    ]
)
VERSION: Final = 2
KEY_BUCKET_MS: Final = 60_000


class Counts(msgspec.Struct):
    """What became of a partition's records, since the table began."""

    applied: int = 0
    deleted: int = 0
    null_keys: int = 0
    bad_keys: int = 0
    bad_values: int = 0
    expired: int = 0
    repeated: int = 0  # left out by validation as repeats
    skipped_offsets: int = 0  # aged out of the topic before they were read
    letters_not_kept: int = 0  # dead letters beyond the bytes that are kept of them
    fenced: int = 0  # left out because another one led the partition by then
    faulty: int = 0  # left out by validation, because they are not what their producer sent


class Progress(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a checkpoint says beside the rows."""

    version: int
    next_offset: int
    observed_ms: int
    newest_ms: int
    drainer: bytes
    counts: Counts
    cells: dict[int, Cell]
    live: bytes = b""
    verdicts: dict[str, int] | None = None


class PartitionState(StoreState):
    """A store's state with its progress."""

    def __init__(self, shape: TableShape, partition: int) -> None:
        self.shape = shape
        self.partition = partition
        width = shape.segment_ms if shape.is_windowed else KEY_BUCKET_MS
        super().__init__(
            StoreSpec(
                name=f"partition-{partition}",
                merge=Merge.LAST,
                payload=PAYLOAD,
                bucket_ms=width,
                segment_ms=width,
            )
        )
        self.expiry = shape.expiry
        self.cells = OffsetCells(self.expiry, shape.size_ms)
        self.next_offset = 0
        self.observed_ms = NOTHING_OBSERVED
        self.newest_ms = NEVER
        self.counts = Counts()
        self.drainer = b""
        self.live = b""
        self.verdicts: dict[str, int] | None = None
        self.encode_drainer: Callable[[], bytes] | None = None
        self.encode_live: Callable[[], bytes] | None = None
        self._saved = b""
        self._is_frozen = False

    @property
    def stream_time(self) -> int:
        """The observed time: the largest window start (session end) of its records."""
        return self.observed_ms

    @property
    def readable_from(self) -> int:
        """The earliest ts that is not expired for readers."""
        if not self.shape.is_windowed:
            return EARLIEST
        return self.expiry.first_readable_ts(self.observed_ms)

    @property
    def live_from(self) -> int:
        """Where the earliest live time segment begins: what lies before it is given back."""
        return self.expiry.first_live_ts(self.observed_ms)

    def freeze(self) -> None:
        """Save nothing new from now on."""
        self._is_frozen = True

    def encode_progress(self) -> bytes:
        if self._is_frozen:
            return self._saved
        if self.encode_drainer is not None:
            self.drainer = self.encode_drainer()
        if self.encode_live is not None:
            self.live = self.encode_live()
        self._saved = msgspec.msgpack.encode(
            Progress(
                VERSION,
                self.next_offset,
                self.observed_ms,
                self.newest_ms,
                self.drainer,
                self.counts,
                self.cells.cells,
                self.live,
                self.verdicts,
            )
        )
        return self._saved

    def restore_progress(self, data: bytes) -> None:
        if data:
            self._restore(data)
        self.restored()

    def _restore(self, data: bytes) -> None:
        try:
            found = msgspec.msgpack.decode(data, type=Progress)
        except msgspec.DecodeError as error:
            raise CorruptError(
                f"the progress of partition {self.partition} of table {self.shape.name} cannot be read ({error}); "
                "go back to an older commit, or build the table anew in another state folder"
            ) from None
        if found.version != VERSION:
            raise CorruptError(
                f"table {self.shape.name} was written by another release (progress version {found.version}, this one "
                f"reads {VERSION}); open it with that release, or build it anew in another state folder"
            )
        self._saved = bytes(data)
        self.next_offset, self.observed_ms = found.next_offset, found.observed_ms
        self.newest_ms, self.drainer, self.counts = found.newest_ms, found.drainer, found.counts
        self.cells.cells, self.live, self.verdicts = found.cells, found.live, found.verdicts


def open_store(context: RuntimeContext, state: PartitionState) -> WindowStore | SessionStore | KeyValueStore:
    """The store that the builder writes a partition through; opening it drops expired time segments."""
    shape = state.shape
    if shape.kind == "key":
        return KeyValueStore(context, state)
    if shape.kind == "session":
        return SessionStore(context, state, retention=shape.retention_ms)
    return WindowStore(context, state, retention=shape.retention_ms)
