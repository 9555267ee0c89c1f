"""Cases of window, session and key-value stores: puts, reads, and what Kafka Streams' stores answer.

Window stores have windows of 10 ms and a retention of 120 s unless said otherwise, so time segments of 60 s; session
stores a retention of 10 s. A window is readable while start > newest start − retention; of a session its end counts.
"""

from __future__ import annotations

from typing import Any

from streams_cases import APP, LATEST, OPERATOR, RESTART, STORE, TABLE, Put, Read, StoreCase

MINUTE = 60_000
A, AA, AAA, B, C, X = b"a", b"aa", b"aaa", b"b", b"c", b"x"


def _both(why: str) -> dict[str, str]:
    return {OPERATOR: why, APP: why}


DELETES = _both("a record adds to a window; none deletes one")
RAW_SESSIONS = _both("records would make one session of sessions this close to each other")
REMOVES = _both("sessions are removed only where they grow together")
KEYS = {OPERATOR: "plain keys are kept by tables; operators keep windows"}
ONLY_THE_STORE = {TABLE: "only a store has this call", **_both("only a store has this call")}
NO_DUPLICATES = {
    TABLE: "a table holds one value of a window",
    **_both("a window holds one result"),
}
LAST_STAMP = _both("a result has the largest timestamp of its records, not the last")


def puts(*rows: tuple[Any, ...]) -> tuple[Put, ...]:
    return tuple(Put(*row) for row in rows)


def at(key: bytes, *starts: int) -> tuple[Put, ...]:
    """A value `key@start` in each of these windows."""
    return tuple(Put(key, b"%s@%d" % (key, start), start) for start in starts)


def seen(key: bytes, *starts: int) -> list[tuple[bytes, int, bytes]]:
    """What `at` put, as it is read."""
    return [(key, start, b"%s@%d" % (key, start)) for start in starts]


def window(name: str, rows: tuple[Put, ...], *reads: Read, **more: Any) -> StoreCase:
    return StoreCase(f"window store: {name}", "window", rows, reads, **more)


FIVE = (*at(A, 0, 10, 20, 30), *at(B, 10, 20), *at(C, 20))
NUMBERS = {n: n.to_bytes(4, "big", signed=True) for n in (-1, 1, 2)}

