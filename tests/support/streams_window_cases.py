"""Cases of windowed counts: records, and what Kafka Streams' windows hold, send on close, and leave out.

Where a case does not say a retention it has the least one, as a store of Kafka Streams has by default: size and grace,
gap and grace.
"""

from __future__ import annotations

from typing import Any

import tidegate as tg
from streams_cases import AGAIN, APP, STORE, TABLE, Counted, Event, WindowCase
from window_oracles import ms

K, A, B, C, D, X = b"k", b"a", b"b", b"c", b"d", b"x"
GAP = 300_000
SENDS_NOTHING = {STORE: "a store sends nothing"}
NOT_BY_STORE = {
    STORE: "Kafka Streams' steps for sliding windows are an oracle of their own, which another test compares with these"
}
FOREVER = {TABLE: "a topic of windows has windows of one size", STORE: "a store's windows have one size"}


def of(key: bytes, *times: int) -> tuple[Event, ...]:
    return tuple(Event(key, time) for time in times)


def rows(key: bytes, *windows: tuple[int, int, int, int]) -> tuple[Counted, ...]:
    """(start, end, count, timestamp) of windows of a key."""
    return tuple((key, *each) for each in windows)


def tumbling(size: int, grace: int = 0, retention: int | None = None) -> Any:
    return tg.Tumbling(
        ms(size), grace=ms(grace), retention=ms(size + grace if retention is None else retention)
    )


def hopping(size: int, advance: int, grace: int = 0, retention: int | None = None) -> Any:
    kept = ms(size + grace if retention is None else retention)
    return tg.Hopping(ms(size), ms(advance), grace=ms(grace), retention=kept)


def sessions(gap: int, grace: int = 0, retention: int | None = None) -> Any:
    return tg.Session(ms(gap), grace=ms(grace), retention=ms(gap + grace if retention is None else retention))


def sliding(difference: int, grace: int = 0, retention: int = 1000) -> Any:
    return tg.Sliding(ms(difference), grace=ms(grace), retention=ms(retention))


