"""The tables that an app looks things up in: kept up to date from their topics, and how far behind each one is.

A round looks into the newest commit that there is when it is planned, and into the same one when it is repeated.
Before a round is planned, at most once a second, a table that no other process builds is built on here: from its last
commit, or anew from the topic of its name where there is no such table yet. A table that another process builds is
read as that one commits it. Of each table `lags` says how many records of its topic the newest commit has not seen;
what cannot be told (the topic is not in the app's log) is left out.

A table that cannot be built here (its records do not fit, say) is read as it is, with its lag; the reason is logged.

Thread rule: one master, one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from tidegate.clock import Clock
from tidegate.errors import FencedError, TidegateError
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.inferring import key_serde_for
from tidegate.pipeline.definition.steps import Lookup
from tidegate.pipeline.rounds.heads import Heads
from tidegate.pipeline.tasks.lookups import lookup_key, newest_commits, require_key, table_commits
from tidegate.randomness import Randomness
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.commits import DEFAULT_TTL_MS, CommitList, load_commits
from tidegate.tables.ingest.materializer import Cadence, Claim, Materialiser
from tidegate.tables.options import Consumed, TableRules, table_rules
from tidegate.tables.serdes.base import Bytes, Serde
from tidegate.tables.serdes.json import serde_from

REFRESH_MS: Final = 1000
IDLE_MS: Final = 10_000
_CADENCE: Final = Cadence(commit_interval_ms=60_000)

logger = logging.getLogger(__name__)


class TableCommits:
    """The commits of tables, as planning sees them."""

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        self.lags: dict[str, int] = {}

    def newest(self, tables: Iterable[str]) -> dict[str, int]:
        """The newest commit of each table; `UnavailableError` when one has none yet."""
        return newest_commits(self._backend, list(tables))

    def are_kept(self, planned: Mapping[str, int]) -> bool:
        """Whether a plan's commits can still be read: a table keeps only the last ones."""
        return all(
            any(each.number == number for each in table_commits(self._backend, table).commits)
            for table, number in planned.items()
        )

    def close(self) -> None:
        """Give up what is built here."""


class LookedUpTables(TableCommits):
    """The same, kept up to date."""

    def __init__(
        self,
        backend: StorageBackend,
        log: Any,
        heads: Heads,
        flows: Iterable[Flow],
        *,
        clock: Clock,
        randomness: Randomness,
    ) -> None:
        super().__init__(backend)
        self._log, self._heads = log, heads
        self._clock, self._randomness = clock, randomness
        self._looked_ms: int | None = None
        self._builders: dict[str, Materialiser] = {}
        self._left: set[str] = set()  # tables that cannot be built here
        self._wanted: dict[str, tuple[Lookup, Serde[Any]]] = {}
        for flow in flows:
            for place, step in enumerate(flow.steps):
                if isinstance(step, Lookup):
                    key = flow.key_serdes[place]
                    kind = lookup_key(step, flow.schemas[place], key)
                    known = load_commits(backend, step.table)
                    if known is not None and known[0].shape.kind == "key":
                        require_key(step, kind, key, known[0].shape.key_serde)
                    own = key if step.key is None else key_serde_for(kind, "lookup")
                    self._wanted.setdefault(step.table, (step, own))

    def newest(self, tables: Iterable[str]) -> dict[str, int]:
        names = list(tables)
        now_ms = self._clock.monotonic_ms()
        if names and (self._looked_ms is None or now_ms - self._looked_ms >= REFRESH_MS):
            for name in names:
                self._refresh(name)
            self._looked_ms = self._clock.monotonic_ms()
        return super().newest(names)

    def close(self) -> None:
        for name in list(self._builders):
            self._let_go(name)

    # -- inside ----------------------------------------------------------------------------------

    def _refresh(self, name: str) -> None:
        try:
            builder = self._builders.get(name) or self._claimed(name)
            if builder is not None:
                builder.advance_to(builder.end_offsets(), IDLE_MS)
                builder.commit()
                builder.commit_if_due()  # keeps the lease
        except FencedError:
            self._let_go(name)  # another process builds it now
        except TidegateError as error:
            self._let_go(name)
            self._left.add(name)
            logger.warning("table %s, which is looked up, cannot be kept up to date here: %s", name, error)
        known = load_commits(self._backend, name)
        lag = None if known is None else records_behind(self._heads, known[0])
        if lag is None:
            self.lags.pop(name, None)
        else:
            self.lags[name] = lag

    def _claimed(self, name: str) -> Materialiser | None:
        """This process as the builder of the table, if nobody else is; None where it cannot be."""
        rules = None if name in self._left else self._rules(name)
        if rules is None:
            return None
        builder = Claim(
            self._log,
            rules,
            self._backend,
            cadence=_CADENCE,
            storage=None,
            lease_ttl_ms=DEFAULT_TTL_MS,
            clock=self._clock,
            randomness=self._randomness,
            scheduler=None,
        ).attempt()
        if builder is not None:
            self._builders[name] = builder
        return builder

    def _rules(self, name: str) -> TableRules | None:
        """What the table is; None where its topic is not in this log, or it is no table of plain keys."""
        known = load_commits(self._backend, name)
        topic = name if known is None else known[0].shape.topic
        partitions = self._heads.partitions(topic)
        if partitions is None:
            return None
        if known is None:
            step, key = self._wanted[name]
            consumed = Consumed(key, step.value, isolation="read_committed")
            return table_rules("key", topic, tuple(range(partitions)), consumed=consumed)
        shape = known[0].shape
        if shape.kind != "key" or (known[0].commits and records_behind(self._heads, known[0]) is None):
            return None
        key, value = serde_from(shape.key_serde) or Bytes(), serde_from(shape.value_serde) or Bytes()
        return TableRules(shape, key, value, Consumed(isolation="read_committed"), "fail")

    def _let_go(self, name: str) -> None:
        builder = self._builders.pop(name, None)
        if builder is not None:
            with suppress(TidegateError):
                builder.close()
            builder.source.runtime.close()


def table_lags(
    log: Any, backend: StorageBackend, tables: Iterable[str]
) -> Iterator[tuple[str, CommitList | None, int | None]]:
    """Each table with its commits (None before the first) and its lag (None where the topic is not in the log)."""
    heads = Heads(log)
    try:
        for table in tables:
            found = load_commits(backend, table)
            known = None if found is None or not found[0].commits else found[0]
            yield table, known, None if known is None else records_behind(heads, known)
    finally:
        heads.close()


def records_behind(heads: Heads, known: CommitList) -> int | None:
    """The records that the newest commit has not seen; None where the topic is not the one it was made of."""
    shape = known.shape
    there = heads.partitions(shape.topic)
    if there is None or not known.commits or max(shape.partitions, default=0) >= there:
        return None
    ends, seen = heads.of(shape.topic, there), known.commits[-1].positions
    if any(offset > ends[number].end for number, offset in seen.items()):
        return None
    return sum(ends[number].end - seen.get(number, 0) for number in shape.partitions)
