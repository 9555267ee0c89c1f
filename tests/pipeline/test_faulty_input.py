"""Apps over input with faults, as their users meet them: what counts, what is told, what stops, what is forgotten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.main import run
from tidegate.clock import ManualClock
from tidegate.integrity import Push, sorted_sender
from tidegate.integrity.fault_injection import DamageKind, break_topic
from tidegate.integrity.state import Manifest, decode_state
from tidegate.pipeline import dead_letters
from tidegate.pipeline.checkpoint import Records
from tidegate.storage import open_backend

TEN = 1_767_261_600_000
AMOUNTS = [float(2**number) for number in range(12)]  # every subset has a sum of its own


def table_of(amounts: list[float]) -> pa.Table:
    return pa.table(
        {
            "key": ["ann"] * len(amounts),
            "value": [json.dumps({"amount": amount}) for amount in amounts],
            "timestamp": [TEN + row for row in range(len(amounts))],
        }
    )


def written(folder: Path, amounts: list[float] = AMOUNTS) -> None:
    with tg.Log(folder) as log:
        log.create_topic("orders", 1)
        with log.writer("orders", integrity=True) as sender:
            sender.write(table_of(amounts))


def pushed(folder: Path) -> None:
    """A push of all amounts, with its manifest, and an ordinary writer after it."""
    with tg.Log(folder) as log:
        log.create_topic("orders", 1)
        driver, writer = log.writer("orders", integrity=True), log.writer("orders")
        push = Push(driver)
        push.start()
        sender = sorted_sender(
            writer, push="one", partition=0, attempt=0, started_ms=log.clock.now_ms(), clock=log.clock
        )
        sender.write(table_of(AMOUNTS), partition=0)
        sender.close()
        push.end({number: Manifest.of([sent]) for number, sent in sender.sent().items()})
        driver.close()


def data_offsets(folder: Path) -> list[int]:
    with tg.Log(folder, read_only=True) as log:
        return [
            offset
            for batch in log.reader("orders")
            for offset, value in zip(
                batch.column("offset").to_pylist(), batch.column("value").to_pylist(), strict=True
            )
            if value
        ]


def flipped(folder: Path, offset: int, into: Path) -> None:
    """A copy in which the amount of one record is another one, and everything else as it was."""
    with tg.Log(folder, read_only=True) as log, tg.Log(into) as copy:
        copy.create_topic("orders", 1)
        for batch in log.reader("orders", control_records=True):
            values = batch.column("value").to_pylist()
            for row, at in enumerate(batch.column("offset").to_pylist()):
                if at == offset:
                    values[row] = json.dumps({"amount": 1e6}).encode()
            columns = {name: batch.column(name) for name in ("key", "timestamp", "headers")}
            copy.writer("orders").write(
                pa.table({**columns, "value": pa.array(values, pa.binary())}), partition=0
            )


def without(folder: Path, offset: int, into: Path) -> None:
    with tg.Log(folder, read_only=True) as log:
        break_topic(log, "orders", DamageKind.DROP, into=into, partition=0, offset=offset, count=1)


def app_over(folder: Path, **validate: Any) -> tg.App:
    app = tg.App("shop", data=folder)
    stream = app.stream("orders", value=tg.Json(amount="double"))
    if validate.pop("checked", True):
        stream = stream.validate(**validate)
    stream.window(tg.Tumbling("1h", retention="1d")).agg(revenue=tg.sum("amount")).to_table("revenue")
    return app


def revenue(app: tg.App) -> float:
    with app.open_table("revenue") as table:
        return sum(row.value["revenue"] for row in table.all())


def ran(app: tg.App, **settings: Any) -> Any:
    return app.run("local", until="caught_up", **settings)


# -- a corrupt record ----------------------------------------------------------------------------


@pytest.mark.parametrize("round_records", [None, 1, 5])
def test_a_corrupt_record_is_set_aside_and_told_everywhere(
    tmp_path: Path, round_records: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "sound")
    offset = data_offsets(tmp_path / "sound")[3]
    flipped(tmp_path / "sound", offset, tmp_path / "log")
    app = app_over(tmp_path)
    summary = ran(app, round_records=round_records)
    assert revenue(app) == sum(AMOUNTS) - AMOUNTS[3]
    assert summary.exit_code == 1
    assert "faults: 1 corrupt (1 set aside as dead letters)" in str(summary)
    (letter,) = app.dead_letters("revenue").to_pylist()
    assert letter["offset"] == offset and letter["reason"].startswith("CORRUPT (D1)")
    assert json.loads(letter["value"]) == {"amount": 1e6}
    assert ran(app).exit_code == 1, "nothing new was read, and what is wrong is still wrong"
    state = ["--state", str(tmp_path / "state")]
    assert run(["app", "status", "shop", *state, "--format", "json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["faults"], told["new_faults"], told["faults_by_kind"]) == (1, 1, {"corrupt": 1})
    assert run(["app", "acknowledge", "shop", *state]) == 0
    assert run(["app", "status", "shop", *state]) == 0
    assert ran(app).exit_code == 0


def test_a_fault_that_is_new_is_told_after_others_were_acknowledged(tmp_path: Path) -> None:
    written(tmp_path / "sound")
    flipped(tmp_path / "sound", data_offsets(tmp_path / "sound")[3], tmp_path / "log")
    app = app_over(tmp_path)
    ran(app)
    assert run(["app", "acknowledge", "shop", "--state", str(tmp_path / "state")]) == 0
    written(tmp_path / "more")
    without(tmp_path / "more", data_offsets(tmp_path / "more")[5], tmp_path / "gapped")
    with tg.Log(tmp_path / "gapped", read_only=True) as more, tg.Log(tmp_path / "log") as log:
        for batch in more.reader("orders", control_records=True):
            columns = ["key", "value", "timestamp", "headers"]
            log.writer("orders").write(pa.Table.from_batches([batch.select(columns)]), partition=0)
    summary = ran(app)
    assert summary.exit_code == 1
    assert "faults: 1 missing, 1 corrupt" in str(summary)
    assert revenue(app) == 2 * sum(AMOUNTS) - AMOUNTS[3] - AMOUNTS[5]


@pytest.mark.parametrize("policy", ["drop", {"corrupt": "drop", "missing": "fail"}])
def test_a_corrupt_record_can_be_dropped(tmp_path: Path, policy: Any) -> None:
    written(tmp_path / "sound")
    flipped(tmp_path / "sound", data_offsets(tmp_path / "sound")[0], tmp_path / "log")
    app = app_over(tmp_path, on_error=policy)
    summary = ran(app)
    assert revenue(app) == sum(AMOUNTS) - AMOUNTS[0]
    assert app.dead_letters("revenue").num_rows == 0
    assert "faults: 1 corrupt (1 dropped)" in str(summary) and summary.exit_code == 1


def test_fail_stops_at_it_and_resuming_behind_it_settles_the_matter(tmp_path: Path) -> None:
    written(tmp_path / "sound")
    offset = data_offsets(tmp_path / "sound")[3]
    flipped(tmp_path / "sound", offset, tmp_path / "log")
    app = app_over(tmp_path, on_error="fail")
    summary = ran(app)
    assert summary.exit_code == 1 and summary.stopped[0].offset == offset
    assert revenue(app) == sum(AMOUNTS[:3])
    words = summary.stopped[0].command.split()[1:]
    assert run([*words, "--state", str(tmp_path / "state")]) == 0
    assert ran(app).exit_code == 0
    assert revenue(app) == sum(AMOUNTS) - AMOUNTS[3]


def test_records_that_nobody_checks_are_told(tmp_path: Path) -> None:
    written(tmp_path / "log")
    summary = ran(app_over(tmp_path, checked=False))
    assert summary.exit_code == 0
    assert f"note: {len(AMOUNTS)} records are numbered and check-summed, and nobody looked" in str(summary)


def test_records_left_out_as_duplicates_are_told(tmp_path: Path) -> None:
    written(tmp_path / "sound")
    with tg.Log(tmp_path / "sound", read_only=True) as log:
        break_topic(log, "orders", DamageKind.REPEAT, into=tmp_path / "log", count=2)
    app = app_over(tmp_path)
    summary = ran(app)
    assert revenue(app) == sum(AMOUNTS)
    assert summary.exit_code == 0
    assert str(summary).endswith("\nnot in all results of revenue: 2 duplicates by their numbers")


def test_sound_input_is_no_reason_to_say_anything(tmp_path: Path) -> None:
    written(tmp_path / "log")
    summary = ran(app_over(tmp_path))
    assert summary.exit_code == 0 and "\n" not in str(summary)


@pytest.mark.parametrize("on_error", ["keep", "drop", "fail"])
def test_a_table_sets_a_corrupt_record_aside(tmp_path: Path, on_error: str) -> None:
    written(tmp_path / "sound")
    offset = data_offsets(tmp_path / "sound")[-1]
    flipped(tmp_path / "sound", offset, tmp_path / "log")
    consumed = tg.Consumed(tg.String(), tg.Json(amount="double"), on_error=on_error)
    with tg.Log(tmp_path / "log") as log:
        if on_error == "fail":
            with pytest.raises(tg.IntegrityError, match="CORRUPT"):
                tg.table(log, "orders", state=tmp_path / "state", consumed=consumed)
            return
        for _ in range(2):  # built, and opened again
            with tg.table(log, "orders", state=tmp_path / "state", consumed=consumed) as table:
                assert table.get("ann") == {"amount": AMOUNTS[-2]}
                letters = table.dead_letters().to_pylist()
                assert [each["offset"] for each in letters] == ([offset] if on_error == "keep" else [])
                assert all(each["reason"].startswith("CORRUPT (D1)") for each in letters)
                assert (table.counts.faulty, table.counts.repeated) == (1, 0)


# -- before the end of a push --------------------------------------------------------------------


@pytest.mark.parametrize("damage", [without, flipped])
def test_before_the_end_of_a_push_a_fault_stops_unless_told_otherwise(tmp_path: Path, damage: Any) -> None:
    pushed(tmp_path / "sound")
    offset = data_offsets(tmp_path / "sound")[4]
    damage(tmp_path / "sound", offset, tmp_path / "log")
    strict = app_over(tmp_path)
    summary = ran(strict)
    assert summary.exit_code == 1
    assert [(each.reason, each.offset) for each in summary.stopped] == [("integrity", offset)]
    assert revenue(strict) == sum(AMOUNTS[:4])
    lenient = tg.App("lenient", log=tmp_path / "log", state=tmp_path / "state")
    stream = lenient.stream("orders", value=tg.Json(amount="double")).validate(during_push="keep")
    stream.window(tg.Tumbling("1h", retention="1d")).agg(revenue=tg.sum("amount")).to_table("revenue")
    summary = ran(lenient)
    assert summary.exit_code == 1 and not summary.stopped
    assert revenue(lenient) == sum(AMOUNTS) - AMOUNTS[4]


def test_a_sound_push_goes_through(tmp_path: Path) -> None:
    pushed(tmp_path / "log")
    app = app_over(tmp_path)
    assert ran(app).exit_code == 0
    assert revenue(app) == sum(AMOUNTS)


# -- producers that are silent -------------------------------------------------------------------


def validator_state(folder: Path) -> Any:
    backend = open_backend(str(folder / "state"))
    try:
        records = Records(backend, "shop")
        commit = records.read_commit(records.newest())[0]  # type: ignore[arg-type]
        return decode_state(dead_letters.SourceState.decoded(records.state_of(commit.sources[0])).validator)
    finally:
        backend.close()


def test_producers_that_were_silent_for_too_long_leave_an_apps_state(tmp_path: Path) -> None:
    clock = ManualClock(TEN)
    with tg.Log(tmp_path / "log", clock=clock) as log:
        log.create_topic("orders", 1)
        long_lived = log.writer("orders", integrity=True)
        long_lived.write(table_of([1.0]))
        for _ in range(50):
            with log.writer("orders", integrity=True) as sender:
                sender.write(table_of([1.0]))
        app = app_over(tmp_path, max_age="1h")
        ran(app)
        assert len(validator_state(tmp_path).producers) == 51
        clock.advance("2h")
        with log.writer("orders", integrity=True) as sender:
            sender.write(table_of([1.0]))
        ran(app)
        state = validator_state(tmp_path)
        assert (len(state.producers), state.forgot) == (1, True)
        long_lived.write(table_of([1.0]))  # in the middle of a numbering that nobody remembers
        long_lived.close()
        assert ran(app).exit_code == 0
        assert revenue(app) == 53.0
        assert len(validator_state(tmp_path).producers) == 2
        never = app_over(tmp_path, max_age=None)
        clock.advance("400d")
        with log.writer("orders", integrity=True) as sender:
            sender.write(table_of([1.0]))
        ran(never)
        assert len(validator_state(tmp_path).producers) == 3
