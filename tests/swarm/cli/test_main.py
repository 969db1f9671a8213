"""Errors end as one line and an exit code; defaults come from flag, environment, file and code, in that order."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner, Result

import relay.daemon
import swarm
import swarm.cli.relay as relay_command
from swarm.cli import main as main_module
from swarm.cli.bench import commands as bench
from swarm.cli.commands import COMMANDS, load_command
from swarm.cli.main import app, run
from swarm.errors import EngineUnavailable, IntegrityError, NetworkError, SwarmError, UserError


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    for name in ("SWARM_CONFIG", "SWARM_REGISTRY", "SWARM_HOST", "SWARM_GATEWAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(main_module, "set_up_logging", lambda verbosity: None)


# Where errors end


def exit_of(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    """Return exit code and stderr of a command that raises `error`; stdout must stay empty."""

    def fail(**_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(main_module, "app", fail)
    with pytest.raises(SystemExit) as caught:
        run()
    out, err = capsys.readouterr()
    assert out == ""
    return caught.value.code, err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("no such model"), 2),
        (EngineUnavailable("install this"), 2),
        (NetworkError("unreachable"), 1),
        (IntegrityError("a block is damaged"), 1),
        (SwarmError("something"), 1),
        (ExceptionGroup("tasks", [UserError("no such model")]), 2),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [NetworkError("unreachable"), SwarmError("too")])]), 1),
    ],
)
def test_an_error_is_one_line_on_stderr_and_a_code_that_says_whose(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, err = exit_of(error, monkeypatch, capsys)
    assert found == code
    leaf: BaseException = error
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    assert err == f"swarm: {leaf}\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (PermissionError(13, "Permission denied", "/srv/x"), "Permission denied: /srv/x"),
        (OSError("odd"), "odd"),
        (ExceptionGroup("tasks", [OSError(30, "Read-only file system", "/srv/x")]), "Read-only file system: /srv/x"),
    ],
)
def test_an_error_of_the_system_that_nobody_explained_is_one_line_too(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of(error, monkeypatch, capsys) == (1, f"swarm: {line}\n")


def test_a_bug_is_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> NoReturn:
        raise ExceptionGroup("tasks", [OSError(28, "No space left on device"), KeyError("bug")])

    monkeypatch.setattr(main_module, "app", fail)
    with pytest.raises(ExceptionGroup):
        run()


def test_what_another_node_said_cannot_drive_the_terminal_or_fake_a_second_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = exit_of(NetworkError("refused: \x1b[2J[bold]x[/y]\nswarm: all is well\r"), monkeypatch, capsys)
    assert err == "swarm: refused:  [2J[bold]x[/y] swarm: all is well \n"


def test_a_long_message_stays_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = exit_of(UserError("word " * 200 + "end"), monkeypatch, capsys)
    assert err.count("\n") == 1


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (asyncio.CancelledError(), 143)])
def test_a_signal_is_no_error(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of(error, monkeypatch, capsys) == (code, "")


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), ExceptionGroup("tasks", [UserError("mistake"), ValueError("a bug")])]
)
def test_a_bug_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(main_module, "app", fail)
    with pytest.raises(type(error)) as caught:
        run()
    assert caught.value is error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nonsense"], "No such command"),
        (["relay", "--port", "70000"], "65535"),
        (["join"], "--experts"),
        (["relay", "--frobnicate"], "No such option"),
    ],
)
def test_a_wrong_command_line_exits_2(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["swarm", *arguments])
    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert expected in err
    assert out == ""


def test_a_prefix_makes_another_commands_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["relay", "--help"])
    with pytest.raises(SystemExit) as caught:
        run("relay")
    assert caught.value.code == 0
    assert "swarm relay [OPTIONS]" in capsys.readouterr().out


# Help


def invoke(*arguments: str, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "240", "TERM": "dumb"} | (environment or {}))


def test_the_version_is_the_packages() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"swarm {swarm.__version__}\n")


def test_help_lists_every_command_with_what_it_does() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    words = [line.strip("│ ").split() for line in result.stdout.splitlines()]
    for name in COMMANDS:
        assert any(line[:1] == [name] and len(line) > 4 for line in words), name


def test_without_arguments_help_is_shown() -> None:
    assert "Commands" in invoke().output


@pytest.mark.parametrize(
    "path",
    [(name,) for name in COMMANDS if name != "bench"] + [("bench", name) for name in bench.COMMANDS],
    ids=" ".join,
)
def test_every_option_is_explained_and_shows_its_default(path: tuple[str, ...]) -> None:
    shown = " ".join(invoke(*path, "--help").stdout.replace("│", " ").split())
    table = bench.COMMANDS if path[0] == "bench" else COMMANDS
    for parameter in load_command(path[-1], table).params:
        option: Any = parameter
        if option.param_type_name != "option" or option.hidden:
            continue
        assert option.opts[0] in shown
        assert option.help, option.name
        assert option.help.split()[-1].rstrip(".") in shown
        has_default = option.default is not None and not option.is_flag and not option.required
        if has_default:
            text = option.show_default if isinstance(option.show_default, str) else str(option.default)
            assert f"[default: {text}]" in shown or f"[default: ({text})]" in shown, option.name


def test_ports_and_token_counts_say_what_they_count() -> None:
    shown = " ".join(invoke("serve", "--help").stdout.replace("│", " ").split())
    assert "UDP port" in shown
    assert "Tokens of context" in shown
    assert "[default: 127.0.0.1:7440]" in shown
    assert "[env var: SWARM_REGISTRY]" in shown


# config.toml


class _Daemon:
    """Stands in for the relay's daemon and remembers its configuration."""

    config: relay.daemon.RelayConfig | None = None

    def __init__(self, config: relay.daemon.RelayConfig, identity: object) -> None:
        type(self).config = config

    async def run(self, on_ready: object) -> None:
        return None


