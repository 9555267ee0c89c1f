"""How soon is a screen there, what does an idle server cost, and how many table fetches a second does it answer?

Back of the envelope: a page is one question over a pipe (under 1 ms), reading (5 to 50 ms), a template (2 ms). A fetch
is a look-up in open state (1 ms) and about 1 ms of HTTP in Python on each side of the pipe, so one core answers a few
hundred a second. An idle server is Python with a web framework, about 40 MiB, and beside it, asleep, what has loaded
Arrow and the kernels that read: 90 MiB that are its own. It wakes by a fork, in milliseconds.

Pages are held against what they must say before their time counts; fetches against the table itself.

    python benchmarks/web.py [--full] [--json] [--records 10000000]
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa

import tidegate as tg
from _report import Report, demand

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "web"))
from served_shop import make, shop

SERVER = """
import sys
from pathlib import Path
from tidegate.web.server import serve
from tidegate.web.settings import Limits, Settings, folders_of
log, state = folders_of(Path(sys.argv[1]))
settings = Settings(log, state, port=0, limits=Limits(idle_seconds=float(sys.argv[2])))
serve(settings, ready=lambda at: print(at, flush=True))
"""
SCREENS = {
    "overview": ("/", "What to do next"),
    "topic": ("/topics/{topic}", "How long records"),
    "records": ("/topics/{topic}/records", "records; there are more"),
    "search": ("/topics/{topic}/records?value=nothing-is-like-this", "ooked at"),
    "integrity": ("/topics/{topic}/integrity", "Producers and partitions"),
    "table": ("/tables/shop:per-minute?key=customer-7", "customer-7"),
    "app": ("/apps/shop", "Rounds as they commit"),
}


AT_TEN = "since=2026-01-01T10:00Z&until=2026-01-01T10:00Z"
PAINTED = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


class Served:
    """The server in a process of its own."""

    def __init__(self, data: Path, idle_seconds: float = 300) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(data), str(idle_seconds)], stdout=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline() if self.process.stdout else ""
        demand(line.startswith("http"), "the server did not start")
        self.client = httpx.Client(base_url=line.strip(), timeout=60, headers={"accept": "text/html"})

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(20)

    def processes(self) -> list[int]:
        """The server, what reads for it, and what answers for that."""
        found = [self.process.pid]
        for pid in found:  # it grows meanwhile
            try:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            except OSError:
                continue
            found += [int(child) for child in children]
        return found

    def memory_mib(self) -> float:
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.processes())
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def cpu_seconds(self) -> float:
        ticks = 0
        for pid in self.processes():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def paint(report: Report, served: Served, topic: str, what: str, target_ms: float) -> None:
    """The slowest of five loads after the first, for every screen: HTML and style sheet, what a paint needs."""
    for name, (path, words) in SCREENS.items():
        took = []
        for _ in range(6):
            began = time.perf_counter()
            page = served.client.get(path.format(topic=topic))
            served.client.get("/static/page.css")
            took.append((time.perf_counter() - began) * 1000)
            demand(page.status_code == 200 and words in page.text, f"{name} does not say {words!r}")
        first, slowest = took[0], max(took[1:])
        report.figure(
            f"{name}, {what}",
            f"{slowest:.0f} ms",
            f"first {first:.0f} ms",
            f"{target_ms:.0f} ms",
            slowest < target_ms,
        )


def browser_paint(report: Report, served: Served, topic: str, what: str, target_ms: float) -> None:
    """First contentful paint as Chromium reports it, where there is one."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return
    if not Path("/usr/bin/chromium").exists():
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(base_url=str(served.client.base_url))
        worst = 0.0
        for path, _ in SCREENS.values():
            page.goto(path.format(topic=topic))
            page.reload()
            while not (painted := page.evaluate(PAINTED)):
                page.wait_for_timeout(20)
            worst = max(worst, painted)
        browser.close()
    report.figure(
        f"slowest first paint in Chromium, {what}",
        f"{worst:.0f} ms",
        "",
        f"{target_ms:.0f} ms",
        worst < target_ms,
    )


def idle(report: Report, data: Path, topic: str) -> None:
    with Served(data, idle_seconds=1) as served:
        served.client.get("/")
        awake = served.memory_mib()
        time.sleep(4)
        before = served.cpu_seconds()
        time.sleep(5)
        spent, held = served.cpu_seconds() - before, served.memory_mib()
        report.figure("idle memory", f"{held:.0f} MiB", f"{awake:.0f} MiB while asked", "150 MiB", held < 150)
        report.figure("idle CPU over 5 s", f"{spent * 1000:.0f} ms", "", "0 ms", spent < 0.02)
        took = {}
        for name, (path, words) in SCREENS.items():
            time.sleep(3)  # it rests
            demand(len(served.processes()) == 2, "somebody still answers")
            began = time.perf_counter()
            page = served.client.get(path.format(topic=topic))
            served.client.get("/static/page.css")
            took[name] = (time.perf_counter() - began) * 1000
            demand(words in page.text, f"{name} does not say {words!r}")
        slowest = max(took, key=lambda name: took[name])
        report.figure(
            "slowest first page after idling",
            f"{took[slowest]:.0f} ms",
            slowest,
            "300 ms",
            took[slowest] < 300,
        )


