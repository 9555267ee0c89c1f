"""A kept table that is made anew under its name, as something else, while the page reads it: answers are of the one or
the other, or say that there is none just now; whoever has begun to read reads to the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from table_records import Said, window_record, write_records
from tidegate.errors import UnavailableError
from tidegate.web import tables
from tidegate.web.failures import NotThereError
from tidegate.web.open_tables import opened
from tidegate.web.schemas import FetchQuestion, ScanQuestion, TableQuestion
from tidegate.web.site import Site
from window_oracles import ms

NAME, MINUTE, ROWS = "latest", 60_000, 6000


class Remade:
    """One name, two tables: of plain keys, and of windows."""

    def __init__(self, folder: Path) -> None:
        self.log, self._folder = tg.Log(folder / "log", durability="os"), folder
        write_records(self.log, "plain", [Said(b"k-%05d" % n, b"plain", n) for n in range(ROWS)])
        windows = [window_record(b"w-%05d" % n, MINUTE, b"window") for n in range(ROWS)]
        write_records(self.log, "windows", windows)
        self.site = Site(folder / "log", folder / "state")

    def make(self, kind: str) -> None:
        """Forget the table that is there, and build the one of this kind."""
        for each in ("commits", "lease"):
            (self._folder / "state" / "tables" / NAME / each).unlink(missing_ok=True)
        said: dict[str, Any] = {
            "state": self._folder / "state",
            "consumed": tg.Consumed(tg.String(), tg.String()),
            "materialized": tg.Materialized(NAME),
        }
        made: Any
        if kind == "key":
            made = tg.table(self.log, "plain", **said)
        else:
            made = tg.windowed_table(self.log, "windows", ms(MINUTE), **said)
        with made as built:
            built.catch_up()
            built.commit()

    def close(self) -> None:
        self.site.close()
        self.log.close()


@pytest.fixture
def remade(tmp_path: Path) -> Iterator[Remade]:
    made = Remade(tmp_path)
    yield made
    made.close()


def test_whoever_reads_when_it_is_remade_reads_to_the_end(remade: Remade) -> None:
    remade.make("key")
    with opened(remade.site, NAME) as before:
        assert before.kind == "key"  # and nothing of its packs was needed so far
        remade.make("window")
        remade.site.refresh_asked()
        with opened(remade.site, NAME) as after:
            assert after.kind == "window"
            assert [row.value for row in after.fetch("w-00007", 0, 2**63 - 1)] == [{"value": "window"}]
        rows, more = before.scan(0, 2**63 - 1, 0, ROWS)
        assert len(rows) == ROWS and not more
        assert all(row.value == {"value": "plain"} for row in rows)
    assert tables.scan(remade.site, NAME, ScanQuestion(limit=1)).rows[0].value == {"value": "window"}


def test_threads_that_ask_while_it_is_remade_see_one_or_the_other(remade: Remade) -> None:
    remade.make("key")
    site, ended, wrong, answers = remade.site, threading.Event(), list[object](), list[str]()

    def scanned() -> str:
        found = tables.scan(site, NAME, ScanQuestion(limit=ROWS + 1))
        values = {(row.value["value"], row.window_start_ms is None) for row in found.rows}
        if len(found.rows) != ROWS or values not in ({("plain", True)}, {("window", False)}):
            wrong.append((len(found.rows), values))
        return values.pop()[0]

    def fetched() -> str:
        found = tables.fetch(site, NAME, FetchQuestion(key="k-00003"))
        return "plain" if found.rows else "window"

    def shown() -> str:
        return "plain" if tables.table_document(site, NAME, TableQuestion()).kind == "key" else "window"

    def ask(question: Callable[[], str]) -> None:
        while not ended.is_set():
            try:
                answers.append(question())
            except (NotThereError, UnavailableError):  # between the one and the other
                time.sleep(0.001)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is an answer of 500
                wrong.append(error)

    threads = [threading.Thread(target=ask, args=(each,)) for each in (scanned, scanned, fetched, shown)]
    for each in threads:
        each.start()
    for kind in ("window", "key") * 6:
        remade.make(kind)
        seen, deadline = len(answers), time.monotonic() + 300
        while len(answers) < seen + 8 and time.monotonic() < deadline:
            time.sleep(0.01)
    ended.set()
    for each in threads:
        each.join(300)
    assert not wrong, wrong[:5]
    assert {"plain", "window"} <= set(answers)
