"""An ingest that dies at every moment of its life and is made again: what it reports is the version's, as if nothing
had died. No Spark in here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from push_kit import order_of, part_of, push_here, rows, sorted_batches

from backend_faults import BackendRecorder, DieAt, WatchedBackend
from tidegate.clock import ManualClock, SystemClock
from tidegate.errors import CorruptError
from tidegate.integrity import Sender
from tidegate.integrity.audit import audit
from tidegate.log.log import Log
from tidegate.spark.push.sending import send_partition
from tidegate.storage import StorageConfig
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.tables.commits import DEFAULT_TTL_MS
from tidegate.tables.ingest.materializer import kept_checkpoints
from tidegate.tables.queries import all_rows
from tidegate.tables.snapshot import EARLIEST, PartitionState
from tidegate.tables.versions import ingest
from tidegate.tables.versions.catalog import State, TableVersion
from tidegate.tables.versions.ingest import Ingested, IngestSettings, ingest_partition
from tidegate.tables.versions.push import VersionPush
from tidegate.tables.versions.reader import view_version
from tidegate.testing.faults import SimulatedCrash

GIVEN = rows(120)


@pytest.fixture(autouse=True)
def _many_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "READ_BYTES", 2048)


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TableVersion]:
    """A version of one partition with repeats in the middle of it, and a stranger's records behind its end."""
    folder = tmp_path_factory.mktemp("pushed")

    def die(push: VersionPush) -> None:
        with pytest.raises(ConnectionAbortedError):
            batches = part_of(sorted_batches(GIVEN, 0, 1, size=20), 4)
            send_partition(order_of(push), 0, 77, batches, clock=SystemClock())

    def go_on(push: VersionPush) -> None:
        with Log(folder / "log") as log, Sender(log.writer(push.version.topic), partitions=1) as stranger:
            stranger.write(pa.table({"key": [b"late"], "value": [b"x"]}), partition=0)

    report = push_here(folder, GIVEN, partitions=1, touch={"started": die, "ended": go_on})
    return folder / "log", report.version


class Lives:
    """One partition, ingested by processes of which each dies but the last; time passes between them."""

    def __init__(self, log: Log, version: TableVersion, backend: StorageBackend | None = None) -> None:
        self.backend = backend or MemoryBackend()
        self._log, self._version, self._clock = log, version, ManualClock(1_800_000_000_000)

    def live(self, watch: DieAt | BackendRecorder | None = None) -> Ingested:
        self._clock.advance(DEFAULT_TTL_MS + 1)  # whoever died left a lease behind
        backend = self.backend if watch is None else WatchedBackend(self.backend, watch)
        storage = StorageConfig(max_tasks=1, retained_checkpoints=kept_checkpoints())
        settings = IngestSettings(commit_bytes=1, storage=storage)
        return ingest_partition(self._log, backend, self._version, 0, settings=settings, clock=self._clock)


@pytest.fixture
def opened(pushed: tuple[Path, TableVersion]) -> Iterator[tuple[Log, TableVersion]]:
    with Log(pushed[0], read_only=True) as log:
        yield log, pushed[1]


def test_what_is_counted_is_what_an_audit_counts(
    pushed: tuple[Path, TableVersion], opened: tuple[Log, TableVersion]
) -> None:
    found = Lives(*opened).live()
    report = audit(opened[1].topic, log=pushed[0]).metadata
    assert report is not None and found.fault is None
    counted = {each.label: count for each, count in report.partitions[0].total.verdicts.items() if count}
    assert found.result.verdicts == {**counted, "unexpected": 1}
    assert counted["duplicate"] > 60 and found.result.records == 120


def test_wherever_it_dies_the_totals_are_the_versions(opened: tuple[Log, TableVersion]) -> None:
    undisturbed, recorder = Lives(*opened), BackendRecorder()
    wanted = undisturbed.live(recorder)
    commits = [name for name in recorder.of("publish") if name.endswith("/commits")]
    assert wanted.result.is_complete and len(commits) > 6
    for moment in range(1, recorder.moments + 1):
        lives, death = Lives(*opened), DieAt(moment)
        with pytest.raises(SimulatedCrash):
            lives.live(death)
        assert lives.live() == wanted, death.died_at
        assert lives.live() == wanted, "and when it is made once more, though nothing is left to do"


def test_a_life_for_every_commit_comes_to_the_same(opened: tuple[Log, TableVersion]) -> None:
    wanted, lives, deaths = Lives(*opened).live(), Lives(*opened), 0
    done: Ingested | None = None
    while done is None and deaths < 30:
        try:
            done = lives.live(DieAt(12))  # right behind its first commit that has rows
        except SimulatedCrash:
            deaths += 1
    assert done == wanted and deaths > 3


def test_a_commit_without_counts_is_read_and_not_gone_on_from(
    opened: tuple[Log, TableVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was written before there were counts: readers do not miss them, an ingest would report too few."""
    lives, encode = Lives(*opened), PartitionState.encode_progress

    def with_eight_fields(state: PartitionState) -> bytes:
        return msgspec.msgpack.encode(msgspec.msgpack.decode(encode(state))[:8])

    with monkeypatch.context() as before:
        before.setattr(PartitionState, "encode_progress", with_eight_fields)
        lives.live()
    view = view_version(lives.backend, opened[1])
    assert sum(batch.num_rows for batch in all_rows(view.source, EARLIEST, batch_rows=1 << 16)) == 120
    view.close()
    with pytest.raises(CorruptError, match=r"by another release.*push again"):
        lives.live()


def test_the_bytes_of_a_progress_are_these() -> None:
    state = PartitionState(
        TableVersion(1, "users_v1", "p", State.READY, 1, "String()", "String()").shape(0), 0
    )
    state.next_offset, state.counts.applied, state.drainer = 7, 3, b"drained"
    state.verdicts = {"ok": 6, "duplicate": 1}
    assert state.encode_progress() == GOLDEN
    for stored in (GOLDEN, BEFORE):
        again = PartitionState(state.shape, 0)
        again.restore_progress(stored)
        assert (again.next_offset, again.verdicts, again.counts) == (7, state.verdicts, state.counts)


GOLDEN = bytes.fromhex(
    "990207ffffc407647261696e65648ba76170706c69656403a764656c6574656400a96e756c6c5f6b65797300a86261645f6b6579"
    "7300aa6261645f76616c75657300a76578706972656400a8726570656174656400af736b69707065645f6f66667365747300b06c"
    "6574746572735f6e6f745f6b65707400a666656e63656400a66661756c74790080c40082a26f6b06a96475706c696361746501"
)
BEFORE = bytes.fromhex(  # without the count of faulty records
    "990207ffffc407647261696e65648aa76170706c69656403a764656c6574656400a96e756c6c5f6b65797300a8626164"
    "5f6b65797300aa6261645f76616c75657300a76578706972656400a8726570656174656400af736b69707065645f6f66"
    "667365747300b06c6574746572735f6e6f745f6b65707400a666656e6365640080c40082a26f6b06a96475706c696361"
    "746501"
)
