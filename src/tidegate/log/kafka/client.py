"""Settings and errors of the Kafka client (confluent-kafka), and the calls into librdkafka.

Settings use Kafka's names, as in the properties files of Kafka's own tools. The client knows most of them;
the few that only a JVM has are translated, or refused with the name to use. Errors of the client become
Tidegate's errors, with Kafka's name of the condition in `kafka_name`.

confluent-kafka returns one Python object for each message, which costs several times as much as fetching it.
librdkafka, which it has loaded into this process, returns arrays of messages, so consumers and producers call
it directly.

E1  a transient condition while a partition's leader moves (Kafka's retriable errors) is retried
    for `PATIENCE_MS` where a second request does no harm, and raises `UnavailableError` after that.
E2  a client that fails to authenticate reports only that it cannot reach the cluster. The reason comes
    through `error_cb`: it is kept and raised as an `AuthenticationError`.

Thread rule: librdkafka locks what it shares; the owner of a client decides which thread calls it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, TypeVar

from tidegate.clock import SystemClock
from tidegate.errors import (
    AuthenticationError,
    ConflictError,
    FencedError,
    InvalidError,
    TidegateError,
    UnavailableError,
)

_PRODUCER: Final = 0
_CONSUMER: Final = 1
_DELIVERIES: Final = 1  # as events with many messages each, not as one callback for each message
_TEXT_BYTES: Final = 512
_pointer, _size, _int, _text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_char_p
_PROTOTYPES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "rd_kafka_conf_new": (_pointer, ()),
    "rd_kafka_conf_set": (_int, (_pointer, _text, _text, _text, _size)),
    "rd_kafka_conf_set_events": (None, (_pointer, _int)),
    "rd_kafka_conf_destroy": (None, (_pointer,)),
    "rd_kafka_new": (_pointer, (_int, _pointer, _text, _size)),
    "rd_kafka_destroy": (None, (_pointer,)),
    "rd_kafka_poll_set_consumer": (_int, (_pointer,)),
    "rd_kafka_queue_get_consumer": (_pointer, (_pointer,)),
    "rd_kafka_queue_destroy": (None, (_pointer,)),
    "rd_kafka_consumer_close": (_int, (_pointer,)),
    "rd_kafka_topic_partition_list_new": (_pointer, (_int,)),
    "rd_kafka_topic_partition_list_add": (_pointer, (_pointer, _text, _int)),
    "rd_kafka_topic_partition_list_set_offset": (_int, (_pointer, _text, _int, ctypes.c_int64)),
    "rd_kafka_topic_partition_list_destroy": (None, (_pointer,)),
    "rd_kafka_assign": (_int, (_pointer, _pointer)),
    "rd_kafka_consumer_poll": (_pointer, (_pointer, _int)),
    "rd_kafka_consume_batch_queue": (ctypes.c_ssize_t, (_pointer, _int, _pointer, _size)),
    "rd_kafka_topic_new": (_pointer, (_pointer, _text, _pointer)),
    "rd_kafka_topic_destroy": (None, (_pointer,)),
    "rd_kafka_queue_get_main": (_pointer, (_pointer,)),
    "rd_kafka_queue_poll": (_pointer, (_pointer, _int)),
    "rd_kafka_event_type": (_int, (_pointer,)),
    "rd_kafka_event_message_count": (_size, (_pointer,)),
    "rd_kafka_event_message_array": (_size, (_pointer, _pointer, _size)),
    "rd_kafka_event_destroy": (None, (_pointer,)),
    "rd_kafka_error_code": (_int, (_pointer,)),
    "rd_kafka_error_string": (_text, (_pointer,)),
    "rd_kafka_error_destroy": (None, (_pointer,)),
    "rd_kafka_message_errstr": (_text, (_pointer,)),
    "rd_kafka_err2name": (_text, (_int,)),
    "rd_kafka_err2str": (_text, (_int,)),
    "rd_kafka_last_error": (_int, ()),
}
_FOR_KERNELS: Final = {
    "timestamp_of": "rd_kafka_message_timestamp",
    "headers_of": "rd_kafka_message_headers",
    "count_of": "rd_kafka_header_cnt",
    "header_at": "rd_kafka_header_get_all",
    "destroy": "rd_kafka_message_destroy",
    "produce": "rd_kafka_produceva",
    "new_headers": "rd_kafka_headers_new",
    "add_header": "rd_kafka_header_add",
    "drop_headers": "rd_kafka_headers_destroy",
}


@dataclass(frozen=True, slots=True)
class ClientError:
    """An error of librdkafka, with the two methods that `client.translated` needs."""

    code: int
    reason: str

    def name(self) -> str:
        return _said(library().calls["rd_kafka_err2name"](self.code))

    def str(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class Library:
    """C functions by name, and addresses of those that kernels call."""

    calls: Mapping[str, Any]
    addresses: Mapping[str, int]

    def error(self, code: int, reason: str | None = None) -> ClientError:
        return ClientError(code, reason or _said(self.calls["rd_kafka_err2str"](code)))

    def consumer(self, settings: Mapping[str, Any]) -> int:
        """Create a consumer with its events and messages in one queue; return its address."""
        made = self._client(_CONSUMER, "consumer", settings)
        self.calls["rd_kafka_poll_set_consumer"](made)
        return made

    def producer(self, settings: Mapping[str, Any]) -> int:
        """Create a producer that reports deliveries as events; return its address."""
        return self._client(_PRODUCER, "producer", settings)

    def taken(self, error: int) -> ClientError:
        """Return an error object that the library created for the caller, and free it."""
        calls = self.calls
        found = self.error(calls["rd_kafka_error_code"](error), _said(calls["rd_kafka_error_string"](error)))
        calls["rd_kafka_error_destroy"](error)
        return found

    def assign(self, consumer: int, topic: str, offsets: Mapping[int, int]) -> ClientError | None:
        """Fetch these partitions from these offsets on, and nothing else."""
        calls = self.calls
        wanted = calls["rd_kafka_topic_partition_list_new"](len(offsets))
        for partition, offset in offsets.items():
            calls["rd_kafka_topic_partition_list_add"](wanted, topic.encode(), partition)
            calls["rd_kafka_topic_partition_list_set_offset"](wanted, topic.encode(), partition, offset)
        code = calls["rd_kafka_assign"](consumer, wanted)
        calls["rd_kafka_topic_partition_list_destroy"](wanted)
        return self.error(code) if code else None

    def _client(self, kind: int, name: str, settings: Mapping[str, Any]) -> int:
        calls, text = self.calls, ctypes.create_string_buffer(_TEXT_BYTES)
        config = calls["rd_kafka_conf_new"]()
        for key, value in settings.items():
            said = str(value).lower() if isinstance(value, bool) else str(value)
            if calls["rd_kafka_conf_set"](config, key.encode(), said.encode(), text, _TEXT_BYTES):
                break
        else:
            if kind == _PRODUCER:
                calls["rd_kafka_conf_set_events"](config, _DELIVERIES)
            made = calls["rd_kafka_new"](kind, config, text, _TEXT_BYTES)
            if made:
                return int(made)
        calls["rd_kafka_conf_destroy"](config)  # the client owns it only if there is one
        raise InvalidError(
            f"could not configure the {name}: {_said(text.value)}", kafka_name="INVALID_CONFIG"
        )


@cache
def library() -> Library:
    """Return the librdkafka that confluent-kafka loaded."""
    load_client()
    loaded = ctypes.CDLL(
        str(import_module("confluent_kafka.cimpl").__file__)
    )  # and all libraries that it is linked with
    calls = {}
    try:
        for name, (result, arguments) in _PROTOTYPES.items():
            function = loaded[name]
            function.restype, function.argtypes = result, arguments
            calls[name] = function
        addresses = {
            name: int(ctypes.cast(loaded[function], ctypes.c_void_p).value or 0)
            for name, function in _FOR_KERNELS.items()
        }
    except AttributeError as error:
        raise InvalidError(
            f"this confluent-kafka hides its C library ({error}); install its wheel: pip install "
            "--force-reinstall confluent-kafka"
        ) from None
    return Library(calls, addresses)


def _said(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")


TIMEOUT_SECONDS = 10.0
PATIENCE_MS: Final = 15_000
"""How long is asked again while a leader moves; electing one takes seconds at most."""
_FIRST_PAUSE_MS: Final = 50
_LONGEST_PAUSE_MS: Final = 1_000
_JAAS = re.compile(r"(username|password)\s*=\s*\"((?:[^\"\\]|\\.)*)\"")
_JVM_ONLY = {
    "ssl.truststore.location": "ssl.ca.location (a PEM file)",
    "ssl.truststore.password": "no password: ssl.ca.location is a PEM file",
    "ssl.keystore.password": "ssl.key.password",
}
_MOVING = {
    "LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION", "REPLICA_NOT_AVAILABLE", "FENCED_LEADER_EPOCH",
    "UNKNOWN_LEADER_EPOCH", "OFFSET_NOT_AVAILABLE", "KAFKA_STORAGE_ERROR", "LISTENER_NOT_FOUND", "NOT_CONTROLLER",
    "STALE_CTRL_EPOCH", "STALE_BROKER_EPOCH", "PREFERRED_LEADER_NOT_AVAILABLE", "ELIGIBLE_LEADERS_NOT_AVAILABLE",
    "UNKNOWN_TOPIC_ID", "FETCH_SESSION_ID_NOT_FOUND", "INVALID_FETCH_SESSION_EPOCH",
    "_NOENT",  # "no leaders found": the partition is not available at the moment
}  # fmt: skip
"""Told by brokers while leadership moves; a moment later another one answers (E1)."""
_UNREACHABLE = _MOVING | {
    "_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_TIMED_OUT_QUEUE", "_RESOLVE", "_WAIT_COORD", "_WAIT_CACHE",
    "_MSG_TIMED_OUT", "_QUEUE_FULL", "_RETRY", "_ISR_INSUFF", "_UNKNOWN_BROKER", "_DESTROY_BROKER",
    "REQUEST_TIMED_OUT", "NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "BROKER_NOT_AVAILABLE",
    "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS", "NOT_COORDINATOR", "CONCURRENT_TRANSACTIONS",
    "UNSTABLE_OFFSET_COMMIT", "NETWORK_EXCEPTION", "THROTTLING_QUOTA_EXCEEDED", "REBOOTSTRAP_REQUIRED",
}  # fmt: skip
_FENCED = {"_FENCED", "INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED"}
_LOGIN = {"_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM", "ILLEGAL_SASL_STATE"}
_TLS = {"_SSL"}
_KAFKA_NAMES = {
    "UNKNOWN_TOPIC_OR_PART": "UNKNOWN_TOPIC_OR_PARTITION", "NOT_LEADER_FOR_PARTITION": "NOT_LEADER_OR_FOLLOWER",
    "INVALID_MSG": "CORRUPT_MESSAGE", "MSG_SIZE_TOO_LARGE": "MESSAGE_TOO_LARGE",
    "INVALID_MSG_SIZE": "INVALID_FETCH_SIZE", "STALE_CTRL_EPOCH": "STALE_CONTROLLER_EPOCH",
    "TOPIC_EXCEPTION": "INVALID_TOPIC_EXCEPTION",
}  # fmt: skip
"""Where the client's name for a condition is not Kafka's."""

Result = TypeVar("Result")


def load_client() -> Any:
    """Return the confluent_kafka module; if it is missing, raise an error that says what to install."""
    try:
        import confluent_kafka
    except ImportError:
        raise InvalidError(
            "kafka:// needs the Kafka client: pip install 'tidegate[kafka]', then try again"
        ) from None
    return confluent_kafka


def client_settings(servers: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the client's configuration; quiet unless the caller asks for its log."""
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


