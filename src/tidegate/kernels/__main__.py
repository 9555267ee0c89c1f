"""`python -m tidegate.kernels`: compile every kernel, or find it in the cache, and say how long that took.

Set-up runs it once, so that no later start pays for compiling. Each kernel module of the package counts.
"""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module
from time import perf_counter

import tidegate.kernels
from tidegate.kernels.compiling import load_kernels


def warm() -> list[tuple[str, float]]:
    """Load every kernel of every module; its name and the seconds that took."""
    took = []
    for module in pkgutil.iter_modules(tidegate.kernels.__path__, "tidegate.kernels."):
        if not module.name.endswith("__main__"):
            start = perf_counter()
            load_kernels(import_module(module.name))
            took.append((module.name.rpartition(".")[2], perf_counter() - start))
    return took


def main() -> None:
    took = warm()
    for name, seconds in took:
        sys.stderr.write(f"  {name:<18} {seconds:6.2f} s\n")
    sys.stderr.write(f"{len(took)} kernel modules ready in {sum(seconds for _, seconds in took):.1f} s\n")


if __name__ == "__main__":
    main()
