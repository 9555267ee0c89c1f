"""An S3 server for the tests that meet real HTTP: moto's, from this environment or named by TIDEGATE_S3_SERVER.

Without one those tests are skipped, and the run says so at its end.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

NOT_RUN = (
    "S3 NOT RUN: no moto server here; pip install 'moto[s3]' flask flask-cors, or set TIDEGATE_S3_SERVER"
)
BUCKET = "tidegate-tests"


def server_command() -> list[str] | None:
    if named := os.environ.get("TIDEGATE_S3_SERVER"):
        return named.split()
    if importlib.util.find_spec("moto") and importlib.util.find_spec("flask_cors"):
        return [sys.executable, "-m", "moto.server"]
    found = shutil.which("moto_server")
    return [found] if found else None


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    command = server_command()
    if command is None:
        pytest.skip(NOT_RUN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [*command, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    endpoint = f"http://127.0.0.1:{port}"
    try:
        make_bucket(endpoint, server)
        yield endpoint
    finally:
        server.kill()
        server.wait()


def make_bucket(endpoint: str, server: subprocess.Popen[bytes]) -> None:
    credential = (
        "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    )
    request = urllib.request.Request(
        f"{endpoint}/{BUCKET}", method="PUT", data=b"", headers={"Authorization": credential}
    )
    deadline = time.monotonic() + 300
    while True:
        try:
            urllib.request.urlopen(request, timeout=10).close()
            return
        except urllib.error.URLError:
            if server.poll() is not None:
                pytest.skip(f"{NOT_RUN} ({server.args!r} ended at once)")
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if any(NOT_RUN in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(NOT_RUN, yellow=True)
