"""`tidegate topic create|list|describe|alter|delete|delete-records`.

Loads neither Arrow nor numba, so that these commands answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.options import (
    Command,
    Group,
    LogAddress,
    confirm,
    dry_run_option,
    format_option,
    log_options,
    settings_option,
    verbosity_options,
    yes_option,
)
from tidegate.cli.output import echo, print_object, print_rows, say, warn
from tidegate.durations import counted, setting_meaning
from tidegate.errors import InvalidError
from tidegate.log.log import Log
from tidegate.log.topic_config import TOPIC_SETTINGS, Source, TopicConfig, is_used

if TYPE_CHECKING:
    from tidegate.log.kafka.log import KafkaLog


@click.group("topic", cls=Group)
def command() -> None:
    """Create, list, describe, alter and delete topics."""


@command.command("create", cls=Command)
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("-p", "--partitions", type=click.IntRange(1), default=1, show_default=True, help="How many.")
@click.option("--if-not-exists", is_flag=True, help="Be content with a topic that exists already.")
@click.option(
    "-r", "--replication-factor", type=int, default=None, help="Copies of each partition; only with kafka://."
)
@settings_option(
    "A setting of the topic (repeatable): Kafka's names, also as retention=10m, segment.bytes=16KiB."
)
@log_options
@dry_run_option
@verbosity_options
def create(
    names: tuple[str, ...],
    partitions: int,
    if_not_exists: bool,
    replication_factor: int | None,
    settings: dict[str, str],
    at: LogAddress,
    dry_run: bool,
) -> None:
    """Create topics. The log folder is created with its first topic.

    \b
    tidegate topic create orders --partitions 4 -X retention=7d
    """
    with at.open() as log:
        for name in names:
            existed = name in log.topics()
            if dry_run:
                _check_creation(log, name, settings, existed and not if_not_exists)
                say(f"would create topic {name} with {counted(partitions, 'partition')} in {at.url}")
                continue
            extra: dict[str, Any] = {}
            if replication_factor is not None:
                if isinstance(log, Log):
                    raise InvalidError("--replication-factor is for kafka://; a folder holds one copy")
                extra["replication_factor"] = replication_factor
            log.create_topic(name, partitions, settings, if_not_exists=if_not_exists, **extra)
            _warn_of_unused(log, settings)
            if existed:
                say(f"topic {name} exists already")
            else:
                say(f"created topic {name} with {counted(partitions, 'partition')} in {at.url}")


@command.command("list", cls=Command)
@log_options
@format_option()
@verbosity_options
def list_topics(at: LogAddress, format: str) -> None:
    """List the topics."""
    with at.open() as log:
        if isinstance(log, Log) and not log.path.is_dir():
            raise InvalidError(
                f"there is no log at {at.url}: give --log URL or set TIDEGATE_LOG, or create it with "
                "`tidegate topic create NAME`"
            )
        counts = log.partition_counts()
    rows = [{"name": name, "partitions": count} for name, count in counts.items()]
    print_rows(rows, format=format, columns=["name", "partitions"])
    if not rows:
        say(f"no topics in {at.url}")


@command.command("describe", cls=Command)
@click.argument("name", metavar="NAME")
@click.option("-c", "--config-only", is_flag=True, help="Only the settings: KEY VALUE SOURCE.")
@click.option("--partitions-only", is_flag=True, help="Only the partitions and their offsets.")
@click.option("--overrides", is_flag=True, help="Only settings that are not at their default.")
@log_options
@format_option()
@verbosity_options
def describe(
    name: str,
    config_only: bool,
    partitions_only: bool,
    overrides: bool,
    at: LogAddress,
    format: str,
) -> None:
    """Show a topic: its partitions with their offsets, and its settings as KEY VALUE SOURCE.

    A folder that Tidegate did not create does not tell its settings: they are shown as ASSUMED.
    """
    with at.open() as log:
        description = log.describe(name)
        places = [] if config_only else log.partition_rows(name)
    settings = [
        {
            "key": entry.key,
            "value": entry.value,
            "source": str(entry.source),
            "meaning": setting_meaning(entry.key, entry.value),
        }
        for entry in description.settings()
        if not overrides or entry.source not in (Source.DEFAULT, Source.ASSUMED)
    ]
    if format in ("json", "jsonl"):
        summary: dict[str, Any] = {"name": name, "id": description.topic_id, "assumed": description.assumed}
        if not config_only:
            summary["partitions"] = places
        if not partitions_only:
            summary["config"] = settings
        print_object(summary, format=format)
        return
    if not config_only:
        print_rows(places, format=format, columns=list(places[0]) if places else ["partition"])
    if not config_only and not partitions_only:
        echo()
    if not partitions_only:
        print_rows(settings, format=format, columns=["key", "value", "source", "meaning"])
    if description.assumed:
        say("settings are assumed: this folder was not created by Tidegate, which only reads it")


@command.command("alter", cls=Command)
@click.argument("name", metavar="NAME")
@settings_option("A setting to change (repeatable).")
@click.option(
    "--delete-config", "unset", metavar="KEY", multiple=True, help="A setting to give back to its default."
)
@click.option(
    "-p", "--partitions", type=click.IntRange(1), default=None, help="Raise the number of partitions."
)
@log_options
@dry_run_option
@verbosity_options
def alter(
    name: str,
    settings: dict[str, str],
    unset: tuple[str, ...],
    partitions: int | None,
    at: LogAddress,
    dry_run: bool,
) -> None:
    """Change settings of a topic, or give it more partitions."""
    if not settings and not unset and partitions is None:
        raise InvalidError("nothing to change: give -X KEY=VALUE, --delete-config KEY or --partitions N")
    with at.open() as log:
        before = log.describe(name)
        broker = log.contents.broker_config() if isinstance(log, Log) else None
        after = before.config.altered(settings, unset=unset, broker=broker)
        if not dry_run:
            if settings or unset:
                after = log.alter_topic(name, settings, unset).config
            if partitions is not None:
                log.add_partitions(name, partitions)
        _warn_of_unused(log, settings)
    verb = "would set" if dry_run else "set"
    for key in [*TOPIC_SETTINGS.parse(settings), *(TOPIC_SETTINGS.find(key).name for key in unset)]:
        say(f"{verb} {key}={after.value(key)} (was {before.config.value(key)})")
    if partitions is not None:
        say(f"{'would raise' if dry_run else 'raised'} partitions from {before.partitions} to {partitions}")


@command.command("delete", cls=Command)
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--if-exists", is_flag=True, help="Be content with a topic that is not there.")
@yes_option
@log_options
@dry_run_option
@verbosity_options
def delete(
    names: tuple[str, ...],
    if_exists: bool,
    yes: bool,
    at: LogAddress,
    dry_run: bool,
) -> None:
    """Delete topics and all their records. Asks first, unless --yes."""
    with at.open() as log:
        present = set(log.topics())
        for name in names:
            if name not in present and if_exists:
                say(f"topic {name} does not exist")
                continue
            description = log.describe(name)
            what = f"topic {name} with {counted(description.partitions, 'partition')} and all its records"
            if dry_run:
                say(f"would delete {what}")
            else:
                confirm(f"delete {what}?", yes)
                log.delete_topic(name)
                say(f"deleted topic {name}")


@command.command("delete-records", cls=Command)
@click.argument("name", metavar="NAME")
@click.option(
    "--before", type=click.IntRange(-1), required=True, help="The first offset to keep; -1 keeps none."
)
@click.option("-p", "--partition", type=click.IntRange(0), help="One partition of the topic; all without it.")
@yes_option
@log_options
@dry_run_option
@verbosity_options
def delete_records(
    name: str,
    before: int,
    partition: int | None,
    yes: bool,
    at: LogAddress,
    dry_run: bool,
) -> None:
    """Delete the records of a topic below an offset. Asks first, unless --yes.

    Readers do not see them any more; the next retention pass frees the files that lie wholly below the offset.
    """
    with at.open() as log:
        if not isinstance(log, Log):
            raise InvalidError(
                "a cluster deletes records with kafka-delete-records.sh; --log names a folder here"
            )
        numbers = log.describe(name).partition_numbers if partition is None else (partition,)
        below = "all records" if before == -1 else f"the records below offset {before}"
        what = f"{below} of {', '.join(f'{name}-{number}' for number in numbers)}"
        if dry_run:
            say(f"would delete {what}")
        else:
            confirm(f"delete {what}?", yes)
            for number in numbers:
                say(f"{name}-{number} now starts at offset {log.delete_records(name, number, before)}")


def _warn_of_unused(log: Any, settings: Mapping[str, str]) -> None:
    """Say which of these settings do nothing in a folder."""
    unused = [key for key in TOPIC_SETTINGS.parse(settings) if not is_used(TOPIC_SETTINGS[key])]
    if unused and isinstance(log, Log):
        warn(f"{', '.join(unused)}: kept for a broker that opens the folder, not used by Tidegate itself")


def _check_creation(log: Log | KafkaLog, name: str, settings: Mapping[str, str], must_be_new: bool) -> None:
    from tidegate.log.catalog import check_topic_name

    check_topic_name(name)
    TopicConfig.of(settings)
    if must_be_new:
        raise InvalidError(f"topic {name} exists already", kafka_name="TOPIC_ALREADY_EXISTS")
