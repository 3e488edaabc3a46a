"""What only the server's user can read: the secret of operators, and the tokens of apps."""

import resource
import stat
import sys
from argparse import Namespace
from pathlib import Path
from subprocess import PIPE

import pytest
from flwr.cli.auth_plugin import OidcCliPlugin
from flwr.cli.utils import get_authn_type
from flwr.common.constant import ACCESS_TOKEN_KEY
from flwr.supercore.constant import TaskType
from flwr.supercore.credential_store import file_credential_store
from flwr.supercore.superexec.executor import ExecutionSpec, SubprocessExecutor, subprocess_executor

from fedsync.common import processes
from fedsync.config.server_start import ServerStartConfig
from fedsync.core.errors import ConfigError
from fedsync.flower.internals import tokens
from fedsync.flower.internals.operator import (
    CREDENTIALS_FILE,
    OPERATOR_FILE,
    make_secret,
    read_secret,
    write_credentials,
)
from fedsync.ops import start


@pytest.fixture
def state(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    make_secret(tmp_path)
    return tmp_path


def test_the_secret_is_made_once_and_is_its_owners(state: Path) -> None:
    secret = read_secret(state)
    assert len(secret) == 64 and stat.S_IMODE((state / OPERATOR_FILE).stat().st_mode) == 0o600
    make_secret(state)
    assert read_secret(state) == secret and [path.name for path in state.iterdir()] == [OPERATOR_FILE]


def test_one_that_is_made_meanwhile_stays(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = read_secret(state)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    make_secret(state)
    assert read_secret(state) == secret and [path.name for path in state.iterdir()] == [OPERATOR_FILE]


def test_who_cannot_read_it_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Run the command as the user of the server"):
        read_secret(tmp_path)
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError):
        make_secret(tmp_path / "open")


def test_flowers_own_command_line_shows_the_secret(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_credentials(state, "127.0.0.1:9092")
    assert stat.S_IMODE((state / CREDENTIALS_FILE).stat().st_mode) == 0o600
    monkeypatch.setattr(file_credential_store, "CREDENTIAL_FILE_PATH", state / CREDENTIALS_FILE)
    assert get_authn_type("127.0.0.1:9092") == "oidc" and get_authn_type("127.0.0.1:9093") != "oidc"
    plugin = OidcCliPlugin("127.0.0.1:9092")
    plugin.load_tokens()
    assert dict(plugin.write_tokens_to_metadata([]))[ACCESS_TOKEN_KEY] == read_secret(state)


def test_an_apps_token_is_not_on_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(command: list[str], **options: object) -> object:
        seen.append((command, options))
        return None

    monkeypatch.setattr(subprocess_executor, "subprocess", subprocess_executor.subprocess)
    tokens.hide_tokens()
    monkeypatch.setattr(tokens.subprocess, "Popen", noted)
    spec = ExecutionSpec(TaskType.SERVER_APP, "127.0.0.1:1", "c0ffee", True, None, False, 5, False, 1)
    SubprocessExecutor().launch(spec)
    ((command, options),) = seen
    assert "c0ffee" not in " ".join(command) and "--parent-pid" in command
    assert command[command.index("--token-file") + 1] == f"/proc/self/fd/{options['pass_fds'][0]}"


def test_an_app_reads_its_token() -> None:
    code = (
        "import sys; from argparse import Namespace; from flwr.common.args import try_obtain_flwr_app_token as token; "
        "print(sys.argv[1:], token(Namespace(token=None, token_file=sys.argv[2])))"
    )
    app = tokens.start_without_token([sys.executable, "-c", code, "--token", "c0ffee", "--insecure"], stdout=PIPE)
    said = app.communicate(timeout=60)[0].decode()
    assert "--token-file" in said and "'--insecure'" in said and said.endswith("] c0ffee\n") and said.count("c0f") == 1


@pytest.mark.parametrize(
    ("limits", "files", "change"),
    [((1024, 4096), 4096, (4096, 4096)), ((1024, 10**9), 65536, (65536, 10**9)),
     ((1024, resource.RLIM_INFINITY), 65536, (65536, resource.RLIM_INFINITY)),
     ((256, 256), 256, None), ((10**6, 10**9), 10**6, None)],
)  # fmt: skip
def test_a_server_has_as_many_files_as_it_may(
    limits: tuple[int, int], files: int, change: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[tuple[int, int]] = []
    monkeypatch.setattr(processes, "resource", Namespace(
        getrlimit=lambda kind: limits, setrlimit=lambda kind, pair: changes.append(pair),
        RLIMIT_NOFILE=resource.RLIMIT_NOFILE, RLIM_INFINITY=resource.RLIM_INFINITY,
    ))  # fmt: skip
    assert processes.raise_file_limit() == files
    assert changes == ([] if change is None else [change])


@pytest.mark.parametrize(("files", "warns"), [(256, True), (4096, False)])
def test_the_operator_hears_of_too_few_files(
    files: int, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start, "raise_file_limit", lambda: files)
    start._have_files(ServerStartConfig(insecure=True, state="s"))
    assert ("at most 176 connections instead of 1000; raise LimitNOFILE" in caplog.text) is warns
