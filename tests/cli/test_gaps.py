"""Gaps in compacted topics as a user meets them: `break` says what will be seen, and `verify` sees that and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.main import run
from tidegate.clock import ManualClock
from tidegate.integrity import read_columns
from tidegate.log.log import Log
from tidegate.web.integrity import integrity
from tidegate.web.schemas import IntegrityQuestion
from tidegate.web.site import Site

DAY = 86_400_000
TEN = 1_767_261_600_000
KINDS = ["drop", "reorder", "flip", "future-clock", "repeat", "truncate-tail", "forget-producer"]


def an_app(folder: Path, window: Any, name: str = "counts") -> tg.App:
    app = tg.App("shop", data=folder)
    app.stream("orders", value=tg.Json(amount="double")).window(window).agg(
        n=tg.count(), total=tg.sum("amount")
    ).to_topic(name)
    return app


def produced(folder: Path, window: Any, rounds: int = 4) -> tg.App:
    """An app that wrote its topic in several rounds."""
    app = an_app(folder, window)
    with tg.Log(app.log) as log:
        log.create_topic("orders", 1)
    for number in range(rounds):
        with tg.Log(app.log) as log:
            keys = [f"k{key}" for key in range(5)]
            values = ['{"amount": 1.5}'] * 5
            times = [TEN + number * 20_000 + key * 1000 for key in range(5)]
            log.writer("orders").write(pa.table({"key": keys, "value": values, "timestamp": times}))
        app.run("local", until="caught_up")
    return app


def verified(capsys: Any, topic: str, log: Path, *more: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run(["verify", topic, "--log", str(log), "--format", "json", *more])
    return code, json.loads(capsys.readouterr().out)


def found_in(report: dict[str, Any]) -> list[tuple[int, str]]:
    names = {"unregistered": "UNREGISTERED_PRODUCER"}
    return sorted(
        (each["offset"], names.get(each["kind"], each["kind"].upper()))
        for each in report["findings"]
        if each["message"].startswith("by its integrity metadata")
    )


@pytest.mark.parametrize("window", [tg.Tumbling("1m"), tg.Session("10s")], ids=["windows", "sessions"])
def test_nothing_but_results_lies_in_the_topic_of_an_app_and_all_of_it_is_proven(
    tmp_path: Path, capsys: Any, window: Any
) -> None:
    app = produced(tmp_path, window)
    with tg.Log(app.log) as log:
        for batch in log.reader("counts", control_records=True):
            columns = read_columns(batch.column("headers"))
            assert (columns.state == 1).all(), "every record is numbered"
            assert not columns.is_control.any()
            assert all(len(key) > 8 for key in batch.column("key").to_pylist()), "every key has a window"
            assert b"" not in batch.column("value").to_pylist(), "an empty value is nothing Json can read"
        settings = log.describe("counts").config
        assert settings.compacts and settings.min_compaction_lag_ms == DAY
    code, report = verified(capsys, "counts", app.log)
    assert (code, report["findings"]) == (0, [])
    capsys.readouterr()
    assert run(["verify", "counts", "--log", str(app.log)]) == 0
    assert "nothing wrong found" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_what_break_says_of_the_topic_of_an_app_is_what_verify_finds(
    tmp_path: Path, capsys: Any, kind: str, seed: int
) -> None:
    app = produced(tmp_path, tg.Tumbling("1m"))
    copy = tmp_path / "broken"
    where = ["--log", str(app.log), "--kind", kind, "--seed", str(seed), "--into", str(copy)]
    capsys.readouterr()
    assert run(["break", "counts", *where, "--format", "json"]) == 0
    done = json.loads(capsys.readouterr().out)
    code, report = verified(capsys, "counts", copy)
    assert found_in(report) == sorted((each["offset"], each["verdict"]) for each in done["seen"])
    assert code == (1 if any(each["verdict"] != "DUPLICATE" for each in done["seen"]) else 0)
    if kind in ("drop", "reorder", "flip", "future-clock", "repeat"):
        assert done["seen"], "such damage shows"


def test_a_table_of_a_topic_with_a_lost_record_says_so(tmp_path: Path, caplog: Any) -> None:
    app = produced(tmp_path, tg.Tumbling("1m"))
    copy = tmp_path / "broken"
    assert run(["break", "counts", "--log", str(app.log), "--kind", "drop", "--into", str(copy)]) == 0
    reader = tg.App("reader", log=copy, state=tmp_path / "reader")
    with reader, reader.windowed_table("counts", "1m", value=tg.Json(n="int64")) as table:
        assert list(table.fetch("k1"))
    assert [each.message for each in caplog.records if each.message.startswith("MISSING")]


# -- compacted topics ------------------------------------------------------------------------------


def compacted(folder: Path, *, lag_ms: int, clock: ManualClock) -> Log:
    """A topic whose first segments were compacted; its keys are written over and over."""
    settings = {
        "cleanup.policy": "compact", "min.compaction.lag.ms": lag_ms, "segment.ms": 60_000,
        "min.cleanable.dirty.ratio": 0.01,
    }  # fmt: skip
    log = Log(folder, clock=clock, maintenance=False, durability="os")
    log.create_topic("prices", 1, settings)
    with log.writer("prices", integrity=True) as sender:
        for number in range(8):
            keys = [f"k{key}" for key in range(4)]
            sender.write(pa.table({"key": keys, "value": [f"{number}"] * 4}))
            clock.advance("2h")
            if number == 4:
                clean(log)
    return log


def clean(log: Log) -> None:
    from tidegate.log.maintenance import Housekeeping
    from tidegate.log.topic_config import BrokerConfig
    from tidegate.randomness import SeededRandomness

    keeper = Housekeeping(
        log, broker=BrokerConfig(), files=log.files, clock=log.clock, randomness=SeededRandomness(1)
    )
    keeper.clean_once()


def test_gaps_of_compaction_are_told_and_fail_where_asked(tmp_path: Path, capsys: Any) -> None:
    clock = ManualClock(TEN)
    with compacted(tmp_path / "log", lag_ms=0, clock=clock) as log:
        bound = log.compacted_below("prices", 0)()
        assert 0 < bound < log.view("prices", 0).bounds().high_watermark
    code, report = verified(capsys, "prices", tmp_path / "log")
    kinds = {each["kind"] for each in report["findings"]}
    assert code == 0 and kinds == {"tolerated"}
    assert f"below offset {bound}" in report["integrity"]["partitions"][0]["doubt"]
    assert verified(capsys, "prices", tmp_path / "log", "--fail-on", "tolerated")[0] == 1
    assert verified(capsys, "prices", tmp_path / "log", "--fail-on", "suspect")[0] == 0
    capsys.readouterr()
    run(["verify", "prices", "--log", str(tmp_path / "log")])
    told = capsys.readouterr()
    assert "nothing wrong" not in told.err + told.out
    assert f"below offset {bound}" in told.out


def test_the_page_and_the_html_report_say_where_loss_would_not_show(tmp_path: Path) -> None:
    with compacted(tmp_path / "log", lag_ms=0, clock=ManualClock(TEN)) as log:
        bound = log.compacted_below("prices", 0)()
    site = Site(tmp_path / "log", tmp_path / "state")
    found = integrity(site, "prices", IntegrityQuestion(wait_ms=20_000))
    assert found.state == "done" and not found.faults_total
    assert "nothing is missing" not in found.sentence
    (doubt,) = found.doubts
    assert f"below offset {bound}" in doubt
    html = tmp_path / "prices.html"
    assert run(["verify", "prices", "--log", str(tmp_path / "log"), "--html", str(html)]) == 0
    assert 'class="health unsure"' in html.read_text() and f"below offset {bound}" in html.read_text()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("where", ["below", "above"])
def test_break_applies_the_tolerance_of_the_topic(tmp_path: Path, capsys: Any, where: str, seed: int) -> None:
    clock = ManualClock(TEN)
    with compacted(tmp_path / "log", lag_ms=0, clock=clock) as log:
        bound = log.compacted_below("prices", 0)()
        data = [
            int(offset)
            for batch in log.reader("prices", control_records=True)
            for offset, control in zip(
                batch.column("offset").to_pylist(),
                read_columns(batch.column("headers")).is_control.tolist(),
                strict=True,
            )
            if not control and ((offset + 1 < bound) if where == "below" else (offset > bound))
        ]
    copy = tmp_path / "broken"
    offset = str(data[seed % len(data)])
    asked = [
        "--log",
        str(tmp_path / "log"),
        "--kind",
        "drop",
        "--offset",
        offset,
        "-p",
        "0",
        "--into",
        str(copy),
    ]
    capsys.readouterr()
    assert run(["break", "prices", *asked, "--format", "json"]) == 0
    done = json.loads(capsys.readouterr().out)
    code, report = verified(capsys, "prices", copy)
    faults = [each for each in found_in(report) if each[1] not in ("TOLERATED", "SUSPECT")]
    assert faults == [(each["offset"], each["verdict"]) for each in done["seen"]]
    if where == "above":
        assert faults and faults[0][1] == "MISSING" and code == 1
    else:
        assert done["tolerated"] and not faults and code == 0
        tolerated = [each[0] for each in found_in(report)]
        assert done["tolerated"][0] in tolerated
    capsys.readouterr()


def test_a_compaction_under_way_is_reckoned_with(tmp_path: Path, capsys: Any) -> None:
    """Its segments are swapped before the checkpoint says so; a crash may come between."""
    from tidegate.log.checkpoints import CleanerCheckpoint

    clock = ManualClock(TEN)
    with compacted(tmp_path / "log", lag_ms=0, clock=clock) as log:
        done = CleanerCheckpoint(log.path, files=log.files, clock=clock)
        bound = log.compacted_below("prices", 0)()
        before = done.get("prices", 0)
        done.put("prices", 0, 0)  # as if it had died before its line was written
        assert log.compacted_below("prices", 0)() == 0
        done.begin("prices", 0, bound)
        assert log.compacted_below("prices", 0)() == bound
    code, _ = verified(capsys, "prices", tmp_path / "log")
    assert code == 0 and before == bound


def test_without_a_sound_checkpoint_the_active_segment_is_still_whole(tmp_path: Path, capsys: Any) -> None:
    clock = ManualClock(TEN)
    with compacted(tmp_path / "log", lag_ms=0, clock=clock) as log:
        active = log.view("prices", 0).segment_sizes()[-1][0]
    for damage in (lambda path: path.write_bytes(b"?"), lambda path: path.unlink()):
        damage(tmp_path / "log" / "cleaner-offset-checkpoint")
        with Log(tmp_path / "log", read_only=True) as log:
            assert log.compacted_below("prices", 0)() == active
        code, _ = verified(capsys, "prices", tmp_path / "log")
        assert code == 0


def test_explain_says_where_gaps_prove_nothing(tmp_path: Path) -> None:
    clock = ManualClock(TEN)
    with compacted(tmp_path / "log", lag_ms=0, clock=clock) as log:
        bound = log.compacted_below("prices", 0)()
        log.create_topic("orders", 1)
    for topic, expected in (
        ("prices", f"prices-0: compaction may have removed records below offset {bound}"),
        ("orders", None),
    ):
        app = tg.App("shop", log=tmp_path / "log", state=tmp_path / "state")
        app.stream(topic).validate().to_topic("copied")
        told = app.explain()
        assert ("a gap that is no fault" in told) == (expected is not None)
        assert expected is None or expected in told
