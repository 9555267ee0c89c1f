"""Opening an app's log from its address, the same way in every process of a run. State is opened by `open_backend`.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate.clock import Clock
from tidegate.files import Files
from tidegate.log.log import Log, folder_path, is_kafka, open_log


def open_app_log(address: str, client: Mapping[str, str], *, files: Files | None, clock: Clock | None) -> Any:
    """The log of an app: a folder, or a cluster with the client's settings."""
    if is_kafka(address):
        return open_log(address, client=client)
    return Log(folder_path(address), files=files, clock=clock)
