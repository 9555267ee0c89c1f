"""`python -m tidegate.kernels`: compile every kernel that is in no cache, and show the progress.

Set-up and image builds run it once, so that no later start waits for compiling. There is one process for each core.
`--check` compiles nothing: it prints, as JSON, how many kernels there are and are compiled, the folders
that have them, and the folder that would get the others (null where none can be written).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pkgutil
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import tidegate.kernels
from tidegate.kernels.jit import all_kernels, compile_kernels, kernels_to_compile, load_kernels
from tidegate.kernels.kernel_cache import folder_to_write

PACKAGE = Path(tidegate.kernels.__file__).parent
TOLD_EVERY = 20  # kernels


def warm() -> list[tuple[str, float]]:
    """Load every kernel of every module; its name and the seconds that took."""
    took = []
    for name in _module_names():
        start = perf_counter()
        load_kernels(import_module(name))
        took.append((name.rpartition(".")[2], perf_counter() - start))
    return took


def check() -> dict[str, Any]:
    """What is compiled for this machine and in which folders; nothing is compiled or loaded."""
    for name in _module_names():
        import_module(name)
    found = [each.where() for each in all_kernels() if each.__module__.startswith("tidegate.kernels.")]
    to = folder_to_write(PACKAGE)
    return {
        "kernels": len(found),
        "compiled": sum(folder is not None for folder in found),
        "folders": sorted({str(folder) for folder in found if folder is not None}),
        "to": None if to is None else str(to),
    }


def main(arguments: list[str]) -> int:
    """Exit codes: 0 all are ready and kept, 2 wrong usage, 3 some could not be kept."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python -m tidegate.kernels [--check]\n")
        return 2
    before = check()
    if arguments:
        sys.stdout.write(json.dumps(before) + "\n")
        return 0
    start = perf_counter()
    if missing := before["kernels"] - before["compiled"]:
        sys.stderr.write(
            f"compiling {missing} of {before['kernels']} kernels into {before['to'] or 'no folder'}\n"
        )
        _compile_side_by_side(missing, start)
    after = check()
    sys.stderr.write(f"{after['kernels']} kernels ready in {perf_counter() - start:.1f} s\n")
    if unkept := after["kernels"] - after["compiled"]:
        sys.stderr.write(
            f"error: {unkept} of them could not be kept; set NUMBA_CACHE_DIR to a folder that this user can write, "
            "and run this again\n"
        )
        return 3
    return 0


def _compile_side_by_side(missing: int, start: float) -> None:
    """Compile every kernel that is in no cache, in as many processes as there are cores."""
    groups = [group for group in kernels_to_compile() if group[0][0].startswith("tidegate.kernels.")]
    done = told = 0
    workers = min(os.cpu_count() or 1, len(groups))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for ended in as_completed([pool.submit(compile_kernels, group) for group in groups]):
            names = ended.result()
            done += len(names)
            if sys.stderr.isatty():
                line = f"{done:>4} of {missing}  {perf_counter() - start:6.1f} s  {names[0][1]}"
                sys.stderr.write(f"\r  {line:<60}" + ("\n" if done == missing else ""))
            elif done - told >= TOLD_EVERY:
                told = done
                sys.stderr.write(f"  {done:>4} of {missing}  {perf_counter() - start:6.1f} s\n")
            sys.stderr.flush()


def _module_names() -> list[str]:
    found = pkgutil.iter_modules(tidegate.kernels.__path__, "tidegate.kernels.")
    return [module.name for module in found if not module.name.endswith("__main__")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
