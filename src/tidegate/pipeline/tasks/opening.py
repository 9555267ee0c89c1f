"""Opening an app's log and state from their addresses, the same way in every process of a run.

An object store needs a local folder for copies of what is read. Copies are checked before use and several processes may
share them, so all processes of one user on a machine have one such folder for a store, where temporary files are.

Thread rule: pure functions.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidegate.clock import Clock
from tidegate.files import Files
from tidegate.log.access.connect import folder_path, is_kafka, open_log
from tidegate.log.access.embedded import Log
from tidegate.randomness import Randomness
from tidegate.storage import open_backend
from tidegate.storage.backends.port import StorageBackend


def open_app_log(address: str, client: Mapping[str, str], *, files: Files | None, clock: Clock | None) -> Any:
    """The log of an app: a folder, or a cluster with the client's settings."""
    if is_kafka(address):
        return open_log(address, client=client)
    return Log(folder_path(address), files=files, clock=clock)


def open_state(
    address: str,
    *,
    files: Files | None = None,
    clock: Clock | None = None,
    randomness: Randomness | None = None,
) -> StorageBackend:
    """The backend of an app's state: a folder, or an object store with local copies."""
    is_local = "://" not in address or address.startswith(("file://", "memory://"))
    return open_backend(
        address,
        cache=None if is_local else copies_folder(address),
        files=files,
        clock=clock,
        randomness=randomness,
    )


def copies_folder(address: str) -> Path:
    """Where copies of an object store's packs lie on this machine, for this user."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    return (
        Path(tempfile.gettempdir()) / f"tidegate-{user}" / hashlib.sha256(address.encode()).hexdigest()[:16]
    )
