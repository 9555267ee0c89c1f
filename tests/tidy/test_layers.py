"""The house keeps its shape: who may import whom, what may touch the world, how names are formed."""

from __future__ import annotations

import ast
import graphlib
import itertools
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tidegate"
GROUND = {
    "errors", "clock", "files", "file_locks", "metrics", "notebook", "durations", "config", "randomness", "scheduling",
    "waiting",
}  # fmt: skip
MAY_IMPORT = {
    "ground": {"ground"},
    "kernels": {"ground", "kernels"},
    "log": {"ground", "kernels", "log"},
    "integrity": {"ground", "kernels", "log", "integrity"},
    "storage": {"ground", "kernels", "storage"},
    "windows": {"ground", "kernels", "storage", "windows"},
    "tables": {"ground", "kernels", "log", "integrity", "storage", "windows", "tables"},
    "pipeline": {"ground", "kernels", "log", "integrity", "storage", "windows", "tables", "pipeline"},
    "testing": {
        "ground", "kernels", "log", "integrity", "storage", "windows", "tables", "pipeline", "testing",
    },
    "spark": {
        "ground", "kernels", "log", "integrity", "storage", "windows", "tables", "pipeline", "testing", "spark",
    },
    "web": {"ground", "log", "integrity", "storage", "windows", "tables", "pipeline", "web"},
    "cli": {
        "ground", "kernels", "log", "integrity", "storage", "windows", "tables", "pipeline", "spark", "web", "cli",
    },
}  # fmt: skip
THIRD_PARTY_HOMES = {
    "pyspark": {"spark"},
    "py4j": {"spark"},
    "numba": {"kernels"},
    "click": {"cli"},
    "rich": {"cli"},
    "starlette": {"web"},
    "uvicorn": {"web"},
    "jinja2": {"web"},
    "confluent_kafka": {"log"},
    "matplotlib": {"log"},
    "prometheus_client": {"ground"},
    "obstore": {"storage"},
    "fastavro": {"tables"},
    "duckdb": {"tables", "pipeline"},
}
MODULES = sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    if len(relative.parts) > 1:
        return relative.parts[0]
    return "ground" if relative.stem in GROUND else "public"


@cache
def parsed(path: Path) -> ast.Module:
    """Each file is read once, however many rules look at it."""
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Every module named by an import, function-level ones too, with its line."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.lineno, node.module or ""))
            if node.module == "tidegate":
                found += [(node.lineno, f"tidegate.{alias.name}") for alias in node.names]
    return found


