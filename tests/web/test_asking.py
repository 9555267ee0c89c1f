"""The process that reads is started, ended and replaced without anyone noticing more than a wait."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from tidegate.web.asking import Reading
from tidegate.web.failures import ReadingEndedError, TooLongError, failure_of
from tidegate.web.settings import Limits, Settings


def reading(data: Path, **limits: float) -> Reading:
    return Reading(Settings(data / "log", data / "state", limits=Limits(**limits)))  # type: ignore[arg-type]


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


async def answering(asked: Reading) -> list[int]:
    """The children of the process that reads."""
    if asked.pid is None:
        return []
    return [int(pid) for pid in Path(f"/proc/{asked.pid}/task/{asked.pid}/children").read_text().split()]


async def rests(asked: Reading) -> None:
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
        asked = Reading(settings)
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
        ask = {"wait_ms": "3000", "again": "true"}
        held = [asyncio.create_task(asked.ask("integrity", {"topic": "orders"}, ask)) for _ in range(12)]
        slow = asyncio.create_task(asked.ask("records", {"topic": "orders"}, {"limit": "10000"}))
        await asyncio.sleep(0.05)
        assert (await asked.ask("topics", {}, {})).status == 200
        assert sum(each.done() for each in held) <= 6  # in their turn it would come when nine are done
        assert all(each.status == 200 for each in await asyncio.gather(*held, slow))
        await asked.close()

    asyncio.run(run())


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
