"""Offsets count in one topic: one that is deleted and created again, or gets partitions, is never read on silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.main import run as cli

TEN = 1_767_261_600_000
ORDER = tg.Json(shop="string", amount="double")


def produce(app: tg.App, count: int, *, partitions: int = 1, first: int = 0, create: bool = False) -> None:
    """Write so many orders, spread over the partitions."""
    with tg.Log(app.log) as log:
        if create:
            log.create_topic("orders", partitions)
        numbers = range(first, first + count)
        log.writer("orders").write(
            pa.table(
                {
                    "key": [f"k{n}" for n in numbers],
                    "value": [f'{{"shop":"s{n % 3}","amount":1.0}}' for n in numbers],
                    "timestamp": [TEN + n for n in numbers],
                    "partition": pa.array([n % partitions for n in numbers], pa.int32()),
                }
            )
        )


def delete(app: tg.App) -> None:
    with tg.Log(app.log) as log:
        log.delete_topic("orders")


def define(folder: Path, *, rekeyed: bool = False) -> tg.App:
    app = tg.App("shop", data=folder)
    orders = app.stream("orders", value=ORDER)
    if rekeyed:
        orders = orders.key_by("shop")
    orders.window(tg.Tumbling("1d", retention="30d")).agg(n=tg.count()).to_table("counts")
    return app


def total(app: tg.App) -> int:
    with app.open_table("counts") as table:
        return sum(row.value["n"] for row in table.all())


@pytest.mark.parametrize("rekeyed", [False, True], ids=["co-partitioned", "re-keyed"])
@pytest.mark.parametrize("again", [300, 100, 40], ids=["longer", "equal", "shorter"])
def test_a_topic_created_again_stops_the_flow_and_each_way_out_works(
    tmp_path: Path, again: int, rekeyed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long the new topic is: at these offsets it has other records."""
    app = define(tmp_path, rekeyed=rekeyed)
    produce(app, 100, create=True)
    app.run("local", until="caught_up")
    with tg.Log(app.log) as log:
        old = log.describe("orders").topic_id
    delete(app)
    produce(app, again, create=True, first=1000)
    with tg.Log(app.log) as log:
        new = log.describe("orders").topic_id
    summary = app.run("local", until="caught_up")
    (stopped,) = summary.stopped
    assert summary.exit_code != 0 and stopped.reason == "recreated"
    assert str(old) in stopped.message and str(new) in stopped.message
    assert "tidegate app reset shop" in stopped.message
    assert total(app) == 100, "nothing of the new topic was taken for the old one's rest"
    state = ["--state", str(app.state)]
    assert cli(["app", "resume", "shop", "--partition", "orders-0", *state]) == 2, (
        "the old offset is of no use"
    )
    assert "--skip-to 0" in capsys.readouterr().err
    assert cli([*stopped.command.split()[1:], *state]) == 0
    assert app.run("local", until="caught_up").exit_code == 0
    assert total(app) == 100 + again
    assert cli(["app", "reset", "shop", *state, "--yes"]) == 0
    assert app.run("local", until="caught_up").exit_code == 0
    assert total(app) == again


def test_a_topic_created_again_while_the_app_runs_is_noticed_before_anything_of_it_is_committed(
    tmp_path: Path,
) -> None:
    app = define(tmp_path)
    produce(app, 100, create=True)
    with app.start("local") as run:
        run.await_caught_up("300s")
        delete(app)
        produce(app, 300, create=True, first=1000)
        while not run.progress.stopped and run.is_running:
            run.join("20ms")
        assert [each.reason for each in run.progress.stopped] == ["recreated"]
    assert total(app) == 100


def test_a_topic_deleted_while_the_app_runs_is_waited_for_and_then_unavailable(tmp_path: Path) -> None:
    app = define(tmp_path)
    produce(app, 100, create=True)
    run = app.start("local", patience_ms=300)
    run.await_caught_up("300s")
    delete(app)
    with pytest.raises(tg.UnavailableError, match="topic orders was deleted") as told:
        run.await_termination("300s")
    assert told.value.exit_code == 3
    assert total(app) == 100


@pytest.mark.parametrize("rekeyed", [False, True], ids=["co-partitioned", "re-keyed"])
def test_partitions_added_while_the_app_runs_are_noticed_and_what_the_error_says_works(
    tmp_path: Path, rekeyed: bool
) -> None:
    app = define(tmp_path, rekeyed=rekeyed)
    produce(app, 200, partitions=2, create=True)
    run = app.start("local")
    run.await_caught_up("300s")
    with tg.Log(app.log) as log:
        log.add_partitions("orders", 3)
    produce(app, 300, partitions=3, first=1000)
    with pytest.raises(tg.InvalidError, match=r"had 2 partitions .* has 3 now") as told:
        run.await_termination("300s")
    if rekeyed:
        assert "Start the app again" in str(told.value)
        assert define(tmp_path, rekeyed=True).run("local", until="caught_up").exit_code == 0
        assert total(app) == 500
        assert define(tmp_path, rekeyed=True).run("local", until="caught_up").exit_code == 0
        assert total(app) == 500
        return
    assert "new app name" in str(told.value) and "tidegate app reset shop" in str(told.value)
    with pytest.raises(tg.InvalidError, match="tidegate app reset shop"):
        define(tmp_path).run("local", until="caught_up")
    assert cli(["app", "reset", "shop", "--state", str(app.state), "--yes"]) == 0
    assert define(tmp_path).run("local", until="caught_up").exit_code == 0
    assert total(app) == 500


