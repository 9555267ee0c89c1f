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


class Search:
    """One search through some partitions, forwards or backwards, until a page is full or the budget is spent."""

    def __init__(self, site: Site, topic: str, question: RecordsQuestion) -> None:
        self._site, self._topic, self._question = site, topic, question
        self.numbers = site.numbers(topic, question.partition)
        self.budget: Budget = site.budget()
        self.damage: list[str] = []
        self._filter = Filter.of(question.key, question.value, question.header)
        self._bounds = {
            number: each for number, each in bounds_of(site, topic).items() if number in self.numbers
        }
        self._until_ms = moment_of(question.until, LATEST_MS)
        self._at_ms = moment_of(question.at, -1)
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
            return {number: self._offset_at(number, self._until_ms, high[number]) for number in self.numbers}
        if self._question.offset is not None:
            return {
                number: min(max(self._question.offset, low[number]), high[number]) for number in self.numbers
            }
        if self._at_ms >= 0:
            return {number: self._offset_at(number, self._at_ms, high[number]) for number in self.numbers}
        return low

    def _offset_at(self, number: int, time_ms: int, otherwise: int) -> int:
        if time_ms >= LATEST_MS:
            return otherwise
        view = self._site.log.view(self._topic, number)
        found = view.offset_for_time(time_ms, view.bounds())
        return otherwise if found is None else found

    def _is_done(self, number: int) -> bool:
        low, high = self._bounds[number]
        return self._places[number] <= low if self.is_backward else self._places[number] >= high

    def _forwards(self, number: int, wanted: int) -> pa.Table | None:
        low, high = self._places[number], self._bounds[number][1]
        stop = min(high, low + (max(wanted, 1) if self._is_plain else STRETCH))
        table = self._read(number, low, stop)
        if table is None:
            return None
        picked = self._picked(table)
        if picked.num_rows > wanted:
            picked = picked.slice(0, wanted)
            stop = picked.column("offset")[-1].as_py() + 1
        self._places[number] = stop
        return picked

    def _backwards(self, number: int, wanted: int) -> pa.Table | None:
        low, high = self._bounds[number][0], self._places[number]
        start = max(low, high - (max(wanted, 1) if self._is_plain else STRETCH))
        table = self._read(number, start, high)
        if table is None:
            self._places[number] = start
            return None
        picked = self._picked(table)
        if picked.num_rows > wanted:
            picked = picked.slice(picked.num_rows - wanted)
            start = picked.column("offset")[0].as_py()
        self._places[number] = start
        if self._at_ms >= 0 and table.num_rows and _newest_ms(table) < self._at_ms:
            self._places[number] = low  # what lies before is older still
        return picked

    @property
    def _is_plain(self) -> bool:
        return self._filter.is_empty and self._at_ms < 0 and self._until_ms >= LATEST_MS

    def _picked(self, table: pa.Table) -> pa.Table:
        return matching(table, self._filter, self._at_ms, self._until_ms)

    def _read(self, number: int, start: int, stop: int) -> pa.Table | None:
        """The records of a stretch; None when it moved on around damage (Q3)."""
        import pyarrow as pa

        from tidegate.log.batches.records import RECORD_SCHEMA

        site, batches = self._site, list[Any]()
        try:
            with site.log.reader(
                self._topic, [number], start={number: start}, stop={number: stop}, max_bytes=FETCH_BYTES
            ) as reader:
                for batch in reader:
                    batches.append(batch)
                    self.budget.take(batch.num_rows)
        except CorruptError as error:
            at = start if error.offset is None else error.offset
            resumed = site.log.view(self._topic, number).next_sound_offset(at)
            self.damage.append(
                f"{self._topic}-{number} is damaged at offset {at}; "
                + (
                    f"reading went on at {resumed}"
                    if resumed is not None
                    else "nothing behind it can be read"
                )
            )
            if not batches and not self.is_backward:
                self._places[number] = self._bounds[number][1] if resumed is None else max(resumed, start + 1)
                return None
        except OffsetOutOfRangeError as error:
            self._bounds[number] = (error.first, max(error.end, error.first))
            self._places[number] = max(self._places[number], error.first)
            return None
        return pa.Table.from_batches(batches, RECORD_SCHEMA)


def bounds_of(site: Site, topic: str) -> dict[int, tuple[int, int]]:
    return {
        row["partition"]: (row["log_start"], row["high_watermark"]) for row in site.log.partition_rows(topic)
    }


def moment_of(written: str, nothing: int) -> int:
    if not written:
        return nothing
    found = moment_ms(int(written) if written.lstrip("+-").isdecimal() and len(written) < 19 else written)
    return max(0, min(found, LATEST_MS - 1))


def _newest_ms(table: pa.Table) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    newest = pc.max(table.column("timestamp").cast(pa.int64())).as_py()
    return LATEST_MS if newest is None else int(newest)
