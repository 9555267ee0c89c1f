"""Meets a real broker and writes down what it did: `python tests/interop/record_fixtures.py [PART …]`.

Parts: `folders` (partition folders after one uninterrupted run and a clean shutdown, and what Kafka's dump
tool prints for them), `restarts` (the same after restarts and a crash, with the broker's own topics), `pairs`
(folders as a crash left them, and as the broker's own recovery left those), `cleaning` (folders before and
after compaction or retention). Needs the fetched jars; none of the product's code takes part.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from cleaning_cases import CLEANINGS, Stage
from confluent_kafka import Consumer, TopicPartition
from damages import DAMAGES, Damage
from java_dump import Dump, dumpable, java_dump
from kafka_broker import Broker, read_lines, set_lines
from kafka_home import FIXTURES, KafkaHome, find_kafka, until
from kafka_wire import Wire
from raw_batches import Row, batch
from workloads import SMALL, T0, WORKLOADS, fill_mixed, fill_real_transactions

RECOVERY_POINTS = "recovery-point-offset-checkpoint"
LOG_STARTS = "log-start-offset-checkpoint"
CHECKPOINTS = (
    RECOVERY_POINTS,
    LOG_STARTS,
    "replication-offset-checkpoint",
    "cleaner-offset-checkpoint",
    ".kafka_cleanshutdown",
)
MARKER = ".kafka_cleanshutdown"
# What the dump tool is asked, by the name its answer is kept under.
GENERAL: dict[str, tuple[str, ...]] = {
    "plain": (),
    "data": ("--print-data-log",),
    "deep": ("--deep-iteration",),
    "bare": ("--print-data-log", "--skip-record-metadata"),
    "sanity": ("--index-sanity-check",),
    "verify": ("--verify-index-only",),
    "bytes": ("--print-data-log", "--max-bytes", "1000"),
}

# What it is asked about the broker's own topics.
OWN = {"offsets": ("--offsets-decoder",), "transactions": ("--transaction-log-decoder",)}


# -- folders ---------------------------------------------------------------------------------------


def record_folders(kafka: KafkaHome, work: Path, out: Path) -> dict[str, object]:
    broker = Broker(kafka, work / "folders").start()
    broker.create_all({name: load.settings for name, load in WORKLOADS.items()})
    with Wire(broker.address) as wire:
        for name, load in WORKLOADS.items():
            load.fill(broker, wire, name)
    broker.stop()

    keep_folders(kafka, broker, out, "folders", dict.fromkeys(WORKLOADS, GENERAL))
    return {
        name: {"config": load.settings, "replayable": load.replayable} for name, load in WORKLOADS.items()
    }


def record_restarts(kafka: KafkaHome, work: Path, out: Path) -> dict[str, object]:
    broker = Broker(kafka, work / "restarts").start()
    config = {"epochs": dict(SMALL), "trimmed": dict(SMALL), "real-transactions": dict(SMALL)}
    broker.create_all({name: {"retention.ms": "-1", **more} for name, more in config.items()})
    with Wire(broker.address) as wire:
        fill_mixed(broker, wire, "trimmed")
        fill_real_transactions(broker, wire, "real-transactions")
        commit_offsets(broker, "trimmed")
    for end in (broker.stop, broker.stop, broker.kill, broker.stop):
        if not broker.runs:
            broker.start()
        with Wire(broker.address) as wire:
            for index in range(20):
                wire.produce("epochs", batch([Row(T0 + index, b"key", b"value %d " % index * 5)]))
            wire.delete_records("trimmed", 150)
        end()
    questions = {
        "epochs": GENERAL,
        "trimmed": GENERAL,
        "__consumer_offsets": {"plain": (), "offsets": OWN["offsets"]},
        "__transaction_state": {"plain": (), "transactions": OWN["transactions"]},
    }
    keep_folders(kafka, broker, out, "restarts", questions)
    return {name: {"config": config.get(name, {})} for name in questions}


def commit_offsets(broker: Broker, topic: str) -> None:
    """A consumer group that commits twice and then leaves."""
    consumer = Consumer(
        {"bootstrap.servers": broker.address, "group.id": "readers", "enable.auto.commit": False}
    )
    consumer.subscribe([topic])
    until(lambda: consumer.poll(0.5) is not None or consumer.assignment(), "the group to form")
    for offset in (7, 19):
        consumer.commit(offsets=[TopicPartition(topic, 0, offset, metadata="so far")], asynchronous=False)
    consumer.close()


def keep_folders(
    kafka: KafkaHome,
    broker: Broker,
    out: Path,
    part: str,
    topics: Mapping[str, Mapping[str, tuple[str, ...]]],
) -> None:
    """Keep the folders of these topics, the checkpoints, and the dump tool's answers to the questions."""
    target = fresh(out / part)
    for name in topics:
        shutil.copytree(broker.partition(name), target / f"{name}-0")
    for name in CHECKPOINTS:
        keep_lines_of(broker.data / name, target / name, topics)
    dumps = fresh(out / "dumps" / part)
    for name, questions in topics.items():
        answers: dict[str, bytes] = {}
        for question, options in questions.items():
            dump = java_dump(kafka, target, asked_files(target / f"{name}-0", question), *options)
            answers |= answer(f"{name}/{question}", question, dump)
        pack(dumps / f"{name}.tar.gz", {}, answers)


