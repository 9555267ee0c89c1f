"""Quix Streams: a stateful filter drops copies, `tumbling_window` counts, state in RocksDB; two processes, a
partition each.

Its core alone: the `StreamingDataFrame`, the state stores and their checkpoints every five seconds are Quix's own
and work as they do in an `Application`; consumer and producer are left out, and with them broker, JSON and
changelog. The figure is the better for it.
"""

from __future__ import annotations

import logging
import tempfile
from datetime import timedelta
from typing import Any, ClassVar

import quixstreams.dataframe.windows.aggregations as agg
from quixstreams.context import copy_context, set_message_context
from quixstreams.dataframe import DataFrameRegistry, StreamingDataFrame
from quixstreams.models import MessageContext, Topic, TopicAdmin, TopicConfig, TopicManager
from quixstreams.processing import ProcessingContext
from quixstreams.sinks import SinkManager
from quixstreams.state import State, StateStoreManager

import handed

TOPIC, COMMIT_SECONDS = "orders", 5.0


class NoBroker:
    """Stands where consumer and producer are: nothing to flush, and offsets are kept by nobody."""

    offsets: ClassVar[dict[Any, int]] = {}

    def flush(self, *_: Any, **__: Any) -> int:
        return 0

    def commit(self, *_: Any, **__: Any) -> list[Any]:
        return []


def first_within_an_hour(value: dict[str, Any], state: State) -> bool:
    order = value["order_id"]
    if state.exists(order):
        return False
    state.set(order, True, ttl=timedelta(hours=1))
    return True


class Counted:
    """What `Application.run` builds before it polls, and the loop around it."""

    def __init__(self, events: list[handed.Event]) -> None:
        logging.disable(logging.INFO)
        self._rows = [({"order_id": order, "amount": amount}, key, ts) for key, ts, order, amount in events]
        self._windows: dict[tuple[str, int], tuple[int, float]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="quix-")
        stores = StateStoreManager(group_id="bench", state_dir=self._folder.name)
        registry = DataFrameRegistry()
        self._context = ProcessingContext(
            commit_interval=COMMIT_SECONDS,
            producer=NoBroker(),
            consumer=NoBroker(),
            state_manager=stores,
            sink_manager=SinkManager(),
            dataframe_registry=registry,
        )
        topic = Topic(TOPIC)
        kept = {"retention.ms": "604800000", "retention.bytes": "-1"}  # what a broker would answer
        topic.broker_config = TopicConfig(num_partitions=1, replication_factor=1, extra_config=kept)
        frame = StreamingDataFrame(
            topic,
            topic_manager=TopicManager(TopicAdmin("localhost:9"), consumer_group="bench"),
            registry=registry,
            processing_context=self._context,
        )
        registry.register_root(frame)
        frame = frame.filter(first_within_an_hour, stateful=True)
        frame = (
            frame.tumbling_window(timedelta(minutes=1), grace_ms=timedelta(hours=1))
            .agg(n=agg.Count(), total=agg.Sum("amount"))
            .current()
        )
        frame = frame.update(self._keep, metadata=True)
        stores.on_partition_assign(frame.stream_id, 0, {})
        self._context.init_checkpoint()
        self._process = registry.compose_all()[TOPIC]

    def _keep(self, value: dict[str, Any], key: str, *_: Any) -> None:
        self._windows[key, value["start"] // handed.MINUTE] = (value["n"], value["total"])

    def run(self) -> None:
        for offset, (value, key, ts) in enumerate(self._rows):
            message = copy_context()
            message.run(set_message_context, MessageContext(TOPIC, 0, offset, 0))
            message.run(self._process, value, key, ts, None)
            self._context.store_offset(TOPIC, 0, offset)
            self._context.commit_checkpoint()
        self._context.commit_checkpoint(force=True)

    def windows(self) -> list[handed.Window]:
        return [(*window, *state) for window, state in self._windows.items()]


if __name__ == "__main__":
    handed.in_two_processes(Counted)
