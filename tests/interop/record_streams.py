"""Records what the real Kafka Streams does: `python tests/interop/record_streams.py`. Needs the fetched jars and a JDK.

Writes tests/fixtures/streams/*.jsonl, one file for each topology of the oracle. Nothing of the product takes part.
"""

from __future__ import annotations

import sys

from kafka_home import find_kafka
from streams_fixtures import STREAMS
from streams_oracle import ask


def main() -> None:
    kafka = find_kafka()
    if kafka is None:
        sys.exit("no Kafka jars or no JVM; `make kafka` fetches the jars")
    for old in STREAMS.glob("*.jsonl"):
        old.unlink()
    ask(kafka, "record", str(STREAMS))
    sys.stdout.write(f"{len(list(STREAMS.glob('*.jsonl')))} topologies of Kafka Streams {kafka.version}\n")


if __name__ == "__main__":
    main()
