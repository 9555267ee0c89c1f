"""Where an app's log and state are: addresses that mean the same in every process and every folder.

Folders are made absolute when the app is defined, because workers start somewhere else. Nothing is looked at.

Thread rule: pure functions.
"""

from __future__ import annotations

from pathlib import Path

from tidegate.errors import InvalidError
from tidegate.log.log import bootstrap_servers, folder_path, is_kafka


def log_address(data: str | Path | None, log: str | Path | None) -> str:
    """A folder, or `kafka://host:port`."""
    if log is None:
        return str(_in_data(data, "log", "log='kafka://HOST:PORT'") / "log")
    if is_kafka(str(log)):
        bootstrap_servers(str(log))  # refuses what is no address
        return str(log)
    return str(_absolute(folder_path(str(log))))


def state_address(data: str | Path | None, state: str | Path | None) -> str:
    """A folder, or the address of an object store."""
    if state is None:
        return str(_in_data(data, "state", "state='s3://BUCKET/PREFIX'") / "state")
    address = str(state)
    if address.startswith("memory://"):
        raise InvalidError(
            "state in memory:// is gone with the process that holds it; give a folder, like state='./state'"
        )
    if "://" in address and not address.startswith("file://"):
        return address
    return str(_absolute(folder_path(address)))


def _in_data(data: str | Path | None, what: str, other: str) -> Path:
    if data is None:
        raise InvalidError(
            f"the app has no place for its {what}: give data='./data' for both log and state, or {other}"
        )
    if is_kafka(str(data)):
        raise InvalidError(f"data={str(data)!r} is a log; give log={str(data)!r} and a folder as state=")
    return _absolute(folder_path(str(data)))


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()
