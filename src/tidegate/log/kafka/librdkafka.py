"""The C library under confluent-kafka, as far as it is called here: how consumers and producers are made and asked.

confluent-kafka hands out one Python object for each message, which costs several times what fetching it costs. The
library that it has loaded is in this process, and its own interface hands out arrays of messages.

Thread rule: the library locks what it shares; who owns a client says who may call it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final

from tidegate.errors import InvalidError
from tidegate.log.kafka.client import load_client

_PRODUCER: Final = 0
_CONSUMER: Final = 1
_DELIVERIES: Final = 1  # as events with many messages each, not as a call back for each message
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
    """An error of the library, with the two questions that `client.translated` asks of one."""

    code: int
    reason: str

    def name(self) -> str:
        return _said(library().calls["rd_kafka_err2name"](self.code))

    def str(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class Library:
    """Functions to call, by their names in C, and addresses of those that kernels call."""

    calls: Mapping[str, Any]
    addresses: Mapping[str, int]

    def error(self, code: int, reason: str | None = None) -> ClientError:
        return ClientError(code, reason or _said(self.calls["rd_kafka_err2str"](code)))

    def consumer(self, settings: Mapping[str, Any]) -> int:
        """A new consumer, its events and messages in one queue; its address."""
        made = self._client(_CONSUMER, "consumer", settings)
        self.calls["rd_kafka_poll_set_consumer"](made)
        return made

    def producer(self, settings: Mapping[str, Any]) -> int:
        """A new producer, which tells of deliveries by events; its address."""
        return self._client(_PRODUCER, "producer", settings)

    def taken(self, error: int) -> ClientError:
        """An error that the library made for the caller, who has it now."""
        calls = self.calls
        found = self.error(calls["rd_kafka_error_code"](error), _said(calls["rd_kafka_error_string"](error)))
        calls["rd_kafka_error_destroy"](error)
        return found

    def assign(self, consumer: int, topic: str, offsets: Mapping[int, int]) -> ClientError | None:
        """Have these partitions fetched from these offsets on, and nothing else."""
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
        calls["rd_kafka_conf_destroy"](config)  # it is the client's only where there is one
        raise InvalidError(
            f"could not configure the {name}: {_said(text.value)}", kafka_name="INVALID_CONFIG"
        )


@cache
def library() -> Library:
    """The library that confluent-kafka brought."""
    load_client()
    loaded = ctypes.CDLL(
        str(import_module("confluent_kafka.cimpl").__file__)
    )  # and all that it is linked with
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
