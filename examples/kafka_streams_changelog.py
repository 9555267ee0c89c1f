"""Another application's windowed store, read as a table from its changelog topic.

A Kafka Streams application with a store `counts` (windows of a minute) writes its changelog to
`shop-counts-changelog`. Its bytes are all that is needed: no code of it, no access to its disks.

    python examples/kafka_streams_changelog.py                          # a changelog made here
    python examples/kafka_streams_changelog.py kafka://broker:9092 shop-counts-changelog
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa

import tidegate as tg

DATA = Path(__file__).parent / "data" / "changelog"
TEN = 1_767_261_600_000


def pretend_to_be_the_other_application(topic: str) -> None:
    """What a Streams store logs: the key, the window's start, a sequence number of 0; values are counts."""
    counted = [("alice", 0, 2), ("bob", 0, 1), ("alice", 0, 3), ("alice", 1, 1), ("bob", 1, 4)]
    with tg.Log(DATA / "log") as log:
        if topic in log.topics():
            return
        log.create_topic(topic, 1, {"cleanup.policy": "compact,delete"})
        log.writer(topic).write(
            pa.table(
                {
                    "key": [
                        name.encode() + (TEN + minute * 60_000).to_bytes(8, "big") + bytes(4)
                        for name, minute, _ in counted
                    ],
                    "value": [count.to_bytes(8, "big") for *_, count in counted],
                    "timestamp": [TEN + minute * 60_000 for _, minute, _ in counted],
                }
            )
        )


def main() -> None:
    log, topic = (sys.argv[1], sys.argv[2]) if len(sys.argv) > 2 else (None, "shop-counts-changelog")
    if log is None:
        pretend_to_be_the_other_application(topic)
    app = tg.App("reader", data=DATA, log=log)
    with app.windowed_table(topic, "1m", key=tg.String(), value=tg.Long()) as table:
        for row in table.fetch("alice"):
            print(f"alice, minute {(row.window.start - TEN) // 60_000}: {row.value}")
        print(f"{len(table.all())} windows in all, up to offsets {table.position}")


if __name__ == "__main__":
    main()