def identify(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_imports_point_up_the_list_of_rooms(path: Path) -> None:
    here = room(path)
    if here == "public":
        return
    for line, module in imports(path):
        if not module.startswith("tidegate."):
            continue
        first = module.split(".")[1]
        target = "ground" if first in GROUND else first
        if target not in MAY_IMPORT:  # a public name taken from the package itself
            continue
        assert target in MAY_IMPORT[here], f"{identify(path)}:{line}: {here} may not import {module}"


def imported_at_start(path: Path) -> set[str]:
    """The modules of tidegate that importing this one imports: not those that functions or types import."""
    found: set[str] = set()
    waiting = list(parsed(path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tidegate"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found & set(NAMES)


NAMES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in MODULES
}


def test_no_module_imports_itself_through_others() -> None:
    graphlib.TopologicalSorter(
        {name: imported_at_start(path) - {name} for name, path in NAMES.items()}
    ).prepare()


def test_no_package_imports_its_neighbour_and_is_imported_by_it() -> None:
    """Folders beside each other: `storage/runs` and `storage/memory`, `tables/versions` and `tables/hybrid`."""
    graph: dict[str, set[str]] = {}
    for name, path in NAMES.items():
        for other in imported_at_start(path):
            here, there = name.split(".")[:-1], other.split(".")[:-1]
            common = sum(
                1
                for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(here, there, strict=False))
            )
            if common < min(len(here), len(there)):
                graph.setdefault(".".join(here[: common + 1]), set()).add(".".join(there[: common + 1]))
    graphlib.TopologicalSorter(graph).prepare()


# Modules and packages of the log, lowest first; each may import those before it. `Log` loads its writer, reader and
# maintenance when they are first used, so that `topic …` loads neither Arrow nor numba; they import `Log` for its type.
LOG_ORDER = (
    "format", "topic_config", "catalog", "locks", "watermark", "batch_file", "seals", "indexes", "segment",
    "producer_state", "fetch", "checkpoints", "append_validation", "segment_roll", "segment_swap", "group_commit",
    "recovery", "partition", "sealer", "open_partitions", "partition_reader", "retention",
    "compaction_plan", "compaction_filter", "compaction", "log", "writer", "reader", "maintenance", "kafka", "dump",
    "verify", "lifetime",
)  # fmt: skip
LOADED_WHEN_USED = {"log": {"writer", "reader", "maintenance", "kafka"}}


@pytest.mark.parametrize("path", sorted((SOURCE / "log").rglob("*.py")), ids=identify)
def test_modules_of_the_log_import_modules_before_them(path: Path) -> None:
    here = path.relative_to(SOURCE / "log").with_suffix("").parts[0]
    for line, module in imports(path):
        if not module.startswith("tidegate.log.") or (there := module.split(".")[2]) == here:
            continue
        assert there in LOADED_WHEN_USED.get(here, ()) or LOG_ORDER.index(there) < LOG_ORDER.index(here), (
            f"{identify(path)}:{line}: {here} may not import {module}"
        )


# What windows, tables and pipelines see of storage: the facade, the port of backends, and tools for columns that
# aggregates and operators share with runs. Whoever needs more wants a new method of the reader or the writer instead.
STORAGE_FACADE = {
    "tidegate.storage",
    "tidegate.storage.backends.base",
    "tidegate.storage.runs.aggregates",
    "tidegate.storage.runs.columns",
}
DEEPER = {
    # Only a master knows which commits count: it collects for all tasks, from what their tokens name.
    ("pipeline/gc.py", "tidegate.storage.manifest"),
}
ABOVE_STORAGE = [path for path in MODULES if room(path) in ("windows", "tables", "pipeline")]


@pytest.mark.parametrize("path", ABOVE_STORAGE, ids=identify)
def test_windows_tables_and_pipelines_see_storage_through_its_facade(path: Path) -> None:
    for line, module in imports(path):
        if module.startswith("tidegate.storage") and (identify(path), module) not in DEEPER:
            assert module in STORAGE_FACADE, f"{identify(path)}:{line}: {module} is not storage's facade"


def test_no_way_around_the_facade_is_allowed_for_nothing() -> None:
    taken = {(identify(path), module) for path in ABOVE_STORAGE for _, module in imports(path)}
    assert taken >= DEEPER
    assert {module for _, module in taken} >= STORAGE_FACADE


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_heavy_or_special_packages_are_imported_in_their_room_only(path: Path) -> None:
    for line, module in imports(path):
        homes = THIRD_PARTY_HOMES.get(module.split(".")[0])
        assert homes is None or room(path) in homes, f"{identify(path)}:{line}: {module} belongs to {homes}"


WORLD = {
    "time.time", "time.time_ns", "time.sleep", "time.monotonic", "time.monotonic_ns", "datetime.now",
    "datetime.utcnow", "os.open", "os.rename", "os.replace", "os.unlink", "os.remove", "os.fsync", "os.mkdir",
    "os.makedirs", "os.rmdir", "os.truncate", "os.utime", "os.listdir", "os.link", "shutil.rmtree",
    "shutil.move", "fcntl.flock", "fcntl.lockf", "uuid.uuid4", "uuid.uuid1", "random.random",
    "random.randint", "threading.Thread",
}  # fmt: skip
PATH_WRITES = {"write_text", "write_bytes", "unlink", "rename", "touch", "rmdir", "symlink_to", "hardlink_to"}
PORTS = {"clock.py", "files.py", "file_locks.py", "randomness.py", "scheduling.py"}


@pytest.mark.parametrize(
    "path", [path for path in MODULES if room(path) in ("ground", "kernels", "log")], ids=identify
)
def test_the_world_is_touched_through_ports_only(path: Path) -> None:
    """Clock, files, chance and threads come in through the constructor, so that a test can fail each one."""
    if path.name in PORTS:
        return
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        where = f"{identify(path)}:{node.lineno}: {name}"
        assert name not in WORLD, f"{where} must go through a port"
        assert name != "open", f"{where} must go through Files"
        if isinstance(node.func, ast.Attribute) and node.func.attr in PATH_WRITES:
            assert "files" in ast.unparse(node.func.value), f"{where} must go through Files"


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_no_stored_byte_can_become_code(path: Path) -> None:
    for line, module in imports(path):
        assert module.split(".")[0] not in {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, (
            f"{identify(path)}:{line}: {module}"
        )
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec"}, f"{identify(path)}:{node.lineno}: {node.func.id}"


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_data_is_never_guarded_by_assert(path: Path) -> None:
    """`python -O` removes asserts; what protects data must stay."""
    found = [node.lineno for node in ast.walk(parsed(path)) if isinstance(node, ast.Assert)]
    assert room(path) == "testing" or not found, f"{identify(path)}: assert at lines {found}"


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_every_module_says_what_it_owns(path: Path) -> None:
    tree = parsed(path)
    if path.name == "__init__.py" and not tree.body:
        return
    assert ast.get_docstring(tree), f"{identify(path)} has no docstring"


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_a_file_is_one_idea(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= 800, f"{identify(path)} has {lines} lines: it is asking to be two"


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_names_say_what_a_thing_is(path: Path) -> None:
    assert path.stem not in {"utils", "helpers", "misc", "common"}, identify(path)
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ClassDef):
            for word in ("Manager", "Helper", "Impl", "Abstract", "Util"):
                assert word not in node.name, f"{identify(path)}:{node.lineno}: class {node.name}"
