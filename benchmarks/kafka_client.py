"""How fast are records read from and written to a real broker, as Arrow, beside the client's own objects?

Back of the envelope, for a record of 100 bytes with a key and an integrity header: librdkafka takes 0.3 to 0.5 µs in
its own threads to fetch and check it, 0.2 to hand it over; copying it into columns is 0.1. A Python object with its
key, value, time and headers is 2 to 4 µs more. Writing is the same the other way.

The broker is the one of the interop tests (`make kafka` fetches it); without it nothing is measured. The peer is
confluent-kafka: `consume`, and what each message holds put into Arrow; `produce` of each row. Times are processor time
of this process, the library's threads included; the broker's own is not.

    python benchmarks/kafka_client.py [--rows 1000000] [--full] [--json]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import pyarrow as pa

from _report import Report, demand, load_line
from tidegate.log.format.records import HEADERS_TYPE
from tidegate.log.log import open_log

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "interop"))


def records(rows: int) -> pa.Table:
    numbers = np.arange(rows)
    keys = pa.array([f"customer-{number % 50_000}".encode() for number in numbers.tolist()])
    values = pa.array([b'{"order_id":%010d,"amount":1.5}'.ljust(100) % number for number in numbers.tolist()])
    names = pa.array(["div"] * rows)
    headers = pa.StructArray.from_arrays([names, keys], fields=list(HEADERS_TYPE.value_type))
    lists = pa.ListArray.from_arrays(
        pa.array(np.arange(rows + 1, dtype=np.int32)), headers, type=HEADERS_TYPE
    )
    return pa.table({"key": keys, "value": values, "timestamp": numbers + 10**12, "headers": lists})


def timed(run: Callable[[], int], rows: int) -> tuple[float, float]:
    """Records a second of processor time, and on the wall; the run says how many it saw."""
    began, cpu = perf_counter(), process_time()
    demand(run() == rows, "every record, once")
    return rows / (process_time() - cpu), rows / (perf_counter() - began)


def read_ours(servers: str, topic: str, sent: pa.Table) -> int:
    with open_log(f"kafka://{servers}") as log, log.reader(topic) as reader:
        found = list(reader)
    table = pa.Table.from_batches(found)
    for name in ("key", "value", "headers"):
        demand(table[name].combine_chunks().equals(sent[name].combine_chunks()), f"{name} as it was sent")
    return int(table.num_rows)


def read_theirs(servers: str, topic: str, rows: int) -> int:
    import confluent_kafka

    settings = {"bootstrap.servers": servers, "group.id": "peer", "enable.auto.commit": False, "log_level": 0}
    consumer = confluent_kafka.Consumer(settings)
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    seen, ends = 0, perf_counter() + 120
    while seen < rows and perf_counter() < ends:
        messages = consumer.consume(10_000, timeout=1.0)
        pa.table(
            {
                "key": pa.array([message.key() for message in messages], pa.binary()),
                "value": pa.array([message.value() for message in messages], pa.binary()),
                "time": pa.array([message.timestamp()[1] for message in messages], pa.int64()),
                "headers": pa.array([message.headers() for message in messages]),
            }
        )
        seen += len(messages)
    consumer.close()
    return seen


def write_ours(servers: str, topic: str, sent: pa.Table) -> int:
    with open_log(f"kafka://{servers}") as log, log.writer(topic) as writer:
        return sum(each.last_offset - each.first_offset + 1 for each in writer.write(sent))


def write_theirs(servers: str, topic: str, sent: pa.Table) -> int:
    import confluent_kafka

    stored: list[int] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "acks": "all", "linger.ms": 5})
    for row in sent.to_pylist():
        headers = [(pair["key"], pair["value"]) for pair in row["headers"]]
        while True:
            try:
                producer.produce(
                    topic,
                    row["value"],
                    row["key"],
                    timestamp=row["timestamp"],
                    headers=headers,
                    on_delivery=lambda _, message: stored.append(message.offset()),
                )
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush(60)
    return len(stored)


def measure(report: Report, broker: Any, rows: int) -> None:
    servers, sent = broker.address, records(rows)
    with open_log(f"kafka://{servers}") as log:
        for topic in ("ours", "theirs"):
            log.create_topic(topic, 1, {"retention.ms": "-1"})  # the times of these records are long past
    written = {
        "Arrow": timed(lambda: write_ours(servers, "ours", sent), rows),
        "client": timed(lambda: write_theirs(servers, "theirs", sent), rows),
    }
    read_theirs(servers, "theirs", rows)  # the broker's files are in memory now
    read = {
        "Arrow": timed(lambda: read_ours(servers, "ours", sent), rows),
        "client": timed(lambda: read_theirs(servers, "theirs", rows), rows),
    }
    for what, found in (("written", written), ("read", read)):
        (ours, our_wall), (theirs, their_wall) = found["Arrow"], found["client"]
        for who, rate, wall in (
            ("as Arrow", ours, our_wall),
            ("by the client's objects", theirs, their_wall),
        ):
            ratio = f"{ours / theirs:.1f}× the client's" if who == "as Arrow" else ""
            report.figure(
                f"{what} {who}",
                f"{rate / 1e3:.0f} k records/s",
                ratio,
                f"wall {wall / 1e3:.0f} k/s; {load_line()}",
            )


def main() -> None:
    report = Report(__doc__.splitlines()[0] if __doc__ else "", rows=1_000_000)
    from kafka_broker import Broker
    from kafka_home import find_kafka

    home = find_kafka()
    if home is None:
        report.figure("a real broker", "not run", "`make kafka` fetches it")
        return
    with tempfile.TemporaryDirectory() as folder, Broker(home, Path(folder)) as broker:
        measure(report, broker, report.numbers["rows"] * (4 if report.full else 1))


if __name__ == "__main__":
    main()
