"""Creating, altering and deleting topics: the changes of a log's catalog, each under the folder's short lock.

T1  a topic is listed only when all its partition folders are there; folders left by an interrupted creation
    hold no records and are used again.
T2  a deleted topic leaves the catalog first, its folders listed as `removing`; then they are renamed
    `…-delete`, then removed. Whoever changes the catalog next finishes what a crash interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConflictError, InvalidError
from tidegate.files import Files
from tidegate.log.access.closing import drop_from_checkpoints, last_segment_base
from tidegate.log.access.locks import changing_folder, lock_partition
from tidegate.log.partitions.checkpoints import TopicId, read_topic_id, write_topic_id
from tidegate.log.topics.catalog import Catalog, TopicEntry, require_folder
from tidegate.log.topics.topic_config import TopicConfig
from tidegate.log.topics.topics import (
    TopicPartition,
    check_partition_count,
    check_topic_name,
    deleted_folder_name,
    is_deleted_folder,
    parse_folder_name,
    partition_folder_name,
)
from tidegate.randomness import Randomness

if TYPE_CHECKING:
    from tidegate.log.access.embedded import Log


def _create(log: Log, name: str, partitions: int, config: Mapping[str, Any]) -> None:
    """Make the folders, then list the topic (T1)."""
    check_topic_name(name)
    check_partition_count(partitions)
    checked = TopicConfig.of(config, broker=log.contents.broker_config())
    with _changing(log) as catalog:
        if name in catalog.topics:
            raise ConflictError(
                f"topic {name} exists already with {catalog.topics[name].partitions} partitions; alter it, "
                f"or create it with --if-not-exists",
                kafka_name="TOPIC_ALREADY_EXISTS",
            )
        if not log.contents.is_ours():
            log.contents.write(catalog)  # first of all: partition folders without a catalog would be foreign
        topic_id = TopicId.random(log.randomness)
        for number in range(partitions):
            _make_folder(log.files, log.path / partition_folder_name(name, number), topic_id)
        entry = TopicEntry(str(topic_id), partitions, checked.overrides())
        log.contents.write(catalog.with_topic(name, entry))


def _alter(log: Log, name: str, changes: Mapping[str, Any], unset: tuple[str, ...]) -> None:
    """Replace the topic's own settings."""
    broker = log.contents.broker_config()
    with _changing(log) as catalog:
        entry = catalog.entry(name)
        altered = TopicConfig.of(entry.config, broker=broker).altered(changes, unset=unset, broker=broker)
        log.contents.write(catalog.with_topic(name, replace(entry, config=altered.overrides())))


def _record_encoding(log: Log, name: str, encoding: Mapping[str, Any]) -> None:
    """Replace what the catalog says of a topic's keys and values."""
    with _changing(log) as catalog:
        entry = catalog.entry(name)
        log.contents.write(catalog.with_topic(name, replace(entry, encoding=encoding)))


def _add_partitions(log: Log, name: str, total: int) -> None:
    """Make the new folders, then list them (T1)."""
    check_partition_count(total)
    with _changing(log) as catalog:
        entry = catalog.entry(name)
        if total <= entry.partitions:
            raise InvalidError(
                f"topic {name} has {entry.partitions} partitions; a topic can only get more, not {total}",
                kafka_name="INVALID_PARTITIONS",
            )
        for number in range(entry.partitions, total):
            folder = log.path / partition_folder_name(name, number)
            _make_folder(log.files, folder, TopicId.parse(entry.topic_id))
        log.contents.write(catalog.with_topic(name, replace(entry, partitions=total)))


def _delete(log: Log, name: str) -> None:
    """Unlist the topic, then remove its folders (T2)."""
    with _changing(log) as catalog, ExitStack() as locks:
        entry = catalog.entry(name)
        places = [TopicPartition(name, number) for number in range(entry.partitions)]
        for place in places:
            folder = log.path / str(place)
            if log.files.exists(folder):
                require_folder(log.files, folder, place)
                locks.enter_context(lock_partition(log.files, folder, log.clock))
        unlisted = catalog.without_topic(name, [str(place) for place in places])
        log.contents.write(unlisted)
        _finish_removals(log, unlisted)


@contextmanager
def _changing(log: Log) -> Iterator[Catalog]:
    """The catalog, read under the short lock, with interrupted removals finished."""
    with changing_folder(log.files, log.path, log.clock):
        catalog = log.contents.read()
        yield _finish_removals(log, catalog) if catalog.removing else catalog


def _make_folder(files: Files, folder: Path, topic_id: TopicId) -> None:
    found = files.stat(folder)
    if found is not None:
        place = parse_folder_name(folder.name)
        if place is not None:
            require_folder(files, folder, place)
        if last_segment_base(files, folder) is not None:
            raise ConflictError(
                f"{folder} holds records of a topic that is not in the catalog; move it out of the log or "
                f"choose another name"
            )
        if read_topic_id(folder, files=files) not in (None, topic_id):
            _remove_folder(files, folder)  # what an interrupted creation left
    files.mkdir(folder)
    write_topic_id(folder, topic_id, files=files)


def _finish_removals(log: Log, catalog: Catalog) -> Catalog:
    """Rename and remove the folders of deleted topics, then forget them (T2)."""
    for name in catalog.removing:
        _rename_for_removal(log.files, log.path, name, log.randomness)
    for name in log.files.list(log.path):
        if is_deleted_folder(name):
            _remove_folder(log.files, log.path / name)
    gone = [place for name in catalog.removing if (place := parse_folder_name(name)) is not None]
    drop_from_checkpoints(log.files, log.path, gone)
    finished = replace(catalog, removing=())
    log.contents.write(finished)
    return finished


def _rename_for_removal(files: Files, log_path: Path, name: str, randomness: Randomness) -> None:
    place = parse_folder_name(name)
    if place is None or not files.exists(log_path / name):
        return
    target = log_path / deleted_folder_name(place.topic, place.partition, randomness.uuid().hex)
    files.rename(log_path / name, target)
    files.sync_folder(log_path)


def _remove_folder(files: Files, folder: Path) -> None:
    """Remove a partition folder; it holds files only, and a link is removed, not followed."""
    found = files.stat(folder)
    if found is None or not found.is_folder:
        return
    for name in files.list(folder):
        files.unlink(folder / name, missing_ok=True)
    files.rmdir(folder)
