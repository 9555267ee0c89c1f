"""What the errors of apps tell people to do is typed as it is written, and then the app runs and its numbers are right.

Damaged records of an app are in `test_remedies`; here are its input, its output, its definition and its position.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from remedies import typed
from tidegate.cli.main import run as cli
from tidegate.log.format.batch import iter_headers
from tidegate.pipeline.reading.certificates import certify_round
from tidegate.pipeline.rounds import master
from tidegate.pipeline.rounds.records import Records
from tidegate.pipeline.rounds.ways_out import replay_app
from tidegate.storage import open_backend
from tidegate.web.overview import overview
from tidegate.web.site import Site

TEN = 1_767_261_600_000
RESUME = "pipeline.rounds.orders.resume_command: app resume"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands are typed in: without more they mean ./data/log and ./data/state."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def define(
    name: str = "shop", window: str = "1d", to: str | None = "counts", steps: Any = lambda stream: stream
) -> tg.App:
    app = tg.App(name, data="./data")
    stream = steps(app.stream("orders", value=tg.Json(amount="double")))
    windows = stream.window(tg.Tumbling(window, retention="30d")).agg(n=tg.count()).to_table(f"{name}-counts")
    if to is not None:
        windows.to_topic(to)
    return app


def produce(*values: str, partitions: int = 1, key: str | None = "k", **writing: Any) -> None:
    rows = {
        "key": pa.array([key] * len(values), pa.string()),
        "value": list(values),
        "timestamp": [TEN] * len(values),
    }
    with tg.Log("./data/log") as log:
        log.create_topic("orders", partitions, if_not_exists=True)
        with log.writer("orders", **writing) as writer:
            writer.write(pa.table(rows))


def orders(count: int, **given: Any) -> None:
    produce(*['{"amount":1.0}'] * count, **given)


def ran(app: tg.App, **settings: Any) -> Any:
    return app.run("local", until="caught_up", **settings)


def counted(app: tg.App) -> int:
    """What the app's own table says."""
    with app.open_table(f"{app.name}-counts") as table:
        return sum(row.value["n"] for row in table.all())


def sent(topic: str = "counts", size: str = "1d", state: str = "reader") -> int:
    """What another application sees of the results."""
    consumed = tg.Consumed(value=tg.Long())
    with tg.windowed_table("./data/log", topic, size, state=state, consumed=consumed) as table:
        return sum(row.value for row in table.all())


# -- input ---------------------------------------------------------------------------------------


def test_a_topic_that_does_not_exist_is_created() -> None:
    with tg.Log("./data/log"):
        pass
    with pytest.raises(tg.InvalidError) as told:
        ran(define())
    typed(told.value, "pipeline.rounds.heads.Heads.require: topic create", N="1")
    orders(10)
    ran(define())
    assert counted(define()) == 10


def test_a_record_that_cannot_be_read_is_passed() -> None:
    produce(*['{"amount":1.0}'] * 9, "not json", '{"amount":1.0}')
    summary = ran(define())
    assert summary.exit_code != 0
    typed(summary, RESUME)
    assert ran(define()).exit_code == 0
    assert counted(define()) == 10


@pytest.mark.parametrize("batch", [2, 3], ids=["in the middle", "at the end"])
def test_a_damaged_batch_is_passed_at_once(batch: int) -> None:
    """Not record by record: all of its offsets are unreadable."""
    orders(20, batch_records=5)
    segment = Path("data/log/orders-0/00000000000000000000.log")
    content = bytearray(segment.read_bytes())
    position = list(iter_headers(bytes(content)))[batch][0]
    content[position + 70] ^= 4
    segment.write_bytes(content)
    summary = ran(define())
    assert [each.reason for each in summary.stopped] == ["corrupt"]
    typed(summary, RESUME)
    assert ran(define()).exit_code == 0
    assert counted(define()) == 15


def test_a_fault_that_stops_is_looked_at_and_passed() -> None:
    broken("drop", "6")
    app = define(steps=lambda stream: stream.validate("fail"))
    summary = ran(app)
    assert [each.reason for each in summary.stopped] == ["integrity"]
    assert "missing" in typed(summary, "pipeline.tasks.sources.Reading._stop: verify", expect=1)
    typed(summary, RESUME)
    assert ran(app).exit_code == 0
    assert counted(app) in (18, 19)


def broken(kind: str, offset: str) -> None:
    """Twenty orders, numbered and check-summed, with one damage."""
    with tg.Log("whole") as log:
        log.create_topic("orders", 1)
        rows = {"key": ["k"] * 20, "value": ['{"amount":1.0}'] * 20, "timestamp": [TEN] * 20}
        with log.writer("orders", integrity=True) as writer:
            writer.write(pa.table(rows))
    assert (
        cli(["break", "orders", "--log", "whole", "--kind", kind, "--offset", offset, "--into", "data/log"])
        == 0
    )


