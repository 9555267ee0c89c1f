"""Records: search, one record, new records since a position, and export.

Q1  a search reads at most its budget (records and time). When that is spent it says how far it read, and `next`
    continues there; an empty page means "none" only when everything was read.
Q2  rows and bytes of a page are bounded.
Q3  damage is skipped and reported, with the offset where reading continued.

`order=newest` (the default) reads backwards from the end, in ranges; `oldest` forwards from `offset`, `at` or
the start.

Thread rule: one search, one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from tidegate.durations import moment_ms
from tidegate.errors import CorruptError, InvalidError, OffsetOutOfRangeError, TidegateError
from tidegate.web.apps import app_names, commit_of
from tidegate.web.failures import NotThereError
from tidegate.web.integrity import known_fault
from tidegate.web.schemas import (
    MOST_TEXT,
    Answer,
    Copy,
    KeyFormat,
    Moment,
    Name,
    Offset,
    RawAnswer,
    Stamp,
    Text,
    Window,
    cli,
    log_python,
    stamp_of,
    text_of,
    window_of,
)
from tidegate.web.site import Budget, Site, positions_of, written_positions
from tidegate.web.topics import SegmentLine, record_lifetime

if TYPE_CHECKING:
    import pyarrow as pa


# -- filters ---------------------------------------------------------------------------------------


def matching(table: pa.Table, wanted: RecordsQuestion, from_ms: int, until_ms: int) -> pa.Table:
    """The rows that match, in their order; times from `from_ms` up to `until_ms`, both included."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name, part in (("key", wanted.key), ("value", wanted.value)):
        if part:
            table = table.filter(pc.match_substring(table.column(name), _bytes(part)))
    if from_ms >= 0:
        table = table.filter(pc.greater_equal(table.column("timestamp").cast(pa.int64()), from_ms))
    if until_ms < LATEST_MS:
        table = table.filter(pc.less_equal(table.column("timestamp").cast(pa.int64()), until_ms))
    return table.filter(_with_header(table, wanted.header)) if wanted.header else table


