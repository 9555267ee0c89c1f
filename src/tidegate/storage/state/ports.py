"""What the state cache asks of others: a codec from the operator, a shelf for blobs from the storage runtime."""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Value = TypeVar("Value")


class StateCodec(Protocol[Value]):
    """How an operator's state of one key becomes bytes and back. Blobs outlive the program: version them."""

    def encode(self, value: Value) -> bytes: ...

    def decode(self, blob: bytes) -> Value: ...

    def estimate(self, value: Value) -> int:
        """Roughly the bytes it needs in memory."""
        ...


class BytesCodec:
    """State that is bytes already."""

    def encode(self, value: bytes) -> bytes:
        return value

    def decode(self, blob: bytes) -> bytes:
        return blob

    def estimate(self, value: bytes) -> int:
        return len(value)


class BlobShelf(Protocol):
    """Where blobs lie when they are not in the cache: columns in, columns out, no Python per key.

    What was written is read from then on, by any thread. Writes of one (task, namespace) never overlap; inside
    one write the later row of a key wins. A blob that is not there and a blob that could not be read are
    different things: the first is a False in the mask, the second an error (INV-24).
    """

    def write(
        self, task: str, namespace: str, keys: pa.BinaryArray, blobs: pa.BinaryArray, deleted: pa.BooleanArray
    ) -> None:
        """Set the blob of each key, or take it away where `deleted`; all or nothing."""
        ...

    def read(
        self, task: str, namespace: str, keys: pa.BinaryArray
    ) -> tuple[npt.NDArray[np.bool_], pa.BinaryArray]:
        """Which keys have a blob, and the blobs, one a key and null where there is none."""
        ...
