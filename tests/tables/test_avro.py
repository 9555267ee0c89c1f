"""Avro values with a schema registry: a real HTTP server, small enough to be read, that knows the protocol."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.errors import CorruptError, InvalidError, UnavailableError
from tidegate.tables.serdes.avro import Avro, SchemaRegistry
from tidegate.tables.serdes.base import Serde

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "amount", "type": ["null", "double"], "default": None},
    ],
}


class Registry(ThreadingHTTPServer):
    """Schemas in memory, numbered from 1 in the order they come; `asked` counts requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.schemas: list[str] = []
        self.subjects: dict[str, list[int]] = {}
        self.asked: list[str] = []
        self.answer: tuple[int, bytes] | None = None
        self.authorization: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Registry

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        parts = self.path.split("/")[1:]
        known = self.server
        if parts[:2] == ["schemas", "ids"] and int(parts[2]) <= len(known.schemas):
            return self.reply(200, {"schema": known.schemas[int(parts[2]) - 1]})
        if parts[0] == "subjects" and parts[1] in known.subjects:
            number = known.subjects[parts[1]][-1]
            return self.reply(200, {"id": number, "schema": known.schemas[number - 1], "version": 1})
        return self.reply(404, {"error_code": 40403, "message": "Schema not found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known, subject = self.server, self.path.split("/")[2]
        if body["schema"] not in known.schemas:
            known.schemas.append(body["schema"])
        number = known.schemas.index(body["schema"]) + 1
        known.subjects.setdefault(subject, []).append(number)
        return self.reply(200, {"id": number})

    def reply(self, code: int, body: dict[str, Any]) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        self.server.authorization = self.headers.get("Authorization")
        code, raw = self.server.answer or (code, json.dumps(body).encode())
        self.send_response(code)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def server() -> Iterator[Registry]:
    with Registry() as registry:
        thread = threading.Thread(target=registry.serve_forever, args=(0.02,))
        thread.start()
        yield registry
        registry.shutdown()
        thread.join()


@pytest.fixture
def registry(server: Registry) -> SchemaRegistry:
    return SchemaRegistry(server.url, timeout_s=5)


@pytest.fixture
def orders(registry: SchemaRegistry) -> Avro:
    return Avro(ORDER, registry=registry, subject="orders-value")


def test_a_value_is_framed_by_a_zero_and_its_schemas_number(orders: Avro) -> None:
    raw = orders.encode({"id": "a", "amount": 1.5})
    assert raw == bytes.fromhex("00 00000001 02 61 02 000000000000f83f")
    assert orders.decode(raw) == {"id": "a", "amount": 1.5}
    assert orders.encode(None) is None
    assert orders.decode(None) is None


def test_it_is_a_serde_with_columns(orders: Avro) -> None:
    assert isinstance(orders, Serde)
    rows = [{"id": "a", "amount": None}, None, {"id": "b", "amount": 2.0}]
    column = orders.encode_column(pa.array(rows, orders.arrow_type))
    assert column.to_pylist()[1] is None
    decoded = orders.decode_column(column)
    assert decoded.values.to_pylist() == rows
    assert decoded.require_good().type == pa.struct([("id", pa.string()), ("amount", pa.float64())])


def test_a_schema_is_asked_for_once(orders: Avro, server: Registry) -> None:
    raws = [orders.encode({"id": str(number), "amount": None}) for number in range(5)]
    fresh = Avro(ORDER, registry=SchemaRegistry(server.url), subject="orders-value")
    assert [fresh.decode(raw)["id"] for raw in raws] == list("01234")
    assert server.asked == ["POST /subjects/orders-value/versions", "GET /schemas/ids/1"]


def test_a_value_written_with_an_older_schema_is_resolved_to_the_declared_one(
    registry: SchemaRegistry,
) -> None:
    older = {**ORDER, "fields": ORDER["fields"][:1]}
    raw = Avro(older, registry=registry, subject="orders-value").encode({"id": "old"})
    newer = Avro(ORDER, registry=registry, subject="orders-value")
    assert newer.decode(raw) == {"id": "old", "amount": None}
    assert registry.latest("orders-value")[0] == 1


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        pytest.param(b"", "no framed Avro value", id="no bytes"),
        pytest.param(b"\x00\x00\x00", "no framed Avro value", id="cut in the frame"),
        pytest.param(b'{"id":"a"}', "no framed Avro value", id="JSON"),
        pytest.param(struct.pack(">bi", 0, -1) + b"\0", "names schema -1", id="negative number"),
        pytest.param(
            struct.pack(">bi", 0, 1) + b"\x0aab", "no Avro value of schema 1", id="cut in the value"
        ),
        pytest.param(struct.pack(">bi", 0, 1) + b"\x02a\x00zz", "bytes left over", id="too many bytes"),
    ],
)
def test_bytes_that_are_no_such_value_are_refused_with_their_reason(
    orders: Avro, raw: bytes, why: str
) -> None:
    good = orders.encode({"id": "a", "amount": None})
    with pytest.raises(CorruptError, match=why):
        orders.decode(raw)
    decoded = orders.decode_column(pa.array([good, raw, good], pa.binary()))
    assert decoded.bad_rows.tolist() == [1]
    assert why in decoded.reasons[0]
    with pytest.raises(CorruptError, match="row 1"):
        decoded.require_good()


