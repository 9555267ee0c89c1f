"""PySpark's private names are in one module, which says what versions it knows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tidegate.errors import UnavailableError
from tidegate.spark import compat

SOURCE = Path(__file__).parents[2] / "src" / "tidegate"
PUBLIC = {
    "pyspark": {"SparkContext", "SparkFiles", "TaskContext"},
    "pyspark.core.rdd": {"RDD"},
    "pyspark.errors": {"AnalysisException", "ParseException", "PySparkException"},
    "pyspark.sql": {"Column", "DataFrame", "SparkSession", "functions"},
    "pyspark.sql.types": {"StructType"},
}
"""What other modules may import; of `datasource` everything that has no underscore."""
OTHERS = sorted(path for path in SOURCE.rglob("*.py") if path.name != "compat.py")


def private_names(tree: ast.Module) -> list[str]:
    """What a module uses of PySpark that is not public."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.partition(".")[0] in ("pyspark", "py4j")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in (
            "pyspark",
            "py4j",
        ):
            module, names = node.module or "", {each.name for each in node.names}
            public = PUBLIC.get(module, set())
            if module.endswith(".datasource"):
                public = {name for name in names if not name.startswith("_")}
            found += [f"{module}.{name}" for name in names - public]
        elif isinstance(node, ast.Attribute) and re.match(
            r"_j(vm|sc|rdd|df|context|sparkSession)", node.attr
        ):
            found.append(node.attr)
    return found


def test_no_other_module_uses_what_pyspark_keeps_to_itself() -> None:
    found = {path.name: names for path in OTHERS if (names := private_names(ast.parse(path.read_text())))}
    assert found == {}


def test_the_module_itself_would_be_found() -> None:
    names = private_names(ast.parse(Path(compat.__file__).read_text()))
    assert {"pyspark.core.rdd.PipelinedRDD", "py4j.protocol.Py4JError", "_jvm"} <= set(names)


@pytest.mark.parametrize("version", ["4.1.0", "3.5.6", "4.4.0.dev1", "5.0.0"])
def test_another_version_is_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(UnavailableError, match=rf"this is {version}; run: pip install 'pyspark>=4.2,<4.4'"):
        compat.check_version(version)


def test_the_versions_are_those_of_the_package() -> None:
    declared = (SOURCE.parents[1] / "pyproject.toml").read_text()
    assert '"pyspark>=4.2,<4.4"' in declared
    for version in ("4.2.0", "4.3.0", "4.3.1.dev0"):
        compat.check_version(version)
