"""Kafka's own dump tool: what it prints for files of ours or of a broker.

One JVM serves one call, however many files it names. The tool runs inside `root` and is given relative names,
and absolute ones in its findings are cut back to relative, so its text can be compared and kept.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kafka_home import KafkaHome

TOOL = "kafka.tools.DumpLogSegments"
# Without a configuration the logging library complains on standard error, between the findings.
QUIET = ("-Dlog4j.configuration=file:/dev/null", "-Dlog4j.defaultInitOverride=true")


@dataclass(frozen=True, slots=True)
class Dump:
    """What the tool said: lines of standard output and of standard error, and how it ended."""

    out: str
    err: str
    code: int

    @property
    def crashed(self) -> bool:
        return "Exception in thread" in self.err


def java_dump(kafka: KafkaHome, root: Path, names: Sequence[str], *options: str) -> Dump:
    """Dump these files (named relative to `root`) in one JVM."""
    command = kafka.command(TOOL, "--files", ",".join(names), *options, flags=QUIET)
    done = subprocess.run(command, cwd=root, capture_output=True, timeout=600, check=False)
    return Dump(_text(done.stdout, root), _text(done.stderr, root), done.returncode)


def dumpable(folder: Path) -> list[str]:
    """The files of a partition folder the tool knows, named relative to the folder's parent."""
    known = {".log", ".index", ".timeindex", ".txnindex", ".snapshot"}
    return [
        f"{folder.name}/{path.name}"
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in known
    ]


def _text(raw: bytes, root: Path) -> str:
    lines = raw.decode(errors="replace").replace(f"{root.resolve()}/", "").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("log4j:"))
