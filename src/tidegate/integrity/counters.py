"""What validation counts for `tidegate.metrics`: the names, their labels, and who adds to them.

    tidegate_judged_records_total     verdict   records by verdict; `unmanaged` are those without metadata
    tidegate_integrity_faults_total   phase     records with a fault, before a push had ended and otherwise
    tidegate_integrity_notes_total    note      records that passed for a reason: gaps tolerated, and so on
    tidegate_tracked_producers                  gauge: producers that a receiver holds in memory
    tidegate_expired_producers_total            producers forgotten because of their age
    tidegate_checkpoints_total                  checkpoints taken
    tidegate_checkpoint_bytes                   gauge: the size of the last one

All have the labels topic, partition and stage, which says who looked: `validator`, `consumer`, `drainer` or
`audit`; a record that passes several of them is counted by each. Added to once per batch, never per record.

Thread rule: one thread per `Counters`; the metrics behind them are shared by all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.integrity.verdicts import Note
from tidegate.metrics import Metrics

if TYPE_CHECKING:
    from tidegate.integrity.validator import Judged

VALIDATOR: Final = "validator"
CONSUMER: Final = "consumer"
DRAINER: Final = "drainer"
AUDIT: Final = "audit"
COUNTED_NOTES: Final = (Note.TOLERATED, Note.TOLERATED_SUSPECT, Note.IGNORED, Note.UNEXPECTED)
_PLACE: Final = ("topic", "partition", "stage")


class Counters:
    """The instruments of one partition at one stage."""

    def __init__(self, metrics: Metrics, topic: str, partition: int, stage: str) -> None:
        self._place = {"topic": topic, "partition": partition, "stage": stage}
        self._records = metrics.counter(
            "tidegate_judged_records_total", "records by integrity verdict", (*_PLACE, "verdict")
        )
        self._faults = metrics.counter(
            "tidegate_integrity_faults_total", "records with an integrity fault", (*_PLACE, "phase")
        )
        self._notes = metrics.counter(
            "tidegate_integrity_notes_total", "records that integrity validation let pass", (*_PLACE, "note")
        )
        self._tracked = metrics.gauge("tidegate_tracked_producers", "producers held in memory", _PLACE)
        self._expired = metrics.counter(
            "tidegate_expired_producers_total", "producers forgotten because of their age", _PLACE
        )
        self._checkpoints = metrics.counter("tidegate_checkpoints_total", "checkpoints taken", _PLACE)
        self._bytes = metrics.gauge("tidegate_checkpoint_bytes", "size of the last checkpoint", _PLACE)

    def take(self, judged: Judged, tracked: int) -> None:
        """A batch; `tracked` producers are held after it."""
        for verdict, count in judged.counts.items():
            if count:
                self._records.add(count, verdict=verdict.label, **self._place)
        fatal = judged.is_fatal
        if fatal.any():
            during = int(((judged.notes[fatal] & Note.DURING_PUSH) != 0).sum())
            for phase, count in (("push", during), ("settled", int(fatal.sum()) - during)):
                if count:
                    self._faults.add(count, phase=phase, **self._place)
        if judged.notes.any():
            for note in COUNTED_NOTES:
                if count := judged.noted(note):
                    self._notes.add(count, note=str(note.name).lower(), **self._place)
        self._tracked.set(tracked, **self._place)

    def checkpointed(self, size: int, tracked: int) -> None:
        """A checkpoint of so many bytes, with the producers that are left."""
        self._checkpoints.add(1, **self._place)
        self._bytes.set(size, **self._place)
        self._tracked.set(tracked, **self._place)

    def expired(self, count: int) -> None:
        """Producers that were forgotten."""
        if count:
            self._expired.add(count, **self._place)

    def released(self) -> None:
        """Nothing is held any more."""
        self._tracked.set(0, **self._place)
