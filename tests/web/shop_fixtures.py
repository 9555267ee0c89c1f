"""Fixtures that the tests of the page and those of the HTTP API share: one run's data, one server over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from served_shop import make, serving


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop") / "data"
    make(folder)
    return folder


@pytest.fixture(scope="session")
def address(data: Path) -> Iterator[str]:
    with serving(data) as found:
        yield found