def test_a_value_that_does_not_fit_the_schema_is_not_written(orders: Avro) -> None:
    with pytest.raises(InvalidError, match="orders-value"):
        orders.encode({"id": 7, "amount": None})
    with pytest.raises(InvalidError, match="orders-value"):
        orders.encode({"id": "a", "amount": 1.0, "more": 1})


def test_an_unknown_number_is_an_invalid_one(orders: Avro) -> None:
    with pytest.raises(InvalidError, match="404"):
        orders.decode(struct.pack(">bi", 0, 77) + b"\0")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((503, b"down"), "answered 503"),
        ((429, b"slow"), "answered 429"),
        ((200, b"<html>"), "no JSON object"),
        ((200, b"[]"), "no JSON object"),
        ((200, b'{"id": "x"}'), "'x' as the number"),
    ],
)
def test_a_registry_that_fails_is_unavailable(
    orders: Avro, server: Registry, answer: tuple[int, bytes], why: str
) -> None:
    server.answer = answer
    with pytest.raises(UnavailableError, match=why):
        orders.encode({"id": "a", "amount": None})


def test_a_registry_out_of_reach_is_unavailable() -> None:
    lonely = SchemaRegistry("http://127.0.0.1:1", timeout_s=2)
    with pytest.raises(UnavailableError, match="cannot be reached"):
        lonely.schema(1)


def test_a_schema_of_another_kind_is_refused(registry: SchemaRegistry, server: Registry) -> None:
    server.answer = (200, json.dumps({"schema": "{}", "schemaType": "PROTOBUF"}).encode())
    with pytest.raises(InvalidError, match="PROTOBUF"):
        registry.schema(1)


def test_user_and_password_are_sent(server: Registry) -> None:
    SchemaRegistry(server.url, user="ann", password="pw").register("s", '"string"')
    assert server.authorization == "Basic YW5uOnB3"


@pytest.mark.parametrize("url", ["", "registry:8081", "file:///etc/passwd", "http://"])
def test_an_address_must_be_one(url: str) -> None:
    with pytest.raises(InvalidError, match="http://host:8081"):
        SchemaRegistry(url)


@pytest.mark.parametrize("schema", ["nonsense", '{"type": "nonsense"}', '["string", "long"]'])
def test_a_schema_must_be_one(registry: SchemaRegistry, schema: str) -> None:
    with pytest.raises(InvalidError):
        Avro(schema, registry=registry, subject="s")


# -- in a stream ---------------------------------------------------------------------------------


def revenue(folder: Path, registry: SchemaRegistry, **settings: Any) -> tg.App:
    """An app over ten orders of which none has an amount."""
    orders = Avro(ORDER, registry=registry, subject="orders-value", **settings)
    with tg.Log(folder / "log") as log:
        if "orders" not in log.topics():
            log.create_topic("orders")
            values = [orders.encode({"id": str(number), "amount": None}) for number in range(10)]
            log.writer("orders").write(
                pa.table({"key": ["k"] * 10, "value": values, "timestamp": [1_767_261_600_000] * 10})
            )
    app = tg.App("shop", data=folder)
    minutes = app.stream("orders", value=orders).window(tg.Tumbling("1m", retention="1d"))
    minutes.agg(n=tg.count(), revenue=tg.sum("amount")).to_table("minutes")
    return app


@pytest.mark.parametrize("optional", [["amount"], ("id", "amount"), "amount"], ids=repr)
def test_a_field_that_is_null_everywhere_stops_the_start_unless_it_is_optional(
    registry: SchemaRegistry, tmp_path: Path, optional: Any
) -> None:
    with pytest.raises(InvalidError, match=r"revenue needs 'amount'.*Avro\(…, optional=\['amount'\]\)"):
        revenue(tmp_path, registry).run("local", until="caught_up")
    app = revenue(tmp_path, registry, optional=optional)
    assert app.run("local", until="caught_up").exit_code == 0
    assert "it will not start" not in app.explain()
    with app.open_table("minutes") as table:
        assert [row.value for row in table.all()] == [{"n": 10, "revenue": None}]
    again = revenue(
        tmp_path, registry, optional=["amount", "id"]
    )  # what may be null is no part of the definition
    assert again.run("local", until="caught_up").notes == ()


def test_an_optional_field_that_the_schema_does_not_have_is_refused(registry: SchemaRegistry) -> None:
    with pytest.raises(InvalidError, match=r"optional names 'amout', which is no field.*\['id', 'amount'\]"):
        Avro(ORDER, registry=registry, subject="orders-value", optional=["amout"])
    with pytest.raises(InvalidError, match="optional names 'x'"):
        Avro('"string"', registry=registry, subject="s", optional=["x"])