class Heard:
    """Keeps the authentication error that a client reported through `error_cb` (E2), until a call succeeds."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        mechanism = settings.get("sasl.mechanism", settings.get("sasl.mechanisms"))
        user, protocol = settings.get("sasl.username"), settings.get("security.protocol", "plaintext")
        self._login = f"user {user!r} with sasl.mechanism={mechanism}, security.protocol={protocol}"
        self._protocol = protocol
        self.error: Any = None

    def __call__(self, error: Any) -> None:
        """Called by the client when it is polled."""
        if error.name() in _LOGIN | _TLS:
            self.error = error

    def refusal(self, what: str, servers: str) -> AuthenticationError | None:
        """Return the error to raise if authentication failed; None if the client did not report that."""
        if self.error is None:
            return None
        name, reason = self.error.name(), self.error.str()
        if name in _TLS:
            return AuthenticationError(
                f"could not {what} at {servers}: no secure connection with security.protocol={self._protocol}: "
                f"{reason}; check security.protocol, and ssl.ca.location or the client's ssl.certificate.location",
                kafka_name=name,
            )
        return AuthenticationError(
            f"could not {what}: {servers} does not let in {self._login}: {reason}; check sasl.username, sasl.password "
            "and sasl.mechanism",
            kafka_name="SASL_AUTHENTICATION_FAILED" if name == "_AUTHENTICATION" else name,
        )


def admin_client(servers: str, settings: Mapping[str, Any]) -> Any:
    """Return an admin client; errors that it reports asynchronously are in its `heard`."""
    heard = Heard(settings)
    make = import_module("confluent_kafka.admin").AdminClient
    made = calling("configure the Kafka client", servers, lambda: make({**settings, "error_cb": heard}))
    made.heard = heard
    return made


def calling(
    what: str, servers: str, call: Callable[[], Result], *, admin: Any = None, patience_ms: int = 0
) -> Result:
    """Make one call of the client; raise its errors as Tidegate's errors, with `what` was being done.

    With the `admin` that is called, a refused login is distinguished from an unreachable cluster (E2); with
    `patience_ms` the call is retried for that time while a leader moves (E1).
    """
    module, clock, tries, pause_ms = load_client(), SystemClock(), 1, _FIRST_PAUSE_MS
    heard: Heard | None = getattr(admin, "heard", None)
    deadline_ms = clock.monotonic_ms() + patience_ms
    while True:
        try:
            answer = call()
        except module.KafkaException as error:
            failure = error.args[0]
            if failure.name() in _MOVING and clock.monotonic_ms() < deadline_ms:
                clock.sleep_ms(pause_ms)
                tries, pause_ms = tries + 1, min(2 * pause_ms, _LONGEST_PAUSE_MS)
                continue
            refusal = None
            if heard is not None and failure.name() in _UNREACHABLE:
                admin.poll(0)  # which calls `heard`
                refusal = heard.refusal(what, servers)
            if tries > 1:
                what = f"{what} ({tries} times, for {patience_ms // 1000} s)"
            raise refusal or translated(failure, what, servers) from None
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidError(f"could not {what}: {error}") from None
        if heard is not None:
            heard.error = None
        return answer


def translated(error: Any, what: str, servers: str) -> TidegateError:
    """Return the client's error as one of Tidegate's."""
    name, reason = error.name(), error.str()
    kafka_name = _KAFKA_NAMES.get(name, name)
    message = f"could not {what} at {servers}: {reason}"
    if name in _UNREACHABLE:
        return UnavailableError(
            f"{message}; check the address, the network and security settings, then retry",
            kafka_name=kafka_name,
        )
    if name in _LOGIN:
        return AuthenticationError(
            f"{message}; check sasl.username, sasl.password and sasl.mechanism", kafka_name=kafka_name
        )
    if name in _FENCED:
        return FencedError(f"{message}; a newer producer has taken over", kafka_name=kafka_name)
    if name == "TOPIC_ALREADY_EXISTS":
        return ConflictError(f"{message}; alter it, or create it with --if-not-exists", kafka_name=kafka_name)
    return InvalidError(message, kafka_name=kafka_name)
