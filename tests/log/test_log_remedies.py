"""What errors of a log tell people to do is typed as it is written, and then the log can be used again."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from remedies import commands, named, spelled, typed
from tidegate.cli.main import run
from tidegate.clock import ManualClock
from tidegate.errors import ConflictError, CorruptError, InvalidError, TidegateError, UnavailableError
from tidegate.files import Files
from tidegate.log.format.batch import iter_headers
from tidegate.log.log import Log
from tidegate.log.watermark import WatermarkFile

RECORDS = 60


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands are typed in: without --log they mean ./data/log."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def folder(home: Path) -> Path:
    """A log of several log segments, closed cleanly."""
    path = home / "data" / "log"
    with Log(path) as log:
        log.create_topic(
            "t", config={"segment.bytes": "400", "index.interval.bytes": "100", "retention.ms": "-1"}
        )
        log.writer("t", batch_records=3).write(rows(0, RECORDS))
    return path


def rows(first: int, last: int) -> pa.Table:
    values = [b"%d" % number for number in range(first, last)]
    return pa.table({"key": values, "value": values, "timestamp": [1000 + n for n in range(first, last)]})


def stored(path: Path, start: int = 0) -> list[int]:
    with Log(path, read_only=True) as log, log.reader("t", start={0: start}) as reader:
        return [int(value) for value in reader.read_all().column("value").to_pylist()]


def looked_up(path: Path) -> list[int | None]:
    with Log(path, read_only=True) as log:
        return [log.offset_for_time("t", 0, 1000 + number) for number in range(0, RECORDS, 7)]


# -- topics that are not there -------------------------------------------------------------------


def test_a_topic_that_does_not_exist_is_listed_and_created(folder: Path) -> None:
    with Log(folder, read_only=True) as log, pytest.raises(InvalidError) as told:
        log.reader("payments")
    assert "payments" not in typed(told.value, "log.catalog.unknown_topic: topic list")
    typed(told.value, "log.catalog.unknown_topic: topic create")
    assert "payments" in typed(told.value, "log.catalog.unknown_topic: topic list")
    with Log(folder, read_only=True) as log, log.reader("payments") as reader:
        assert reader.read_all().num_rows == 0


def test_a_log_whose_topics_cannot_be_listed_is_created(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["topic", "list"]) == 2
    typed(InvalidError(capsys.readouterr().err), "cli.topic.list_topics: topic create")
    assert run(["topic", "list"]) == 0


def test_a_log_that_does_not_exist_is_created_with_a_topic(home: Path) -> None:
    with pytest.raises(InvalidError) as told, Log("./data/log", read_only=True) as log:
        log.reader("t")
    typed(told.value, "log.catalog.LogFolder.describe: topic create")
    assert stored(home / "data" / "log") == []


# -- damage --------------------------------------------------------------------------------------


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :]


def damages(path: Path) -> Iterator[tuple[Path, bytes]]:
    """Files with one damage each: bits of headers and records, files that are cut, swapped and zeroed."""
    segments = sorted((path / "t-0").glob("*.log"))
    for number, segment in enumerate(segments):
        content = segment.read_bytes()
        for position, header in iter_headers(content):
            for at in (7, 11, 16, 26, 41, 42, header.size - 2):
                yield segment, flipped(content, position + at)
        yield segment, content[:-7]
        yield segment, bytes(len(content))
        yield segment, segments[number - 1].read_bytes()


ACTIONS: dict[str, Callable[[Path], object]] = {
    "log.fetch.find_by_timestamp: verify": looked_up,
    "log.fetch._out_of_place: verify": looked_up,
    "log.batch_file._damaged: verify": stored,
    "log.reader._damage: verify": stored,
}


@pytest.mark.parametrize("place", ACTIONS)
def test_damage_is_looked_at_and_restored(folder: Path, place: str) -> None:
    sound = ACTIONS[place](folder)
    for path, damaged in damages(folder):
        content = path.read_bytes()
        path.write_bytes(damaged)
        try:
            ACTIONS[place](folder)
        except TidegateError as error:
            if commands(str(error)) and any(each.text.search(str(error)) for each in named()[place]):
                assert path.stem in typed(error, place, expect=1)
                path.write_bytes(content)
                typed(error, place)
                assert ACTIONS[place](folder) == sound
                return
        path.write_bytes(content)
    pytest.fail(f"no damage is told by {place}")


def test_a_log_that_is_only_read_for_its_damage_is_looked_at_restored_or_cut(
    folder: Path, home: Path
) -> None:
    segment = max((folder / "t-0").glob("*.log"))
    content = segment.read_bytes()
    (folder / "t-0" / "tidegate.closed").unlink()
    segment.write_bytes(flipped(content, len(content) - 3))
    copy = home / "copy"
    shutil.copytree(folder, copy)
    with Log(folder) as log, pytest.raises(CorruptError) as told:
        log.writer("t").write(rows(RECORDS, RECORDS + 1))
    assert segment.name in typed(told.value, "log.recovery.SafeRecovery.read_only: verify", expect=1)
    segment.write_bytes(content)
    with Log(folder) as log:
        log.writer("t").write(rows(RECORDS, RECORDS + 1))
    assert stored(folder) == list(range(RECORDS + 1))
    assert 'opening the log with recovery="kafka"' in str(told.value)
    with Log(copy, recovery="kafka") as log:
        log.writer("t").write(rows(RECORDS, RECORDS + 1))
    *kept, last = stored(copy)
    assert kept == list(range(len(kept))) and 0 < len(kept) < RECORDS and last == RECORDS


def test_files_that_are_gone_are_restored_or_given_up(folder: Path, home: Path) -> None:
    last = max((folder / "t-0").glob("*.log")).stem
    gone = {path: path.read_bytes() for path in (folder / "t-0").glob(f"{last}.*")}
    for path in [*gone, folder / "t-0" / "tidegate.closed"]:
        path.unlink()
    copy = home / "copy"
    shutil.copytree(folder, copy)
    with Log(folder) as log, pytest.raises(CorruptError, match=r'opening the log once with recovery="kafka"'):
        log.writer("t").write(rows(RECORDS, RECORDS + 1))
    for path, content in gone.items():
        path.write_bytes(content)
    with Log(folder) as log:
        log.writer("t").write(rows(RECORDS, RECORDS + 1))
    assert stored(folder) == list(range(RECORDS + 1))
    with Log(copy, recovery="kafka") as log:
        log.writer("t").write(rows(int(last), int(last) + 1))
    with Log(copy) as log:  # once is enough
        log.writer("t").write(rows(int(last) + 1, int(last) + 2))
    assert stored(copy) == list(range(int(last) + 2))


def test_a_batch_that_the_cleaner_finds_cut_off_is_restored_and_compacted(home: Path) -> None:
    path = home / "data" / "log"
    with Log(path) as log:
        settings = {"segment.bytes": "400", "cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}
        log.create_topic("t", config=settings)
        for _ in range(2):
            log.writer("t", batch_records=3).write(rows(0, RECORDS))
    place = "log.compaction.Cleaner._stretches: verify"
    segment = min((path / "t-0").glob("*.log"))
    content = segment.read_bytes()
    *_, (position, header) = iter_headers(content)
    segment.write_bytes(content[: position + 8] + (header.size + 88).to_bytes(4) + content[position + 12 :])
    told = cleaned(path)
    assert segment.name in typed(told, place, expect=1)
    segment.write_bytes(content)
    typed(told, place)
    assert "→" in cleaned(path)
    left = stored(path)
    assert set(left) == set(range(RECORDS)) and len(left) < 2 * RECORDS


def cleaned(path: Path) -> str:
    """What a pass of retention and compaction says."""
    import contextlib
    import io

    from tidegate.cli.main import run

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        run(["log", "clean", "t", "--log", str(path)])
    return said.getvalue()


# -- seals ---------------------------------------------------------------------------------------


def verified(path: Path, expect: int) -> list[dict[str, str]]:
    """The findings of an audit of the whole log."""
    done = subprocess.run(
        [sys.executable, "-m", "tidegate.cli.main", "verify", "--log", str(path), "--format", "json"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == expect, done.stderr
    return json.loads(done.stdout)["findings"]


def test_a_damaged_seal_is_made_anew(folder: Path) -> None:
    seal = min((folder / "t-0").glob("*.seal"))
    seal.write_bytes(flipped(seal.read_bytes(), 40))
    (found,) = verified(folder, 1)
    told = f"{found['message']}; {found['remedy']}"
    assert seal.stem in typed(told, "log.seals._unreadable: verify", expect=1)
    typed(told, "log.seals._unreadable: log reseal")
    assert verified(folder, 0) == []


def test_a_file_that_was_changed_on_purpose_is_accepted(folder: Path) -> None:
    min((folder / "t-0").glob("*.timeindex")).write_bytes(b"")
    (found,) = verified(folder, 1)
    typed(found["remedy"], "log.verify.verify.Audit._seals: log reseal")
    assert verified(folder, 0) == []
    assert stored(folder) == list(range(RECORDS))


def test_damage_that_is_not_sealed_is_looked_at_dumped_and_restored_or_insisted_on(folder: Path) -> None:
    segment = min((folder / "t-0").glob("*.log"))
    content = segment.read_bytes()
    segment.write_bytes(flipped(content, len(content) - 3))
    (corrupt,) = [each for each in verified(folder, 1) if each["kind"] == "corrupt"]
    assert "baseOffset: 0" in typed(corrupt["remedy"], "log.verify.scan.SegmentScan._report: log dump")
    (sealed,) = [each for each in verified(folder, 1) if each["kind"] == "seal"]
    place = "log.verify.verify.Audit._seals: log reseal"
    refused = typed(sealed["remedy"], place, expect=ConflictError.exit_code)
    assert segment.name in typed(refused, "cli.log._refuse_damage: verify", expect=1)
    assert "insist with --force" in refused
    segment.write_bytes(content)
    assert verified(folder, 0) == []
    segment.write_bytes(flipped(content, len(content) - 3))
    typed(sealed["remedy"], place, "--force")
    assert "seal" not in {each["kind"] for each in verified(folder, 1)}


# -- writers that died, and logs that nobody cleans ----------------------------------------------


def test_a_log_whose_writer_died_while_it_replaced_files_is_opened_once(folder: Path) -> None:
    middle = sorted((folder / "t-0").glob("*.log"))[2]
    mark = WatermarkFile(Files(), folder / "t-0")
    mark.begin_change()
    mark.close()
    (folder / "t-0" / "tidegate.closed").unlink()
    middle.rename(middle.with_name(middle.name + ".swap"))  # between two names
    with Log(folder, read_only=True, clock=ManualClock()) as log, pytest.raises(UnavailableError) as told:
        log.reader("t").read_all()
    typed(told.value, "log.partition_reader.PartitionView.fetch: log clean")
    assert stored(folder) == list(range(RECORDS))


@pytest.mark.parametrize(
    "place", ["log.lifetime.lifetime._UNATTENDED: log clean", "log.lifetime.lifetime._lifetime: log clean"]
)
def test_a_log_that_nobody_cleans_is_cleaned(home: Path, place: str) -> None:
    """The records are 50 years old: the first pass takes all of them that are in closed log segments."""
    path = home / "data" / "log"
    with Log(path) as log:
        log.create_topic("t", config={"segment.bytes": "400", "retention.ms": "600000"})
        log.writer("t", batch_records=3).write(rows(0, RECORDS))
    asked = (
        ["t"]
        if "_lifetime" in place  # of log segments that exist; the other of a workload
        else ["--record-bytes", "100", "--interval", "1s", "--checked-every", "never"]
    )
    told = subprocess.run(
        [sys.executable, "-m", "tidegate.cli.main", "log", "lifetime", *asked], capture_output=True, text=True
    )
    arguments = spelled(told.stdout + told.stderr, place)
    child = subprocess.Popen(
        [sys.executable, "-m", "tidegate.cli.main", *arguments, "--format", "jsonl"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["removed"] > 0
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=60) == 130
    finally:
        child.kill()
        child.communicate()
    with Log(path, read_only=True) as log:
        assert log.reader("t").positions()[0] > 0
