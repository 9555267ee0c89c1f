"""`tidegate doctor`: what this machine has, what is missing, and the command that puts it right.

Each check is one row: name, verdict (`ok`, `note`, `missing`, `fault`), what was found, and the remedy. Only
a `fault` means that the log tools cannot work; Spark, Kafka and pictures are extras. The output is meant to
be pasted into a report: no environment variables, no secrets, and the home folder is written as `~`.

Nothing is changed, except for a temporary file that measures how long a sync takes.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import click

from tidegate import __version__
from tidegate.cli.options import Command, format_option, log_option
from tidegate.cli.output import print_object, print_rows
from tidegate.durations import format_size
from tidegate.errors import InvalidError, TidegateError

OLDEST_PYTHON = (3, 11)
FEW_OPEN_FILES = 512
SLOW_SYNC_MS = 50
LITTLE_SPACE = 1 << 30
CORE_PACKAGES = ("click", "cramjam", "fastcrc", "msgspec", "numba", "numpy", "pyarrow", "rich")
EXTRA_PACKAGES = {
    "pyspark": "spark",
    "pandas": "spark",
    "matplotlib": "plot",
    "prometheus-client": "metrics",
    "starlette": "web",
    "uvicorn": "web",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `remedy` is a command or a sentence, empty when nothing is to be done."""

    check: str
    verdict: str
    found: str
    remedy: str = ""


@click.command("doctor", cls=Command)
@log_option
@format_option(("table", "json"), default="table")
@click.option("--spark", "start_spark", is_flag=True, help="Also start Spark and run a job on it (10 s).")
def command(log_url: str, format: str, start_spark: bool) -> int:
    """Say what this machine has and what is missing.

    Ends with 0 when the log tools can work; Spark, Kafka and pictures are extras.
    """
    checks = [_without_home(check) for check in examine(log_url, start_spark=start_spark)]
    healthy = all(check.verdict != "fault" for check in checks)
    rows = [asdict(check) for check in checks]
    if format == "json":
        print_object({"ok": healthy, "tidegate": __version__, "checks": rows}, format="json")
    else:
        print_rows(rows, format="table", columns=("check", "verdict", "found", "remedy"))
        print()
        print("the log tools can work" if healthy else "the log tools cannot work: see the faults above")
    return 0 if healthy else 1


def examine(log_url: str, *, start_spark: bool = False) -> Iterator[Check]:
    """All checks, in the order they are printed."""
    yield from _python()
    yield from _packages()
    yield _kernels()
    yield from _machine()
    if "://" not in log_url:
        folder = Path(log_url)
        yield _log_folder(folder)
        yield from _broker_settings(folder)
        yield from _disk(_nearest(folder))
    yield _state_key()
    yield _java()
    yield _spark(start_spark)
    yield _kafka()


def _checked(check: str, found: str, remedy: str = "", *, else_: str = "note") -> Check:
    """One look: ok where nothing is to be done, `else_` otherwise."""
    return Check(check, else_ if remedy else "ok", found, remedy)


def _python() -> Iterator[Check]:
    found = f"{platform.python_version()} at {sys.executable}"
    remedy = "" if sys.version_info >= OLDEST_PYTHON else "use Python 3.11 or newer"
    yield _checked("python", found, remedy, else_="fault")
    yield Check("tidegate", "ok", __version__)
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    remedy = "" if sys.platform in ("linux", "darwin") else "only POSIX systems are tested"
    yield _checked("system", system, remedy)


