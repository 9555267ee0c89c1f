"""What a source remembers between rounds: where it stands, its stream time, what it knows of producers.

The bytes travel through the master, which stores them in commits and never looks into them:

    version u8 (1) | MessagePack array of the fields below, in their order

Nothing at all is a beginning.

Thread rule: values.
"""

from __future__ import annotations

import msgspec

from tidegate.errors import CorruptError
from tidegate.windows.events import NO_TIME

VERSION = 1


class SourceState(msgspec.Struct, array_like=True, frozen=True):
    """One partition of one flow's source, after some round."""

    next_offset: int = -1  # -1: nothing was read yet
    stream_time: int = NO_TIME
    validator: bytes = b""  # a receiver's checkpoint (`integrity.checkpoint`); empty: none yet
    is_cut: bool = False  # reading did not begin at the partition's first record
    letters: str = ""  # the newest object of dead letters, which names the one before it
    letter_count: int = 0


def encode_state(state: SourceState) -> bytes:
    return bytes([VERSION]) + msgspec.msgpack.encode(state)


def decode_state(data: bytes) -> SourceState:
    """What `encode_state` was given."""
    if not data:
        return SourceState()
    if data[0] != VERSION:
        raise CorruptError(
            f"a source's state has format {data[0]}; this version knows {VERSION}: run the version that wrote it",
            kafka_name=None,
        )
    try:
        return msgspec.msgpack.decode(data[1:], type=SourceState)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"a source's state cannot be read: {error}", kafka_name=None) from error
