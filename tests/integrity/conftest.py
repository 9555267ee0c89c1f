"""The streams that the receiver's tests are written with."""

from __future__ import annotations

import pytest

from stamped_streams import Streams


@pytest.fixture(scope="session")
def streams() -> type[Streams]:
    return Streams
