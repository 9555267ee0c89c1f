"""Records found: by key, value, header and time, forwards or backwards, page by page and within a budget.

Q1  a question reads at most its budget (records and time). When that is spent it says how far it looked, and `next`
    goes on there; an empty page is never "there is none" while something was not looked at.
Q2  rows and bytes of a page are bounded.
Q3  damage is stepped over and said, with the offset where reading went on.

`order=newest` (the default) reads backwards from the end, in stretches; `oldest` forwards from `offset`, `at` or the
start.

Thread rule: one search, one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from tidegate.durations import moment_ms
from tidegate.errors import CorruptError, InvalidError, OffsetOutOfRangeError
from tidegate.web.reading.filtering import Filter, matching
from tidegate.web.reading.site import Budget, Site, positions_of, written_positions

if TYPE_CHECKING:
    import pyarrow as pa

STRETCH: Final = 20_000
FETCH_BYTES: Final = 4 << 20
PIECE_BYTES: Final = 8 << 20
LATEST_MS: Final = 2**62


class RecordsQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to look for. Texts are parts of the key, the value, a header (`name` or `name=part`)."""

    partition: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    offset: (
        Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1, description="Begin here, and go forward")] | None
    ) = None
    at: Annotated[str, msgspec.Meta(max_length=40, description="From this moment on: 2026-01-01T10:00Z")] = ""
    until: Annotated[str, msgspec.Meta(max_length=40, description="Up to this moment")] = ""
    key: Annotated[str, msgspec.Meta(max_length=1000, description="A part of the key")] = ""
    value: Annotated[str, msgspec.Meta(max_length=1000, description="A part of the value")] = ""
    header: Annotated[
        str, msgspec.Meta(max_length=1000, description="A header's name, or name=part of its value")
    ] = ""
    order: Literal["newest", "oldest"] = "newest"
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000, description="Rows of a page")] = 50
    after: Annotated[
        str, msgspec.Meta(max_length=4000, description="`next` of the page before: where to go on")
    ] = ""
    keys: Literal["auto", "plain", "topic", "changelog", "session"] = "auto"
    control_records: Annotated[
        bool, msgspec.Meta(description="Show Tidegate's own records of producers' numbering, too")
    ] = False


