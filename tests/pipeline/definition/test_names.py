"""Names of apps, tables and ends: one rule, and what the definition accepts can be run, stored and read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.errors import InvalidError
from tidegate.pipeline.rounds.records import app_folder
from tidegate.tables.versions.push import PushPlan
from tidegate.windows.kinds import Tumbling

REFUSED = ["", ".", "..", ".shop", "a" * 151, "sho p", "a/b", "a~", "ä", "a\n", None, 7]
ALLOWED = ["a" * 150, "a", "-", "a.b", "a..b", "1", "a.tmp", "Shop_2"]


def counted(folder: Path, app: str = "shop", *, table: str | None = None, topic: str | None = None) -> tg.App:
    """An app over one record, with one end."""
    with tg.Log(folder / "log") as log:
        log.create_topic("orders", partitions=1)
        log.writer("orders").write(pa.table({"key": ["k"], "value": [b'{"amount": 2}']}))
    made = tg.App(app, data=folder)
    flow = made.stream("orders", value=tg.Json(amount="int64")).window(Tumbling("1m")).agg(n=tg.count())
    if table is not None:
        flow.to_table(table)
    if topic is not None:
        flow.to_topic(topic)
    return made


@pytest.mark.parametrize("name", [*REFUSED, "apps", "tables"])
def test_a_name_that_could_not_be_stored_is_refused_when_the_app_is_defined(
    name: object, tmp_path: Path
) -> None:
    with pytest.raises(InvalidError, match=r"app name .* is not allowed: use 1 to 150 of the characters"):
        tg.App(name, data=tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ALLOWED)
def test_every_name_that_is_accepted_can_be_run_and_read(name: str, tmp_path: Path) -> None:
    with counted(tmp_path, name, table="counts") as app:
        app.run(until="caught_up", close=True)
        assert app.open_table("counts").to_arrow().column("n").to_pylist() == [1]
    assert app_folder(name) == f"apps/{name}"


@pytest.mark.parametrize("kind", ["table", "topic"])
@pytest.mark.parametrize("length", [180, 181])
def test_the_length_of_an_end_is_checked_when_it_is_defined(kind: str, length: int, tmp_path: Path) -> None:
    name = "e" * length
    if length > 180:
        with pytest.raises(InvalidError, match=r"goes to a name of 181 characters, .* has at most 180"):
            counted(tmp_path, **{kind: name})
        return
    with counted(tmp_path, **{kind: name}) as app:
        assert app.run(until="caught_up", close=True).rounds > 0


@pytest.mark.parametrize("name", [name for name in REFUSED if isinstance(name, str)])
def test_a_pushed_table_has_a_name_of_the_same_rule(name: str) -> None:
    with pytest.raises(InvalidError, match=r"table name .* is not allowed: use 1 to 150"):
        PushPlan("log", name, 1, "string", "string")


def test_the_rule_is_told_with_the_name_cut_short() -> None:
    with pytest.raises(InvalidError) as refused:
        tg.App("x" * 4000, data="data")
    assert len(str(refused.value)) < 300 and "4000 characters" in str(refused.value)


def test_an_app_and_a_table_differ_in_reserved_names_only(tmp_path: Path) -> None:
    for name in ("apps", "tables"):
        PushPlan("log", name, 1, "string", "string")
        with pytest.raises(InvalidError, match="nor apps or tables, which are folders of the state"):
            tg.App(name, data=tmp_path)
