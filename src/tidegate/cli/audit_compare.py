"""`tidegate audit compare`: two topics, a mirror or a migration, proven equal or told apart."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from tidegate.cli.options import Verb, command_options, format_option, log_option, talk_options
from tidegate.cli.output import Progress, echo, print_object, say
from tidegate.cli.parallel import parallel_options, parallel_runner
from tidegate.errors import InvalidError

if TYPE_CHECKING:
    from tidegate.integrity.differences import Kind


@click.command("compare", cls=Verb)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@log_option
@click.option("--headers/--no-headers", default=True, show_default=True, help="Whether headers count.")
@click.option("--timestamps", is_flag=True, help="Timestamps count, too.")
@click.option("--committed", is_flag=True, help="Leave records of aborted transactions out, on both sides.")
@click.option(
    "--by",
    type=click.Choice(["auto", "partition", "key"]),
    default="auto",
    show_default=True,
    help="In order by partition, or by key without order; auto: by key where partitions are not the same.",
)
@click.option("--examples", type=click.IntRange(min=0), default=10, show_default=True, help="Of each kind.")
@parallel_options
@command_options
@format_option(("table", "json"), default="table")
@talk_options
def command(
    a: str,
    b: str,
    log_url: str,
    headers: bool,
    timestamps: bool,
    committed: bool,
    by: str,
    examples: int,
    spark: bool,
    master: str | None,
    jobs: int,
    command_config: str | None,
    command_properties: dict[str, str],
    format: str,
) -> int:
    """Prove that topics A and B hold the same records; exit code 1 when they do not.

    A and B are a topic of --log, FOLDER/TOPIC, or kafka://HOST:PORT/TOPIC. Offsets do not count: records are compared
    in order, partition by partition, by key, value and headers.

    \b
    tidegate audit compare orders /mnt/mirror/orders
    tidegate audit compare kafka://old:9092/orders kafka://new:9092/orders --spark
    """
    from tidegate.cli.options import client_settings
    from tidegate.integrity.comparing import compare
    from tidegate.integrity.digests import Parts
    from tidegate.integrity.reading_ranges import TopicAt

    client = client_settings(command_config, command_properties)
    isolation = "read_committed" if committed else "read_uncommitted"
    sides = []
    for given in (a, b):
        url, topic = _place(given, log_url)
        settings = client if url.startswith("kafka://") else {}
        sides.append(TopicAt(url, topic, settings, isolation))
    parts = Parts.KEY | Parts.VALUE
    parts |= (Parts.HEADERS if headers else Parts(0)) | (Parts.TIMESTAMP if timestamps else Parts(0))
    with parallel_runner(spark, master, jobs) as runner, Progress("comparing", total=0) as progress:
        found = compare(
            sides[0],
            sides[1],
            parts=parts,
            by=by,
            runner=runner,
            examples=examples,
            progress=progress.advance,
        )
    if format == "json":
        print_object({"a": a, "b": b, **found.as_dict()}, format="json")
    else:
        for each in found.partitions:
            where = "all partitions, by key" if each.partition is None else f"partition {each.partition}"
            told = "equal" if each.is_equal else _told(each.counts, each.untold, each.changed)
            echo(f"{where}: {each.records[0]:,} and {each.records[1]:,} records: {told}")
            for (first, stop), (other, end) in each.ranges[:examples]:
                echo(f"  differs: A {_range(first, stop)}, B {_range(other, end)}")
            for example in each.examples:
                offsets = f"A {_offset(example.a)}, B {_offset(example.b)}"
                echo(f"  {example.kind.value}: key {example.key!r} at {offsets}")
    if found.is_equal:
        say(f"equal: {sum(each.records[0] for each in found.partitions):,} records on both sides")
        return 0
    untold, changed = (
        sum(getattr(each, name) for each in found.partitions) for name in ("untold", "changed")
    )
    say(f"different: {_told(found.counts, untold, changed)}")
    return 1


def _told(counts: Counter[Kind], untold: int, changed: int) -> str:
    parts = [f"{count:,} {kind.value}" for kind, count in counts.items()]
    if untold:
        parts.append(f"{untold:,} long stretches that were not compared record by record")
    if changed:
        parts.append(f"{changed:,} stretches that changed while they were compared: compare again")
    return ", ".join(parts)


def _place(given: str, log_url: str) -> tuple[str, str]:
    url, slash, topic = given.rpartition("/")
    if not slash:
        return log_url, given
    if given.startswith("kafka://") and url in ("kafka:/", "kafka:"):
        raise InvalidError(f"{given} names no topic; write kafka://HOST:PORT/TOPIC")
    if not topic:
        raise InvalidError(f"{given} names no topic; write FOLDER/TOPIC")
    return url or "/", topic


def _range(first: int, stop: int) -> str:
    return f"offsets {first} to {stop - 1}" if stop > first else "nothing"


def _offset(offset: int | None) -> str:
    return "not there" if offset is None else f"offset {offset}"
