"""One app over a broker or over a folder, its records by several clients, and what came of them, to be compared.

The same rows go into both logs, partition by partition in the same order; the broker's has more: transactions' markers
and the records of one that was aborted, which would change every window if they counted.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from confluent_kafka import Producer

import tidegate as tg
from table_records import windows_in
from tidegate.log.log import open_log
from tidegate.pipeline.rounds.ways_out import app_status
from tidegate.storage import open_backend
from tidegate.windows.keys import partitions_of_inner_keys

PARTITIONS = 2
MINUTE = 60_000
# Not long ago: a broker keeps windows for a day and their retention, by the time in their records.
T0 = (int(time.time()) // 60 - 120) * MINUTE
KINDS = {
    "tumbling": tg.Tumbling("1m", grace="2m", retention="3h"),
    "hopping": tg.Hopping("3m", "1m", grace="2m", retention="3h"),
    "sliding": tg.Sliding("1m", grace="2m", retention="3h"),
    "session": tg.Session("20s", grace="2m", retention="3h"),
}
REKEYED = "re-keyed"
EVERY = (*KINDS, REKEYED)
# Who writes which share of the rows, in turn.
WRITERS = ("client", "sender", "transaction", "client")


class Row(NamedTuple):
    key: str
    value: str
    timestamp: int


def orders(count: int, seed: int = 7) -> list[Row]:
    """Orders over half an hour; every tenth is there twice, and one in twenty is up to ten minutes late."""
    chance, rows = random.Random(seed), list[Row]()
    for place in range(count):
        number = place if chance.random() > 0.1 else max(0, place - chance.randrange(1, 20))
        late = chance.randrange(10 * MINUTE) if chance.random() < 0.05 else 0
        when = T0 + place * 30 * MINUTE // count - late
        rows.append(
            Row(f"customer-{number % 17}", f'{{"order":{number},"amount":{number % 89}.5}}', max(when, T0))
        )
    return rows


def app_of(name: str, log: str | Path, state: Path, *, kinds: Sequence[str] = EVERY, **given: Any) -> tg.App:
    """Validated, deduplicated, one flow for each kind of window, each with a changelog in the same log; and one that is
    re-keyed, whose windows nothing is late for."""
    app = tg.App(name, log=log, state=state, **given)
    stream = app.stream(f"{name}-orders", value=tg.Json(order="int64", amount="double")).validate("fail")
    unique = stream.drop_duplicates("order", within="10m")
    if REKEYED in kinds:
        number = stream.key_by("order % 5", shards=3).window(tg.Tumbling("1m", grace="1h", retention="3h"))
        number.agg(orders=tg.count(), amount=tg.sum("amount")).to_topic(f"{name}-{REKEYED}")
    for kind in (each for each in kinds if each != REKEYED):
        unique.window(KINDS[kind]).agg(orders=tg.count(), amount=tg.sum("amount")).to_topic(f"{name}-{kind}")
    return app


# -- writing -------------------------------------------------------------------------------------


def partition_of(rows: Sequence[Row]) -> list[int]:
    keys = pa.array([row.key.encode() for row in rows], pa.binary())
    found: list[int] = np.asarray(partitions_of_inner_keys(keys, PARTITIONS)).tolist()
    return found


def table_of(rows: Sequence[Row]) -> pa.Table:
    return pa.table({name: [getattr(row, name) for row in rows] for name in Row._fields})


def write(log: str, topic: str, rows: Sequence[Row], *, integrity: bool = False) -> None:
    """By Tidegate's own writer, or as an integrity sender."""
    with open_log(log) as opened, opened.writer(topic, integrity=integrity) as writer:
        writer.write(table_of(rows))


