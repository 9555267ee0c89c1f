"""A step whose own service, disk or memory is out of reach: the round is tried again, then the run ends with exit
code 3 and the place; no record is blamed, set aside or lost, whatever `on_error` says."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.main import run
from tidegate.errors import InvalidError, UnavailableError, is_transient

ROWS = 20
AT = 1_767_261_600_000


def produce(folder: Path, rows: int = ROWS) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("orders", 2)
        for partition in range(2):
            table = {
                "key": [f"k{partition}"] * rows,
                "value": [json.dumps({"id": f"{partition}-{row}", "n": row}) for row in range(rows)],
                "timestamp": [AT + 1000 * row for row in range(rows)],
            }
            log.writer("orders").write(pa.table(table), partition=partition)


class Service:
    """What a step asks for each batch; fails with `error` on its calls number `failing`."""

    def __init__(self, error: Callable[[], BaseException], failing: range) -> None:
        self.error, self.failing, self.calls = error, failing, 0

    def ask(self) -> None:
        self.calls += 1
        if self.calls - 1 in self.failing:
            raise self.error()

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_rows:
            self.ask()
        return batch.select(["id", "n"])


ALWAYS = range(1 << 30)
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64())])
Shape = Callable[[tg.Stream, Service], Any]


def _reduced(stream: tg.Stream, service: Service, **where: bool) -> Any:
    def partial(rows: pa.RecordBatch, groups: Any, count: int) -> pa.Array:
        if where.get("partial"):
            service.ask()
        return merge(rows.column("n"), groups, count)

    def merge(states: pa.Array, groups: Any, count: int) -> pa.Array:
        sums = [0] * count
        for state, group in zip(states.to_pylist(), groups.tolist(), strict=True):
            sums[group] += state
        return pa.array(sums, pa.int64())

    def finish(states: pa.Array) -> pa.Array:
        if where.get("finish") and len(states):
            service.ask()
        return states

    own = tg.reduce("n", merge, partial=partial, state=pa.int64(), finish=finish, result=pa.int64())
    emit = "close" if where.get("finish") else "update"
    return stream.window(tg.Tumbling("5s", retention="1h"), emit=emit).agg(total=own)


SHAPES: dict[str, Shape] = {
    "map": lambda stream, service: stream.map(service, SCHEMA),
    "function": lambda stream, service: stream.select(
        "id", n=lambda rows: (service(rows) if rows.num_rows else rows).column("n")
    ),
    "behind state": lambda stream, service: stream.drop_duplicates("id", within="1h").map(service, SCHEMA),
    "re-keyed": lambda stream, service: (
        stream.key_by("id").map(service, SCHEMA).drop_duplicates("id", within="1h")
    ),
}
WINDOWS: dict[str, Shape] = {
    "partial": lambda stream, service: _reduced(stream, service, partial=True),
    "finish": lambda stream, service: _reduced(stream, service, finish=True),
}
OUTAGES: dict[str, Callable[[], BaseException]] = {
    "connection": lambda: ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
    "timeout": lambda: TimeoutError("no answer"),
    "memory": lambda: MemoryError("no room"),
    "disk": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "own": lambda: UnavailableError("the service is being deployed"),
}


def app_of(folder: Path, shape: str, service: Service, on_error: Any = "keep") -> tg.App:
    app = tg.App("shop", data=folder)
    stream = app.stream("orders", value=tg.Json(id="string", n="int64"), on_error=on_error)
    if shape in SHAPES:
        SHAPES[shape](stream, service).to_topic("out")
    else:
        made = WINDOWS[shape](stream, service)
        made.to_table("out")
        made.to_topic("sent")  # results are finished where they are sent
    return app


def total(app: tg.App, shape: str, folder: Path) -> int:
    if shape in WINDOWS:
        with app, app.open_table("out") as table:
            found = table.to_arrow()["total"].to_pylist()
        assert None not in found
        return sum(found)
    with tg.Log(folder / "log", read_only=True) as log:
        rows = [json.loads(value) for value in log.reader("out").read_all()["value"].to_pylist()]
    assert len({row["id"] for row in rows}) == len(rows)
    return sum(row["n"] for row in rows)


@pytest.mark.parametrize(
    ("shape", "outage"),
    [*(("map", outage) for outage in OUTAGES), *((shape, "connection") for shape in [*SHAPES, *WINDOWS][1:])],
)
def test_an_outage_ends_the_run_with_the_place_and_blames_no_record(
    tmp_path: Path, shape: str, outage: str
) -> None:
    produce(tmp_path)
    out = Service(OUTAGES[outage], ALWAYS)
    app = app_of(tmp_path, shape, out)
    with pytest.raises(UnavailableError) as told:
        app.run("local", until="caught_up", close=shape == "finish", patience_ms=0, attempts=2)
    assert told.value.exit_code == 3
    assert str(OUTAGES[outage]()) in str(told.value) and "No record is to blame" in str(told.value)
    named = {"function": "select", "partial": "aggregate total", "finish": "aggregate total"}
    assert named.get(shape, "map Service") in str(told.value)
    assert "orders-" in str(told.value) and "offset" in str(told.value)
    assert out.calls >= 2, "the round was tried again, with a bound"
    out.failing = range(0)  # the service is back
    summary = app.run("local", until="caught_up", close=shape == "finish")
    assert summary.exit_code == 0 and not summary.stopped
    assert app.dead_letters("out").num_rows == 0
    assert total(app, shape, tmp_path) == 2 * sum(range(ROWS))


@pytest.mark.parametrize("on_error", ["fail", "drop", "keep"])
@pytest.mark.parametrize("shape", [*SHAPES, *WINDOWS])
def test_an_outage_that_passes_changes_nothing(tmp_path: Path, shape: str, on_error: str) -> None:
    produce(tmp_path)
    short = Service(OUTAGES["connection"], range(1, 3))
    app = app_of(tmp_path, shape, short, on_error)
    summary = app.run("local", until="caught_up", close=shape == "finish", round_records=7)
    assert summary.exit_code == 0 and not summary.stopped and short.calls > 3
    assert app.dead_letters("out").num_rows == 0
    assert total(app, shape, tmp_path) == 2 * sum(range(ROWS))


def test_a_bad_record_beside_an_outage_is_still_a_dead_letter(tmp_path: Path) -> None:
    """The record is found by trying the step on fewer rows; an outage in the middle of that is not its fault."""
    produce(tmp_path)

    class Strict(Service):
        def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
            found = super().__call__(batch)
            if 11 in batch.column("n").to_pylist():
                raise ValueError("eleven")
            return found

    app = app_of(tmp_path, "map", Strict(OUTAGES["timeout"], range(3, 5)))
    assert app.run("local", until="caught_up").exit_code == 0
    letters = app.dead_letters("out")
    assert sorted(zip(letters["partition"].to_pylist(), letters["offset"].to_pylist(), strict=True)) == [
        (0, 11),
        (1, 11),
    ]
    assert total(app, "map", tmp_path) == 2 * (sum(range(ROWS)) - 11)


def test_the_command_line_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    produce(tmp_path)
    module = tmp_path / "shop.py"
    module.write_text(
        f"""