def _with_header(table: pa.Table, wanted: str) -> pa.Array:
    """Rows with a header of that name; `name=part`: and with that part in its value."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    name, _, part = wanted.partition("=")
    headers = table.column("headers").combine_chunks()
    owners = pc.list_parent_indices(headers)
    entries = headers.flatten()
    found = pc.equal(entries.field("key"), name)
    if part:
        found = pc.and_(found, pc.fill_null(pc.match_substring(entries.field("value"), _bytes(part)), False))
    mask = np.zeros(len(headers), bool)
    mask[owners.filter(found).to_numpy()] = True
    return pa.array(mask)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


# -- search ----------------------------------------------------------------------------------------

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
        self._bounds = {number: each for number, each in site.bounds(topic).items() if number in self.numbers}
        self._until_ms = moment_of(question.until, LATEST_MS)
        self._at_ms = moment_of(question.at, -1)
        if self._at_ms >= 0:  # nothing before that offset is as new; what follows it may be older, though
            self._bounds = {
                number: (self._since(number, self._at_ms, high), high)
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
                table = step(number, min(share, wanted - self._rows)).table
                if table is not None:
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
        given: dict[int, int] = {}
        if after:
            given = positions_of(after, self.numbers)
        elif self._question.offset is not None and not self.is_backward:
            given = dict.fromkeys(self.numbers, self._question.offset)
        if not given and not after:
            return high if self.is_backward else low
        return {
            number: min(max(given.get(number, high[number]), low[number]), high[number])
            for number in self.numbers
        }

    def _since(self, number: int, time_ms: int, high: int) -> int:
        """The first offset of a record as new as that; where there is none, the end."""
        found = self._site.log.offset_for_time(self._topic, number, time_ms)
        return high if found is None else found

    def _is_done(self, number: int) -> bool:
        low, high = self._bounds[number]
        return self._places[number] <= low if self.is_backward else self._places[number] >= high

    def _forwards(self, number: int, wanted: int) -> Kept:
        """What matches from here on, until the page is full or a stretch has been read."""
        low, high = self._places[number], self._bounds[number][1]
        kept = Kept(wanted, self._site.limits.page_bytes - self._bytes, from_end=False)
        stop = min(high, low + (max(wanted, 1) if self._is_plain else STRETCH))
        if self._read(number, low, stop, kept):
            self._places[number] = kept.edge + 1 if kept.is_cut else stop
        return kept

    def _backwards(self, number: int, wanted: int) -> Kept:
        """The last that match before here, of a stretch."""
        low, high = self._bounds[number][0], self._places[number]
        kept = Kept(wanted, self._site.limits.page_bytes - self._bytes, from_end=True)
        start = max(low, high - (max(wanted, 1) if self._is_plain else STRETCH))
        self._read(number, start, high, kept)
        self._places[number] = max(low, kept.edge if kept.is_cut else start)
        return kept

    @property
    def _is_plain(self) -> bool:
        asked = self._question
        is_filtered = asked.key or asked.value or asked.header or self._at_ms >= 0
        return not is_filtered and self._until_ms >= LATEST_MS

    def _read(self, number: int, start: int, stop: int, kept: Kept) -> bool:
        """Take what matches of a stretch, batch by batch; False when the place was moved by what was met (Q3)."""
        import pyarrow as pa

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
                    table = pa.Table.from_batches([batch])
                    kept.take(matching(table, self._question, self._at_ms, self._until_ms))
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
        self.table: pa.Table | None = None
        self.is_cut = False
        self.edge = -1

    @property
    def is_full(self) -> bool:
        """Whether reading on can add nothing; never so when the last rows are wanted."""
        return self.is_cut and not self._from_end

    def take(self, picked: pa.Table) -> None:
        import numpy as np
        import pyarrow as pa

        if not picked.num_rows:
            return
        whole = picked if self.table is None else pa.concat_tables([self.table, picked])
        sizes = _row_bytes(whole)
        ordered = sizes[::-1] if self._from_end else sizes
        fits = int(np.searchsorted(np.cumsum(ordered), self._size, side="right"))
        fits = max(1, min(fits, self._rows))  # one row always, however large
        if fits < whole.num_rows:
            whole = whole.slice(whole.num_rows - fits) if self._from_end else whole.slice(0, fits)
            self.is_cut = True
        self.edge = whole.column("offset")[0 if self._from_end else -1].as_py()
        self.table = whole


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


# -- documents -------------------------------------------------------------------------------------


class HeaderShown(msgspec.Struct, frozen=True):
    """One header of a record."""

    name: str
    value: Text


class RecordShown(msgspec.Struct, frozen=True):
    """One record, decoded for a person; `shown_key` is the key inside a windowed key, else the key."""

    partition: Name
    offset: Offset
    timestamp_ms: Moment | None
    time: str
    key: Text
    shown_key: Text
    value: Text
    headers: list[HeaderShown]
    stamp: Stamp | None
    window: Window | None


class RecordsDocument(msgspec.Struct, frozen=True):
    """A page of records. `looked_at` were read for it; `next` goes on, null when there is no more."""

    topic: str
    partitions: list[Name]
    records: list[RecordShown]
    key_format: str
    looked_at: Answer
    is_complete: bool
    sentence: str
    damage: list[str]
    next: str | None
    positions: str
    by_hand: Copy


class RecordDocument(msgspec.Struct, frozen=True):
    """One record whole, when it can disappear, and its neighbours.

    `fault` says that it is not as its producer said: its checksum is wrong, or the last check of the topic found it.
    """

    topic: str
    record: RecordShown
    fault: str | None
    before: Offset | None
    after: Offset | None
    lifetime: SegmentLine | None
    by_hand: Copy


class TailQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New records: of one partition or all, that match; `after` are positions that are known already."""

    partition: Annotated[int, msgspec.Meta(ge=0)] | None = None
    key: str = ""
    value: str = ""
    header: str = ""
    after: Annotated[str, msgspec.Meta(max_length=4000)] = ""


class ExportQuestion(RecordsQuestion, frozen=True, forbid_unknown_fields=True):
    """As for records, and in which form."""

    format: Literal["jsonl", "parquet"] = "jsonl"


def records(site: Site, topic: str, question: RecordsQuestion) -> RecordsDocument:
    """A page (Q1, Q2, Q3)."""
    search = Search(site, topic, question)
    tables = search.run()
    rows = [row for table in tables for row in table.to_pylist()]
    backward = search.is_backward
    rows.sort(key=lambda row: (_sort_ms(row), row["partition"], row["offset"]), reverse=backward)
    format, shown = _shown(rows, _asked_format(site, topic, question.keys))
    first = "start" if question.offset is None else str(question.offset)
    start = f"-{question.limit}" if backward else first
    shows_all = backward or question.control_records  # the last offsets may all be control records
    asks = ", control_records=True" if shows_all else ""
    return RecordsDocument(
        topic=topic,
        partitions=list(search.numbers),
        records=shown,
        key_format=format,
        looked_at=search.budget.read,
        is_complete=search.is_complete,
        sentence=_sentence(len(shown), search, question),
        damage=search.damage,
        next=search.following,
        positions=search.where(),
        by_hand=Copy(
            cli(
                "tidegate consume",
                topic,
                exit_at_end=True,
                control_records=shows_all,
                offset=start,
                partition=question.partition,
                log=site.log_path,
            ),
            log_python(
                site.log_path,
                f"with log.reader({topic!r}, start={start!r}{asks}) as reader:",
                "    for batch in reader:  # Arrow",
                "        print(batch.to_pylist()[:10])",
            ),
        ),
    )


