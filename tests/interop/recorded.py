"""The recorded meetings with a real broker, read back: folders, dumps, crash pairs, cleaning stages.

`tests/fixtures/kafka-3.9/README.md` says what is where; `record_fixtures.py` writes it again.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

from kafka_home import FIXTURES


@cache
def manifest() -> dict[str, Any]:
    """What was recorded: Kafka's version, and each case with its settings."""
    return json.loads((FIXTURES / "manifest.json").read_text())


def names(part: str) -> list[str]:
    """The cases of one part."""
    return sorted(manifest()[part])


def questions(part: str) -> list[tuple[str, str]]:
    """Every (topic, question) the dump tool answered."""
    return [
        (topic, name.removesuffix(".out"))
        for topic in names(part)
        for name in sorted(_members(FIXTURES / "dumps" / part / f"{topic}.tar.gz"))
        if name.endswith(".out")
    ]


def answers(part: str, topic: str, question: str) -> tuple[str, str]:
    """What the dump tool said: standard output and standard error."""
    members = _members(FIXTURES / "dumps" / part / f"{topic}.tar.gz")
    return members[f"{question}.out"].decode(), members[f"{question}.err"].decode()


# Python 3.11 learnt to refuse unsafe entries in its fourth patch; the archives are our own.
_SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def copy_folder(part: str, topic: str, target: Path) -> Path:
    """A copy of a recorded partition folder that a test may change."""
    return shutil.copytree(FIXTURES / part / f"{topic}-0", target / f"{topic}-0")


def unpack(part: str, name: str, target: Path) -> Path:
    """Unpack a case's stages, as `target/<stage>/<name>-0/…`, and what the dump tool said beside them."""
    with tarfile.open(FIXTURES / part / f"{name}.tar.gz") as archive:
        for entry in archive:
            stage, _, file = entry.name.rpartition("/")
            entry.name = f"{stage}/{name}-0/{file}" if stage else file
            archive.extract(entry, target, **_SAFELY)
    return target


@cache
def _members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
