"""What tests of killed and stalled executors share: a script in a process of its own, and a cluster for it.

Spark never starts a speculative copy on the host that has the original, and `local-cluster` is one host. So where
attempts are to overtake each other, `two_hosts` is the cluster: two of this machine's own addresses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_script(text: str, tmp_path: Path, *arguments: object, expected: int = 0) -> str:
    script, here = tmp_path / "script.py", str(Path(__file__).parent)
    script.write_text(text)
    environment = os.environ | {"SPARK_WORKER_DIR": str(tmp_path / "workers"), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2400,
    )
    assert done.returncode == expected, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def answers(said: str) -> list[Any]:
    """The lines of JSON among what a script printed; dying processes of Spark may say something, too."""
    return [json.loads(line) for line in said.splitlines() if line.startswith(("{", "["))]


def two_hosts(work: Path) -> str:
    """A master and two workers of one core, in the JVM that the session will use; the master's address."""
    from pyspark import SparkContext

    from tidegate.spark.session import use_java

    use_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    made: Any = SparkContext
    made._ensure_initialized()
    spark, scala = made._jvm.org.apache.spark, made._jvm.scala
    conf = spark.SparkConf(False).set("spark.master.rest.enabled", "false")
    master = spark.deploy.master.Master.startRpcEnvAndEndpoint("127.0.0.1", 0, 0, conf)
    addresses = made._gateway.new_array(made._jvm.java.lang.String, 1)
    addresses[0] = f"spark://{master._1().address().hostPort()}"
    nothing = getattr(getattr(scala, "None$"), "MODULE$")
    for number, host in enumerate(("127.0.0.1", "127.0.0.2"), 1):
        spark.deploy.worker.Worker.startRpcEnvAndEndpoint(
            host, 0, 0, 1, 1024, addresses, str(work), scala.Some(number), conf, nothing
        )
    return str(addresses[0])
