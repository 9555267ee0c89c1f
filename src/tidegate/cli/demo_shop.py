"""The shop of `tidegate demo`: orders with planted faults, and a pipeline that still counts right.

Topic `orders` has three tills and two partitions: planted with `break` are a gap, a flipped bit, a record stored twice
and a till whose clock is a day ahead; in the events are orders sent again by an app that timed out, orders that come
hours late, and one from the far future. Of compacted `prices` records are missing, which is no fault. The last records
of `catalogue`, a bulk load, never arrived; only its manifest shows it.

Time is simulated (1 January 2026) and randomness is seeded: every run plants the same faults. Every number that is
printed is computed; the demo fails when a result differs from what was planted.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.clock import ManualClock
from tidegate.errors import TidegateError
from tidegate.randomness import SeededRandomness

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.cli.demo import Stage
    from tidegate.integrity.fault_injection import Damage
    from tidegate.log.log import Log


# -- the data --------------------------------------------------------------------------------------

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
    from tidegate.integrity.fault_injection import DamageKind, break_topic
    from tidegate.log.log import Log

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
    shutil.rmtree(scratch)
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

    from tidegate.log.maintenance import Housekeeping

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
    parts = {"files": log.files, "clock": log.clock, "randomness": log.randomness}
    Housekeeping(log, broker=log.contents.broker_config(), **parts).clean_once(topics=[PRICES])  # type: ignore[arg-type]


def _write_catalogue(log: Log, scratch: Path, planted: Planted, parts: dict[str, Any]) -> None:
    """A push of 2,000 articles whose last 25 are lost on the way; its end says how many there were."""
    import pyarrow as pa

    from tidegate.integrity import Push, sorted_sender
    from tidegate.integrity.fault_injection import DamageKind, break_topic
    from tidegate.integrity.state import Manifest
    from tidegate.log.log import Log

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


# -- the scenes ------------------------------------------------------------------------------------

PIPELINE = """\
import os

import tidegate as tg

app = tg.App("shop", data=os.environ.get("SHOP_DATA", {data!r}))
(
    app.stream("orders", value=tg.Json(order_id="string", amount="double"), on_error="keep")
    .validate()                                  # producers' numbering and checksums
    .drop_duplicates("order_id", within="10m")   # the first of each order counts
    .window(tg.Tumbling("1m", grace="30s", retention="1d"))
    .agg(orders=tg.count(), revenue=tg.sum("amount"))
    .to_topic("orders-per-minute")               # a changelog, in Kafka Streams' own bytes
    .to_table("per-minute")
)
"""
LOOK = """\
from datetime import UTC, datetime

from shop import app

with app.open_table("per-minute") as table:
    for row in table.fetch("customer-7", "2026-01-01T10:00Z", "2026-01-01T10:04Z"):
        minute = datetime.fromtimestamp(row.window.start / 1000, UTC)
        print(f"{row.key}  {minute:%H:%M}  {row.value['orders']} orders  {row.value['revenue']:8.2f}")
    print(f"{len(table.all()):,} windows, {table.late().num_rows} records kept apart")
