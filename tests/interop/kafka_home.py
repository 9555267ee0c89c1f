"""Where the real Kafka is on this machine: the fetched jars and a JVM to run them; waiting with an end.

Nothing here imports Tidegate: what judges the product must not lean on it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "kafka-3.9"

# A test JVM lives for seconds: quick to start and small matters more than peak speed.
JVM_FLAGS = ("-Xms64m", "-Xmx400m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KafkaHome:
    """The jars of one Kafka release and the `java` that runs them."""

    version: str
    jars: Path
    java: Path

    def command(self, main: str, *arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
        return [str(self.java), *JVM_FLAGS, *flags, "-cp", f"{self.jars}/*", main, *arguments]

    def run(self, main: str, *arguments: str, timeout: float = 600) -> str:
        """Run one Java tool to its end; its standard output."""
        done = subprocess.run(
            self.command(main, *arguments), capture_output=True, text=True, timeout=timeout, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{main} {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
        return done.stdout


def find_kafka() -> KafkaHome | None:
    """The fetched Kafka, or None when there are no jars or no JVM."""
    found = re.search("<kafka.version>(.*)</kafka.version>", (ROOT / "scripts" / "kafka.pom.xml").read_text())
    if found is None:
        raise RuntimeError("scripts/kafka.pom.xml names no version of Kafka")
    version = found[1]
    jars = ROOT / ".cache" / f"kafka-{version}"
    java = find_java()
    needed = (jars / ".complete", jars / f"kafka-streams-{version}.jar")
    if java is None or not all(path.exists() for path in needed):
        return None
    return KafkaHome(version, jars, java)


def find_java() -> Path | None:
    home = os.environ.get("JAVA_HOME")
    for candidate in (Path(home) / "bin" / "java" if home else None, shutil.which("java")):
        if candidate is not None and os.access(candidate, os.X_OK):
            return Path(candidate)
    return None


def until(condition: Callable[[], T], what: str, *, timeout: float = 300, every: float = 0.05) -> T:
    """Ask again and again until the answer is true; `TimeoutError` naming what was waited for."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        pause.wait(every)
    return answer
