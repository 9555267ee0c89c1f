"""The named values of one task: small blobs that every checkpoint carries in its manifest, beside the runs.

An operator keeps its progress (clocks, counters) here through a `StateHandle`. Whoever keeps a value is asked for it
inside a checkpoint's cut, so it is of the same moment as the rows; a manifest that is a delta holds a value only when
its bytes changed. In a manifest a value is the extra `state/<namespace>/<name>`.

The blobs held here are those of the checkpoint the task was last equal to; what the values are now, `ask` tells.

N1  a value nobody keeps stays as the restored checkpoint had it, and is in the next checkpoint, too.
N2  the bytes of all values are in the memory pool (tenant `STATE_CACHE`). There is one value an operator, not one a
    key, so they are never evicted.

Thread rule: the operator's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tidegate.storage.index.entries import Tenant
from tidegate.storage.memory.pool import WorkerMemoryPool

PROGRESS = "progress"  # the namespace of operators' progress; the name is that of the operator's store
_PREFIX = "state/"


class NamedValues:
    """Blobs by `<namespace>/<name>`, and who keeps them."""

    def __init__(self, task: str, pool: WorkerMemoryPool) -> None:
        self._task = task
        self._pool = pool
        self._blobs: dict[str, bytes] = {}
        self._keepers: dict[str, Callable[[], bytes]] = {}

    def keep(self, name: str, encode: Callable[[], bytes]) -> None:
        """From now on ask `encode` for the value; that alone is no change since the last checkpoint."""
        self._keepers[name] = encode
        self._set({**self._blobs, name: encode()})

    def get(self, name: str) -> bytes | None:
        """The value as the last checkpoint, restore or `keep` has it."""
        return self._blobs.get(name)

    def ask(self) -> dict[str, bytes]:
        """All values as they are now."""
        return {**self._blobs, **{name: encode() for name, encode in self._keepers.items()}}

    def is_saved(self) -> bool:
        """Whether all values are as the last checkpoint has them."""
        return self.ask() == self._blobs

    def saved(self, values: Mapping[str, bytes]) -> None:
        """A checkpoint has these values."""
        self._set(values)

    def load(self, extras: Mapping[str, bytes]) -> None:
        """Take over the values of a manifest in place of all there are; who keeps them stays."""
        self._set(
            {name.removeprefix(_PREFIX): blob for name, blob in extras.items() if name.startswith(_PREFIX)}
        )

    def drop(self, name: str) -> None:
        """Forget a value and who keeps it."""
        self._keepers.pop(name, None)
        self._set({other: blob for other, blob in self._blobs.items() if other != name})

    def _set(self, values: Mapping[str, bytes]) -> None:
        growth = _size(values) - _size(self._blobs)
        self._blobs = dict(values)
        if growth > 0:
            self._pool.reserve_over_limit(self._task, Tenant.STATE_CACHE, growth)
        elif growth < 0:
            self._pool.release(self._task, Tenant.STATE_CACHE, -growth)


def extras_of(values: Mapping[str, bytes]) -> dict[str, bytes]:
    """The values as a manifest names them."""
    return {_PREFIX + name: blob for name, blob in values.items()}


def _size(values: Mapping[str, bytes]) -> int:
    return sum(len(name) + len(blob) for name, blob in values.items())
