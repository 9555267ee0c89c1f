"""`tidegate produce`: records from files or a pipe into a topic. Thin over `Writer` and `record_input`."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tidegate.cli.options import (
    SIZE,
    Verb,
    command_options,
    log_option,
    opened,
    settings_option,
    talk_options,
)
from tidegate.cli.output import Progress, counted, detail, say
from tidegate.durations import format_duration, size_bytes
from tidegate.errors import InvalidError

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("lines", "jsonl", "json", "csv", "parquet")
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


@click.command("produce", cls=Verb)
@click.argument("topic")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--format",
    "format",
    type=click.Choice(FORMATS),
    default="lines",
    show_default=True,
    help="What the input is; see above.",
)
@click.option("-p", "--partition", type=click.IntRange(0), help="Send everything to this partition.")
@click.option("--repartition", is_flag=True, help="Read over the partitions the records name.")
@click.option("-k", "--key", help="Give every record this key (lines).")
@click.option("-K", "--key-separator", help="Split each line into key and value at this text (lines).")
@click.option("-Z", "--null-empty", is_flag=True, help="Store an empty key or value as null (lines).")
@click.option(
    "-H",
    "--header",
    "headers",
    metavar="NAME=VALUE",
    multiple=True,
    help="A header for every record (lines).",
)
@click.option(
    "-z", "--compression", type=click.Choice(CODECS), help="Compress batches; the topic's choice wins."
)
@click.option("--batch-records", type=click.IntRange(1), help="At most so many records in a batch.")
@click.option(
    "--batch-bytes", type=SIZE, default="1MiB", show_default=True, help="At most so many bytes in a batch."
)
@click.option("--producer-id", type=click.IntRange(0), help="Number the batches as this idempotent producer.")
@click.option("--producer-epoch", type=click.IntRange(0, 32767), default=0, show_default=True)
@click.option(
    "--first-sequence",
    type=click.IntRange(0),
    help="Number from here, as a producer that repeats itself; needs --partition and --producer-id.",
)
@click.option(
    "--integrity",
    is_flag=True,
    help="Number and check-sum the records, so that `verify` and apps see loss, change and repeats.",
)
@click.option(
    "--durability",
    type=click.Choice(["disk", "os"]),
    default="disk",
    show_default=True,
    help="When a write counts as done: on the disk, or with the operating system; kafka://: on all in-sync "
    "replicas, or on the leader.",
)
@click.option("--create-topic", is_flag=True, help="Create the topic (one partition) when it is missing.")
@click.option(
    "--max-line-bytes", type=SIZE, default="1MiB", show_default=True, help="A longer line is refused."
)
@settings_option("A setting of the Kafka client (repeatable); only with kafka://.")
@log_option
@command_options
@talk_options
def command(topic: str, files: tuple[Path, ...], format: str, log_url: str, **options: Any) -> None:
    """Write records into TOPIC, from FILES or else from the pipe.

    \b
    lines    each line is a value (with -K: key and value)
    jsonl    {"key": "k", "value": "v", "timestamp": ms, "partition": n, "headers": {"h": "x"}} a line:
             every field may be left out; strings are stored as UTF-8, {"base64": "…"} as bytes, null as
             null, and any other JSON value (a number, an object) as its compact JSON text
    json     one array of such objects
    csv      a heading with key, value, timestamp, partition; an empty field is null
    parquet  columns key, value, timestamp, partition, headers

    What `tidegate consume -J` prints can be produced again with --format jsonl. Records without a partition
    go where Kafka's default partitioner puts their key; without a key, from one partition to the next.
    """
    from tidegate.cli.record_input import InputOptions, tables

    client = {**options["settings"], **options["command_properties"]}
    reading = InputOptions(
        format=format,
        key=options["key"],
        key_separator=options["key_separator"],
        null_empty=options["null_empty"],
        headers=tuple(options["headers"]),
        max_line_bytes=size_bytes(options["max_line_bytes"]),
    )
    firsts = _first_sequences(options)
    numbered = {"integrity": {"app": "tidegate-produce"}} if options["integrity"] else {}
    with opened(log_url, options["command_config"], client) as log:
        if options["create_topic"]:
            log.create_topic(topic, if_not_exists=True)
        writer = log.writer(
            topic,
            compression=options["compression"],
            batch_bytes=options["batch_bytes"],
            batch_records=options["batch_records"],
            producer_id=options["producer_id"],
            producer_epoch=options["producer_epoch"],
            durability=options["durability"],
            **numbered,
        )
        tally, source = Tally(topic), Source(files)
        total = source.total_bytes
        unit = "records" if total is None else "bytes"
        try:
            with writer, Progress(f"writing {topic}", total=total, unit=unit) as progress:
                for table in source.tables(reading, tables):
                    if options["repartition"] and "partition" in table.column_names:
                        table = table.drop_columns("partition")
                    sequences = {} if firsts is None else {"first_sequences": firsts}
                    written = writer.write(table, partition=options["partition"], **sequences)
                    tally.add(written, rows=table.num_rows)
                    firsts = None
                    if total is None:
                        progress.advance(table.num_rows)
                    else:
                        progress.advance(source.new_bytes(), records=table.num_rows)
        finally:
            tally.tell(progress.elapsed_ms)


class Tally:
    """What was written, for the last line."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.records = 0
        self.duplicates = 0
        self.offsets: dict[int, tuple[int, int]] = {}

    def add(self, batches: Sequence[Any], *, rows: int) -> None:
        """One write of `rows` records: the batches that they, and starts of chains beside them, were stored in."""
        repeated = sum(each.last_offset - each.first_offset + 1 for each in batches if each.duplicate)
        self.duplicates += repeated
        self.records += rows - repeated
        for batch in batches:
            first, _ = self.offsets.get(batch.partition, (batch.first_offset, 0))
            self.offsets[batch.partition] = (min(first, batch.first_offset), batch.last_offset)
            kind = "duplicate of" if batch.duplicate else "wrote"
            detail(f"{kind} {self.topic}-{batch.partition} offsets {batch.first_offset}–{batch.last_offset}")

    def tell(self, elapsed_ms: int) -> None:
        where = ", ".join(
            f"{number}: {first}–{last}" for number, (first, last) in sorted(self.offsets.items())[:8]
        )
        more = f", … {len(self.offsets) - 8} more" if len(self.offsets) > 8 else ""
        repeated = (
            f" and {counted(self.duplicates, 'duplicate')} that were there already" if self.duplicates else ""
        )
        offsets = f" (partition: offsets {where}{more})" if where else ""
        took = format_duration(elapsed_ms)
        say(f"wrote {counted(self.records, 'record')}{repeated} to {self.topic} in {took}{offsets}")


