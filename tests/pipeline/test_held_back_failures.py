"""Records that were read, held back for other partitions, and fail in a step when their turn has come: `on_error` says
what happens, as for any other record."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.main import run
from tidegate.pipeline.admin import app_status
from tidegate.storage import open_backend

TEN = 1_767_261_600_000
VALUE = tg.Json(id="string", text="string")


def write(folder: Path, partition: int, seconds: range, poison: tuple[int, ...] = ()) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("orders", 2, if_not_exists=True)
        log.create_topic("rates", 1, if_not_exists=True)
        log.writer("rates").write(pa.table({"key": ["1-3"], "value": ['{"rate": 5}']}))
        texts = ["poison" if second in poison else str(second) for second in seconds]
        said = [
            {"id": f"{partition}-{second}", "text": text} for second, text in zip(seconds, texts, strict=True)
        ]
        table = {
            "key": [f"k{partition}"] * len(texts),
            "value": [json.dumps(each) for each in said],
            "timestamp": [TEN + 1000 * second for second in seconds],
        }
        log.writer("orders").write(pa.table(table), partition=partition)


def numbers_of(batch: pa.RecordBatch, poison: int | None) -> pa.RecordBatch:
    texts = batch.column("text").to_pylist()
    numbers = [int(text) if poison is None or text.isdigit() else poison for text in texts]
    return pa.RecordBatch.from_arrays(
        [batch.column("id"), pa.array(numbers, pa.int64())], names=["id", "number"]
    )


def as_numbers(batch: pa.RecordBatch) -> pa.RecordBatch:
    return numbers_of(batch, CORRECTED["poison"])


CORRECTED: dict[str, int | None] = {
    "poison": None
}  # what a corrected step takes a text for that is no number


def looked_up(stream: tg.Stream) -> tg.Stream:
    rated = stream.key_by("id", shards=2).drop_duplicates("id", within="1h")
    return rated.lookup("rates", "rate", value=tg.Json(rate="int64"))


NUMBERS = pa.schema({"id": pa.string(), "number": pa.int64()})


def app_of(folder: Path, on_error: Any) -> tg.App:
    app = tg.App("shop", data=folder, idle_after=None)
    numbers = looked_up(app.stream("orders", value=VALUE, on_error=on_error)).map(as_numbers, NUMBERS)
    numbers.to_topic("numbers", integrity=False)
    return app


def sent(folder: Path) -> list[str]:
    with tg.Log(folder / "log", read_only=True) as log:
        return sorted(
            json.loads(value)["id"] for value in log.reader("numbers").read_all()["value"].to_pylist()
        )


def ids(**seconds: range) -> list[str]:
    return sorted(f"{name[1:]}-{second}" for name, own in seconds.items() for second in own)


def held_then_due(folder: Path, on_error: str, *, poison: tuple[int, ...] = (5,)) -> Any:
    """Records 3 to 9 of partition 1 are held back by a first run; a second one reads what they waited for."""
    write(folder, 0, range(3))
    write(folder, 1, range(10), poison)
    first = app_of(folder, on_error).run("local", until="caught_up")
    assert first.exit_code == 0 and first.progress.held == 8, first
    assert sent(folder) == ids(p0=range(3), p1=range(2))
    write(folder, 0, range(3, 20))
    return app_of(folder, on_error).run("local", until="caught_up")


def test_it_stops_its_partition_alone_and_says_where(tmp_path: Path) -> None:
    summary = held_then_due(tmp_path, "fail")
    (stopped,) = summary.stopped
    assert (stopped.topic, stopped.partition, stopped.offset, stopped.reason) == ("orders", 1, 5, "failed")
    assert "orders-1 stopped at offset 5" in stopped.message and "map as_numbers" in stopped.message
    assert summary.exit_code == 5
    assert sent(tmp_path) == ids(p0=range(6), p1=range(5)), "all that is before it in the common order"
    again = app_of(tmp_path, "fail").run("local", until="caught_up")
    assert (again.rounds, again.exit_code, len(again.stopped)) == (0, 5, 1), "and it stays stopped"
    write(tmp_path, 1, range(10, 12))
    write(tmp_path, 0, range(20, 25))
    more = app_of(tmp_path, "fail").run("local", until="caught_up")
    assert [each.offset for each in more.stopped] == [5]
    assert sent(tmp_path) == ids(p0=range(6), p1=range(5))


@pytest.mark.parametrize("more", [False, True], ids=["at once", "after more was written"])
def test_the_command_that_is_named_leaves_the_record_out(tmp_path: Path, more: bool) -> None:
    (stopped,) = held_then_due(tmp_path, "fail", poison=(5, 7)).stopped
    if more:
        write(tmp_path, 1, range(10, 12))
        app_of(tmp_path, "fail").run("local", until="caught_up", round_records=1)
    app = app_of(tmp_path, "fail")
    assert (
        stopped.command == f"tidegate app resume shop --partition numbers:1 --skip-to 6 --state {app.state}"
    )
    assert run(stopped.command.split()[1:]) == 0
    (loss,) = app_status(open_backend(app.state), "shop").losses
    assert (loss.partition, loss.first, loss.end) == (1, 5, 6)
    (second,) = app.run("local", until="caught_up").stopped
    assert second.offset == 7
    assert sent(tmp_path) == sorted([*ids(p0=range(8), p1=range(5)), "1-6"])
    assert run(second.command.split()[1:]) == 0
    assert app.run("local", until="caught_up", close=True).exit_code == 0
    last = 12 if more else 10
    gone = {"1-5", "1-7"}
    assert sent(tmp_path) == [each for each in ids(p0=range(20), p1=range(last)) if each not in gone]
    commit = app_status(open_backend(app.state), "shop")
    assert commit.held == {}


def test_several_records_can_be_left_out_at_once(tmp_path: Path) -> None:
    held_then_due(tmp_path, "fail", poison=(5, 7))
    app = app_of(tmp_path, "fail")
    resume = ["app", "resume", "shop", "--partition", "numbers:1", "--state", str(app.state)]
    assert run([*resume, "--skip-to", "4"]) == 2, "what was worked on is not worked on again"
    assert run([*resume, "--skip-to", "9"]) == 0
    assert app.run("local", until="caught_up", close=True).exit_code == 0
    assert sent(tmp_path) == sorted([*ids(p0=range(20), p1=range(5)), "1-9"])


def test_a_corrected_step_takes_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_then_due(tmp_path, "fail")
    monkeypatch.setitem(CORRECTED, "poison", 5)
    app = app_of(tmp_path, "fail")
    assert run(["app", "resume", "shop", "--partition", "numbers:1", "--state", str(app.state)]) == 0
    assert app.run("local", until="caught_up", close=True).exit_code == 0
    assert sent(tmp_path) == ids(p0=range(20), p1=range(10))


@pytest.mark.parametrize("on_error", ["keep", "drop"])
def test_it_is_left_out_and_kept_if_asked(tmp_path: Path, on_error: str) -> None:
    summary = held_then_due(tmp_path, on_error, poison=(5, 7))
    assert summary.exit_code == 0 and not summary.stopped
    assert summary.progress.counters["unreadable"] == 2
    app = app_of(tmp_path, on_error)
    app.run("local", until="caught_up", close=True)
    gone = {"1-5", "1-7"}
    assert sent(tmp_path) == [each for each in ids(p0=range(20), p1=range(10)) if each not in gone]
    letters = app.dead_letters("numbers").to_pylist()
    assert [(each["partition"], each["offset"]) for each in letters] == [(1, 5), (1, 7)][
        : 2 if on_error == "keep" else 0
    ]
    for each in letters:
        assert "map as_numbers" in each["reason"] and json.loads(each["value"])["text"] == "poison"
        assert each["key"] == b"k1"


def test_a_dead_letter_of_a_record_that_left_the_log_says_so(tmp_path: Path) -> None:
    write(tmp_path, 0, range(3))
    write(tmp_path, 1, range(10), (5,))
    app_of(tmp_path, "keep").run("local", until="caught_up")
    write(tmp_path, 0, range(3, 20))
    with tg.Log(tmp_path / "log") as log:
        log.partition("orders", 1).delete_records_before(8)
    app = app_of(tmp_path, "keep")
    assert app.run("local", until="caught_up", close=True).exit_code == 0
    (letter,) = app.dead_letters("numbers").to_pylist()
    assert (letter["offset"], letter["value"]) == (5, None)
    assert "poison" in letter["reason"] and "it is not in the log any more" in letter["reason"]
    assert sent(tmp_path) == [each for each in ids(p0=range(20), p1=range(10)) if each != "1-5"]


def windows_of(folder: Path, on_error: Any, *, own: bool) -> tg.App:
    """Windows behind the lookup: of a map that fails, or of a user's own aggregate that does."""

    def merge(states: pa.Array, groups: Any, count: int) -> pa.Array:
        sums = [0] * count
        for state, group in zip(states.to_pylist(), groups.tolist(), strict=True):
            sums[group] += int(state)
        return pa.array(sums, pa.int64())

    def partial(rows: pa.RecordBatch, groups: Any, count: int) -> pa.Array:
        return merge(rows.column("text"), groups, count)

    app = tg.App("shop", data=folder)
    stream = looked_up(app.stream("orders", value=VALUE, on_error=on_error))
    if own:
        windows = stream.window(tg.Tumbling("2s", retention="1h"), emit="close")
        made = windows.agg(total=tg.reduce("text", merge, partial=partial, state=pa.int64()))
    else:
        windows = stream.map(as_numbers, NUMBERS).window(tg.Tumbling("2s", retention="1h"), emit="close")
        made = windows.agg(total=tg.sum("number"))
    made.to_table("totals")
    return app


