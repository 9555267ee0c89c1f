"""Check producers' sequences, transactions and snapshots over the batches of one partition, in offset order.

The rules for data batches with a producer id and a sequence (every epoch counts from 0, wrapping at 2^31):

    next number follows          sound
    higher than expected         missing, unless the numbers turn up later: then order
    already seen                 duplicate (cause: same epoch)
    0 again, not a repeat        restart (clients before epoch bumps; a notice)
    higher epoch, not from 0     missing
    lower epoch                  epoch
    first batch, not from 0      missing where the log has its beginning, head where it was cut by retention

The same records with the same timestamps under a new epoch or a new producer id are a duplicate too; only the
first batches after such a change are compared, with the last ones before it. In a compacted partition, and in
topics that a broker's coordinators write, only epochs are checked.

Sequences are checked by column; only groups with a mismatch are examined one by one. Memory: about 1.5 KiB per
producer, for at most 100,000 of them (beyond that, those idle the longest are dropped).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.log.format.batch import CONTROL_BIT, HEADER_SIZE, TRANSACTIONAL_BIT, ControlType, read_control
from tidegate.log.indexes import AbortedTxn, TransactionIndex
from tidegate.log.producer_state import read_snapshot
from tidegate.log.verify.findings import Findings, Severity
from tidegate.log.verify.index_checks import (
    CACHED_BATCHES,
    MODULO,
    BatchRows,
    Gap,
    ProducerTrack,
    Sent,
    index_path,
)

if TYPE_CHECKING:
    from tidegate.log.verify.scan import CheckedRun


_REBUILD: Final = "move it away; the log rebuilds it when it is opened for writing"


class Growing(NamedTuple):
    """The last log segment, which may be growing: the offset and the byte where the walk ended."""

    log: Path
    walked_to: int
    walked_bytes: int


class TransactionCheck:
    """Checks transactions: pass it the runs of a partition, and call `segment_ended` after each log segment."""

    def __init__(self, findings: Findings, *, files: Files) -> None:
        self._findings = findings
        self._files = files
        self._growing: Growing | None = None
        self._open: dict[int, int] = {}
        self._aborts: dict[int, tuple[int, int | None]] = {}  # marker offset → producer, first offset

    def run(self, run: CheckedRun, path: Path) -> None:
        table = run.table
        rows = np.flatnonzero(table.attributes & (TRANSACTIONAL_BIT | CONTROL_BIT))
        if not len(rows):
            return
        for position, size, base, producer, flags in zip(
            table.position[rows].tolist(),
            table.size[rows].tolist(),
            table.base_offset[rows].tolist(),
            table.producer_id[rows].tolist(),
            table.attributes[rows].tolist(),
            strict=True,
        ):
            if not flags & CONTROL_BIT:
                self._open.setdefault(producer, base)
            elif flags & TRANSACTIONAL_BIT:
                self._marker(run, position, size, base, producer, path)

    def segment_ended(
        self, folder: Path, base: int, log_start: int, *, compacted: bool, growing: Growing | None = None
    ) -> None:
        """Compare the log segment's transaction index with the aborts seen in it.

        Compaction drops aborted records first, so the log may show a later start of the transaction than the index. A
        broker may be writing to the last segment (`growing`): it writes a marker and then its entry. So the index may
        have entries after the end of the walk, and may lack the entry of the very last marker.
        """
        aborts, self._aborts = self._aborts, {}
        self._growing = growing
        path = index_path(folder, base, ".txnindex", self._files)
        index = TransactionIndex(path, base, files=self._files, read_only=True)
        if not index.exists:
            for offset, (producer, first) in aborts.items():
                if first is not None:
                    self._unlisted(path, offset, producer, first)
            return
        try:
            index.sanity_check()
            listed = list(index)
        except CorruptError as error:
            self._bad(path, str(error), error.position, base, None)
            return
        for number, entry in enumerate(listed):
            if growing is None or entry.last_offset < growing.walked_to or not self._has_grown(growing):
                self._compare(path, number, entry, aborts, log_start, compacted)
        known = {entry.last_offset for entry in listed}
        for offset, (producer, first) in aborts.items():
            if first is not None and offset not in known:
                self._unlisted(path, offset, producer, first)

    def finish(self, path: Path) -> None:
        for producer, first in self._open.items():
            self._findings.add(
                "open-transaction",
                path,
                f"the transaction that begins at offset {first} has no end; read-committed readers wait",
                "let its producer finish, or abort it",
                severity=Severity.NOTICE,
                offset=first,
                producer=str(producer),
            )

    def _marker(
        self, run: CheckedRun, position: int, size: int, offset: int, producer: int, path: Path
    ) -> None:
        try:
            marker = read_control(run.control(position, size))
        except CorruptError as error:
            self._findings.add(
                "corrupt",
                path,
                str(error),
                "no reader can know how the transaction ended",
                position=run.position + position,
                offset=offset,
            )
            return
        first = self._open.pop(producer, None)
        if marker.kind is ControlType.ABORT:
            self._aborts[offset] = (producer, first)

    def _compare(
        self,
        path: Path,
        number: int,
        entry: AbortedTxn,
        aborts: Mapping[int, tuple[int, int | None]],
        log_start: int,
        compacted: bool,
    ) -> None:
        found = aborts.get(entry.last_offset)
        position = number * 34
        if found is None or found[0] != entry.producer_id:
            self._bad(
                path,
                f"entry {number} speaks of an abort of producer {entry.producer_id} at offset "
                f"{entry.last_offset}, where the log has none",
                position,
                entry.last_offset,
                entry.producer_id,
            )
            return
        first = found[1]
        if first is None or entry.first_offset < log_start:
            return
        if entry.first_offset > first or (entry.first_offset < first and not compacted):
            self._bad(
                path,
                f"entry {number} says the aborted transaction began at {entry.first_offset}, the log says "
                f"{first}",
                position,
                entry.last_offset,
                entry.producer_id,
            )

    def _has_grown(self, growing: Growing) -> bool:
        found = self._files.stat(growing.log)
        return found is not None and found.size > growing.walked_bytes

    def _unlisted(self, path: Path, offset: int, producer: int, first: int) -> None:
        growing = self._growing
        is_last_batch = growing is not None and offset == growing.walked_to - 1
        self._bad(
            path,
            f"the transaction {first} to {offset} was aborted but is not listed: readers would see it"
            + (", unless its entry is just being written" if is_last_batch else ""),
            None,
            offset,
            producer,
            Severity.WARNING if is_last_batch else Severity.FAULT,
        )

    def _bad(
        self,
        path: Path,
        what: str,
        position: int | None,
        offset: int,
        producer: int | None,
        severity: Severity = Severity.FAULT,
    ) -> None:
        self._findings.add(
            "index",
            path,
            what,
            _REBUILD,
            severity=severity,
            position=position,
            offset=offset,
            producer=None if producer is None else str(producer),
        )


def check_snapshot(
    path: Path,
    offset: int,
    tracks: Mapping[int, ProducerTrack],
    findings: Findings,
    *,
    thinned: bool,
    files: Files,
) -> None:
    """Compare a producer snapshot with the producers that the log shows just before `offset`.

    `thinned`: batches are known to be missing from the log, so the snapshot may know more than the log.
    """

    def bad(what: str, offset: int, producer: str | None = None, position: int | None = None) -> None:
        remedy = "move it away; the state is rebuilt from the log when it is opened for writing"
        findings.add("snapshot", path, what, remedy, position=position, offset=offset, producer=producer)

    try:
        entries = read_snapshot(path, files=files)
    except CorruptError as error:
        bad(str(error), offset, position=error.position)
        return
    for entry in entries:
        name, last = f"{entry.producer_id}/{entry.epoch}", entry.last_offset
        if last >= offset:
            bad(f"its last offset {last} is not before the snapshot's own, {offset}", last, name)
            continue
        track = tracks.get(entry.producer_id)
        if track is None or not track.recent or not entry.batches or track.epoch != entry.epoch:
            continue
        if thinned and last > track.last_offset:
            continue
        if (last, entry.last_sequence) != (track.last_offset, track.recent[-1].last):
            what = (
                f"it has number {entry.last_sequence} at offset {last} as the producer's last, "
                f"the log has {track.recent[-1].last} at {track.last_offset}"
            )
            bad(what, track.last_offset, name)


COORDINATED_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
_HALF: Final = 2**30
_OPEN_GAPS: Final = 64
MAX_TRACKS: Final = 100_000
_COMPARED_PER_WINDOW: Final = 256
_RESEND: Final = "find the producer's log around that time; the records must be sent again"
_HARMLESS: Final = "deduplicate when reading, or look for retries without idempotence"


class SequenceCheck:
    """Checks sequences: pass it the windows of a partition in offset order; `finish` reports open gaps.

    `read_back` reads a batch again from its file, to compare records byte by byte. `counts` is False for topics
    whose batches carry a meaningless sequence.
    """

    def __init__(
        self,
        findings: Findings,
        *,
        compacted: bool,
        has_beginning: bool,
        read_back: Callable[[Sent], bytes],
        counts: bool = True,
    ) -> None:
        self.tracks: dict[int, ProducerTrack] = {}
        self.records_with_sequence = 0
        self.damaged: list[tuple[int, int]] = []
        """Stretches of offsets that cannot be read; filled by the scan."""
        self._findings = findings
        self._compacted = compacted
        self._has_beginning = has_beginning
        self._counts = counts
        self._read_back = read_back
        self._last_of: dict[tuple[int, int, int, int], tuple[int, Sent]] = {}
        self._compared = 0

    def window(self, run: CheckedRun, path: Path) -> None:
        table = run.table
        control = (table.attributes & CONTROL_BIT) != 0
        named = table.producer_id >= 0
        numbered = named & ~control & (table.base_sequence >= 0) & self._counts
        self.records_with_sequence += int(table.count[numbered].sum())
        self._compared = 0
        if not named.any():
            return
        rows = np.flatnonzero(named)
        rows = rows[np.argsort(table.producer_id[rows], kind="stable")]
        producers = table.producer_id[rows]
        cuts = np.flatnonzero(producers[1:] != producers[:-1]) + 1
        starts = np.concatenate(([0], cuts, [len(rows)]))
        columns = BatchRows(table.rows[rows], numbered[rows])
        for low, high in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            self._group(int(producers[low]), columns.where(slice(low, high)), run, path)
        if len(self.tracks) > MAX_TRACKS:
            self._forget_silent()

    def assume_compacted(self) -> None:
        """Note that the partition was compacted: gaps in the numbers, also earlier ones, prove nothing."""
        self._compacted = True
        self._findings.withdraw("missing", "order", "duplicate", "restart", "head")
        for track in self.tracks.values():
            track.gaps.clear()

    def finish(self) -> None:
        """End the log: numbers that were never found are missing."""
        for track in self.tracks.values():
            for gap in track.gaps:
                self._missing(track, gap)
            track.gaps.clear()

    def _forget_silent(self) -> None:
        """Drop the half of the producers that were idle longest; if one returns, its start is unknown."""
        by_silence = sorted(self.tracks.values(), key=lambda track: track.last_offset)
        for track in by_silence[: len(by_silence) // 2]:
            for gap in track.gaps:
                self._missing(track, gap)
            del self.tracks[track.producer_id]
        self._has_beginning = False

    # -- one producer in one window --------------------------------------------------------------

    def _group(self, producer_id: int, columns: BatchRows, run: CheckedRun, path: Path) -> None:
        track = self.tracks.get(producer_id)
        if track is not None and (columns.epoch == track.epoch).all():
            columns = columns.where(columns.numbered)  # markers of the same epoch change nothing
        sound = 0
        if track is not None and not track.gaps and track.since_change >= CACHED_BATCHES:
            sound = self._leading_sound(track, columns)
            if sound:
                self._advance(track, columns, sound, run, path)
        for row in range(sound, len(columns)):
            track = self._step(track, producer_id, columns, row, run, path)
        if track is not None:
            self._remember(track)

    def _leading_sound(self, track: ProducerTrack, columns: BatchRows) -> int:
        """Return how many batches from the first on continue the producer's numbers in its epoch."""
        previous = np.concatenate(([track.last], columns.last[:-1]))
        follows = columns.numbered & (columns.epoch == track.epoch)
        if not self._compacted:
            follows &= columns.first == (previous + 1) % MODULO
        return len(columns) if follows.all() else int(follows.argmin())

    def _advance(
        self, track: ProducerTrack, columns: BatchRows, count: int, run: CheckedRun, path: Path
    ) -> None:
        track.last = int(columns.last[count - 1])
        for row in range(max(0, count - CACHED_BATCHES), count):
            track.recent.append(columns.sent(row, run, path))

    def _step(
        self,
        track: ProducerTrack | None,
        producer_id: int,
        columns: BatchRows,
        row: int,
        run: CheckedRun,
        path: Path,
    ) -> ProducerTrack:
        sent = columns.sent(row, run, path)
        epoch = int(columns.epoch[row])
        is_new = track is None
        if track is None:
            track = self.tracks[producer_id] = ProducerTrack(producer_id, epoch, -1)
        if epoch < track.epoch:
            self._tell(
                "epoch",
                sent,
                f"{producer_id}/{epoch}",
                f"producer epoch {epoch} behind epoch {track.epoch}: a fenced producer's records were let in",
                "find out which process used the old epoch; readers should not trust these records",
                Severity.FAULT,
            )
            return track
        if epoch > track.epoch:
            self._bump(track, epoch)
        if not columns.numbered[row]:
            return track
        if track.fresh:
            self._begin(track, sent)
        elif not self._compacted and not self._follows(track, sent):
            return track
        if track.since_change < CACHED_BATCHES:
            self._compare(
                track, sent, run, "new producer" if is_new or not track.before_bump else "epoch bump"
            )
        track.fresh = False
        track.last = sent.last
        track.recent.append(sent)
        track.since_change += 1
        return track

    def _bump(self, track: ProducerTrack, epoch: int) -> None:
        for gap in track.gaps:  # numbers of the old epoch cannot arrive any more
            self._missing(track, gap)
        track.gaps.clear()
        track.before_bump = tuple(track.recent)
        track.recent.clear()
        track.epoch, track.last, track.since_change, track.fresh = epoch, -1, 0, True

    def _begin(self, track: ProducerTrack, sent: Sent) -> None:
        """Check the first numbered batch of a producer or of an epoch."""
        if sent.first == 0 or self._compacted:
            return
        if self._has_beginning or track.before_bump:
            self._open_gap(track, 0, sent, f"epoch {track.epoch} begins with {sent.first}, not 0")
            return
        self._tell(
            "head",
            sent,
            track.name,
            f"the producer's numbers begin with {sent.first}: earlier ones aged out before the log's start",
            "nothing to do; what came before cannot be checked any more",
        )

    def _follows(self, track: ProducerTrack, sent: Sent) -> bool:
        """Check a batch of the current epoch; return False when the track must not advance to it."""
        expected = (track.last + 1) % MODULO
        if sent.first == expected:
            return True
        ahead = (sent.first - expected) % MODULO
        if ahead < _HALF and not (sent.first == 0 and expected != 0):
            self._open_gap(track, expected, sent, f"number {sent.first} follows {track.last}")
            return True
        if self._fills_gap(track, sent):
            return False
        repeats = next(
            (old for old in track.recent if (old.first, old.last) == (sent.first, sent.last)), None
        )
        if repeats is None and sent.first == 0:
            self._tell(
                "restart",
                sent,
                track.name,
                f"the producer begins with number 0 again after {track.last}, within epoch {track.epoch}",
                "nothing to do: old clients restart so when the broker has forgotten them",
            )
            return True
        where = (
            f"first at offset {repeats.offset}"
            if repeats is not None
            else f"numbers up to {track.last} were seen"
        )
        self._tell(
            "duplicate",
            sent,
            track.name,
            f"{sent.records} records, numbers {sent.first} to {sent.last}, again ({where}); cause same epoch",
            _HARMLESS,
        )
        return (sent.last - expected) % MODULO < _HALF  # an overlap still brings new numbers

    def _open_gap(self, track: ProducerTrack, expected: int, sent: Sent, because: str) -> None:
        count = (sent.first - expected) % MODULO
        after = track.recent[-1].last_offset if track.recent else -1
        track.gaps.append(Gap(expected, count, sent.path, sent.position, sent.offset, after, because))
        if len(track.gaps) > _OPEN_GAPS:
            self._missing(track, track.gaps.pop(0))

    def _fills_gap(self, track: ProducerTrack, sent: Sent) -> bool:
        for gap in track.gaps:
            into = (sent.first - gap.first) % MODULO
            if into >= gap.count:
                continue
            self._tell(
                "order",
                sent,
                track.name,
                f"numbers {sent.first} to {sent.last} stand behind offset {gap.offset}, sent after them",
                "order by the producer's numbers when reading; the records are all here",
                Severity.FAULT,
            )
            track.gaps.remove(gap)
            found = min((sent.last - sent.first) % MODULO + 1, gap.count - into)
            for first, count in ((gap.first, into), (gap.first + into + found, gap.count - into - found)):
                if count > 0:
                    track.gaps.append(
                        Gap(first % MODULO, count, gap.path, gap.position, gap.offset, gap.after, gap.because)
                    )
            return True
        return False

    def _tell(
        self,
        kind: str,
        sent: Sent,
        producer: str,
        message: str,
        remedy: str,
        severity: Severity = Severity.NOTICE,
    ) -> None:
        self._findings.add(
            kind,
            sent.path,
            message,
            remedy,
            severity=severity,
            position=sent.position,
            offset=sent.offset,
            producer=producer,
        )

    def _missing(self, track: ProducerTrack, gap: Gap) -> None:
        last = (gap.first + gap.count - 1) % MODULO
        hidden = any(gap.after < following and first < gap.offset for first, following in self.damaged)
        self._findings.add(
            "missing",
            gap.path,
            f"{gap.count} records, numbers {gap.first} to {last}, are not in the log: {gap.because}"
            + (" (damaged bytes lie between)" if hidden else ""),
            _RESEND,
            severity=Severity.WARNING if hidden else Severity.FAULT,
            position=gap.position,
            offset=gap.offset,
            producer=track.name,
        )

    # -- duplicates under another epoch or producer ----------------------------------------------

    def _compare(self, track: ProducerTrack, sent: Sent, run: CheckedRun, cause: str) -> None:
        """Report a batch near a change of epoch or producer that repeats one from just before the change."""
        if self._compared >= _COMPARED_PER_WINDOW or sent.records == 0:
            return
        candidates = [old for old in track.before_bump if old.likeness == sent.likeness]
        if cause == "new producer" and not candidates:
            self._compared += 1
            candidates = self._alike_elsewhere(track, sent, run)
        for old in candidates:
            if self._records(old) == self._records(sent):
                self._tell(
                    "duplicate",
                    sent,
                    track.name,
                    f"{sent.records} records of offset {old.offset} again, same timestamps; cause {cause}",
                    _HARMLESS,
                )
                return

    def _alike_elsewhere(self, track: ProducerTrack, sent: Sent, run: CheckedRun) -> list[Sent]:
        remembered = self._last_of.get(sent.likeness)
        found = [remembered[1]] if remembered is not None and remembered[0] != track.producer_id else []
        table = run.table
        alike = np.flatnonzero(
            (table.base_timestamp == sent.base_timestamp)
            & (table.max_timestamp == sent.max_timestamp)
            & (table.count == sent.records)
            & (table.size == sent.size)
            & (table.producer_id >= 0)
            & (table.producer_id != track.producer_id)
            & (table.position + run.position < sent.position)
        )
        rows = alike[-CACHED_BATCHES:]
        columns = BatchRows(table.rows[rows], table.base_sequence[rows] >= 0)
        return found + [columns.sent(row, run, sent.path) for row in range(len(rows))]

    def _remember(self, track: ProducerTrack) -> None:
        for sent in track.recent:
            self._last_of[sent.likeness] = (track.producer_id, sent)
        while len(self._last_of) > 65536:
            self._last_of.pop(next(iter(self._last_of)))

    def _records(self, sent: Sent) -> bytes:
        return self._read_back(sent)[HEADER_SIZE:]
