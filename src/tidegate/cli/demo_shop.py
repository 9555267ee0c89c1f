"""The demo's data: a shop's orders with faults planted in them, each of which something must find.

    orders    three tills, two partitions; planted: a gap, a flipped bit, a record stored twice, a till whose clock is
              a day ahead (all four by `break`, in copies of copies); and in the events themselves: orders sent again
              by an app that timed out, orders that come hours late, one from the far future
    prices    compacted: records are gone, and rightly so
    catalogue a bulk load whose last records never arrived; only its manifest tells

Time is simulated (1 January 2026) and chance is seeded: every run plants the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.clock import ManualClock
from tidegate.randomness import SeededRandomness

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.integrity.breaking import Damage
    from tidegate.log.access.embedded import Log

ORDERS, PRICES, CATALOGUE = "orders", "prices", "catalogue"
START_MS = 1_767_261_600_000  # 2026-01-01T10:00Z
EVENTS, TILLS, CUSTOMERS = 100_000, 3, 200
STEP_MS = 36  # an hour of orders
AGAIN, LATE = 1_000, 40
LATE_MS = 2 * 3_600_000
FUTURE_MS = 10 * 365 * 86_400_000


@dataclass
class Planted:
    """What was done, so that the play can hold it against what is found."""

    events: int = 0  # different orders that are neither late nor from the future
    again: int = AGAIN
    late: int = LATE
    future: int = 1
    cents: dict[bytes, int] = field(
        default_factory=dict
    )  # what each of these orders was sent as, and its amount
    damages: list[Damage] = field(default_factory=list)


def plant(folder: Path) -> Planted:
    """Write the log `folder`, which must not exist."""
    from tidegate.integrity.breaking import break_topic
    from tidegate.integrity.damage import DamageKind
    from tidegate.log.access.embedded import Log

    planted, clock = Planted(), ManualClock(START_MS)
    parts: dict[str, Any] = {"durability": "os", "clock": clock, "randomness": SeededRandomness(2026)}
    scratch = folder.parent / "before"
    steps = [scratch / "0-sound", scratch / "1-gap", scratch / "2-flip", scratch / "3-repeat", folder]
    damages = (
        (DamageKind.DROP, 0, 3),
        (DamageKind.FLIP, 1, None),
        (DamageKind.REPEAT, 0, None),
        (DamageKind.FUTURE_CLOCK, 0, None),
    )
    with Log(steps[0], **parts) as log:
        _write_orders(log, planted)
    for seed, (kind, partition, count) in enumerate(damages):
        with Log(steps[seed], **parts) as log:
            planted.damages.append(
                break_topic(
                    log, ORDERS, kind, into=steps[seed + 1], partition=partition, count=count, seed=seed
                )
            )
    with Log(folder, **parts) as log:
        _write_prices(log, clock)
        _write_catalogue(log, scratch, planted, parts)
    _remove(scratch)
    return planted


def _write_orders(log: Log, planted: Planted) -> None:
    log.create_topic(ORDERS, 2)
    senders = [log.writer(ORDERS, integrity={"checksum": "adhash2"}) for _ in range(TILLS)]
    for number, table in enumerate(_orders(planted)):
        senders[number % TILLS].write(table)
    for sender in senders:
        sender.close()


def _orders(planted: Planted, piece: int = 1_000) -> Iterator[pa.Table]:
    """The events, a thousand at a time, in the order they are sent."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    chance = np.random.default_rng(2026)
    numbers = np.arange(EVENTS)
    ts = START_MS + numbers * STEP_MS + chance.integers(0, 2_000, EVENTS)
    late = chance.choice(np.arange(EVENTS // 2, EVENTS), LATE, replace=False)
    ts[late] -= LATE_MS
    future = EVENTS // 3
    ts[future] += FUTURE_MS
    strange = np.union1d(late, [future])
    planted.events = EVENTS - len(strange)
    # An app that timed out sends the same order again a little later: another record, the same order.
    sound = np.setdiff1d(numbers[: EVENTS - 2_000], strange)
    again = np.sort(chance.choice(sound, AGAIN, replace=False))
    places = np.concatenate([numbers, again + chance.integers(10, 1_000, AGAIN)])
    order = np.concatenate([numbers, again])[np.argsort(places, kind="stable")]
    customers = chance.integers(0, CUSTOMERS, EVENTS)
    cents = chance.integers(100, 20_000, EVENTS)
    name = pc.binary_join_element_wise("customer-", pa.array(customers).cast(pa.string()), "")
    euros = pc.binary_join_element_wise(
        pa.array(cents // 100).cast(pa.string()),
        pc.utf8_lpad(pa.array(cents % 100).cast(pa.string()), 2, "0"),
        ".",
    )
    value = pc.binary_join_element_wise(
        '{"order_id":"o-', pa.array(numbers).cast(pa.string()), '","amount":', euros, "}", ""
    )
    in_time = np.setdiff1d(numbers, strange)
    planted.cents = dict(
        zip(value.take(pa.array(in_time)).cast(pa.binary()).to_pylist(), cents[in_time].tolist(), strict=True)
    )
    for first in range(0, len(order), piece):
        rows = pa.array(order[first : first + piece])
        yield pa.table(
            {"key": name.take(rows), "value": value.take(rows), "timestamp": pa.array(ts).take(rows)}
        )


def _write_prices(log: Log, clock: ManualClock) -> None:
    """A compacted topic, compacted: most of its records are gone."""
    import pyarrow as pa

    log.create_topic(
        PRICES,
        1,
        {"cleanup.policy": "compact", "segment.bytes": "65536", "min.cleanable.dirty.ratio": "0.01"},
    )
    with log.writer(PRICES, integrity=True) as sender:
        for number in range(40):
            rows = [(number * 50 + item) for item in range(50)]
            sender.write(
                pa.table(
                    {
                        "key": [f"item-{row % 50}" for row in rows],
                        "value": [f'{{"cents":{100 + row}}}' for row in rows],
                        "timestamp": pa.array([clock.now_ms()] * 50, pa.int64()),
                    }
                )
            )
            clock.advance("1m")
    log.partition(PRICES, 0).roll()
    _compact(log)


def _compact(log: Log) -> None:
    from tidegate.log.cleaning.housekeeping import Housekeeping

    parts = {"files": log.files, "clock": log.clock, "randomness": log.randomness}
    Housekeeping(log, broker=log.contents.broker_config(), **parts).clean_once(topics=[PRICES])  # type: ignore[arg-type]


def _write_catalogue(log: Log, scratch: Path, planted: Planted, parts: dict[str, Any]) -> None:
    """A push of 2,000 articles whose last 25 are lost on the way; its end says how many there were."""
    import pyarrow as pa

    from tidegate.integrity import Push, sorted_sender
    from tidegate.integrity.breaking import break_topic
    from tidegate.integrity.damage import DamageKind
    from tidegate.integrity.manifest import Manifest
    from tidegate.log.access.embedded import Log

    with Log(scratch / "catalogue", **parts) as whole:
        whole.create_topic(CATALOGUE, 1)
        writer = whole.writer(CATALOGUE)
        driver = whole.writer(CATALOGUE, integrity=True)
        push = Push(driver)
        push.start()
        sender = sorted_sender(
            writer, push="catalogue-1", partition=0, attempt=0, started_ms=log.clock.now_ms(), clock=log.clock
        )
        sender.write(
            pa.table(
                {
                    "key": [f"article-{number}" for number in range(2_000)],
                    "value": [f'{{"stock":{number % 90}}}' for number in range(2_000)],
                }
            ),
            partition=0,
        )
        sender.close()
        push.end({number: Manifest.of([sent]) for number, sent in sender.sent().items()})
        driver.close()
        damage = break_topic(
            whole, CATALOGUE, DamageKind.TRUNCATE_TAIL, into=scratch / "catalogue-cut", count=25, seed=7
        )
    planted.damages.append(damage)
    log.create_topic(CATALOGUE, 1)
    with Log(scratch / "catalogue-cut", read_only=True) as cut:
        for batch in cut.reader(CATALOGUE, [0], control_records=True):
            columns = ["key", "value", "timestamp", "headers"]
            log.writer(CATALOGUE).write(pa.Table.from_batches([batch.select(columns)]), partition=0)


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)
