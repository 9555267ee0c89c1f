"""Records as they are shown: a page of them, one by its place, what came since, a file of them.

Finding them is `searching`'s; here they are decoded for people (JSON, windowed keys, producers' stamps), and what a row
shows of a long value is cut with a note (`texts`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from tidegate.durations import moment_ms
from tidegate.errors import TidegateError
from tidegate.web.failures import NotThereError
from tidegate.web.reading.copying import Copy, cli, copied, log_python
from tidegate.web.reading.numbers import Answer, Moment, Name, Offset
from tidegate.web.reading.searching import RecordsQuestion, Search, read_settings
from tidegate.web.reading.site import Site, written_positions
from tidegate.web.reading.texts import KeyFormat, Stamp, Text, Window, stamp_of, text_of, window_of
from tidegate.web.reading.topics import SegmentLine, record_lifetime

if TYPE_CHECKING:
    import pyarrow as pa


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
    start = (
        f"-{question.limit}" if backward else str(question.offset if question.offset is not None else "start")
    )
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
        by_hand=copied(
            [
                cli(
                    "tidegate consume",
                    topic,
                    "-e",
                    *(["--control-records"] if shows_all else []),
                    offset=start,
                    partition=_text(question.partition),
                    log=site.log_path,
                )
            ],
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
    return RecordDocument(
        topic=topic,
        record=shown[0],
        fault=_fault(site, topic, rows[0]),
        before=offset - 1 if offset > low else None,
        after=offset + 1 if offset + 1 < high else None,
        lifetime=record_lifetime(site, topic, number, offset),
        by_hand=copied(
            [
                cli(
                    "tidegate consume",
                    topic,
                    *(["--control-records"] if is_control else []),
                    offset=f"{offset}:{offset + 1}",
                    partition=str(number),
                    log=site.log_path,
                ),
                *([] if site.cluster else [_lifetime_line(site, topic, number, offset)]),
            ],
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


def export(site: Site, topic: str, question: ExportQuestion) -> tuple[bytes, str, str]:
    """The records of a page as a file: bytes, media type, where to go on."""
    search = Search(site, topic, question)
    tables = search.run()
    if question.format == "parquet":
        return _parquet(tables), "application/vnd.apache.parquet", search.following or ""
    from tidegate.log.format.json_records import encode_lines

    lines = b"".join(encode_lines(batch) for table in tables for batch in table.to_batches())
    return lines, "application/jsonl", search.following or ""


def _shown(
    rows: list[dict[str, Any]], asked: KeyFormat | None, most: int | None = None
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
    from tidegate.web.reading.apps import app_names, commit_of

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
    mine = [
        row["key"] for row, stamp in zip(rows, stamps, strict=True) if stamp is None or not stamp.is_control
    ]
    for format in (KeyFormat("changelog"), KeyFormat("session")):
        if mine and all(window_of(key, format) is not None for key in mine):
            return format
    return KeyFormat("plain")


def _record(row: dict[str, Any], stamp: Stamp | None, format: KeyFormat, most: int | None) -> RecordShown:
    from tidegate.durations import format_moment

    cut: Callable[[bytes | None], Text] = text_of if most is None else lambda raw: text_of(raw, most)
    window = (
        None
        if format.name == "plain" or (stamp is not None and stamp.is_control)
        else window_of(row["key"], format)
    )
    key = cut(row["key"])
    timestamp = None if row["timestamp"] is None else _epoch_ms(row["timestamp"])
    return RecordShown(
        partition=row["partition"],
        offset=row["offset"],
        timestamp_ms=timestamp,
        time="" if timestamp is None else format_moment(timestamp),
        key=key,
        shown_key=key if window is None else window.key,
        value=cut(row["value"]),
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
    from tidegate.integrity.checksum import checksum_of
    from tidegate.integrity.header import CONTROL_HEADER_KEY, HEADER_KEY
    from tidegate.integrity.header import Stamp as Header
    from tidegate.web.reading.integrity import known_fault

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


def _lifetime_line(site: Site, topic: str, number: int, offset: int) -> str:
    return cli("tidegate log lifetime", topic, log=site.log_path, offset=str(offset), partition=str(number))


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)
