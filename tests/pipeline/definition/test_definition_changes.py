"""An app that was changed: what goes on with its state, what does not, and what is said about it."""

from __future__ import annotations

import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tidegate as tg
from tidegate.pipeline.definition.changes import Changes, compare

ORDER = tg.Json(order_id="string", amount="double", user="string")


def app_of(folder, build) -> tg.App:
    app = tg.App("shop", data=folder)
    build(app)
    return app


def counted(
    app,
    *,
    window=None,
    within="10m",
    steps=lambda stream: stream,
    topic="counts",
    source=None,
    also=(),
    to=None,
    dedupe=None,
    aggregates=None,
    **settings,
) -> None:
    stream = app.stream("orders", value=ORDER, **(source or {}))
    stream = steps(stream).drop_duplicates("order_id", within, **(dedupe or {}))
    made = stream.window(window or tg.Tumbling("1m", grace="30s"), **settings).agg(
        **(aggregates or {"orders": tg.count(), "revenue": tg.sum("amount")})
    )
    made.to_topic(topic, **(to or {}))
    for name in also:
        made.to_topic(name)


def changed(folder, before, after) -> Changes:
    old, new = app_of(folder, before), app_of(folder, after)
    return compare({flow.name: flow.description for flow in old.flows}, new.flows)


def of(**settings):
    return lambda app: counted(app, **settings)


def test_the_same_definition_is_the_same_also_in_another_process(tmp_path) -> None:
    assert changed(tmp_path, of(), of()).kind == "same"
    script = (
        "import tidegate as tg\n"
        "app = tg.App('shop', data='x')\n"
        "stream = app.stream('orders', value=tg.Json(a='int', b='string'))\n"
        "stream = stream.filter(lambda batch: batch['a'].is_valid())\n"
        "stream.filter('b IN (\\'x\\', \\'y\\')').key_by('b').window(tg.Session('5m')).count().to_topic('c')\n"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", script + "print(app.fingerprint)"],
        env={"PYTHONHASHSEED": "7", "PATH": ""},
        capture_output=True,
        check=True,
        text=True,
    ).stdout.strip()
    here: dict = {"__name__": "__main__"}
    exec(script, here)
    assert here["app"].fingerprint == elsewhere


COMPATIBLE = {
    "another end": (of(), of(also=("more",)), "also goes to more"),
    "an end less": (of(also=("more",)), of(), "does not go to more"),
    "another format of values": (
        of(),
        of(to={"value": tg.Json(revenue="double")}),
        "value of counts changed",
    ),
    "a longer grace": (
        of(),
        of(window=tg.Tumbling("1m", grace="2m")),
        "grace was 30s and is 2m.*retention was 1m30s and is 3m",
    ),
    "a longer retention": (of(), of(window=tg.Tumbling("1m", grace="30s", retention="7d")), "is 7d"),
    "a longer horizon": (of(), of(within="1h"), "within was 10m and is 1h"),
    "a new aggregate": (
        of(),
        of(aggregates={"orders": tg.count(), "revenue": tg.sum("amount"), "top": tg.max("amount")}),
        "aggregate top is new: windows there are have it for records from now on",
    ),
    "a late table of another size": (of(), of(late=tg.LateSettings("1d")), "late records"),
    "no late table": (of(), of(late="drop", future=None), "not kept any more"),
    "a late table": (of(late="drop", future=None), of(), "late records are kept"),
    "another guard": (of(), of(future=tg.FutureGuard("1h")), "future changed"),
    "idle closing": (of(), of(idle_close="5m"), "idle_close changed"),
    "validation": (of(), of(steps=lambda s: s.validate()), "it validates"),
    "no validation": (of(steps=lambda s: s.validate()), of(), "not validate any more"),
    "validation that stops": (
        of(steps=lambda s: s.validate()),
        of(steps=lambda s: s.validate("fail")),
        "on_error was keep and is fail",
    ),
    "another start": (of(), of(source={"start": "latest"}), "only a new flow begins there"),
    "bad values": (of(), of(source={"on_error": "keep"}), "on_error was fail and is keep"),
    "dedupe that forwards": (of(), of(dedupe={"late": "forward"}), "late was drop and is forward"),
}

