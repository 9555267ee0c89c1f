"""A real browser, where there is one, over the real server over data of a real run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chromium import ARGUMENTS, find_chromium
from shop_fixtures import address, data

__all__ = ["address", "data"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Ends with its tests: while it is there its event loop runs, and other tests could not start one."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=find_chromium(), headless=True, args=ARGUMENTS)
        yield made
        made.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A window of its own; a script error, a blocked resource or a failed request fails the test."""
    context = browser.new_context(
        base_url=address, color_scheme="light", viewport={"width": 1280, "height": 800}
    )
    made = context.new_page()
    wrong: list[str] = []
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    made.set_default_timeout(120_000)
    yield made
    context.close()
    assert not wrong, wrong
