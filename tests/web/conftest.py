"""One run's data and one server for all tests of the HTTP API."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from shop_fixtures import address, data

__all__ = ["address", "data"]


@pytest.fixture(scope="session")
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=300) as made:
        yield made
