"""Visits of a web site as sessions: clicks with no more than ten minutes between them belong together.

python examples/user_sessions.py
python examples/user_sessions.py --spark
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow as pa

import tidegate as tg

DATA = Path(__file__).parent / "data" / "visits"
NOON = 1_767_268_800_000  # 2026-01-01T12:00Z

app = tg.App("visits", data=DATA)
(
    app.stream("clicks", value=tg.Json(user="string", page="string"))
    .key_by("user")  # clicks are keyed by shop; sessions are by user
    .window(tg.Session("10m", grace="1m"))
    .agg(clicks=tg.count(), entered=tg.first("page"), left=tg.last("page"))
    .to_topic("visits")
)


def produce() -> None:
    clicks = [
        ("ann", 0, "/"),
        ("ben", 1, "/news"),
        ("ann", 4, "/shoes"),
        ("ann", 9, "/cart"),
        ("ben", 25, "/"),  # more than ten minutes later: a second visit
        ("ann", 40, "/thanks"),
    ]
    with tg.Log(DATA / "log") as log:
        if "clicks" in log.topics():
            return
        log.create_topic("clicks", 2)
        log.writer("clicks").write(
            pa.table(
                {
                    "key": [f"shop-{number % 2}" for number, _ in enumerate(clicks)],
                    "value": [f'{{"user":"{user}","page":"{page}"}}' for user, _, page in clicks],
                    "timestamp": [NOON + minute * 60_000 for _, minute, _ in clicks],
                }
            )
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--spark", action="store_true", help="run on Spark instead of in this process")
    engine = "local"
    if options.parse_args().spark:
        from tidegate.spark import session

        engine = session("visits")
    produce()
    print(app.run(engine, until="caught_up"))
    value = tg.Json(clicks="int64", entered="string", left="string")
    with app.sessioned_table("visits", key=tg.String(), value=value) as table:
        for row in table.all():
            minutes = (row.window.end - row.window.start) // 60_000
            print(f"{row.key}: {row.value['clicks']} clicks in {minutes} minutes, {row.value}")


if __name__ == "__main__":
    main()
