"""What storage asks of an operator's state: the index of its rows, and two optional blobs at a checkpoint.

Anything with an `index` plugs into reading, writing, maintenance and checkpoints; storage knows no more of it.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tidegate.storage.index.bucket_index import BucketIndex


class BucketIndexState(Protocol):
    """Anything that owns a `BucketIndex`."""

    @property
    def index(self) -> BucketIndex: ...


@runtime_checkable
class ExtraState(Protocol):
    """A state that keeps something of its own in the checkpoint: a watermark, a position, a counter."""

    def encode_extra(self) -> bytes:
        """What the checkpoint keeps beside the index; called on the operator's thread."""

    def restore_extra(self, data: bytes) -> None:
        """What `encode_extra` returned at the checkpoint being restored; empty when there was none."""


class PlainState:
    """The least state there is: an index and nothing else."""

    def __init__(self, index: BucketIndex) -> None:
        self._index = index

    @property
    def index(self) -> BucketIndex:
        return self._index
