"""What an app's objects are called on the backend, and its tasks in storage: user's names, made safe.

Thread rule: pure functions.
"""

from __future__ import annotations

from urllib.parse import quote


def component(name: str) -> str:
    """A user's name as one component of an object's name: other characters percent-encoded, no dot in front."""
    safe = quote(name, safe="")
    return "%2E" + safe[1:] if safe.startswith(".") else safe


def storage_task(app: str, flow: str, task: int) -> str:
    return f"{component(app)}/{component(flow)}/{task}"


def parcel_folder(app: str, flow: str, task: int) -> str:
    return f"apps/{component(app)}/parcels/{component(flow)}/{task}"


def parcel_name(app: str, flow: str, task: int, round: int, unique: str) -> str:
    return f"{parcel_folder(app, flow, task)}/{round:010d}-{unique}"


def letters_name(app: str, flow: str, partition: int, start: int, unique: str) -> str:
    return f"apps/{component(app)}/letters/{component(flow)}/{partition}/{start:020d}-{unique}"
