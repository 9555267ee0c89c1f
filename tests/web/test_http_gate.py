"""Who may ask and how much: the promises of the HTTP side, against the real server."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
import uvicorn
from raw_sockets import raw
from served_shop import HOSTILE, serving

from tidegate.clock import ManualClock
from tidegate.errors import InvalidError
from tidegate.web.endpoints import ADDRESSED, STREAMS
from tidegate.web.security import Sessions
from tidegate.web.server import Server, uvicorn_config
from tidegate.web.settings import Limits, Settings, folders_of, read_token

TOKEN = "a-token-of-enough-characters"
_WORDS = {"topic": "orders", "partition": "0", "offset": "5", "table": "shop:per-minute", "app": "shop"}
ROUTES = ["/", *(f"/api{each.path.format(**_WORDS)}" for each in ADDRESSED)]
ROUTES += [each.page.format(**_WORDS) for each in ADDRESSED if each.page and each.page != "/"]
ROUTES += ["/api/openapi.json", "/metrics", "/static/page.js"]


@pytest.fixture(scope="module")
def guarded(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("token")
    token = folder / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    with serving(data, "--token-file", str(token), log=folder / "server.log") as found:
        yield found, folder / "server.log"


# -- who may ask --------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "tides.example.com"])
def test_R39_a_host_that_others_reach_needs_a_token(host: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="--token-file"):
        Settings(tmp_path, tmp_path, host)
    assert Settings(tmp_path, tmp_path, host, token=TOKEN).token == TOKEN


def test_R39_a_short_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="16"):
        Settings(tmp_path, tmp_path, token="short")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o777])
def test_R41_a_token_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    with pytest.raises(InvalidError, match="chmod 600"):
        read_token(path)
    path.chmod(0o600)
    assert read_token(path) == TOKEN


def test_R41_a_token_is_not_in_the_settings_words(tmp_path: Path) -> None:
    assert TOKEN not in repr(Settings(tmp_path, tmp_path, token=TOKEN))


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"])
@pytest.mark.parametrize("who", ["none", "bad", "expired", "good"])
def test_R39_every_address_asks_for_the_token(
    guarded: tuple[str, Path], method: str, who: str, tally: Any
) -> None:
    headers = {
        "bad": {"authorization": f"Bearer {TOKEN}x"},
        "good": {"authorization": f"Bearer {TOKEN}"},
    }.get(who, {})
    cookies = {"tidegate_session": "long-gone"} if who == "expired" else {}
    with httpx.Client(base_url=guarded[0], headers=headers, cookies=cookies, timeout=300) as client:
        for route in ROUTES:
            if who == "good" and method in ("GET", "HEAD") and "explain" in route and "api" not in route:
                continue
            found = client.request(method, route)
            if method not in ("GET", "HEAD"):
                assert found.status_code == 405, (method, route)
            elif who == "good":
                assert found.status_code in (200, 400), (
                    route,
                    found.text,
                )  # 400: fetch and diff need parameters
            else:
                assert found.status_code == 401, (route, who)
                assert found.headers["www-authenticate"] == "Bearer"
            assert "access-control-allow-origin" not in found.headers
            assert found.headers["x-content-type-options"] == "nosniff"
            assert "script-src 'self'" in found.headers["content-security-policy"]
            assert "unsafe-inline" not in found.headers["content-security-policy"]
    tally(len(ROUTES), routes=len(ROUTES))


def test_R39_a_person_logs_in_by_a_form_and_the_token_is_in_no_url(guarded: tuple[str, Path]) -> None:
    with httpx.Client(base_url=guarded[0], headers={"accept": "text/html"}, follow_redirects=False) as client:
        first = client.get("/")
        assert (first.status_code, first.headers["location"]) == (303, "/login")
        assert client.post("/login", data={"token": "wrong" * 5}).status_code == 401
        assert client.get(f"/?token={TOKEN}").status_code == 303  # a token in a URL is no token
        answer = client.post("/login", data={"token": TOKEN})
        assert answer.status_code == 303
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie and TOKEN not in cookie
        assert client.get("/").status_code == 200
        assert client.post("/logout").status_code == 303
        assert client.get("/").status_code == 303


def test_R39_a_session_ends_by_itself(tmp_path: Path) -> None:
    clock, limits = ManualClock(), Limits(session_seconds=60, sessions=2)
    sessions = Sessions(Settings(tmp_path, tmp_path, token=TOKEN, limits=limits), clock=clock)
    assert sessions.login(TOKEN + "x") is None
    names = [sessions.login(TOKEN) for _ in range(3)]
    assert all(names) and not sessions.is_open(names[0] or "")  # of two that may be, the oldest is gone
    clock.advance(59_999)
    assert sessions.is_open(names[2] or "")
    clock.advance(1)
    assert not sessions.is_open(names[2] or "")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "[::1",
        "localhost:99999x",
        "",
        "a@localhost",
    ],
)
def test_R39_another_name_is_not_answered(address: str, host: str) -> None:
    found = httpx.get(f"{address}/api/topics", headers={"host": host}, timeout=300)
    assert found.status_code in (400, 421)


def test_R39_loopback_names_are_answered(address: str) -> None:
    port = address.rpartition(":")[2]
    for host in (f"localhost:{port}", "127.0.0.1", f"LOCALHOST:{port}", "[::1]", f"[::1]:{port}"):
        assert httpx.get(f"{address}/health", headers={"host": host}).status_code == 200, host


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost.evil.example", "file://", "ftp://localhost"]
)
def test_R39_another_sites_scripts_are_refused(client: httpx.Client, origin: str) -> None:
    assert client.get("/api/topics", headers={"origin": origin}).status_code == 403


def test_R39_the_pages_own_origin_is_fine(client: httpx.Client, address: str) -> None:
    assert client.get("/api/topics", headers={"origin": address}).status_code == 200


# -- limits at their edges ---------------------------------------------------------------------


def test_R38_a_url_at_its_limit(client: httpx.Client) -> None:
    limit = Limits().url_bytes
    for size, wanted in ((limit - 1, 200), (limit, 200), (limit + 1, 414)):
        path = "/health?" + "a" * (size - len("/health?"))
        assert client.get(path).status_code == wanted, size


def test_R38_headers_at_their_limit(address: str) -> None:
    limit, port = Limits().header_bytes, int(address.rpartition(":")[2])
    base = {"host": f"localhost:{port}", "x-more": ""}
    used = sum(len(name) + len(value) for name, value in base.items())
    for size, wanted in ((limit - 1, b"200"), (limit, b"200"), (limit + 1, b"431")):
        lines = f"GET /health HTTP/1.1\r\nhost: {base['host']}\r\nx-more: {'a' * (size - used)}\r\n\r\n"
        assert raw(port, lines.encode()).split()[1] == wanted, size


@pytest.mark.parametrize("chunked", [False, True])
def test_R38_a_body_at_its_limit(guarded: tuple[str, Path], chunked: bool) -> None:
    limit = Limits().body_bytes
    for size, wanted in ((limit - 1, 401), (limit, 401), (limit + 1, 413)):
        body = b"token=" + b"a" * (size - 6)
        content = iter([body]) if chunked else body
        found = httpx.post(f"{guarded[0]}/login", content=content, timeout=300)
        assert found.status_code == wanted, size


def test_R38_a_page_of_rows_at_its_limit(client: httpx.Client) -> None:
    limit = Limits().page_rows
    for size, wanted in ((limit - 1, 200), (limit, 200), (limit + 1, 400)):
        found = client.get("/api/topics/orders/records", params={"limit": size})
        assert found.status_code == wanted
        if wanted == 200:
            assert len(found.json()["records"]) == size
    exported = client.get("/api/topics/orders/export", params={"limit": limit})
    assert exported.content.count(b"\n") == limit
    assert exported.headers["tidegate-next"]


def test_R38_a_page_of_bytes_ends_at_its_limit(data: Path) -> None:
    from tidegate.web.records import RecordsQuestion, Search
    from tidegate.web.site import Site

    site = Site(data / "log", data / "state", Limits(page_bytes=100_000))
    search = Search(site, "orders", RecordsQuestion(order="oldest", limit=10_000, value="o-"))
    rows = sum(table.num_rows for table in search.run())
    assert 0 < rows < 10_000 and not search.is_complete
    site.close()


def test_R38_a_scan_ends_at_its_budget_says_so_and_goes_on(data: Path) -> None:
    from tidegate.web.records import RecordsQuestion, records
    from tidegate.web.site import Site

    site = Site(data / "log", data / "state", Limits(scan_records=30_000))
    question = RecordsQuestion(value="o-99999", order="oldest")
    found, pages = records(site, "orders", question), 1
    while found.next and not found.records:
        assert found.looked_at >= 30_000 and "go on" in found.sentence
        found = records(site, "orders", RecordsQuestion(value="o-99999", order="oldest", after=found.next))
        pages += 1
    assert pages > 1 and len(found.records) == 1
    site.close()


@contextmanager
def served_here(data: Path, **limits: Any) -> Iterator[tuple[uvicorn.Server, int]]:
    """The server in a thread, with limits of its own, so that an edge is met quickly; and its port."""
    log, state = folders_of(data)
    server = uvicorn.Server(uvicorn_config(Server(Settings(log, state, port=0, limits=Limits(**limits)))))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        until(lambda: server.started)
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(300)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


ASKED = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def test_R38_a_connection_beyond_the_limit_is_refused(data: Path) -> None:
    limits = {"connections": 4, "header_seconds": 120, "fresh_seconds": 1000}
    with served_here(data, **limits) as (server, port), ExitStack() as held:
        opened = server.server_state.connections
        *_, last = [held.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(4)]
        until(lambda: len(opened) == 4)
        assert b" 503 " in raw(port, ASKED)  # the fifth
        last.close()
        until(lambda: len(opened) == 3)
        assert b" 200 " in raw(port, ASKED)


LONG = b"GET /static/uplot/uPlot.iife.min.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HT",
        b"POST /login HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nab",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
        LONG,
    ],
    ids=["silent", "head", "body", "kept alive", "unread"],
)
def test_R38_a_new_connection_takes_the_place_of_one_that_hangs(data: Path, sent: bytes) -> None:
    """P1: with every place taken by clients that hang, whatever they hang over, all others are answered."""
    limits = {"connections": 4, "header_seconds": 120, "fresh_seconds": 0}
    with served_here(data, **limits) as (server, port), ExitStack() as held:
        opened = server.server_state.connections
        for _ in range(4):
            hanging = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300))
            hanging.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            hanging.sendall(sent)
            if sent.startswith(b"GET") and b"\r\n\r\n" in sent:
                assert hanging.recv(1) == b"H"
            if sent == LONG:
                until(lambda: all(each.flow.write_paused for each in opened))
        for _ in range(20):
            assert b" 200 " in raw(port, ASKED)


def test_R38_who_is_being_answered_keeps_its_place(data: Path) -> None:
    """P1: a client that waits for us is not idle, however long it takes."""
    limits = {"connections": 4, "fresh_seconds": 0}
    with served_here(data, **limits) as (server, port), ExitStack() as held:
        opened = server.server_state.connections
        path = "/api/topics/orders/integrity?again=true&wait_ms=4000"
        asked = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
        waiting = [
            held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300)) for _ in range(2)
        ]
        for each in waiting:
            each.sendall(asked)
        until(lambda: sum(each.cycle is not None for each in opened) == 2)
        for _ in range(20):
            assert b" 200 " in raw(port, ASKED)
        for each in waiting:
            assert each.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_R38_an_answer_that_nobody_reads_ends_with_its_time(data: Path) -> None:
    with served_here(data, request_seconds=0.5) as (server, port), ExitStack() as held:
        unread = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300))
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.sendall(LONG)
        until(lambda: any(each.flow.write_paused for each in server.server_state.connections))
        until(lambda: not server.server_state.connections)


TWO_LENGTHS = [
    b"POST /login HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /login HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\nContent-Length: 5\r\nTRANSFER-ENCODING: Chunked\r\n\r\n0\r\n\r\n",
    b"POST /login HTTP/1.0\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /login HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
    b"POST /login HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: identity\r\ncontent-length: 3\r\n\r\nabc",
    b"POST /login HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("sent", TWO_LENGTHS, ids=range(len(TWO_LENGTHS)))
def test_R39_a_body_of_two_lengths_is_refused_with_all_that_follows_it(address: str, sent: bytes) -> None:
    """What one server takes for the body, another takes for the next request: neither is answered."""
    smuggled = b"GET /api/topics HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=300) as connection:
        connection.sendall(sent + smuggled)
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionError:  # it is closed with bytes that nobody read
            pass
    assert answer.split()[1] in (b"400", b"501"), answer[:300]
    assert answer.count(b"HTTP/1.1 ") == 1 and b"partitions" not in answer


def test_R38_who_takes_too_long_over_a_head_is_closed(data: Path) -> None:
    """Whether it sends nothing, or a byte now and then. Nothing else would close it: its first answer is to come."""
    with served_here(data, header_seconds=0.3) as (_, port), ExitStack() as held:
        for _ in range(3):
            silent = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300))
            assert silent.recv(10) == b""
        drip = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300))
        was_closed = False
        for byte in b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 500:
            try:
                drip.sendall(bytes([byte]))
                time.sleep(0.02)
            except OSError:
                was_closed = True
                break
        assert was_closed


# -- names -------------------------------------------------------------------------------------

TRICKS = [
    "..", "../..", "..%2f..%2fetc%2fpasswd", "%2e%2e", "....//", "/etc/passwd", "orders/../../etc", "orders%00",
    "a" * 250,
    "~root", "C:%5Cwindows", "orders%0A", ".", "con", "%252e%252e", "orders;ls", "${jndi:x}",
]  # fmt: skip


def test_R35_no_name_leads_out_of_the_folder(address: str, tally: Any) -> None:
    """Whatever the name and wherever it stands: refused or not there, and never a file of the machine."""
    port, cases = int(address.rpartition(":")[2]), 0
    asks = {"fetch": "?key=k", "explain": "?key=k&start=0", "diff": "?before=1&after=2"}
    places = [f"/api{each.path}" for each in (*ADDRESSED, *STREAMS)] + [
        each.page for each in ADDRESSED if each.page
    ]
    paths = [
        f"{place.format(**{**_WORDS, word: trick})}{asks.get(place.rpartition('/')[2], '')}"
        for place in places
        for word in _WORDS
        if f"{{{word}}}" in place
        for trick in TRICKS
    ]
    paths += [
        f"/static/{trick}"
        for trick in ("../settings.py", "..%2fsettings.py", "%2e%2e/server.py", "//etc/passwd")
    ]
    for path in paths:
        sent = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        answer = raw(port, sent.encode())
        assert answer.split()[1] in (b"307", b"400", b"404"), (path, answer[:300])
        assert b"root:" not in answer
        cases += 1
    tally(cases)


def test_R35_tables_of_an_app_are_only_its_own(client: httpx.Client) -> None:
    for name in ("shop:../strict", "shop:", ":per-minute", "shop:per-minute:x", "apps", "tables"):
        assert client.get(f"/api/tables/{name}").status_code in (400, 404), name


# -- nothing secret in what is left behind ------------------------------------------------------


def test_R41_tokens_and_values_are_in_no_log(guarded: tuple[str, Path], data: Path) -> None:
    canary = "canary-2f6a91"
    with httpx.Client(
        base_url=guarded[0], headers={"authorization": f"Bearer {TOKEN}"}, timeout=60
    ) as client:
        for path in (
            f"/api/topics/orders/records?key={canary}", f"/api/tables/shop:per-minute/fetch?key={canary}",
            f"/api/topics/{canary}",
            f"/api/{canary}", f"/api/topics/orders/records?limit={canary}", f"/api/topics/orders/records?at={canary}",
        ):  # fmt: skip
            client.get(path, headers={"cookie": f"tidegate_session={canary}", "x-secret": canary})
        client.post("/login", data={"token": canary})
    log = guarded[1].read_bytes()
    assert canary.encode() not in log and TOKEN.encode() not in log
    for process in Path("/proc").glob("[0-9]*/cmdline"):  # nor on any command line
        try:
            assert TOKEN.encode() not in process.read_bytes()
        except OSError:
            continue


_MARKUP = (
    "<script>x()</script>", "<img src=x onerror=x()>", "<svg/onload=x()>", "<iframe src=//x>", "</td></table><h1>x",
    "<a href=javascript:x()>x</a>", "<style>*{{display:none}}</style>", "<!--", "<body onload=x()>",
    "<b>{{{{7*7}}}}</b>",
)  # fmt: skip
_AROUND = ("{}", '">{}', "'>{}", "&quot;>{}", "]]>{}", "--{}", "\u2028{}", "{}\x00", "%3C{}", "\\x3c{}")
_TERMINAL = (
    "\x1b[{}m",
    "\x1b]0;{}\x07",
    "\x9b{}m",
    "\x1b[{}J",
    "\r\x1b[{}A",
    "\x08{}\x7f",
    "\u202e{}",
    "\x1bP{}\x1b\\",
)
HOSTILE_200 = [around.format(each) for each in _MARKUP for around in _AROUND] + [
    each.format(number) for each in _TERMINAL for number in range(13)
]


def test_R39_two_hundred_strings_stay_text_wherever_they_stand(tmp_path: Path, tally: Any) -> None:
    """As key, value and header: in the list, on a record's own page, and as a search that is filled in again."""
    import msgspec

    import tidegate as tg
    from tidegate.web import pages
    from tidegate.web.endpoints import ENDPOINTS
    from tidegate.web.site import Site

    assert len(set(HOSTILE_200)) >= 200
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("hostile", 1)
        headers = pa.array(
            [[(each, each.encode())] for each in HOSTILE_200], pa.map_(pa.string(), pa.binary())
        )
        log.writer("hostile").write(pa.table({"key": HOSTILE_200, "value": HOSTILE_200, "headers": headers}))
    site = Site(tmp_path / "log", tmp_path / "state")
    around = {"path": "/topics/hostile/records", "nav": "records", "api": None, "can_leave": False}
    shown = 0
    for offset, text in enumerate(HOSTILE_200):
        for name, words, ask, screen in (
            ("record", {"topic": "hostile", "partition": "0", "offset": str(offset)}, {}, "record.html"),
            (
                "records",
                {"topic": "hostile"},
                {"offset": str(offset), "limit": "1", "key": text},
                "records.html",
            ),
        ):
            found = msgspec.json.encode(ENDPOINTS[name].ask(site, words, ask))
            page = pages.document_page(screen, found, ask=ask, **around).decode()
            body = page[page.index("<main") : page.index("</main>")]
            assert all(each not in body for each in _MARKUP), text
            said = re.sub(
                r'value="[^"]*"', "", body
            )  # a form keeps what was typed, so that it can be sent again
            assert text not in said, text
            assert not any(ord(each) < 32 and each not in "\n" for each in said), text
            assert not set(said) & set("\x7f\x9b\u202e\u2028"), text
            shown += 1
    site.close()
    tally(shown, strings=len(HOSTILE_200))


