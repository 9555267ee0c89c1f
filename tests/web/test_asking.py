"""The process that reads is started, ended and replaced without anyone noticing more than a wait."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import uvicorn

from tidegate.clock import ManualClock
from tidegate.errors import OverloadError
from tidegate.web.failures import ReadingEndedError, TooLongError, failure_of
from tidegate.web.integrity import Audits, _Audit
from tidegate.web.open_tables import page_of
from tidegate.web.server import Server, uvicorn_config
from tidegate.web.settings import Limits, Settings, folders_of
from tidegate.web.site import Budget, Site
from tidegate.web.site import answering as answering_in_site
from tidegate.web.worker import GIVE_UP, THREADS, Answer, Question, Worker, framed, read_frame
from tidegate.web.worker_client import ReaderProcess


def settings(data: Path, **limits: float) -> Settings:
    return Settings(data / "log", data / "state", limits=Limits(**limits))  # type: ignore[arg-type]


def reading(data: Path, **limits: float) -> ReaderProcess:
    return ReaderProcess(settings(data, **limits))


async def warmed(data: Path, request_seconds: float) -> ReaderProcess:
    """A process that has loaded what it needs, which may take longer, and then so long for each question."""
    asked = reading(data, request_seconds=300)
    await asked.warm()
    asked._settings = settings(data, request_seconds=request_seconds)
    return asked


def test_a_killed_process_is_replaced_by_the_next_question(data: Path) -> None:
    async def run() -> None:
        asked = reading(data)
        assert (await asked.ask("topics", {}, {})).status == 200
        first = asked.pid
        assert first is not None
        waiting = asyncio.create_task(asked.ask("integrity", {"topic": "orders"}, {"wait_ms": "20000"}))
        await asyncio.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        assert (await waiting).status == 200, "it only reads, so it was asked once more"
        assert asked.pid not in (None, first)
        await asked.close()
        assert asked.pid is None

    asyncio.run(run())


def test_a_question_that_takes_too_long_is_ended_with_its_process(data: Path) -> None:
    async def run() -> None:
        asked = reading(data, request_seconds=0.02)
        with pytest.raises(TooLongError, match="ask for less"):
            await asked.ask("topics", {}, {})
        assert asked.pid is None
        await asked.close()

    asyncio.run(run())


async def answering(asked: ReaderProcess) -> list[int]:
    """The children of the process that reads."""
    if asked.pid is None:
        return []
    return [int(pid) for pid in Path(f"/proc/{asked.pid}/task/{asked.pid}/children").read_text().split()]


async def rests(asked: ReaderProcess) -> None:
    for _ in range(200):
        if not await answering(asked):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("still there")


def memory_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_who_answers_is_let_go_when_nobody_asks_and_comes_back(data: Path) -> None:
    async def run() -> None:
        asked = reading(data, idle_seconds=1)
        await asked.ask("records", {"topic": "orders"}, {})
        loaded = asked.pid
        assert loaded is not None
        await rests(asked)
        for _ in range(200):  # while it gives back
            if memory_of(loaded) < 110 << 20:
                break
            await asyncio.sleep(0.05)
        assert memory_of(loaded) < 110 << 20, "with the server's 36 MiB it is under 150"
        assert (await asked.ask("topics", {}, {})).status == 200
        assert asked.pid == loaded and len(await answering(asked)) == 1
        await asked.close()

    asyncio.run(run())


def test_no_question_is_lost_between_two_that_answer(data: Path) -> None:
    """F1: asked just when the one before lets go."""

    async def run() -> None:
        asked = reading(data, idle_seconds=0.05, request_seconds=20)
        await asked.warm()
        seen = set()
        for number in range(40):
            await asyncio.sleep(0.02 + number * 0.002)
            assert (await asked.ask("topics", {}, {})).status == 200
            seen.update(await answering(asked))
        assert len(seen) > 2, "several answered in turn"
        await asked.close()

    asyncio.run(run())


def test_a_long_answer_is_no_rest(data: Path) -> None:
    async def run() -> None:
        asked = reading(data, idle_seconds=0.02)
        await asked.warm()
        ask = {"wait_ms": "20000", "again": "true"}
        assert (await asked.ask("integrity", {"topic": "orders"}, ask)).status == 200
        await asked.close()

    asyncio.run(run())


def test_one_that_breaks_while_answering_takes_its_parent_with_it(data: Path) -> None:
    """F3."""

    async def run() -> None:
        asked = reading(data)
        await asked.warm()
        loaded = asked.pid
        (child,) = await answering(asked)
        os.kill(child, signal.SIGSTOP)  # so that it cannot be done before it breaks
        waiting = asyncio.create_task(asked.ask("topics", {}, {}))
        await asyncio.sleep(0.05)
        os.kill(child, signal.SIGSEGV)
        os.kill(child, signal.SIGCONT)
        while asked.pid in (None, loaded):
            await asyncio.sleep(0.01)
        os.kill(asked.pid, signal.SIGKILL)  # the one that was asked once more, while it loads
        with pytest.raises(ReadingEndedError, match="ask again") as ended:
            await waiting
        assert failure_of(ended.value)[0] == 503
        assert (await asked.ask("topics", {}, {})).status == 200
        assert asked.pid not in (None, loaded)
        await asked.close()

    asyncio.run(run())


def test_R41_settings_of_a_client_are_on_no_command_line_and_in_no_environment(tmp_path: Path) -> None:
    """They may be passwords: the process that reads gets them through its pipe."""
    canary = "canary-91c4"

    async def run() -> None:
        settings = Settings("kafka://127.0.0.1:9", tmp_path, client={"sasl.password": canary})
        assert canary not in repr(settings)
        asked = ReaderProcess(settings)
        waiting = asyncio.create_task(asked.ask("warm", {}, {}))
        while asked.pid is None:
            await asyncio.sleep(0.01)
        for place in (f"/proc/{asked.pid}/cmdline", f"/proc/{asked.pid}/environ"):
            assert canary.encode() not in Path(place).read_bytes()
        waiting.cancel()
        await asked.close()

    asyncio.run(run())


def test_long_questions_leave_room_for_quick_ones(data: Path) -> None:
    """A4: however many wait for an audit, a topic's page comes in between."""

    async def run() -> None:
        asked = reading(data)
        await asked.warm()
        ask = {"wait_ms": "2000", "again": "true"}
        held = [asyncio.create_task(asked.ask("integrity", {"topic": "orders"}, ask)) for _ in range(40)]
        slow = asyncio.create_task(asked.ask("records", {"topic": "orders"}, {"limit": "10000"}))
        await asyncio.sleep(0.05)
        assert (await asked.ask("topics", {}, {})).status == 200
        assert sum(each.done() for each in held) <= 30  # in their turn it would come when 37 are done
        for each in held[6:]:
            each.cancel()
        assert all(each.status == 200 for each in await asyncio.gather(*held[:6], slow))
        await asked.close()

    asyncio.run(run())


