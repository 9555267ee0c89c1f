"""Settings of the server: which data, where to listen, who may ask, and every limit.

S1  a host that is not loopback is refused without a token, before anything listens.
S2  a token comes from a file that only its owner can read, never from a command line, a URL or the environment.
"""

from __future__ import annotations

import ipaddress
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tidegate.errors import InvalidError

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
SHORTEST_TOKEN: Final = 16
LONGEST_TOKEN: Final = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client, or all of them, can make the server do at most."""

    url_bytes: int = 8 << 10
    header_bytes: int = 16 << 10
    body_bytes: int = 1 << 20
    connections: int = 512
    """How many may be open; from half of them on, new ones replace idle ones (`security`, P1)."""
    fresh_seconds: float = 0.25
    """For how long a connection that has become idle keeps its place."""
    header_seconds: float = 5.0
    request_seconds: float = 30.0
    page_rows: int = 10_000
    page_bytes: int = 8 << 20
    scan_records: int = 1_000_000
    """How many records one question reads before it says how far it looked and offers to go on."""
    scan_seconds: float = 0.7
    live_seconds: float = 3600.0
    """How long one stream of events stays open; browsers open it again."""
    live_streams: int = 32
    session_seconds: float = 12 * 3600.0
    sessions: int = 1000
    idle_seconds: float = 300.0
    """After how long without a question the process that reads lets go of what it holds."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One server; `token` None: everyone here may look.

    `log` is a folder or `kafka://HOST:PORT`, `state` a folder or the address of an object store.
    """

    log: Path | str
    state: Path | str
    host: str = "127.0.0.1"
    port: int = 8421
    token: str | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()
    """Further host names under which browsers may ask for it."""
    limits: Limits = field(default_factory=Limits)
    client: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Settings of the Kafka client, secrets among them: they reach the process that reads through its pipe (S2)."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidError(f"port {self.port}: a port is a number from 0 to 65535")
        if not is_loopback(self.host) and self.token is None:
            raise InvalidError(
                f"--host {self.host} lets other machines look, so it needs a token: write one of at least "
                f"{SHORTEST_TOKEN} characters into a file that only you can read, and give --token-file FILE"
            )
        if self.token is not None and not SHORTEST_TOKEN <= len(self.token) <= LONGEST_TOKEN:
            raise InvalidError(f"a token has {SHORTEST_TOKEN} to {LONGEST_TOKEN} characters")

    @property
    def allowed_names(self) -> frozenset[str]:
        """What a Host header may say, without its port."""
        own = {self.host.lower(), _bracketed(self.host.lower())} - {"0.0.0.0", "::", "[::]"}
        machine = set() if is_loopback(self.host) else {socket.gethostname().lower()}
        return frozenset({*LOOPBACK_NAMES, *own, *machine, *(name.lower() for name in self.names)})


def folders_of(data: Path) -> tuple[Path, Path]:
    """The log and the state in a data folder; a folder without `log` is a log itself."""
    if not data.is_dir():
        raise InvalidError(
            f"{data} is no folder; name the folder that holds your app's data, or a log's or Kafka's own"
        )
    return (data / "log", data / "state") if (data / "log").is_dir() else (data, data / "state")


def log_of(url: str, data: Path) -> tuple[Path | str, Path]:
    """A log by its URL, a cluster's too, and the state in a data folder."""
    from tidegate.log.log import bootstrap_servers, folder_path, is_kafka

    state = data / "state"
    if is_kafka(url):
        bootstrap_servers(url)  # refused now, with words, rather than by the first question
        return url, state
    folder = folder_path(url)
    if not folder.is_dir():
        raise InvalidError(f"--log {url} is no folder; name a log's or Kafka's own, or kafka://HOST:PORT")
    return folder, state


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> str:
    """The token in a file (S2); blanks around it do not count."""
    try:
        found = path.stat()
    except OSError as error:
        raise InvalidError(f"--token-file {path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise InvalidError(f"--token-file {path} is no plain file")
    if found.st_mode & 0o077:
        raise InvalidError(f"--token-file {path} can be read by others; run: chmod 600 {path}")
    if found.st_size > LONGEST_TOKEN + 16:
        raise InvalidError(
            f"--token-file {path} holds more than a token of at most {LONGEST_TOKEN} characters"
        )
    try:
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise InvalidError(f"--token-file {path} cannot be read as text") from None
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidError(f"--token-file {path}: a token is printable ASCII without blanks")
    return token


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
