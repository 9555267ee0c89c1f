"""What an error tells people to do is done here, as it is written, and then the app runs and its numbers are right."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg
from remedies import typed
from tidegate.pipeline.rounds.records import Records

TEN = 1_767_261_600_000
ORDER = tg.Json(amount="double")


def define(folder: Path, name: str = "shop") -> tg.App:
    app = tg.App(name, data=folder)
    windows = app.stream("orders", value=ORDER).window(tg.Tumbling("1d", retention="30d"))
    windows.agg(n=tg.count()).to_topic("counts")
    return app


def produce(app: tg.App, count: int) -> None:
    with tg.Log(app.log) as log:
        if "orders" not in log.topics():
            log.create_topic("orders", 1)
        rows = {"key": ["k"] * count, "value": ['{"amount":1.0}'] * count, "timestamp": [TEN] * count}
        log.writer("orders").write(pa.table(rows))


def total(app: tg.App, state: Path) -> int:
    """What another application sees of the results."""
    consumed = tg.Consumed(value=tg.Long())
    with tg.windowed_table(app.log, "counts", "1d", state=state, consumed=consumed) as table:
        return sum(row.value for row in table.all())


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tg.App:
    """An app with some commits; commands are typed in the folder where its data lies."""
    monkeypatch.chdir(tmp_path)
    app = define(tmp_path / "data")
    for _ in range(4):
        produce(app, 10)
        app.run("local", until="caught_up")
    return app


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def damage(path: Path) -> bytes:
    """Flip a bit in the middle of a file; what it was."""
    sound = path.read_bytes()
    flipped = bytearray(sound)
    flipped[len(flipped) // 2] ^= 4
    path.write_bytes(flipped)
    return sound


def newest(app: tg.App, kind: str) -> Path:
    return max((Path(app.state) / "apps" / app.name / kind).iterdir())


def goes_on(app: tg.App) -> None:
    """Run it; where its results were sent already, do as it says about that."""
    try:
        app.run("local", until="caught_up")
    except tg.TidegateError as error:
        typed(error, "pipeline.tasks.sections.fenced: app rebase", APP=app.name, LOG=app.log)
        app.run("local", until="caught_up")


WAYS = {
    "replay to a round": "pipeline.rounds.records.Records._remedy: app replay",
    "reset": "pipeline.rounds.records.Records._remedy: app reset",
}


def back_to(way: str, round: int) -> dict[str, str]:
    return {} if way == "reset" else {"N": str(round)}


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_commit_is_gone_back_from_or_started_over(app: tg.App, tmp_path: Path, way: str) -> None:
    """Deleting it, as was once recommended, would let a round be counted twice."""
    last = newest(app, "commits")
    damage(last)
    with pytest.raises(tg.CorruptError, match="restore it from a copy") as told:
        app.run("local", until="caught_up")
    assert "delet" not in str(told.value)
    listed = typed(told.value, "pipeline.rounds.records.Records._remedy: app checkpoints")
    kept = [int(found) for found in re.findall(r'"round": ?(\d+)', listed)]
    assert int(last.name) not in kept and max(kept) == int(last.name) - 1
    typed(told.value, WAYS[way], **back_to(way, max(kept)))
    produce(app, 5)
    goes_on(app)
    assert total(app, tmp_path / "reader") == 45


def test_a_damaged_commit_is_restored_from_a_copy(app: tg.App, tmp_path: Path) -> None:
    last = newest(app, "commits")
    sound = damage(last)
    with pytest.raises(tg.CorruptError, match="restore it from a copy"):
        app.run("local", until="caught_up")
    last.write_bytes(sound)
    produce(app, 5)
    app.run("local", until="caught_up")
    assert total(app, tmp_path / "reader") == 45


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_plan_is_gone_back_from_or_started_over(app: tg.App, tmp_path: Path, way: str) -> None:
    """A plan whose round was not committed when its process died."""
    produce(app, 5)
    with pytest.MonkeyPatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(Records, "put_commit", killed)
        app.run("local", until="caught_up")
    last = newest(app, "plans")
    damage(last)
    with pytest.raises(tg.CorruptError) as told:
        app.run("local", until="caught_up")
    typed(told.value, WAYS[way], **back_to(way, int(last.name) - 1))
    goes_on(app)
    assert total(app, tmp_path / "reader") == 45


def test_a_damaged_record_of_the_app_is_run_under_a_new_name(app: tg.App, tmp_path: Path) -> None:
    damage(Path(app.state) / "apps" / app.name / "app")
    with pytest.raises(tg.CorruptError, match="restore it from a copy"):
        app.run("local", until="caught_up")
    other = tg.App("other", data=tmp_path / "data")
    other.stream("orders", value=ORDER).window(tg.Tumbling("1d", retention="30d")).agg(n=tg.count()).to_topic(
        "again"
    )
    other.run("local", until="caught_up")
    with other.open_table("again") as table:
        assert sum(row.value["n"] for row in table.all()) == 40


def leases(app: tg.App, reader: Path) -> dict[str, tuple[Path, Callable[[], object]]]:
    def read() -> object:
        return total(app, reader)

    def run() -> object:
        return app.run("local", until="caught_up")

    return {
        "app": (Path(app.state) / "apps" / app.name / "lease", run),
        "table": (reader / "tables" / "counts" / "lease", read),
    }


@pytest.mark.parametrize("whose", ["app", "table"])
def test_a_damaged_lease_is_deleted_when_nobody_uses_it(app: tg.App, tmp_path: Path, whose: str) -> None:
    """Epochs go on from the commits, so that nobody is fenced by what an earlier owner left."""
    reader = tmp_path / "reader"
    assert total(app, reader) == 40
    lease, use = leases(app, reader)[whose]
    damage(lease)
    with pytest.raises(tg.CorruptError, match="no process uses it, then delete it"):
        use()
    lease.unlink()
    produce(app, 5)
    app.run("local", until="caught_up")
    assert total(app, reader) == 45


def test_damaged_commits_of_a_table_are_built_anew_elsewhere(app: tg.App, tmp_path: Path) -> None:
    assert total(app, tmp_path / "reader") == 40
    damage(tmp_path / "reader" / "tables" / "counts" / "commits")
    with pytest.raises(tg.CorruptError, match="another state folder"):
        total(app, tmp_path / "reader")
    assert total(app, tmp_path / "another") == 40
