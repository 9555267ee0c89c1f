"""A copy of a topic with one damage: it is what it says it is, and a validator sees it where it was put.

Loss at a producer's end, and of a whole producer, is by nature invisible in a live topic; there the tests
check that nothing is promised and nothing is reported, and see it in a push, by its manifest.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.cli.main import run
from tidegate.cli.verify import DAMAGE_KINDS as KINDS
from tidegate.clock import ManualClock
from tidegate.errors import ConflictError, InvalidError
from tidegate.integrity import (
    ChainLimits,
    Manifest,
    OnError,
    PartitionValidator,
    Push,
    ValidationRules,
    Verdict,
    read_columns,
)
from tidegate.integrity.fault_injection import Damage, DamageKind, break_topic
from tidegate.integrity.header import ControlType
from tidegate.log.log import Log

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "see-what-went-missing.md"
AUDIT = ValidationRules(during_push=OnError.KEEP, otherwise=OnError.KEEP)
SEEDS = range(6)
Sight = tuple[int, str]

# What each kind is reported as, in order of offset, in a topic with a push that has ended.
REPORTED = {
    DamageKind.DROP: ["MISSING"],
    DamageKind.REPEAT: ["DUPLICATE"],
    DamageKind.FLIP: ["CORRUPT"],
    DamageKind.SWAP: ["CORRUPT", "CORRUPT"],
    DamageKind.REORDER: ["MISSING", "DUPLICATE"],
    DamageKind.TRUNCATE_TAIL: ["MISSING"],
    DamageKind.FORGET_PRODUCER: ["MISSING"],
    DamageKind.FUTURE_CLOCK: ["CORRUPT"],
}
BY_MANIFEST = {DamageKind.TRUNCATE_TAIL, DamageKind.FORGET_PRODUCER}


def rows(sender: int, first: int, stop: int) -> pa.Table:
    numbers = range(first, stop)
    return pa.table(
        {"key": [f"s{sender}k{n}" for n in numbers], "value": [f"value {sender}/{n}" for n in numbers]}
    )


def write_topics(log: Log, clock: ManualClock) -> None:
    """`live` and `pushed`: two partitions each, three senders taking turns, chains of at most four records."""
    settings = {"limits": ChainLimits(max_records=4)}
    for topic in ("live", "pushed"):
        log.create_topic(topic, 2)
        driver = log.writer(topic, integrity=True)
        push = Push(driver)
        if topic == "pushed":
            push.start()
        senders = [log.writer(topic, integrity=settings) for _ in range(3)]
        for turn in range(4):
            for number, sender in enumerate(senders):
                for partition in range(2):
                    sender.write(rows(number, turn * 3, turn * 3 + 3), partition=partition)
                clock.advance("1s")
        for sender in senders:
            sender.close()
        if topic == "pushed":
            push.end({p: Manifest.of(sender.sent()[p] for sender in senders) for p in range(2)})
        driver.close()


@pytest.fixture
def log(tidegate_log: Log, manual_clock: ManualClock) -> Log:
    write_topics(tidegate_log, manual_clock)
    return tidegate_log


def sights(log: Log, topic: str, partition: int) -> list[Sight]:
    """All that is not OK, as an audit sees it: nothing stops."""
    validator = PartitionValidator(topic, partition, rules=AUDIT)
    found: list[Sight] = []
    for batch in log.reader(topic, [partition], control_records=True):
        judged = validator.validate(batch, log.clock.now_ms())
        verdicts = zip(batch.column("offset").to_pylist(), judged.verdicts.tolist(), strict=True)
        found += [(offset, Verdict(verdict).name) for offset, verdict in verdicts if verdict != Verdict.OK]
    return found


def records(log: Log, topic: str, partition: int) -> list[dict[str, Any]]:
    table = log.reader(topic, [partition], control_records=True).read_all()
    found: list[dict[str, Any]] = table.select(["key", "value", "timestamp", "headers"]).to_pylist()
    return found


def digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def expected_records(done: Damage, original: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The copy of a partition that has no offset gaps, made the plain way."""
    copy = [dict(record) for record in original]
    first, *others = done.before
    if done.kind in {DamageKind.DROP, *BY_MANIFEST}:
        return [record for offset, record in enumerate(copy) if offset not in done.before]
    if done.kind is DamageKind.REPEAT:
        copy.insert(first, copy[first])
    elif done.kind is DamageKind.FLIP:
        value = bytearray(copy[first]["value"])
        value[len(value) // 2] ^= 1
        copy[first]["value"] = bytes(value)
    elif done.kind is DamageKind.SWAP:
        one, other = copy[first], copy[others[0]]
        for name in ("key", "value"):
            one[name], other[name] = other[name], one[name]
    elif done.kind is DamageKind.REORDER:
        copy[first], copy[others[0]] = copy[others[0]], copy[first]
    else:
        header = bytearray(copy[first]["headers"][0]["value"])
        header[28:36] = (int.from_bytes(header[28:36], "big") + 86_400_000).to_bytes(8, "big")
        copy[first]["headers"] = [{"key": "div", "value": bytes(header)}, *copy[first]["headers"][1:]]
    return copy


@pytest.mark.parametrize("topic", ["live", "pushed"])
@pytest.mark.parametrize("kind", DamageKind)
def test_every_damage_is_seen_where_it_was_put_and_nothing_else_is(
    kind: DamageKind, topic: str, log: Log, tmp_path: Path
) -> None:
    before = digest(log.path)
    places = set()
    for seed in SEEDS:
        done = break_topic(log, topic, kind, into=tmp_path / f"copy-{seed}", seed=seed)
        places.add((done.partition, done.before))
        told = [verdict for _, verdict in done.seen]
        assert told == ([] if topic == "live" and kind in BY_MANIFEST else REPORTED[kind])
        with Log(done.into, read_only=True, clock=log.clock) as copy:
            original = records(log, topic, done.partition)
            assert records(copy, topic, done.partition) == expected_records(done, original)
            assert sights(copy, topic, done.partition) == list(done.seen)
            untouched = 1 - done.partition
            assert records(copy, topic, untouched) == records(log, topic, untouched)
            assert sights(copy, topic, untouched) == []
    assert len(places) > 1  # another seed, another place
    assert digest(log.path) == before


@pytest.mark.parametrize("kind", DamageKind)
def test_the_same_seed_strikes_the_same_place(kind: DamageKind, log: Log, tmp_path: Path) -> None:
    one, other = (
        break_topic(log, "pushed", kind, into=tmp_path / name, seed=7).to_dict() for name in ("one", "other")
    )
    assert one | {"into": ""} == other | {"into": ""}


@pytest.mark.parametrize(
    ("kind", "verdicts"),
    [
        pytest.param(DamageKind.DROP, ["MISSING"], id="two in a row are one gap"),
        pytest.param(DamageKind.REPEAT, ["DUPLICATE", "DUPLICATE"], id="each repeat is told"),
        pytest.param(DamageKind.TRUNCATE_TAIL, ["MISSING"], id="the last two"),
        pytest.param(DamageKind.FORGET_PRODUCER, ["UNREGISTERED_PRODUCER"], id="the start of a producer"),
    ],
)
def test_a_count_makes_the_damage_larger(
    kind: DamageKind, verdicts: list[str], log: Log, tmp_path: Path
) -> None:
    for seed in SEEDS:
        done = break_topic(log, "pushed", kind, into=tmp_path / f"{seed}", seed=seed, count=2)
        assert len(done.after if kind is DamageKind.REPEAT else done.before) == 2 + (
            kind is DamageKind.REPEAT
        )
        assert [verdict for _, verdict in done.seen] == verdicts
        with Log(done.into, read_only=True, clock=log.clock) as copy:
            assert sights(copy, "pushed", done.partition) == list(done.seen)


def test_a_chosen_offset_is_the_one_that_is_damaged(log: Log, tmp_path: Path) -> None:
    done = break_topic(log, "live", DamageKind.FLIP, into=tmp_path / "copy", partition=1, offset=2)
    assert (done.partition, done.before, done.after, done.seen) == (1, (2,), (2,), ((2, "CORRUPT"),))
    assert "flip: live-1 offset 2 of producer" in str(done) and "CORRUPT at 2" in str(done)


def test_a_copy_begins_where_the_original_does(log: Log, tmp_path: Path) -> None:
    log.partition("live", 0).delete_records_before(5)
    done = break_topic(log, "live", DamageKind.FLIP, into=tmp_path / "copy", partition=0, seed=3)
    assert done.before == done.after and done.before[0] >= 5
    with Log(done.into, read_only=True, clock=log.clock) as copy:
        assert copy.view("live", 0).bounds().log_start == 5
        assert (done.after[0], "CORRUPT") in sights(copy, "live", 0)


def test_tombstones_and_small_segments_and_large_records_are_copied_too(
    tidegate_log: Log, tmp_path: Path
) -> None:
    log = tidegate_log
    own = {"segment.bytes": 2000, "max.message.bytes": 1500, "cleanup.policy": "compact"}
    log.create_topic("odd", 1, own)
    values = [None, b"x" * 5000, b"", b"z"]
    for _ in range(5):
        with log.writer("odd", integrity=True, compression="zstd") as sender:
            sender.write(pa.table({"key": [b"a", b"b", b"c", b"d"], "value": pa.array(values, pa.binary())}))
    for offset in range(1, 5):
        done = break_topic(log, "odd", DamageKind.FLIP, into=tmp_path / f"{offset}", offset=offset)
        with Log(done.into, read_only=True, clock=log.clock) as copy:
            assert copy.describe("odd").config.compacts
            assert len(records(copy, "odd", 0)) == 5 * (4 + 2)
            assert sights(copy, "odd", 0) == [(offset, "CORRUPT")] == list(done.seen)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": DamageKind.FLIP, "offset": 1}, "of which partition"),
        ({"kind": DamageKind.FLIP, "partition": 9}, "no partition 9"),
        ({"kind": DamageKind.FLIP, "partition": 0, "offset": 0}, "control record"),
        ({"kind": DamageKind.FLIP, "partition": 0, "offset": 10_000}, "no record at offset 10000"),
        ({"kind": DamageKind.FLIP, "count": 2}, "takes no count"),
        ({"kind": DamageKind.DROP, "count": 0}, "choose 1 or more"),
        ({"kind": DamageKind.DROP, "count": 50}, "no place for drop"),
        ({"kind": DamageKind.TRUNCATE_TAIL, "partition": 0, "offset": 1, "count": 1}, "keep one"),
        ({"kind": DamageKind.TRUNCATE_TAIL, "partition": 0, "offset": 0}, "forget-producer"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(
    settings: dict[str, Any], says: str, log: Log, tmp_path: Path
) -> None:
    with pytest.raises(InvalidError, match=says):
        break_topic(log, "live", into=tmp_path / "copy", **settings)
    assert not (tmp_path / "copy").exists()


def test_a_topic_without_metadata_has_nothing_to_break(tidegate_log: Log, tmp_path: Path) -> None:
    tidegate_log.create_topic("plain")
    with pytest.raises(InvalidError, match="integrity=True"):
        break_topic(tidegate_log, "plain", DamageKind.DROP, into=tmp_path / "copy")
    tidegate_log.writer("plain").write(pa.table({"value": ["a", "b"]}))
    with pytest.raises(InvalidError, match="integrity=True"):
        break_topic(tidegate_log, "plain", DamageKind.DROP, into=tmp_path / "copy", offset=1)


def test_an_existing_target_and_one_inside_the_log_are_refused(log: Log, tmp_path: Path) -> None:
    before = digest(log.path)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConflictError, match="exists already"):
        break_topic(log, "live", DamageKind.DROP, into=tmp_path / "there")
    with pytest.raises(InvalidError, match="inside the log"):
        break_topic(log, "live", DamageKind.DROP, into=log.path / "copy")
    assert digest(log.path) == before and list((tmp_path / "there").iterdir()) == []


# -- the command and the guide --------------------------------------------------------------------


def test_the_command_says_what_it_did(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.close()
    before = digest(log.path)
    where = ["--log", str(log.path), "--kind", "drop", "-p", "0", "--offset", "1"]
    assert run(["break", "live", *where, "--format", "json"]) == 0
    done = json.loads(capsys.readouterr().out)
    copy = log.path.with_name("log-broken")
    assert done == {
        "kind": "drop", "topic": "live", "partition": 0, "producer": done["producer"], "before": [1],
        "after": [], "seen": [{"offset": 1, "verdict": "MISSING"}], "tolerated": [], "into": str(copy),
    }  # fmt: skip
    assert len(done["producer"]) == 32 and copy.is_dir()
    assert run(["break", "live", *where]) == 4  # the copy exists
    assert "exists already" in capsys.readouterr().err
    assert run(["break", "live", *where, "--into", f"{copy}-2"]) == 0
    line = capsys.readouterr().out
    assert line.count("\n") == 1 and line.startswith("drop: live-0 offset 1 of producer ")
    assert digest(log.path) == before


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_what_break_says_verify_finds(
    kind: str | None, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.close()
    where, expected = log.path, []
    if kind is not None:
        where = tmp_path / "copy"
        arguments = ["--kind", kind, "--seed", "5", "--into", str(where), "--format", "json"]
        assert run(["break", "pushed", "--log", str(log.path), *arguments]) == 0
        expected = json.loads(capsys.readouterr().out)["seen"]
        assert expected != []
    faults = [one for one in expected if one["verdict"] != "DUPLICATE"]  # repeats are told, and are no fault
    assert run(["verify", "pushed", "--log", str(where), "--format", "jsonl"]) == bool(faults)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(one["offset"], one["kind"].upper()) for one in told if one["type"] == "finding"]
    assert found == [(one["offset"], one["verdict"]) for one in expected]


def test_the_command_offers_every_kind() -> None:
    assert list(KINDS) == [kind.value for kind in DamageKind]


def place(done: Damage, copy: Log, offset: int) -> str:
    """In words, which record of the copy it is."""
    (batch,) = copy.reader(done.topic, [done.partition], start=offset, stop=offset + 1, control_records=True)
    control = read_columns(batch.column("headers")).control[0]
    if control == ControlType.END_OF_PUSH:
        return "the end of the push, whose manifest lists it"
    if control == ControlType.END_OF_CHAIN and done.kind is DamageKind.FUTURE_CLOCK:
        return "the end of its chain"
    if done.kind is DamageKind.SWAP:
        return "each of the two"
    if done.kind in (DamageKind.REPEAT, DamageKind.REORDER):
        return ("the first of the two", "the second of the two")[sorted(done.after).index(offset)]
    if offset in done.after:
        return "the record itself"
    return "the producer's next record"


def test_the_guide_lists_what_each_kind_is_reported_as(log: Log, tmp_path: Path) -> None:
    lines = ["| kind | reported as |", "|---|---|"]
    for kind in DamageKind:
        done = break_topic(log, "pushed", kind, into=tmp_path / kind.value, seed=1)
        with Log(done.into, read_only=True, clock=log.clock) as copy:
            found = sights(copy, "pushed", done.partition)
            told = [f"`{verdict}` at {place(done, copy, offset)}" for offset, verdict in found]
        lines.append(f"| `{kind.value}` | {', '.join(dict.fromkeys(told))} |")
    table = "\n".join(lines)
    assert table in GUIDE.read_text(encoding="utf-8"), f"the guide must say:\n{table}"
