"""`tidegate break`: a copy of a topic with one known damage, to see that somebody notices. Thin over `breaking`."""

from __future__ import annotations

from pathlib import Path

import click

from tidegate.cli.options import Verb, format_option, log_option, talk_options
from tidegate.cli.output import echo, print_object
from tidegate.errors import InvalidError

KINDS = (
    "drop",
    "repeat",
    "flip",
    "swap",
    "reorder",
    "truncate-tail",
    "forget-producer",
    "future-clock",
)


@click.command("break", cls=Verb)
@click.argument("topic")
@click.option("--kind", type=click.Choice(KINDS), required=True, help="What to do to the copy; see above.")
@click.option("-p", "--partition", type=click.IntRange(min=0), help="The partition to damage.")
@click.option("--offset", type=click.IntRange(min=0), help="The record to damage; by chance without.")
@click.option(
    "--count",
    type=click.IntRange(min=1),
    help="How many records: drop, repeat; of the producer's last: truncate-tail; of its first: forget-producer.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed strikes the same place.")
@click.option(
    "--into",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="The copy's log folder, which must not exist.  [default: the log's name with -broken]",
)
@log_option
@format_option(("line", "json"), default="line")
@talk_options
def command(
    topic: str,
    kind: str,
    partition: int | None,
    offset: int | None,
    count: int | None,
    seed: int,
    into: Path | None,
    log_url: str,
    format: str,
) -> None:
    """Copy TOPIC into another log folder with one damage, and say which. The original is only read.

    \b
    drop             a record is gone
    repeat           a record comes twice
    flip             one bit of a value is another
    swap             two records have exchanged key and value
    reorder          two neighbouring records of a producer have changed places
    truncate-tail    a producer's last records are gone, from --offset on or the last --count
    forget-producer  a producer is gone, or its first --count records
    future-clock     a record's header says that its producer's clock was a day ahead

    The topic must have been written with integrity=True. `tidegate verify TOPIC --log FOLDER` finds the damage;
    losses at a producer's end, and of a whole producer, only where a push with its manifest has ended.
    """
    if log_url.startswith("kafka://"):
        raise InvalidError("break copies a topic of a log folder; --log must be one")
    source = Path(log_url)
    target = into if into is not None else source.with_name(f"{source.name}-broken")

    from tidegate.integrity.breaking import break_topic
    from tidegate.integrity.damage import DamageKind
    from tidegate.log.access.embedded import Log

    with Log(source, read_only=True) as log:
        done = break_topic(
            log,
            topic,
            DamageKind(kind),
            into=target,
            partition=partition,
            offset=offset,
            count=count,
            seed=seed,
        )
    if format == "json":
        print_object(done.to_dict(), format="json")
    else:
        echo(str(done))