@pytest.mark.parametrize("told_by", ["run", "status"])
def test_faults_that_are_known_are_acknowledged(told_by: str, capsys: pytest.CaptureFixture[str]) -> None:
    broken("flip", "6")
    app = define(steps=lambda stream: stream.validate())
    summary = ran(app)
    assert summary.exit_code == 1 and counted(app) == 19
    if told_by == "run":
        typed(summary, "pipeline.rounds.run.Summary._fault_lines: app acknowledge")
    else:
        assert cli(["app", "status", "shop"]) == 1
        typed(capsys.readouterr().err, "cli.app.status: app acknowledge")
    assert cli(["app", "status", "shop"]) == 0
    assert ran(app).exit_code == 0 and counted(app) == 19


def test_offsets_that_are_deleted_while_a_round_reads_them_are_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders(10)
    planned = master.plan_round

    ran(define())
    orders(10)

    def later(*given: Any) -> Any:
        plan = planned(*given)
        monkeypatch.setattr(master, "plan_round", planned)
        with tg.Log("./data/log") as log:
            log.partition("orders", 0).delete_records_before(14)
        return plan

    monkeypatch.setattr(master, "plan_round", later)
    summary = ran(define())
    assert [each.reason for each in summary.stopped] == ["lost"]
    typed(summary, RESUME)
    assert ran(define()).exit_code == 0
    assert counted(define()) == 16


@pytest.mark.parametrize("way", ["resume", "on_loss"])
def test_offsets_that_retention_took_are_passed_or_accepted(way: str) -> None:
    orders(10)
    ran(define())
    orders(10)
    with tg.Log("./data/log") as log:
        log.partition("orders", 0).delete_records_before(14)
    (stopped,) = ran(define()).stopped
    assert "on_loss='accept'" in stopped.message
    if way == "resume":
        typed(stopped.message, RESUME)
        assert ran(define()).exit_code == 0
    else:
        assert ran(define(), on_loss="accept").exit_code == 0
    assert counted(define()) == 16


@pytest.mark.parametrize("way", ["reset", "resume"])
def test_a_topic_that_was_created_again_is_read_anew_or_on(way: str) -> None:
    orders(10)
    ran(define())
    with tg.Log("./data/log") as log:
        log.delete_topic("orders")
    orders(4)
    (stopped,) = ran(define()).stopped
    if way == "reset":
        typed(stopped.message, "pipeline.rounds.planning._recreated: app reset")
    else:
        typed(stopped.message, RESUME)
    assert ran(define()).exit_code == 0
    assert counted(define()) == (4 if way == "reset" else 14)


@pytest.mark.parametrize("way", ["reset", "resume"])
def test_a_topic_that_was_cut_is_read_anew_or_on(way: str) -> None:
    """The log came back from an older copy: its topic is the same one, and shorter."""
    orders(10)
    shutil.copytree("data/log", "copy")
    orders(10)
    ran(define(to=None))
    shutil.rmtree("data/log")
    shutil.copytree("copy", "data/log")
    (stopped,) = ran(define(to=None)).stopped
    assert "ends at offset 10" in stopped.message
    if way == "reset":
        typed(stopped.message, "pipeline.rounds.planning._lost: app reset")
    else:
        typed(stopped.message, RESUME)
    orders(3)
    assert ran(define(to=None)).exit_code == 0
    assert counted(define(to=None)) == (13 if way == "reset" else 23)


def test_added_partitions_are_read_by_an_app_that_starts_over() -> None:
    orders(10)
    ran(define())
    assert cli(["topic", "alter", "orders", "--partitions", "2"]) == 0
    with pytest.raises(tg.InvalidError) as told:
        ran(define())
    typed(told.value, "pipeline.rounds.opening._moved: app reset")
    ran(define())
    assert counted(define()) == 10
    ran(define("another", to="other-counts"))
    assert counted(define("another", to="other-counts")) == 10


STEPS = {
    "key_by": lambda stream: stream.key_by("amount"),
    "filter": lambda stream: stream.filter("key IS NOT NULL"),
}


@pytest.mark.parametrize("way", STEPS)
def test_records_without_a_key_are_keyed_or_left_out(way: str) -> None:
    produce('{"amount":1.0}', '{"amount":2.0}', partitions=2)
    produce(*['{"amount":1.0}'] * 4, key=None)

    def app_of(steps: Any = lambda stream: stream) -> tg.App:
        return define(to=None, steps=lambda stream: steps(stream).drop_duplicates("amount", within="1h"))

    summary = ran(app_of())
    assert ".key_by('amount')" in str(summary) and ".filter('key IS NOT NULL')" in str(summary)
    typed(summary, "pipeline.tasks.chain.keyless: app reset")
    assert ran(app_of(STEPS[way])).exit_code == 0
    assert counted(app_of(STEPS[way])) == 2


