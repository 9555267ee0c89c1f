"""Every command that an error names can be typed, and a test types it: see `tests/remedies.py`."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from remedies import named
from tidegate.cli.main import cli

TESTS = Path(__file__).parents[1]
PLACES = named()
_PLACE = re.compile(r'"([a-z_]+(?:\.\w+)+: [a-z]+(?: [a-z]+)?)"')


@pytest.fixture(scope="module")
def covered() -> set[str]:
    texts = (path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__))
    return {place for text in texts for place in _PLACE.findall(text)}


@pytest.mark.parametrize("place", PLACES)
def test_a_test_types_what_an_error_names(place: str, covered: set[str]) -> None:
    assert place in covered, f"no test types what {place} names: {[each.command for each in PLACES[place]]}"


@pytest.mark.parametrize("place", PLACES)
def test_what_an_error_names_is_a_command_with_all_it_needs(place: str) -> None:
    for each in PLACES[place]:
        words = re.sub(r"\{[^{}]*\}", "1", each.command).replace(" N", " 1").split()
        command: click.Command = cli
        with click.Context(cli) as context:
            while isinstance(command, click.Group):
                name, found, words = command.resolve_command(context, words)
                assert found is not None, each.command
                command = found
            command.make_context(name, words, parent=context)  # raises on what it does not know or misses


def test_no_test_claims_a_place_that_names_nothing(covered: set[str]) -> None:
    modules = {place.partition(".")[0] for place in PLACES}
    assert {each for each in covered if each.partition(".")[0] in modules} <= set(PLACES)
