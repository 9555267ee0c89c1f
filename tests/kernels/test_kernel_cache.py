"""Where compiled kernels are kept: who reads and writes which folder, what is never run, what is told meanwhile."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = """
import json, sys
from tidegate.kernels import compile_progress, kernel_cache
from tidegate.kernels.jit import INT64, all_kernels, kernel

@kernel(INT64(INT64))
def half(number):
    return number // 2

@kernel(INT64(INT64))
def doubled(number):
    return half(number) * 4

told = []
if "log" not in sys.argv:
    compile_progress.listen(lambda at: told.append([at.kernel, at.compiled, at.at_most]))
before = [str(each.where()) for each in all_kernels()]
folder = kernel_cache.folder_to_write(all_kernels()[0]._cache.sources)
print(json.dumps({"found": before, "answer": doubled(21) + 2, "told": told, "folder": folder and str(folder)}))
"""
COMPILED = [["doubled", 0, 2], ["half", 0, 2], ["doubled", 1, 2], ["", 2, 2]]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    path = folder / "doubling.py"
    path.write_text(SOURCE)
    return path


def run(script: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """What the script found, told and answered, in a process with this environment and nothing else."""
    told = {"PATH": os.environ["PATH"], "TMPDIR": str(script.parents[1]), **environment}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False, env=told
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["answer"] == 42
    return found | {"stderr": done.stderr}


def test_what_is_compiled_is_kept_beside_the_sources_and_told(script: Path) -> None:
    first = run(script)
    assert first["found"] == ["None", "None"]
    assert first["told"] == COMPILED
    again = run(script)
    assert again["found"] == [str(script.parent / "__pycache__")] * 2
    assert again["told"] == []


def test_without_a_listener_the_log_is_told_once_with_the_folder_and_the_command(script: Path) -> None:
    told = run(script, "log")["stderr"]
    assert told.count("compiling kernels for this machine, once; kept in ") == 1
    assert str(script.parent / "__pycache__") in told and f"{sys.executable} -m tidegate.kernels" in told
    assert run(script, "log")["stderr"] == ""


def test_an_edit_of_a_kernel_compiles_the_kernels_that_call_it_again(script: Path) -> None:
    run(script)
    script.write_text("# a new first line\n" + SOURCE)
    assert run(script)["told"] == []
    script.write_text(SOURCE.replace("number // 2", "number >> 1"))
    assert run(script)["told"] == COMPILED


def blocked(script: Path) -> None:
    """Have nothing written beside the sources, also by root: there is a file where the folder would be."""
    (script.parent / "__pycache__").write_text("not a folder")


def test_where_the_sources_cannot_be_written_the_users_cache_is_used(script: Path, tmp_path: Path) -> None:
    blocked(script)
    home = tmp_path / "home"
    home.mkdir()
    told = run(script, HOME=str(home))
    (kept,) = (home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "tidegate").iterdir()
    assert told["folder"] == str(kept)
    assert stat.S_IMODE(kept.stat().st_mode) == stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert run(script, HOME=str(home))["told"] == []
    elsewhere = tmp_path / "elsewhere"
    assert run(script, HOME=str(home), XDG_CACHE_HOME=str(elsewhere))["folder"].startswith(str(elsewhere))


def test_nothing_is_made_in_the_working_folder_of_a_user_without_a_home(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked(script)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    told = run(script, HOME="")
    assert told["folder"].startswith(str(tmp_path / f"tidegate-{os.geteuid()}"))
    assert list(here.iterdir()) == []
    assert run(script, HOME="")["told"] == []


def test_where_nothing_can_be_written_kernels_are_compiled_for_the_process(
    script: Path, tmp_path: Path
) -> None:
    blocked(script)
    home = tmp_path / "home"
    home.write_text("not a folder")
    (tmp_path / f"tidegate-{os.geteuid()}").write_text("nor this")
    for _ in range(2):
        assert run(script, HOME=str(home)) | {"stderr": ""} == {
            "found": ["None", "None"],
            "answer": 42,
            "told": COMPILED,
            "folder": None,
            "stderr": "",
        }
    assert "at every start, as no folder can be written" in run(script, "log", HOME=str(home))["stderr"]


def test_a_folder_that_was_named_is_written_first_and_the_others_are_still_read(
    script: Path, tmp_path: Path
) -> None:
    named = tmp_path / "named"
    assert run(script, NUMBA_CACHE_DIR=str(named))["folder"].startswith(str(named))
    assert run(script, NUMBA_CACHE_DIR=str(named))["told"] == []
    assert run(script)["told"] == COMPILED  # beside the sources there is nothing yet
    assert run(script, NUMBA_CACHE_DIR=str(tmp_path / "another"))["told"] == []
    assert not (tmp_path / "another").exists()


def test_a_temporary_folder_that_others_can_write_is_neither_read_nor_written(
    script: Path, tmp_path: Path
) -> None:
    blocked(script)
    kept = Path(run(script, HOME="")["folder"])
    assert run(script, HOME="")["told"] == []
    kept.parent.chmod(0o777)
    found = run(script, HOME="")
    assert found["told"] == COMPILED and found["folder"] is None
    kept.parent.chmod(0o700)
    assert run(script, HOME="")["told"] == []
    moved = kept.parent.rename(tmp_path / "moved")
    (tmp_path / kept.parent.name).symlink_to(moved)
    assert run(script, HOME="")["told"] == COMPILED


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("harm", ["cut", "emptied", "gone", "another"])
def test_a_cache_that_cannot_be_read_is_compiled_anew(script: Path, ending: str, harm: str) -> None:
    """A file may be cut short, be gone, or be of another kernel, as a crash between two writes leaves it."""
    run(script)
    files = sorted((script.parent / "__pycache__").glob(f"*.{ending}"))
    assert len(files) == 2
    for path in files:
        if harm == "cut":
            path.write_bytes(path.read_bytes()[:-9])
        elif harm == "emptied":
            path.write_bytes(b"")
        elif harm == "gone":
            path.unlink()
        elif ending == "nbc":
            path.write_bytes(b"\x80\x04]\x94.")  # a list that has nothing of ours
    if harm == "another" and ending == "nbi":
        files[0].write_bytes(files[1].read_bytes())
    run(script)
    assert run(script)["told"] == []


def test_an_older_kernel_behind_a_newer_index_is_not_run(script: Path) -> None:
    """numba writes the index before the data: a process that dies between leaves the kernel of older sources."""
    run(script)
    older = {path: path.read_bytes() for path in (script.parent / "__pycache__").glob("*.nbc")}
    script.write_text(SOURCE.replace("half(number) * 4", "half(number) * 2 + 20"))
    alone = [["doubled", 0, 1], ["", 1, 1]]  # not `half`, which is as it was
    assert run(script)["told"] == alone  # 10 * 2 + 20 is 40 as well
    for path, data in older.items():
        path.write_bytes(data)
    assert [kernel for kernel, _, _ in run(script)["told"]] == ["doubled", ""]
    assert run(script)["told"] == []