# -- position ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["back", "all"])
def test_records_are_read_again_by_going_back(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    orders(5)
    ran(define())
    produce(*['{"amount":1.0}'] * 4, "not json")
    ran(define())
    assert cli(["app", "resume", "shop", "--partition", "orders-0", "--skip-to", "3"]) == 2
    refused = capsys.readouterr().err
    listed = typed(refused, "pipeline.rounds.positions.require_not_read_again: app checkpoints")
    first = min(int(found) for found in re.findall(r'"round": ?(\d+)', listed) if int(found) > 0)
    typed(
        refused,
        "pipeline.rounds.positions.require_not_read_again: app replay",
        **({"N": str(first)} if way == "back" else {}),
    )
    (stopped,) = ran(define()).stopped
    typed(stopped.message + "\n" + stopped.command, RESUME)
    assert ran(define()).exit_code == 0
    assert counted(define()) == 9 and sent() == 9


def test_a_commit_that_was_undone_is_computed_again() -> None:
    for _ in range(5):
        orders(10)
        ran(define())
    assert cli(["app", "replay", "shop", "--to-round", "2", "--yes"]) == 0

    class Enough(Exception):
        pass

    def enough(progress: Any) -> None:
        if progress.round > 7:
            raise Enough

    with pytest.raises(Enough):
        ran(define(), round_records=5, progress=enough)
    with pytest.raises(tg.InvalidError) as told:
        replay_app(open_backend("./data/state"), "shop", to_round=5)
    typed(told.value, "pipeline.rounds.ways_out._require_not_ahead: app replay")
    ran(define())
    assert counted(define()) == 50 and sent() == 50


# -- definition ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    ["pipeline.definition.changes._WAYS_OUT: app reset", "pipeline.definition.changes._WAYS_OUT: app replay"],
)
def test_an_app_that_was_changed_begins_anew(place: str) -> None:
    orders(10)
    ran(define())
    changed = define(window="1h", to="hours")
    with pytest.raises(tg.InvalidError) as told:
        ran(changed)
    typed(told.value, place)
    orders(5)
    ran(changed)
    assert counted(changed) == 15 and sent("hours", "1h") == 15


def test_an_app_whose_definition_came_back_from_an_older_copy_starts_over() -> None:
    orders(10)
    ran(define())
    record = Path("data/state/apps/shop/app")
    older = record.read_bytes()
    changed = define()
    changed.stream("orders", value=tg.Json(amount="double")).select("amount").to_topic("amounts")
    ran(changed)
    record.write_bytes(older)
    orders(5)
    with pytest.raises(tg.InvalidError) as told:
        ran(changed)
    typed(told.value, "pipeline.rounds.opening._Opening._recorded: app reset")
    ran(changed)
    assert counted(changed) == 15


def test_a_topic_with_another_encoding_is_deleted_and_the_app_starts_over() -> None:
    orders(10)
    ran(define())
    ran(define("other", window="1h", to="hours"))
    with pytest.raises(tg.InvalidError) as told:
        ran(define(to="hours"))
    typed(told.value, "tables.topic_encoding.require_fit: topic delete")
    typed(told.value, "tables.topic_encoding.require_fit: app reset")
    ran(define(to="hours"))
    assert sent("hours") == 10


# -- output --------------------------------------------------------------------------------------


def test_results_go_on_behind_what_another_program_wrote() -> None:
    orders(10)
    ran(define())
    with tg.Log("./data/log") as log:
        log.writer("counts").write(pa.table({"key": [b"not ours"], "value": [b"not ours"]}))
    orders(10)
    with pytest.raises(tg.FencedError) as told:
        ran(define())
    typed(told.value, "pipeline.tasks.sections.fenced: app rebase", APP="shop", LOG="./data/log")
    ran(define())
    assert counted(define()) == 20


