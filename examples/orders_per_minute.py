"""Orders per customer and minute: validated, without duplicates, late ones kept apart.

python examples/orders_per_minute.py              # in this process
python examples/orders_per_minute.py --spark      # the same on Spark
tidegate run examples/orders_per_minute.py        # on and on, over the data of the first command
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow as pa

import tidegate as tg

DATA = Path(__file__).parent / "data" / "orders"
TEN = 1_767_261_600_000  # 2026-01-01T10:00Z

app = tg.App("orders", data=DATA)
orders = app.stream("orders", value=tg.Json(order_id="string", amount="double"))
(
    orders.validate()
    .drop_duplicates("order_id", within="10m")
    .window(tg.Tumbling("1m", grace="30s"))
    .agg(orders=tg.count(), revenue=tg.sum("amount"))
    .to_topic("orders-per-minute")
)


def produce() -> None:
    """Six orders: one is sent twice, one comes half an hour late."""
    rows = [
        ("alice", 0, "o-1", 20.0),
        ("bob", 5, "o-2", 12.5),
        ("alice", 40, "o-3", 4.75),
        ("alice", 41, "o-3", 4.75),  # the app timed out and sent it again
        ("bob", 75, "o-4", 30.0),
        ("alice", 130, "o-5", 8.0),
        ("bob", -1800, "o-6", 99.0),  # from a till that was offline
    ]
    with tg.Log(DATA / "log") as log:
        if "orders" in log.topics():
            return
        log.create_topic("orders", 1)
        with log.writer("orders", integrity=True) as sender:
            sender.write(
                pa.table(
                    {
                        "key": [key for key, _, _, _ in rows],
                        "value": [
                            f'{{"order_id":"{number}","amount":{amount}}}' for *_, number, amount in rows
                        ],
                        "timestamp": [TEN + second * 1000 for _, second, _, _ in rows],
                    }
                )
            )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--spark", action="store_true", help="run on Spark instead of in this process")
    engine = "local"
    if options.parse_args().spark:
        from tidegate.spark import session

        engine = session("orders")
    produce()
    summary = app.run(engine, until="caught_up")
    print(summary)
    with app.windowed_table(
        "orders-per-minute", "1m", key=tg.String(), value=tg.Json(orders="int64", revenue="double")
    ) as table:
        for row in table.all():
            print(f"{row.key:6} minute {(row.window.start - TEN) // 60_000}  {row.value}")


if __name__ == "__main__":
    main()
