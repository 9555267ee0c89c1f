"""The backend interface of storage: named immutable objects, and small conditional publishes.

A backend is independent of runs, packs and checkpoints. It guarantees:
B1  `put` is atomic: no reader ever sees a partial object, also after a crash, and when it returns the object survives
    a power cut. Parts are written one by one and never joined in memory.
B2  an object never changes. Putting an existing name with other bytes raises `ConflictError`.
B3  `publish` is a compare-and-swap: of any number of callers with the same expectation exactly one wins.
    Versions never repeat, also when the same bytes are published again.
B4  absent is `MissingObjectError` (or None by the signature); unreachable is `UnavailableError`.
B5  a buffer from `read` starts at a multiple of 64 and stays valid after `delete` and `close`.

Names are `/`-separated; see `check_name`. `list` goes by folder, and includes unfinished `put`s (names ending in
`.tmp`), which only `delete` accepts. `identity` is a permanent unique id: a token of another backend is refused.
Several objects are put together by `put_all`; after an error some of them may exist and others not.

Thread rule: every method may be called from any thread.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import pyarrow as pa

from tidegate.errors import CorruptError, InvalidError

# -- backend -----------------------------------------------------------------------------------------

Part: TypeAlias = "bytes | bytearray | memoryview | pa.Buffer"
MAX_NAME_BYTES = 900
MAX_COMPONENT_BYTES = 180  # leaves room for the suffix of a temporary file in a 255-byte file name
MAX_PUBLISHED_BYTES = 16 << 20
TEMPORARY = ".tmp"
ALIGNMENT = 64
GROUP_BYTES = 1 << 19
GROUP_PARTS = 512  # Linux takes 1024 in one call
MAX_STATE_NAME = 150  # derived names, such as `orders_v12-3`, still fit into a component
RESERVED_APP_NAMES = ("apps", "tables")  # folders of the state that are not apps
_STATE_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MAX_STATE_NAME - 1}}}")
_COMPONENT = re.compile(r"[A-Za-z0-9_%=+@~,-][A-Za-z0-9._%=+@~,-]*\Z")


class MissingObjectError(CorruptError):
    """A referenced object is missing. `name` is its name on the backend."""

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message, path=name, kafka_name=None)
        self.name = name


class NoStateError(InvalidError):
    """No state exists at an address that is opened without creating it."""


def no_state(where: str) -> NoStateError:
    """The error for an address where nothing was ever stored."""
    return NoStateError(
        f"there is no state in {where}; run an app or push a table first, or say where its state is kept"
    )


def read_only_error(where: str, name: str) -> InvalidError:
    """The error for a write through a read-only backend."""
    return InvalidError(f"{where} was opened to be read, so {name} cannot be changed; open it for writing")


class ObjectInfo(NamedTuple):
    """One line of a listing."""

    name: str
    size: int
    modified_ms: int


class StorageBackend(Protocol):
    """The interface of a backend."""

    @property
    def kind(self) -> str: ...

    @property
    def identity(self) -> str: ...

    @property
    def address(self) -> str | None:
        """The address for `open_backend` in another process; None when only this process can open it."""

    @property
    def is_remote(self) -> bool:
        """Whether calls mostly wait, so that concurrent calls pay."""

    def put(self, name: str, parts: Sequence[Part]) -> None:
        """Create an object, durable on return; `ConflictError` when the name holds other bytes."""

    def read(self, name: str) -> pa.Buffer:
        """The whole object, mapped or held in memory; `MissingObjectError` when absent."""

    def publish(self, name: str, data: bytes, *, expected: str | None) -> str:
        """Write small data if the version is `expected` (None: absent); the new version, or `ConflictError`."""

    def read_published(self, name: str) -> tuple[bytes, str] | None:
        """The published bytes and their version; None when nothing was published."""

    def delete(self, name: str) -> None:
        """Remove an object or a published name; idempotent."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object below the folder `prefix` (empty: all), in any order."""

    def forget(self, name: str) -> bool:
        """Drop local copies of a remote object; returns whether there was one, so that a retry may succeed."""

    def close(self) -> None: ...


def check_name(name: str, *, temporary: bool = False) -> str:
    """Validate a name: ASCII components, none empty, none starting with a dot; else `InvalidError`."""
    components = name.split("/")
    longest = MAX_COMPONENT_BYTES + (50 if temporary and name.endswith(TEMPORARY) else 0)
    good = (
        0 < len(name) <= MAX_NAME_BYTES
        and all(_COMPONENT.match(each) for each in components)
        and all(len(each) <= longest for each in components)
    )
    if not good:
        raise InvalidError(
            f"object name {name!r}: use components of letters, digits and ._%=+@~,- between single slashes, "
            f"none starting with a dot, none longer than {MAX_COMPONENT_BYTES}"
        )
    if name.endswith(TEMPORARY) and not temporary:
        raise InvalidError(f"object name {name!r}: names ending in {TEMPORARY} are the backend's own")
    return name