def _packages() -> Iterator[Check]:
    needed = dict.fromkeys(CORE_PACKAGES, ("fault", "pip install --force-reinstall tidegate"))
    needed |= {
        name: ("missing", f"pip install 'tidegate[{extra}]'") for name, extra in EXTRA_PACKAGES.items()
    }
    for name, (verdict, remedy) in needed.items():
        version = _version(name)
        yield Check(name, "ok", version) if version else Check(name, verdict, "not installed", remedy)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _kernels() -> Check:
    """How many kernels are compiled, and where; asked of a fresh interpreter, which compiles none."""
    done = subprocess.run(
        [sys.executable, "-m", "tidegate.kernels", "--check"], capture_output=True, text=True, timeout=300
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Check("kernels", "fault", f"do not load: {last}", "pip install --force-reinstall numba numpy")
    answer = json.loads(done.stdout)
    found = f"{answer['compiled']} of {answer['kernels']} are compiled"
    if answer["folders"]:
        found += f", in {' and '.join(answer['folders'])}"
    if answer["compiled"] == answer["kernels"]:
        return Check("kernels", "ok", found)
    remedy = f"{sys.executable} -m tidegate.kernels"
    if answer["to"] is None:
        found += "; no folder can be written, so every start compiles what it needs"
        return Check(
            "kernels", "note", found, f"NUMBA_CACHE_DIR=FOLDER {remedy}, with a FOLDER you can write"
        )
    return Check("kernels", "note", f"{found}; the others will be kept in {answer['to']}", remedy)


def _machine() -> Iterator[Check]:
    yield Check("cores", "ok", str(os.cpu_count()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < FEW_OPEN_FILES
    found = f"limit {'none' if soft == resource.RLIM_INFINITY else soft}"
    yield _checked("open files", found, f"ulimit -n {min(hard, 4096) if hard > 0 else 4096}" if few else "")


def _log_folder(folder: Path) -> Check:
    if not folder.exists():
        return Check("log folder", "ok", f"{folder} does not exist yet", "it is made by the first topic")
    if not folder.is_dir():
        return Check("log folder", "fault", f"{folder} is not a folder", "choose another with --log")
    writable = os.access(folder, os.W_OK)
    kind = "a Kafka data folder" if not (folder / "tidegate.topics").exists() else "a log of Tidegate"
    empty = not any(folder.iterdir())
    found = f"{folder}: {'empty' if empty else kind}, {'writable' if writable else 'read-only'}"
    return Check("log folder", "ok" if writable else "note", found)


def _broker_settings(folder: Path) -> Iterator[Check]:
    """What `server.properties` in the log folder says and does not do."""
    from tidegate.files import Files
    from tidegate.log.catalog import BROKER_SETTINGS_NAME, LogFolder

    if not (folder / BROKER_SETTINGS_NAME).is_file():
        return
    try:
        ignored = LogFolder(Files(), folder).broker_config().ignored
    except TidegateError as error:
        yield Check("broker settings", "fault", str(error), f"correct {folder / BROKER_SETTINGS_NAME}")
        return
    used = f"{folder / BROKER_SETTINGS_NAME}, all of them used"
    told = f"ignored here: {', '.join(ignored)}" if ignored else used
    yield Check("broker settings", "note" if ignored else "ok", told)


def _disk(folder: Path) -> Iterator[Check]:
    try:
        free = shutil.disk_usage(folder).free
        remedy = "free some space or choose another folder with --log" if free < LITTLE_SPACE else ""
        yield _checked("free space", format_size(free), remedy)
        sync_ms = _sync_ms(folder)
    except OSError as error:
        yield Check("disk sync", "note", f"could not be measured: {error.strerror}")
        return
    remedy = "larger batches, or durability='os' where losing the last seconds is fine"
    yield _checked("disk sync", f"{sync_ms:.1f} ms for 4 KiB", remedy if sync_ms > SLOW_SYNC_MS else "")


def _sync_ms(folder: Path) -> float:
    """The median time one small write with fsync takes here."""
    place = folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())
    times = []
    with tempfile.TemporaryFile(dir=place) as file:
        for _ in range(9):
            start = time.perf_counter()
            os.pwrite(file.fileno(), b"\0" * 4096, 0)
            os.fsync(file.fileno())
            times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


def _nearest(folder: Path) -> Path:
    folder = folder.absolute()
    return next((place for place in (folder, *folder.parents) if place.is_dir()), Path("/"))


def _state_key() -> Check:
    """Whether state is signed here; of a key only its id is shown."""
    from tidegate.storage.backends.signed import state_keys

    try:
        keys = state_keys()
    except InvalidError as error:
        what, _, remedy = str(error).partition("; ")
        return Check("state key", "note", what, remedy)
    if keys is None:
        return Check("state key", "ok", "none: files of state are not signed, nor verified")
    older = f"; also accepted: {', '.join([*keys.by_id][1:])}" if len(keys.by_id) > 1 else ""
    return Check("state key", "ok", f"files of state are signed with key {keys.id} ({keys.source}){older}")


def _java() -> Check:
    from tidegate.spark.session import find_java

    try:
        java = find_java()
    except TidegateError as error:
        what, _, remedy = str(error).partition("; ")
        return Check("java", "missing", what, remedy)
    remedy = "Spark asks for 25.0.3 or newer, or Java 17 to 24" if java.discouraged else ""
    found = f"{java.version_text} from {java.source} ({java.home})"
    return _checked("java", found, remedy)


def _spark(start: bool) -> Check:
    version = _version("pyspark")
    if version is None:
        return Check("spark", "missing", "pyspark is not installed", "pip install 'tidegate[spark]'")
    if not start:
        return Check("spark", "ok", f"pyspark {version}, not started", "`tidegate doctor --spark` starts it")
    script = (
        "import tidegate.spark\n"
        "spark = tidegate.spark.session('tidegate-doctor', master='local[1]')\n"
        "print('rows', spark.range(10).count())"
    )
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    if done.returncode == 0 and "rows 10" in done.stdout:
        return Check("spark", "ok", f"pyspark {version} ran a job in {time.perf_counter() - begun:.0f} s")
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Check("spark", "missing", f"pyspark {version} does not run: {last[:200]}", "see java above")


def _kafka() -> Check:
    version = _version("confluent-kafka")
    if version is None:
        remedy = "pip install 'tidegate[kafka]'"
        return Check("kafka client", "missing", "confluent-kafka is not installed", remedy)
    return Check("kafka client", "ok", f"confluent-kafka {version}, for --log kafka://HOST:PORT")


def _without_home(check: Check) -> Check:
    try:
        home = str(Path.home())
    except RuntimeError:  # a user without a home folder
        return check
    if len(home) < 2:
        return check
    return replace(check, found=check.found.replace(home, "~"), remedy=check.remedy.replace(home, "~"))