@pytest.fixture
def _no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay.daemon, "RelayDaemon", _Daemon)
    monkeypatch.setattr(relay_command, "run_daemon", lambda main, until_eof: asyncio.run(main))


def host_of(*arguments: str, environment: dict[str, str] | None = None) -> str:
    result = invoke(*arguments, environment=environment)
    assert result.exit_code == 0, result.output
    assert _Daemon.config is not None
    return _Daemon.config.host


@pytest.mark.usefixtures("_no_daemon")
def test_flag_beats_environment_beats_table_beats_top_level_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "config" / "config.toml"
    file.parent.mkdir()
    environment = {"SWARM_HOST": "10.0.0.2"}
    assert host_of("relay") == "0.0.0.0"
    file.write_text('host = "10.0.0.4"\n')
    assert host_of("relay") == "10.0.0.4"
    file.write_text('host = "10.0.0.4"\n[relay]\nhost = "10.0.0.3"\n[join]\nhost = "10.0.0.9"\n')
    assert host_of("relay") == "10.0.0.3"
    assert host_of("relay", environment=environment) == "10.0.0.2"
    assert host_of("relay", "--host", "10.0.0.1", environment=environment) == "10.0.0.1"


@pytest.mark.usefixtures("_no_daemon")
def test_another_file_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[relay]\nport = 99\nhost = '10.0.0.5'\n")
    assert host_of("--config", str(tmp_path / "mine.toml"), "relay") == "10.0.0.5"
    assert _Daemon.config is not None
    assert _Daemon.config.port == 99
    assert host_of("relay", environment={"SWARM_CONFIG": str(tmp_path / "mine.toml")}) == "10.0.0.5"


@pytest.mark.usefixtures("_no_daemon")
@pytest.mark.parametrize("key", ["until-eof", "until_eof"])
def test_keys_are_the_long_options_with_dashes_or_underscores(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def run_daemon(main: Coroutine[Any, Any, None], *, until_eof: bool) -> None:
        seen.append(until_eof)
        asyncio.run(main)

    monkeypatch.setattr(relay_command, "run_daemon", run_daemon)
    (tmp_path / "c.toml").write_text(f"[relay]\n{key} = true\n")
    host_of("--config", str(tmp_path / "c.toml"), "relay")
    assert seen == [True]


@pytest.mark.usefixtures("_no_daemon")
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[realy]\nport = 1\n", "table for an unknown command: realy"),
        ("[relay]\nprot = 1\n", "table relay of .* unknown option: prot"),
        ("regsitry = 'x'\n", "config.toml sets an unknown option: regsitry"),
        ("[relay\n", "cannot read"),
        ("\udcff", "cannot read"),
    ],
)
def test_a_mistake_in_the_file_is_the_users(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "config" / "config.toml"
    file.parent.mkdir()
    file.write_bytes(content.encode(errors="surrogateescape"))
    result = invoke("relay")
    assert isinstance(result.exception, UserError)
    with pytest.raises(UserError, match=expected):
        raise result.exception


def test_a_top_level_key_counts_for_the_commands_that_know_it(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('registry = "192.0.2.1:7440"\njson = true\n')
    defaults = main_module._defaults(tmp_path / "c.toml")
    assert defaults["peers"] == {"registry": "192.0.2.1:7440", "as_json": True}
    assert defaults["relay"] == {"as_json": True}


@pytest.mark.usefixtures("_no_daemon")
def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    result = invoke("--config", str(tmp_path / "none.toml"), "relay")
    assert isinstance(result.exception, UserError)
    assert "none.toml" in str(result.exception)