import tidegate as tg, pyarrow as pa
app = tg.App("shop", data={str(tmp_path)!r})
def ask(batch):
    if batch.num_rows:
        raise ConnectionResetError("the price service hung up")
    return batch.select(["n"])
app.stream("orders", value=tg.Json(n="int64"), on_error="keep").map(ask, pa.schema([("n", pa.int64())])).to_topic("out")
"""
    )
    assert run(["run", str(module), "--engine", "local", "--once"]) == 3
    said = capsys.readouterr().err
    assert "orders-" in said and "map ask" in said and "the price service hung up" in said
    assert "Traceback" not in said


def caused_by(error: Exception) -> Exception:
    try:
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("could not price the order") from cause
    except RuntimeError as made:
        return made


def during(error: Exception, *, hidden: bool = False) -> Exception:
    try:
        try:
            raise error
        except OSError:
            if hidden:
                raise ValueError("unknown price") from None
            raise ValueError("unknown price")  # noqa: B904 - as people write it
    except ValueError as made:
        return made


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionError(), True),
        (BrokenPipeError(), True),
        (TimeoutError(), True),
        (MemoryError(), True),
        (pa.ArrowMemoryError("no room"), True),
        (BlockingIOError(errno.EAGAIN, "again"), True),
        (OSError(errno.EMFILE, "too many open files"), True),
        (OSError(errno.EIO, "I/O error"), True),
        (OSError(errno.EHOSTUNREACH, "no route"), True),
        (socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution"), True),
        (UnavailableError("later"), True),
        (caused_by(ConnectionResetError("reset")), True),
        (during(TimeoutError()), True),
        (during(TimeoutError(), hidden=True), False),
        (socket.gaierror(socket.EAI_NONAME, "unknown host"), False),
        (FileNotFoundError(errno.ENOENT, "no such file"), False),
        (PermissionError(errno.EACCES, "denied"), False),
        (OSError(errno.ENAMETOOLONG, "name too long"), False),
        (OSError("a text"), False),
        (ValueError("bad"), False),
        (KeyError("price"), False),
        (InvalidError("no"), False),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_which_errors_may_pass(error: Exception, expected: bool) -> None:
    assert is_transient(error) is expected