def test_a_long_question_that_is_given_up_counts_until_it_is_answered(data: Path) -> None:
    """A4, A5: who goes does not make room for one more long question than the process has threads for."""

    async def run() -> None:
        asked = await warmed(data, request_seconds=20)
        pid, (child,) = asked.pid, await answering(asked)
        os.kill(child, signal.SIGSTOP)
        begun = [
            asyncio.create_task(asked.ask("records", {"topic": "orders"}, {})) for _ in range(THREADS - 1)
        ]
        await asyncio.sleep(0.1)
        for each in begun:
            each.cancel()
        assert all(isinstance(each, asyncio.CancelledError) for each in
                   await asyncio.gather(*begun, return_exceptions=True))  # fmt: skip
        with pytest.raises(OverloadError, match="3 long questions are being answered"):
            await asked.ask("records", {"topic": "orders"}, {})
        os.kill(child, signal.SIGCONT)
        asked._settings = settings(data, request_seconds=300)
        assert (await asked.ask("records", {"topic": "orders"}, {})).status == 200
        assert asked.pid == pid
        await asked.close()

    asyncio.run(run())


def test_a_process_that_never_answers_what_was_given_up_is_replaced(data: Path) -> None:
    """A1 holds for questions that nobody waits for, too: otherwise one would take a thread for ever."""

    async def run() -> None:
        asked = await warmed(data, request_seconds=1)
        pid, (child,) = asked.pid, await answering(asked)
        os.kill(child, signal.SIGSTOP)
        begun = asyncio.create_task(asked.ask("topics", {}, {}))
        await asyncio.sleep(0.1)
        begun.cancel()
        while asked.pid == pid:
            await asyncio.sleep(0.05)
        asked._settings = settings(data, request_seconds=300)
        assert (await asked.ask("topics", {}, {})).status == 200
        await asked.close()

    asyncio.run(run())


