"""Where there is no browser, the run says so, loudly and once; this test itself needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_run_without_a_browser_ends_with_one_loud_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", "tests/browser/test_screens.py"],
        cwd=ROOT, env={**os.environ, "PATH": "/nowhere"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("BROWSER NOT RUN") == 1
    assert "scripts/chromium" in done.stdout.splitlines()[-1]