WINDOW_STORES = [
    window(
        "a point is one window of one key",
        at(A, 10, 20),
        Read("get", (A, 10), b"a@10"),
        Read("get", (A, 20), b"a@20"),
        Read("get", (A, 15), None),
        Read("get", (B, 10), None),
    ),
    window(
        "the last put of a window replaces the others",
        puts((A, b"1", 10), (A, b"2", 10), (A, b"x", 20), (A, b"3", 10)),
        Read("get", (A, 10), b"3"),
        Read("fetch", (A, 0, 100), [(A, 10, b"3"), (A, 20, b"x")]),
    ),
    window(
        "a range of starts includes both its ends",
        at(A, 0, 10, 20, 30),
        Read("fetch", (A, 10, 20), seen(A, 10, 20)),
        Read("fetch", (A, 11, 20), seen(A, 20)),
        Read("fetch", (A, 10, 19), seen(A, 10)),
        Read("fetch", (A, 11, 19), []),
        Read("fetch", (A, 0, LATEST), seen(A, 0, 10, 20, 30)),
    ),
    window(
        "a range of starts that is turned round is empty", at(A, 0, 10, 20), Read("fetch", (A, 20, 10), [])
    ),
    window(
        "a range from before the epoch begins at the epoch",
        at(A, 0, 10),
        Read("fetch", (A, -5, 5), seen(A, 0)),
        Read("fetch_all", (-100, 10), seen(A, 0, 10)),
    ),
    window(
        "a backward fetch is the fetch from its end",
        FIVE,
        Read("backward_fetch", (A, 10, 30), seen(A, 30, 20, 10)),
    ),
    window(
        "windows put out of order are read in the order of time",
        at(A, 40, 0, 20, 30, 10),
        Read("fetch", (A, 0, 40), seen(A, 0, 10, 20, 30, 40)),
        Read("backward_fetch", (A, 0, 40), seen(A, 40, 30, 20, 10, 0)),
    ),
    window(
        "a fetch is of its key alone",
        FIVE,
        Read("fetch", (B, 0, 100), seen(B, 10, 20)),
        Read("fetch", (X, 0, 100), []),
    ),
    window(
        "a range of keys includes both its ends, and so does its range of starts",
        FIVE,
        Read("fetch_range", (A, B, 10, 20), [*seen(A, 10, 20), *seen(B, 10, 20)]),
        Read("fetch_range", (B, C, 20, 20), [*seen(B, 20), *seen(C, 20)]),
        Read("fetch_range", (AA, AAA, 0, 100), []),
    ),
    window(
        "a range of keys without an end is open there",
        FIVE,
        Read("fetch_range", (None, B, 20, 30), [*seen(A, 20, 30), *seen(B, 20)]),
        Read("fetch_range", (B, None, 0, 10), seen(B, 10)),
        Read("fetch_range", (None, None, 20, 20), [*seen(A, 20), *seen(B, 20), *seen(C, 20)]),
    ),
    window(
        "a range of keys backward has the last windows of a key first",
        FIVE,
        Read("backward_fetch_range", (A, B, 0, 20), [*seen(A, 20, 10, 0), *seen(B, 20, 10)]),
        Read("backward_fetch_range", (None, None, 20, 30), [*seen(A, 30, 20), *seen(B, 20), *seen(C, 20)]),
    ),
    window(
        "a range from a key to itself is the fetch of the key",
        FIVE,
        Read("fetch_range", (B, B, 0, 100), seen(B, 10, 20)),
        Read("fetch", (B, 0, 100), seen(B, 10, 20)),
    ),
    window(
        "a range of keys that is turned round is empty, with a warning",
        FIVE,
        Read("fetch_range", (B, A, 0, 100), [], warns=True),
        Read("backward_fetch_range", (B, A, 0, 100), [], warns=True),
    ),
    window(
        "keys are ordered by unsigned bytes: a range from -1 to 1 is empty",
        (*at(NUMBERS[1], 0), *at(NUMBERS[2], 10)),
        Read("fetch_range", (NUMBERS[-1], NUMBERS[1], 0, 100), [], warns=True),
        Read("fetch_range", (NUMBERS[1], NUMBERS[2], 0, 100), [*seen(NUMBERS[1], 0), *seen(NUMBERS[2], 10)]),
    ),
    window(
        "all keys in a range of starts",
        FIVE,
        Read("fetch_all", (10, 10), [*seen(A, 10), *seen(B, 10)]),
        Read("fetch_all", (11, 30), [*seen(A, 20, 30), *seen(B, 20), *seen(C, 20)]),
        Read("fetch_all", (31, 99), []),
        Read("backward_fetch_all", (10, 20), [*seen(A, 20, 10), *seen(B, 20, 10), *seen(C, 20)]),
    ),
    window(
        "everything, forward and backward",
        FIVE,
        Read("all", (), [*seen(A, 0, 10, 20, 30), *seen(B, 10, 20), *seen(C, 20)]),
        Read("backward_all", (), [*seen(A, 30, 20, 10, 0), *seen(B, 20, 10), *seen(C, 20)]),
    ),
    window(
        "a key that begins with another one is another key",
        (*at(A, 0, 10), *at(AA, 0, 10), *at(AAA, 20)),
        Read("fetch", (A, 0, LATEST), seen(A, 0, 10)),
        Read("fetch_range", (A, A, 0, LATEST), seen(A, 0, 10)),
        Read("fetch_range", (A, AA, 0, LATEST), [*seen(A, 0, 10), *seen(AA, 0, 10)]),
        Read("get", (AAA, 20), b"aaa@20"),
    ),
    window(
        "keys of zero bytes are told apart from the window behind them",
        tuple(Put(b"\0" * n, b"%d" % n, start) for n in (1, 2, 3) for start in (0, 10, 59_990)),
        *(
            Read(
                "fetch", (b"\0" * n, 0, LATEST), [(b"\0" * n, start, b"%d" % n) for start in (0, 10, 59_990)]
            )
            for n in (1, 2, 3)
        ),
    ),
    window(
        "no bytes are a value",
        puts((A, b"", 0), (B, b"1", 0)),
        Read("get", (A, 0), b""),
        Read("all", (), [(A, 0, b""), (B, 0, b"1")]),
    ),
    window(
        "a null value deletes the window",
        puts((A, b"1", 0), (A, b"2", 10), (B, b"3", 0), (A, None, 0)),
        Read("get", (A, 0), None),
        Read("all", (), [(A, 10, b"2"), (B, 0, b"3")]),
        left_out=DELETES,
    ),
    window(
        "a deleted window can be put again",
        puts((A, b"1", 0), (A, None, 0), (A, b"2", 0)),
        Read("get", (A, 0), b"2"),
        left_out=DELETES,
    ),
    window(
        "deleting what is not there does nothing",
        puts((A, b"1", 0), (A, None, 10), (X, None, 0)),
        Read("all", (), [(A, 0, b"1")]),
        left_out=DELETES,
    ),
    window(
        "a deletion moves the clock as a put does",
        puts((A, b"1", 0), (A, b"2", 60_000), (X, None, 150_000)),
        Read("all", (), [(A, 60_000, b"2")]),
        left_out=DELETES,
    ),
    window(
        "a deletion of an expired window is dropped and counted",
        puts((A, b"1", 240_000), (B, None, 10)),
        Read("all", (), [(A, 240_000, b"1")]),
        expired=1,
        left_out=DELETES,
    ),
    window(
        "a window a retention behind the newest is not read any more",
        (*at(A, 0, 10), *at(B, 120_000)),
        Read("get", (A, 0), None),
        Read("fetch", (A, 0, 100), seen(A, 10)),
        Read("backward_fetch", (A, 0, 100), seen(A, 10)),
        Read("fetch_all", (0, LATEST), [*seen(A, 10), *seen(B, 120_000)]),
        segments=frozenset({0, 2}),
    ),
    window(
        "a window less than a retention behind is read",
        (*at(A, 0), *at(B, 119_990)),
        Read("get", (A, 0), b"a@0"),
        Read("all", (), [*seen(A, 0), *seen(B, 119_990)]),
    ),
    window(
        "a put into a live time segment is taken, though it cannot be read",
        (*at(B, 150_000), *at(A, 30_000)),
        Read("get", (A, 30_000), None),
        Read("all", (), seen(B, 150_000)),
        expired=0,
        late=1,
        segments=frozenset({0, 2}),
    ),
    window(
        "a put into a time segment that is gone is dropped and counted",
        (*at(B, 240_000), *at(A, 110_000)),
        Read("all", (), seen(B, 240_000)),
        expired=1,
        late=1,
        segments=frozenset({4}),
    ),
    window(
        "an expired put holds up no put in time",
        (*at(A, 240_000), *at(A, 0), *at(A, 120_010), *at(A, 50_000), *at(A, 120_000)),
        Read("fetch", (A, 0, LATEST), seen(A, 120_010, 240_000)),
        expired=2,
        late=3,
    ),
    window(
        "time segments roll with the clock",
        at(A, 0, 60_000, 120_000, 180_000, 200_000),
        Read("fetch", (A, 0, LATEST), seen(A, 120_000, 180_000, 200_000)),
        segments=frozenset({1, 2, 3}),
    ),
    window(
        "a fetch of an expired range is empty and no error",
        at(A, 0, 480_000),
        Read("fetch", (A, 0, 10), []),
        Read("fetch_all", (0, 400_000), []),
        Read("fetch_range", (A, A, 0, 400_000), []),
        segments=frozenset({8}),
    ),
    window(
        "a leap of the clock leaves the newest window",
        (*at(A, 0, 60_000), *at(B, 1_000_000_000_000)),
        Read("all", (), seen(B, 1_000_000_000_000)),
        segments=frozenset({1_000_000_000_000 // MINUTE}),
    ),
    window(
        "all keys of a store have one clock",
        (*at(A, 60_000), *at(B, 300_000), *at(A, 200_000)),
        Read("fetch", (A, 0, LATEST), seen(A, 200_000)),
        Read("fetch", (B, 0, LATEST), seen(B, 300_000)),
    ),
    window(
        "with the least retention only the newest windows are read",
        at(A, 0, 10, 20),
        Read("fetch", (A, 0, LATEST), seen(A, 20)),
        retention=10,
    ),
    window(
        "a value comes back with its timestamp",
        puts((A, b"1", 0, None, 7), (A, b"2", 10, None, 11)),
        Read("get", (A, 0), (b"1", 7)),
        Read("fetch", (A, 0, 100), [(A, 0, b"1", 7), (A, 10, b"2", 11)]),
        timestamps=True,
    ),
    window(
        "a put with an older timestamp replaces value and timestamp",
        puts((A, b"1", 0, None, 9), (A, b"2", 0, None, 3)),
        Read("get", (A, 0), (b"2", 3)),
        timestamps=True,
        left_out=LAST_STAMP,
    ),
    window(
        "a window that a restart finds on disk is as it was",
        (*at(A, 0, 10), RESTART, *at(A, 10, 20)),
        Read("fetch", (A, 0, 100), seen(A, 0, 10, 20)),
    ),
    window(
        "what was expired can be read after a restart",
        (*at(A, 0), *at(B, 130_000), RESTART, *at(C, 10_000)),
        Read("all", (), [*seen(A, 0), *seen(B, 130_000), *seen(C, 10_000)]),
        difference="clocks after a restart",
        ours=(Read("all", (), seen(B, 130_000)),),
        ours_expired=0,
        ours_late=1,
        compat="kafka-streams",
    ),
    window(
        "what would be dropped is taken after a restart",
        (*at(B, 240_000), RESTART, *at(A, 10)),
        Read("all", (), [*seen(A, 10), *seen(B, 240_000)]),
        difference="clocks after a restart",
        ours=(Read("all", (), seen(B, 240_000)),),
        ours_expired=1,
        ours_late=1,
        compat="kafka-streams",
    ),
    window(
        "with duplicates retained every put is a row, in the order of the puts",
        puts((A, b"1", 0), (A, b"1", 0), (A, b"2", 0), (B, b"3", 0), (A, b"4", 10)),
        Read("fetch", (A, 0, 10), [(A, 0, b"1"), (A, 0, b"1"), (A, 0, b"2"), (A, 10, b"4")]),
        Read("fetch_all", (0, 5), [(A, 0, b"1"), (A, 0, b"1"), (A, 0, b"2"), (B, 0, b"3")]),
        duplicates=True,
        left_out=NO_DUPLICATES,
    ),
    window(
        "with duplicates retained a null value does nothing",
        puts((A, b"1", 0), (A, None, 0), (A, b"2", 0), (X, None, 500_000)),
        Read("fetch", (A, 0, 0), [(A, 0, b"1"), (A, 0, b"2")]),
        duplicates=True,
        left_out=NO_DUPLICATES,
    ),
    window(
        "with duplicates retained a point is the row with the last number",
        puts((A, b"1", 0), (A, b"2", 0)),
        Read("get", (A, 0), b"2"),
        duplicates=True,
        refused=("get",),
        difference="one window of a store that retains duplicates",
        left_out=NO_DUPLICATES,
    ),
    window(
        "an iterator shows puts that were made after it was opened",
        at(A, 0, 30),
        Read("fetch", (A, 0, LATEST), seen(A, 0, 30, 60)),
        Read("all", (), [*seen(A, 0, 30, 60), *seen(B, 90)]),
        while_open=(*at(A, 60), *at(B, 90)),
        difference="iterators",
        ours=(Read("fetch", (A, 0, LATEST), seen(A, 0, 30)), Read("all", (), seen(A, 0, 30))),
        left_out=ONLY_THE_STORE,
    ),
    window(
        "an iterator skips time segments that were dropped after it was opened",
        at(A, 0, 60_000, 120_000),
        Read("fetch", (A, 0, 120_000), seen(A, 60_000, 120_000)),
        Read("fetch_all", (0, 120_000), seen(A, 60_000, 120_000)),
        while_open=at(A, 180_000),
        left_out=ONLY_THE_STORE,
    ),
    window(
        "a window before the epoch is taken, and never read",
        puts((A, b"1", -10), (A, b"2", 0)),
        Read("all", (), [(A, 0, b"2")]),
        refused=("put",),
        difference="a window that starts before the epoch",
        left_out=_both("no window of a record starts before the epoch"),
    ),
    window(
        "a put without a key is refused by a store and left out elsewhere",
        puts((A, b"1", 0), (None, b"2", 0), (A, b"3", 10)),
        Read("all", (), [(A, 0, b"1"), (A, 10, b"3")]),
        refused=("key",),
    ),
]


def session(name: str, rows: tuple[Put, ...], *reads: Read, **more: Any) -> StoreCase:
    return StoreCase(f"session store: {name}", "session", rows, reads, **{"retention": 10_000, **more})


def of(key: bytes, *bounds: tuple[int, int]) -> tuple[Put, ...]:
    """Sessions of a key with values `key@start-end`."""
    return tuple(Put(key, b"%s@%d-%d" % (key, *each), *each) for each in bounds)


def met(key: bytes, *bounds: tuple[int, int]) -> list[tuple[bytes, int, int, bytes]]:
    return [(key, *each, b"%s@%d-%d" % (key, *each)) for each in bounds]


def remove(key: bytes, start: int, end: int) -> Put:
    return Put(key, None, start, end, removes=True)


FOUR = ((10, 10), (500, 1000), (1500, 2000), (2500, 3000))
KEYED = (*of(A, (0, 100), (300, 300)), *of(AA, (50, 120)), *of(B, (400, 450)))

SESSION_STORES = [
    session(
        "sessions that end at or after one time and start at or before another",
        of(A, *FOUR),
        Read("find_sessions", (A, 0, 1000), met(A, (10, 10), (500, 1000))),
        Read("find_sessions", (A, 400, 600), met(A, (500, 1000))),
        Read("find_sessions", (A, 1100, 1400), []),
        gap=480,
    ),
    session(
        "both bounds include sessions that touch them",
        of(A, (100, 200)),
        Read("find_sessions", (A, 200, 300), met(A, (100, 200))),
        Read("find_sessions", (A, 201, 300), []),
        Read("find_sessions", (A, 0, 100), met(A, (100, 200))),
        Read("find_sessions", (A, 0, 99), []),
        Read("find_sessions", (A, 150, 150), met(A, (100, 200))),
        gap=50,
    ),
    session(
        "a look for sessions backward has the last first",
        of(A, *FOUR),
        Read("backward_find_sessions", (A, 0, 2000), met(A, *FOUR[2::-1])),
        Read("backward_find_sessions", (A, 1000, 1500), met(A, (1500, 2000), (500, 1000))),
        gap=480,
    ),
    session(
        "a look from before the epoch begins there",
        of(A, (0, 0), (1000, 1000)),
        Read("find_sessions", (A, -1, 1000), met(A, (0, 0), (1000, 1000))),
        Read("find_sessions", (A, -1, 0), met(A, (0, 0))),
        gap=100,
    ),
    session(
        "a start before the end that is asked for finds what spans both",
        (*of(A, (0, 0), (20, 30)), *of(AA, (0, 10))),
        Read("find_sessions", (AA, 10, 0), met(AA, (0, 10))),
        Read("find_sessions", (A, 10, 0), []),
        Read("find_sessions_range", (A, AA, 10, 0), met(AA, (0, 10))),
        gap=15,
    ),
    session(
        "one session by key, start and end",
        (*of(A, (0, 4)), *of(AA, (0, 3), (0, 4), (1, 4)), *of(AAA, (0, 4))),
        Read("get", (AA, 0, 4), b"aa@0-4"),
        Read("get", (AA, 1, 4), b"aa@1-4"),
        Read("get", (AA, 1, 3), None),
        Read("get", (A, 1, 4), None),
        left_out=RAW_SESSIONS,
    ),
    session(
        "a session that is not there",
        of(A, (10, 40)),
        Read("get", (A, 10, 39), None),
        Read("get", (X, 10, 40), None),
        Read("get", (A, 10, 40), b"a@10-40"),
        gap=30,
    ),
    session(
        "sessions with one end are told apart by their start",
        of(A, (7, 100), (1, 100), (4, 100)),
        Read("find_sessions", (A, 0, LATEST), met(A, (1, 100), (4, 100), (7, 100))),
        Read("find_sessions", (A, 0, 4), met(A, (1, 100), (4, 100))),
        left_out=RAW_SESSIONS,
    ),
    session(
        "all sessions of a key",
        of(A, *FOUR) + of(AA, (0, 0)),
        Read("fetch", (A,), met(A, *FOUR)),
        Read("backward_fetch", (A,), met(A, *FOUR[::-1])),
        Read("fetch", (X,), []),
        gap=480,
    ),
    session(
        "all sessions of a range of keys",
        KEYED,
        Read("fetch_range", (A, AA), [*met(A, (0, 100), (300, 300)), *met(AA, (50, 120))]),
        Read("fetch_range", (AA, None), [*met(AA, (50, 120)), *met(B, (400, 450))]),
        Read("fetch_range", (None, AA), [*met(A, (0, 100), (300, 300)), *met(AA, (50, 120))]),
        Read("backward_fetch_range", (A, AA), [*met(A, (300, 300), (0, 100)), *met(AA, (50, 120))]),
        gap=100,
    ),
    session(
        "a look for sessions of a range of keys",
        KEYED,
        Read("find_sessions_range", (A, B, 110, 310), [*met(A, (300, 300)), *met(AA, (50, 120))]),
        Read("find_sessions_range", (None, None, 0, 49), met(A, (0, 100))),
        Read("backward_find_sessions_range", (A, A, 0, LATEST), met(A, (300, 300), (0, 100))),
        gap=100,
    ),
    session(
        "a range from a key to itself is a look for the key",
        KEYED,
        Read("find_sessions_range", (AA, AA, 0, 1000), met(AA, (50, 120))),
        Read("find_sessions", (AA, 0, 1000), met(AA, (50, 120))),
        gap=100,
    ),
    session(
        "a range of keys that is turned round is empty, with a warning",
        KEYED,
        Read("find_sessions_range", (B, A, 0, LATEST), [], warns=True),
        Read("fetch_range", (B, A), [], warns=True),
        gap=100,
    ),
    session(
        "a key of zero bytes is told apart from the window behind it",
        tuple(Put(b"\0" * n, b"%d" % start, start, 100) for n in (1, 2, 3) for start in (n, n + 3, n + 6)),
        *(
            Read(
                "find_sessions",
                (b"\0" * n, 0, LATEST),
                [(b"\0" * n, start, 100, b"%d" % start) for start in (n, n + 3, n + 6)],
            )
            for n in (1, 2, 3)
        ),
        left_out=RAW_SESSIONS,
    ),
    session(
        "a put of null deletes the session",
        (*of(A, (0, 1000), (1500, 2500)), Put(A, None, 0, 1000)),
        Read("find_sessions", (A, 0, 1000), []),
        Read("find_sessions", (A, 1500, 2500), met(A, (1500, 2500))),
        left_out=REMOVES,
    ),
    session(
        "a removal deletes the session",
        (*of(A, (0, 1000), (1500, 2500)), remove(A, 0, 1000)),
        Read("find_sessions", (A, 0, 1000), []),
        Read("fetch", (A,), met(A, (1500, 2500))),
        left_out=REMOVES,
    ),
    session(
        "a removal of what is not there does nothing",
        (*of(A, (0, 1000)), remove(A, 0, 999), remove(X, 0, 1000)),
        Read("all", (), met(A, (0, 1000))),
        left_out=REMOVES,
    ),
    session(
        "a removal moves the clock",
        (*of(A, (0, 0)), *of(B, (0, 900)), remove(X, 0, 10_500)),
        Read("all", (), met(B, (0, 900))),
        left_out=REMOVES,
    ),
    session(
        "a session that grows is removed and put anew",
        (Put(A, b"1", 0, 0), remove(A, 0, 0), Put(A, b"2", 0, 5), remove(A, 0, 5), Put(A, b"3", 0, 9)),
        Read("all", (), [(A, 0, 9, b"3")]),
        left_out=REMOVES,
    ),
    session(
        "the last put of a session replaces the others",
        (Put(A, b"1", 50, 50), Put(A, b"2", 50, 50)),
        Read("fetch", (A,), [(A, 50, 50, b"2")]),
        gap=20,
    ),
    session(
        "no bytes are a value",
        (Put(A, b"", 5, 5),),
        Read("get", (A, 5, 5), b""),
        gap=20,
    ),
    session(
        "a session that ended a retention before the newest end is not read",
        (*of(A, (0, 0)), *of(B, (0, 1)), *of(C, (9_950, 10_000))),
        Read("get", (A, 0, 0), None),
        Read("find_sessions", (B, 0, LATEST), met(B, (0, 1))),
        Read("all", (), [*met(B, (0, 1)), *met(C, (9_950, 10_000))]),
        gap=50,
        segments=frozenset({0}),
    ),
    session(
        "of a session its end counts, however early it began",
        (*of(A, (0, 9_000)), *of(B, (8_000, 18_000)), *of(C, (100, 7_000))),
        Read("all", (), [*met(A, (0, 9_000)), *met(B, (8_000, 18_000))]),
        gap=1_000,
        left_out={
            OPERATOR: "the first records of a long session are late on their own",
            APP: "the first records of a long session are late on their own",
        },
    ),
    session(
        "a put into a live time segment is taken, though it cannot be read",
        (*of(B, (65_000, 65_000)), *of(A, (54_000, 54_000))),
        Read("all", (), met(B, (65_000, 65_000))),
        gap=20,
        expired=0,
        late=1,
        segments=frozenset({0, 1}),
    ),
    session(
        "a put into a time segment that is gone is dropped and counted",
        (*of(A, (120_000, 120_000)), *of(A, (0, 0)), *of(B, (115_000, 115_000))),
        Read("all", (), [*met(A, (120_000, 120_000)), *met(B, (115_000, 115_000))]),
        gap=20,
        expired=1,
        late=1,
        segments=frozenset({1, 2}),
    ),
    session(
        "only sessions within the retention are left of many",
        (*of(A, (0, 0)), *of(B, (59_990, 60_000)), *of(C, (60_000, 60_000)), *of(A, (120_000, 120_000))),
        Read("all", (), met(A, (120_000, 120_000))),
        gap=20,
    ),
    session(
        "a session that a restart finds on disk is as it was",
        (*of(A, (0, 10)), RESTART, *of(A, (100, 110))),
        Read("fetch", (A,), met(A, (0, 10), (100, 110))),
        gap=20,
    ),
    session(
        "what was expired can be read after a restart",
        (*of(A, (0, 0)), *of(B, (15_000, 15_000)), RESTART, *of(C, (2_000, 2_000))),
        Read("all", (), [*met(A, (0, 0)), *met(B, (15_000, 15_000)), *met(C, (2_000, 2_000))]),
        gap=20,
        difference="clocks after a restart",
        ours=(Read("all", (), met(B, (15_000, 15_000))),),
        ours_late=1,
        compat="kafka-streams",
    ),
    session(
        "sessions of all keys by their end cannot be found",
        (*of(A, (0, 5), (60, 200)), *of(B, (3, 7))),
        Read("find_sessions_by_end", (5, 7), []),
        refused=("find_sessions_by_end",),
        difference="finding sessions by their end",
        ours=(Read("find_sessions_by_end", (5, 7), [*met(A, (0, 5)), *met(B, (3, 7))]),),
        compat="kafka-streams",
        left_out=ONLY_THE_STORE,
    ),
    session(
        "a put without a key is refused by a store and left out elsewhere",
        (*of(A, (0, 0)), Put(None, b"2", 0, 0), *of(A, (100, 100))),
        Read("all", (), met(A, (0, 0), (100, 100))),
        gap=20,
        refused=("key",),
    ),
]


def plain(name: str, rows: tuple[Put, ...], *reads: Read, **more: Any) -> StoreCase:
    return StoreCase(f"key-value store: {name}", "key", rows, reads, **{"left_out": KEYS, **more})


def held(**values: str) -> tuple[Put, ...]:
    return tuple(Put(key.encode(), value.encode()) for key, value in values.items())


KEY_VALUE_STORES = [
    plain(
        "the value of a key",
        held(a="1", b="2"),
        Read("get", (A,), b"1"),
        Read("get", (B,), b"2"),
        Read("get", (C,), None),
    ),
    plain(
        "the last put of a key replaces the others",
        puts((A, b"1"), (B, b"2"), (A, b"3")),
        Read("get", (A,), b"3"),
        Read("all", (), [(A, b"3"), (B, b"2")]),
    ),
    plain(
        "a null value deletes",
        puts((A, b"1"), (B, b"2"), (C, b"3"), (A, None), (C, None)),
        Read("get", (A,), None),
        Read("range", (A, C), [(B, b"2")]),
        Read("all", (), [(B, b"2")]),
    ),
    plain(
        "a deleted key can be put again", puts((A, b"1"), (A, None), (A, b"2")), Read("all", (), [(A, b"2")])
    ),
    plain(
        "deleting what is not there does nothing", puts((A, b"1"), (X, None)), Read("all", (), [(A, b"1")])
    ),
    plain(
        "a range includes both its ends, whether they are there or not",
        held(a="1", b="2", d="4", e="5"),
        Read("range", (b"b", b"d"), [(b"b", b"2"), (b"d", b"4")]),
        Read("range", (b"c", b"f"), [(b"d", b"4"), (b"e", b"5")]),
        Read("range", (b"f", b"g"), []),
    ),
    plain(
        "a range without an end is open there",
        held(a="1", b="2", c="3"),
        Read("range", (None, B), [(A, b"1"), (B, b"2")]),
        Read("range", (B, None), [(B, b"2"), (C, b"3")]),
        Read("range", (None, None), [(A, b"1"), (B, b"2"), (C, b"3")]),
    ),
    plain(
        "a reverse range is the range from its end",
        held(a="1", b="2", c="3"),
        Read("reverse_range", (A, B), [(B, b"2"), (A, b"1")]),
        Read("reverse_range", (B, None), [(C, b"3"), (B, b"2")]),
        Read("reverse_all", (), [(C, b"3"), (B, b"2"), (A, b"1")]),
    ),
    plain(
        "keys are ordered by unsigned bytes",
        puts((b"\xff", b"4"), (b"\x7f", b"2"), (b"", b"0"), (b"\x80", b"3"), (b"\0", b"1")),
        Read("all", (), [(b"", b"0"), (b"\0", b"1"), (b"\x7f", b"2"), (b"\x80", b"3"), (b"\xff", b"4")]),
        Read("range", (b"\x7f", b"\x80"), [(b"\x7f", b"2"), (b"\x80", b"3")]),
    ),
    plain(
        "a range that is turned round is empty, with a warning",
        held(a="1", b="2"),
        Read("range", (B, A), [], warns=True),
        Read("reverse_range", (B, A), [], warns=True),
    ),
    plain(
        "a range from -1 to 1 is empty, as bytes are compared",
        puts((NUMBERS[1], b"one")),
        Read("range", (NUMBERS[-1], NUMBERS[1]), [], warns=True),
    ),
    plain(
        "a range from a key to itself is its value",
        held(a="1", aa="2", b="3"),
        Read("range", (A, A), [(A, b"1")]),
        Read("get", (A,), b"1"),
    ),
    plain("no bytes are a value", puts((A, b"")), Read("get", (A,), b""), Read("all", (), [(A, b"")])),
    plain(
        "nothing gets old",
        puts((A, b"1", 0, None, 5), (B, b"2", 0, None, 10**15)),
        Read("all", (), [(A, b"1"), (B, b"2")]),
    ),
    plain(
        "the later put wins, also with an older timestamp",
        puts((A, b"1", 0, None, 900), (A, b"2", 0, None, 100)),
        Read("get", (A,), (b"2", 100)),
        timestamps=True,
    ),
    plain(
        "a key that a restart finds is as it was",
        (*held(a="1", b="2"), RESTART, *puts((B, None), (C, b"3"))),
        Read("all", (), [(A, b"1"), (C, b"3")]),
    ),
    plain(
        "a put without a key is refused by a store and left out elsewhere",
        puts((A, b"1"), (None, b"2"), (B, b"3")),
        Read("all", (), [(A, b"1"), (B, b"3")]),
        refused=("key",),
    ),
    plain(
        "an iterator is of the moment it was opened",
        held(a="1"),
        Read("range", (A, C), [(A, b"1")]),
        while_open=held(b="2"),
        left_out=ONLY_THE_STORE,
    ),
]

STORE_CASES = [*WINDOW_STORES, *SESSION_STORES, *KEY_VALUE_STORES]
assert STORE not in {level for case in STORE_CASES for level in case.left_out}
