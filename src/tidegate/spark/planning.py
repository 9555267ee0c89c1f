"""What a Spark read will cover: options and limits turned into positions, by looking at the log's folder.

Runs in Spark's planning processes, beside the log; only reads. Every call opens the partitions it needs and
lets them go again, so an object of this kind can be pickled and nothing is held between micro-batches.

A *loss* is a record that a query was going to read and that is gone: retention removed it, or the topic was
cut or made anew. It stops the query and the message says how to go on; or, with `failOnDataLoss=false`, it is
a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from tidegate.errors import OffsetOutOfRangeError, TidegateWarning, UnavailableError
from tidegate.log.access.embedded import Log
from tidegate.log.access.partition_view import Bounds, PartitionView
from tidegate.log.batches.batch import iter_headers
from tidegate.spark.ranges import EARLIEST, LATEST, Place, Position, parse_bound, share
from tidegate.spark.source_options import SourceOptions

_WALK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Planner:
    """Answers the questions Spark asks before it reads."""

    options: SourceOptions

    def places(self) -> list[Place]:
        """Every partition of the asked-for topics, in order."""
        if not self.options.log.is_dir():
            raise UnavailableError(f"{self.options.log} does not exist; option log names the log's folder")
        with Log(self.options.log, read_only=True) as log:
            found = [log.describe(topic) for topic in self.options.topics]
        return sorted((topic.name, number) for topic in found for number in topic.partition_numbers)

    def starting(self) -> Position:
        """Where a new query begins."""
        options = self.options
        return self._bound("startingOffsets", options.starting_offsets, options.starting_timestamp, EARLIEST)

    def ending(self) -> Position:
        """Where a batch query ends."""
        options = self.options
        return self._bound("endingOffsets", options.ending_offsets, options.ending_timestamp, LATEST)

    def latest(self) -> Position:
        """The end of every partition, as far as readers may see."""
        return {place: self._end(place) for place in self.places()}

    def check_loss(self, start: Mapping[Place, int], end: Mapping[Place, int]) -> Position:
        """`start` as it can still be read; stops (or warns) where records between the two are gone."""
        present = set(self.places())
        usable: Position = {}
        for place in sorted(end.keys() | start.keys()):
            if place not in present:
                self.report_loss(place, start.get(place, 0), 0, "the topic or partition was deleted")
                continue
            with self._view(place) as (_, bounds):
                first, last = bounds.log_start, bounds.high_watermark
            wanted = start.get(place, first)
            if wanted < first and end.get(place, first) > wanted:
                self.report_loss(place, wanted, first, "retention or deletion removed them")
            elif wanted > last:
                self.report_loss(place, wanted, last, f"the log now ends at {last}: it was cut or made anew")
            usable[place] = min(max(wanted, first), last)
        return usable

    def report_loss(self, place: Place, wanted: int, goes_on: int, reason: str) -> None:
        """Stop with the way to resume, or warn where the user chose to go on."""
        topic, partition = place
        gone = f"{wanted} to {goes_on - 1}" if goes_on > wanted else f"from {wanted} on"
        what = f"{topic}-{partition}: offsets {gone} are gone before this query read them: {reason}"
        if not self.options.fail_on_data_loss:
            warnings.warn(f"{what}; going on without them", TidegateWarning, stacklevel=2)
            return
        raise OffsetOutOfRangeError(
            f"{what}. To go on with what is left, restart the query from the same checkpoint with "
            f".option('failOnDataLoss', 'false'), once; to start anew, use a new checkpointLocation. "
            f"`tidegate log lifetime {topic}` says how long records stay, and what to change",
            offset=wanted,
            first=goes_on,
            end=goes_on,
        )

    def admit_rows(self, start: Mapping[Place, int], end: Position, limit: int) -> Position:
        """`end`, brought nearer so that at most `limit` offsets lie between."""
        backlog = {place: max(0, last - start[place]) for place, last in end.items()}
        return {place: start[place] + count for place, count in share(limit, backlog).items()}

    def admit_bytes(self, start: Mapping[Place, int], end: Position, limit: int) -> Position:
        """`end`, brought nearer so that `limit` stored bytes lie between: whole batches, at least one."""
        backlog = {place: self._bytes_from(place, start[place]) for place in end if end[place] > start[place]}
        admitted = dict(start)
        for place, budget in share(limit, backlog).items():
            if budget:
                with self._view(place) as (view, bounds):
                    admitted[place] = _end_within(view, bounds, start[place], end[place], budget)
        return {place: admitted[place] for place in end}

    # -- one partition -----------------------------------------------------------------------------

    def _bound(self, option: str, text: str | None, moment: int | None, default: int) -> Position:
        places = self.places()
        if moment is not None:
            return {place: self._at_time(place, moment) for place in places}
        asked = dict.fromkeys(places, default) if text is None else parse_bound(text, places, option=option)
        return {place: self._resolve(place, offset) for place, offset in asked.items()}

    def _resolve(self, place: Place, offset: int) -> int:
        if offset == LATEST:
            return self._end(place)
        with self._view(place) as (_, bounds):
            return bounds.log_start if offset == EARLIEST else offset

    def _end(self, place: Place) -> int:
        with self._view(place) as (view, bounds):
            committed = self.options.isolation == "read_committed"
            return view.last_stable(bounds) if committed else bounds.high_watermark

    def _at_time(self, place: Place, moment: int) -> int:
        with self._view(place) as (view, bounds):
            found = view.offset_for_time(moment, bounds)
        return self._end(place) if found is None else found

    def _bytes_from(self, place: Place, offset: int) -> int:
        with self._view(place) as (view, _):
            sizes = view.segment_sizes()
        later = [size for base, size in sizes if base > offset]
        holding = [size for base, size in sizes if base <= offset][-1:]
        return max(1, sum(later) + sum(holding))

    @contextmanager
    def _view(self, place: Place) -> Iterator[tuple[PartitionView, Bounds]]:
        with Log(self.options.log, read_only=True) as log:
            view = log.view(*place)
            yield view, view.bounds()


def _end_within(view: PartitionView, bounds: Bounds, start: int, end: int, budget: int) -> int:
    """The offset after the last batch that fits into `budget` bytes from `start` on; one always fits.

    Walks the headers instead of asking an index: of the active log segment a reader may not believe it.
    """
    offset, used = start, 0
    while offset < end:
        fetched = view.fetch(offset, _WALK_BYTES, bounds)
        if fetched is None:
            return end
        before = offset
        for _, header in iter_headers(fetched.data):
            if header.next_offset > offset:
                if used and used + header.size > budget:
                    return offset
                offset, used = header.next_offset, used + header.size
                if offset >= end:
                    return end
        if offset == before:  # damage, which the task that reads it reports
            return end
    return end
