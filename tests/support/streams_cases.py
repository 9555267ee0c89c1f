"""Cases of Kafka Streams' documented behaviour: what a case says, and what the handbook says about kept differences.

`StoreCase` is about one store: puts, then reads. `WindowCase` is about a windowed count: records in, windows out.
Expectations were read from Kafka Streams' own tests and code, and no case was run against it; recorded runs are in
`test_streams_windows` and `test_stores_and_streams`. Where Tidegate differs on purpose, the case names the line by the
first column of the table in `docs/differences-from-kafka-streams.md` (or by a heading there) and says both answers.

Every case runs on every level that it does not leave out with a reason:

    store       the single-row calls, the calls for columns, and a restore from the changelog
    table       `windowed_table`, `sessioned_table` and `table` over a topic in a folder
    operator    records in batches of one and in one batch
    app         `App.run` on the local engine, read with `app.open_table` or as a table over its topic
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

STORE, TABLE, OPERATOR, APP = LEVELS = ("store", "table", "operator", "app")
LATEST = 2**63 - 1
DOCS = Path(__file__).parents[2] / "docs" / "differences-from-kafka-streams.md"


class Put(NamedTuple):
    """A row that is put; a value of None deletes. `end` is for sessions, `ts` the record's timestamp if it matters."""

    key: bytes | None
    value: bytes | None
    start: int = 0
    end: int | None = None
    ts: int | None = None
    removes: bool = False  # sessions: `remove` instead of a put of None


RESTART = Put(None, None, -1)
"""Not a put: the process ends after a commit, and another one goes on from there."""


class Read(NamedTuple):
    """A question in Kafka Streams' words, and the rows that answer it.

    Rows are (key, start, value) of windows, (key, start, end, value) of sessions, (key, value) of plain keys. Between
    keys no order is promised, except by stores and tables of plain keys.
    """

    call: str
    args: tuple[Any, ...]
    rows: Any
    warns: bool = False  # keys in the wrong order: an empty answer, and a warning


@dataclass(frozen=True)
class StoreCase:
    """Puts into one store, and what is read of it afterwards."""

    name: str
    kind: str  # window, session, key
    puts: tuple[Put, ...]
    reads: tuple[Read, ...]
    retention: int = 120_000
    size: int = 10
    gap: int | None = None  # sessions: records no further apart than this make the same sessions
    expired: int = 0  # puts that stores and tables drop, because their time segments are gone
    late: int = 0  # records that operators set aside: what they would change could not be read
    segments: frozenset[int] | None = None
    duplicates: bool = False
    timestamps: bool = False  # rows end with the value's timestamp
    while_open: tuple[Put, ...] = ()  # puts between opening the reads' iterators and using them
    refused: tuple[str, ...] = ()  # calls that raise: "put", or those of `reads`
    difference: str | None = None
    ours: tuple[Read, ...] = ()  # with a difference: what Tidegate answers
    ours_expired: int | None = None
    ours_late: int | None = None
    compat: str | None = None  # with a difference: the store's compat that keeps Kafka Streams' answer
    left_out: Mapping[str, str] = field(default_factory=dict)  # level → why the case cannot be said there


class Event(NamedTuple):
    """A record of the input."""

    key: bytes | None
    ts: int
    value: bytes | None = b"1"


AGAIN = Event(None, -1, None)
"""Not a record: the process ends after a commit, and another one goes on from there."""

Counted = tuple[bytes, int, int, int, int]  # key, start, end, count, timestamp


@dataclass(frozen=True)
class WindowCase:
    """Records, and the windows that hold them: those a reader of the store is answered, or those sent on close."""

    name: str
    window: Any
    events: tuple[Event, ...]
    rows: tuple[Counted, ...]
    dropped: int = 0  # windows that did not take a record: what Kafka Streams counts
    skipped: int = 0  # records without a key
    late: int | None = None  # records that no window took; as many as `dropped` if not said
    emit: str = "update"
    difference: str | None = None
    ours: tuple[Counted, ...] = ()
    ours_dropped: int | None = None
    ours_skipped: int | None = None
    differs_on: tuple[str, ...] = (TABLE, OPERATOR, APP)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def records_late(self) -> int:
        return self.dropped if self.late is None else self.late


class Difference(NamedTuple):
    """A line of the handbook."""

    streams: str
    ours: str
    compat: str  # whose rule `compat="kafka-streams"` keeps

    def is_compatible(self, level: str) -> bool:
        """Whether compat keeps Kafka Streams' rule on this level."""
        except_apps = self.compat.endswith("; in an app as Tidegate")
        return self.compat.startswith("as Kafka Streams") and not (level == APP and except_apps)


def documented_differences() -> dict[str, Difference]:
    """The lines of the handbook's table by their first column, and its other headings, which have no compat."""
    found: dict[str, Difference] = {}
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] != "what":
            found[cells[0]] = Difference(*cells[1:])
        elif line.startswith("## "):
            found[line.removeprefix("## ").strip()] = Difference("", "", "as Tidegate")
    return found
