"""Who else does the job of `pipeline.py`, and how fast. Not a benchmark itself.

Each peer is a script in `_peers/`, in a process of its own, on two cores; its windows are held against the answer
before its figure is printed. They are slower by factors, so they get fewer events of the same set, but enough to be
in stride. Python engines live in an environment of their own (`build/peers-venv`), made when it is first needed; one
that cannot be installed, or fails, is shown as not run, with the reason.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from _pipeline_data import MINUTE, Answer, answer_of, made_events
from _report import Report, demand, load_line, rate_of
from _storage import scratch_folder

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parent / "build" / "peers-venv"
PATIENCE = 600.0


class NotRunError(Exception):
    """Why there is no figure."""


@dataclass(frozen=True)
class Peer:
    name: str
    script: str
    rows: int
    full_rows: int
    words: tuple[str, ...] = ()
    package: str = ""
    requirement: str = ""
    """What to install; nothing where this environment has it."""


BATCH = 250_000
PEERS = (
    Peer("Spark's own, in-heap state", "with_spark.py", 4 * BATCH, 10 * BATCH, ("in-heap", str(BATCH))),
    Peer("Spark's own, RocksDB state", "with_spark.py", 4 * BATCH, 10 * BATCH, ("rocksdb", str(BATCH))),
    Peer("Spark's transformWithState, Python", "with_spark.py", 30_000, 100_000, ("python", "10000")),
    Peer("Pathway", "with_pathway.py", 200_000, 1_000_000, (), "pathway", "pathway>=0.33,<1"),
    Peer("bytewax", "with_bytewax.py", 100_000, 500_000, (), "bytewax", "bytewax>=0.21,<1"),
    Peer(
        "Quix Streams, no broker", "with_quix.py", 60_000, 300_000, (), "quixstreams", "quixstreams>=3.28,<4"
    ),
)
ROCKSDB = PEERS[1].name


def duckdb_rate(events: pa.Table, answer: Answer) -> float:
    """The whole job as one batch query over Parquet, two threads, nothing kept."""
    with scratch_folder() as folder, duckdb.connect(config={"threads": 2}) as connection:
        path = folder / "events.parquet"
        pq.write_table(events, path)
        query = f"""
            select key, ts // {MINUTE} as minute, count(*) as n, sum(amount) as total from (
                select key, order_id, min_by(ts, place) as ts, min_by(amount, place) as amount
                from (select *, file_row_number as place from read_parquet('{path}', file_row_number=true))
                group by key, order_id
            ) group by all"""
        began = perf_counter()
        found = connection.sql(query).to_arrow_table()
        seconds = perf_counter() - began
    fault = answer.fault_in(found)
    demand(fault is None, f"DuckDB's: {fault}")
    return events.num_rows / seconds


def peer_rates(report: Report, ours: float) -> dict[str, float]:
    """A figure for each peer, and how many times as fast ours is, on the same set of events."""
    rates: dict[str, float] = {}
    for peer in PEERS:
        rows = peer.full_rows if report.full else peer.rows
        try:
            rates[peer.name] = rate = rate_with(peer, rows)
        except NotRunError as reason:
            report.figure(peer.name, "not run", str(reason))
            continue
        report.figure(peer.name, rate_of(rate), f"ours is {ours / rate:.0f}×; {load_line()}")
    return rates


def rate_with(peer: Peer, rows: int) -> float:
    python = python_with(peer)
    events = made_events(rows, "spread")
    with scratch_folder() as folder:
        given, found = folder / "events.parquet", folder / "windows.parquet"
        texts = events["key"].cast(pa.string())
        pq.write_table(events.set_column(0, "key", texts), given)
        told = _bounded([python, "-W", "ignore", HERE / "_peers" / peer.script, given, found, *peer.words])
        fault = answer_of(events).fault_in(pq.read_table(found))
    demand(fault is None, f"{peer.name}: {fault}")
    timed = json.loads(told.splitlines()[-1])
    return float(timed["rows"]) / float(timed["seconds"])


def python_with(peer: Peer) -> Path:
    """The interpreter that has what the peer needs."""
    if not peer.requirement:
        return Path(sys.executable)
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        _bounded([sys.executable, "-m", "venv", ENVIRONMENT])
    try:
        _bounded([python, "-c", f"import {peer.package}, pyarrow"])
    except NotRunError:
        sys.stderr.write(f"installing {peer.requirement} into {ENVIRONMENT}\n")
        _bounded(
            [
                python,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                peer.requirement,
                "pyarrow",
            ]
        )
    return python


def _reason(said: str) -> str:
    """The last line that names an error, or the last one; short enough for a table."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(ERROR|[\w.]*(Error|Exception))\b", line)]
    return (named or lines or [""])[-1][:160]


def _bounded(command: list[str | Path]) -> str:
    """What it printed; why not, if it failed or took too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise NotRunError(f"took more than {PATIENCE:.0f} s") from None
    if done.returncode:
        raise NotRunError(_reason(done.stderr) or f"ended with {done.returncode}")
    return done.stdout