class Source:
    """What is read: files one after the other, or standard input; and how much of it was."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._files = files
        self._before = self._told = self._furthest = 0
        self._stream: BinaryIO | None = None

    @property
    def total_bytes(self) -> int | None:
        """How much there is; None of a pipe or a terminal."""
        if self._files:
            return sum(path.stat().st_size for path in self._files)
        try:
            status = os.fstat(sys.stdin.fileno())
        except (OSError, ValueError):  # no file at all, as in a test
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def tables(self, reading: Any, tables: Any) -> Iterator[pa.Table]:
        if not self._files:
            self._stream = _stdin()
            yield from tables(self._stream, "standard input", reading)
        for path in self._files:
            with path.open("rb") as self._stream:
                yield from tables(self._stream, str(path), reading)
            self._before, self._furthest = self._before + path.stat().st_size, 0

    def new_bytes(self) -> int:
        """Bytes read since the last call."""
        if self._stream is not None and not self._stream.closed and self._stream.seekable():
            self._furthest = max(self._furthest, self._stream.tell())
        done = self._before + self._furthest
        new, self._told = done - self._told, done
        return new


def _stdin() -> BinaryIO:
    if sys.stdin.isatty():
        say("reading from the terminal; end with Ctrl-D")
    return sys.stdin.buffer


def _first_sequences(options: dict[str, Any]) -> dict[int, int] | None:
    if options["integrity"] and options["producer_id"] is not None:
        raise InvalidError("--integrity gives records numbers of its own; leave --producer-id out")
    if options["first_sequence"] is None:
        return None
    if options["partition"] is None or options["producer_id"] is None:
        raise InvalidError(
            "--first-sequence needs --partition and --producer-id: sequences are per partition"
        )
    return {options["partition"]: options["first_sequence"]}
