"""Flows over one log, run in many ways: what a flow comes to must not depend on how it was run.

A chain is a tuple of names of steps. Every chain of up to two steps in front of an end or a window is tried; those that
the API refuses are left out and counted. Many flows share one app and so one run.

The log has what makes order matter: copies of events in other partitions, events out of order and too late, stretches
where one partition is ahead of the others, a partition that ends early and (of five) one that has nothing.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

import tidegate as tg
from tidegate.errors import InvalidError
from tidegate.pipeline.checkpoint import Records
from tidegate.storage import open_backend
from tidegate.windows.aggregates.definitions import AggregateDefinition

START = 1_767_261_600_000
NAMES = tg.Json(name="string")
COLUMNS = {"id": "string", "group": "string", "x": "int64", "f": "double"}
GROUPS = 4
KINDS: dict[str, Any] = {
    "tumbling": tg.Tumbling("10s", grace="3s", retention="1d"),
    "hopping": tg.Hopping("10s", "4s", grace="3s", retention="1d"),
    "sliding": tg.Sliding("5s", grace="3s", retention="1d"),
    "session": tg.Session("2s", grace="3s", retention="1d"),
    "unlimited": tg.Unlimited(),
}
STEPS = ("validate", "filter", "select", "map", "lookup", "dedupe")
WINDOWS = tuple(
    f"{kind}-{emit}-{made}"
    for kind, emit, made in product(KINDS, ("update", "close"), ("mergeable", "ordered"))
)
KEYS = ("co-partitioned", "re-keyed")
VOLATILE = ("rows_sent", "windows.emitted")  # an update is sent once a round


class Line(NamedTuple):
    """A record of the log."""

    partition: int
    key: str
    ts: int
    id: str
    group: str
    x: int

    @property
    def value(self) -> str:
        return f'{{"id":"{self.id}","group":"{self.group}","x":{self.x},"f":{self.x / 7!r}}}'


def lines(seed: int, partitions: int, events: int) -> list[Line]:
    """The log, in the order it is written."""
    chance = random.Random(seed)
    used = partitions - 1 if partitions > 4 else partitions
    ahead = [chance.choice([0, 0, 2_000, 9_000]) for _ in range(used)]
    made: list[Line] = []
    for number in range(events):
        group = f"g{chance.randrange(GROUPS)}"
        late = chance.choice([0, 0, 0, 0, 1_500, 4_000, 15_000])
        ts = START + number * 600 - late
        for copy in range(chance.choice([1, 1, 2, 3])):
            partition = chance.randrange(used)
            if partition == used - 1 > 0 and number > 0.7 * events:
                continue  # it ends early
            at = ts + ahead[partition] + copy * chance.randrange(2_500)
            key = f"k{partition}-{chance.randrange(3)}"
            made.append(Line(partition, key, at, f"e{number}", group, chance.randrange(100)))
    return made


def write(folder: Path, part: Sequence[Line], partitions: int) -> None:
    """Append to the log; the table that is looked into is built at the first time."""
    with tg.Log(folder / "log") as log:
        is_new = "in" not in log.topics()
        log.create_topic("in", partitions, if_not_exists=True)
        log.create_topic("names", 1, if_not_exists=True)
        if is_new:
            known = [f"g{number}" for number in range(GROUPS - 1)]
            values = [f'{{"name":"group {key}"}}' for key in known]
            log.writer("names").write(
                pa.table({"key": known, "value": values, "timestamp": [START] * len(known)})
            )
        writer = log.writer("in")
        for partition in range(partitions):
            own = [line for line in part if line.partition == partition]
            if own:
                table = {"key": [line.key for line in own], "value": [line.value for line in own]}
                writer.write(pa.table({**table, "timestamp": [line.ts for line in own]}), partition=partition)
    if is_new:
        with tg.App("names", data=folder).table("names", value=NAMES) as table:
            table.catch_up()


# -- flows ---------------------------------------------------------------------------------------


def chains(*, full: bool) -> Iterator[tuple[str, ...]]:
    """A key, up to two steps, and a window or none; not `full`: at most one step in front of a window."""
    for key in KEYS:
        for length in (0, 1, 2):
            for steps in product(STEPS, repeat=length):
                yield (key, *steps)
                if full or length < 2:
                    yield from ((key, *steps, window) for window in WINDOWS)


def joined() -> AggregateDefinition:
    """Ids behind each other: an aggregate of the user's own that depends on the order of records."""

    def merge(states: pa.Array, groups: Any, count: int) -> pa.Array:
        texts: list[str] = [""] * count
        for state, group in zip(states.to_pylist(), groups.tolist(), strict=True):
            texts[group] += state + " "
        return pa.array([text.strip() for text in texts], pa.string())

    return tg.reduce("id", merge, state=pa.string())