INCOMPATIBLE = {
    "another topic": (
        of(),
        lambda app: app.stream("x", value=ORDER).to_topic("counts"),
        "source's topic was orders",
    ),
    "another window": (
        of(),
        of(window=tg.Tumbling("2m", grace="30s")),
        r"tumbling \(size 1m\) and is tumbling \(size 2m\)",
    ),
    "another kind": (of(), of(window=tg.Session("1m", grace="30s")), "and is session"),
    "a shorter grace": (of(), of(window=tg.Tumbling("1m", grace="5s")), "shorter"),
    "a shorter horizon": (of(), of(within="1m"), "shorter"),
    "other ids": (
        of(),
        lambda app: (
            app.stream("orders", value=ORDER)
            .drop_duplicates(["order_id", "user"], "10m")
            .window(tg.Tumbling("1m", grace="30s"))
            .agg(orders=tg.count(), revenue=tg.sum("amount"))
            .to_topic("counts")
        ),
        "of the old columns",
    ),
    "a new aggregate in front": (
        of(),
        of(aggregates={"top": tg.max("amount"), "orders": tg.count(), "revenue": tg.sum("amount")}),
        "aggregate top is new.*append new ones at the end",
    ),
    "a new reducer": (
        of(),
        of(
            aggregates={
                "orders": tg.count(),
                "revenue": tg.sum("amount"),
                "own": tg.reduce("amount", lambda states, groups, count: states, state=pa.float64()),
            }
        ),
        "aggregate own is new.*replay",
    ),
    "a count that would become an object": (
        of(aggregates={"orders": tg.count()}),
        of(aggregates={"orders": tg.count(), "top": tg.max("amount")}),
        "8-byte counts, and would become JSON",
    ),
    "an aggregate less": (of(), of(aggregates={"orders": tg.count()}), "revenue is not there"),
    "another aggregate": (
        of(),
        of(aggregates={"orders": tg.count(), "revenue": tg.mean("amount")}),
        "revenue is made otherwise",
    ),
    "another order": (
        of(),
        of(aggregates={"revenue": tg.sum("amount"), "orders": tg.count()}),
        "another order",
    ),
    "another emit": (of(), of(emit="close"), "emit was update and is close"),
    "a filter more": (of(), of(steps=lambda s: s.filter("amount > 0")), "its steps were"),
    "another filter": (
        of(steps=lambda s: s.filter("amount > 0")),
        of(steps=lambda s: s.filter("amount > 1")),
        "its filter changed",
    ),
    "another function": (
        of(steps=lambda s: s.filter(positive)),
        of(steps=lambda s: s.filter(negative)),
        "its filter changed",
    ),
    "other shards": (
        of(steps=lambda s: s.key_by("user")),
        of(steps=lambda s: s.key_by("user", shards=16)),
        "shards were 8 and are 16",
    ),
    "other values": (of(), of(source={"key": tg.Bytes()}), "how it reads key changed"),
    "other partitions": (of(), of(to={"partitions": 3}), "partitions of counts changed"),
    "a table where a topic was": (
        of(also=()),
        lambda app: counted_table(app),
        "was a to and is a table",
    ),
}


def positive(batch: pa.RecordBatch) -> pa.Array:
    return pc.greater(batch["amount"], 0)


def negative(batch: pa.RecordBatch) -> pa.Array:
    return pc.less(batch["amount"], 0)


def counted_table(app) -> None:
    stream = app.stream("orders", value=ORDER).drop_duplicates("order_id", "10m")
    made = stream.window(tg.Tumbling("1m", grace="30s"))
    made.agg(orders=tg.count(), revenue=tg.sum("amount")).to_table("counts")


@pytest.mark.parametrize(("before", "after", "said"), COMPATIBLE.values(), ids=COMPATIBLE.keys())
def test_it_goes_on_and_says_what_changes(tmp_path, before, after, said) -> None:
    found = changed(tmp_path, before, after)
    assert found.kind == "compatible", found.notes
    assert re.search(f"(?s){said}", "\n".join(found.notes)), found.notes
    assert found.fresh == found.removed == frozenset()
    found.require("shop")