def produce(
    address: str,
    topic: str,
    rows: Sequence[Row],
    *,
    transaction: str = "",
    abort: bool = False,
    **client: Any,
) -> None:
    """By an ordinary client, in a transaction where that has a name."""
    named = {"transactional.id": transaction} if transaction else {}
    producer = Producer({"bootstrap.servers": address, "log_level": 0, "linger.ms": 5, **named, **client})
    if transaction:
        producer.init_transactions(30)
        producer.begin_transaction()
    for row, partition in zip(rows, partition_of(rows), strict=True):
        producer.produce(topic, row.value, row.key, partition, timestamp=row.timestamp)
    assert producer.flush(60) == 0
    if transaction and abort:
        producer.abort_transaction(30)
    elif transaction:
        producer.commit_transaction(30)


def shares(rows: Sequence[Row]) -> list[tuple[str, Sequence[Row]]]:
    size = -(-len(rows) // len(WRITERS))
    return [(writer, rows[place * size : (place + 1) * size]) for place, writer in enumerate(WRITERS)]


def fill_broker(address: str, topic: str, rows: Sequence[Row]) -> None:
    """All rows, and before the last share as many again in a transaction that comes to nothing."""
    for place, (writer, share) in enumerate(shares(rows)):
        if writer == "sender":
            write(f"kafka://{address}", topic, share, integrity=True)
        elif writer == "transaction":
            produce(address, topic, share, transaction=f"{topic}-{place}")
            ahead = [row._replace(timestamp=row.timestamp + 15 * MINUTE) for row in share]
            produce(address, topic, ahead, transaction=f"{topic}-aborted", abort=True)
        else:
            produce(address, topic, share)


def fill_folder(folder: Path, topic: str, rows: Sequence[Row]) -> None:
    with tg.Log(folder) as log:
        log.create_topic(topic, PARTITIONS)
    for writer, share in shares(rows):
        write(str(folder), topic, share, integrity=writer == "sender")


# -- what came of it -----------------------------------------------------------------------------


def windows_of(app: tg.App, kind: str) -> list[dict[str, Any]]:
    """The flow's windows by its last commit."""
    with app.open_table(f"{app.name}-{kind}") as table:
        return sorted(table.to_arrow().to_pylist(), key=repr)


def late_of(app: tg.App, kind: str) -> list[dict[str, Any]]:
    """The late rows, without the offsets, which markers have moved on a broker."""
    return sorted(app.late(f"{app.name}-{kind}").drop_columns(["offset"]).to_pylist(), key=repr)


def table_windows(app: tg.App, kind: str) -> dict[Any, Any]:
    """The changelog read as a table through the log."""
    topic = f"{app.name}-{kind}"
    opened: Callable[..., Any] = app.sessioned_table if kind == "session" else app.windowed_table
    with app, opened(topic) as table:
        return windows_in(table)


def totals_of(app: tg.App, kind: str) -> dict[str, int]:
    """The flow's counters, without those that depend on how rounds were cut."""
    backend = open_backend(app.state)
    try:
        found: Mapping[str, int] = app_status(backend, app.name).totals[f"{app.name}-{kind}"]
    finally:
        backend.close()
    by_cuts = ("rows_sent", "bytes", "windows.emitted")
    return {name: count for name, count in found.items() if name not in by_cuts}


def verdicts_of(log: Any, topic: str) -> Counter[str]:
    """What a validating reader says of every record of a topic."""
    from tidegate.integrity import PartitionValidator

    found: Counter[str] = Counter()
    for number in range(PARTITIONS):
        validator = PartitionValidator(topic, number)
        with log.reader(topic, [number], control_records=True) as reader:
            for batch in reader:
                judged = validator.validate(batch, 0)
                found.update({verdict.label: count for verdict, count in judged.counts.items() if count})
    return found


# -- in a process of its own ---------------------------------------------------------------------


def run_until_delivery(name: str, log: str, state: str, kind: str) -> None:
    """Run the app, and die where something committed is about to be delivered."""
    from tidegate.pipeline.tasks.delivering import Deliverer

    def die(self: Deliverer, deliveries: Any) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    Deliverer.deliver = die  # type: ignore[method-assign]
    app_of(name, log, Path(state), kinds=[kind]).run("local", until="caught_up", lease_ms=1000)