TIME_WINDOWS = [
    WindowCase(
        "tumbling: a window has its start and not its end",
        tumbling(10, retention=100),
        of(K, 0, 9, 10, 19, 20),
        rows(K, (0, 10, 2, 9), (10, 20, 2, 19), (20, 30, 1, 20)),
    ),
    WindowCase(
        "hopping: a record counts in every window around it",
        hopping(12, 5, retention=100),
        of(K, 21),
        rows(K, (10, 22, 1, 21), (15, 27, 1, 21), (20, 32, 1, 21)),
    ),
    WindowCase(
        "hopping: with an advance close to the size some records have one window",
        hopping(6, 5, retention=100),
        of(K, 7, 10),
        rows(K, (5, 11, 2, 10), (10, 16, 1, 10)),
    ),
    WindowCase(
        "hopping: no window starts before the epoch",
        hopping(10, 5, retention=100),
        of(K, 3, 6),
        rows(K, (0, 10, 2, 6), (5, 15, 1, 6)),
    ),
    WindowCase(
        "a result has the largest timestamp of its records",
        tumbling(10, grace=20, retention=100),
        of(K, 8, 3, 12, 5),
        rows(K, (0, 10, 3, 8), (10, 20, 1, 12)),
    ),
    WindowCase(
        "keys are counted apart",
        tumbling(10, retention=100),
        (*of(A, 1), *of(B, 2), *of(A, 3), *of(C, 4), *of(B, 11)),
        (*rows(A, (0, 10, 2, 3)), *rows(B, (0, 10, 1, 2), (10, 20, 1, 11)), *rows(C, (0, 10, 1, 4))),
    ),
    WindowCase(
        "grace: a window takes records until its end is grace ago",
        tumbling(10, grace=5, retention=100),
        (*of(X, 14), *of(K, 9)),
        (*rows(K, (0, 10, 1, 9)), *rows(X, (10, 20, 1, 14))),
    ),
    WindowCase(
        "grace: a window that ended exactly grace ago takes nothing",
        tumbling(10, grace=5, retention=100),
        (*of(X, 15), *of(K, 9)),
        rows(X, (10, 20, 1, 15)),
        dropped=1,
    ),
    WindowCase(
        "grace: none by default",
        tumbling(10, retention=100),
        of(K, 5, 10, 9),
        rows(K, (0, 10, 1, 5), (10, 20, 1, 10)),
        dropped=1,
    ),
    WindowCase(
        "late: every record of windows that closed is left out",
        tumbling(10, grace=90),
        of(K, 200, 100, 101, 102, 103, 104, 105, 6),
        rows(K, (200, 210, 1, 200)),
        dropped=7,
    ),
    WindowCase(
        "late: a record of hopping windows counts in those that are open",
        hopping(10, 5, grace=90, retention=200),
        of(K, 100, 0, 1, 2, 3, 4, 5, 6, 105, 106),
        rows(K, (5, 15, 2, 6), (95, 105, 1, 100), (100, 110, 3, 106), (105, 115, 2, 106)),
        dropped=7,
        late=5,
        difference="What is counted as late",
        ours=rows(K, (5, 15, 2, 6), (95, 105, 1, 100), (100, 110, 3, 106), (105, 115, 2, 106)),
    ),
    WindowCase(
        "late: stream time is that of all keys",
        tumbling(10, retention=1000),
        (*of(A, 5), *of(B, 500), *of(A, 6, 501)),
        (*rows(A, (0, 10, 1, 5), (500, 510, 1, 501)), *rows(B, (500, 510, 1, 500))),
        dropped=1,
    ),
    WindowCase(
        "retention: what can still change is kept, and no more",
        tumbling(2, grace=1),
        of(K, 0, 1, 2, 1, 0, 5, 0),
        rows(K, (2, 4, 1, 2), (4, 6, 1, 5)),
        dropped=1,
    ),
    WindowCase(
        "retention: a window a retention behind the newest start is not read",
        tumbling(10, retention=30),
        of(K, 0, 10, 20, 31),
        rows(K, (10, 20, 1, 10), (20, 30, 1, 20), (30, 40, 1, 31)),
    ),
    WindowCase(
        "retention: where none is said a table keeps what can still change",
        tg.Tumbling("10ms"),
        of(K, 0, 10, 20),
        rows(K, (20, 30, 1, 20)),
        difference="how long a table is read where no retention is said",
        ours=rows(K, (0, 10, 1, 0), (10, 20, 1, 10), (20, 30, 1, 20)),
        differs_on=(APP,),
    ),
    WindowCase(
        "a record without a key is left out and moves no clock",
        tumbling(10, retention=100),
        (*of(K, 5), Event(None, 90), *of(K, 6)),
        rows(K, (0, 10, 2, 6)),
        skipped=1,
        difference="stream time in an app",
        ours=rows(K, (0, 10, 1, 5)),
        ours_dropped=1,
        differs_on=(APP,),
    ),
    WindowCase(
        "a record far ahead of the wall clock counts and moves stream time",
        tumbling(10, retention=5 * 10**12),
        (*of(K, 5), *of(X, 4 * 10**12), *of(K, 6)),
        (*rows(K, (0, 10, 1, 5)), *rows(X, (4 * 10**12, 4 * 10**12 + 10, 1, 4 * 10**12))),
        dropped=1,
        difference="records from the future",
        ours=rows(K, (0, 10, 2, 6)),
        ours_dropped=0,
        differs_on=(APP,),
    ),
    WindowCase(
        "a record without a value counts",
        tumbling(10, retention=100),
        (*of(K, 5), Event(K, 6, None)),
        rows(K, (0, 10, 2, 6)),
    ),
    WindowCase(
        "a restart keeps windows",
        tumbling(10, grace=10, retention=100),
        (*of(K, 5, 12), AGAIN, *of(K, 7, 13)),
        rows(K, (0, 10, 2, 7), (10, 20, 2, 13)),
    ),
    WindowCase(
        "after a restart a record is taken that was late before",
        tumbling(10, grace=5, retention=1000),
        (*of(A, 500), AGAIN, *of(B, 3)),
        (*rows(A, (500, 510, 1, 500)), *rows(B, (0, 10, 1, 3))),
        difference="clocks after a restart",
        ours=rows(A, (500, 510, 1, 500)),
        ours_dropped=1,
    ),
    WindowCase(
        "unlimited: one window from its start on",
        tg.Unlimited(100),
        of(K, 50, 100, 900, 101),
        rows(K, (100, 2**63 - 1, 3, 900)),
        left_out=FOREVER,
    ),
    WindowCase(
        "close: a window is sent once, when it is final",
        tumbling(2, grace=1),
        of(K, 0, 1, 2, 1, 0, 5, 0),
        rows(K, (0, 2, 4, 1), (2, 4, 1, 2)),
        dropped=1,
        emit="close",
        left_out=SENDS_NOTHING,
    ),
    WindowCase(
        "close: hopping windows are sent one by one as they end",
        hopping(10, 5, grace=90),
        of(K, 100, 0, 1, 2, 3, 4, 5, 6, 105, 106),
        rows(K, (5, 15, 2, 6)),
        dropped=7,
        late=5,
        emit="close",
        left_out=SENDS_NOTHING,
    ),
    WindowCase(
        "close: windows that a leap of stream time pushes out are not sent",
        tumbling(10),
        of(K, 10, 25, 10**6),
        rows(K, (10, 20, 1, 10)),
        emit="close",
        difference="emitting on close when stream time leaps",
        ours=rows(K, (10, 20, 1, 10), (20, 30, 1, 25)),
        left_out=SENDS_NOTHING,
    ),
]

