"""An app whose stored files are damaged or forged one at a time, then read and run again; run as a process of its own.

    python hostile_state.py FOLDER MODE CASES SEED

prints one JSON line before each case and one after it, so that whoever started it can name the case that a signal
ended. MODE is `flips` (one bit of any file of the state, checksums as they were), `forged` (a few bytes inside the
slots of a pack, checksums made right again), `signed-flips` and `signed-forged`: the same with a key of the state, and
what somebody without the key can do to any of its files; `log-flips` is one bit of any file of the log.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "spark"))
from push_kit import push_here, rows

import tidegate as tg
from forged_packs import forged
from tidegate.clock import SystemClock
from tidegate.errors import CorruptError, InternalError, TidegateError
from tidegate.storage import open_backend
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.signed import HEAD_BYTES, SignedBackend, StateKeys
from tidegate.tables.topic_table import open_committed
from tidegate.tables.versions.reader import versioned_table

TEN = 1_767_261_600_000
FIRST, MORE = 600, 60
TOPICS = ("orders", "per-minute")
KEY, ANOTHER = (bytes((11 * i + n) % 256 for i in range(32)) for n in (3, 4))


def records(numbers: range) -> pa.Table:
    """Some orders twice, some late, some that cannot be read."""
    values = [
        f'{{"order_id":"o-{i % 550}","amount":{i % 97},"who":"w{i % 13}"}}' if i % 41 else '{"order_id": 3'
        for i in numbers
    ]
    times = [TEN + i * 1000 - (90_000 if i % 29 == 0 else 0) for i in numbers]
    return pa.table({"key": [f"c{i % 7}" for i in numbers], "value": values, "timestamp": times})


def define(folder: Path) -> tg.App:
    """Every kind of state there is: dedupe, panes of every aggregate, sessions, late records, dead letters."""
    app = tg.App("shop", data=str(folder))
    orders = app.stream(
        "orders", value=tg.Json(order_id="string", amount="double", who="string"), on_error="keep"
    ).validate()
    orders.drop_duplicates("order_id", within="10m").window(
        tg.Tumbling("1m", grace="30s", retention="1d")
    ).agg(
        n=tg.count(), total=tg.sum("amount"), mean=tg.mean("amount"), least=tg.min("who"), first=tg.first("who"),
        last=tg.last("amount"), different=tg.count_distinct("who"), about=tg.approx_count_distinct("who"),
        top=tg.top_k("amount", 3), everyone=tg.collect("who"),
    ).to_topic("per-minute").to_table("minutes")  # fmt: skip
    orders.window(tg.Session("5s", grace="30s", retention="1d")).agg(everyone=tg.collect("who")).to_table(
        "sessions"
    )
    return app


def make(folder: Path) -> None:
    """The app after its first run, and records that wait for the second."""
    for numbers in (range(FIRST), range(FIRST, FIRST + MORE)):
        with tg.Log(folder / "log") as log:
            if not numbers.start:
                log.create_topic("orders", partitions=1)
            with log.writer("orders") as writer:
                writer.write(records(numbers))
        if not numbers.start:
            define(folder).run("local", until="caught_up")
    with (
        tg.Log(folder / "log") as log,
        tg.windowed_table(log, "per-minute", "1m", state=folder / "state") as table,
    ):
        table.commit()
    for text in ("old", "new"):
        push_here(folder, rows(40, text), retain=2)


def seen(folder: Path, *, runs: bool) -> list[Any]:
    """All that the app's tables hold, by every way of reading, after a second run if asked."""
    app = define(folder)
    if runs:
        summary = app.run("local", until="caught_up")
        if summary.stopped:
            raise CorruptError(f"the app stopped a partition: {summary.stopped[0].message}")
    found: list[Any] = []
    for name in ("minutes", "sessions"):
        with app.open_table(name) as table:
            found += [
                table.to_arrow().to_pylist(),
                table.late().to_pylist(),
                table.dead_letters().to_pylist(),
            ]
            found += [list(table.fetch(key)) for key in ("c0", "c5", "nobody")]
    backend = open_backend(folder / "state", read_only=True)
    found.append(open_committed(backend, "per-minute", clock=SystemClock()).to_arrow().to_pylist())
    backend.close()
    for version in (1, 2):
        with versioned_table("users", state=folder / "state", version=version) as users:
            found.append(users.to_arrow().to_pylist())
    with tg.Log(folder / "log", read_only=True) as log:
        columns = ["offset", "key", "value"]  # numbers of producers and times of results differ between runs
        found += [log.reader(topic).read_all().select(columns).to_pylist() for topic in TOPICS]
    return found


