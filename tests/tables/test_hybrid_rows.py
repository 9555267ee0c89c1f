"""Rows of behaviour of replicas (`hybrid_rows`) behind a push of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_rows import *  # noqa: F403 - its tests are collected here
from hybrid_stage import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()
