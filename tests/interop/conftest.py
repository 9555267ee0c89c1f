"""One broker for all tests that meet it; each uses topics of its own, and leaves it running."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kafka_broker import Broker
from kafka_home import KafkaHome, find_kafka


@pytest.fixture(scope="session")
def kafka() -> KafkaHome:
    home = find_kafka()
    if home is None:  # tests marked `interop` are skipped before they ask
        raise RuntimeError("no Kafka jars here; `make kafka` fetches them")
    return home


@pytest.fixture(scope="session")
def _shared_broker(kafka: KafkaHome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    broker = Broker(kafka, tmp_path_factory.mktemp("broker"))
    yield broker
    broker.kill()


@pytest.fixture
def broker(_shared_broker: Broker) -> Broker:
    """The running broker; a test that stops it starts it again, and if it fails, this does."""
    return _shared_broker if _shared_broker.runs else _shared_broker.start()


@pytest.fixture(scope="module")
def module_broker(_shared_broker: Broker) -> Broker:
    """The same broker, for fixtures that prepare a whole module."""
    return _shared_broker if _shared_broker.runs else _shared_broker.start()
