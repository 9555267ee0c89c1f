"""`tidegate consume`: records of a topic to the terminal, a pipe or a file. Thin over `Reader`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import click

from tidegate.cli.options import (
    DURATION,
    SERDE_NAMES,
    Verb,
    command_options,
    log_option,
    opened,
    settings_option,
    talk_options,
)
from tidegate.cli.output import TerminalBytes, counted, say
from tidegate.clock import SystemClock
from tidegate.errors import InvalidError

FORMATS = ("table", "json", "jsonl", "csv", "parquet", "lines")
_POLL_MS = 500


@click.command("consume", cls=Verb)
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
    type=click.Choice(FORMATS),
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
@log_option
@command_options
@talk_options
def command(topic: str, log_url: str, **options: Any) -> None:
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
    from tidegate.cli.record_output import sink_for
    from tidegate.cli.windowed_keys import keys_of
    from tidegate.log.access.positions import parse_range

    format = _format(options)
    if options["from_beginning"] and options["offset"] not in ("start", "earliest", "beginning"):
        raise InvalidError("--from-beginning and --offset both say where to start; keep one")
    start, stop = parse_range(options["offset"], now_ms=SystemClock().now_ms())
    client = {**options["settings"], **options["command_properties"]}
    with ExitStack() as stack:
        log = stack.enter_context(opened(log_url, options["command_config"], client, read_only=True))
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
        try:
            _copy(reader, sink, options["num"], options["exit_at_end"] or stop is not None)
            sink.finish()
        except KeyboardInterrupt:
            sink.finish()
            raise
        finally:
            where = ", ".join(f"{number}: {offset}" for number, offset in sorted(reader.positions().items()))
            say(
                f"read {counted(sink.records, 'record')} of {topic}; next offsets (partition: offset) {where}"
            )


def _copy(reader: Any, sink: Any, limit: int | None, ends: bool) -> None:
    """Hand batches on until the end, the limit, or for ever."""
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
