"""`tidegate produce`: records from files or a pipe into a topic. Thin over `Writer` and `record_input`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tidegate.cli.options import Verb, command_options, log_option, settings_option, talk_options
from tidegate.cli.output import Progress, counted, detail, say
from tidegate.cli.topic import opened
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
@click.option("--batch-bytes", default="1MiB", show_default=True, help="At most so many bytes in a batch.")
@click.option("--producer-id", type=click.IntRange(0), help="Number the batches as this idempotent producer.")
@click.option("--producer-epoch", type=click.IntRange(0, 32767), default=0, show_default=True)
@click.option(
    "--first-sequence",
    type=click.IntRange(0),
    help="Number from here, as a producer that repeats itself; needs --partition and --producer-id.",
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
@click.option("--max-line-bytes", default="1MiB", show_default=True, help="A longer line is refused.")
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
        )
        tally = Tally(topic)
        try:
            with writer, Progress(f"writing {topic}") as progress:
                for table in _all_tables(files, reading, tables):
                    if options["repartition"] and "partition" in table.column_names:
                        table = table.drop_columns("partition")
                    for batch in writer.write(table, partition=options["partition"], first_sequences=firsts):
                        tally.add(batch)
                    firsts = None
                    progress.advance(table.num_rows)
        finally:
            tally.tell(progress.elapsed_ms)


class Tally:
    """What was written, for the last line."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.records = 0
        self.duplicates = 0
        self.offsets: dict[int, tuple[int, int]] = {}

    def add(self, batch: Any) -> None:
        count = batch.last_offset - batch.first_offset + 1
        self.records += 0 if batch.duplicate else count
        self.duplicates += count if batch.duplicate else 0
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


def _all_tables(files: tuple[Path, ...], reading: Any, tables: Any) -> Iterator[pa.Table]:
    if not files:
        yield from tables(_stdin(), "standard input", reading)
    for path in files:
        with path.open("rb") as stream:
            yield from tables(stream, str(path), reading)


def _stdin() -> BinaryIO:
    if sys.stdin.isatty():
        say("reading from the terminal; end with Ctrl-D")
    return sys.stdin.buffer


def _first_sequences(options: dict[str, Any]) -> dict[int, int] | None:
    if options["first_sequence"] is None:
        return None
    if options["partition"] is None or options["producer_id"] is None:
        raise InvalidError(
            "--first-sequence needs --partition and --producer-id: sequences are per partition"
        )
    return {options["partition"]: options["first_sequence"]}