@pytest.mark.parametrize(("before", "after", "said"), INCOMPATIBLE.values(), ids=INCOMPATIBLE.keys())
def test_it_stops_and_names_the_ways_out(tmp_path, before, after, said) -> None:
    found = changed(tmp_path, before, after)
    assert found.kind == "incompatible", found.notes
    with pytest.raises(tg.InvalidError, match=f"(?s){said}") as caught:
        found.require("shop")
    for way in ("tidegate app reset shop", "tidegate app replay shop", "another name"):
        assert way in str(caught.value)


def test_flows_that_come_and_go_do_not_touch_the_others(tmp_path) -> None:
    def two(app) -> None:
        counted(app)
        app.stream("orders", value=ORDER).filter("amount > 5").to_topic("large")

    grown = changed(tmp_path, of(), two)
    assert (grown.kind, grown.fresh, grown.removed) == ("compatible", {"large"}, frozenset())
    shrunk = changed(tmp_path, two, of())
    assert (shrunk.kind, shrunk.fresh, shrunk.removed) == ("compatible", frozenset(), {"large"})
    assert [flow.name for flow in shrunk.flows] == ["counts"]


def test_a_flow_without_state_may_change_at_will(tmp_path) -> None:
    def plain(condition):
        return lambda app: app.stream("orders", value=ORDER).filter(condition).to_topic("large")

    found = changed(tmp_path, plain("amount > 5"), plain("amount > 50"))
    assert found.kind == "compatible" and "no state" in found.notes[0]
    keyed = changed(
        tmp_path,
        plain("amount > 5"),
        lambda app: app.stream("orders", value=ORDER).key_by("user").to_topic("large"),
    )
    assert keyed.kind == "compatible"
    stateful = changed(tmp_path, plain("amount > 5"), lambda app: counted(app, topic="large"))
    assert stateful.kind == "incompatible"


def test_new_code_under_an_old_name_is_remarked_on(tmp_path) -> None:
    def made(text):
        names: dict = {"pc": pc}
        exec(f"def choose(batch):\n    return {text}", names)  # two functions of one module and name
        names["choose"].__module__ = "shop"
        return of(steps=lambda s: s.filter(names["choose"]))

    found = changed(tmp_path, made("pc.greater(batch['amount'], 0)"), made("pc.greater(batch['amount'], 1)"))
    assert found.kind == "compatible" and "code of a function changed" in found.notes[0]
    assert (
        changed(tmp_path, made("pc.greater(batch['amount'], 0)"), made("pc.greater(batch['amount'], 0)")).kind
        == "same"
    )


def test_stores_keep_the_widths_they_were_made_with(tmp_path) -> None:
    found = changed(tmp_path, of(), of(window=tg.Tumbling("1m", grace="30s", retention="30d"), within="9h"))
    (flow,) = found.flows
    old = app_of(tmp_path, of()).flows[0]
    new = app_of(tmp_path, of(window=tg.Tumbling("1m", grace="30s", retention="30d"), within="9h")).flows[0]
    assert new.document["layouts"] != old.document["layouts"]
    assert flow.document["layouts"] == old.document["layouts"]
    assert flow.fingerprint == new.fingerprint  # the same is said
    again = compare({flow.name: flow.description}, [new])  # and stays so at the next start
    assert again.kind == "same" and again.flows[0].document["layouts"] == old.document["layouts"]


def test_states_may_be_of_several_earlier_definitions(tmp_path) -> None:
    first = {"orders": tg.count(), "revenue": tg.sum("amount")}
    second, third = (
        {**first, "top": tg.max("amount")},
        {**first, "top": tg.max("amount"), "low": tg.min("amount")},
    )
    (once,) = changed(tmp_path, of(), of(aggregates=second)).flows
    assert once.steps[-1].layout.grown_from == (2,)
    new = app_of(tmp_path, of(aggregates=third)).flows
    twice = compare({once.name: once.description}, new)
    assert twice.kind == "compatible" and twice.flows[0].steps[-1].layout.grown_from == (2, 3)
    again = compare({"counts": twice.flows[0].description}, new)
    assert again.kind == "same" and again.flows[0].steps[-1].layout.grown_from == (2, 3)


def test_a_record_that_cannot_be_read_is_named(tmp_path) -> None:
    app = app_of(tmp_path, of())
    with pytest.raises(tg.CorruptError, match="flow counts"):
        compare({"counts": b"{"}, app.flows)
