"""A cluster of librdkafka's own mock brokers, which a test can slow down and tell to answer with errors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import import_module

from tidegate.log.kafka.client import library

PRODUCE, FETCH, LIST_OFFSETS = 0, 1, 2
_BROKER = 1


class MockCluster:
    """One broker; its topics have four partitions."""

    def __init__(self) -> None:
        self._owner = library().producer(
            {"test.mock.num.brokers": 1, "bootstrap.servers": "replaced", "log_level": 0}
        )
        self._calls = ctypes.CDLL(str(import_module("confluent_kafka.cimpl").__file__))
        for name, result, arguments in (
            ("rd_kafka_handle_mock_cluster", ctypes.c_void_p, [ctypes.c_void_p]),
            ("rd_kafka_mock_cluster_bootstraps", ctypes.c_char_p, [ctypes.c_void_p]),
            (
                "rd_kafka_mock_topic_create",
                ctypes.c_int,
                [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int],
            ),
            (
                "rd_kafka_mock_push_request_errors_array",
                None,
                [ctypes.c_void_p, ctypes.c_int16, ctypes.c_size_t, ctypes.c_void_p],
            ),
            (
                "rd_kafka_mock_broker_set_rtt",
                ctypes.c_int,
                [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int],
            ),
        ):
            function = getattr(self._calls, name)
            function.restype, function.argtypes = result, arguments
        self._cluster = self._calls.rd_kafka_handle_mock_cluster(self._owner)
        self.servers = self._calls.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def create_topic(self, name: str, partitions: int = 4) -> None:
        assert self._calls.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1) == 0

    def answer_with(self, request: int, errors: Sequence[int]) -> None:
        """Answer the next requests of a kind with these error codes, one each."""
        codes = (ctypes.c_int * len(errors))(*errors)
        self._calls.rd_kafka_mock_push_request_errors_array(self._cluster, request, len(errors), codes)

    def slow_down(self, ms: int) -> None:
        """Answer so much later."""
        assert self._calls.rd_kafka_mock_broker_set_rtt(self._cluster, _BROKER, ms) == 0

    def close(self) -> None:
        library().calls["rd_kafka_destroy"](self._owner)
