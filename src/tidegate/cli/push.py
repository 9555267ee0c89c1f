"""`tidegate push`: anything Spark reads becomes the next version of a table, proven complete, then shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tidegate.cli.options import (
    Verb,
    command_options,
    format_option,
    log_option,
    settings_option,
    talk_options,
)
from tidegate.cli.output import LiveLine, bar, print_object, printable, say
from tidegate.cli.state import state_option
from tidegate.durations import format_duration


@click.command("push", cls=Verb)
@click.argument("source", required=False)
@click.option("--table", required=True, metavar="NAME", help="The table whose next version this becomes.")
@click.option(
    "--key", "keys", required=True, multiple=True, metavar="COLUMN", help="The key; several make a JSON key."
)
@click.option(
    "--value",
    "values",
    multiple=True,
    metavar="COLUMN",
    help="Value columns; by default all that are no key.",
)
@click.option(
    "--timestamp", metavar="COLUMN", help="The records' timestamps; by default the time of the push."
)
@click.option(
    "--order-by", multiple=True, metavar="COLUMN", help="Of rows with one key, the last by this counts."
)
@click.option("--source-format", metavar="NAME", help="parquet, csv, json, orc, …; by the path's ending.")
@settings_option("An option of Spark's reader (repeatable), like -X delimiter=;.")
@click.option("--sql", metavar="QUERY", help="Push the rows of a query; SOURCE is its view `source`.")
@click.option("--partitions", type=click.IntRange(1), help="Of the version; by default as before, or 4.")
@click.option("--no-swap", is_flag=True, help="Leave the version ready; `table swap` shows it.")
@click.option(
    "--retain", type=click.IntRange(1), metavar="K", help="Keep K ready versions, retire older ones."
)
@click.option("--without-key", type=click.Choice(["refuse", "skip"]), default="refuse", show_default=True,
              help="Rows without a key: refuse the push, or leave them out and count them.")  # fmt: skip
@click.option(
    "--compression",
    type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]),
    help="Of the topic's batches.",
)
@click.option("--master", metavar="URL", help="Spark's master.  [default: local[*,4]]")
@format_option(("table", "json"))
@log_option
@state_option
@command_options
@talk_options
def command(
    source: str | None,
    table: str,
    keys: tuple[str, ...],
    values: tuple[str, ...],
    timestamp: str | None,
    order_by: tuple[str, ...],
    source_format: str | None,
    settings: dict[str, str],
    sql: str | None,
    partitions: int | None,
    no_swap: bool,
    retain: int | None,
    without_key: str,
    compression: str | None,
    master: str | None,
    format: str,
    log_url: str,
    state: str,
    command_config: str | None,
    command_properties: dict[str, str],
) -> int:
    """Push all rows of SOURCE as the next version of a table, and show it once every partition is proven complete.

    \b
    tidegate push users.parquet --table users --key id
    tidegate push orders.csv --table orders --key customer --key day --retain 3
    tidegate push --sql 'select id, name from parquet.`users`' --table users --key id --no-swap

    Lost, changed or late records fail the version: it is never shown, the report names them, and readers go on with
    the version before. Exit code 1 then. Interrupted or killed, a push leaves a failed version and nothing else.
    """
    from tidegate.cli.options import client_settings
    from tidegate.spark import session
    from tidegate.spark.push.driver import push
    from tidegate.spark.push.source import source_frame
    from tidegate.tables.versions.report import PushFailedError

    client = client_settings(command_config, command_properties)
    spark = session("tidegate push") if master is None else session("tidegate push", master=master)
    spark.sparkContext.setLogLevel("ERROR")
    frame = source_frame(spark, source, format=source_format, options=settings, sql=sql)
    with PushLine() as line:
        try:
            report = push(
                frame,
                table=table,
                key=keys,
                value=values or None,
                timestamp=timestamp,
                order_by=order_by,
                log=log_url if "://" in log_url else str(Path(log_url).expanduser().absolute()),
                state=state if "://" in state else str(Path(state).expanduser().absolute()),
                partitions=partitions,
                swap=not no_swap,
                retain=retain,
                without_key=without_key,
                compression=compression,
                client=client,
                source=sql if sql is not None else str(source),
                progress=line.show,
            )
        except PushFailedError as failed:
            line.clear()
            if format == "json":
                print_object(failed.report.to_dict(), format=format)
            raise
    if format == "json":
        print_object(report.to_dict(), format=format)
    else:
        say(str(report))
    return 0


class PushLine(LiveLine):
    """Shows how a push goes; give `show` to it."""

    _step = ""

    def show(self, progress: Any) -> None:
        """One look; every new step is told at once."""
        is_new, self._step = progress.step != self._step, progress.step
        self.tell(lambda: push_line(progress), progress.to_dict, at_once=is_new)


def push_line(progress: Any) -> str:
    """`users_v4  sending ▰▰▱▱▱ 40%  12s  18s left`."""
    share = progress.done / progress.total if progress.total else 0.0
    elapsed = format_duration(max(1, round(progress.elapsed_ms / 1000)) * 1000)
    parts = [f"{printable(progress.table)}_v{progress.version}", f"{progress.step} {bar(share)}", elapsed]
    if progress.records:
        parts.append(f"{progress.records:,} records")
    if progress.left_ms is not None:
        parts.append(f"{format_duration(max(1, round(progress.left_ms / 1000)) * 1000)} left")
    return "  ".join(parts)
