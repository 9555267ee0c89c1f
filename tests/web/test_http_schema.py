"""The OpenAPI document is true: generated questions, right and wrong ones, get what it says (R-37)."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tidegate.web import endpoints
from tidegate.web.endpoints import ADDRESSED, ENDPOINTS, STREAMS
from tidegate.web.failures import Failure

SCHEMA = schemathesis.openapi.from_dict(endpoints.openapi_document())
KNOWN = {"topic": ["orders", "hostile"], "table": ["shop:per-minute", "counts"], "app": ["shop", "strict"]}
QUIET = list(HealthCheck)
FULL = 5000


def check(address: str, operation: Any, examples: int) -> int:
    """Ask a generated operation so often; every answer must be as the document says."""
    cases = 0

    @settings(
        max_examples=examples, deadline=None, suppress_health_check=QUIET, database=None, derandomize=True
    )
    @given(data=st.data())
    def ask(data: Any) -> None:
        nonlocal cases
        mode = data.draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
        case = data.draw(operation.as_strategy(generation_mode=mode))
        for word, names in KNOWN.items():  # names that are there get further than those that are not
            if word in (case.path_parameters or {}) and data.draw(st.booleans()):
                case.path_parameters[word] = data.draw(st.sampled_from(names))
        answer = case.call(base_url=address, timeout=300)
        case.validate_response(answer, checks=[schemathesis.checks.not_a_server_error, *_conformance()])
        cases += 1

    ask()
    return cases


def _conformance() -> list[Any]:
    from schemathesis.specs.openapi import checks

    return [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]


OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations()]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.label)
def test_R37_answers_are_as_the_document_says(address: str, operation: Any, tally: Any) -> None:
    """A taste of it at every change; in full it is a soak test, since each case is a real question."""
    cases = check(address, operation, 60)
    assert cases >= 1
    tally(cases, generated_by="schemathesis", of_at_least=FULL, in_full="make soak")


@pytest.mark.soak
def test_R37_answers_are_as_the_document_says_in_full(address: str, tally: Any) -> None:
    cases = {operation.label: check(address, operation, 450) for operation in OPERATIONS}
    tally(sum(cases.values()), generated_by="schemathesis", operations=cases)
    assert sum(cases.values()) >= FULL, cases


def test_the_document_names_every_question(client: httpx.Client) -> None:
    document = client.get("/api/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    assert set(document["paths"]) == {f"/api{each.path}" for each in ADDRESSED} | {"/health", "/metrics"}
    assert {each.name for each in (*ADDRESSED, *STREAMS)} | {"warm", "metrics"} == set(ENDPOINTS)
    for path in document["paths"].values():
        assert path["get"]["summary"]


def test_an_unknown_parameter_and_one_given_twice_are_told(client: httpx.Client) -> None:
    for path in (
        "/api/topics/orders/records?limits=5",
        "/api/topics/orders/records?limit=5&limit=6",
        "/api/topics/orders/records?limit=x",
    ):
        found = client.get(path)
        assert found.status_code == 400
        assert msgspec.json.decode(found.content, type=Failure).error == "invalid"
