"""Topics worth having on disk, and how each is filled: what the recorded folders and the live tests hold.

Filling is deterministic but for what the broker adds (topic ids, marker times, log append times). Record
times are chosen, so retention by time is switched off, and rolling by time too where the broker's clock
mixes in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from confluent_kafka import Producer
from kafka_broker import Broker
from kafka_wire import RefusedError, Wire
from raw_batches import Row, batch

T0 = 1_700_000_000_000
FOREVER = str(2**63 - 1)
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


@dataclass(frozen=True, slots=True)
class Workload:
    """A topic's configuration and what fills it.

    `replayable`: sending the stored batches again to an equal, empty log gives equal files at any time.
    """

    fill: Callable[[Broker, Wire, str], None]
    config: Mapping[str, str] = field(default_factory=dict)
    replayable: bool = True

    @property
    def settings(self) -> dict[str, str]:
        return {"retention.ms": "-1", **self.config}


# -- the seed's canary -----------------------------------------------------------------------------


def canary_row(index: int) -> Row:
    """The canary's record number `index`; the published ones are 0, 1, 2, 107 and 108."""
    published = {0: 1639132508991, 1: 1639132514555, 2: 1639132519561, 107: 1639133044553, 108: 1639133049552}
    time = published.get(index, 1639132509555 + 5000 * index)
    value = f'{{"producerId":"strimzi-canary-client","messageId":{1 + 3 * index},"timestamp":{time}}}'
    return Row(time, None, value.encode())


def fill_canary(_: Broker, wire: Wire, topic: str) -> None:
    for index in range(120):
        wire.produce(topic, batch([canary_row(index)], base_sequence=0))


# -- plain records ---------------------------------------------------------------------------------


def fill_mixed(_: Broker, wire: Wire, topic: str) -> None:
    """Batches of many sizes, timestamps that go back and stand still."""
    chance = random.Random(7)
    clock = T0
    for index in range(120):
        clock += chance.choice((0, 0, 1, 250, -400, 1000))
        rows = [
            Row(
                clock + chance.randrange(-50, 50),
                b"k%d" % chance.randrange(30),
                chance.randbytes(chance.randrange(60)),
            )
            for _ in range(chance.choice((1, 1, 2, 3, 8)))
        ]
        wire.produce(topic, batch(rows, gzip=index % 11 == 10))


def fill_shapes(_: Broker, wire: Wire, topic: str) -> None:
    """Null and empty keys, values and headers; text that is not ASCII and bytes that are not text."""
    long = b"x" * 300
    shapes = [
        Row(T0, None, None),
        Row(T0 + 1, b"", b""),
        Row(T0 + 2, None, b"value without key"),
        Row(T0 + 3, b"key without value", None),
        Row(T0 + 4, b"key", b"value", (("a", b"1"), ("b", None), ("a", b""))),
        Row(
            T0 + 5,
            "schlüssel".encode(),
            "значение 値 🌊".encode(),
            (("überschrift", "ж".encode()), ("", b"empty")),
        ),
        Row(T0 + 6, b"\xff\xfe\x00", b"\x80\x81 not text \xc3\x28"),
        Row(T0 + 7, long, long * 3, tuple((f"h{number}", long[:number]) for number in range(70))),
        Row(-1, b"no time", b"at all"),
        Row(0, b"epoch", b"zero"),
        Row(2**41, b"far", b"future"),
        Row(T0 + 8, b"two\nlines", b"tab\there\r\nand more"),
    ]
    for row in shapes:
        wire.produce(topic, batch([row]))
    wire.produce(topic, batch([shapes[index] for index in (4, 0, 5, 3, 6, 1)]))
    wire.produce(topic, batch([shapes[index] for index in (7, 10, 9, 2)], gzip=True))


def fill_codecs(broker: Broker, _: Wire, topic: str) -> None:
    """Batches compressed by librdkafka, every codec, small ones and large ones."""
    for number, codec in enumerate(CODECS):
        with_producer = Producer(
            {"bootstrap.servers": broker.address, "compression.type": codec, "linger.ms": 2000, "acks": "all"}
        )
        for size in (1, 3, 40):
            for index in range(size):
                with_producer.produce(
                    topic,
                    key=f"{codec}-{index % 5}" if index % 7 else None,
                    value=f"{codec} {size} {index} ".encode() * (1 + index % 9),
                    headers={"codec": codec, "none": None} if index % 4 == 0 else None,
                    timestamp=T0 + number * 100_000 + size * 1000 + index,
                )
            with_producer.flush(30)


def fill_recoded(_: Broker, wire: Wire, topic: str) -> None:
    """Plain batches the broker has to compress itself, as the topic demands."""
    for size in (1, 2, 30):
        rows = [
            Row(T0 + index, b"key %d" % index, b"value %d " % index * 12, (("h", b"v"),))
            for index in range(size)
        ]
        wire.produce(topic, batch(rows))


def fill_slow(_: Broker, wire: Wire, topic: str) -> None:
    """One record a minute, so that a log segment is full by time."""
    for index in range(40):
        wire.produce(topic, batch([Row(T0 + 60_000 * index, b"k", b"minute %d" % index)]))


# -- producers -------------------------------------------------------------------------------------


