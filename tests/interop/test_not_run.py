"""Where there is no Kafka, the run says so, loudly and once; this test itself needs none."""

from __future__ import annotations

import os
import subprocess
import sys

from kafka_home import ROOT


def test_a_run_without_kafka_ends_with_one_loud_line() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-n",
            "1",
            "tests/interop/test_cli_live.py",
        ],
        cwd=ROOT,
        env={**environment, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("INTEROP NOT RUN") == 1
    assert "INTEROP NOT RUN" in done.stdout.splitlines()[-1]
    assert "make kafka" in done.stdout.splitlines()[-1]
