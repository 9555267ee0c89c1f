"""`MODULE:app` on a command line: the app a Python module or file defines.

    tidegate run shop.pipeline:app        a module on the path, or in the working folder
    tidegate run pipelines/shop.py:app    a file
    tidegate run shop                     the only App there is in it

The folder it was found in is put into PYTHONPATH too, so that Spark's Python workers find the same module.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tidegate.errors import InvalidError, TidegateError

if TYPE_CHECKING:
    from tidegate.pipeline.definition.app import App


def load_app(where: str) -> App:
    """The app that `where` names, or `InvalidError` that says what is there instead."""
    from tidegate.pipeline.definition.app import App

    place, _, name = where.partition(":")
    module = _load(place)
    apps = {key: value for key, value in vars(module).items() if isinstance(value, App)}
    if name:
        if name in apps:
            return apps[name]
        if hasattr(module, name):
            raise InvalidError(f"{where}: {name} is a {type(getattr(module, name)).__name__}, not an App")
        near = get_close_matches(name, apps, 1)
        raise InvalidError(
            f"{place} has no {name}"
            + (f"; did you mean {place}:{near[0]}?" if near else _listed(place, apps))
        )
    different = {id(app): key for key, app in apps.items()}
    if len(different) != 1:
        raise InvalidError(f"{place} does not say which app to take" + _listed(place, apps))
    return apps[next(iter(different.values()))]


def _load(place: str) -> ModuleType:
    if not place:
        raise InvalidError("which app? Say MODULE:app, like shop.pipeline:app, or a file, like shop.py:app")
    path = Path(place)
    if path.suffix == ".py":
        if not path.is_file():
            raise InvalidError(f"there is no file {place}")
        folder, name = path.resolve().parent, path.stem
    else:
        folder, name = Path.cwd(), place
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(folder), *filter(None, known)]))
    try:
        return importlib.import_module(name)
    except TidegateError:
        raise
    except (Exception, SystemExit) as error:  # the user's code: it may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name is not None and name.startswith(error.name):
            raise InvalidError(
                f"there is no module {name}; run this in the folder it lies in, or name the file: {name}.py:app"
            ) from None
        raise InvalidError(f"{place} cannot be imported: {_said(error, folder)}") from error


def _said(error: BaseException, folder: Path) -> str:
    """An error of the user's module in one line, with the place in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(error, SyntaxError):  # says the place itself
        return said
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(folder) and "site-packages" not in frame.filename
    ]
    return f"{said} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else said


def _listed(place: str, apps: dict[str, App]) -> str:
    if not apps:
        return "; it defines no App. An app is made with tidegate.App(…)"
    return "; it has " + ", ".join(f"{place}:{name}" for name in sorted(apps))