def fill_idempotent(_: Broker, wire: Wire, topic: str) -> None:
    """Three producers with ids: a new epoch, the wrap of the sequence, refused and repeated batches."""
    sequences = {1001: 0, 1002: 0, 1003: 2**31 - 7}
    epochs = {1001: 0, 1002: 3, 1003: 0}
    for index in range(45):
        producer = (1001, 1002, 1003)[index % 3]
        if index == 20:
            epochs[1002], sequences[1002] = 4, 0
        size = 1 + index % 4
        rows = [
            Row(T0 + 1000 * index + delta, b"p%d" % producer, b"%d.%d" % (index, delta))
            for delta in range(size)
        ]
        sent = batch(
            rows, producer_id=producer, producer_epoch=epochs[producer], base_sequence=sequences[producer]
        )
        offset = wire.produce(topic, sent)
        sequences[producer] = (sequences[producer] + size) % 2**31
        if index % 5 == 0 and wire.produce(topic, sent) != offset:
            raise AssertionError("a repeated batch must get its first offset")
    for sequence in (17, 3_000):
        try:
            wire.produce(
                topic,
                batch([Row(T0, b"k", b"gap")], producer_id=1001, producer_epoch=0, base_sequence=sequence),
            )
        except RefusedError:
            continue
        raise AssertionError("a gap in the sequence must be refused")


def fill_transactions(_: Broker, wire: Wire, topic: str) -> None:
    """Interleaved transactions, some committed and some aborted, one left open, plain records between."""
    chance = random.Random(11)
    open_since: dict[int, int] = {}
    epochs = dict.fromkeys(range(2001, 2006), 0)
    sequences = dict.fromkeys(epochs, 0)
    for index in range(140):
        producer = chance.choice(list(epochs))
        if producer in open_since and chance.random() < 0.4:
            commit = chance.random() < 0.5
            wire.write_marker(
                topic,
                producer_id=producer,
                producer_epoch=epochs[producer],
                commit=commit,
                coordinator_epoch=index // 60,
            )
            del open_since[producer]
            if chance.random() < 0.3:
                epochs[producer] += 1
                sequences[producer] = 0
            continue
        rows = [
            Row(T0 + 100 * index + delta, b"t%d" % producer, b"%d" % index * 6)
            for delta in range(1 + index % 3)
        ]
        sent = batch(
            rows,
            producer_id=producer,
            producer_epoch=epochs[producer],
            base_sequence=sequences[producer],
            transactional=True,
        )
        wire.produce(topic, sent, transactional_id=f"id-{producer}")
        sequences[producer] += len(rows)
        open_since.setdefault(producer, index)
        if index % 9 == 0:
            wire.produce(topic, batch([Row(T0 + 100 * index, b"plain", b"between")]))
    # An abort of somebody who wrote nothing leaves a marker without an entry in the transaction index.
    wire.write_marker(topic, producer_id=2999, producer_epoch=5, commit=False, coordinator_epoch=9)


def fill_real_transactions(broker: Broker, _: Wire, topic: str) -> None:
    """An ordinary transactional client: begin, write, commit or abort, begin again; codecs as it likes."""
    for codec in ("none", "zstd", "lz4"):
        producer = Producer(
            {
                "bootstrap.servers": broker.address,
                "transactional.id": f"client-{codec}",
                "compression.type": codec,
                "linger.ms": 2000,
            }
        )
        producer.init_transactions(30)
        for attempt in range(4):
            producer.begin_transaction()
            for index in range(6):
                producer.produce(topic, key=f"{codec}{index}", value=f"{attempt} " * 8, timestamp=T0 + index)
            producer.flush(30)
            (producer.abort_transaction if attempt % 2 else producer.commit_transaction)(30)


# -- the list --------------------------------------------------------------------------------------

SMALL = {"segment.bytes": "4096", "segment.index.bytes": "1024", "index.interval.bytes": "512"}

WORKLOADS: dict[str, Workload] = {
    "canary": Workload(fill_canary, {"segment.bytes": "16384"}),
    "canary-tight": Workload(
        fill_canary, {"segment.bytes": "16384", "index.interval.bytes": "150", "segment.index.bytes": "300"}
    ),
    "mixed": Workload(fill_mixed, SMALL),
    "every-batch": Workload(fill_mixed, {**SMALL, "index.interval.bytes": "0", "segment.bytes": "8192"}),
    "index-full": Workload(fill_mixed, {**SMALL, "index.interval.bytes": "64", "segment.index.bytes": "96"}),
    "shapes": Workload(fill_shapes, {"segment.ms": FOREVER}),
    "codecs": Workload(fill_codecs, {"segment.bytes": "8192", "index.interval.bytes": "256"}),
    "recoded-gzip": Workload(fill_recoded, {"compression.type": "gzip"}, replayable=False),
    "recoded-snappy": Workload(fill_recoded, {"compression.type": "snappy"}, replayable=False),
    "recoded-lz4": Workload(fill_recoded, {"compression.type": "lz4"}, replayable=False),
    "recoded-zstd": Workload(fill_recoded, {"compression.type": "zstd"}, replayable=False),
    "slow": Workload(fill_slow, {"segment.ms": "600000", "index.interval.bytes": "100"}),
    "append-time": Workload(
        fill_mixed, {**SMALL, "message.timestamp.type": "LogAppendTime"}, replayable=False
    ),
    "idempotent": Workload(fill_idempotent, {"segment.bytes": "1500", "index.interval.bytes": "200"}),
    "transactions": Workload(
        fill_transactions, {**SMALL, "segment.ms": FOREVER, "index.interval.bytes": "200"}
    ),
    "real-transactions": Workload(
        fill_real_transactions, {**SMALL, "segment.ms": FOREVER, "index.interval.bytes": "200"}
    ),
    "empty": Workload(lambda broker, wire, topic: None),
}
