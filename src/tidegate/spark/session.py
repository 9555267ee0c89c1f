"""A Spark session set up for this machine, each setting with its reason.

`session()` is for people who have none; a session of your own works as well (`register(spark)` is all it
needs), and `check_session(spark)` says what would make it faster. Settings passed in win over the ones below. A Java
is looked for first (see `java.py`), so that a missing one is a sentence and not a stack trace.

Imports pyspark only when called.
"""

from __future__ import annotations

import atexit
import os
import pwd
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.errors import UnavailableError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
FILTER_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_KEY_IN_CONFIG = "spark.executorEnv.TIDEGATE_STATE_KEY"
_NO_RETRIES = re.compile(r"local(\[(\*|\d+)\])?\Z")
_LOCAL_ONLY = frozenset({"spark.sql.streaming.checkpointFileManagerClass"})
_SOCKET_PATH_LIMIT = 107  # bytes a Unix socket's path may have
_SOCKET_NAME_LENGTH = 50


@dataclass(frozen=True, slots=True)
class SparkSetting:
    """One Spark setting of ours and why it is set.

    `advised`: worth having in a session of your own, too. `at_start`: only before the session starts.
    """

    key: str
    value: str
    reason: str
    advised: bool = False
    at_start: bool = False


@dataclass(frozen=True, slots=True)
class Advice:
    """What would make a session faster or safer: printed, it is a sentence."""

    key: str
    now: str | None
    better: str
    reason: str
    at_start: bool = True

    def __str__(self) -> str:
        when = "when the session is made" if self.at_start else "at any time"
        return f"{self.key} is {self.now or 'not set'}; set {self.better} {when}: {self.reason}"


def settings(*, ui: bool = False, sockets: Path | None = None) -> Iterator[SparkSetting]:
    """Everything `session()` sets, in order; `sockets` is a private folder for Unix sockets."""
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
    """A Spark session on this machine with the `tidegate` data source registered.

    `local[*,4]`: every core, and a task is tried four times; plain `local[*]` never tries again. An already
    running session of this process is returned as it is.
    """
    from tidegate.spark.java import use_java

    try:
        from pyspark import SparkContext
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise UnavailableError(
            f"pyspark cannot be loaded ({error}); run: pip install 'tidegate[spark]'"
        ) from None
    if (running := SparkSession.getActiveSession()) is not None:
        register(running)
        return running
    if SparkContext._active_spark_context is None:
        use_java()
        name_the_user()
        # Workers must run this Python, with these packages; Spark would take the first python3 on PATH,
        # and looks at this variable alone (the setting spark.pyspark.python is for spark-submit).
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        if master.startswith("local["):  # and no look at the network's addresses either
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
    """Tell Java who runs it and where it may write, for a user id without an entry in the user database.

    In a container with `--user 1234` Java knows neither a name nor a home, and Spark ends before it begins.
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
    """Make `format("tidegate")` (topics, read and written) and `format("tidegate.table")` known to a session."""
    from tidegate.spark.tables.source import TableDataSource
    from tidegate.spark.topics.source import TidegateDataSource

    spark.dataSource.register(TidegateDataSource)
    spark.dataSource.register(TableDataSource)


def check_session(spark: SparkSession) -> list[Advice]:
    """What would make a session of your own faster with Tidegate; nothing is changed."""
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
    """A private folder for Spark's sockets, gone at exit; None where its path would be too long for one."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) + len("/tidegate-xxxxxxxx/") + _SOCKET_NAME_LENGTH > _SOCKET_PATH_LIMIT:
        return None
    folder = Path(tempfile.mkdtemp(prefix="tidegate-", dir=parent))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