def record(site: Site, topic: str, partition: int, offset: int) -> RecordDocument:
    """One record by its place."""
    (number,) = site.numbers(topic, partition)
    low, high = site.bounds(topic)[number]
    if not low <= offset < high:
        raise NotThereError(
            f"{topic}-{number} has no offset {offset}; it holds {low} to {high - 1}, what lay before was deleted"
            if high > low
            else f"{topic}-{number} has no offset {offset}; it is empty"
        )
    rows = _rows_at(site, topic, number, offset)
    if not rows:
        raise NotThereError(
            f"offset {offset} of {topic}-{number} holds no record; it was compacted away, or is not a record"
        )
    _, shown = _shown(rows, _asked_format(site, topic, "auto"), most=20_000)
    is_control = shown[0].stamp is not None and shown[0].stamp.is_control
    asks = ", control_records=True" if is_control else ""
    place: dict[str, Any] = {"partition": number, "log": site.log_path}
    commands = [
        cli("tidegate consume", topic, control_records=is_control, offset=f"{offset}:{offset + 1}", **place)
    ]
    commands += [] if site.cluster else [cli("tidegate log lifetime", topic, offset=offset, **place)]
    return RecordDocument(
        topic=topic,
        record=shown[0],
        fault=_fault(site, topic, rows[0]),
        before=offset - 1 if offset > low else None,
        after=offset + 1 if offset + 1 < high else None,
        lifetime=record_lifetime(site, topic, number, offset),
        by_hand=Copy(
            "\n".join(commands),
            log_python(
                site.log_path,
                f"place, stop = {{{number}: {offset}}}, {{{number}: {offset + 1}}}",
                f"with log.reader({topic!r}, [{number}], start=place, stop=stop{asks}) as reader:",
                "    for batch in reader:",
                "        print(batch.to_pylist())",
            ),
        ),
    )


def tail(site: Site, topic: str, question: TailQuestion) -> RecordsDocument:
    """What came since `after`; without it nothing, and where the end is now."""
    numbers = site.numbers(topic, question.partition)
    ends = {number: high for number, (_, high) in site.bounds(topic).items() if number in numbers}
    after = question.after or written_positions(ends)
    asked = RecordsQuestion(
        question.partition, key=question.key, value=question.value, header=question.header, order="oldest", limit=200,
        after=f"+{after}",
    )  # fmt: skip
    found = records(site, topic, asked)
    return msgspec.structs.replace(found, next=found.positions)


def export(site: Site, topic: str, question: ExportQuestion) -> RawAnswer:
    """The records of a page as a file."""
    search = Search(site, topic, question)
    tables = search.run()
    if question.format == "parquet":
        return RawAnswer(_parquet(tables), "application/vnd.apache.parquet", search.following or "")
    from tidegate.log.format.json_records import encode_lines

    lines = b"".join(encode_lines(batch) for table in tables for batch in table.to_batches())
    return RawAnswer(lines, "application/jsonl", search.following or "")


def _shown(
    rows: list[dict[str, Any]], asked: KeyFormat | None, most: int = MOST_TEXT
) -> tuple[str, list[RecordShown]]:
    """Rows decoded; how keys were read. None: as they seem to be."""
    stamps = [stamp_of(row["headers"]) for row in rows]
    format = asked or _guessed(rows, stamps)
    return format.name, [_record(row, stamp, format, most) for row, stamp in zip(rows, stamps, strict=True)]


def _asked_format(site: Site, topic: str, keys: str) -> KeyFormat | None:
    """As was asked for, else as the app says that writes the topic; None: that is not known."""
    said = written_format(site, topic)
    if keys == "auto":
        return said
    return said if said is not None and said.name == keys else KeyFormat(keys)