def summed() -> AggregateDefinition:
    """A user's own aggregate for sessions, which grow together: it does not depend on the order of records."""

    def merge(states: pa.Array, groups: Any, count: int) -> pa.Array:
        return pa.array(np.bincount(groups, states.to_numpy(), count).astype(np.int64))

    return tg.reduce("x", merge, state=pa.int64())


def defined(app: tg.App, chain: Sequence[str]) -> str | None:
    """Add a chain's flow to an app; its name, None: the API refuses it.

    What stands behind `changes` is a flow of its own over the topic that the flow in front of it writes.
    """
    name = ".".join(chain)
    if "changes" in chain:
        return _changes_defined(app, chain, name)
    steps = (
        (chain[1], chain[0], *chain[2:]) if chain[1:2] == ("validate",) else chain
    )  # it comes before a key_by
    try:
        stream = app.stream("in", value=tg.Json(**COLUMNS))
        for step in steps:
            stream = _then(stream, step)
        stream.to_topic(name, integrity=False)
        if chain[-1] in WINDOWS:
            stream.to_table(f"{name}.table")
    except InvalidError:
        return None
    return name


def _changes_defined(app: tg.App, chain: Sequence[str], name: str) -> str | None:
    place = chain.index("changes")
    kind = KINDS[chain[place - 1].partition("-")[0]]
    upstream = defined(app, chain[:place])
    if upstream is None:
        return None
    size = {"sessions": True} if isinstance(kind, tg.Session) else {"window_size": f"{kind.size_ms}ms"}
    stream = app.changes(upstream, value=tg.Json(n="int64", high="int64"), **size)
    again, emit, _ = chain[-1].split("-")
    made = {"n": tg.sum("n")}
    if "-close-" in chain[place - 1]:  # of final windows also what cannot be taken back
        made["high"] = tg.max("high")
    stream = stream.window(KINDS[again], emit=emit).agg(**made)
    stream.to_topic(name, integrity=False).to_table(f"{name}.table")
    return name


def _then(stream: tg.Stream, step: str) -> tg.Stream:
    if step in WINDOWS:
        kind, emit, made = step.split("-")
        if made == "ordered":
            own = summed() if kind == "session" else joined()
            return stream.window(KINDS[kind], emit=emit).agg(own=own, n=tg.count())
        return stream.window(KINDS[kind], emit=emit).agg(
            n=tg.count(), total=tg.sum("f"), low=tg.min("x"), high=tg.max("x"), mean=tg.mean("f"),
            begin=tg.first("id"), end=tg.last("id"), ids=tg.collect("id"), top=tg.top_k("x", 3),
            different=tg.count_distinct("id"), about=tg.approx_count_distinct("id"))  # fmt: skip
    match step:
        case "re-keyed":
            return stream.key_by("group", shards=2)
        case "validate":
            return stream.validate()
        case "filter":
            return stream.filter("x >= 20")
        case "select":
            return stream.select("*", x="x + 1")
        case "map":
            names = stream.schema.names
            return stream.map(lambda batch: batch.select(names), stream.schema)
        case "lookup" if "name" in stream.schema.names:
            return stream.lookup("names", key="group", value=NAMES, again="name")
        case "lookup":
            return stream.lookup("names", "name", key="group", value=NAMES)
        case "dedupe":
            return stream.drop_duplicates("id", within="6s", grace="4s")
    return stream  # co-partitioned: as it is


# -- running -------------------------------------------------------------------------------------


class Way(NamedTuple):
    """How an app is run: records of a round and flow, after how many rounds it is started anew (twice), in how many
    pieces the log is written with a run after each, and whether the input is said to end with the last.

    Where it ends, every partition is waited for until then: nothing is guessed from where a piece happens to end.
    """

    size: int
    stops: int | None = None
    pieces: int = 1
    closes: bool = False