SESSION_WINDOWS = [
    WindowCase(
        "session: records within the gap are one session",
        sessions(GAP, retention=3 * GAP),
        of(K, 0, 500),
        rows(K, (0, 500, 2, 500)),
    ),
    WindowCase(
        "session: records exactly a gap apart are one session",
        sessions(10, retention=100),
        of(K, 0, 10),
        rows(K, (0, 10, 2, 10)),
    ),
    WindowCase(
        "session: records more than a gap apart are two",
        sessions(10, retention=100),
        of(K, 0, 11),
        rows(K, (0, 0, 1, 0), (11, 11, 1, 11)),
    ),
    WindowCase(
        "session: a record between two sessions makes them one",
        sessions(GAP, grace=GAP, retention=3 * GAP),
        of(K, 0, GAP + 1, GAP // 2),
        rows(K, (0, GAP + 1, 3, GAP + 1)),
    ),
    WindowCase(
        "session: records of one time are one session",
        sessions(GAP, retention=3 * GAP),
        of(K, 7, 7, 7),
        rows(K, (7, 7, 3, 7)),
    ),
    WindowCase(
        "session: every burst is a session",
        sessions(GAP, retention=3 * GAP),
        of(K, 0, *[GAP + 1] * 2, *[2 * GAP + 2] * 3),
        rows(K, (0, 0, 1, 0), *((at, at, n, at) for at, n in ((GAP + 1, 2), (2 * GAP + 2, 3)))),
    ),
    WindowCase(
        "session: sessions of several keys grow apart",
        sessions(GAP, retention=3 * GAP),
        (
            *(Event(key, 0) for key in (A, B, C, D)),
            *of(D, GAP // 2),
            *(Event(key, GAP + 1) for key in (A, B)),
            *(Event(key, GAP + 1 + GAP // 2) for key in (A, C)),
        ),
        (
            *rows(A, (0, 0, 1, 0), (GAP + 1, GAP + 1 + GAP // 2, 2, GAP + 1 + GAP // 2)),
            *rows(B, (0, 0, 1, 0), (GAP + 1, GAP + 1, 1, GAP + 1)),
            *rows(C, (0, 0, 1, 0), (GAP + 1 + GAP // 2, GAP + 1 + GAP // 2, 1, GAP + 1 + GAP // 2)),
            *rows(D, (0, GAP // 2, 2, GAP // 2)),
        ),
    ),
    WindowCase(
        "session: an earlier record extends a session to the front",
        sessions(10, grace=20, retention=100),
        of(K, 20, 12, 5),
        rows(K, (5, 20, 3, 20)),
    ),
    WindowCase(
        "session: a record inside an open session counts, however late it is",
        sessions(10, retention=1000),
        of(K, *range(0, 101, 10), 35),
        rows(K, (0, 100, 12, 100)),
    ),
    WindowCase(
        "session grace: a record whose session would have closed is late",
        sessions(10, retention=100),
        (*of(X, 11), *of(K, 0)),
        rows(X, (11, 11, 1, 11)),
        dropped=1,
    ),
    WindowCase(
        "session grace: a record whose session ends where sessions close is taken",
        sessions(10, grace=1, retention=100),
        (*of(X, 11), *of(K, 0)),
        (*rows(K, (0, 0, 1, 0)), *rows(X, (11, 11, 1, 11))),
    ),
    WindowCase(
        "session grace: a millisecond later it is late",
        sessions(10, grace=1, retention=100),
        (*of(X, 12), *of(K, 0)),
        rows(X, (12, 12, 1, 12)),
        dropped=1,
    ),
    WindowCase(
        "session: a record without a key is left out and moves no clock",
        sessions(10, retention=100),
        (*of(K, 5), Event(None, 90), *of(K, 6)),
        rows(K, (5, 6, 2, 6)),
        skipped=1,
        difference="stream time in an app",
        ours=rows(K, (5, 5, 1, 5)),
        ours_dropped=1,
        differs_on=(APP,),
    ),
    WindowCase(
        "session: a record without a value counts",
        sessions(10, retention=100),
        (*of(K, 5), Event(K, 6, None)),
        rows(K, (5, 6, 2, 6)),
    ),
    WindowCase(
        "session: a restart keeps sessions",
        sessions(10, grace=5, retention=100),
        (*of(K, 5), AGAIN, *of(K, 9)),
        rows(K, (5, 9, 2, 9)),
    ),
    WindowCase(
        "session: after a restart a record is taken that was late before",
        sessions(10, grace=5, retention=1000),
        (*of(A, 500), AGAIN, *of(B, 3)),
        (*rows(A, (500, 500, 1, 500)), *rows(B, (3, 3, 1, 3))),
        difference="clocks after a restart",
        ours=rows(A, (500, 500, 1, 500)),
        ours_dropped=1,
    ),
    WindowCase(
        "session: a final session is joined while the store keeps it",
        sessions(10, retention=1000),
        (*of(K, 20), *of(X, 31), *of(K, 22)),
        (*rows(K, (20, 22, 2, 22)), *rows(X, (31, 31, 1, 31))),
        difference="a session that is final",
        ours=(*rows(K, (20, 20, 1, 20)), *rows(X, (31, 31, 1, 31))),
        ours_dropped=1,
    ),
    WindowCase(
        "session: beside a final session that was dropped another one begins",
        sessions(10, retention=11),
        (*of(K, 20), *of(X, 31), *of(K, 22)),
        (*rows(K, (22, 22, 1, 22)), *rows(X, (31, 31, 1, 31))),
        difference="a record near a final session that the store has dropped",
        ours=rows(X, (31, 31, 1, 31)),
        ours_dropped=1,
    ),
    WindowCase(
        "session: a late record right before a long session makes it begin earlier",
        sessions(10, retention=1000),
        of(K, *range(20, 101, 10), 15),
        rows(K, (15, 100, 10, 100)),
        difference="a late record right before a long open session",
        ours=rows(K, (20, 100, 9, 100)),
        ours_dropped=1,
    ),
    WindowCase(
        "session: with the least retention a session that ends where sessions close begins anew",
        sessions(10),
        (*of(K, 21), *of(X, 31), *of(K, 22)),
        (*rows(K, (22, 22, 1, 22)), *rows(X, (31, 31, 1, 31))),
        difference="a session that ends exactly where sessions close, with the least retention",
        ours=(*rows(K, (21, 22, 2, 22)), *rows(X, (31, 31, 1, 31))),
    ),
    WindowCase(
        "session close: a session is sent once, when it is final",
        sessions(10, grace=5),
        of(K, 0, 5, 21, 22, 60),
        rows(K, (0, 5, 2, 5), (21, 22, 2, 22)),
        emit="close",
        left_out=SENDS_NOTHING,
    ),
]

SLIDING_WINDOWS = [
    WindowCase(
        "sliding: every different set of records within the difference is a window",
        sliding(10, grace=5),
        of(K, 10, 10, 14, 15, 20, 22, 30),
        rows(
            K,
            (0, 10, 2, 10),
            (4, 14, 3, 14),
            (5, 15, 4, 15),
            (10, 20, 5, 20),
            (11, 21, 3, 20),
            (12, 22, 4, 22),
            (15, 25, 3, 22),
            (16, 26, 2, 22),
            (20, 30, 3, 30),
            (21, 31, 2, 30),
            (23, 33, 1, 30),
        ),
        left_out=NOT_BY_STORE,
    ),
    WindowCase(
        "sliding: records exactly the difference apart share a window",
        sliding(10),
        of(K, 20, 30),
        rows(K, (10, 20, 1, 20), (20, 30, 2, 30), (21, 31, 1, 30)),
        left_out=NOT_BY_STORE,
    ),
    WindowCase(
        "sliding: records further apart share none",
        sliding(10),
        of(K, 20, 31),
        rows(K, (10, 20, 1, 20), (21, 31, 1, 31)),
        left_out=NOT_BY_STORE,
    ),
    WindowCase(
        "sliding: records of one time have one window",
        sliding(10),
        of(K, 20, 20, 20),
        rows(K, (10, 20, 3, 20)),
        left_out=NOT_BY_STORE,
    ),
    WindowCase(
        "sliding: records close to the epoch share the window that starts there",
        sliding(50, grace=100),
        of(K, 0, 5, 6),
        rows(K, (0, 50, 3, 6), (1, 51, 2, 6), (6, 56, 1, 6)),
        left_out=NOT_BY_STORE,
    ),
    WindowCase(
        "sliding: a record out of order adds windows before and after it",
        sliding(10, grace=100),
        of(K, 20, 30, 25),
        rows(K, (10, 20, 1, 20), (15, 25, 2, 25), (20, 30, 3, 30), (21, 31, 2, 30), (26, 36, 1, 30)),
        left_out=NOT_BY_STORE,
    ),
    WindowCase(
        "sliding grace: a record that ended its last window grace ago is late",
        sliding(10, grace=5),
        (*of(X, 100), *of(K, 84)),
        rows(X, (90, 100, 1, 100)),
        dropped=1,
        left_out=NOT_BY_STORE,
    ),
    WindowCase(
        "sliding: a record is forgotten when all windows that hold it are closed",
        sliding(10),
        (*of(X, 110), *of(K, 105, 112)),
        (*rows(K, (102, 112, 1, 112)), *rows(X, (100, 110, 1, 110))),
        dropped=1,
        late=0,
        difference="sliding windows of records out of order",
        ours=(*rows(K, (102, 112, 2, 112), (106, 116, 1, 112)), *rows(X, (100, 110, 1, 110))),
        ours_dropped=0,
        left_out=NOT_BY_STORE,
    ),
    WindowCase(
        "sliding: a record without a value is left out",
        sliding(10),
        (*of(K, 20), Event(K, 25, None)),
        rows(K, (10, 20, 1, 20)),
        skipped=1,
        difference="a record without a value in sliding windows",
        ours=rows(K, (10, 20, 1, 20), (15, 25, 2, 25), (21, 31, 1, 25)),
        ours_skipped=0,
        left_out=NOT_BY_STORE,
    ),
    WindowCase(
        "sliding close: a window is sent once, when it is final",
        sliding(10, grace=5),
        of(K, 10, 10, 14, 15, 20, 22, 30),
        rows(
            K,
            (0, 10, 2, 10),
            (4, 14, 3, 14),
            (5, 15, 4, 15),
            (10, 20, 5, 20),
            (11, 21, 3, 20),
            (12, 22, 4, 22),
        ),
        emit="close",
        left_out=NOT_BY_STORE,
    ),
]

WINDOW_CASES = [*TIME_WINDOWS, *SESSION_WINDOWS, *SLIDING_WINDOWS]
