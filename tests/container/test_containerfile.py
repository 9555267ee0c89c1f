"""The image of `Containerfile`: built, then used by a user without a name or a home, with a read-only root.

Where a builder answers (docker or podman) it builds the image. Elsewhere the same lines are done here, one after the
other: `RUN` in a chroot with this machine's Python as the base image, and the commands as another user in it, its root
mounted read-only, with one volume. That needs root and mount namespaces; without them the tests are skipped.

Only the soak takes everything from the package index and compiles every kernel, as a build does. The everyday test
lends this machine's packages and compiled kernels to the image.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numba
import pytest

import tidegate.kernels

ROOT = Path(__file__).parents[2]
CONTAINERFILE = ROOT / "Containerfile"
SOMEBODY = 47_011  # has no entry in any user database
SYSTEM = ("bin", "etc", "lib", "lib32", "lib64", "sbin", "usr")
LENT = "/lent/packages"
LIMIT_S = 3600
JAVA = Path(shutil.which("java") or "/nonexistent/bin/java").resolve()


def instructions() -> Iterator[tuple[str, str]]:
    """The lines of the Containerfile: instruction and the rest."""
    for line in CONTAINERFILE.read_text().splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


class ChrootImage:
    """The image in a folder; `run` starts its entry point there, as a container engine would."""

    def __init__(self, folder: Path, *, lend: bool) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        self.volume = folder / "volume"
        self.environment: dict[str, str] = {}
        self.entrypoint: list[str] = []
        self.workdir = "/"
        self.user = 0
        self._lend = lend

    def build(self) -> None:
        arguments: dict[str, str] = {}
        for word, rest in instructions():
            if word == "FROM":
                self._lay_base()
            elif word in ("ARG", "ENV"):
                name, _, value = rest.partition("=")
                (arguments if word == "ARG" else self.environment)[name] = value
                if self._lend:
                    self.environment.pop(
                        "NUMBA_CPU_NAME", None
                    )  # this machine's kernels are of its processor
            elif word == "COPY":
                self._copy(shlex.split(rest))
            elif word == "RUN":
                asked = rest.replace("pip install", "pip install --no-deps") if self._lend else rest
                of_pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
                done = self.command(
                    ["sh", "-c", asked], writable=True, extra={**of_pip, **arguments, "HOME": "/root"}
                )
                if "pip install" in rest and "No matching distribution" in done.stderr:
                    pytest.skip("the package index has no answer")
                assert done.returncode == 0, f"RUN {rest}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
                if "pip install" in rest and self._lend:
                    self._lend_packages()
            elif word == "WORKDIR":
                self.workdir = rest
            elif word == "USER":
                self.user = int(rest)
            elif word == "ENTRYPOINT":
                self.entrypoint = json.loads(rest)
            else:
                assert word in ("VOLUME", "CMD"), f"{word}: teach the test what it does"
        data = self.root / "data"
        self.volume.mkdir()
        self.volume.chmod(data.stat().st_mode & 0o7777)  # a new volume begins as what it covers

    def run(self, *arguments: str, user: int = SOMEBODY, volume: bool = True, text: str = "") -> Any:
        """The entry point with these arguments: as this user, the root read-only, no HOME."""
        return self.command([*self.entrypoint, *arguments], user=user, volume=volume, text=text)

    def command(
        self,
        command: list[str],
        *,
        user: int = 0,
        writable: bool = False,
        volume: bool = False,
        text: str = "",
        extra: Mapping[str, str] | None = None,
    ) -> Any:
        mounts = [f"mount --bind {self.root} {self.root}"]
        for name in SYSTEM:
            if (self.root / name).is_dir() and not (self.root / name).is_symlink():
                mounts += self._read_only(f"/{name}", name)
        mounts += self._read_only(sys.base_prefix, sys.base_prefix)
        if self._lend:
            mounts += self._read_only(str(Path(numba.__file__).parents[1]), LENT)
        for wheels in os.environ.get("PIP_FIND_LINKS", "").split():
            if Path(wheels).is_dir():
                mounts += self._read_only(wheels, wheels)
        mounts += [f"mount --rbind /dev {self.root}/dev", f"mount -t proc proc {self.root}/proc"]
        if volume:
            mounts.append(f"mount --bind {self.volume} {self.root}/data")
        if not writable:
            mounts.append(f"mount -o remount,bind,ro {self.root}")
        told = {**self.environment, **(extra or {})}
        inside = f"cd {self.workdir} && exec {shlex.join(command)}"
        start = ["chroot", f"--userspec={user}:{user}", "--groups=", str(self.root), "/usr/bin/env", "-i"]
        start += [*(f"{name}={value}" for name, value in told.items()), "/bin/sh", "-c", inside]
        return subprocess.run(
            ["unshare", "--mount", "sh", "-ec", "\n".join([*mounts, f"exec {shlex.join(start)}"])],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )

    def _read_only(self, source: str, target: str) -> list[str]:
        place = self.root / target.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        return [f"mount --bind {source} {place}", f"mount -o remount,bind,ro {place}"]

    def _lay_base(self) -> None:
        """What the base image would bring: the system's folders and a Python, from this machine."""
        for name in SYSTEM:
            here = Path("/") / name
            if here.is_symlink():
                (self.root / name).symlink_to(os.readlink(here))
            elif here.is_dir():
                (self.root / name).mkdir()
        for name in ("dev", "proc", "tmp", "root", "opt"):
            (self.root / name).mkdir()
        (self.root / "tmp").chmod(0o1777)
        python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info[1]}")
        self._read_only(sys.base_prefix, sys.base_prefix)
        for folder in [*(self.root / sys.base_prefix.lstrip("/")).parents][:-1]:
            if self.root in folder.parents:
                folder.chmod(0o755)
        (self.root / "opt" / "tidegate" / "bin").mkdir(
            parents=True
        )  # first on PATH: `python3` of the base image
        (self.root / "opt" / "tidegate" / "bin" / "python3").symlink_to(python)

    def _copy(self, parts: list[str]) -> None:
        *sources, target = parts
        for source in sources:
            place = self.root / target.lstrip("/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, place)

    def _lend_packages(self) -> None:
        """Have this machine's packages importable in the image, and its kernels where a compiler would put them."""
        (site,) = (self.root / "opt" / "tidegate").glob("lib/python3.*/site-packages")
        (site / "lent.pth").write_text(LENT + "\n")
        cache = site / "tidegate" / "kernels" / "__pycache__"
        cache.mkdir(exist_ok=True)
        for path in Path(tidegate.kernels.__file__).parent.glob("__pycache__/*.nb[ic]"):
            shutil.copy(path, cache)

    def forget_kernels(self) -> None:
        """Make of it an image whose kernels were not compiled."""
        for path in (self.root / "opt").rglob("*.nb[ic]"):
            path.unlink()


class BuiltImage:
    """The image as a container engine builds and runs it."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.name = f"tidegate-test-{os.getpid()}"

    def build(self) -> None:
        subprocess.run(
            [self.engine, "build", "-f", str(CONTAINERFILE), "-t", self.name, str(ROOT)],
            check=True,
            timeout=LIMIT_S,
        )

    def run(self, *arguments: str, user: int = SOMEBODY, volume: bool = True, text: str = "") -> Any:
        mounted = ["-v", f"{self.name}:/data"] if volume else []
        return subprocess.run(
            [
                self.engine,
                "run",
                "--rm",
                "-i",
                "--read-only",
                "--user",
                str(user),
                *mounted,
                self.name,
                *arguments,
            ],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )

    def remove(self) -> None:
        for what in (["volume", "rm", "-f", self.name], ["image", "rm", "-f", self.name]):
            subprocess.run([self.engine, *what], check=False, capture_output=True)


def engine() -> str | None:
    """A container engine that answers."""
    for name in ("docker", "podman"):
        if (
            shutil.which(name)
            and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0
        ):
            return name
    return None


def can_chroot() -> bool:
    return (
        os.geteuid() == 0
        and shutil.which("unshare") is not None
        and subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
    )


needs_root = pytest.mark.skipif(
    not can_chroot(), reason="needs root and mount namespaces to stand in for a container"
)


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> ChrootImage:
    image = ChrootImage(tmp_path_factory.mktemp("lent"), lend=True)
    image.build()
    return image


def kernels_of(image: Any, **run: Any) -> dict[str, str]:
    answer = image.run("doctor", "--format", "json", **run)
    assert answer.returncode == 0, answer.stderr + answer.stdout
    (found,) = [row for row in json.loads(answer.stdout)["checks"] if row["check"] == "kernels"]
    return found


def use_it(image: Any) -> None:
    """What a user does with it, whose root is read-only, who has no name and no home."""
    assert kernels_of(image)["verdict"] == "ok"
    beside = kernels_of(image, volume=False)  # and with no place to write at all
    assert beside["verdict"] == "ok" and beside["found"].endswith(
        "/site-packages/tidegate/kernels/__pycache__"
    )
    made = image.run("topic", "create", "orders", "-p", "2")
    assert made.returncode == 0, made.stderr
    written = image.run("produce", "orders", "--key-separator", ":", text="a:one\nb:two\na:three\n")
    assert written.returncode == 0 and "wrote 3 records" in written.stderr, written.stderr
    checked = image.run("verify", "orders")
    assert checked.returncode == 0, checked.stderr
    assert "nothing wrong found" in checked.stderr
    assert "compiling" not in written.stderr + checked.stderr  # what root compiled is what is used
    ended = image.run("run", "/data/shop.py", "--engine", "local", "--once", "--close")
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert "compiling" not in ended.stderr
    shown = image.run("app", "status", "shop", "--format", "json")
    assert shown.returncode == 0, shown.stderr
    assert [(each["app"], each["records"]) for each in json.loads(shown.stdout)] == [("shop", 3)]


APP = """
import tidegate as tg
from tidegate.windows.kinds import Tumbling

app = tg.App("shop", data="/data")
app.stream("orders").window(Tumbling("1h")).agg(records=tg.count()).to_table("per_hour")
"""


@needs_root
def test_a_user_without_a_name_or_a_home_uses_what_root_compiled(lent: ChrootImage) -> None:
    (lent.volume / "shop.py").write_text(APP)
    use_it(lent)
    made = {path.stat().st_uid for path in lent.volume.rglob("*") if path.name != "shop.py"}
    assert made == {SOMEBODY}


@needs_root
def test_the_user_of_the_image_itself_is_not_root(lent: ChrootImage) -> None:
    assert lent.user > 0
    assert kernels_of(lent, user=lent.user)["verdict"] == "ok"


@needs_root
@pytest.mark.spark
@pytest.mark.skipif(
    not JAVA.is_relative_to("/usr"), reason="the image sees no Java of this machine but one in /usr"
)
def test_spark_runs_for_a_user_without_a_name(lent: ChrootImage) -> None:
    """Java knows neither a name nor a home for such a user id, and Spark ended before it began."""
    count = "import tidegate.spark as s; print(s.session('x', master='local[1]').range(10).count())"
    done = lent.command(
        ["python", "-c", count], user=SOMEBODY, volume=True, extra={"JAVA_HOME": str(JAVA.parents[1])}
    )
    assert (done.returncode, done.stdout.strip()) == (0, "10"), done.stderr[-4000:]


@needs_root
def test_a_first_command_that_must_compile_says_so_and_keeps_it_in_the_volume(lent: ChrootImage) -> None:
    """Last in this file: it takes the kernels out of the image."""
    lent.forget_kernels()
    assert lent.run("topic", "create", "fresh").returncode == 0
    found = kernels_of(lent)
    assert found["verdict"] == "note"
    assert found["found"].startswith("0 of ") and f"kept in /data/tidegate-{SOMEBODY}/" in found["found"]
    assert found["remedy"].startswith("/opt/tidegate/bin/python")
    assert found["remedy"].endswith(" -m tidegate.kernels")
    assert not (lent.volume / f"tidegate-{SOMEBODY}").exists()  # doctor compiles nothing and makes nothing
    first = lent.run("produce", "fresh", text="one\n")
    assert first.returncode == 0, first.stderr
    assert first.stderr.startswith(
        f"compiling kernels for this machine (once; kept in /data/tidegate-{SOMEBODY}/"
    ), first.stderr
    assert kernels_of(lent)["found"].startswith("0 of ") is False
    again = lent.run("produce", "fresh", text="two\n")
    assert again.returncode == 0 and "compiling" not in again.stderr, again.stderr
    assert (
        lent.run("produce", "fresh", text="three\n", user=SOMEBODY + 1).returncode != 0
    )  # not that user's log


@pytest.mark.soak
def test_the_whole_containerfile_from_nothing(tmp_path: Path) -> None:
    builder = engine()
    if builder is not None:
        built = BuiltImage(builder)
        try:
            built.build()
            copy = ["sh", "--user", str(SOMEBODY), "-v", f"{built.name}:/data", built.name]
            subprocess.run(
                [builder, "run", "--rm", "-i", "--entrypoint", *copy, "-c", "cat > /data/shop.py"],
                input=APP,
                text=True,
                check=True,
                timeout=LIMIT_S,
            )
            use_it(built)
        finally:
            built.remove()
        return
    if not can_chroot():
        pytest.skip("neither a container engine nor root with mount namespaces")
    image = ChrootImage(tmp_path, lend=False)
    image.build()
    (image.volume / "shop.py").write_text(APP)
    use_it(image)
