"""The OpenAPI 3.1 document, made from the questions there are; nothing in it is written by hand twice."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import msgspec

from tidegate import __version__
from tidegate.web.failures import Failure
from tidegate.web.questions import ADDRESSED, Asked, Nothing

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
def document() -> dict[str, Any]:
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


def _operation(asked: Asked, questions: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"operationId": asked.name, "tags": [asked.tag], "summary": asked.summary}
    parameters = [_word(name) for name in asked.words]
    if asked.takes is not Nothing:
        fields = questions[asked.takes.__name__]
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
    if asked.answer is None:
        answers: dict[str, Any] = {"200": {"description": "Bytes", "content": asked.content}}
    else:
        answers = {"200": _content(asked.answer.__name__, "The answer")}
    found["responses"] = answers | _refusals()
    return found


def _refusals() -> dict[str, Any]:
    return {str(status): _content("Failure", why) for status, why in REFUSALS.items()}


def _word(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 249}
    if name in ("partition", "offset"):
        schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1 if name == "partition" else 2**63 - 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _content(name: str, description: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
