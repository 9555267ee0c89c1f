"""What an operator that finds duplicates keeps: the ids in a store, and its progress.

A `StateHandle` keeps in the checkpoint, beside the ids:

    version u8 (1) | MessagePack array: secret (16 bytes), columns, types, progress

The secret is the one the ids were made with; a checkpoint whose ids were made of other columns is refused.

Thread rule: a state belongs to its operator's thread.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa

from tidegate.errors import CorruptError, InvalidError
from tidegate.storage import Merge, RuntimeContext, StoreSpec
from tidegate.windows.operators.progress import OperatorState, Progress
from tidegate.windows.operators.stream_time import StreamClocks

VERSION = 1


class _Extra(msgspec.Struct, array_like=True):
    secret: bytes
    columns: list[str]
    types: list[str]
    progress: Progress


class DedupeState(OperatorState):
    """The ids' index; the secret, the clocks and the counters are the operator's progress."""

    def __init__(
        self,
        context: RuntimeContext,
        spec: StoreSpec,
        clocks: StreamClocks,
        secret: bytes,
        shape: tuple[list[str], list[str]],
    ) -> None:
        super().__init__(context, spec, clocks)
        self._shape = shape
        self.secret = secret

    @property
    def stream_time(self) -> int:
        """The stream time that no source partition is behind."""
        return self.clocks.floor

    def encode_progress(self) -> bytes:
        self.progress.clocks = self.clocks.saved()
        return bytes([VERSION]) + msgspec.msgpack.encode(_Extra(self.secret, *self._shape, self.progress))

    def roll_back(self, data: bytes) -> None:
        if not data:
            self.progress = Progress()
            return
        if data[0] != VERSION:
            raise CorruptError(
                f"store {self._index.spec.name}: a deduplication's progress has format {data[0]}; this version knows"
                f" {VERSION}: restore with the version that wrote the checkpoint, or start anew"
            )
        try:
            extra = msgspec.msgpack.decode(data[1:], type=_Extra)
        except msgspec.MsgspecError as error:
            raise CorruptError(
                f"store {self._index.spec.name}: a deduplication's progress cannot be read: {error}"
            ) from error
        if (extra.columns, extra.types) != self._shape:
            raise InvalidError(
                f"store {self._index.spec.name}: the checkpoint's ids were made of {extra.columns} {extra.types},"
                f" now of {self._shape[0]} {self._shape[1]}: they cannot be compared; start anew under another name"
            )
        self.secret, self.progress = extra.secret, extra.progress
        self.clocks.restore(extra.progress.clocks)


def ids_spec(name: str, bucket_ms: int) -> StoreSpec:
    """The store of accepted identities; a time segment is one bucket."""
    payload = pa.schema(
        [pa.field("offset", pa.int64(), nullable=False), pa.field("partition", pa.int32(), nullable=False)]
    )
    return StoreSpec(name, Merge.LAST, payload=payload, bucket_ms=bucket_ms)
