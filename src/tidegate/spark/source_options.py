"""The options of the `tidegate` data source, read and checked before anything is opened.

| option | means | default |
|---|---|---|
| `log` (or the path given to `load`) | the log's folder | required |
| `topic`, or `subscribe` | one topic; or several with commas between | required |
| `startingOffsets` | `earliest`, `latest`, or JSON per partition | `earliest` |
| `endingOffsets` | the same, exclusive; batch only | `latest` |
| `startingTimestamp` | instead: from the first record at or after this moment | |
| `endingTimestamp` | instead: up to the first record at or after it; batch only | |
| `maxRecordsPerTrigger` | at most so many offsets a micro-batch (also `maxOffsetsPerTrigger`) | no limit |
| `maxBytesPerTrigger` | at most so many stored bytes a micro-batch (`64MiB`) | no limit |
| `minPartitions` | cut the ranges into at least so many Spark tasks | one per partition |
| `failOnDataLoss` | stop when records that were not read yet are gone | `true` |
| `isolation` | or `read_committed`, which hides open and aborted transactions | `read_uncommitted` |

Names are compared without regard to case, as Spark does. An unknown option is an error: a misspelt limit
that is silently ignored costs more than a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from tidegate.durations import moment_ms, size_bytes
from tidegate.errors import InvalidError

_ALIASES = {"path": "log", "subscribe": "topic", "maxoffsetspertrigger": "maxrecordspertrigger"}
_NAMES = (
    *("log", "path", "topic", "subscribe", "startingOffsets", "endingOffsets"),
    *("startingTimestamp", "endingTimestamp", "maxRecordsPerTrigger", "maxOffsetsPerTrigger"),
    *("maxBytesPerTrigger", "minPartitions", "failOnDataLoss", "isolation"),
)
_SPELLING = {name.lower(): name for name in _NAMES}
ISOLATIONS = ("read_uncommitted", "read_committed")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What the user asked for. None means not asked for."""

    log: Path
    topics: tuple[str, ...]
    starting_offsets: str | None = None
    ending_offsets: str | None = None
    starting_timestamp: int | None = None
    ending_timestamp: int | None = None
    max_records: int | None = None
    max_bytes: int | None = None
    min_partitions: int = 0
    fail_on_data_loss: bool = True
    isolation: str = "read_uncommitted"

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Every option of a `DataSource`, checked one by one and against each other."""
        given = _canonical(options)
        found = cls(
            log=_log_folder(given.get("log")),
            topics=_topics(given.get("topic")),
            starting_offsets=given.get("startingoffsets"),
            ending_offsets=given.get("endingoffsets"),
            starting_timestamp=_moment(given, "startingtimestamp"),
            ending_timestamp=_moment(given, "endingtimestamp"),
            max_records=_count(given, "maxrecordspertrigger"),
            max_bytes=_size(given, "maxbytespertrigger"),
            min_partitions=_count(given, "minpartitions") or 0,
            fail_on_data_loss=_flag(given, "failondataloss", default=True),
            isolation=_one_of(given, "isolation", ISOLATIONS),
        )
        if found.starting_offsets is not None and found.starting_timestamp is not None:
            raise InvalidError("startingOffsets and startingTimestamp both say where to start; keep one")
        if found.ending_offsets is not None and found.ending_timestamp is not None:
            raise InvalidError("endingOffsets and endingTimestamp both say where to end; keep one")
        return found

    def check_streaming(self) -> None:
        """A stream has no end, and a batch no triggers."""
        if self.ending_offsets is not None or self.ending_timestamp is not None:
            raise InvalidError("a stream does not end: endingOffsets and endingTimestamp are for spark.read")


def _canonical(options: Mapping[str, str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for name, value in options.items():
        key = name.lower()
        if key not in _SPELLING:
            near = get_close_matches(key, list(_SPELLING), n=1)
            hint = f"did you mean {_SPELLING[near[0]]}?" if near else f"there are {', '.join(_NAMES)}"
            raise InvalidError(f"the tidegate source has no option {name!r}; {hint}")
        key = _ALIASES.get(key, key)
        if key in given and given[key] != value:
            raise InvalidError(f"option {_SPELLING[key]} is given twice, as {given[key]!r} and {value!r}")
        given[key] = value
    return given


def _log_folder(text: str | None) -> Path:
    if not text:
        raise InvalidError("option log is missing: the folder of the log, as in .option('log', './data/log')")
    if text.startswith("kafka://"):
        raise InvalidError(
            "the tidegate source reads a log folder; for a Kafka cluster use Spark's own source: "
            ".format('kafka').option('kafka.bootstrap.servers', …).option('subscribe', …)"
        )
    return Path(text.removeprefix("file://") if text.startswith("file:///") else text).absolute()


def _topics(text: str | None) -> tuple[str, ...]:
    topics = tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))
    if not topics:
        raise InvalidError("option topic is missing: a topic, or several with commas between")
    return topics


def _moment(given: Mapping[str, str], key: str) -> int | None:
    text = given.get(key)
    if text is None:
        return None
    return int(text) if text.strip().lstrip("-").isdecimal() else moment_ms(text)


def _count(given: Mapping[str, str], key: str) -> int | None:
    text = given.get(key)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise InvalidError(f"{_SPELLING[key]}={text!r} is not a whole number of at least 1")
    return int(text)


def _size(given: Mapping[str, str], key: str) -> int | None:
    text = given.get(key)
    if text is None:
        return None
    size = size_bytes(text)
    if size < 1:
        raise InvalidError(f"{_SPELLING[key]}={text!r} would read nothing; give at least 1")
    return size


def _flag(given: Mapping[str, str], key: str, *, default: bool) -> bool:
    text = given.get(key)
    if text is None:
        return default
    if text.strip().lower() not in ("true", "false"):
        raise InvalidError(f"{_SPELLING[key]}={text!r} is neither true nor false")
    return text.strip().lower() == "true"


def _one_of(given: Mapping[str, str], key: str, allowed: tuple[str, ...]) -> str:
    text = given.get(key, allowed[0]).strip().lower()
    if text not in allowed:
        raise InvalidError(f"{_SPELLING[key]}={text!r} is none of {', '.join(allowed)}")
    return text