def fetches(report: Report, data: Path, seconds: float) -> None:
    """An open loop of 200 fetches a second over four connections, while an app reads a topic that is written to."""
    writer = subprocess.Popen([sys.executable, "-c", PIPELINE.format(tests=sys.path[0], data=str(data))])
    try:
        with Served(data) as served, shop(data).open_table("per-minute") as own:
            keys = sorted({row.key for row in own.fetch_all(1_767_261_600_000, 1_767_261_600_000)})
            expected = {key: own.get(key, 1_767_261_600_000) for key in keys}
            for key in keys[:20]:
                served.client.get(f"/api/tables/shop:per-minute/fetch?key={key}")
            took, rate, count = list[float](), 200, int(200 * seconds)
            began, cpu = time.perf_counter(), served.cpu_seconds()

            def ask(number: int) -> None:
                """A client that costs little itself: the server is what is measured."""
                at = served.client.base_url
                client = http.client.HTTPConnection(at.host, at.port or 80, timeout=30)
                for turn in range(number, count, 4):
                    due = began + turn / rate
                    time.sleep(max(0.0, due - time.perf_counter()))
                    key = keys[turn % len(keys)]
                    client.request("GET", f"/api/tables/shop:per-minute/fetch?key={key}&{AT_TEN}")
                    found = client.getresponse().read()
                    took.append(time.perf_counter() - due)
                    value = json.loads(found)["rows"][0]["value"]
                    demand(value == expected[key], f"{key} is not as the table has it")
                client.close()

            threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wall = time.perf_counter() - began
            cores = (served.cpu_seconds() - cpu) / wall
            demand(len(took) == count, f"{len(took)} of {count} fetches were answered")
            p50, p99 = np.percentile(np.array(took) * 1000, [50, 99])
            demand(writer.poll() is None, "the pipeline beside it has ended")
            report.figure(
                "table fetches beside a pipeline",
                f"{count / wall:.0f}/s",
                f"{cores:.2f} cores, {cores * wall / count * 1000:.1f} ms of CPU each",
                "200/s",
                count / wall > 198,
            )
            report.figure(
                "p99 of a fetch from when it was due", f"{p99:.1f} ms", f"p50 {p50:.1f} ms", "50 ms", p99 < 50
            )
    finally:
        writer.kill()
        writer.wait()


PIPELINE = """
import sys, threading, time
sys.path.insert(0, {tests!r})
import pyarrow as pa, tidegate as tg
from pathlib import Path
from served_shop import shop
data = Path({data!r})
def write():
    with tg.Log(data / "log", durability="os") as log:
        writer, number = log.writer("orders"), 0
        while True:
            values = [f'{{{{"order_id":"w-{{number + i}}","amount":1}}}}' for i in range(2000)]
            times = [1767265300000 + number + i for i in range(2000)]
            keys = [f"customer-{{i % 200}}" for i in range(2000)]
            writer.write(pa.table({{"key": keys, "value": values, "timestamp": times}}))
            number += 2000
            time.sleep(0.5)
threading.Thread(target=write, daemon=True).start()
shop(data).run("local")
"""


def write_large(data: Path, records: int) -> None:
    with tg.Log(data / "log", durability="os") as log:
        log.create_topic("large", 4, {"segment.bytes": 256 << 20})
        writer = log.writer("large", integrity=True)
        step = 500_000
        for start in range(0, records, step):
            numbers = np.arange(start, min(start + step, records))
            keys = pa.array(numbers % 100_000).cast(pa.string())
            writer.write(
                pa.table(
                    {
                        "key": keys,
                        "value": pa.array(numbers).cast(pa.string()),
                        "timestamp": 1_767_261_600_000 + numbers,
                    }
                )
            )
        writer.close()


def main() -> None:
    report = Report(__doc__ or "", records=0)
    records = report.numbers["records"] or (10_000_000 if report.full else 1_000_000)
    with tempfile.TemporaryDirectory(prefix="web-bench-") as folder:
        data = Path(folder) / "data"
        make(data)
        idle(report, data, "orders")
        with Served(data) as served:
            paint(report, served, "orders", "the demo's data", 300)
            browser_paint(report, served, "orders", "the demo's data", 300)
        fetches(report, data, 20 if report.full else 8)
        write_large(data, records)
        with Served(data) as served:
            paint(report, served, "large", f"{records // 1_000_000} M records", 1000)
            browser_paint(report, served, "large", f"{records // 1_000_000} M records", 1000)


if __name__ == "__main__":
    main()
