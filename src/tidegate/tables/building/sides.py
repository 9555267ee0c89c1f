"""Which commit is read: a newer one is restored beside the one that is shown, and then takes its place.

Restoring a commit takes milliseconds, and whoever asks should not wait for it. So there are two sides: questions look
at one, and `move` brings the other, which nobody looks at, to the newer commit; packs that are open on it stay open.
Only where long looks hold the other side too is a further one opened, and let go when they end (a scan looks from its
first batch until it ends, is closed or is garbage collected). What no snapshot can be moved to, because it is of
another shape, is opened by `replace`; what was there before is closed by its last look.

D1  a look sees one commit from its beginning to its end.
D2  a move that fails changes nothing: what was shown is shown.
D3  when nobody looks there are at most two snapshots.

Thread rule: looks from any thread; one `move` or `replace` at a time; `close` when nobody looks any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Shows(Protocol):
    """A snapshot, as far as sides are concerned."""

    def close(self) -> None: ...


View = TypeVar("View", bound=Shows)


@dataclass(slots=True, eq=False)
class _Side(Generic[View]):
    view: View
    looks: int = 0
    is_replaced: bool = False


class Sides(Generic[View]):
    """The snapshot that is shown, and the one that the next commit is restored into."""

    def __init__(self) -> None:
        self._guard = threading.RLock()  # a look may end in a garbage collection, on the thread that has it
        self._shown: _Side[View] | None = None
        self._others: list[_Side[View]] = []

    @property
    def shown(self) -> View | None:
        """What is looked at now; None before the first `move`. To look into it, hold it."""
        side = self._shown
        return None if side is None else side.view

    @contextmanager
    def held(self) -> Iterator[View]:
        """What is shown, for one look (D1)."""
        with self._guard:
            side = self._shown
            if side is None:
                raise RuntimeError("nothing is shown before the first move")
            side.looks += 1
        try:
            yield side.view
        finally:
            with self._guard:
                side.looks -= 1
                gone = self._spare_sides()
            for each in gone:
                each.view.close()

    def move(self, open_it: Callable[[], View], show: Callable[[View], object]) -> None:
        """Show another commit: `show` brings a snapshot to it, `open_it` makes one where none is free."""
        with self._guard:
            free = next((each for each in self._others if not each.looks and not each.is_replaced), None)
            if free is not None:
                self._others.remove(free)
        if free is None:
            free = _Side(open_it())
        else:
            try:
                show(free.view)
            except BaseException:  # half moved: of no use to anybody (D2)
                free.view.close()
                raise
        self._turn_to(free)

    def replace(self, open_it: Callable[[], View]) -> None:
        """Show something else, which no snapshot that is here can be brought to."""
        self._turn_to(_Side(open_it()), is_other=True)

    def close(self) -> None:
        with self._guard:
            every = [*self._others, *([] if self._shown is None else [self._shown])]
            self._shown, self._others = None, []
        for each in every:
            each.view.close()

    def _turn_to(self, side: _Side[View], *, is_other: bool = False) -> None:
        with self._guard:
            if self._shown is not None:
                self._others.append(self._shown)
            for each in self._others if is_other else ():
                each.is_replaced = True
            self._shown = side
            gone = self._spare_sides()
        for each in gone:
            each.view.close()

    def _spare_sides(self) -> list[_Side[View]]:
        """Take out what nobody looks at: all that was replaced, and of the rest all but one (D3)."""
        idle = [each for each in self._others if not each.looks]
        gone = [each for each in idle if each.is_replaced]
        gone += [each for each in idle if not each.is_replaced][:-1]
        return [each for each in gone if self._take_out(each)]

    def _take_out(self, side: _Side[View]) -> bool:
        try:
            self._others.remove(side)
        except ValueError:  # a look that ended meanwhile, on this thread, has it
            return False
        return True
