"""Settings and errors of the Kafka client (confluent-kafka), translated both ways.

Settings arrive under Kafka's names, as in the properties files of Kafka's own tools; the client knows most of
them, and the few that only a JVM has are translated or refused with the name to use. The client's errors
leave as the errors of this house, `kafka_name` kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tidegate.errors import ConflictError, FencedError, InvalidError, TidegateError, UnavailableError

TIMEOUT_SECONDS = 10.0
_JAAS = re.compile(r"(username|password)\s*=\s*\"((?:[^\"\\]|\\.)*)\"")
_JVM_ONLY = {
    "ssl.truststore.location": "ssl.ca.location (a PEM file)",
    "ssl.truststore.password": "no password: ssl.ca.location is a PEM file",
    "ssl.keystore.password": "ssl.key.password",
}
_UNREACHABLE = {
    "_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_RESOLVE", "_WAIT_COORD", "_MSG_TIMED_OUT",
    "REQUEST_TIMED_OUT", "LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION", "NOT_ENOUGH_REPLICAS",
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "COORDINATOR_NOT_AVAILABLE", "BROKER_NOT_AVAILABLE", "_QUEUE_FULL",
    "NETWORK_EXCEPTION", "THROTTLING_QUOTA_EXCEEDED",
    "_NOENT",  # "no leaders found": what offsets are asked of is not there at the moment
}  # fmt: skip
_FENCED = {"_FENCED", "INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED"}

Result = TypeVar("Result")


def load_client() -> Any:
    """The confluent_kafka module; what to install where it is missing."""
    try:
        import confluent_kafka
    except ImportError:
        raise InvalidError(
            "kafka:// needs the Kafka client: pip install 'tidegate[kafka]', then try again"
        ) from None
    return confluent_kafka


def client_settings(servers: str, given: Mapping[str, str]) -> dict[str, Any]:
    """The client's configuration; quiet unless the caller asks for its log."""
    settings: dict[str, Any] = {"log_level": 0, "bootstrap.servers": servers}
    for key, value in given.items():
        if key in _JVM_ONLY:
            raise InvalidError(
                f"{key} is known to a JVM only; use {_JVM_ONLY[key]}", kafka_name="INVALID_CONFIG"
            )
        if key == "sasl.jaas.config":
            found = dict(_JAAS.findall(value))
            if set(found) != {"username", "password"}:
                raise InvalidError(
                    'sasl.jaas.config has no username="…" password="…"; give sasl.username and sasl.password'
                )
            settings["sasl.username"] = found["username"]
            settings["sasl.password"] = re.sub(r"\\(.)", r"\1", found["password"])
        elif key != "bootstrap.servers":
            settings[key] = value
    return settings


def calling(what: str, servers: str, call: Callable[[], Result]) -> Result:
    """Make one call of the client; its errors become ours, saying what was being done."""
    module = load_client()
    try:
        return call()
    except module.KafkaException as error:
        raise translated(error.args[0], what, servers) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidError(f"could not {what}: {error}") from None


def translated(error: Any, what: str, servers: str) -> TidegateError:
    """The client's error as one of ours."""
    name, reason = error.name(), error.str()
    message = f"could not {what} at {servers}: {reason}"
    if name in _UNREACHABLE:
        return UnavailableError(
            f"{message}; check the address, the network and security settings, then retry", kafka_name=name
        )
    if name in _FENCED:
        return FencedError(f"{message}; a newer producer has taken over", kafka_name=name)
    if name == "TOPIC_ALREADY_EXISTS":
        return ConflictError(f"{message}; alter it, or create it with --if-not-exists", kafka_name=name)
    return InvalidError(message, kafka_name=name)