def keep_lines_of(source: Path, target: Path, topics: Iterable[str]) -> None:
    """Copy a checkpoint without the lines of the broker's own topics."""
    shutil.copyfile(source, target)
    if target.name.endswith("-checkpoint"):
        foreign = [partition for partition in read_lines(target) if partition[0] not in topics]
        set_lines(target, dict.fromkeys(foreign))


def asked_files(folder: Path, question: str) -> list[str]:
    """The files of a partition folder the tool is asked about, in this order."""
    files = dumpable(folder)
    return [file for file in files if file.endswith(".log")] if question == "bytes" else files


def answer(where: str, question: str, dump: Dump) -> dict[str, bytes]:
    """What the tool said, to keep; nothing when it broke down (its stack trace is no contract)."""
    if dump.crashed:
        print(f"  the dump tool crashed on {where}: {dump.err.splitlines()[0]}")
        return {}
    return {f"{question}.out": dump.out.encode(), f"{question}.err": dump.err.encode()}


# -- pairs -----------------------------------------------------------------------------------------


def record_pairs(kafka: KafkaHome, work: Path, out: Path) -> dict[str, object]:
    fresh(out / "pairs")
    facts: dict[str, object] = {}
    for state in ("killed", "unmarked", "clean"):
        chosen = {name: damage for name, damage in DAMAGES.items() if damage.state == state}
        facts.update(record_state(kafka, work / state, out, state, chosen))
    return facts


def record_state(
    kafka: KafkaHome, work: Path, out: Path, state: str, chosen: dict[str, Damage]
) -> dict[str, object]:
    broker = Broker(kafka, work, {"log.initial.task.delay.ms": "600000"}).start()  # recovery, no retention
    broker.create_all({name: damage.settings for name, damage in chosen.items()})
    with Wire(broker.address) as wire:
        for name, damage in chosen.items():
            damage.fill(broker, wire, name)
    prepare(broker, state, chosen)
    before = work / "before"
    shutil.copytree(broker.data, before)
    now_ms = time.time_ns() // 1_000_000
    broker.start()
    broker.stop()
    facts: dict[str, object] = {}
    for name in chosen:
        said = [line.replace(f"{broker.data}/", "") for line in broker.complaints(f"partition={name}-0,")]
        files = asked_files(before / f"{name}-0", "bytes")
        extra = answer(name, "data", java_dump(kafka, before, files, "--print-data-log"))
        stages = {"before": before / f"{name}-0", "after": broker.partition(name)}
        pack(out / "pairs" / f"{name}.tar.gz", stages, extra)
        facts[name] = {
            "state": state,
            "config": chosen[name].settings,
            "recovery_point": read_lines(before / RECOVERY_POINTS).get((name, 0), 0),
            "log_start": read_lines(before / LOG_STARTS).get((name, 0), 0),
            "log_end": read_lines(broker.data / RECOVERY_POINTS).get((name, 0)),
            "now_ms": now_ms,
            "log_start_after": read_lines(broker.data / LOG_STARTS).get((name, 0), 0),
            "dump": bool(extra),
            "said": [line.split("] ", 1)[-1] for line in said],
        }
    return facts