def written_format(site: Site, topic: str) -> KeyFormat | None:
    """How an app writes the keys of one of its topics of windows."""

    for app in app_names(site):
        try:
            _, flows = commit_of(site, app)
        except TidegateError:
            continue
        for flow in flows:
            said = msgspec.json.decode(flow.description)
            windows = [each["kind"] for each in said["steps"] if each["step"] == "aggregate"]
            for sink in said["sinks"]:
                if windows and sink["step"] == "to" and sink["topic"] == topic:
                    if windows[0]["kind"] == "session":
                        return KeyFormat("session", 0, is_known=True)
                    size = windows[0].get("size_ms") or windows[0].get("difference_ms") or 0
                    return KeyFormat(sink["key_format"], size, is_known=True)
    return None


def _guessed(rows: list[dict[str, Any]], stamps: list[Stamp | None]) -> KeyFormat:
    """`changelog` or `session` where every key on the page is one, else plain."""
    mine = [row["key"] for row, stamp in zip(rows, stamps, strict=True) if not (stamp and stamp.is_control)]
    for format in (KeyFormat("changelog"), KeyFormat("session")):
        if mine and all(window_of(key, format) is not None for key in mine):
            return format
    return KeyFormat("plain")


def _record(row: dict[str, Any], stamp: Stamp | None, format: KeyFormat, most: int) -> RecordShown:
    from tidegate.durations import format_moment

    is_control = stamp is not None and stamp.is_control
    window = None if format.name == "plain" or is_control else window_of(row["key"], format)
    key = text_of(row["key"], most)
    timestamp = None if row["timestamp"] is None else _epoch_ms(row["timestamp"])
    return RecordShown(
        partition=row["partition"],
        offset=row["offset"],
        timestamp_ms=timestamp,
        time="" if timestamp is None else format_moment(timestamp),
        key=key,
        shown_key=key if window is None else window.key,
        value=text_of(row["value"], most),
        headers=[
            HeaderShown(text_of(each["key"].encode(), 200).text, text_of(each["value"], 300))
            for each in row["headers"]
        ],
        stamp=stamp,
        window=window,
    )


def _fault(site: Site, topic: str, row: dict[str, Any]) -> str | None:
    """What is wrong with a record by its own checksum, or by the last audit of its topic."""
    from tidegate.errors import InvalidError
    from tidegate.integrity.columns import checksum_of
    from tidegate.integrity.header import CONTROL_HEADER_KEY, HEADER_KEY
    from tidegate.integrity.header import Stamp as Header

    headers = {each["key"]: each["value"] for each in row["headers"]}
    if headers.get(HEADER_KEY) is not None:
        try:
            stamp = Header.from_bytes(headers[HEADER_KEY])
            found = checksum_of(stamp, row["key"], row["value"], headers.get(CONTROL_HEADER_KEY))
        except InvalidError:
            return "What its producer said about this record cannot be read."
        if found != stamp.crc:
            return (
                "This record is corrupt: it is not what its producer sent. "
                f"Its checksum is {found:08x}, and its header says {stamp.crc:08x}."
            )
    known = known_fault(site, topic, row["partition"], row["offset"])
    return None if known is None or not known.is_fault else known.message


def _rows_at(site: Site, topic: str, number: int, offset: int) -> list[dict[str, Any]]:
    with site.log.reader(
        topic,
        [number],
        start={number: offset},
        stop={number: offset + 1},
        control_records=True,  # who names a place gets what is there
        **read_settings(site),
    ) as reader:
        return [row for batch in reader for row in batch.to_pylist()]


def _sentence(shown: int, search: Search, question: RecordsQuestion) -> str:
    looked = f"looked at {search.budget.read:,} records"
    if shown == 0 and search.is_complete:
        return f"No record is like that; {looked}, which is all there is."
    if search.is_complete:
        return f"{shown:,} records; {looked}, up to the {'beginning' if search.is_backward else 'end'}."
    if search.budget.is_spent and shown < question.limit:
        return f"{shown:,} records so far; {looked} and stopped there: go on to look further."
    return f"{shown:,} records; there are more."


def _parquet(tables: list[pa.Table]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tidegate.log.format.records import RECORD_SCHEMA

    whole = pa.concat_tables([pa.Table.from_batches([], RECORD_SCHEMA), *tables])
    out = pa.BufferOutputStream()
    pq.write_table(whole, out)
    return bytes(out.getvalue())


def _epoch_ms(moment: Any) -> int:
    """An Arrow timestamp beyond what `datetime` holds comes as a number."""
    return int(moment) if isinstance(moment, int) else moment_ms(moment)


def _sort_ms(row: dict[str, Any]) -> int:
    return -1 if row["timestamp"] is None else _epoch_ms(row["timestamp"])
