"""One real Kafka broker on the loopback interface: KRaft, a single node, started and ended at will.

The topics' folders are in `data`; the broker's own metadata log is elsewhere (`metadata`), so `data` holds
partitions and checkpoints only. `stop` is a clean shutdown, `kill` a crash. `output()` is what the broker
logged since its last start. Besides the plain listener there is one that wants a password over TLS
(`secure_listener`). The process dies with the test process where the machine has `setpriv`.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ClusterMetadata,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from kafka_home import KafkaHome, until
from kafka_wire import RefusedError, Wire
from secure_listener import SECURE, SecureListener

# Small and quick: what a test waits for happens within a second, what it must not meet never happens.
SETTINGS: dict[str, str] = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,{SECURE}:SASL_SSL",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "auto.create.topics.enable": "false",
    "num.network.threads": "1",
    "num.io.threads": "2",
    "background.threads": "2",
    "log.cleaner.dedupe.buffer.size": "4194304",
    "log.initial.task.delay.ms": "100",
    "log.retention.check.interval.ms": "300",
    "log.cleaner.backoff.ms": "100",
    "log.segment.delete.delay.ms": "100",
    # A restarted broker waits until the session of its killed predecessor has run out.
    "broker.session.timeout.ms": "4000",
    "broker.heartbeat.interval.ms": "500",
    "transaction.partition.verification.enable": "false",
}
LOGGING = """log4j.rootLogger=INFO, out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.target=System.out
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%p %c{1} %m%n
"""
CLUSTER = "dGlkZWdhdGUtaW50ZXJvcA"


class Broker:
    """A broker and its folder; `with Broker(...) as broker` starts it and stops it."""

    def __init__(self, kafka: KafkaHome, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.kafka = kafka
        self.folder = folder
        self.data = folder / "data"
        self.settings = {**SETTINGS, **(settings or {})}
        self.port = 0
        self.secure = SecureListener(folder)
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    # -- life ------------------------------------------------------------------------------------

    def start(self, timeout: float = 300, *, same_ports: bool = False, **overrides: str) -> Broker:
        """Start, format the folder first when it is new, and return when the broker serves requests.

        With `same_ports` clients of before find it again.
        """
        if self._process is not None:
            raise RuntimeError("the broker runs already")
        self._configure(overrides, same_ports)
        if not (self.folder / "metadata" / "meta.properties").exists():
            config = str(self.folder / "server.properties")
            self.kafka.run("kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", config)
        self._starts += 1
        command = self.kafka.command(
            "kafka.Kafka",
            str(self.folder / "server.properties"),
            flags=(f"-Dlog4j.configuration=file:{self.folder}/log4j.properties",),
        )
        if keeper := shutil.which("setpriv"):
            command = [keeper, "--pdeathsig", "KILL", *command]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            until(self._serves, "the broker to start", timeout=timeout)
        except TimeoutError as error:
            self.kill()
            raise RuntimeError(f"{error}; it said:\n{self.output()[-4000:]}") from error
        return self

    def stop(self, timeout: float = 300) -> None:
        """A clean shutdown: SIGTERM, and wait."""
        self._end(signal.SIGTERM, timeout)

    def kill(self) -> None:
        """A crash: SIGKILL. Nothing is flushed, trimmed or marked."""
        self._end(signal.SIGKILL, 30)

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.stop()

    @property
    def runs(self) -> bool:
        return self._process is not None

    # -- looking ---------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def output(self) -> str:
        """What the broker logged since its last start."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def complaints(self, word: str = "") -> list[str]:
        """Warnings and errors of the log layer since the last start that mention `word`."""
        return [
            line
            for line in self.output().splitlines()
            if line.startswith(("WARN", "ERROR", "FATAL")) and word in line
        ]

    def partition(self, topic: str, number: int = 0) -> Path:
        return self.data / f"{topic}-{number}"

    # -- topics ----------------------------------------------------------------------------------

    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    def create(self, topic: str, config: Mapping[str, str] | None = None, partitions: int = 1) -> None:
        self.create_all({topic: config or {}}, partitions)

    def create_all(self, topics: Mapping[str, Mapping[str, str]], partitions: int = 1) -> None:
        wanted = [NewTopic(name, partitions, 1, config=dict(config)) for name, config in topics.items()]
        admin = self.admin()  # the results die with the client, so it must outlive them
        for done in admin.create_topics(wanted).values():
            done.result(30)
        for name in topics:
            for number in range(partitions):
                mark = self.partition(name, number) / "partition.metadata"
                until(mark.exists, f"{mark} to exist")

    def alter(self, topic: str, config: Mapping[str, str]) -> None:
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
            for key, value in config.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        admin = self.admin()
        for done in admin.incremental_alter_configs([resource]).values():
            done.result(30)

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _output(self) -> Path:
        return self.folder / f"broker-{self._starts}.out"

    def _configure(self, overrides: Mapping[str, str], same_ports: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        controller, *ports = free_ports(3)
        if not same_ports:
            self.port, self.secure.port = ports
        settings = {
            **self.settings,
            **self.secure.settings(),
            **{key.replace("_", "."): value for key, value in overrides.items()},
            "listeners": f"PLAINTEXT://{self.address},{SECURE}://{self.secure.address},"
            f"CONTROLLER://127.0.0.1:{controller}",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "log.dirs": str(self.data),
            "metadata.log.dir": str(self.folder / "metadata"),
        }
        lines = [f"{key}={value}\n" for key, value in settings.items()]
        (self.folder / "server.properties").write_text("".join(lines))
        (self.folder / "log4j.properties").write_text(LOGGING)

    def _serves(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            self._process = None
            raise RuntimeError(f"the broker ended while starting; it said:\n{self.output()[-4000:]}")
        if "Kafka Server started" not in self.output():
            return False
        try:
            return self._leads(self.admin().list_topics(timeout=5))
        except (KafkaException, RefusedError, OSError):
            return False

    def _leads(self, metadata: ClusterMetadata) -> bool:
        """Whether every partition answers: what the metadata says may be ahead of what the broker has done."""
        with Wire(self.address) as wire:
            for topic, found in metadata.topics.items():
                for number in found.partitions:
                    wire.offset_for(topic, -1, partition=number)
        return bool(metadata.brokers)

    def _end(self, number: signal.Signals, timeout: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
            raise


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on right now, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def drop_lines(checkpoint: Path, topics: Iterable[str]) -> None:
    """Take the lines of these topics out of an offset checkpoint file."""
    set_lines(checkpoint, {(topic, 0): None for topic in topics})


def set_lines(checkpoint: Path, offsets: Mapping[tuple[str, int], int | None]) -> None:
    """Set (or with None remove) the lines of these partitions in an offset checkpoint file."""
    known = read_lines(checkpoint)
    for partition, offset in offsets.items():
        known.pop(partition, None)
        if offset is not None:
            known[partition] = offset
    body = "".join(f"{topic} {number} {offset}\n" for (topic, number), offset in known.items())
    checkpoint.write_text(f"0\n{len(known)}\n{body}")


def read_lines(checkpoint: Path) -> dict[tuple[str, int], int]:
    if not checkpoint.exists():
        return {}
    rows = (line.split() for line in checkpoint.read_text().splitlines()[2:])
    return {(topic, int(number)): int(offset) for topic, number, offset in rows}
