"""R-28: fifty thousand damaged pushes; each damage is reported as what it is, at the record it should be.

The answer is known from what was done to the stream, not from the rules: every damage names the record at which it
must show and the verdict. A stream gets one damage, or two to different producers; with a manifest and without.
What cannot be seen is listed: lost tails and absent producers without a manifest, and, on a compacted topic whose
gaps are judged by the record before them, loss behind a producer's long silence, which is then noted as suspect.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from scalar_validator import ScalarValidator
from tidegate.integrity.header import ChecksumType
from tidegate.integrity.state import Manifest, Sent
from tidegate.integrity.validator import PartitionValidator, ValidationRules
from tidegate.integrity.verdicts import Note, Tolerance, Verdict

STREAMS = 50_000
SOAK_STREAMS = 5_000_000
GROUPS = 8
OF_ONE_PUSH = 125
LAG = 24 * 3_600_000
BLIND = {("tail", False), ("absent", False)}
"""Damage that leaves no trace: its kind, and whether there was a manifest."""

Place = list[int]
"""One record of a stream: its number in the pool, in a list of its own so that places can be told apart."""


class Shown(NamedTuple):
    """Where a damage must show, and as what."""

    place: Place
    verdict: Verdict


class Drill:
    """One sound push, and the records that damage needs, encoded once."""

    def __init__(self, streams: Any, chance: random.Random, *, age_ms: int = 0) -> None:
        self.chance = chance
        pens = [
            streams.Pen(number + 1, chance.choice(list(ChecksumType)), streams.NOW - age_ms)
            for number in range(chance.randint(2, 3))
        ]
        parts = []
        for pen in pens:
            part: list[Any] = []
            for _ in range(chance.randint(1, 3)):
                part.append(pen.start())
                part += [
                    pen.put(b"k%d" % n, b"%d of %d" % (n, pen.chain)) for n in range(chance.randint(2, 5))
                ]
                part.append(pen.end())
            parts.append(part)
        sent = tuple(Sent(pen.guid, pen.chain, pen.sequence - 1, pen.checksum, pen.data) for pen in pens)
        data: list[Any] = []
        while any(parts):
            data.append(chance.choice([part for part in parts if part]).pop(0))
        driver = streams.Pen(99, time=streams.NOW - age_ms)
        opening = [driver.start(), driver.start_push()]
        bare, full = driver.end_push(Manifest()), driver.end_push(Manifest(sent))
        full = full._replace(stamp=full.stamp._replace(sequence=bare.stamp.sequence))
        self.count = len(opening) + len(data)
        self.guids = [None, None, *(row.stamp.guid for row in data)]
        rows = [*opening, *data]
        changed = [row._replace(value=b"changed" if row.value != b"" else b"!") for row in rows]
        clocks = [row.stamped(timestamp=row.stamp.timestamp + 1) for row in rows]
        swapped = [self._with_value_of(rows, number, step) for step in (1, -1) for number in range(len(rows))]
        ends = [self._resealed(driver, bare), self._resealed(driver, full)]
        self.rows = rows
        self.pool = streams.Pool([*rows, *changed, *clocks, *swapped, *ends])
        self.ends = {False: 5 * self.count, True: 5 * self.count + 1}

    @staticmethod
    def _with_value_of(rows: list[Any], number: int, step: int) -> Any:
        """A record with the value of the next one (or the one before) in its chain."""
        wanted = rows[number].stamp[3:5], rows[number].stamp.sequence + step
        other = next((row for row in rows if (row.stamp[3:5], row.stamp.sequence) == wanted), rows[number])
        return rows[number]._replace(value=other.value)

    @staticmethod
    def _resealed(driver: Any, end: Any) -> Any:
        """The end of push as if the driver had written only this one."""
        driver.sequence = end.stamp.sequence
        driver.stamp_sum = driver.checksum = 0
        return driver._write(end.stamp._replace(crc=0), None, b"", end.payload)

    def stream(self, manifest: bool) -> list[Place]:
        return [[number] for number in range(self.count)] + [[self.ends[manifest]]]

    def of(self, stream: list[Place], guid: bytes) -> list[Place]:
        """The places of one producer."""
        return [place for place in stream if place[0] < self.count and self.guids[place[0]] == guid]

    def stamp(self, place: Place) -> Any:
        return self.rows[place[0] % self.count].stamp

    # -- damage: each changes the stream and says where it must show -----------------------------

    def lose(self, stream: list[Place], guid: bytes) -> list[Shown]:
        """A record in the middle is gone: its follower shows it."""
        mine = self.of(stream, guid)
        at = self.chance.randrange(len(mine) - 1)
        stream.remove(mine[at])
        headless = self.stamp(mine[at]).is_start_of_chain
        return [Shown(mine[at + 1], Verdict.UNREGISTERED_PRODUCER if headless else Verdict.MISSING)]

    def repeat(self, stream: list[Place], guid: bytes) -> list[Shown]:
        """A record comes again, at once or later, before the push ends."""
        mine = self.of(stream, guid)
        place = self.chance.choice(mine)
        again = [place[0]]
        stream.insert(self.chance.randint(_where(stream, place) + 1, len(stream) - 1), again)
        return [Shown(again, Verdict.DUPLICATE)]

    def reorder(self, stream: list[Place], guid: bytes) -> list[Shown]:
        """Two neighbours of one producer change places."""
        mine = self.of(stream, guid)
        at = self.chance.randrange(len(mine) - 1)
        left, right = _where(stream, mine[at]), _where(stream, mine[at + 1])
        stream[left], stream[right] = stream[right], stream[left]
        headless = self.stamp(mine[at]).is_start_of_chain
        return [Shown(mine[at + 1], Verdict.UNREGISTERED_PRODUCER if headless else Verdict.MISSING)]

    def swap(self, stream: list[Place], guid: bytes) -> list[Shown]:
        """Two neighbours of one chain have each other's value."""
        data = [each for each in self.of(stream, guid) if self.stamp(each).kind == 0]
        pairs = [
            (left, right)
            for left, right in itertools.pairwise(data)
            if self.stamp(left).chain == self.stamp(right).chain
        ]
        left, right = self.chance.choice(pairs)
        left[0] += 3 * self.count
        right[0] += 4 * self.count
        return [Shown(left, Verdict.CORRUPT), Shown(right, Verdict.CORRUPT)]

    def change(self, stream: list[Place], guid: bytes) -> list[Shown]:
        """Other bytes in a value, of a data or a control record."""
        place = self.chance.choice(self.of(stream, guid))
        place[0] += self.count
        return [Shown(place, Verdict.CORRUPT)]

    def set_clock(self, stream: list[Place], guid: bytes) -> list[Shown]:
        """Another time in a data record's header: the end of its chain shows it."""
        mine = self.of(stream, guid)
        place = self.chance.choice([each for each in mine if self.stamp(each).kind == 0])
        end = next(
            each
            for each in mine
            if self.stamp(each).is_end_of_chain and self.stamp(each).chain == self.stamp(place).chain
        )
        place[0] += 2 * self.count
        return [Shown(end, Verdict.CORRUPT)]

    def tail(self, stream: list[Place], guid: bytes) -> list[Shown]:
        """The last records of a producer are gone."""
        mine = self.of(stream, guid)
        for place in mine[-self.chance.randint(1, len(mine) - 1) :]:
            stream.remove(place)
        return [Shown(stream[-1], Verdict.MISSING)]

    def absent(self, stream: list[Place], guid: bytes) -> list[Shown]:
        """A producer never arrived."""
        for place in self.of(stream, guid):
            stream.remove(place)
        return [Shown(stream[-1], Verdict.MISSING)]