@pytest.mark.parametrize("own", [False, True], ids=["map", "own aggregate"])
@pytest.mark.parametrize("seed", range(4))
def test_windows_count_every_good_record_once_and_none_late(tmp_path: Path, own: bool, seed: int) -> None:
    """However rounds are cut, whatever is bad, and however often it stops and is resumed."""
    random = Random(seed)
    bad = [tuple(second for second in range(30) if random.random() < 0.12) for _ in range(2)]
    expected = sum(second for partition in range(2) for second in range(30) if second not in bad[partition])
    for on_error in ("fail", "drop", "keep"):
        folder, met = tmp_path / on_error, list[tuple[int, int]]()
        cut = random.randint(1, 29)
        for partition in range(2):
            write(folder, partition, range(cut), bad[partition])
        app = windows_of(folder, on_error, own=own)

        def run_out(app: tg.App = app, met: list[tuple[int, int]] = met, **more: Any) -> Any:
            while True:
                summary = app.run("local", until="caught_up", round_records=random.randint(1, 40), **more)
                if not summary.stopped:
                    return summary
                for each in summary.stopped:
                    met.append((each.partition, each.offset))
                    assert run(each.command.split()[1:]) == 0

        run_out()
        for partition in range(2):
            write(folder, partition, range(cut, 30), bad[partition])
        summary = run_out(close=True)
        everything = [(partition, second) for partition in range(2) for second in bad[partition]]
        assert sorted(met) == (everything if on_error == "fail" else [])
        letters = app.dead_letters("totals")
        kept = sorted(zip(letters["partition"].to_pylist(), letters["offset"].to_pylist(), strict=True))
        assert kept == (everything if on_error == "keep" else [])
        assert summary.progress.counters.get("windows.late_records", 0) == 0
        with app, app.open_table("totals") as table:
            assert sum(table.to_arrow()["total"].to_pylist()) == expected