"""
RUN_SECONDS = 120
TWICE = "records stored twice, dropped"
CORRUPT = "corrupt, set aside"
KILLED_ROUNDS = 4_000  # records a round, so that there is a middle to be killed in


class Play:
    """The demo in one folder."""

    def __init__(self, folder: Path, stage: Stage, engine: str) -> None:
        self.folder, self.stage, self.engine = folder, stage, engine
        self.log = folder / "data" / "log"
        self.began = time.monotonic()

    def run(self) -> None:
        self.stage.title("Tidegate: a number that must be right")
        planted = self.plant_faults()
        self.find_them(planted)
        self.run_the_pipeline(planted)
        self.read_the_table()
        self.kill_it()
        self.farewell()

    # -- scenes ----------------------------------------------------------------------------------

    def plant_faults(self) -> Planted:
        stage = self.stage
        stage.step(
            "A shop's orders, with faults planted.",
            "Three tills send 100,000 orders of one hour; every record is numbered and check-summed by its sender.",
        )
        planted = plant(self.log)
        for damage in planted.damages:
            stage.say(f"- {_damage_text(damage)}")
        stage.say(
            f"- {planted.again:,} orders are sent again by an app that timed out: new records, old orders"
        )
        stage.say(f"- {planted.late} orders come two hours late, {planted.future} is dated ten years ahead")
        stage.say(f"- topic {PRICES} was compacted: its holes are no loss, and must not be called one")
        return planted

    def find_them(self, planted: Planted) -> None:
        stage = self.stage
        stage.step("Find them: `verify` reads the files; no broker, no JVM.")
        for topic, code in ((ORDERS, 1), (CATALOGUE, 1), (PRICES, 0)):
            place = ["verify", topic, "--log", str(self.log)]
            report = json.loads(stage.run([*place, "--format", "json"], quiet=True, expected=code))
            stage.command(shlex.join(["tidegate", *place]))
            found = [finding for finding in report["findings"] if finding["kind"] != "tolerated"]
            for finding in found:
                stage.answer(f"{finding['severity']}: {finding['kind']} at {_place(finding)}")
            if not found:
                gaps = sum(
                    gap["count"]
                    for part in report["integrity"]["partitions"]
                    for gap in part["expected_gaps"]
                )
                stage.answer(f"no fault in {topic}; {gaps} gaps are compaction's")
            _check_found(planted, topic, found)
        stage.say(
            f"Every planted fault was found after {self._elapsed()}; exit code 1, ready for a cron job."
        )

    def run_the_pipeline(self, planted: Planted) -> None:
        stage = self.stage
        (self.folder / "shop.py").write_text(PIPELINE.format(data=str(self.folder / "data")))
        stage.step("Count them right: a pipeline, and where it keeps what it knows.")
        stage.answer((self.folder / "shop.py").read_text())
        summary = self._run("data")
        totals = summary["progress"]["counters"]
        stage.answer(summary["summary"])
        counted = totals.get("windows.accepted", 0)
        parts = {
            "counted in windows": counted,
            "orders sent again, dropped": totals.get("dedupe.duplicates", 0),
            TWICE: summary["progress"]["verdicts"].get("duplicate", 0),
            "late, kept apart": totals.get("windows.late_records", 0) + totals.get("dedupe.late", 0),
            "from the future, kept apart": totals.get("windows.future", 0),
            CORRUPT: totals.get("faulty_kept", 0),
            "unreadable, kept apart": totals.get("unreadable", 0),
        }
        parts["records about the sending itself"] = (
            summary["records"] - totals["events"] - parts[TWICE] - parts[CORRUPT]
        )
        width = max(map(len, parts))
        for name, number in parts.items():
            stage.say(f"{name.ljust(width)}  {number:>8,}")
        stage.say(f"{'records in the log'.ljust(width)}  {summary['records']:>8,}")
        if sum(parts.values()) != summary["records"]:
            raise TidegateError(f"records are not accounted for: {parts} of {summary['records']}")
        if parts[CORRUPT] != 1:
            raise TidegateError(f"one bit was flipped, and {parts[CORRUPT]} records were set aside")
        total, right = self._python("-c", TOTAL).strip(), f"{self._right_cents(planted) / 100:.2f}"
        if total != right:
            raise TidegateError(f"the table sums up to {total}, the orders that arrived as sent to {right}")
        stage.say(f"All windows sum up to {total}: that of every order that arrived as it was sent.")
        stage.say("The record with the flipped bit is not in it, but in the app's dead letters:")
        stage.answer(self._python("-c", LETTERS).strip())
        stage.say("The run ends with exit code 1 until somebody acknowledges the faults.")
        stage.say(f"The table was there after {self._elapsed()}.")

    def read_the_table(self) -> None:
        stage = self.stage
        (self.folder / "look.py").write_text(LOOK)
        stage.step("Read it from another process.")
        stage.answer(LOOK)
        stage.command(f"cd {shlex.quote(str(self.folder))} && python look.py")
        stage.answer(self._python("look.py"))

    def kill_it(self) -> None:
        stage = self.stage
        stage.step(
            "Kill it in the middle, twice, and run it again.",
            "The same log, a new state, small rounds; SIGKILL, so nothing can be tidied up.",
        )
        again = self.folder / "again"
        shutil.copytree(self.log, again / "log")
        _without_results(again / "log")
        for rounds in (3, 7):
            done = self._killed("again", rounds)
            stage.say(f"killed after round {done} was committed")
        summary = self._run("again", "--round-records", str(KILLED_ROUNDS))
        stage.answer(summary["summary"])
        equal = self._python("-c", COMPARE).strip()
        if equal != "equal":
            raise TidegateError(f"the table after the kills differs: {equal}")
        stage.say("All windows, counts and sums are the same as in the undisturbed run, to the last bit.")
        place = ["verify", "orders-per-minute", "--log", str(again / "log"), "--format", "table"]
        stage.answer(stage.run(place).strip())

    def farewell(self) -> None:
        folder, log = shlex.quote(str(self.folder)), shlex.quote(str(self.log))
        self.stage.farewell(
            self.folder,
            f"tidegate ui {shlex.quote(str(self.folder / 'data'))}            # look at all of it in a browser",
            f"cd {folder} && tidegate run shop.py --explain",
            f"cd {folder} && tidegate run shop.py               # goes on; Ctrl-C ends it",
            f"tidegate app status shop --state {shlex.quote(str(self.folder / 'data' / 'state'))}",
            f"tidegate consume orders-per-minute --log {log} -n 3",
            "tidegate demo --canary                    # how long does a record really live?",
            "tidegate verify /var/lib/kafka/data       # any Kafka data folder, read-only",
        )

    # -- inside ----------------------------------------------------------------------------------

    def _right_cents(self, planted: Planted) -> int:
        """The sum of all orders in the log that are byte for byte what a till sent, each counted once."""
        from tidegate.log.log import Log

        arrived: set[bytes] = set()
        with Log(self.log, read_only=True) as log:
            for batch in log.reader(ORDERS):
                arrived.update(batch.column("value").to_pylist())
        return sum(cents for value, cents in planted.cents.items() if value in arrived)

    def _run(self, data: str, *options: str) -> dict[str, Any]:
        shown = f"cd {shlex.quote(str(self.folder))} && " + ("" if data == "data" else f"SHOP_DATA={data} ")
        self.stage.command(" ".join([f"{shown}tidegate run shop.py --once", *options]))
        done = subprocess.run(
            self._command(*options), cwd=self.folder, env=self._environment(data), capture_output=True, text=True,
            timeout=RUN_SECONDS,
        )  # fmt: skip
        if done.returncode != 1:  # faults were planted, and a run says so
            raise TidegateError(f"the pipeline ended with {done.returncode}: {done.stderr[-2000:]}")
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def _killed(self, data: str, rounds: int) -> int:
        """Start it, and kill it when so many more rounds are committed; the newest then."""
        commits = self.folder / data / "state" / "apps" / "shop" / "commits"
        started = subprocess.Popen(
            self._command("--round-records", str(KILLED_ROUNDS)), cwd=self.folder, env=self._environment(data),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + RUN_SECONDS
            while _newest(commits) < rounds:
                if started.poll() is not None or time.monotonic() > deadline:
                    raise TidegateError(
                        f"the pipeline ended before round {rounds}, so there was nothing to kill"
                    )
                time.sleep(0.02)
        finally:
            started.kill()
            started.wait()
        return _newest(commits)

    def _command(self, *options: str) -> list[str]:
        command = [sys.executable, "-m", "tidegate.cli.main", "run", "shop.py", "--once"]
        return [*command, "--engine", self.engine, *options]

    def _environment(self, data: str) -> dict[str, str]:
        return {**os.environ, "SHOP_DATA": str(self.folder / data), "PYTHONPATH": str(self.folder)}

    def _python(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=self._environment("data"), capture_output=True,
            text=True, timeout=RUN_SECONDS,
        )  # fmt: skip
        if done.returncode != 0:
            raise TidegateError(f"python {arguments[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self.began:.1f} s"


TOTAL = """
from shop import app