class Search:
    """One search through some partitions, forwards or backwards, until a page is full or the budget is spent."""

    def __init__(self, site: Site, topic: str, question: RecordsQuestion) -> None:
        self._site, self._topic, self._question = site, topic, question
        self.numbers = site.numbers(topic, question.partition)
        self.budget: Budget = site.budget()
        self.damage: list[str] = []
        self._filter = Filter.of(question.key, question.value, question.header)
        self._bounds = {number: each for number, each in site.bounds(topic).items() if number in self.numbers}
        self._until_ms = moment_of(question.until, LATEST_MS)
        self._at_ms = moment_of(question.at, -1)
        if self._at_ms >= 0:  # nothing before that offset is as new; what follows it may be older, though
            self._bounds = {
                number: (self._offset_at(number, self._at_ms, high), high)
                for number, (_, high) in self._bounds.items()
            }
        if question.offset is not None and question.partition is None and len(self.numbers) > 1:
            raise InvalidError("offset needs a partition; say which one")
        after = question.after
        if after and after[0] not in "+- ":
            raise InvalidError("after is what the page before gave as `next`; take it as it was")
        forward = question.order == "oldest" or question.offset is not None
        self.is_backward = after[0] == "-" if after else not forward
        self._places = self._start(after[1:])
        self._rows = self._bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether all there is was looked at."""
        return all(self._is_done(number) for number in self.numbers)

    @property
    def following(self) -> str | None:
        """What goes on where this search ended; None when there is no more."""
        return None if self.is_complete else f"{'-' if self.is_backward else '+'}{self.where()}"

    def where(self) -> str:
        return written_positions(self._places)

    def run(self) -> list[pa.Table]:
        limits, found = self._site.limits, list[Any]()
        step = self._backwards if self.is_backward else self._forwards
        wanted = min(self._question.limit, limits.page_rows)
        while not self.is_complete and self._rows < wanted and self._bytes < limits.page_bytes:
            left = [number for number in self.numbers if not self._is_done(number)]
            share = -(-(wanted - self._rows) // len(left))  # so that every partition is on the page
            for number in left:
                if self._rows >= wanted:
                    break
                table = step(number, min(share, wanted - self._rows))
                if table is not None and table.num_rows:
                    found.append(table)
                    self._rows += table.num_rows
                    self._bytes += table.nbytes
                if self.budget.is_spent:
                    return found
        return found

    # -- inside ----------------------------------------------------------------------------------

    def _start(self, after: str) -> dict[int, int]:
        low = {number: bounds[0] for number, bounds in self._bounds.items()}
        high = {number: bounds[1] for number, bounds in self._bounds.items()}
        if after:
            given = positions_of(after, self.numbers)
            return {
                number: min(max(given.get(number, high[number]), low[number]), high[number])
                for number in self.numbers
            }
        if self.is_backward:
            return high
        if self._question.offset is not None:
            return {
                number: min(max(self._question.offset, low[number]), high[number]) for number in self.numbers
            }
        return low

    def _offset_at(self, number: int, time_ms: int, otherwise: int) -> int:
        """The first offset of a record as new as that."""
        found = self._site.log.offset_for_time(self._topic, number, time_ms)
        return otherwise if found is None else found

    def _is_done(self, number: int) -> bool:
        low, high = self._bounds[number]
        return self._places[number] <= low if self.is_backward else self._places[number] >= high

    def _forwards(self, number: int, wanted: int) -> pa.Table | None:
        """What matches from here on, until the page is full or a stretch has been read."""
        low, high = self._places[number], self._bounds[number][1]
        kept = Kept(wanted, self._site.limits.page_bytes - self._bytes, from_end=False)
        stop = min(high, low + (max(wanted, 1) if self._is_plain else STRETCH))
        if not self._read(number, low, stop, kept):
            return kept.table()
        self._places[number] = kept.edge + 1 if kept.is_cut else stop
        return kept.table()

    def _backwards(self, number: int, wanted: int) -> pa.Table | None:
        """The last that match before here, of a stretch."""
        low, high = self._bounds[number][0], self._places[number]
        kept = Kept(wanted, self._site.limits.page_bytes - self._bytes, from_end=True)
        start = max(low, high - (max(wanted, 1) if self._is_plain else STRETCH))
        self._read(number, start, high, kept)
        self._places[number] = max(low, kept.edge if kept.is_cut else start)
        return kept.table()

    @property
    def _is_plain(self) -> bool:
        return self._filter.is_empty and self._at_ms < 0 and self._until_ms >= LATEST_MS

    def _picked(self, batch: pa.RecordBatch) -> pa.Table:
        import pyarrow as pa

        return matching(pa.Table.from_batches([batch]), self._filter, self._at_ms, self._until_ms)

    def _read(self, number: int, start: int, stop: int, kept: Kept) -> bool:
        """Take what matches of a stretch, batch by batch; False when the place was moved by what was met (Q3)."""
        site = self._site
        try:
            with site.log.reader(
                self._topic,
                [number],
                start={number: start},
                stop={number: stop},
                control_records=self._question.control_records,
                **read_settings(site),
            ) as reader:
                for batch in reader:
                    self.budget.take(batch.num_rows)
                    kept.take(self._picked(batch))
                    if kept.is_full:
                        break
        except CorruptError as error:
            at = start if error.offset is None else error.offset
            resumed = None if site.cluster else site.files.view(self._topic, number).next_sound_offset(at)
            went = "nothing behind it can be read" if resumed is None else f"reading went on at {resumed}"
            self.damage.append(f"{self._topic}-{number} is damaged at offset {at}; {went}")
            if not self.is_backward:
                self._places[number] = self._bounds[number][1] if resumed is None else max(resumed, start + 1)
                return False
        except OffsetOutOfRangeError as error:  # it aged out, or was deleted, while it was read
            self._bounds[number] = (error.first, max(error.end, error.first))
            self._places[number] = max(self._places[number], error.first)
            return False
        return True


class Kept:
    """The rows of a stretch that go onto the page: the first ones, or the last, as many as fit (Q2).

    `is_cut` when some did not fit; then `edge` is the last (first) offset that did.
    """

    def __init__(self, rows: int, size: int, *, from_end: bool) -> None:
        self._rows, self._size, self._from_end = rows, size, from_end
        self._tables: list[pa.Table] = []
        self.is_cut = False
        self.edge = -1

    @property
    def is_full(self) -> bool:
        """Whether reading on can add nothing; never so when the last rows are wanted."""
        return self.is_cut and not self._from_end

    def take(self, picked: pa.Table) -> None:
        if not picked.num_rows:
            return
        self._tables.append(picked)
        self._cut()

    def table(self) -> pa.Table | None:
        import pyarrow as pa

        return pa.concat_tables(self._tables) if self._tables else None

    def _cut(self) -> None:
        import numpy as np
        import pyarrow as pa

        whole = pa.concat_tables(self._tables)
        sizes = _row_bytes(whole)
        ordered = sizes[::-1] if self._from_end else sizes
        fits = int(np.searchsorted(np.cumsum(ordered), self._size, side="right"))
        fits = max(1, min(fits, self._rows))  # one row always, however large
        if fits < whole.num_rows:
            whole = whole.slice(whole.num_rows - fits) if self._from_end else whole.slice(0, fits)
            self.is_cut = True
        self.edge = whole.column("offset")[0 if self._from_end else -1].as_py()
        self._tables = [whole]


def read_settings(site: Site) -> dict[str, int]:
    """How much a reader of files takes at once; a cluster's client has bounds of its own."""
    return {} if site.cluster else {"max_bytes": FETCH_BYTES, "max_piece_bytes": PIECE_BYTES}


def moment_of(written: str, nothing: int) -> int:
    if not written:
        return nothing
    found = moment_ms(int(written) if written.lstrip("+-").isdecimal() and len(written) < 19 else written)
    return max(0, min(found, LATEST_MS - 1))


def _row_bytes(table: pa.Table) -> Any:
    """About how many bytes each row has."""
    import numpy as np
    import pyarrow.compute as pc

    lengths = np.full(table.num_rows, 100, np.int64)
    for name in ("key", "value"):
        lengths += pc.fill_null(pc.binary_length(table.column(name)), 0).to_numpy().astype(np.int64)
    return lengths
