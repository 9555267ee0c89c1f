"""`open_log(url)`: a folder or `kafka://host:port`, behind the same few calls.

Both kinds of log answer `topics`, `describe`, `partition_rows`, `create_topic`, `alter_topic`,
`add_partitions`, `delete_topic`, `writer`, `reader` and `close`, and are context managers. What only one of
them can do is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tidegate.errors import InvalidError
from tidegate.log.access.embedded import Log

if TYPE_CHECKING:
    from tidegate.log.kafka.log import KafkaLog

_SCHEME = "kafka://"


def is_kafka(url: str) -> bool:
    return url.startswith(_SCHEME)


def open_log(url: str, *, client: Mapping[str, str] | None = None, **settings: Any) -> Log | KafkaLog:
    """The log at `url`; `client` are settings of the Kafka client, `settings` those of `Log`."""
    if is_kafka(url):
        from tidegate.log.kafka.log import KafkaLog

        return KafkaLog(bootstrap_servers(url), client or {})
    if client:
        raise InvalidError(
            f"{next(iter(client))} is a setting of the Kafka client, but {url} is a folder; give "
            f"--log kafka://HOST:PORT, or leave it out"
        )
    return Log(folder_path(url), **settings)


def folder_path(url: str) -> Path:
    """The folder a URL names: a plain path or `file:///…`."""
    if not url:
        raise InvalidError("--log is empty; give a folder or kafka://HOST:PORT")
    if "://" not in url:
        return Path(url).expanduser()
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise InvalidError(f"--log {url}: give a folder, file:///FOLDER or kafka://HOST:PORT")
    return Path(unquote(parts.path))


def bootstrap_servers(url: str) -> str:
    """`host:port,host:port` of a `kafka://` URL; 9092 where no port is given."""
    servers = url.removeprefix(_SCHEME).rstrip("/")
    if not servers or "/" in servers or "@" in servers:
        raise InvalidError(
            f"{url}: write kafka://HOST:PORT or kafka://HOST:PORT,HOST:PORT; user and password belong into "
            f"--command-config FILE"
        )
    return ",".join(server if _has_port(server) else f"{server}:9092" for server in servers.split(","))


def _has_port(server: str) -> bool:
    return server.rpartition(":")[2].isdigit() and not server.endswith("]")
