"""A declared field that no record has is told, and what state depends on is not started without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.main import run as cli
from tidegate.errors import InvalidError
from tidegate.pipeline.admin import has_app
from tidegate.storage import open_backend

TEN = 1_767_261_600_000


def produce(folder: Path, *values: dict[str, Any], key: str | None = "ann", partitions: int = 1) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("orders", partitions, if_not_exists=True)
        rows = {
            "key": pa.array([key] * len(values), pa.string()),
            "value": [json.dumps(value) for value in values],
            "timestamp": [TEN + place for place in range(len(values))],
        }
        log.writer("orders").write(pa.table(rows))


ORDERS = [{"order_id": f"o{number // 2}", "amount": 1.5, "at": TEN + number} for number in range(10)]


def stream(folder: Path, timestamp: str | None = None, **fields: Any) -> tuple[tg.App, Any]:
    app = tg.App("shop", data=folder)
    return app, app.stream("orders", value=tg.Json(**fields), timestamp=timestamp)


def summed(folder: Path, amount: Any = "double", name: str = "amout") -> tg.App:
    app, orders = stream(folder, **{name: amount})
    orders.window(tg.Tumbling("1m", retention="1h")).agg(revenue=tg.sum(name)).to_table("minutes")
    return app


def deduplicated(folder: Path, name: str = "orderid") -> tg.App:
    app, orders = stream(folder, **{name: "string"})
    orders.drop_duplicates(name, within="10m").to_topic("unique")
    return app


def keyed(folder: Path) -> tg.App:
    app, orders = stream(folder, Order_Id="string")
    orders.key_by("Order_Id").window(tg.Tumbling("1m")).count().to_table("minutes")
    return app


def timed(folder: Path) -> tg.App:
    app, orders = stream(folder, "att", att="timestamp")
    orders.window(tg.Tumbling("1m")).count().to_table("minutes")
    return app


def derived(folder: Path) -> tg.App:
    app, orders = stream(folder, amout="double")
    orders.select(gross="amout * 1.19").window(tg.Tumbling("1m")).agg(g=tg.sum("gross")).to_table("minutes")
    return app


WRONG = {
    "aggregate": (
        summed,
        r"revenue needs 'amout', which none of the 10 newest records of orders has; did you mean amount\?",
    ),
    "id": (deduplicated, r"drop_duplicates needs 'orderid', which none .* mean order_id\? they have amount, at"),
    "key": (keyed, r"key_by needs 'Order_Id', which none .* of orders has; did you mean order_id\?"),
    "event time": (timed, r"event time is 'att', which none .* did you mean at\?"),
    "derived": (derived, r"aggregate g needs 'gross', which is null in all records that come so far"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_state_depends_on_is_not_started_without_and_explain_says_it_before(tmp_path, case) -> None:
    define, said = WRONG[case]
    produce(tmp_path, *ORDERS)
    app = define(tmp_path)
    with pytest.raises(InvalidError, match=said):
        app.run("local", until="caught_up")
    assert not has_app(open_backend(tmp_path / "state"), "shop")  # nothing of it is left behind
    explained = app.explain()
    assert "it will not start: " in explained
    assert any(name in explained for name in ("amout", "orderid", "Order_Id", "att"))


def test_the_command_line_says_it_and_ends_with_2(tmp_path, monkeypatch, capsys) -> None:
    produce(tmp_path, *ORDERS)
    (tmp_path / "misspelt_shop.py").write_text(
        f"import tidegate as tg\napp = tg.App('shop', data={str(tmp_path)!r})\n"
        "orders = app.stream('orders', value=tg.Json(amout='double'))\n"
        "orders.window(tg.Tumbling('1m')).agg(revenue=tg.sum('amout')).to_topic('minutes')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli(["run", "misspelt_shop.py", "--engine", "local", "--once"]) == 2
    assert "did you mean amount?" in capsys.readouterr().err


def test_the_right_names_and_other_fields_that_nobody_uses_start(tmp_path) -> None:
    produce(tmp_path, *ORDERS)
    app, orders = stream(tmp_path, order_id="string", amount="double", colour="string")
    orders.drop_duplicates("order_id", within="10m").window(tg.Tumbling("1m")).agg(
        revenue=tg.sum("amount")
    ).to_table("minutes")
    summary = app.run("local", until="caught_up")
    assert summary.exit_code == 0
    (note,) = summary.notes
    assert "declared is 'colour', which none of the 10 newest records of orders has" in note
    assert "declared is 'colour'" in app.explain()
    assert "note: " in str(summary)
    assert summary.progress.nulls == {}


@pytest.mark.parametrize("name", ["amout", "amount"])
def test_an_optional_field_may_be_missing_everywhere(tmp_path, name) -> None:
    produce(tmp_path, *({"order_id": "o"} for _ in range(10)))
    app = summed(tmp_path, tg.field("double", optional=True), name)
    summary = app.run("local", until="caught_up")
    assert summary.exit_code == 0
    assert summary.progress.nulls == {f"minutes.{name}": 1.0}
    assert f"without a value: minutes.{name} 100 % of the records" in str(summary)
    assert "it will not start" not in app.explain()


def of_cancelled(folder: Path, use: str, note: Any) -> tg.App:
    """Of the ten newest orders two are cancelled, and none of these has a note."""
    values = [{"status": "cancelled" if number < 2 else "sent"} for number in range(10)]
    produce(folder, *(value | ({"note": "a"} if value["status"] == "sent" else {}) for value in values))
    app, orders = stream(folder, status="string", note=note)
    orders = orders.filter("status = 'cancelled'")
    if use == "key":
        orders = orders.key_by("note", shards=2)
    elif use == "key of an expression":
        orders = orders.key_by("upper(note)", shards=2)
    elif use == "derived":
        orders = orders.select(note="upper(note)")
    made = {"notes": tg.count("note"), "n": tg.count()}
    orders.window(tg.Tumbling("1m")).agg(**({"n": tg.count()} if "key" in use else made)).to_table("minutes")
    return app


@pytest.mark.parametrize("use", ["aggregate", "derived", "key", "key of an expression"])
def test_an_optional_field_may_be_null_in_all_records_that_a_filter_leaves(tmp_path, use) -> None:
    """It was refused, although it was declared so and no other declaration would have helped."""
    app = of_cancelled(tmp_path, use, tg.field("string", optional=True))
    assert app.run("local", until="caught_up", close=True).exit_code == 0
    with app.open_table("minutes") as table:
        rows = [row.value for row in table.all()]
    assert [row["n"] if isinstance(row, dict) else row for row in rows] == ([] if "key" in use else [2])


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (
            "aggregate",
            r"notes needs 'note', which is null .* so far; .* tg.field\(\"string\", optional=True\)",
        ),
        ("key", r"key_by needs 'note', which is null .* so far; .* tg.field\(\"string\", optional=True\)"),
        ("key of an expression", r"key_by\('upper\(note\)'\) gives none to any record that comes so far"),
    ],
)
def test_a_field_that_is_null_behind_a_filter_is_told_with_the_remedy(tmp_path, use, said) -> None:
    app = of_cancelled(tmp_path, use, "string")
    with pytest.raises(InvalidError, match=said):
        app.run("local", until="caught_up")
    assert "has a key" not in app.explain(), "each of the records has one"


def test_windows_by_a_key_that_is_null_start_with_the_filter_that_the_message_names(tmp_path) -> None:
    with pytest.raises(InvalidError) as refused:
        of_cancelled(tmp_path, "key of an expression", "string").run("local", until="caught_up")
    assert ".filter('(upper(note)) IS NOT NULL') before it" in str(refused.value)
    app, orders = stream(tmp_path, status="string", note="string")
    sound = orders.filter("status = 'cancelled'").filter("(upper(note)) IS NOT NULL").key_by("upper(note)")
    sound.window(tg.Tumbling("1m")).count().to_table("minutes")
    assert app.run("local", until="caught_up").exit_code == 0


def test_a_field_that_is_null_but_there_is_said_so(tmp_path) -> None:
    produce(tmp_path, *({"amount": None} for _ in range(10)))
    with pytest.raises(InvalidError, match="'amount', which is null in all of the 10 newest records"):
        summed(tmp_path, name="amount").run("local", until="caught_up")


def test_one_record_that_has_it_is_enough_and_the_share_of_the_others_is_told(tmp_path) -> None:
    produce(tmp_path, *({"amount": None} for _ in range(3)), {"amount": 1.0})
    summary = summed(tmp_path, name="amount").run("local", until="caught_up")
    assert summary.progress.nulls == {"minutes.amount": 0.75}
    assert "without a value: minutes.amount 75 % of the records" in str(summary)
    produce(tmp_path, *({"amount": 1.0} for _ in range(4)))
    assert summed(tmp_path, name="amount").run("local", until="caught_up").progress.nulls == {
        "minutes.amount": 0.375
    }


def test_without_a_sample_it_starts_and_the_share_of_nulls_tells(tmp_path) -> None:
    produce(tmp_path)
    app = deduplicated(tmp_path)
    with app.start("local", trigger="10ms") as run:
        produce(tmp_path, *ORDERS)
        run.await_caught_up("60s")
        assert run.progress.nulls == {"unique.orderid": 1.0}
        run.stop()


def test_records_without_keys_in_several_partitions_are_told_at_the_start(tmp_path) -> None:
    produce(tmp_path, *ORDERS, key=None, partitions=3)
    with pytest.raises(
        InvalidError, match=r"none of the 10 newest records of orders has a key; say .key_by\('order_id'\)"
    ):
        deduplicated(tmp_path, "order_id").run("local", until="caught_up")


@pytest.mark.parametrize("step", ["window", "drop_duplicates"])
def test_records_without_keys_behind_a_filter_are_told_as_such_and_the_filter_named_helps(
    tmp_path, step
) -> None:
    """It said that none of the newest records had a key, which most of them had."""
    produce(tmp_path, *ORDERS, partitions=2)
    produce(tmp_path, {"order_id": "x", "amount": -1.0}, key=None)

    def refunds(*conditions: str) -> tg.App:
        app, orders = stream(tmp_path, order_id="string", amount="double")
        for condition in ("amount < 0", *conditions):
            orders = orders.filter(condition)
        if step == "window":
            orders.window(tg.Tumbling("1m")).count().to_table("minutes")
        else:
            orders.drop_duplicates("order_id", within="1h").to_topic("unique")
        return app

    with pytest.raises(InvalidError) as refused:
        refunds().run("local", until="caught_up")
    said = str(refused.value)
    assert "no record that comes so far has a key" in said and "newest records" not in said
    assert "leave them out with .filter('key IS NOT NULL')" in said
    assert refunds("key IS NOT NULL").run("local", until="caught_up").exit_code == 0


@pytest.mark.parametrize(
    ("declared", "factor", "unit"), [("timestamp", 0.001, "seconds"), ("timestamp[us]", 1, "milliseconds")]
)
def test_event_times_in_another_unit_everywhere_are_told_at_the_start(
    tmp_path, declared, factor, unit
) -> None:
    produce(tmp_path, *({"at": int(TEN * factor)} for _ in range(5)))
    app, orders = stream(tmp_path, "at", at=declared)
    orders.window(tg.Tumbling("1m")).count().to_table("minutes")
    with pytest.raises(
        InvalidError, match=f"event time 'at' is .* in {unit}; declare it .*all 5 records looked at"
    ):
        app.run("local", until="caught_up")
    assert f"in {unit}; declare it" in app.explain()


def test_a_started_app_that_a_deployment_of_producers_breaks_is_told_when_it_starts_again(tmp_path) -> None:
    produce(tmp_path, *ORDERS)
    summed(tmp_path, name="amount").run("local", until="caught_up")
    produce(tmp_path, *({"Amount": 1.0} for _ in range(2000)))
    with pytest.raises(InvalidError, match="did you mean Amount"):
        summed(tmp_path, name="amount").run("local", until="caught_up")


def test_a_function_of_the_users_is_called_by_workers_only(tmp_path) -> None:
    """Looking at a sample before the start must have no effects of its own."""
    app, rows = tg.App("shop", data=tmp_path), []

    def change(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows.append(batch.num_rows)
        return batch.select(["amount"])

    mapped = app.stream("orders", value=tg.Json(amount="double")).map(
        change, pa.schema([("amount", pa.float64())])
    )
    mapped.window(tg.Tumbling("1m")).agg(revenue=tg.sum("amount")).to_topic("revenue")
    with tg.Log(app.log) as log:
        log.create_topic("orders", 1)
        log.writer("orders").write(pa.table({"key": ["k"] * 7, "value": ['{"amount":1.0}'] * 7}))
    app.run("local", until="caught_up")
    assert sum(rows) == 7
