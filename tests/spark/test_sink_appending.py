"""Rows into a topic once: whatever dies where, a batch that comes again is in the topic exactly once, in order."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from push_kit import stamps

from tidegate.clock import ManualClock
from tidegate.errors import ConflictError, CorruptError, InvalidError, UnavailableError
from tidegate.files import Files
from tidegate.integrity import audit_topic, without_control
from tidegate.integrity.header import FINAL, ControlType
from tidegate.integrity.verdicts import Verdict
from tidegate.log.format.records import HEADERS_TYPE
from tidegate.log.log import Log
from tidegate.randomness import SeededRandomness
from tidegate.spark.sink.appending import append_batch
from tidegate.spark.sink.columns import COLUMNS, check_names
from tidegate.spark.sink.options import NAMES, SinkOptions
from tidegate.spark.sink.outbox import Attempt, Outbox
from tidegate.spark.sink.rows import RowShaper
from tidegate.testing.faults import CrashAt, EffectCounter, FailAt, count_effects, dying_process

TOPIC = "t"


def table(first: int, last: int) -> pa.RecordBatch:
    """Rows first…last−1; every third has no key, every fifth its own partition."""
    numbers = range(first, last)
    return pa.record_batch(
        {
            "key": pa.array([None if n % 3 == 0 else f"k{n}" for n in numbers], pa.string()),
            "value": pa.array([f"v{n}" for n in numbers]),
            "timestamp": pa.array([1000 + n for n in numbers], pa.timestamp("us", tz="UTC")),
            "partition": pa.array([1 if n % 5 == 0 else None for n in numbers], pa.int32()),
        }
    )


@pytest.fixture
def options(tmp_path: Path) -> SinkOptions:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic(TOPIC, partitions=2)
    return SinkOptions.parse({"log": str(tmp_path / "log"), "topic": TOPIC, "lockTimeout": "0ms"})


def outbox_of(options: SinkOptions, files: Files | None = None) -> Outbox:
    return Outbox(options.outbox / TOPIC / "query-1", files=files)


def attempt(outbox: Outbox, batch: int, task: int, rows: pa.RecordBatch, unique: str = "a") -> Attempt:
    shaper = RowShaper(TOPIC, 2, task=task, largest_bytes=1 << 20)
    return outbox.write(batch, task, unique, shaper.shaped(iter([rows])), lambda: shaper.partitions)


def append(
    options: SinkOptions, outbox: Outbox, batch: int, attempts: list[Attempt], *, last: bool = False
) -> int:
    return append_batch(
        options, outbox, batch, attempts, last=last, clock=ManualClock(5000), randomness=SeededRandomness(7)
    )


def values(options: SinkOptions) -> dict[int, list[str]]:
    """What is in the topic, by partition, in order; the audit finds nothing to say about it."""
    with Log(options.log, read_only=True) as log:
        report = audit_topic(log, TOPIC)
        assert report.faults == sum(part.total.verdicts[Verdict.DUPLICATE] for part in report.partitions) == 0
        found: dict[int, list[str]] = {0: [], 1: []}
        with log.reader(TOPIC, control_records=True) as reader:
            for batch in reader:
                for row in without_control(batch).to_pylist():
                    found[row["partition"]].append(row["value"].decode())
    return found


BATCHES = [[(0, 0, 40), (1, 40, 70)], [(0, 70, 100)]]
"""Two micro-batches: the first of two tasks, the second of one; (task, first row, last row)."""


def written(outbox: Outbox, batch: int, unique: str = "a") -> list[Attempt]:
    return [attempt(outbox, batch, task, table(first, last), unique) for task, first, last in BATCHES[batch]]


@pytest.fixture
def expected(options: SinkOptions, tmp_path: Path) -> Iterator[dict[int, list[str]]]:
    """What an undisturbed run leaves, elsewhere."""
    with Log(tmp_path / "undisturbed", durability="os") as log:
        log.create_topic(TOPIC, partitions=2)
    other = SinkOptions.parse({"log": str(tmp_path / "undisturbed"), "topic": TOPIC})
    outbox = outbox_of(other)
    for batch in (0, 1):
        append(other, outbox, batch, written(outbox, batch), last=batch == 1)
    yield values(other)


def test_rows_arrive_in_order_typed_and_numbered(
    options: SinkOptions, expected: dict[int, list[str]]
) -> None:
    assert sorted(value for rows in expected.values() for value in rows) == sorted(
        f"v{n}" for n in range(100)
    )
    for rows in expected.values():
        assert [int(value[1:]) for value in rows] == sorted(int(value[1:]) for value in rows)
    assert all(f"v{n}" in expected[1] for n in range(0, 100, 5))


def test_a_batch_that_comes_again_adds_nothing(options: SinkOptions, expected: dict[int, list[str]]) -> None:
    outbox = outbox_of(options)
    assert append(options, outbox, 0, written(outbox, 0)) == 70
    assert append(options, outbox, 0, written(outbox, 0, "again")) == 0
    assert append(options, outbox, 1, written(outbox, 1), last=True) == 30
    assert append(options, outbox, 0, written(outbox, 0, "late")) == 0
    assert append(options, outbox, 1, written(outbox, 1, "late"), last=True) == 0
    assert values(options) == expected
    assert sorted(path.name for path in outbox.folder.iterdir()) == ["lock", "progress"]


def test_files_of_attempts_that_lost_are_not_appended_and_go(
    options: SinkOptions, expected: dict[int, list[str]]
) -> None:
    outbox = outbox_of(options)
    attempt(outbox, 0, 0, table(0, 40), "speculative")
    attempt(outbox, 0, 1, table(500, 600), "died half way")
    for batch in (0, 1):
        append(options, outbox, batch, written(outbox, batch), last=batch == 1)
    assert values(options) == expected
    assert sorted(path.name for path in outbox.folder.iterdir()) == ["lock", "progress"]


def test_an_empty_batch_leaves_no_trace(options: SinkOptions) -> None:
    outbox = outbox_of(options)
    assert append(options, outbox, 0, [attempt(outbox, 0, 0, table(0, 0))]) == 0
    assert not options.outbox.exists()


def second_batch(options: SinkOptions, files: Files) -> None:
    outbox = outbox_of(options, files)
    append(options, outbox, 1, written(outbox, 1), last=True)


@pytest.fixture
def begun(options: SinkOptions, tmp_path: Path) -> Path:
    """The log and the outbox after the first batch."""
    outbox = outbox_of(options)
    append(options, outbox, 0, written(outbox, 0))
    for name in ("log", "log.outbox"):
        shutil.copytree(tmp_path / name, tmp_path / "begun" / name)
    return tmp_path / "begun"


def restored(begun: Path, options: SinkOptions) -> None:
    for name in ("log", "log.outbox"):
        shutil.rmtree(begun.parent / name)
        shutil.copytree(begun / name, begun.parent / name)


def deaths(options: SinkOptions) -> Iterator[int]:
    """Every effect on rows, plan and progress; of those that only open and close the log, every fifth."""
    counter = EffectCounter()
    second_batch(options, Files(counter))
    housekeeping = (".seal", ".snapshot", "checkpoint", "tidegate.closed", "cleanshutdown", "index")
    for number, name in enumerate(counter.names, 1):
        if number % 5 == 0 or not any(part in name for part in housekeeping):
            yield number


def test_a_death_at_every_file_effect_and_a_repeat_leave_what_an_undisturbed_run_leaves(
    options: SinkOptions, begun: Path, expected: dict[int, list[str]]
) -> None:
    numbers = list(deaths(options))
    assert len(numbers) > 30
    for number in numbers:
        restored(begun, options)
        with dying_process(CrashAt(number, torn_bytes=number % 7)) as files:
            second_batch(options, files)
        outbox = outbox_of(options)
        append(options, outbox, 1, written(outbox, 1, f"repeat-{number}"), last=True)
        assert values(options) == expected, f"after a death at effect {number}"


def test_a_commit_that_fails_and_is_repeated_leaves_what_an_undisturbed_run_leaves(
    options: SinkOptions, begun: Path, expected: dict[int, list[str]]
) -> None:
    effects = count_effects(lambda files: second_batch(options, files))
    failed = 0
    for number in range(1, effects + 1, 9):
        restored(begun, options)
        try:
            second_batch(options, Files(FailAt(number)))
        except (UnavailableError, CorruptError):
            failed += 1
        outbox = outbox_of(options)
        append(options, outbox, 1, written(outbox, 1, f"repeat-{number}"), last=True)
        assert values(options) == expected, f"after a failure of effect {number}"
    assert failed > 3


def test_other_writers_between_death_and_repeat_do_not_matter(options: SinkOptions, begun: Path) -> None:
    effects = count_effects(lambda files: second_batch(options, files))
    for number in range(3, effects + 1, 11):
        restored(begun, options)
        with dying_process(CrashAt(number)) as files:
            second_batch(options, files)
        with Log(options.log) as log, log.writer(TOPIC, integrity=True) as other:
            other.write(
                pa.table(
                    {"key": ["x", "y"], "value": ["other"] * 2, "partition": pa.array([0, 1], pa.int32())}
                )
            )
        outbox = outbox_of(options)
        append(options, outbox, 1, written(outbox, 1, f"repeat-{number}"), last=True)
        found = [value for rows in values(options).values() for value in rows if value != "other"]
        assert sorted(found) == sorted(f"v{n}" for n in range(100))


def test_an_outbox_that_was_deleted_begins_as_a_new_sender(options: SinkOptions) -> None:
    """Numbers of other rows are never repeated: validators would take them for duplicates."""
    outbox = outbox_of(options)
    append(options, outbox, 0, written(outbox, 0))
    shutil.rmtree(outbox.folder)
    rows = [attempt(outbox, 1, 0, table(70, 100))]
    append_batch(options, outbox, 1, rows, clock=ManualClock(6000), randomness=SeededRandomness(8))
    found = values(options)
    assert sorted(value for each in found.values() for value in each) == sorted(f"v{n}" for n in range(100))


def again(options: SinkOptions, outbox: Outbox, batch: int, unique: str) -> int:
    """With other chances: a new sender would be another one."""
    attempts = written(outbox, batch, unique)
    return append_batch(
        options, outbox, batch, attempts, clock=ManualClock(6000), randomness=SeededRandomness(8)
    )


@pytest.mark.parametrize("begun_before", [False, True])
def test_a_topic_made_anew_gets_a_new_sender(options: SinkOptions, begun_before: bool) -> None:
    """Its records would begin in the middle of a chain, and validators would miss the head."""
    outbox = outbox_of(options)
    append(options, outbox, 0, written(outbox, 0))
    with Log(options.log) as log:
        if begun_before:
            log.partition(TOPIC, 1)
            with pytest.raises(ConflictError):
                append(options, outbox, 1, written(outbox, 1))
        log.delete_topic(TOPIC)
        log.create_topic(TOPIC, partitions=2)
    again(options, outbox, 1, "again")
    assert sorted(value for each in values(options).values() for value in each) == [
        f"v{n}" for n in range(70, 100)
    ]


@pytest.mark.parametrize("row", ["DIV-37+DIV-39"])
def test_chains_end_by_time_between_batches_and_go_on_behind_an_end(row: str, options: SinkOptions) -> None:
    outbox = outbox_of(options)
    # the limit is five minutes; the fourth batch ends the stream, and the fifth comes all the same
    for batch, (now_ms, last) in enumerate(
        [(0, False), (300_000, False), (300_001, False), (600_000, True), (600_001, False)]
    ):
        rows = pa.record_batch({"value": [f"v{batch}"], "partition": pa.array([0], pa.int32())})
        attempts = [attempt(outbox, batch, 0, rows)]
        clock = ManualClock(5000 + now_ms)
        append_batch(options, outbox, batch, attempts, last=last, clock=clock, randomness=SeededRandomness(7))
    found = stamps(Path(options.log), TOPIC, 0)
    assert len({(int(each["guid_high"]), int(each["guid_low"])) for each in found}) == 1
    ends = found[found["control"] == ControlType.END_OF_CHAIN]
    assert ends["chain"].tolist() == [0, 1], "by time; by the end of the stream"
    assert (ends["flags"] & FINAL).tolist() == [0, FINAL]
    assert [len(found[found["chain"] == number]) for number in range(3)] == [4, 4, 2]
    for number in range(3):
        chain = found[found["chain"] == number]
        assert chain["sequence"].tolist() == list(range(len(chain)))
        assert chain["control"][0] == ControlType.START_OF_CHAIN
    assert values(options)[0] == [f"v{batch}" for batch in range(5)]


def test_another_kind_of_checksum_gets_a_new_sender(
    options: SinkOptions, expected: dict[int, list[str]]
) -> None:
    outbox = outbox_of(options)
    append(options, outbox, 0, written(outbox, 0))
    again(replace(options, checksum="none"), outbox, 1, "again")
    assert values(options) == expected


def test_another_writer_of_the_partition_is_waited_for_and_then_named(options: SinkOptions) -> None:
    outbox = outbox_of(options)
    with Log(options.log) as log:
        log.partition(TOPIC, 0)
        with pytest.raises(ConflictError, match="t-0 is being written"):
            append(options, outbox, 0, written(outbox, 0))
    assert append(options, outbox, 0, written(outbox, 0, "again")) == 70


@pytest.mark.parametrize("harm", ["cut", "flip", "gone"])
def test_a_waiting_file_that_is_damaged_is_told_and_not_appended(options: SinkOptions, harm: str) -> None:
    outbox = outbox_of(options)
    (first, second) = written(outbox, 0)
    path = outbox.folder / second.name
    content = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(
            content[:-9] if harm == "cut" else content[:50] + bytes([content[50] ^ 1]) + content[51:]
        )
    with pytest.raises(CorruptError, match=second.name):
        append(options, outbox, 0, [first, second])
    path.write_bytes(content)
    append(options, outbox, 0, [first, second])
    assert sum(map(len, values(options).values())) == 70


@pytest.mark.parametrize("name", ["progress", "plan-1"])
def test_a_damaged_record_stops_instead_of_being_believed(options: SinkOptions, name: str) -> None:
    outbox = outbox_of(options)
    append(options, outbox, 0, written(outbox, 0))
    (outbox.folder / name).write_bytes(b"{}\ncrc32c:00000000\n")
    with pytest.raises(CorruptError, match=name):
        append(options, outbox, 1, written(outbox, 1))


# -- rows ------------------------------------------------------------------------------------------


def shaped(rows: dict[str, pa.Array], largest: int | None = 1000) -> list[dict[str, object]]:
    shaper = RowShaper(TOPIC, 2, task=0, largest_bytes=largest)
    return [row for batch in shaper.shaped(iter([pa.record_batch(rows)])) for row in batch.to_pylist()]


def test_columns_that_are_no_part_of_a_record_are_named() -> None:
    with pytest.raises(InvalidError, match=r"\.drop\('topic', 'offset'\)"):
        check_names(["topic", "offset", "value"])
    with pytest.raises(InvalidError, match="value is missing"):
        check_names(["key"])
    check_names(["headers", "value", "timestamp", "partition", "key"])


def test_what_the_topic_would_refuse_is_refused_by_the_task() -> None:
    with pytest.raises(InvalidError, match="reserved"):
        shaped({"key": pa.array([b"\x00DIV\x00" + bytes(28)]), "value": pa.array([b""])})
    with pytest.raises(InvalidError, match=r"max\.message\.bytes"):
        shaped({"value": pa.array([b"x" * 990])})
    headers = pa.array([[{"key": "h", "value": b"x" * 800}]])
    with pytest.raises(InvalidError, match=r"max\.message\.bytes"):
        shaped({"value": pa.array([b""]), "headers": headers})
    with pytest.raises(InvalidError, match="no partition 2"):
        shaped({"value": pa.array([b""]), "partition": pa.array([2], pa.int32())})
    with pytest.raises(InvalidError, match="before 1970"):
        shaped({"value": pa.array([b""]), "timestamp": pa.array([-5000], pa.timestamp("us", tz="UTC"))})


def test_null_values_and_headers_are_kept() -> None:
    headers = pa.array([[{"key": "h", "value": None}], None], HEADERS_TYPE)
    rows = shaped(
        {"key": pa.array(["a", "a"]), "value": pa.array([None, ""], pa.string()), "headers": headers}
    )
    assert [row["value"] for row in rows] == [None, b""]
    assert [row["headers"] for row in rows] == [[{"key": "h", "value": None}], None]
    assert rows[0]["partition"] == rows[1]["partition"]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"topic": ""}, "option topic is missing"),
        ({"log": "kafka://h:1"}, "option outbox is missing"),
        ({"writeId": "../up"}, "writeId"),
        ({"checksum": "md5"}, "none of"),
        ({"colour": "red"}, "no option 'colour'"),
        ({"lockTimeout": "soon"}, "duration"),
    ],
)
def test_options_that_are_wrong_are_said(wrong: dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidError, match=complaint):
        SinkOptions.parse({"log": "l", "topic": TOPIC} | wrong)


def test_the_page_of_the_sink_names_every_option_and_column() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "spark-sink.md").read_text()
    sparks_own = {"path", "queryName"}
    assert [name for name in (*NAMES, *COLUMNS) if name not in sparks_own and f"`{name}`" not in page] == []
