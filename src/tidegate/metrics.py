"""Counters and gauges with labels, counted in the process and handed to whoever asks.

Components get a `Metrics` through their constructor and add to it per batch, never per record. Gauges of things that
somebody owns anyway are read from their owners when the numbers are asked for (`read_when_asked`). `samples` is the
plain form; `prometheus_collector` gives the same numbers to prometheus_client (the `[metrics]`
extra), which knows the text format and how to serve it. Names follow Prometheus: base units, `_total` for
counters.

Safe from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tidegate.errors import InvalidError, UnavailableError


class Sample(NamedTuple):
    """One number, now."""

    name: str
    labels: Mapping[str, str]
    value: float


class Instrument:
    """One counter or gauge: a number for each set of label values."""

    def __init__(
        self, kind: Literal["counter", "gauge"], name: str, summary: str, labels: tuple[str, ...]
    ) -> None:
        self.kind = kind
        self.name = name
        self.summary = summary
        self.labels = labels
        self._lock = threading.Lock()
        self._values: dict[tuple[str, ...], float] = {}

    def add(self, amount: float, **labels: object) -> None:
        """Count on; a counter only goes up."""
        if amount < 0 and self.kind == "counter":
            raise InvalidError(f"{self.name} is a counter and cannot go down by {-amount}")
        key = self._key(labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount

    def set(self, value: float, **labels: object) -> None:
        """What it is now; gauges only."""
        if self.kind != "gauge":
            raise InvalidError(f"{self.name} is a counter: add to it instead")
        key = self._key(labels)
        with self._lock:
            self._values[key] = value

    def forget(self, **labels: object) -> None:
        """Remove every number with these values of these labels: what they were about is gone."""
        places = [(self.labels.index(name), str(value)) for name, value in labels.items()]
        with self._lock:
            for key in [key for key in self._values if all(key[place] == value for place, value in places)]:
                del self._values[key]

    def value(self, **labels: object) -> float:
        """The number so far, 0 where nothing was counted."""
        key = self._key(labels)
        with self._lock:
            return self._values.get(key, 0.0)

    def samples(self) -> list[Sample]:
        with self._lock:
            values = sorted(self._values.items())
        return [Sample(self.name, dict(zip(self.labels, key, strict=True)), value) for key, value in values]

    def _key(self, labels: Mapping[str, object]) -> tuple[str, ...]:
        if set(labels) != set(self.labels):
            raise InvalidError(f"{self.name} has the labels {list(self.labels)}, not {list(labels)}")
        return tuple(str(labels[name]) for name in self.labels)


class Metrics:
    """A set of instruments; asking for a name again gives the same one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._instruments: dict[str, Instrument] = {}
        self._collecting = threading.Lock()
        self._reads: dict[Callable[[], None], Sequence[Instrument]] = {}

    def counter(self, name: str, summary: str, labels: tuple[str, ...] = ()) -> Instrument:
        return self._instrument("counter", name, summary, labels)

    def gauge(self, name: str, summary: str, labels: tuple[str, ...] = ()) -> Instrument:
        return self._instrument("gauge", name, summary, labels)

    def read_when_asked(self, read: Callable[[], None], gauges: Sequence[Instrument]) -> None:
        """Have `read` called whenever the numbers are asked for, until `stop_reading`.

        It adds what it finds to `gauges`, which are empty before: owners that share gauges are summed, and what is no
        longer there has no number.
        """
        with self._collecting:
            self._reads[read] = gauges

    def stop_reading(self, read: Callable[[], None]) -> None:
        """Call `read` no longer, and remove its numbers; idempotent."""
        with self._collecting:
            for gauge in self._reads.pop(read, ()):
                gauge.forget()

    def collect(self) -> list[tuple[Instrument, list[Sample]]]:
        """Every instrument with its numbers now, by name."""
        with self._collecting:
            for gauges in self._reads.values():
                for gauge in gauges:
                    gauge.forget()
            for read in self._reads:
                read()
            return [(instrument, instrument.samples()) for instrument in self.instruments()]

    def samples(self) -> list[Sample]:
        """Every number, by name and labels."""
        return [sample for _, samples in self.collect() for sample in samples]

    def _instrument(
        self, kind: Literal["counter", "gauge"], name: str, summary: str, labels: tuple[str, ...]
    ) -> Instrument:
        with self._lock:
            found = self._instruments.get(name)
            if found is None:
                if (kind == "counter") != name.endswith("_total"):
                    raise InvalidError(f"{name}: a counter's name ends in _total, a gauge's does not")
                found = self._instruments[name] = Instrument(kind, name, summary, labels)
            elif (found.kind, found.labels) != (kind, labels):
                raise InvalidError(f"{name} is a {found.kind} with the labels {list(found.labels)} already")
            return found

    def instruments(self) -> list[Instrument]:
        with self._lock:
            return [self._instruments[name] for name in sorted(self._instruments)]


def prometheus_collector(metrics: Metrics) -> Any:
    """An object for `prometheus_client.REGISTRY.register`."""
    try:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError:
        raise InvalidError(
            "exporting metrics needs prometheus_client: pip install 'tidegate[metrics]', then try again"
        ) from None

    class Collector:
        def collect(self) -> Iterator[Any]:
            for instrument, samples in metrics.collect():
                family = CounterMetricFamily if instrument.kind == "counter" else GaugeMetricFamily
                shown = family(instrument.name, instrument.summary, labels=list(instrument.labels))
                for sample in samples:
                    shown.add_metric(list(sample.labels.values()), sample.value)
                yield shown

    return Collector()


def prometheus_text(metrics: Metrics) -> tuple[bytes, str]:
    """All of it as Prometheus reads it, and the media type of that."""
    collector = prometheus_collector(metrics)
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry), CONTENT_TYPE_LATEST


def serve_metrics(metrics: Metrics, host: str, port: int) -> None:
    """Answer Prometheus on this address, on a thread of its own, for the process's life."""
    collector = prometheus_collector(metrics)
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(collector)
    try:
        start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise UnavailableError(f"metrics cannot be served on {host}:{port}: {error}") from None