def prepare(broker: Broker, state: str, chosen: dict[str, Damage]) -> None:
    """End the broker in the wanted way, then do the damage."""
    (broker.kill if state == "killed" else broker.stop)()
    if state == "unmarked":
        (broker.data / MARKER).unlink()
    for name, damage in chosen.items():
        damage.do(broker.partition(name))
        if damage.recovery_point is not None:
            set_lines(broker.data / RECOVERY_POINTS, {(name, 0): damage.recovery_point})
        if damage.log_start is not None:
            set_lines(broker.data / LOG_STARTS, {(name, 0): damage.log_start})


# -- cleaning --------------------------------------------------------------------------------------


def record_cleaning(kafka: KafkaHome, work: Path, out: Path) -> dict[str, object]:
    fresh(out / "cleaning")
    broker = Broker(kafka, work / "cleaning")
    stages: dict[str, list[Stage]] = {name: [] for name in CLEANINGS}
    rounds = max(len(case.steps) for case in CLEANINGS.values())
    broker.start()
    broker.create_all({name: case.settings for name, case in CLEANINGS.items()})
    for number in range(rounds):
        for name, case in CLEANINGS.items():
            if number < len(case.steps):
                with Wire(broker.address) as wire:
                    stages[name].append(case.steps[number](broker, wire, name))
        broker.stop()
        for name, case in CLEANINGS.items():
            if number < len(case.steps):
                shutil.copytree(broker.partition(name), work / "stages" / name / str(number))
                stage = stages[name][-1]
                stage.log_start = read_lines(broker.data / LOG_STARTS).get((name, 0), 0)
                stage.first_dirty = read_lines(broker.data / "cleaner-offset-checkpoint").get((name, 0))
        if number + 1 < rounds:
            broker.start()
    facts: dict[str, object] = {}
    for name, case in CLEANINGS.items():
        folders = {str(number): work / "stages" / name / str(number) for number in range(len(case.steps))}
        extra: dict[str, bytes] = {}
        for stage, folder in folders.items():
            renamed = folder.parent / f"{name}-0"
            shutil.copytree(folder, renamed)
            dump = java_dump(kafka, renamed.parent, dumpable(renamed), "--print-data-log")
            shutil.rmtree(renamed)
            extra |= answer(f"{name}/{stage}", stage, dump)
        pack(out / "cleaning" / f"{name}.tar.gz", folders, extra)
        facts[name] = {"config": case.settings, "stages": [stage.facts() for stage in stages[name]]}
    return facts


# -- storing ---------------------------------------------------------------------------------------


def pack(path: Path, folders: dict[str, Path], extra: dict[str, bytes]) -> None:
    """One archive, the same bytes for the same content."""
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as archive:
        entries = {
            f"{stage}/{file.name}": file for stage, folder in folders.items() for file in folder.iterdir()
        }
        contents = {name: file.read_bytes() for name, file in entries.items()} | extra
        for name, content in sorted(contents.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    path.write_bytes(gzip.compress(body.getvalue(), 9, mtime=0))


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def publish(out: Path) -> None:
    """What was recorded takes the place of what was there; a failed recording changes nothing."""
    for folder in (out, out / "dumps"):
        for fresh_one in sorted(folder.iterdir()) if folder.exists() else []:
            if fresh_one.name != "dumps":
                target = FIXTURES / fresh_one.relative_to(out)
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(fresh_one, target)


def main(parts: list[str]) -> None:
    kafka = find_kafka()
    if kafka is None:
        sys.exit("no Kafka here: run `make kafka` first")
    recorders = {
        "folders": record_folders,
        "restarts": record_restarts,
        "pairs": record_pairs,
        "cleaning": record_cleaning,
    }
    path = FIXTURES / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {}
    for part in parts or list(recorders):
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as work:
            out = fresh(Path(work) / "out")
            manifest[part] = recorders[part](kafka, Path(work), out)
            publish(out)
        print(f"recorded {part}: {len(manifest[part])} cases in {time.monotonic() - started:.0f} s")
    manifest["kafka"] = kafka.version
    manifest["questions"] = {**GENERAL, **OWN}
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