def test_the_process_stops_looking_for_an_answer_that_is_given_up(data: Path) -> None:
    """A5: here it would wait for ever, because the clock by which it waits stands still."""
    site = Site(data / "log", data / "state", clock=ManualClock())
    audits = Audits(site)
    audits._known["orders"] = _Audit("orders", {}, 0, 0)  # one that never ends
    site.kept("audits", lambda: audits)
    questions_out, questions = os.pipe()
    answers, answers_in = os.pipe()
    worker = Worker(site, questions_out, answers_in, idle_seconds=60)
    thread = threading.Thread(target=worker.run)
    thread.start()
    words = {"topic": "orders"}
    for number in range(THREADS - 1):
        os.write(questions, framed(Question(number, "integrity", words, {"wait_ms": "20000"})))
    os.write(questions, framed(Question(99, GIVE_UP, {}, {})))  # of one that was answered already
    for number in range(THREADS - 1):
        os.write(questions, framed(Question(number, GIVE_UP, {}, {})))
    os.write(questions, framed(Question(5, "topics", {}, {})))
    found = {msgspec.msgpack.decode(read_frame(answers) or b"", type=Answer).number for _ in range(THREADS)}
    assert found == {*range(THREADS - 1), 5}
    os.close(questions)
    thread.join(60)
    for each in (questions_out, answers, answers_in):
        os.close(each)
    site.close()


def test_a_scan_that_is_given_up_ends_between_batches() -> None:
    import pyarrow as pa

    given_up = threading.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        while True:  # without an end
            yield pa.record_batch({"key": [1]})
            given_up.set()

    def scan() -> None:
        answering_in_site(given_up)
        with pytest.raises(ReadingEndedError, match="nobody waits"):
            page_of(batches(), 2**60, 1)
        assert Budget(ManualClock(), 1000, 1000).is_spent

    thread = threading.Thread(target=scan)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_who_goes_leaves_the_queue_of_long_questions(data: Path) -> None:
    """Over HTTP: of nine that ask and go, those that still waited for their turn are never asked."""
    log, state = folders_of(data)
    site = Server(Settings(log, state, port=0))
    server = uvicorn.Server(uvicorn_config(site))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()

    def until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    until(lambda: server.started and site.is_warm)
    port = server.servers[0].sockets[0].getsockname()[1]
    (child,) = asyncio.run(answering(site.reading))
    os.kill(child, signal.SIGSTOP)
    before = site.reading._number
    held = [socket.create_connection(("127.0.0.1", port), timeout=300) for _ in range(9)]
    for each in held:
        each.sendall(b"GET /api/topics/orders/records HTTP/1.1\r\nhost: localhost\r\n\r\n")
    until(lambda: site.reading._number == before + THREADS - 1)
    until(lambda: sum(each.cycle is not None for each in server.server_state.connections) == 9)
    for each in held:
        each.close()
    until(lambda: not server.server_state.connections)
    os.kill(child, signal.SIGCONT)
    found = httpx.get(f"http://127.0.0.1:{port}/api/topics/orders/records", timeout=300)
    assert found.status_code == 200
    assert site.reading._number == before + THREADS  # the six behind them were not asked
    server.should_exit = True
    thread.join(300)


def test_many_questions_at_once_get_their_own_answers(data: Path) -> None:
    async def run() -> None:
        asked = reading(data)
        names = ["orders", "prices", "catalogue", "hostile"] * 10
        found = await asyncio.gather(*(asked.ask("topic", {"topic": name}, {}) for name in names))
        assert [msgspec.json.decode(each.body)["name"] for each in found] == names
        wrong = await asked.ask("topic", {"topic": "none"}, {})
        assert wrong.status == 404 and msgspec.json.decode(wrong.body)["error"] == "not_found"
        await asked.close()

    asyncio.run(run())
