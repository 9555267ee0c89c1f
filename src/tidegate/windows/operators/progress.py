"""The small things an operator must not forget: its clocks, what it has emitted, what it counted.

They travel in the checkpoint with the rows they belong to, as MessagePack with a version in front:

    version u8 (1) | MessagePack array of the fields below, in their order

Thread rule: values, owned by one operator.
"""

from __future__ import annotations

import msgspec

from tidegate.errors import CorruptError
from tidegate.windows.events import NO_TIME

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
