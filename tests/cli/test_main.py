"""The command itself: help, exit codes, one-line errors, and what it does not load."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.cli import main as main_module
from tidegate.cli.main import COMMANDS, run
from tidegate.errors import ConflictError, CorruptError, InvalidError, OverloadError, TidegateError

HEAVY = ("numba", "pyarrow", "pandas", "pyspark", "confluent_kafka", "matplotlib", "rich")


def tidegate(*arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidegate.cli.main", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("topic", "--help"),
        ("topic", "create", "--help"),
        ("log", "--help"),
        ("produce", "--help"),
        ("consume", "--help"),
        ("topic", "create", "orders", "-p", "2"),
        ("topic", "list"),
        ("topic", "describe", "orders"),
        ("topic", "alter", "orders", "-X", "retention=1h"),
        ("topic", "delete", "orders", "--yes"),
    ],
    ids=" ".join,
)
def test_light_verbs_load_nothing_heavy(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    script = (
        "import sys\n"
        "from tidegate.cli.main import run\n"
        "if sys.argv[1:2] == ['topic'] and sys.argv[2] not in ('create', '--help'):\n"
        "    run(['topic', 'create', 'orders', '--if-not-exists'])\n"
        "code = run(sys.argv[1:])\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TIDEGATE_LOG": str(tmp_path / "log")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_help_lists_every_verb_and_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for verb in COMMANDS:
        assert verb in text
    for code in (
        "0 fine",
        "1 a check",
        "2 wrong",
        "3 out of reach",
        "4 conflict",
        "5 corrupt",
        "130 interrupted",
    ):
        assert code in text
    for command in (["topic", "create"], ["produce"], ["consume"]):
        assert run([*command, "--help"]) == 0
        assert "Exit codes:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["topik"], "did you mean topic?"),
        (["zzz"], "there are topic, produce"),
        (["log", "dumb"], "did you mean dump?"),
        (["topic", "create"], "Missing argument"),
        (["break", "orders"], "Missing option '--kind'. Choose from: drop, repeat, flip, swap"),
        (["completion"], "Choose from: bash, zsh, fish (see tidegate completion --help)"),
        (["topic", "list", "--formt", "json"], "--formt"),
        (["topic", "create", "a", "-X", "nonsense"], "KEY=VALUE"),
        (["topic", "create", "a", "--log", "x", "--bootstrap-server", "y:1"], "keep one"),
        (["topic", "create", "a", "--log", "ftp://x"], "kafka://HOST:PORT"),
    ],
)
def test_wrong_usage_is_one_line_with_a_hint_and_exit_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")


def test_help_of_a_group_has_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["table", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Delete a version that is not shown: its topic, its files, its line in the list." in said
    assert "..." not in said.partition("Commands:")[2]


@pytest.mark.parametrize("command", [["topic", "delete", "a"], ["app", "reset", "a"], ["app", "replay", "a"]])
def test_a_question_that_nobody_can_answer_names_the_option(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIDEGATE_LOG", str(tmp_path / "log"))
    assert run(["topic", "create", "a"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run(command) == 2
    assert "add --yes" in capsys.readouterr().err


def test_client_settings_that_are_no_text_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "client").write_bytes(b"a=\xff\n")
    assert run(["topic", "list", "--command-config", str(tmp_path / "client")]) == 2
    assert "not UTF-8 at byte 2" in capsys.readouterr().err


def test_a_group_alone_shows_its_help_and_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["log"]) == 2
    assert "dump" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TidegateError("a fault"), 1),
        (OverloadError("slow down"), 3),
        (ConflictError("held", kafka_name="CONCURRENT"), 4),
        (CorruptError("bad bytes"), 5),
        (FileNotFoundError(2, "No such file or directory", "/x/y"), 3),
        (PermissionError(13, "Permission denied"), 3),
        (MemoryError(), 3),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 0),
        (RuntimeError("two\nlines\x1b[31m"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_ends_with_its_exit_code_and_at_most_one_line(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(main_module.cli, "main", fail)
    monkeypatch.setattr(main_module, "_forget_stdout", lambda: None)
    monkeypatch.delenv("TIDEGATE_DEBUG", raising=False)
    assert run([]) == code
    told = capsys.readouterr().err
    assert told.count("\n") == (0 if code in (0, 130) else 1)
    assert "Traceback" not in told
    assert "\x1b" not in told


def test_a_fault_of_ours_can_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("inside")

    monkeypatch.setattr(main_module.cli, "main", fail)
    monkeypatch.setenv("TIDEGATE_DEBUG", "1")
    with pytest.raises(RuntimeError, match="inside"):
        run([])


def test_a_closed_pipe_is_silent(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    assert tidegate("topic", "create", "t", TIDEGATE_LOG=log).returncode == 0
    lines = "".join(f"value {number}\n" for number in range(50_000))
    assert tidegate("produce", "t", "-q", "--durability", "os", text=lines, TIDEGATE_LOG=log).returncode == 0
    shell = f"{sys.executable} -m tidegate.cli.main consume t -e -q | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", shell],
        capture_output=True,
        text=True,
        env={**os.environ, "TIDEGATE_LOG": log},
        timeout=600,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0"


def test_sigterm_closes_the_log_properly(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {**os.environ, "TIDEGATE_LOG": str(log)}
    tidegate("topic", "create", "t", TIDEGATE_LOG=str(log))
    with subprocess.Popen(
        [sys.executable, "-m", "tidegate.cli.main", "produce", "t", "-v"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as child:
        assert child.stdin is not None and child.stderr is not None
        child.stdin.write("one\n")
        child.stdin.flush()
        assert "wrote t-0" in child.stderr.readline()
        child.send_signal(signal.SIGTERM)
        told = child.stderr.read()
        assert child.wait(60) == 143
    assert "wrote 1 record " in told
    assert (log / ".kafka_cleanshutdown").exists()


@pytest.mark.parametrize("variable", ["", "1"])
def test_the_log_is_named_by_option_then_environment_then_default(tmp_path: Path, variable: str) -> None:
    environment = {"TIDEGATE_LOG": str(tmp_path / "env")} if variable else {"TIDEGATE_LOG": ""}
    done = subprocess.run(
        [sys.executable, "-m", "tidegate.cli.main", "topic", "create", "t"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ("env" if variable else "data/log") / "t-0").is_dir()


def test_a_refusal_of_several_lines_keeps_them_and_neutralises_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise InvalidError("this cannot run:\n  orders: no topic\n  users: \x1b[31mno topic")

    monkeypatch.setattr(main_module.cli, "main", fail)
    assert run([]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == ["error: this cannot run:", "  orders: no topic"]
    assert len(told) == 3 and "\x1b" not in told[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "shop", "--onec"], "'--onec'. Did you mean '--once'?"),
        (["run", "shop", "-once"], "'-once'. Did you mean '--once'?"),
        (["run", "--onec"], "'--onec'"),
        (["run", "shop", "--trigger", "1x"], "'--trigger': '1x' is not a duration"),
        (["log", "clean", "--every", "soon"], "'--every': 'soon' is not a duration"),
        (["produce", "t", "--batch-bytes", "many"], "'--batch-bytes': 'many' is not"),
        (["consume", "t", "--partitoin", "1"], "'--partitoin'"),
        (["topic", "describe", "t", "-overides"], "'-overides'. Did you mean '--overrides'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_misspelt_option_and_a_wrong_value_name_the_option(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_asks_tidegate(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_TIDEGATE_COMPLETE" in script and "tidegate" in script
    assert run(["completion", "tcsh"]) == 2


def test_bash_completes_commands_and_options() -> None:
    def completed(words: str, place: int) -> list[str]:
        done = tidegate(COMP_WORDS=words, COMP_CWORD=str(place), _TIDEGATE_COMPLETE="bash_complete")
        assert done.returncode == 0, done.stderr
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert completed("tidegate top", 1) == ["topic"]
    assert completed("tidegate topic de", 2) == ["delete", "delete-records", "describe"]
    assert "--once" in completed("tidegate run --on", 2)
    assert completed("tidegate run --engine ", 3) == ["auto", "spark", "local"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_the_script_for_bash_is_one_that_bash_takes() -> None:
    script = tidegate("completion", "bash").stdout
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr


def test_warnings_of_the_library_are_lines_and_quiet_leaves_them_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import logging

    from tidegate.cli import topic

    real = topic.opened

    def warned(*given: object, **settings: object) -> object:
        logging.getLogger("tidegate.log").warning("one\x1b[31m record")
        return real(*given, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(topic, "opened", warned)
    run(["topic", "list", "--log", "nowhere"])
    assert capsys.readouterr().err.splitlines()[0] == r"warning: one\x1b[31m record"
    run(["topic", "list", "--log", "nowhere", "-q"])
    assert "warning" not in capsys.readouterr().err
    assert logging.getLogger("tidegate").handlers == []