def cases(root: Path, mode: str, count: int, seed: int) -> list[tuple[str, int]]:
    """Which file, and the seed of what happens to it: every file in turn, as often as there is room for."""
    place = root / ("log" if mode == "log-flips" else "state")
    files = [each for each in sorted(place.rglob("*")) if each.is_file() and each.stat().st_size]
    files = [each for each in files if mode != "forged" or each.suffix == ".pack"]
    files = [
        each for each in files if not each.parent.name.startswith("users_v")
    ]  # read when they are pushed only
    chance = random.Random(seed)
    return [(str(files[at % len(files)].relative_to(root)), chance.randrange(1 << 30)) for at in range(count)]


def damage(folder: Path, name: str, mode: str, seed: int) -> None:
    chance, path = random.Random(seed), folder / name
    content = bytearray(path.read_bytes())
    if mode == "signed-forged":
        forge_signed(folder / "state", path, chance)
        return
    if mode.endswith("flips"):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        return

    def change(number: int, body: bytearray) -> None:
        for _ in range(chance.choice([1, 1, 3])):
            at = chance.randrange(0, len(body), 4)
            at = chance.randrange(0, min(len(body), 512), 4) if chance.random() < 0.2 else at
            word = chance.choice([0, -1, 1, 2**31 - 1, -(2**31), 255, chance.randrange(-(2**31), 2**31)])
            body[at : at + 4] = word.to_bytes(4, "little", signed=True)

    object_name = str(path.relative_to(folder / "state"))
    path.write_bytes(forged(bytes(content), object_name, change))


def forge_signed(state: Path, path: Path, chance: random.Random) -> None:
    """What somebody can do who knows all of the format and not the key."""
    name, raw = str(path.relative_to(state)), FolderBackend(state)
    if name in ("tidegate-storage", "tidegate-storage.lock"):
        path.write_bytes(chance.randbytes(path.stat().st_size))
        return
    is_published = path.read_bytes().startswith(b"TG-PUBL\n")
    data, version = (raw.read_published(name) or (b"", "")) if is_published else (path.read_bytes(), "")
    head, content = data[:HEAD_BYTES], bytearray(data[HEAD_BYTES:])
    others = [each for each in sorted(path.parent.iterdir()) if each != path and each.is_file()]
    how = chance.choice(["change", "strip", "sign", "swap" if others and not is_published else "change"])
    if how == "swap":  # for a sound one of the same kind
        shutil.copy(chance.choice(others), path)
        return
    if name.endswith(".pack"):
        content = bytearray(forged(bytes(content), name, lambda _, body: _changed(body, chance)))
    elif content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    if how == "sign":
        signer = SignedBackend(raw, StateKeys((ANOTHER,), ""), where="")
        head = bytes(memoryview(signer.signed(name, [bytes(content)])[0]))
    made = (b"" if how == "strip" else head) + bytes(content)
    if is_published:
        raw.publish(name, made, expected=version)
    else:
        path.write_bytes(made)


def _changed(body: bytearray, chance: random.Random) -> None:
    body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)


def outcome(folder: Path, expected: list[Any], *, runs: bool) -> tuple[str, str]:
    try:
        found = seen(folder, runs=runs)
    except InternalError as error:
        return "traceback", repr(error)
    except TidegateError as error:
        return "detected", f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001  (whatever it is, it is told)
        return "traceback", traceback.format_exc()
    return ("same", "") if found == expected else ("different", "")


def main(folder: Path, mode: str, count: int, seed: int) -> None:
    root, copy = folder / "sound", folder / "case"
    if mode.startswith("signed"):
        os.environ["TIDEGATE_STATE_KEY"] = KEY.hex()
    make(root)
    # (a read before the second run; after it, in a copy of its own, for what only a run meets)
    expected = {}
    for runs in (False, True):
        shutil.copytree(root, copy)
        expected[runs] = seen(copy, runs=runs)
        shutil.rmtree(copy)
    for number, (name, chosen) in enumerate(cases(root, mode, count, seed)):
        runs = random.Random(chosen).random() < 0.5
        print(json.dumps({"case": number, "file": name, "seed": chosen, "runs": runs}), flush=True)
        shutil.copytree(root, copy)
        damage(copy, name, mode, chosen)
        ended, why = outcome(copy, expected[runs], runs=runs)
        print(json.dumps({"ended": ended, "why": why}), flush=True)
        shutil.rmtree(copy)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
