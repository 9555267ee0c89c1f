"""One app with every kind of step, its data and what it left behind: for tests that hold one engine against another.

`write_orders` is a topic with duplicates and late records, the same for the same seed. `every_kind` is an app over it:
a flow for each kind of window, all from the key of the log, and two that are re-keyed. `create` makes the app in a
folder before there are records, so that copies of the folder are copies of one app: what runs of them leave can be
compared byte for byte, provided that they tell the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.clock import Clock, ManualClock
from tidegate.log.log import Log
from tidegate.pipeline.definition.app import App
from tidegate.pipeline.rounds.records import Records, app_folder
from tidegate.pipeline.rounds.run import Summary
from tidegate.pipeline.tasks.letters import chain_of
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.manifest import Token, reachable
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates.definitions import count, sum
from tidegate.windows.kinds import Hopping, Session, Sliding, Tumbling, Unlimited, WindowKind

TEN = 1_767_261_600_000  # 2026-01-01T10:00Z
NOON = TEN + 7_200_000
COPARTITIONED = ("tumbling", "hopping", "sliding", "session", "unlimited", "passed")
REKEYED = ("by-shop", "shops")
ORDER = Json(order="int64", shop="string", amount="double")
Change = Callable[[Any], Any]


def create(
    folder: Path, *, partitions: int = 2, change: Change | None = None, only: Collection[str] | None = None
) -> None:
    """A log with an empty topic and the app's first record."""
    with Log(folder / "log", durability="os") as log:
        log.create_topic("orders", partitions)
    every_kind(folder, change, only=only).run("local", until="caught_up", clock=ManualClock(NOON))


def write_orders(folder: Path, rows: int, *, seed: int = 1, keys: int = 20) -> pa.Table:
    """Orders of half an hour: every tenth is there twice, and one in fifty comes up to ten minutes late."""
    chance = np.random.default_rng(seed)
    times = TEN + np.sort(chance.integers(0, 1_800_000, rows))
    late = chance.random(rows) < 0.02
    times = times - np.where(late, chance.integers(0, 600_000, rows), 0)
    numbers = np.where(
        chance.random(rows) < 0.1, np.arange(rows) - chance.integers(1, 50, rows), np.arange(rows)
    )
    shops = chance.integers(0, 7, rows)
    values = [
        f'{{"order":{number},"shop":"s{shop}","amount":{number % 97}.25}}'
        for number, shop in zip(numbers.tolist(), shops.tolist(), strict=True)
    ]
    table = pa.table(
        {
            "key": [f"customer-{number % keys}" for number in numbers.tolist()],
            "value": values,
            "timestamp": times,
        }
    )
    with Log(folder / "log", durability="os") as log, log.writer("orders", integrity=True) as sender:
        sender.write(table)
    return table


def every_kind(folder: Path, change: Change | None = None, *, only: Collection[str] | None = None) -> App:
    """The app; `change` is a function over Arrow batches that all records pass first, `only` a few of its flows."""
    app = App("every-kind", data=folder)
    orders = app.stream("orders", value=ORDER).validate()
    if change is not None:
        columns = [("order", pa.int64()), ("shop", pa.string()), ("amount", pa.float64())]
        orders = orders.map(change, pa.schema(columns))
    unique = orders.drop_duplicates("order", within="15m")
    shops = orders.key_by("shop", shards=3)
    unique_shops = shops.drop_duplicates("order", within="15m")
    made: dict[str, Any] = {"orders": count(), "amount": sum("amount")}
    kinds: dict[str, tuple[Any, WindowKind]] = {
        "tumbling": (unique, Tumbling("1m", grace="5m")),
        "hopping": (unique, Hopping("5m", "1m", grace="5m")),
        "sliding": (unique, Sliding("2m", grace="5m")),
        "session": (unique, Session("1m", grace="5m")),
        "unlimited": (unique, Unlimited(TEN)),
        "by-shop": (unique_shops, Tumbling("1m", grace="5m")),
    }
    for name, (stream, kind) in kinds.items():
        if only is None or name in only:
            stream.window(kind).agg(**made).to_topic(name)
    if only is None or "passed" in only:
        unique.to_topic("passed")
    if only is None or "shops" in only:
        shops.window(Session("10s", grace="5m")).agg(**made).to_table("shops")
    return app


def run_all(
    app: App, engine: Any, *, clock: Clock | None = None, round_records: int | None = 6000, close: bool = True
) -> Summary:
    """To the end of what is there now."""
    return app.run(
        engine,
        until="caught_up",
        close=close,
        round_records=round_records,
        clock=clock or ManualClock(NOON),
    )


def stored(folder: Path, *topics: str) -> dict[str, bytes]:
    """The bytes of topics' log segments by name, as they lie on the disk."""
    found = {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for topic in topics
        for path in sorted((folder / "log").glob(f"{topic}-[0-9]*/*.log"))
    }
    if not found:
        raise FileNotFoundError(f"{folder / 'log'} has none of the topics {', '.join(topics)}")
    return found


def records(folder: Path, *topics: str) -> dict[str, list[tuple[bytes, bytes, int]]]:
    """The records of topics by partition, without what differs when rounds are done at another time."""
    found: dict[str, list[tuple[bytes, bytes, int]]] = {}
    with Log(folder / "log", read_only=True) as log:
        for topic in topics:
            table = log.reader(topic).read_all()
            for row in table.select(["partition", "key", "value", "timestamp"]).to_pylist():
                name = f"{topic}-{row['partition']}"
                found.setdefault(name, []).append((row["key"], row["value"], row["timestamp"]))
    return found


def objects_of(backend: StorageBackend, app: str) -> set[str]:
    """All objects that an app has stored, its records apart."""
    own = {each.name for each in backend.list(app)}
    beside = {each.name for each in backend.list(app_folder(app))}
    return own | {
        name for name in beside if name.split("/")[2] not in ("app", "collected", "commits", "lease", "plans")
    }


def named_objects(backend: StorageBackend, app: str) -> set[str]:
    """All objects that a kept commit of an app needs: with nothing to collect, these are all there are.

    Parcels are needed until they are in the log, so only those of the newest commit.
    """
    records, named = Records(backend, app), set[str]()
    for round in records.rounds():
        commit = records.read_commit(round)[0]
        for line in commit.tasks:
            named |= reachable(backend, Token.decode(line.token)) if line.token else set()
        for source in commit.sources:
            named |= {source.apart, *chain_of(backend, records.state_of(source))}
    return named - {""} | {each.parcel.name for each in commit.deliveries}