def ran(
    folder: Path, names: Iterable[Sequence[str]], log: Sequence[Line], partitions: int, way: Way, engine: Any
) -> dict[str, Any]:
    """Run the flows; what each came to, by its name."""
    chosen = list(names)
    for piece in range(way.pieces):
        part = [line for place, line in enumerate(log) if place * way.pieces // len(log) == piece]
        write(folder, part, partitions)
        is_last = piece == way.pieces - 1
        for stop in (None,) if way.stops is None else (way.stops, way.stops, None):
            app = tg.App("matrix", data=folder, idle_after=None if way.closes else "1h")
            flows = [name for chain in chosen if (name := defined(app, chain)) is not None]
            _run(app, engine, stop, way.size * len(flows), close=is_last and way.closes)
    return {name: outcome(folder, app, name, log) for name in flows}


def _run(app: tg.App, engine: Any, stop: int | None, size: int, *, close: bool) -> None:
    if stop is None:
        app.run(engine, until="caught_up", close=close, round_records=size)
        return
    first: list[int] = []

    def watch(progress: Any) -> None:
        first.append(progress.round)
        if progress.round >= first[0] + stop:
            run.stop()

    run = app.start(engine, until="caught_up", round_records=size, progress=watch)
    run.await_termination()


def outcome(folder: Path, app: tg.App, name: str, written: Sequence[Line]) -> dict[str, Any]:
    """A flow's table, the content of its topic, its late records and its counters."""
    found: dict[str, Any] = {}
    with tg.Log(folder / "log", read_only=True) as log:
        sent = log.reader(name).read_all().sort_by([("partition", "ascending"), ("offset", "ascending")])
    columns = [sent[column].to_pylist() for column in ("partition", "key", "value", "timestamp")]
    rows = list(zip(*columns, strict=True))
    if "-update-" in name:  # what an update shows on the way depends on rounds, what it comes to does not
        rows = sorted(
            (row for row in {row[:2]: row for row in rows}.values() if row[2] is not None), key=repr
        )
    if name.startswith("re-keyed") and not app.flow(name).is_stateful:
        # nothing is held back without state: only records of one source partition have a fixed order
        found["order"] = by_source(rows, written)
        rows = sorted(rows, key=repr)
    found["topic"] = rows
    if name.rpartition(".")[2] in WINDOWS:
        with app.open_table(f"{name}.table") as table:
            found["table"] = sorted(table.all().to_arrow().to_pylist(), key=repr)
    if app.flow(name).is_stateful:
        found["late"] = sorted(app.late(name).to_pylist(), key=repr)
    backend = open_backend(app.state)
    try:
        records = Records(backend, app.name)
        commit, _ = records.read_commit(records.newest() or 0)
    finally:
        backend.close()
    front, changes, _ = name.partition(".changes.")
    if changes and "-update-" in front:
        return found  # how many changes there are to read depends on rounds, what they come to does not
    found["totals"] = {
        what: count
        for what, count in commit.totals.get(name, {}).items()
        if "-update-" not in name or what not in VOLATILE
    }
    return found


def by_source(rows: Sequence[tuple[Any, ...]], written: Sequence[Line]) -> dict[int, list[Any]]:
    """The rows of each source partition in their order, for event times that only one source partition has."""
    sources: dict[int, set[int]] = defaultdict(set)
    for line in written:
        sources[line.ts].add(line.partition)
    found: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        if len(sources[row[3]]) == 1:
            found[min(sources[row[3]])].append(row)
    return dict(sorted(found.items()))


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What two ways of running the same flows do not agree on, in words."""
    if found.keys() != expected.keys():
        return [f"other flows: {sorted(found.keys() ^ expected.keys())}"]
    return [
        f"{name}: its {part} has {_apart(found[name][part], whole)}"
        for name, parts in expected.items()
        for part, whole in parts.items()
        if found[name][part] != whole
    ]


def _apart(found: Any, expected: Any) -> str:
    if isinstance(expected, dict):
        return f"{found}, not {expected}"
    more = [row for row in found if row not in expected][:2]
    less = [row for row in expected if row not in found][:2]
    return f"{len(found)} rows, not {len(expected)}; {more} are new, {less} are missing"