DAMAGES: dict[str, Callable[[Drill, list[Place], bytes], list[Shown]]] = {
    "loss": Drill.lose,
    "duplicate": Drill.repeat,
    "reorder": Drill.reorder,
    "value swap": Drill.swap,
    "mutation": Drill.change,
    "clock": Drill.set_clock,
    "tail": Drill.tail,
    "absent": Drill.absent,
}


def _where(stream: list[Place], place: Place) -> int:
    return next(number for number, each in enumerate(stream) if each is place)


def expected(stream: list[Place], shown: list[Shown]) -> list[tuple[int, Verdict]]:
    """What is not OK, up to the fault that stops the partition."""
    found = sorted({(_where(stream, place), verdict) for place, verdict in shown})
    for number, (_, verdict) in enumerate(found):
        if verdict.is_fatal:
            return found[: number + 1]
    return found


def judged(
    streams: Any, drill: Drill, stream: list[Place], rules: ValidationRules
) -> list[tuple[int, Verdict]]:
    """What the scalar table says of it."""
    validator, found = ScalarValidator(rules), []
    for arrival in drill.pool.arrivals([place[0] for place in stream]):
        told = validator.look(arrival, streams.NOW)
        if told.verdict is not Verdict.OK:
            found.append((arrival.offset, told.verdict))
        if told.stops:
            break
    return found


