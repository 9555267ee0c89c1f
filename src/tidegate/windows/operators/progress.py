"""The small things an operator must not forget: its clocks, what it has emitted, what it counted.

They are in the checkpoint with the rows they belong to, as MessagePack with a version in front:

    version u8 (1) | MessagePack array of the fields below, in their order

Storage keeps these bytes as a named value of the task's `StateHandle`, under the name of the operator's store.

Thread rule: values, owned by one operator.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import msgspec

from tidegate.errors import CorruptError
from tidegate.storage import StoreSpec
from tidegate.windows.events import NO_TIME
from tidegate.windows.stores.state import StoreState

if TYPE_CHECKING:
    from tidegate.windows.operators.stream_time import StreamClocks

VERSION = 1


class Clocks(msgspec.Struct, array_like=True):
    """The stream time of each source partition, and how long it has been silent."""

    partitions: list[int] = []
    times: list[int] = []
    active_at: list[int] = []  # the round time of the last record that counted
    idle: list[bool] = []
    floor: int = NO_TIME


class Progress(msgspec.Struct, array_like=True):
    """Everything one window operator keeps beside its rows."""

    clocks: Clocks = msgspec.field(default_factory=Clocks)
    closed: int = NO_TIME  # windows that end at or before this were emitted for good
    counters: dict[str, int] = {}
    late_bytes: dict[int, int] = {}  # of the late table, by the start of its time segment

    def count(self, name: str, number: int) -> None:
        """Add to a counter."""
        if number:
            self.counters[name] = self.counters.get(name, 0) + int(number)


def encode(progress: Progress) -> bytes:
    return bytes([VERSION]) + msgspec.msgpack.encode(progress)


def decode(data: bytes) -> Progress:
    """What `encode` was given; nothing at all is a beginning."""
    if not data:
        return Progress()
    if data[0] != VERSION:
        raise CorruptError(
            f"an operator's progress has format {data[0]}; this version knows {VERSION}: restore with the version"
            " that wrote the checkpoint, or start anew"
        )
    try:
        return msgspec.msgpack.decode(data[1:], type=Progress)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"an operator's progress cannot be read: {error}") from error


class OperatorState(StoreState):
    """The index of an operator's store, and the operator's progress."""

    def __init__(self, spec: StoreSpec, clocks: StreamClocks, *, forgets: bool = False) -> None:
        super().__init__(spec)
        self._forgets = forgets
        self.clocks = clocks
        self.progress = Progress()

    @abstractmethod
    def encode_progress(self) -> bytes:
        """The progress as it is now."""

    @abstractmethod
    def roll_back(self, data: bytes) -> None:
        """As it was when `encode_progress` returned this, or as at the beginning; the rows are as they are."""

    def restore_progress(self, data: bytes) -> None:
        if not data and self._index.bucket_count:
            raise CorruptError(
                f"the checkpoint has the rows of store {self._index.spec.name} and not its operator's progress; go"
                " back to an older checkpoint",
                kafka_name=None,
            )
        self.roll_back(data)
        if self._forgets or not data:
            self.clocks.forget()
        self.restored()
