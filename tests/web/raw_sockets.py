"""Bytes to a server as they are, and what comes back: below any HTTP client."""

from __future__ import annotations

import socket
from contextlib import suppress


def raw(port: int, sent: bytes, *, half_close: bool = False, pieces: int = 1) -> bytes:
    """What comes back for some bytes; empty when the server just closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
        try:
            for start in range(0, len(sent), max(1, len(sent) // pieces)):
                connection.sendall(sent[start : start + max(1, len(sent) // pieces)])
            if half_close:
                with suppress(
                    OSError
                ):  # the server may have closed already; what it said is read all the same
                    connection.shutdown(socket.SHUT_WR)
            connection.settimeout(60)
            answer = b""
            while b"\r\n\r\n" not in answer and (piece := connection.recv(65536)):
                answer += piece
            return answer
        except (ConnectionError, TimeoutError):
            return b""