def classify(streams: Any, seed: str, count: int) -> Counter[tuple[str, bool]]:
    """Damage `count` pushes; how many of each kind of damage were met, all of them classified."""
    chance, met, rules = random.Random(seed), Counter[tuple[str, bool]](), ValidationRules()
    for number in range(count):
        if number % OF_ONE_PUSH == 0:
            drill = Drill(streams, chance)
        manifest = chance.random() < 0.5
        stream, shown = drill.stream(manifest), []
        guids = sorted({guid for guid in drill.guids if guid})
        for guid in chance.sample(guids, chance.choice([1, 1, 2])):
            kind = chance.choice(list(DAMAGES))
            told = DAMAGES[kind](drill, stream, guid)
            shown += [] if (kind, manifest) in BLIND else told
            met[kind, manifest] += 1
        assert judged(streams, drill, stream, rules) == expected(stream, shown), (seed, number)
        if number % 10 == 0:
            vector = PartitionValidator("orders", 0, rules=rules)
            told_too = vector.validate(drill.pool.batch([place[0] for place in stream]), streams.NOW)
            wrong = [(at, Verdict(one)) for at, one in enumerate(told_too.verdicts.tolist()) if one]
            assert wrong == expected(stream, shown)
    return met


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("row", ["R-28"])
def test_every_damage_is_classified_where_it_shows(row: str, streams: Any, group: int) -> None:
    met = classify(streams, f"{row} {group}", STREAMS // GROUPS)
    assert set(met) == {(kind, manifest) for kind in DAMAGES for manifest in (False, True)}
    assert min(met.values()) > 100


@pytest.mark.soak
@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("row", ["R-28"])
def test_every_damage_is_classified_very_often(row: str, streams: Any, group: int) -> None:
    classify(streams, f"{row} soak {group}", SOAK_STREAMS // GROUPS)


@pytest.mark.parametrize("row", ["R-28"])
def test_sound_and_legally_compacted_pushes_raise_nothing(row: str, streams: Any) -> None:
    chance = random.Random(row)
    for _ in range(40):
        drill = Drill(streams, chance, age_ms=LAG)
        compacted = ValidationRules(tolerance=Tolerance(LAG))
        data = [number for number, each in enumerate(drill.rows) if each.stamp.kind == 0]
        for _ in range(25):
            manifest = chance.random() < 0.5
            assert judged(streams, drill, drill.stream(manifest), ValidationRules()) == []
            gone = {number for number in data if chance.random() < 0.4}
            thinned = [place for place in drill.stream(manifest) if place[0] not in gone]
            assert judged(streams, drill, thinned, compacted) == [], "compaction keeps starts and ends"


@pytest.mark.parametrize("row", ["R-28"])
def test_loss_behind_a_long_silence_is_suspect_or_seen_by_the_other_anchor(row: str, streams: Any) -> None:
    pen = streams.Pen(time=streams.NOW - LAG)
    rows = [pen.start(), pen.put()]
    pen.time = streams.NOW
    rows += [pen.put(), pen.put()]
    del rows[2]
    for anchor, verdict, note in (
        ("previous", "OK", Note.TOLERATED_SUSPECT),
        ("incoming", "MISSING", Note.NONE),
    ):
        both = streams.Both(ValidationRules(tolerance=Tolerance(LAG, anchor)))
        (*_, last) = both.feed(rows)
        assert last.verdict.name == verdict and note in last.note
