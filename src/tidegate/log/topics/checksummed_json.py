"""Tidegate's own small files in a log folder: one line of JSON, and one line with its checksum."""

from __future__ import annotations

import json
from typing import Any

from fastcrc import crc32


def checksummed_json(body: Any) -> bytes:
    """One line of JSON and one line `crc32c:<8 hex digits over the first>`."""
    line = json.dumps(body, separators=(",", ":")).encode("ascii")
    return line + b"\ncrc32c:%08x\n" % crc32.iscsi(line)


def parse_checksummed_json(data: bytes) -> Any:
    """What `checksummed_json` was given; None when the checksum does not match.

    `ValueError` for a right checksum over what is no JSON, or is nested too deep to be read.
    """
    line, _, trailer = data.partition(b"\n")
    if trailer != b"crc32c:%08x\n" % crc32.iscsi(line):
        return None
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
