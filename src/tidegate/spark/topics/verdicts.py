"""What integrity validation says of each record that Spark reads: the column `verdict`.

Verdicts depend on all records before, so a partition is judged from its beginning: a task that reads a range first
judges what lies before it. Streams would do that over and over; with a folder for states (`verdictState`) each task
leaves the state at the end of its range there and starts from the nearest one before its own. States are a cache:
whoever deletes them loses time and nothing else.

    <folder>/<log, hashed>/<topic>/<its id>/<isolation>/<partition>-<offset, 20 digits>.state   before this offset

A cluster does not tell a topic's id: where one is deleted and made anew under its name, delete its states.

Nothing stops at a fault: rows come with `missing`, `corrupt`, … and the query decides. A topic is judged as `tidegate
verify` judges it: gaps are tolerated where it is compacted, and unknown producers where its first records are gone.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from tidegate.clock import SystemClock
from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.integrity.state import PartitionState, decode_state, encode_state
from tidegate.integrity.validator import OnError, PartitionValidator, ValidationRules
from tidegate.integrity.verdicts import Note, Verdict, tolerance_of
from tidegate.log.catalog import TopicDescription
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log
from tidegate.spark.topics.options import SourceOptions
from tidegate.spark.topics.ranges import OffsetRange

KEPT_STATES: Final = 4
_SUFFIX: Final = ".state"
_MOST_BYTES: Final = 1 << 30
_LABELS: Final = pa.array([verdict.label for verdict in Verdict])


class RangeJudge:
    """Judges the records of one range, and those before it."""

    def __init__(self, log: Log | KafkaLog, r: OffsetRange, options: SourceOptions) -> None:
        description = log.describe(r.topic)
        with log.reader(r.topic, [r.partition], start="earliest") as reader:
            log_start = reader.positions()[r.partition]
        self._range = r
        self._states = None if options.verdict_state is None else _States(options, description, r.partition)
        state, self.start = (None, log_start)
        if self._states is not None:
            found = self._states.nearest(r.start)
            if found is not None and found[1] >= log_start:
                state, self.start = found
        rules = ValidationRules(
            during_push=OnError.KEEP,
            otherwise=OnError.KEEP,
            tolerance=tolerance_of(log, r.topic, r.partition),
            head_may_be_gone=log_start > 0,
        )
        self._now_ms = SystemClock().now_ms()
        self._validator = PartitionValidator(r.topic, r.partition, rules=rules, state=state)

    def judged(self, batch: pa.RecordBatch, *, control_records: bool) -> pa.RecordBatch:
        """The rows of a batch that lie in the range, with their verdicts.

        Control records are left out unless asked for; one with a fault always stays.
        """
        found = self._validator.validate(batch, self._now_ms)
        # A record behind a gap that is damaged itself is `corrupt`: whoever filters by the column must not count it.
        verdicts = np.where(found.notes & Note.DAMAGED, np.uint8(Verdict.CORRUPT), found.verdicts)
        labels = pa.DictionaryArray.from_arrays(pa.array(verdicts.astype(np.int32)), _LABELS)
        rows = batch.append_column("verdict", labels.cast(pa.string()))
        keep = batch.column("offset").to_numpy() >= self._range.start
        if not control_records:
            keep &= ~found.columns.is_control | found.is_fatal
        return rows if keep.all() else rows.filter(pa.array(keep))

    def finish(self) -> None:
        """The whole range is judged: leave the state for the next one."""
        if self._states is not None:
            self._states.save(self._validator.state, self._range.end)


class _States:
    """The states of one partition."""

    def __init__(self, options: SourceOptions, description: TopicDescription, partition: int) -> None:
        log = hashlib.sha256(options.log.encode()).hexdigest()[:16]
        topic = Path(log, description.name, description.topic_id or "unknown", options.isolation)
        self._folder = (options.verdict_state or Path()) / topic
        self._prefix = f"{partition}-"
        self._files = Files()

    def nearest(self, offset: int) -> tuple[PartitionState, int] | None:
        """The last state at or before an offset."""
        for at in sorted(self._known(), reverse=True):
            if at <= offset:
                try:
                    return decode_state(self._files.read(self._path(at), limit=_MOST_BYTES)), at
                except (CorruptError, FileNotFoundError):
                    continue  # a cache: an older one, or the log's beginning, does as well
        return None

    def save(self, state: PartitionState, offset: int) -> None:
        self._files.mkdir(self._folder)
        self._files.publish(self._path(offset), encode_state(state), sync=False)
        for old in sorted(self._known())[:-KEPT_STATES]:
            self._files.unlink(self._path(old), missing_ok=True)

    def _known(self) -> list[int]:
        if not self._files.exists(self._folder):
            return []
        names = [
            name.removeprefix(self._prefix).removesuffix(_SUFFIX)
            for name in self._files.list(self._folder)
            if name.startswith(self._prefix) and name.endswith(_SUFFIX)
        ]
        return [int(name) for name in names if name.isdecimal()]

    def _path(self, offset: int) -> Path:
        return self._folder / f"{self._prefix}{offset:020d}{_SUFFIX}"
