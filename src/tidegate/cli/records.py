"""`tidegate produce` and `tidegate consume`: records from files and pipes into a topic, and back.

Loads Arrow only when records are read or written (`record_formats`), so that `--help` answers at once.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tidegate.cli.options import (
    DURATION,
    SERDE_NAMES,
    SIZE,
    Command,
    LogAddress,
    log_options,
    settings_option,
    verbosity_options,
)
from tidegate.cli.output import Progress, TerminalBytes, detail, say
from tidegate.clock import SystemClock
from tidegate.durations import counted, format_duration, size_bytes
from tidegate.errors import InvalidError

if TYPE_CHECKING:
    import pyarrow as pa


# -- tidegate produce ------------------------------------------------------------------------------

INPUT_FORMATS = ("lines", "jsonl", "json", "csv", "parquet")
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


@click.command("produce", cls=Command)
@click.argument("topic")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--format",
    "format",
    type=click.Choice(INPUT_FORMATS),
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
@log_options
@verbosity_options
def produce(topic: str, files: tuple[Path, ...], format: str, at: LogAddress, **options: Any) -> None:
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
    from tidegate.cli.record_formats import InputOptions, tables

    _check_line_options(format, options)
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
    with at.open(options["settings"]) as log:
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


def _check_line_options(format: str, options: dict[str, Any]) -> None:
    """Refuse options that only `--format lines` obeys; otherwise records would go without the key asked for."""
    names = {
        "key": "--key",
        "key_separator": "--key-separator",
        "null_empty": "--null-empty",
        "headers": "--header",
    }
    given = [name for option, name in names.items() if options[option]]
    if format != "lines" and given:
        raise InvalidError(
            f"{', '.join(given)}: only for --format lines; {format} input has columns of its own"
        )


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


# -- tidegate consume ------------------------------------------------------------------------------

OUTPUT_FORMATS = ("table", "json", "jsonl", "csv", "parquet", "lines")
_POLL_MS = 500


@click.command("consume", cls=Command)
@click.argument("topic")
@click.option(
    "-o",
    "--offset",
    default="start",
    show_default=True,
    metavar="WHERE",
    help="start, end, N, -N (N before the end of each partition), @TIME, @FROM:TO or N:M.",
)
@click.option("--from-beginning", is_flag=True, help="The same as -o start.")
@click.option("-n", "--num", type=click.IntRange(1), help="Stop after so many records.")
@click.option("-e", "--exit-at-end", is_flag=True, help="Stop at the end instead of waiting for more.")
@click.option("-p", "--partition", "partitions", type=click.IntRange(0), multiple=True, help="Only these.")
@click.option(
    "--format",
    "format",
    type=click.Choice(OUTPUT_FORMATS),
    show_default="table on a terminal, jsonl in a pipe",
    help="How to print; lines prints values only.",
)
@click.option("-J", "jsonl", is_flag=True, help="The same as --format jsonl.")
@click.option(
    "-f",
    "--print-format",
    "template",
    metavar="TEMPLATE",
    help=r"Print each record so: %t topic, %p partition, %o offset, %T time, %k key, %s value, %h headers, "
    r"%w window, %K and %S lengths of key and value, %% a percent sign, \n, \t.",
)
@click.option("--output", metavar="FILE", help="Write to this file, complete or not at all.")
@click.option(
    "--isolation",
    type=click.Choice(["read_uncommitted", "read_committed"]),
    default="read_uncommitted",
    show_default=True,
    help="Whether records of unfinished and aborted transactions are shown.",
)
@click.option(
    "--control-records",
    is_flag=True,
    help="Show Tidegate's own records of producers' numbering, too; they carry no value.",
)
@click.option(
    "--key-format",
    type=click.Choice(["topic", "changelog", "session", "raw"]),
    show_default="what the app that writes the topic recorded",
    help="How keys carry windows: as Kafka Streams' topics, changelogs or sessions do; raw shows bytes.",
)
@click.option(
    "--window-size", type=DURATION, metavar="DURATION", help="How long windows are; not for sessions."
)
@click.option(
    "--key", "key_serde", type=click.Choice(SERDE_NAMES), help="How to read the key beside the window."
)
@settings_option("A setting of the Kafka client (repeatable); only with kafka://.")
@log_options
@verbosity_options
def consume(topic: str, at: LogAddress, **options: Any) -> None:
    """Read records of TOPIC, and wait for more unless -e, -n or an end is given.

    \b
    tidegate consume orders -e                              all of it
    tidegate consume orders -o -10 -p 0 -e                  the last ten of partition 0
    tidegate consume orders -o @-1h                         from an hour ago, then follow
    tidegate consume orders -e -f '%t[%p]@%o %k %s\\n'
    tidegate consume orders -e -J | tidegate produce copy --format jsonl

    JSON lines give strings as text and other bytes as {"base64": "…"}; timestamps are epoch milliseconds. Bytes are
    written as they are into pipes and files; on a terminal, control characters are shown as escapes.

    Keys of windowed results are decoded: JSON has the key's bytes and, beside them, "window" with the key and its
    bounds; tables and -f show the key, and its window as %w. An app's topics in a folder say how; for others give
    --key-format.
    """
    from tidegate.cli.record_formats import keys_of, sink_for
    from tidegate.log.reader import parse_range

    format = _format(options)
    if options["from_beginning"] and options["offset"] not in ("start", "earliest", "beginning"):
        raise InvalidError("--from-beginning and --offset both say where to start; keep one")
    start, stop = parse_range(options["offset"], now_ms=SystemClock().now_ms())
    with ExitStack() as stack:
        log = stack.enter_context(at.open(options["settings"], read_only=True))
        reader: Any = stack.enter_context(
            log.reader(
                topic,
                list(options["partitions"]) or None,
                start=start,
                stop=stop,
                isolation=options["isolation"],
                control_records=options["control_records"],
            )
        )
        out = stack.enter_context(_target(options["output"], format))
        keys = keys_of(
            log,
            topic,
            key_format=options["key_format"],
            size=options["window_size"],
            serde=options["key_serde"],
        )
        sink = sink_for(format, out, options["template"], keys)
        written: dict[int, int] = reader.positions()
        ends = options["exit_at_end"] or stop is not None
        try:
            for positions in _copied(reader, sink, options["num"], ends):
                written = positions
            sink.finish()
        except KeyboardInterrupt:
            sink.finish()
            raise
        finally:
            where = ", ".join(f"{number}: {offset}" for number, offset in sorted(written.items()))
            say(
                f"read {counted(sink.records, 'record')} of {topic}; next offsets (partition: offset) {where}"
            )


def _copied(reader: Any, sink: Any, limit: int | None, ends: bool) -> Iterator[dict[int, int]]:
    """Write batches until the end, the limit, or for ever; yield the positions behind what is written."""
    batches = iter(reader) if ends else None
    while limit is None or sink.records < limit:
        batch = next(batches, None) if batches is not None else reader.poll(_POLL_MS)
        if batch is None:
            if batches is not None or reader.is_done:
                break
            sink.flush()
            continue
        if limit is not None and batch.num_rows > limit - sink.records:
            batch = batch.slice(0, limit - sink.records)
            reader.seek(batch.column("partition")[-1].as_py(), batch.column("offset")[-1].as_py() + 1)
        sink.write(batch)
        sink.flush()
        yield reader.positions()


def _format(options: dict[str, Any]) -> str:
    chosen = [name for name in ("format", "jsonl", "template") if options[name]]
    if len(chosen) > 1:
        raise InvalidError("--format, -J and -f each say how to print; keep one")
    if options["template"]:
        return "template"
    if options["jsonl"]:
        return "jsonl"
    if options["format"]:
        return str(options["format"])
    return "table" if sys.stdout.isatty() and not options["output"] else "jsonl"


def _target(path: str | None, format: str) -> Any:
    """Where the bytes go: a file that appears when it is complete, or standard output."""
    if path is not None and path != "-":
        folder = Path(path).parent
        if not folder.is_dir():
            raise InvalidError(f"--output {path}: the folder {folder} does not exist; create it first")
        return click.open_file(path, "wb", atomic=True)
    if format == "parquet" and sys.stdout.isatty():
        raise InvalidError("parquet is not for a terminal; give --output FILE or redirect")
    return _Standard()


class _Standard:
    """Standard output as a context that does not close it."""

    def __enter__(self) -> Any:
        return TerminalBytes(sys.stdout.buffer) if sys.stdout.isatty() else sys.stdout.buffer

    def __exit__(self, *_: object) -> None:
        sys.stdout.buffer.flush()
