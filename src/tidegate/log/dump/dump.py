"""Printing log files line for line as Kafka 3.9's `DumpLogSegments` does, or as JSON lines.

Owns the order of things: one file after the other on stdout, what does not fit together at the end on stderr.
How a `.log` is read is `dump_log`'s, how the small files are is `dump_indexes`'; `dump_text` and `dump_json`
write. Nothing is ever written to or created beside a dumped file.

Where the Java tool dies with an exception (a corrupt index, records that do not parse, a tail of zeros) the
lines up to there are the same; then the fault is named on stderr and the other files are still dumped.

Thread rule: one dump, one thread.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tidegate.errors import CorruptError, InvalidError
from tidegate.files import Files
from tidegate.log.dump.decoders import RecordParser

if TYPE_CHECKING:
    from tidegate.log.dump.json import JsonSink
    from tidegate.log.dump.text import TextSink

    Sink: TypeAlias = TextSink | JsonSink

MAX_INT = 2**31 - 1
PROFILES = ("modern", "seed")


@dataclass(frozen=True, slots=True)
class DumpOptions:
    """What to print. `parser` None means keys and values are UTF-8 text; `profile` "seed" is Kafka ≤ 2.7."""

    print_data: bool = False
    deep: bool = False
    index_sanity_check: bool = False
    verify_index_only: bool = False
    skip_record_metadata: bool = False
    max_message_bytes: int = 5 * 1024 * 1024
    max_bytes: int = MAX_INT
    profile: str = "modern"
    parser: RecordParser | None = None

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise InvalidError(f"no format profile {self.profile!r}: there are {' and '.join(PROFILES)}")
        if self.max_bytes < 0 or self.max_message_bytes < 0:
            raise InvalidError("--max-bytes and --max-message-size cannot be negative")

    @property
    def is_deep(self) -> bool:
        return self.deep or self.print_data or self.parser is not None

    @property
    def shows_contents(self) -> bool:
        return self.print_data or self.parser is not None


@dataclass(slots=True)
class Findings:
    """What did not fit together, by file as an absolute path, in the order found."""

    index_mismatches: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    time_mismatches: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    time_disorder: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    offsets_not_found: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    gaps: dict[str, array[int]] = field(default_factory=dict)
    """Flat pairs: a compacted log may have millions."""


@dataclass(frozen=True, slots=True)
class Target:
    """A file to dump: as given (that is printed) and as a path (that is opened)."""

    shown: str
    path: Path

    @classmethod
    def of(cls, given: str) -> Target:
        shown = re.sub("/+", "/", given)
        shown = shown.rstrip("/") or shown
        return cls(shown, Path(shown))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def absolute(self) -> str:
        """As Java makes a path absolute: the working folder in front, nothing resolved."""
        return self.shown if self.shown.startswith("/") else f"{Path.cwd()}/{self.shown}"

    @property
    def base_offset(self) -> int:
        """The offset a log file is named after: the digits before the first dot."""
        digits = self.name.partition(".")[0]
        if not (digits.isascii() and digits.isdigit()) or len(digits) > 20:
            raise InvalidError(
                f"{self.shown} is not named like a log file (00000000000000000042.log), so its base offset "
                f"is unknown"
            )
        return int(digits)


@dataclass(frozen=True, slots=True)
class Control:
    """What a control record says: a transaction's end, or a schema's name and fields, or only its type."""

    kind: str
    type_id: int
    coordinator_epoch: int | None = None
    message: tuple[str, dict[str, Any]] | None = None


def dump(
    targets: Iterable[Target], options: DumpOptions, sink: Sink, *, files: Files | None = None
) -> list[CorruptError]:
    """Dump each file into the sink; why files could not be read to their end, when they could not."""
    from tidegate.log.dump.indexes import dump_index, dump_snapshot, dump_time_index, dump_transaction_index
    from tidegate.log.dump.log import dump_log

    files = files if files is not None else Files()
    findings = Findings()
    faults: list[CorruptError] = []
    for target in targets:
        sink.begin(target)
        try:
            match target.path.suffix:
                case ".log" | ".checkpoint":
                    dump_log(target, options, sink, findings, files)
                case ".index":
                    dump_index(target, options, sink, findings, files)
                case ".timeindex":
                    dump_time_index(target, options, sink, findings, files)
                case ".txnindex":
                    dump_transaction_index(target, sink, files)
                case ".snapshot":
                    dump_snapshot(target, sink, files)
                case _:
                    sink.unknown(target)
        except CorruptError as error:
            sink.fault(target, error)
            faults.append(error)
    sink.findings(findings)
    return faults
