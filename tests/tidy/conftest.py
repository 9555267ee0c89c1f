"""The tests of the handbook share two plain modules: `pages` (what a page holds) and `warm` (how it is run)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from warm import Warm


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """A Python that has everything imported; commands and pages are forks of it."""
    with Warm(tmp_path_factory.mktemp("warm")) as running:
        yield running
