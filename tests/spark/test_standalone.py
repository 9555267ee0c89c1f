"""A pipeline sent by `spark-submit` to a real standalone cluster: a master and two workers, processes of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import pipelines
from pipelines import every_kind, run_all, stored

TOPICS = ("tumbling", "session", "by-shop")
JOB = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession
from pipelines import every_kind, run_all

spark = SparkSession.builder.appName("standalone").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
run_all(every_kind(Path(sys.argv[1]), only=("tumbling", "session", "by-shop")), spark)
spark.stop()
"""


class Cluster:
    """A master and its workers, as `spark-class` of the installed pyspark starts them."""

    def __init__(self, folder: Path) -> None:
        import pyspark

        from tidegate.spark.java import use_java

        use_java()
        self._home = Path(pyspark.__file__).parent
        self._folder = folder
        self._ends = ExitStack()
        self.environment = os.environ | {
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_WORKER_DIR": str(folder / "work"),
        }

    def start(self, workers: int) -> str:
        """The master's address, once that many workers are registered with it."""
        master = self._daemon("master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        address = self._told(master, r"Starting Spark master at (spark://\S+)")
        for number in range(workers):
            worker = self._daemon(
                "worker.Worker", "--host", "127.0.0.1", "--webui-port", "0", "--cores", "1", "--memory", "1g",
                address, name=f"worker-{number}",
            )  # fmt: skip
            self._told(worker, r"Successfully registered with master")
        return address

    def submit(self, address: str, job: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
        }
        command = [str(self._home / "bin" / "spark-submit"), "--master", address]
        for key, value in settings.items():
            command += ["--conf", f"{key}={value}"]
        return subprocess.run(
            [*command, str(job), *arguments],
            env=self.environment, capture_output=True, text=True, timeout=600, cwd=self._folder,
        )  # fmt: skip

    def close(self) -> None:
        self._ends.close()

    def _daemon(self, what: str, *arguments: str, name: str | None = None) -> Path:
        """Start one of Spark's daemons; the file it writes its log to."""
        path = self._folder / f"{name or what}.log"
        output = self._ends.enter_context(path.open("wb"))
        command = [str(self._home / "bin" / "spark-class"), f"org.apache.spark.deploy.{what}", *arguments]
        process = subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)
        self._ends.callback(process.wait, 30)
        self._ends.callback(process.terminate)
        return path

    @staticmethod
    def _told(log: Path, pattern: str) -> str:
        """Wait for a line of a daemon's log."""
        ends = time.monotonic() + 300
        while time.monotonic() < ends:
            if found := re.search(pattern, log.read_text(errors="replace")):
                return found.group(found.lastindex or 0)
            time.sleep(0.1)
        raise TimeoutError(f"{log.name} never said {pattern!r}:\n{log.read_text(errors='replace')[-2000:]}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    made = Cluster(folder)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.soak
def test_a_job_sent_to_a_standalone_cluster_writes_what_one_process_writes(
    cluster: Cluster, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    pipelines.create(here, only=TOPICS)
    pipelines.write_orders(here, 20_000)
    shutil.copytree(here, there)
    run_all(every_kind(here, only=TOPICS), "local")
    job = tmp_path / "job.py"
    job.write_text(JOB)
    done = cluster.submit(cluster.start(2), job, str(there))
    assert done.returncode == 0, done.stderr[-4000:]
    assert stored(there, *TOPICS) == stored(here, *TOPICS)
