"""All that can be asked, once: its address as JSON, the screen that shows the same, what it takes and what it gives.

Routes, screens, the OpenAPI document and the reference page are all made from `QUESTIONS`. Nothing here loads Arrow:
the functions do, in the process that reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tidegate.errors import InvalidError
from tidegate.web.failures import NotThereError
from tidegate.web.reading import (
    app_documents,
    apps,
    integrity,
    integrity_documents,
    measuring,
    overview,
    records,
    searching,
    table_documents,
    tables,
    topics,
)
from tidegate.web.reading.site import Site

_LARGEST: Final = 2**63 - 1


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question without parameters."""


@dataclass(frozen=True, slots=True)
class Page:
    """An answer that is no JSON document: bytes as they are."""

    body: bytes
    type: str
    next: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question. `path` is under /api; `screen` is the template of the page at `page`, if there is one."""

    name: str
    path: str
    summary: str
    tag: str
    answer: type[msgspec.Struct] | None
    find: Callable[..., Any]
    takes: type[msgspec.Struct] = Nothing
    content: Mapping[str, Any] | None = None
    """What the bytes are, where the answer is no document."""
    page: str | None = None
    screen: str | None = None
    is_long: bool = False
    """Whether it may read very much: such questions leave room for quick ones (`asking`, A4)."""

    @property
    def words(self) -> list[str]:
        """The parameters in the path."""
        return re.findall(r"{(\w+)}", self.path)

    def ask(self, site: Site, words: Mapping[str, str], ask: Mapping[str, Any]) -> Any:
        """Check what was asked, and find the answer."""
        try:
            question = msgspec.convert(dict(ask), self.takes, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidError(
                f"{error}; the OpenAPI document says what this takes: /api/openapi.json"
            ) from None
        given = [_word(name, words[name]) for name in self.words]
        return self.find(site, *given) if self.takes is Nothing else self.find(site, *given, question)


def _word(name: str, written: str) -> Any:
    if name not in ("partition", "offset"):
        return written
    if not (written.isascii() and written.isdigit() and len(written) <= 19 and int(written) <= _LARGEST):
        raise NotThereError(f"{name} {written[:60]!r} is no number from 0")
    return int(written)


class Warmed(msgspec.Struct, frozen=True):
    """Somebody is there to answer."""

    is_warm: bool


def warm(site: Site) -> Warmed:
    """Open the log, so that the first screen does not wait for it."""
    return Warmed(bool(site.topics() or True))


def exported(site: Site, topic: str, question: records.ExportQuestion) -> Page:
    return Page(*records.export(site, topic, question))


def metrics(site: Site) -> Page:
    return Page(*measuring.exposition(site))


_ALL: Final = (
    Asked(
        "overview", "/overview", "How things are: a sentence, lag, backlog, memory, faults, what next", "overview",
        overview.Overview, overview.overview, page="/", screen="overview.html",
    ),
    Asked(
        "topics", "/topics", "All topics of the log", "topics", topics.TopicList, topics.topic_list,
        page="/topics", screen="topics.html",
    ),
    Asked(
        "topic", "/topics/{topic}", "One topic: partitions, log segments with their lifetimes, settings", "topics",
        topics.TopicDocument, topics.topic_document, topics.TopicQuestion, page="/topics/{topic}", screen="topic.html",
    ),
    Asked(
        "records", "/topics/{topic}/records", "Records, by key, value, header and time, page by page", "records",
        records.RecordsDocument, records.records, searching.RecordsQuestion,
        page="/topics/{topic}/records", screen="records.html", is_long=True,
    ),
    Asked(
        "record", "/topics/{topic}/records/{partition}/{offset}", "One record by its place", "records",
        records.RecordDocument, records.record,
        page="/topics/{topic}/records/{partition}/{offset}", screen="record.html",
    ),
    Asked(
        "export", "/topics/{topic}/export", "Records as JSON lines or Parquet; header Tidegate-Next goes on", "records",
        None, exported, records.ExportQuestion, is_long=True,
        content={"application/jsonl": {}, "application/vnd.apache.parquet": {}},
    ),
    Asked(
        "integrity", "/topics/{topic}/integrity", "Whether anything is missing, changed or repeated", "integrity",
        integrity_documents.IntegrityDocument, integrity.integrity, integrity_documents.IntegrityQuestion,
        page="/topics/{topic}/integrity", screen="integrity.html", is_long=True,
    ),
    Asked(
        "tables", "/tables", "All tables: apps' as APP:TABLE, and those kept over topics", "tables",
        table_documents.TableList, tables.table_list, page="/tables", screen="tables.html",
    ),
    Asked(
        "table", "/tables/{table}", "One table: a key's windows, late rows, commits", "tables",
        table_documents.TableDocument, tables.table_document, table_documents.TableQuestion,
        page="/tables/{table}", screen="table.html", is_long=True,
    ),
    Asked(
        "fetch", "/tables/{table}/fetch", "One key's rows", "tables",
        table_documents.RowsDocument, tables.fetch, table_documents.FetchQuestion,
    ),
    Asked(
        "scan", "/tables/{table}/scan", "All rows, page by page, of one commit", "tables",
        table_documents.RowsDocument, tables.scan, table_documents.ScanQuestion, is_long=True,
    ),
    Asked(
        "late", "/tables/{table}/late", "Records that came too late or too early", "tables",
        table_documents.LateDocument, tables.late, table_documents.LateQuestion, is_long=True,
    ),
    Asked(
        "diff", "/tables/{table}/diff", "What changed between two commits", "tables",
        table_documents.DiffDocument, tables.diff, table_documents.DiffQuestion,
        page="/tables/{table}/diff", screen="diff.html", is_long=True,
    ),
    Asked(
        "explain", "/tables/{table}/explain", "Why a value is what it is: the records behind it", "tables",
        table_documents.ExplainDocument, tables.explain, table_documents.ExplainQuestion,
        page="/tables/{table}/explain", screen="explain.html", is_long=True,
    ),
    Asked(
        "apps", "/apps", "All apps that have state here", "apps", app_documents.AppList, apps.app_list,
        page="/apps", screen="apps.html",
    ),
    Asked(
        "app", "/apps/{app}", "One app: rounds, sources and what they wait for, memory, what stopped", "apps",
        app_documents.AppDocument, apps.app_document, app_documents.AppQuestion, page="/apps/{app}", screen="app.html",
    ),
    Asked(
        "faults", "/apps/{app}/faults", "The faults that an app met, each with its record", "apps",
        app_documents.FaultsDocument, apps.faults, app_documents.FaultsQuestion,
        page="/apps/{app}/faults", screen="faults.html", is_long=True,
    ),
)  # fmt: skip
LIVE: Final = (
    Asked(
        "tail", "/topics/{topic}/tail", "New records as they are written (server-sent events)", "records",
        records.RecordsDocument, records.tail, records.TailQuestion, is_long=True,
    ),
    Asked(
        "rounds", "/apps/{app}/live", "An app whenever it has committed (server-sent events)", "apps",
        app_documents.AppDocument, apps.app_document, app_documents.AppQuestion,
    ),
)  # fmt: skip
"""Questions that are asked again and again, as a stream; not part of the OpenAPI document."""
ADDRESSED: Final = _ALL
QUESTIONS: Final[dict[str, Asked]] = {each.name: each for each in (*_ALL, *LIVE)} | {
    "warm": Asked("warm", "", "", "", Warmed, warm),
    "metrics": Asked("metrics", "", "", "", None, metrics),
}
"""By name; `warm` has no address, and that of `metrics` is not under /api."""
