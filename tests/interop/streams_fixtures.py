"""What the real Kafka Streams did, as recorded: inputs, produced records, what the store then answered.

Files: tests/fixtures/streams/*.jsonl, written by `python tests/interop/record_streams.py`. Nothing here imports
Tidegate.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kafka_home import ROOT

STREAMS = ROOT / "tests" / "fixtures" / "streams"
NAMES = sorted(path.stem for path in STREAMS.glob("*.jsonl"))


@dataclass(frozen=True, slots=True)
class Produced:
    """A record that a topology wrote."""

    topic: str
    key: bytes | None
    value: bytes | None
    timestamp: int | None
    headers: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Given:
    """A record that a topology read."""

    key: bytes
    value: bytes | None
    timestamp: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A row that a read of the store answered; `timestamp` for timestamped stores only, `end` for all but fetches."""

    read: str
    key: bytes
    start: int
    end: int | None
    value: bytes
    timestamp: int | None


@dataclass(frozen=True)
class Recorded:
    """One topology: `about` says which windows; `store_kind` is time (timestamped), plain or session."""

    about: dict[str, Any]
    inputs: list[Given]
    produced: list[Produced]
    stored: list[Stored]
    dropped: int
    segments: list[str]

    @property
    def store_kind(self) -> str:
        return str(self.about["store_kind"])

    @property
    def size_ms(self) -> int | None:
        """The length of its time windows; None for sessions."""
        size = self.about.get("size", self.about.get("difference"))
        return None if size is None else int(size)

    @property
    def changelog_topic(self) -> str:
        return f"{self.about['application']}-{self.about['store']}-changelog"

    @property
    def changelog(self) -> list[Produced]:
        return self.written(self.changelog_topic)

    def written(self, topic: str) -> list[Produced]:
        return [record for record in self.produced if record.topic == topic]

    def read(self, read: str) -> list[Stored]:
        return [row for row in self.stored if row.read == read]


def load_fixture(name: str) -> Recorded:
    """The recorded topology of this name."""
    rows = [json.loads(line) for line in (STREAMS / f"{name}.jsonl").read_text().splitlines()]

    def lines(kind: str) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in row.items() if key != "line"} for row in rows if row["line"] == kind
        ]

    return Recorded(
        about=lines("about")[0],
        inputs=[
            Given(_bytes(row["key"]) or b"", _bytes(row["value"]), row["timestamp"]) for row in lines("input")
        ],
        produced=[
            Produced(
                row["topic"],
                _bytes(row["key"]),
                _bytes(row["value"]),
                row["timestamp"],
                tuple((name, bytes.fromhex(value)) for name, value in row["headers"]),
            )
            for row in lines("record")
        ],
        stored=[
            Stored(
                row["read"],
                bytes.fromhex(row["key"]),
                row["start"],
                row["end"],
                bytes.fromhex(row["value"]),
                row.get("timestamp"),
            )
            for row in lines("stored")
        ],
        dropped=int(lines("dropped")[0]["records"]),
        segments=lines("segments")[0]["names"],
    )


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)