def test_state_from_before_topics_had_ids_goes_on_and_takes_the_id_of_its_next_round(tmp_path: Path) -> None:
    from tidegate.pipeline import checkpoint, recovery

    app = define(tmp_path)
    produce(app, 100, create=True)
    with pytest.MonkeyPatch.context() as before:  # commits as they were written then
        before.setattr(recovery, "starting_lines", _without_ids(recovery.starting_lines))
        before.setattr(checkpoint, "_sources", _without_ids(checkpoint._sources))
        app.run("local", until="caught_up")
    produce(app, 10, first=1000)
    app.run("local", until="caught_up")
    assert total(app) == 110
    delete(app)
    produce(app, 300, create=True, first=2000)
    assert [each.reason for each in app.run("local", until="caught_up").stopped] == ["recreated"]


def _without_ids(inner: Any) -> Any:
    import msgspec

    return lambda *given: tuple(msgspec.structs.replace(line, topic_id="") for line in inner(*given))


def test_undelivered_results_for_a_topic_that_is_gone_are_told_and_not_a_key_error(tmp_path: Path) -> None:
    from tidegate.errors import InvalidError
    from tidegate.pipeline.admin import rebase_outputs
    from tidegate.pipeline.coordinator import Coordinator
    from tidegate.storage import open_backend

    app = tg.App("shop", data=tmp_path)
    app.stream("orders", value=ORDER).select("amount").to_topic("amounts")
    produce(app, 10, create=True)
    with pytest.MonkeyPatch.context() as meanwhile:  # a process that died between commit and delivery
        meanwhile.setattr(Coordinator, "deliver_outstanding", lambda self: False)
        app.run("local", until="caught_up")
    backend = open_backend(str(app.state))
    with tg.Log(app.log) as log:
        log.delete_topic("amounts")
        with pytest.raises(InvalidError, match="tidegate topic create amounts --partitions 1"):
            rebase_outputs(backend, "shop", log)
        log.create_topic("amounts", 1)
        rebase_outputs(backend, "shop", log)
    backend.close()
    app.run("local", until="caught_up")
    with tg.Log(app.log) as log:
        assert log.reader("amounts").read_all().num_rows >= 10


def table_of(app: tg.App, state: Path, **settings: Any) -> Any:
    return tg.table(app.log, "orders", state=state, **settings)


@pytest.mark.parametrize("again", [300, 100, 40], ids=["longer", "equal", "shorter"])
def test_a_table_whose_topic_was_created_again_is_refused_and_built_anew_elsewhere(
    tmp_path: Path, again: int
) -> None:
    app = define(tmp_path)
    produce(app, 100, create=True)
    with table_of(app, tmp_path / "state") as table:
        assert len(list(table.all())) == 100
    delete(app)
    produce(app, again, create=True, first=1000)
    with pytest.raises(tg.InvalidError, match=r"deleted and created again.*another state folder"):
        table_of(app, tmp_path / "state")
    with table_of(app, tmp_path / "another") as table:
        assert sorted(row.key for row in table.all()) == sorted(
            f"k{n}".encode() for n in range(1000, 1000 + again)
        )


def test_a_table_that_follows_its_topic_commits_nothing_of_one_created_again(tmp_path: Path) -> None:
    app = define(tmp_path)
    produce(app, 100, create=True)
    with (
        pytest.raises(tg.InvalidError, match="deleted and created again"),
        table_of(app, tmp_path / "s") as table,
    ):
        delete(app)
        produce(app, 300, create=True, first=1000)
        table.catch_up()
        table.commit()
    with table_of(app, tmp_path / "s", read_only=True) as table:
        assert sorted(row.key for row in table.all()) == sorted(f"k{n}".encode() for n in range(100))


def test_partitions_added_to_a_tables_topic_are_told(tmp_path: Path) -> None:
    app = define(tmp_path)
    produce(app, 100, partitions=2, create=True)
    with pytest.raises(tg.InvalidError, match="had 2 partitions"), table_of(app, tmp_path / "state") as table:
        with tg.Log(app.log) as log:
            log.add_partitions("orders", 3)
        produce(app, 300, partitions=3, first=1000)
        table.catch_up()
        table.commit()
