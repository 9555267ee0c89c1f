"""What a store owns in a task: the index of its rows, and what a checkpoint keeps beside them.

Operators and tables keep their progress there (`StoreState`). A store with a clock of its own keeps, in one versioned
value (msgpack, an array):

    version | observed time | sequence of retained duplicates | sequence of the changelog | dropped puts | position

S1  rows and this value are of one moment: storage asks for it inside its cut.
S2  a store that forgets its clocks (`Compat`) keeps them all the same; it forgets when it is restored.

Thread rule: the task's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from tidegate.errors import CorruptError
from tidegate.storage import BucketIndex, StoreSpec
from tidegate.windows.stores.expiry import NOTHING_OBSERVED
from tidegate.windows.stores.positions import Position

VERSION = 1


class _Extra(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    observed_time: int
    sequence: int
    logged_sequence: int
    dropped_records: int
    position: dict[str, dict[int, int]]


class StoreState(ABC):
    """A store's index, and what the checkpoint keeps beside its rows; the store opens again after every restore."""

    def __init__(self, spec: StoreSpec) -> None:
        self._index = BucketIndex(spec)
        self._on_restored: Callable[[], None] | None = None

    @property
    def index(self) -> BucketIndex:
        return self._index

    @property
    @abstractmethod
    def stream_time(self) -> int:
        """How far time has come for its rows; -1 before the first. Known from a checkpoint, too."""

    @abstractmethod
    def encode_progress(self) -> bytes:
        """What the checkpoint keeps beside the rows."""

    @abstractmethod
    def restore_progress(self, data: bytes) -> None:
        """Take over what `encode_progress` answered, then call `restored`."""

    def when_restored(self, call: Callable[[], None]) -> None:
        """Set who looks at the index again after every restore: the store."""
        self._on_restored = call

    def restored(self) -> None:
        """Tell the store."""
        if self._on_restored is not None:
            self._on_restored()


class RowsState(StoreState):
    """A state that keeps nothing beside its rows; its stream time is another state's."""

    def __init__(self, spec: StoreSpec, clock: Callable[[], int] = lambda: NOTHING_OBSERVED) -> None:
        super().__init__(spec)
        self._clock = clock

    @property
    def stream_time(self) -> int:
        return self._clock()

    def encode_progress(self) -> bytes:
        return b""

    def restore_progress(self, data: bytes) -> None:
        self.restored()


class WindowsState(StoreState):
    """The state of a store that has its own clock: the largest time it was given."""

    def __init__(self, spec: StoreSpec, *, forgets_clocks: bool = False) -> None:
        super().__init__(spec)
        self._forgets_clocks = forgets_clocks
        self._reset()

    def _reset(self) -> None:
        self.observed_time = NOTHING_OBSERVED
        self.sequence = 0
        self.logged_sequence = 0
        self.dropped_records = 0
        self.position = Position()

    @property
    def stream_time(self) -> int:
        return self.observed_time

    def encode_progress(self) -> bytes:
        return msgspec.msgpack.encode(
            _Extra(
                VERSION,
                self.observed_time,
                self.sequence,
                self.logged_sequence,
                self.dropped_records,
                self.position.to_dict(),
            )
        )

    def restore_progress(self, data: bytes) -> None:
        self._reset()
        if data:
            extra = self._decode(data)
            self.dropped_records = extra.dropped_records
            self.position = Position(extra.position)
            if not self._forgets_clocks:
                self.observed_time = extra.observed_time
                self.sequence, self.logged_sequence = extra.sequence, extra.logged_sequence
        self.restored()

    def _decode(self, data: bytes) -> _Extra:
        name = self._index.spec.name
        try:
            extra = msgspec.msgpack.decode(data, type=_Extra)
        except msgspec.DecodeError as error:
            raise CorruptError(
                f"the checkpoint's clock and counters of store {name} cannot be read ({error}); go back to an older"
                " checkpoint",
                kafka_name=None,
            ) from None
        if extra.version != VERSION:
            raise CorruptError(
                f"the checkpoint's clock and counters of store {name} have version {extra.version}, this program"
                f" reads {VERSION}: use the program that wrote them, or a newer one",
                kafka_name=None,
            )
        return extra
