"""Asks the real Kafka Streams: the Java program beside this, run from its source by the fetched jars' JVM."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from kafka_home import JVM_FLAGS, KafkaHome

SOURCE = Path(__file__).parent / "streams" / "StreamsOracle.java"
QUIET = ("-Dlog4j.configuration=file:/dev/null", "-Dlog4j.defaultInitOverride=true")


def ask(kafka: KafkaHome, *arguments: str, lines: Iterable[str] = ()) -> list[str]:
    """Run the oracle to its end, with these lines as its input; the lines it answered."""
    command = [str(kafka.java), *JVM_FLAGS, *QUIET, "-cp", f"{kafka.jars}/*", str(SOURCE), *arguments]
    given = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        if "jdk.compiler" in done.stderr:
            pytest.skip("this JVM has no compiler; a JDK is needed to run the Kafka Streams oracle")
        raise RuntimeError(f"the oracle ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout.splitlines()
