"""Numbers counted in the process, and handed to Prometheus where it is installed."""

from __future__ import annotations

import threading

import pytest

from tidegate.errors import InvalidError
from tidegate.metrics import Metrics, Sample, prometheus_collector


def test_counts_are_kept_per_label_and_shown_sorted() -> None:
    metrics = Metrics()
    records = metrics.counter("records_total", "records", ("topic", "verdict"))
    records.add(2, topic="b", verdict="read")
    records.add(1, topic="a", verdict="read")
    records.add(3, topic="b", verdict="read")
    assert records.value(topic="b", verdict="read") == 5
    assert records.value(topic="c", verdict="read") == 0
    assert metrics.samples() == [
        Sample("records_total", {"topic": "a", "verdict": "read"}, 1),
        Sample("records_total", {"topic": "b", "verdict": "read"}, 5),
    ]
    assert metrics.counter("records_total", "records", ("topic", "verdict")) is records


def test_a_gauge_is_what_it_was_set_to() -> None:
    lag = Metrics().gauge("lag_records", "lag")
    lag.set(7)
    lag.add(-2)
    assert lag.value() == 5


def test_misuse_is_refused() -> None:
    metrics = Metrics()
    counter = metrics.counter("x_total", "x", ("a",))
    for misuse in (
        lambda: counter.add(-1, a=1),
        lambda: counter.set(1, a=1),
        lambda: counter.add(1),
        lambda: counter.add(1, b=1),
        lambda: metrics.gauge("x_total", "x"),
        lambda: metrics.counter("x", "no suffix"),
        lambda: metrics.counter("x_total", "x", ("b",)),
    ):
        with pytest.raises(InvalidError):
            misuse()


def test_threads_lose_no_count() -> None:
    counter = Metrics().counter("x_total", "x")

    def count() -> None:
        for _ in range(5000):
            counter.add(1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.value() == 20_000


def test_prometheus_sees_the_same_numbers_or_is_named_as_missing() -> None:
    metrics = Metrics()
    metrics.counter("tidegate_records_total", "records", ("topic",)).add(3, topic="a")
    metrics.gauge("tidegate_lag_records", "lag").set(4)
    try:
        import prometheus_client
    except ImportError:
        with pytest.raises(InvalidError, match=r"tidegate\[metrics\]"):
            prometheus_collector(metrics)
        return
    registry = prometheus_client.CollectorRegistry()
    registry.register(prometheus_collector(metrics))
    text = prometheus_client.generate_latest(registry).decode()
    assert 'tidegate_records_total{topic="a"} 3.0' in text
    assert "tidegate_lag_records 4.0" in text
