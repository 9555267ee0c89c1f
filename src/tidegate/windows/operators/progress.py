"""The small things an operator must not forget: its clocks, what it has emitted, what it counted.

They are in the checkpoint with the rows they belong to, as MessagePack with a version in front:

    version u8 (1) | MessagePack array of the fields below, in their order

`StateHandle` keeps these bytes (`OperatorState`), under the name of the operator's store. Beside the store's runs the
checkpoint has one byte, version 2, which says so; releases that kept version 1 there refuse it.

Thread rule: values, owned by one operator.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Final

import msgspec

from tidegate.errors import CorruptError
from tidegate.storage import PROGRESS, BytesCodec, RuntimeContext, StoreSpec
from tidegate.windows.events import NO_TIME
from tidegate.windows.stores.state import StoreState

if TYPE_CHECKING:
    from tidegate.windows.operators.stream_time import StreamClocks

VERSION = 1
IN_HANDLE: Final = b"\x02"  # beside a store's runs: the progress is in the handle


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
    """The index of an operator's store, and the operator's progress in the task's `StateHandle`."""

    def __init__(
        self, context: RuntimeContext, spec: StoreSpec, clocks: StreamClocks, *, forgets: bool = False
    ) -> None:
        super().__init__(spec)
        self._handle = context.state_handle(PROGRESS, BytesCodec(), keyed=False)
        self._forgets = forgets
        self.clocks = clocks
        self.progress = Progress()

    @abstractmethod
    def encode_progress(self) -> bytes:
        """The progress as it is now."""

    @abstractmethod
    def roll_back(self, data: bytes) -> None:
        """As it was when `encode_progress` returned this, or as at the beginning; the rows are as they are."""

    def keep(self) -> None:
        """Have the progress in every checkpoint from now on; once the store is attached."""
        self._handle.keep(self._index.spec.name, self.encode_progress)

    def encode_extra(self) -> bytes:
        return IN_HANDLE

    def restore_extra(self, data: bytes) -> None:
        """`data` is the progress itself in a checkpoint of a release that kept it beside the rows."""
        progress = self._kept() if data == IN_HANDLE else data
        self.roll_back(progress)
        if self._forgets or not progress:
            self.clocks.forget()
        self.restored()

    def _kept(self) -> bytes:
        name = self._index.spec.name
        kept = self._handle.kept(name)
        if kept is None:
            raise CorruptError(
                f"the checkpoint has the rows of store {name} and not its operator's progress; go back to an older"
                " checkpoint",
                kafka_name=None,
            )
        return kept
