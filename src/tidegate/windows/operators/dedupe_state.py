"""What makes records one event, and what an operator that finds them keeps: definition, store and progress.

The checkpoint has, as a named value beside the ids:

    version u8 (1) | MessagePack array: secret (16 bytes), columns, types, progress

The secret is the one the ids were made with; a checkpoint whose ids were made of other columns is refused.

Thread rule: the definition is a value; a state belongs to its operator's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import pyarrow as pa

from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import CorruptError, InvalidError
from tidegate.storage import Merge, StoreSpec
from tidegate.windows.kinds import LATEST
from tidegate.windows.operators.progress import OperatorState, Progress
from tidegate.windows.operators.stream_time import StreamClocks

LatePolicy = Literal["drop", "forward"]
VERSION = 1


@dataclass(frozen=True, slots=True, init=False)
class Deduplicate:
    """What makes records one event, and for how long."""

    columns: tuple[str, ...]
    within_ms: int
    grace_ms: int
    late: LatePolicy
    refresh: bool

    def __init__(
        self,
        columns: str | Sequence[str],
        within: DurationLike,
        *,
        grace: DurationLike | None = None,
        late: LatePolicy = "drop",
        refresh: bool = False,
    ) -> None:
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        if not names or not all(isinstance(name, str) for name in names):
            raise TypeError(f"deduplicate by the name of a column or several, not {columns!r}")
        within_ms = _milliseconds("within", within)
        if within_ms < 1:
            raise InvalidError("deduplicate: within is 0 ms; nothing is a duplicate within no time at all")
        if late not in ("drop", "forward"):
            raise InvalidError(f"deduplicate: late is 'drop' or 'forward', not {late!r}")
        object.__setattr__(self, "columns", names)
        object.__setattr__(self, "within_ms", within_ms)
        object.__setattr__(self, "grace_ms", within_ms if grace is None else _milliseconds("grace", grace))
        object.__setattr__(self, "late", late)
        object.__setattr__(self, "refresh", bool(refresh))

    @property
    def retention_ms(self) -> int:
        """How much stream time of ids is kept: what the oldest record that is not late can still meet."""
        return min(self.within_ms + self.grace_ms, LATEST)


class _Extra(msgspec.Struct, array_like=True):
    secret: bytes
    columns: list[str]
    types: list[str]
    progress: Progress


class DedupeState(OperatorState):
    """The ids' index; the secret, the clocks and the counters are the operator's progress."""

    def __init__(
        self,
        spec: StoreSpec,
        clocks: StreamClocks,
        secret: bytes,
        shape: tuple[list[str], list[str]],
    ) -> None:
        super().__init__(spec, clocks)
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


def _milliseconds(what: str, value: DurationLike) -> int:
    try:
        return duration_ms(value)
    except InvalidError as error:
        raise InvalidError(f"deduplicate: {what}: {error}") from None