with app.open_table("per-minute") as table:
    print(f"{sum(row.value['revenue'] for row in table.all()):.2f}")
"""
LETTERS = """
from shop import app

for letter in app.dead_letters("orders-per-minute").to_pylist():
    print(f"orders-{letter['partition']} offset {letter['offset']}: {letter['reason'].split(';')[0]}")
"""
COMPARE = """
import os
import shop
from tidegate import App
from pathlib import Path

def rows():
    with shop.app.open_table("per-minute") as table:
        return table.to_arrow()

first = rows()
os.environ["SHOP_DATA"] = str(Path("again").absolute())
import importlib
importlib.reload(shop)
second = rows()
print("equal" if first.equals(second) else f"{first.num_rows} and {second.num_rows} rows")
"""


def _damage_text(damage: Any) -> str:
    words = {
        "drop": "lost on the way",
        "flip": "has one bit flipped",
        "repeat": "is stored twice",
        "future-clock": "says that its till's clock was a day ahead, which it was not",
        "truncate-tail": "never arrived: the end of a bulk load",
    }
    count = len(damage.before)
    what = f"{count} records" if count > 1 else f"the record at offset {damage.before[0]}"
    return f"{damage.topic}-{damage.partition}: {what} {words[damage.kind.value]}"


def _check_found(planted: Planted, topic: str, findings: list[dict[str, Any]]) -> None:
    """Each planted damage must be among the findings of its topic, and nothing else may be."""
    wanted = sum(1 for damage in planted.damages if damage.topic == topic)
    if len(findings) != wanted:
        raise TidegateError(f"{topic}: {wanted} faults were planted, {len(findings)} were found: {findings}")


def _place(finding: dict[str, Any]) -> str:
    return f"{Path(finding['path']).parent.name} offset {finding['offset']}: {finding['remedy']}"


def _newest(commits: Path) -> int:
    """The number of the newest commit in a state folder; -1 for none."""
    if not commits.is_dir():
        return -1
    return max((int(path.name) for path in commits.iterdir() if path.name.isdigit()), default=-1)


def _without_results(log: Path) -> None:
    """The copied log without the topic that the first run made."""
    from tidegate.log.log import Log

    with Log(log, durability="os") as copy:
        if "orders-per-minute" in copy.topics():
            copy.delete_topic("orders-per-minute")
