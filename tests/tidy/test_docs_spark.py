"""The pages that use Spark run, one after the other, in one Python with one Java: starting one is most of the work.

They take turns in one folder, emptied between them: Java keeps the working folder it was started in, and relative
names in the pages are looked up there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pages import PAGES, name, needs_spark, runnable
from warm import Warm

LIMIT_S = 240


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spark-pages")


@pytest.mark.spark
@pytest.mark.parametrize("page", [p for p in PAGES if needs_spark(p)], ids=name)
def test_the_examples_of_a_page_run(page: Path, place: Path, warm: Warm) -> None:
    for each in place.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    wanted = [(block.language, block.code) for block in runnable(page)]
    ran = warm.run(wanted, place, limit_s=LIMIT_S, fork=False)
    assert ran.code == 0, f"{name(page)}\n{ran.said[-4000:]}"
