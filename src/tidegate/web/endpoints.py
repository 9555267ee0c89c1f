"""Every endpoint of the API, declared once: path, page, parameters, document. Also the OpenAPI 3.1 document.

Routes, pages, the OpenAPI document and the reference page are made from `ENDPOINTS`. Nothing here loads Arrow at
import: the functions do, in the worker process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec

from tidegate import __version__
from tidegate.errors import InvalidError
from tidegate.web import apps, integrity, metrics, overview, records, schemas, tables, topics
from tidegate.web.failures import Failure, NotThereError
from tidegate.web.site import Site

# -- endpoints -------------------------------------------------------------------------------------

_LARGEST: Final = 2**63 - 1


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question without parameters."""


@dataclass(frozen=True, slots=True)
class Endpoint:
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
    """Whether it may read very much: such requests leave a thread free for quick ones (`worker_client`, A4)."""

    @property
    def path_params(self) -> list[str]:
        """The parameters in the path."""
        return re.findall(r"{(\w+)}", self.path)

    def ask(self, site: Site, path_params: Mapping[str, str], query: Mapping[str, Any]) -> Any:
        """Check what was asked, and find the answer."""
        try:
            question = msgspec.convert(dict(query), self.takes, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidError(
                f"{error}; the OpenAPI document says what this takes: /api/openapi.json"
            ) from None
        given = [_path_param(name, path_params[name]) for name in self.path_params]
        return self.find(site, *given) if self.takes is Nothing else self.find(site, *given, question)


def _path_param(name: str, written: str) -> Any:
    if name not in ("partition", "offset"):
        return written
    if not (written.isascii() and written.isdigit() and len(written) <= 19 and int(written) <= _LARGEST):
        raise NotThereError(f"{name} {written[:60]!r} is no number from 0")
    return int(written)


def warm(site: Site) -> schemas.RawAnswer:
    """Open the log, so that the first screen does not wait for it; there is nothing to say."""
    site.topics()
    return schemas.RawAnswer(b"", "text/plain")


ADDRESSED: Final = (
    Endpoint(
        "overview", "/overview", "How things are: a sentence, lag, backlog, memory, faults, what next", "overview",
        overview.Overview, overview.overview, page="/", screen="overview.html",
    ),
    Endpoint(
        "topics", "/topics", "All topics of the log", "topics", topics.TopicList, topics.topic_list,
        page="/topics", screen="topics.html",
    ),
    Endpoint(
        "topic", "/topics/{topic}", "One topic: partitions, log segments with their lifetimes, settings", "topics",
        topics.TopicDocument, topics.topic_document, topics.TopicQuestion, page="/topics/{topic}", screen="topic.html",
    ),
    Endpoint(
        "records", "/topics/{topic}/records", "Records, by key, value, header and time, page by page", "records",
        records.RecordsDocument, records.records, records.RecordsQuestion,
        page="/topics/{topic}/records", screen="records.html", is_long=True,
    ),
    Endpoint(
        "record", "/topics/{topic}/records/{partition}/{offset}", "One record by its place", "records",
        records.RecordDocument, records.record,
        page="/topics/{topic}/records/{partition}/{offset}", screen="record.html",
    ),
    Endpoint(
        "export", "/topics/{topic}/export", "Records as JSON lines or Parquet; header Tidegate-Next goes on", "records",
        None, records.export, records.ExportQuestion, is_long=True,
        content={"application/jsonl": {}, "application/vnd.apache.parquet": {}},
    ),
    Endpoint(
        "integrity", "/topics/{topic}/integrity", "Whether anything is missing, changed or repeated", "integrity",
        schemas.IntegrityDocument, integrity.integrity, schemas.IntegrityQuestion,
        page="/topics/{topic}/integrity", screen="integrity.html", is_long=True,
    ),
    Endpoint(
        "tables", "/tables", "All tables: apps' as APP:TABLE, and those kept over topics", "tables",
        schemas.TableList, tables.table_list, page="/tables", screen="tables.html",
    ),
    Endpoint(
        "table", "/tables/{table}", "One table: a key's windows, late rows, commits", "tables",
        schemas.TableDocument, tables.table_document, schemas.TableQuestion,
        page="/tables/{table}", screen="table.html", is_long=True,
    ),
    Endpoint(
        "fetch", "/tables/{table}/fetch", "One key's rows", "tables",
        schemas.RowsDocument, tables.fetch, schemas.FetchQuestion,
    ),
    Endpoint(
        "scan", "/tables/{table}/scan", "All rows, page by page, of one commit", "tables",
        schemas.RowsDocument, tables.scan, schemas.ScanQuestion, is_long=True,
    ),
    Endpoint(
        "late", "/tables/{table}/late", "Records that came too late or too early", "tables",
        schemas.LateDocument, tables.late, schemas.LateQuestion, is_long=True,
    ),
    Endpoint(
        "diff", "/tables/{table}/diff", "What changed between two commits", "tables",
        schemas.DiffDocument, tables.diff, schemas.DiffQuestion,
        page="/tables/{table}/diff", screen="diff.html", is_long=True,
    ),
    Endpoint(
        "explain", "/tables/{table}/explain", "Why a value is what it is: the records behind it", "tables",
        schemas.ExplainDocument, tables.explain, schemas.ExplainQuestion,
        page="/tables/{table}/explain", screen="explain.html", is_long=True,
    ),
    Endpoint(
        "apps", "/apps", "All apps that have state here", "apps", schemas.AppList, apps.app_list,
        page="/apps", screen="apps.html",
    ),
    Endpoint(
        "app", "/apps/{app}", "One app: rounds, sources and what they wait for, memory, what stopped", "apps",
        schemas.AppDocument, apps.app_document, schemas.AppQuestion, page="/apps/{app}", screen="app.html",
    ),
    Endpoint(
        "faults", "/apps/{app}/faults", "The faults that an app met, each with its record", "apps",
        schemas.FaultsDocument, apps.faults, schemas.FaultsQuestion,
        page="/apps/{app}/faults", screen="faults.html", is_long=True,
    ),
)  # fmt: skip
STREAMS: Final = (
    Endpoint(
        "tail", "/topics/{topic}/tail", "New records as they are written (server-sent events)", "records",
        records.RecordsDocument, records.tail, records.TailQuestion, is_long=True,
    ),
    Endpoint(
        "rounds", "/apps/{app}/live", "An app whenever it has committed (server-sent events)", "apps",
        schemas.AppDocument, apps.app_document, schemas.AppQuestion,
    ),
)  # fmt: skip
"""Questions that are asked again and again, as a stream; not part of the OpenAPI document."""
ENDPOINTS: Final[dict[str, Endpoint]] = {each.name: each for each in (*ADDRESSED, *STREAMS)} | {
    "warm": Endpoint("warm", "", "", "", None, warm),
    "metrics": Endpoint("metrics", "", "", "", None, metrics.exposition),
}
"""By name; `warm` has no address, and that of `metrics` is not under /api."""


# -- OpenAPI ---------------------------------------------------------------------------------------

REFUSALS: Final = {
    400: "The question is wrong: the message says what",
    401: "The token is missing or wrong",
    404: "It is not there",
    409: "It changed meanwhile, or is not there yet: ask again",
    414: "The URL is too long",
    421: "Not a name of this server",
    422: "What is stored is damaged",
    429: "Too much at once",
    503: "It took too long, the process that reads began anew, or too many connections are open",
}


@cache
def openapi_document() -> dict[str, Any]:
    """The whole document."""
    kinds = [Failure, Health, *{each.answer for each in ADDRESSED if each.answer is not None}]
    takes = {each.takes for each in ADDRESSED if each.takes is not Nothing}
    _, components = msgspec.json.schema_components(
        [*kinds, *takes], ref_template="#/components/schemas/{name}"
    )
    schemas = dict(sorted(components.items()))
    questions = {kind.__name__: schemas.pop(kind.__name__) for kind in takes}
    paths = {f"/api{each.path}": {"get": _operation(each, questions)} for each in ADDRESSED}
    paths["/health"] = {
        "get": {
            "operationId": "health", "tags": ["server"], "summary": "Whether the server answers; needs no token",
            "security": [], "responses": {"200": _content("Health", "It answers")},
        }
    }  # fmt: skip
    paths["/metrics"] = {
        "get": {
            "operationId": "metrics", "tags": ["server"],
            "summary": "The numbers of all screens as metrics, in the text format of Prometheus",
            "responses": {
                "200": {"description": "The numbers", "content": {"text/plain": {"schema": {"type": "string"}}}},
                **_refusals(),
            },
        }
    }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidegate",
            "version": __version__,
            "description": "Topics, records, integrity, tables and apps, read-only. Times are epoch milliseconds.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"token": []}],
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


class Health(msgspec.Struct, frozen=True):
    """The server is there."""

    status: str
    version: str


def _operation(endpoint: Endpoint, questions: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": endpoint.name,
        "tags": [endpoint.tag],
        "summary": endpoint.summary,
    }
    parameters = [_path_parameter(name) for name in endpoint.path_params]
    if endpoint.takes is not Nothing:
        fields = questions[endpoint.takes.__name__]
        for name, schema in fields["properties"].items():
            said = dict(schema)
            summary = said.pop("description", "")
            parameters.append(
                {
                    "name": name,
                    "in": "query",
                    "required": name in fields.get("required", ()),
                    "description": summary,
                    "schema": said,
                }
            )
    if parameters:
        found["parameters"] = parameters
    if endpoint.answer is None:
        answers: dict[str, Any] = {"200": {"description": "Bytes", "content": endpoint.content}}
    else:
        answers = {"200": _content(endpoint.answer.__name__, "The answer")}
    found["responses"] = answers | _refusals()
    return found


def _refusals() -> dict[str, Any]:
    return {str(status): _content("Failure", why) for status, why in REFUSALS.items()}


def _path_parameter(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 249}
    if name in ("partition", "offset"):
        schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1 if name == "partition" else 2**63 - 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _content(name: str, description: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
