"""Data of a real run, and the real server over it: what the tests of the page and of the HTTP API look at.

orders              the demo's: three tills, a gap, a flipped bit, a record stored twice, late and future orders
orders-per-minute   the changelog of app `shop`, which read all of it in several rounds
hostile             records that try: markup, terminal codes, bytes that are no text, a line of a megabyte
app `strict`        stops at the flipped bit, and says how to go on
table `counts`      a table kept over the changelog
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

import tidegate as tg
from tidegate.cli.demo_shop import plant

WINDOW_MS = 1_767_261_600_000  # 2026-01-01T10:00Z
CANARY = "canary-7b1f0d62"
HOSTILE = [
    "<script>document.title='owned'</script>", "<img src=x onerror=alert(1)>", "\x1b[31mred\x1b[0m\x07", "\x00\x01\x02",
    "' onmouseover='alert(1)", '"><svg/onload=alert(1)>', "{{7*7}}{% raw %}", "javascript:alert(1)", "\u202etxt.exe",
    "</td></table><h1>out</h1>", "&lt;b&gt;", "%3Cscript%3E", "\r\nSet-Cookie: x=1", "\u2028line", "a" * 1_000_000,
]  # fmt: skip


def shop(data: Path) -> tg.App:
    app = tg.App("shop", data=data)
    (
        app.stream("orders", value=tg.Json(order_id="string", amount="double"), on_error="keep")
        .validate()
        .drop_duplicates("order_id", within="10m")
        .window(tg.Tumbling("1m", grace="30s", retention="1d"))
        .agg(orders=tg.count(), revenue=tg.sum("amount"))
        .to_topic("orders-per-minute")
        .to_table("per-minute")
    )
    return app


def strict(data: Path) -> tg.App:
    app = tg.App("strict", data=data)
    (
        app.stream("orders", value=tg.Json(order_id="string", amount="double"))
        .validate("fail")
        .window(tg.Tumbling("1h", grace="1h", retention="2d"))
        .agg(orders=tg.count())
        .to_table("per-hour")
    )
    return app


def make(data: Path) -> None:
    """Write all of it into `data`."""
    plant(data / "log")
    shop(data).run("local", until="caught_up", round_records=20_000)
    strict(data).run("local", until="caught_up")
    with tg.Log(data / "log", durability="os") as log:
        log.create_topic("hostile", 1)
        values = [text.encode() for text in HOSTILE] + [b"\xff\xfe\x80", None, b"", CANARY.encode()]
        keys = [f"<b>key-{number}</b>" for number in range(len(values))]
        log.writer("hostile").write(
            pa.table(
                {"key": keys, "value": pa.array(values, pa.binary()), "timestamp": [WINDOW_MS] * len(values)}
            )
        )
        table = tg.windowed_table(
            log, "orders-per-minute", "1m", state=data / "state", retention="2d",
            consumed=tg.Consumed(tg.String(), tg.Json()), materialized=tg.Materialized("counts"),
        )  # fmt: skip
        with table:
            table.catch_up()
            table.commit()


@contextmanager
def serving(data: Path, *options: str, log: Path | None = None) -> Iterator[str]:
    """The real server in a process of its own; its address, without the last slash."""
    command = [sys.executable, "-m", "tidegate.cli.main", "ui", data.name, "--port", "0", *options]
    with tempfile.TemporaryDirectory(prefix="served-") as folder:
        kept = log or Path(folder) / "server.log"
        with kept.open("wb") as said:
            server = subprocess.Popen(command, cwd=data.parent, stdout=said, stderr=subprocess.STDOUT)
        try:
            yield _address(server, kept)
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _address(server: subprocess.Popen[bytes], said: Path) -> str:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and server.poll() is None:
        for line in said.read_bytes().splitlines(keepends=True):
            if line.startswith(b"look at ") and line.endswith(b"\n"):
                return line.split()[2].decode().rstrip("/")
        time.sleep(0.02)
    raise AssertionError(f"the server did not start: {said.read_text()}")
