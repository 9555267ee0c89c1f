"""Tables over a real broker: windows, sessions and plain keys, transactions, restarts of either side, aged-out offsets.

Records come from an ordinary client; what the tables must hold is reckoned record by record.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from kafka_broker import Broker

from table_records import Said, session_record, window_record, windows_in
from tidegate.errors import OffsetOutOfRangeError, TidegateWarning, UnavailableError
from tidegate.tables.factories import sessioned_table, table, windowed_table
from tidegate.tables.options import Consumed
from tidegate.tables.serdes.base import Long, String
from window_oracles import ms

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]

MINUTE = 60_000
PARTITIONS = 3
KEPT = {"retention.ms": "-1"}  # the events are years old: a broker would drop them within the second
T0 = 1_700_000_040_000


def produce(broker: Broker, topic: str, records: Iterable[Said], **client: Any) -> Producer:
    """Send records, each key to a partition of its own choice, and wait until the broker has them."""
    producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 5, "log_level": 0, **client})
    if "transactional.id" in client:
        producer.init_transactions(30)
        producer.begin_transaction()
    for record in records:
        where = (record.key or b"\0")[0] % PARTITIONS
        producer.produce(topic, record.value, record.key, where, timestamp=record.timestamp or 0)
    assert producer.flush(60) == 0
    return producer


def windows(seed: int, count: int) -> list[Said]:
    """Updates, deletions and windows that come late, over half an hour."""
    chance, said = random.Random(seed), []
    for n in range(count):
        start = T0 + (n * 30 // count - chance.choice((0, 0, 1, 2))) * MINUTE
        value = None if chance.random() < 0.1 else n.to_bytes(8, "big")
        said.append(window_record(b"%c-key" % chance.randrange(97, 105), start, value, start + n % 1000))
    return said


def held(records: Iterable[Said], cut: int) -> dict[bytes, tuple[int, int | None]]:
    """The last value of each raw key without its deletions; `cut` are the bytes of the key that are no key."""
    found: dict[bytes, tuple[int, int | None]] = {}
    for record in records:
        assert record.key is not None
        found.pop(record.key, None)
        if record.value is not None:
            found[record.key] = (int.from_bytes(record.value, "big"), record.timestamp)
    return found


def as_windows(records: Iterable[Said]) -> dict[Any, Any]:
    """What a table of minutes must answer."""
    answer = {}
    for key, row in held(records, 12).items():
        start = int.from_bytes(key[-12:-4], "big")
        answer[key[:-12].decode(), start, start + MINUTE] = row
    return answer


def opened(broker: Broker, topic: str, state: Path, **settings: Any) -> Any:
    settings.setdefault("consumed", Consumed(String(), Long()))
    return windowed_table(f"kafka://{broker.address}", topic, ms(MINUTE), state=state, **settings)


def test_a_windowed_table_over_a_broker_and_restarts_of_both(broker: Broker, tmp_path: Path) -> None:
    topic = "live-windows-changelog"
    broker.create(topic, KEPT, partitions=PARTITIONS)
    said = windows(1, 3000)
    produce(broker, topic, said[:2000])
    with opened(broker, topic, tmp_path / "state") as found:
        assert windows_in(found) == as_windows(said[:2000])
        assert sum(found.position.values()) == 2000
        assert found.lag == 0
        broker.stop()
        broker.start()
    produce(broker, topic, said[2000:])
    with opened(broker, topic, tmp_path / "state", bootstrap=False) as found:
        assert sum(found.position.values()) == 2000, "a restart reads nothing twice"
        found.catch_up()
        assert windows_in(found) == as_windows(said)
        counts = found.counts
        assert counts.applied + counts.deleted == 3000
        key, start, _ = next(iter(as_windows(said)))
        told = found.explain(key, start)
        assert told.current is not None
        assert told.contributions[-1].outcome == "current"
        assert sum(reach.records for reach in told.reach) < 3000, "not the whole topic was read"


def test_a_table_follows_a_broker_through_its_crash(broker: Broker, tmp_path: Path) -> None:
    topic = "live-followed-changelog"
    broker.create(topic, KEPT, partitions=PARTITIONS)
    said = windows(2, 600)
    produce(broker, topic, said[:300])
    with opened(broker, topic, tmp_path / "state", follow=True) as found:
        found.catch_up()
        assert windows_in(found) == as_windows(said[:300])
    broker.kill()
    with pytest.raises(UnavailableError):
        opened(broker, topic, tmp_path / "state")
    broker.start()
    produce(broker, topic, said[300:])
    with opened(broker, topic, tmp_path / "state", follow=True) as found:
        found.catch_up()
        assert windows_in(found) == as_windows(said)


def test_a_sessioned_table_over_a_broker(broker: Broker, tmp_path: Path) -> None:
    """Sessions grow and merge, as Kafka Streams writes them: the old ones deleted, then the new one."""
    topic = "live-sessions-changelog"
    broker.create(topic, KEPT, partitions=PARTITIONS)
    chance, said = random.Random(3), []
    living: dict[bytes, list[tuple[int, int]]] = {}
    for n in range(800):
        key, at = b"%c" % chance.randrange(97, 109), T0 + n * 500 + chance.randrange(5000)
        near = [each for each in living.get(key, []) if each[1] >= at - 2000 and each[0] <= at + 2000]
        start, end = min([at, *(each[0] for each in near)]), max([at, *(each[1] for each in near)])
        said += [session_record(key, *each, None, at) for each in near if each != (start, end)]
        said.append(session_record(key, start, end, n.to_bytes(8, "big"), at))
        living[key] = [each for each in living.get(key, []) if each not in near] + [(start, end)]
    assert sum(record.value is None for record in said) > 50
    expected = {}
    for raw, row in held(said, 16).items():
        end, start = int.from_bytes(raw[-16:-8], "big"), int.from_bytes(raw[-8:], "big")
        expected[raw[:-16].decode(), start, end] = row

    def look(state: Path, **settings: Any) -> Any:
        url = f"kafka://{broker.address}"
        return sessioned_table(url, topic, state=state, consumed=Consumed(String(), Long()), **settings)

    half = len(said) // 2
    produce(broker, topic, said[:half])
    with look(tmp_path / "state") as found:
        assert sum(found.position.values()) == half
    produce(broker, topic, said[half:])
    with look(tmp_path / "state", bootstrap=False) as found:
        assert sum(found.position.values()) == half
        found.catch_up()
        assert windows_in(found) == expected
        key, start, end = next(iter(expected))
        assert found.get(key, start, end) == expected[key, start, end][0]


def test_a_table_of_plain_keys_over_a_broker(broker: Broker, tmp_path: Path) -> None:
    topic = "table-of-keys"
    broker.create(topic, {"cleanup.policy": "compact"}, partitions=PARTITIONS)
    chance = random.Random(4)
    said = [
        Said(
            b"%c%d" % (chance.randrange(97, 109), chance.randrange(9)),
            None if n % 9 == 8 else n.to_bytes(8, "big"),
            T0 + n,
        )
        for n in range(1500)
    ]

    def look(**settings: Any) -> Any:
        url, serdes = f"kafka://{broker.address}", Consumed(String(), Long())
        return table(url, topic, state=tmp_path / "state", consumed=serdes, **settings)

    def rows(found: Any) -> dict[str, tuple[int, int]]:
        return {row.key: (row.value, row.timestamp) for row in found.all()}

    def expected(some: list[Said]) -> dict[str, Any]:
        return {key.decode(): row for key, row in held(some, 0).items()}

    produce(broker, topic, said[:1000])
    with look() as found:
        assert rows(found) == expected(said[:1000])
    produce(broker, topic, said[1000:])
    with look(bootstrap=False) as found:
        assert rows(found) == expected(said[:1000])
        found.catch_up()
        assert rows(found) == expected(said)
        key = next(iter(expected(said)))
        told = found.explain(key)
        assert (told.value, told.contributions[-1].outcome) == (expected(said)[key][0], "current")


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_transactions_of_a_broker(broker: Broker, tmp_path: Path, isolation: Any) -> None:
    """Aborted records are in no table of committed ones; markers move the position all the same."""
    topic = f"live-transactions-{isolation}"
    broker.create(topic, KEPT, partitions=PARTITIONS)
    kept = [window_record(b"%c" % key, T0, bytes(8), T0) for key in range(97, 103)]
    lost = [window_record(b"%c-aborted" % key, T0, bytes(8), T0) for key in range(97, 103)]
    produce(broker, topic, kept, **{"transactional.id": f"{topic}-1"}).commit_transaction(30)
    produce(broker, topic, lost, **{"transactional.id": f"{topic}-2"}).abort_transaction(30)
    serdes = Consumed(String(), Long(), isolation=isolation)
    seen = [*kept, *lost] if isolation == "read_uncommitted" else kept
    with opened(broker, topic, tmp_path / "state", consumed=serdes) as found:
        assert windows_in(found) == as_windows(seen)
        assert found.lag == 0
    with opened(broker, topic, tmp_path / "state", consumed=serdes, bootstrap=False) as found:
        assert found.lag == 0, "markers are no records, and nothing is left to read"


def test_offsets_that_a_broker_deleted_are_told(broker: Broker, tmp_path: Path) -> None:
    topic = "live-aged-changelog"
    broker.create(topic, KEPT, partitions=PARTITIONS)
    said = [window_record(b"a%d" % n, T0, n.to_bytes(8, "big"), T0) for n in range(50)]
    produce(broker, topic, said)
    with opened(broker, topic, tmp_path / "state") as found:
        admin, where = broker.admin(), ord("a") % PARTITIONS
        for done in admin.delete_records([TopicPartition(topic, where, 20)]).values():
            done.result(30)
        told = found.explain("a7", T0)
        assert (told.value, told.aged_out, told.contributions) == (7, True, ())
        assert "aged out" in str(told)
        assert not found.explain("a7", T0 + 24 * 60 * MINUTE).aged_out
        told = found.explain("a30", T0)
        assert [each.outcome for each in told.contributions] == ["current"]


@pytest.mark.parametrize("kept_from", [15, 20], ids=["some are left", "none is left"])
def test_offsets_that_go_before_they_are_read_are_counted(
    broker: Broker, tmp_path: Path, kept_from: int
) -> None:
    topic = f"live-gap-{kept_from}-changelog"
    broker.create(topic, KEPT)
    said = [window_record(b"c%d" % n, T0, n.to_bytes(8, "big"), T0) for n in range(20)]
    produce(broker, topic, said[:10])
    opened(broker, topic, tmp_path / "state").close()
    produce(broker, topic, said[10:])
    admin = broker.admin()
    for done in admin.delete_records([TopicPartition(topic, 0, kept_from)]).values():
        done.result(30)
    strict = Consumed(String(), Long(), on_gap="fail")
    with pytest.raises(OffsetOutOfRangeError, match="offsets 10 to"):
        opened(broker, topic, tmp_path / "state", consumed=strict)
    with pytest.warns(TidegateWarning, match=f"{kept_from - 10} offsets"):
        found = opened(broker, topic, tmp_path / "state")
    with found:
        assert found.position == {0: 20}
        assert found.counts.skipped_offsets == kept_from - 10
        assert windows_in(found) == as_windows([*said[:10], *said[kept_from:]])


def test_two_processes_views_of_one_table_over_a_broker(broker: Broker, tmp_path: Path) -> None:
    topic = "live-shared-changelog"
    broker.create(topic, KEPT, partitions=PARTITIONS)
    said = windows(5, 400)
    produce(broker, topic, said[:200])
    look: Callable[..., Any] = lambda **settings: opened(broker, topic, tmp_path / "state", **settings)  # noqa: E731
    with look(follow=True) as builder, look(follow=True) as reader:
        assert (builder.role, reader.role) == ("builder", "reader")
        produce(broker, topic, said[200:])
        builder.catch_up()
        builder.commit()
        reader.catch_up()
        assert windows_in(reader) == as_windows(said)
        builder.close()
        produce(broker, topic, [window_record(b"last", T0, bytes(8), T0)])
        reader.catch_up()
        assert reader.role == "builder"
        assert reader.get("last", T0) == 0