def test_hostile_records_are_shown_as_text(client: httpx.Client) -> None:
    page = client.get("/topics/hostile/records", params={"limit": 100}, headers={"accept": "text/html"}).text
    assert (
        "<script>document" not in page
        and "<img src=x" not in page
        and "onload=alert(1)>" not in page.replace("&gt;", "")
    )
    assert "\x1b" not in page and "\x07" not in page and "\u202e" not in page
    assert "&lt;script&gt;" in page and "\\x1b[31m" in page
    assert len(page) < 200_000  # the line of a megabyte is cut, and says so
    assert "cut," in page
    found = client.get("/api/topics/hostile/records", params={"limit": 100}).json()["records"]
    shown = {row["offset"]: row["value"] for row in found}
    assert shown[len(HOSTILE)]["kind"] == "bytes" and shown[len(HOSTILE)]["text"] == "ff fe 80"
    assert shown[len(HOSTILE) + 1]["kind"] == "null"
    assert all(
        character.isprintable() or character in "\n\t" for row in found for character in row["value"]["text"]
    )


def test_a_failed_page_is_a_plain_page_and_never_a_traceback(client: httpx.Client) -> None:
    for path in (
        "/topics/none",
        "/tables/none",
        "/apps/none",
        "/nowhere",
        "/topics/orders/records/0/99999999",
        "/topics/orders?partition=x",
    ):
        found = client.get(path, headers={"accept": "text/html"})
        assert found.status_code in (400, 404)
        assert found.headers["content-type"].startswith("text/html")
        assert "What to do" in found.text and "Traceback" not in found.text
        found = client.get(f"/api{path}")
        assert found.status_code in (400, 404)
        assert set(found.json()) == {"error", "message", "remedy"}


def test_wrong_starts_are_refused_with_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="no folder"):
        folders_of(tmp_path / "none")
    assert folders_of(tmp_path) == (tmp_path, tmp_path / "state")
    assert os.getuid() >= 0
