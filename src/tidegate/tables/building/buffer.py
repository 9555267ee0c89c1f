"""The bounded buffer between the consuming and the draining stage, in bytes.

B1  what is waiting never exceeds the limit, but for one piece that alone is larger.
B2  nothing is lost: a piece is refused (False) or taken, and comes out in the order it went in.
B3  closing wakes both sides; what is waiting can still be taken out.

Thread rule: one thread puts, one takes.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from tidegate.clock import Clock

DEFAULT_LIMIT_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Records of one partition and the offset after them; no records where only the position moved."""

    partition: int
    next_offset: int
    records: pa.RecordBatch | None
    nbytes: int = 0


class BoundedBuffer:
    """Pieces on their way to the drainer."""

    def __init__(self, clock: Clock, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._clock = clock
        self._pieces: deque[Piece] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def put(self, piece: Piece, timeout_ms: int = 0) -> bool:
        """Take the piece in, waiting for room at most so long; False when there was none or the buffer closed."""
        with self._changed:
            deadline = self._clock.monotonic_ms() + timeout_ms
            while not self._closed and self._pieces and self._bytes + piece.nbytes > self.limit_bytes:
                left = deadline - self._clock.monotonic_ms()
                if left <= 0:
                    return False
                self._clock.wait_ms(self._changed, left)
            if self._closed:
                return False
            self._pieces.append(piece)
            self._bytes += piece.nbytes
            self._changed.notify_all()
            return True

    def take(self, timeout_ms: int = 0) -> Piece | None:
        """The oldest piece, waiting for one at most so long."""
        with self._changed:
            if not self._pieces and not self._closed and timeout_ms:
                self._clock.wait_ms(self._changed, timeout_ms)
            if not self._pieces:
                return None
            piece = self._pieces.popleft()
            self._bytes -= piece.nbytes
            self._changed.notify_all()
            return piece

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