def test_results_for_a_topic_that_is_gone_are_sent_to_one_that_is_created(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    orders(10)
    with monkeypatch.context() as meanwhile:  # a process that died between commit and delivery
        meanwhile.setattr(master.Master, "deliver_outstanding", lambda self: False)
        ran(define())
    with tg.Log("./data/log") as log:
        log.delete_topic("counts")
    rebase = ["app", "rebase", "shop", "--log", "./data/log", "--yes"]
    assert cli(rebase) == 2
    typed(capsys.readouterr().err, "pipeline.rounds.ways_out.rebase_outputs.edit: topic create")
    assert cli(rebase) == 0
    ran(define())
    assert counted(define()) == 10 and sent() == 10


# -- records that are not of one history ---------------------------------------------------------


def test_a_plan_of_another_copy_is_forgotten_by_starting_over() -> None:
    orders(10)
    ran(define(to=None))
    shutil.copytree("data/state", "copy")
    orders(10)
    ran(define(to=None))
    orders(5)
    with pytest.MonkeyPatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(Records, "put_commit", killed)
        ran(define(to=None))
    plan = max(Path("data/state/apps/shop/plans").iterdir())
    left = plan.read_bytes()
    shutil.rmtree("data/state")
    shutil.copytree("copy", "data/state")
    ran(define(to=None))
    assert int(max(Path("data/state/apps/shop/commits").iterdir()).name) == int(plan.name) - 1
    plan.write_bytes(left)
    with pytest.raises(tg.CorruptError) as told:
        ran(define(to=None))
    typed(told.value, "pipeline.rounds.master.Master._step: app reset")
    ran(define(to=None))
    assert counted(define(to=None)) == 25


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_large_state_that_is_damaged_is_gone_back_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a source knows of its producers lies beside the commit where it is large; here that is 64 bytes."""
    monkeypatch.setattr("tidegate.pipeline.rounds.records.INLINE_BYTES", 64)
    app = define(steps=lambda stream: stream.validate())
    for _ in range(3):
        orders(10, integrity=True)
        ran(app)
    stored = max(Path("data/state/apps/shop/sources").rglob("*-*"))
    content = bytearray(stored.read_bytes())
    content[len(content) // 2] ^= 4
    stored.write_bytes(content)
    orders(5, integrity=True)
    with pytest.raises(tg.CorruptError) as told:
        ran(app)
    round = int(stored.name.partition("-")[0])
    typed(told.value, "pipeline.rounds.records.Records.state_of: app replay", N=str(round - 1))
    assert ran(app).exit_code == 0
    assert counted(app) == 35


def test_a_table_that_went_on_during_a_round_is_looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def priced() -> tg.App:
        app = tg.App("sales", data="./data")
        stream = app.stream("orders", value=tg.Json(amount="double"))
        stream.lookup("prices", "cents", value=tg.Json(cents="int64")).to_topic("priced")
        return app

    def prices(cents: int) -> None:
        with tg.Log("./data/log") as log:
            log.create_topic("prices", 1, if_not_exists=True)
            log.writer("prices").write(pa.table({"key": ["k"], "value": [f'{{"cents":{cents}}}']}))

    prices(1)
    with tg.App("reader", data="./data").table("prices", value=tg.Json(cents="int64")) as table:
        table.catch_up()
    orders(3)
    attempt = master.Master._attempt

    def meanwhile(self: master.Master, order: Any) -> Any:
        monkeypatch.setattr(master.Master, "_attempt", attempt)
        for cents in range(2, 30):
            prices(cents)
            self._tables._refresh("prices")  # type: ignore[attr-defined]
        return attempt(self, order)

    monkeypatch.setattr(master.Master, "_attempt", meanwhile)
    with pytest.raises(
        tg.UnavailableError, match=r"not kept any more.*Start the app again: it plans the round anew"
    ):
        ran(priced())
    assert ran(priced()).exit_code == 0
    with tg.Log("./data/log", read_only=True) as log:
        found = log.reader("priced").read_all().column("value").to_pylist()
    assert found == [b'{"amount":1,"cents":29}'] * 3


def test_a_certificate_of_an_app_that_is_not_there_is_asked_for_by_its_name() -> None:
    orders(10)
    ran(define())
    backend = open_backend("./data/state")
    with pytest.raises(tg.InvalidError) as told:
        certify_round(backend, "shoop", None, "./data/log", now_ms=TEN)
    backend.close()
    assert "shop" in typed(told.value, "pipeline.reading.certificates.certify_round: app status")
    assert cli(["certificate", "export", "shop", "--round", "1"]) == 0


def test_an_app_with_records_to_read_is_started_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders(10)
    ran(define(to=None))
    orders(5)
    site = Site(Path("data/log"), Path("data/state"))
    try:
        (step,) = [each for each in overview(site).steps if "start it again" in each.sentence]
    finally:
        site.close()
    (home / "shop_app.py").write_text(
        "import tidegate as tg\n"
        "app = tg.App('shop', data='./data')\n"
        "stream = app.stream('orders', value=tg.Json(amount='double'))\n"
        "stream.window(tg.Tumbling('1d', retention='30d')).agg(n=tg.count()).to_table('shop-counts')\n"
    )
    monkeypatch.syspath_prepend(str(home))
    typed(step.command, "web.overview._steps: run", "--once", "--engine", "local", MODULE="shop_app")
    assert counted(define(to=None)) == 15