def check_state_name(kind: Literal["app", "table"], name: object) -> str:
    """Validate the name of an app or a table that keeps state; else `InvalidError`."""
    reserved = RESERVED_APP_NAMES if kind == "app" else ()
    if isinstance(name, str) and _STATE_NAME.fullmatch(name) and name not in reserved:
        return name
    shown = repr(name) if len(repr(name)) <= 60 else f"{repr(name)[:50]}… of {len(str(name))} characters"
    taken = f", nor {' or '.join(reserved)}, which are folders of the state" if reserved else ""
    raise InvalidError(
        f"{kind} name {shown} is not allowed: use 1 to {MAX_STATE_NAME} of the characters a-z A-Z 0-9 . _ -, "
        f"no dot in front{taken}"
    )


def check_prefix(prefix: str) -> str:
    """Validate the folder of a listing and strip its last slash."""
    bare = prefix.removesuffix("/")
    return check_name(bare, temporary=True) if bare else ""


def missing(name: str, where: str) -> MissingObjectError:
    """The error for a missing object."""
    return MissingObjectError(
        f"{name} is missing from {where}: it was removed by hand or by garbage collection with a wrong list of "
        f"retained tokens; restore it from a copy, or go back to an older checkpoint",
        name=name,
    )


def view_of(part: Part) -> memoryview:
    """The bytes of a part, without copying."""
    view = memoryview(part)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def total_size(parts: Sequence[Part]) -> int:
    return sum(view_of(part).nbytes for part in parts)


def joined(parts: Sequence[Part]) -> pa.Buffer:
    """All parts in one aligned buffer: a copy, for backends that keep objects in memory."""
    buffer = pa.allocate_buffer(total_size(parts))
    target, position = memoryview(buffer).cast("B"), 0
    for part in parts:
        view = view_of(part)
        target[position : position + view.nbytes] = view
        position += view.nbytes
    return buffer


def same_bytes(parts: Sequence[Part], stored: pa.Buffer) -> bool:
    """Whether the parts, one after the other, are the stored bytes."""
    if total_size(parts) != stored.size:
        return False
    position = 0
    for part in parts:
        view = view_of(part)
        if not stored.slice(position, view.nbytes).equals(pa.py_buffer(view)):
            return False
        position += view.nbytes
    return True


def chunks(parts: Sequence[Part], size: int = 1 << 20) -> Iterator[memoryview]:
    """Yield the same bytes in fewer pieces: small parts are joined, large ones are not copied."""
    gathered = bytearray()
    for part in parts:
        view = view_of(part)
        if view.nbytes >= size // 8:
            if gathered:
                yield memoryview(gathered)
                gathered = bytearray()
            yield view
            continue
        gathered += view
        if len(gathered) >= size:
            yield memoryview(gathered)
            gathered = bytearray()
    if gathered:
        yield memoryview(gathered)


def groups(parts: Iterable[Part]) -> Iterator[list[memoryview]]:
    """Yield the parts, without a copy, in lists of about 512 KiB and few pieces, one per write call.

    Larger calls cost twice as much, because Linux tries to allocate larger pages.
    """
    group: list[memoryview] = []
    nbytes = 0
    for view in map(view_of, parts):
        size = view.nbytes
        for start in range(0, size, GROUP_BYTES):
            group.append(view if size <= GROUP_BYTES else view[start : start + GROUP_BYTES])
            nbytes += min(size - start, GROUP_BYTES)
            if nbytes >= GROUP_BYTES or len(group) == GROUP_PARTS:
                yield group
                group, nbytes = [], 0
    if group:
        yield group


# -- several calls at once ---------------------------------------------------------------------------

Item = TypeVar("Item")


def overlap(call: Callable[[Item], None], items: Sequence[Item], *, at_most: int) -> None:
    """Call `call` with every item, at most `at_most` concurrently; with one at a time on this thread.

    After an error no further call begins, running ones end, and the error of the first failed item is raised. `call`
    must handle expected errors of single items itself.
    """
    if at_most <= 1 or len(items) < 2:
        for item in items:
            call(item)
        return
    failed = (
        threading.Event()
    )  # the next call sees it at once; cancelling takes effect only when this thread wakes up

    def begin(item: Item) -> None:
        if failed.is_set():
            return
        try:
            call(item)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(min(at_most, len(items)), thread_name_prefix="tidegate-backend") as threads:
        calls = [threads.submit(begin, item) for item in items]
        try:
            wait(calls, return_when=FIRST_EXCEPTION)
        finally:
            for each in calls:
                each.cancel()
    for each in calls:
        if not each.cancelled():
            each.result()


# -- several objects ---------------------------------------------------------------------------------


@runtime_checkable
class PutsTogether(Protocol):
    """A backend with its own method to put several objects."""

    def put_all(self, objects: Iterable[tuple[str, Sequence[Part]]]) -> None: ...


def put_all(
    backend: StorageBackend, objects: Iterable[tuple[str, Sequence[Part]]], *, at_once: int = 1
) -> None:
    """Put every (name, parts); a folder takes the next one when the previous one is written."""
    if isinstance(backend, PutsTogether):
        backend.put_all(objects)
    else:
        overlap(lambda each: backend.put(*each), list(objects), at_most=at_once)
