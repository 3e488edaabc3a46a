"""``fedsync code``: a reviewer signs a folder, and whoever asks sees what was signed and by whom."""

import subprocess
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from tests.commands.call import call


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with keys of two reviewers, as ssh-keygen makes them."""
    for name in ("alice", "bob"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"{name}@hospital", "-f", tmp_path / name]
        subprocess.run(command, check=True)
    return tmp_path


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "app.py").write_text("value = 1\n")
    return folder


@pytest.mark.slow
def test_two_reviewers_sign_and_a_change_is_found(code: Path, keys: Path) -> None:
    with pytest.raises(ConfigError, match="no reviewer signed this code"):
        call("code", "verify", code)
    for count, name in enumerate(("alice", "bob"), start=1):
        assert f"with {count} signatures" in call("code", "sign", code, "--key", keys / name)
    found = call("code", "verify", code, "--reviewer", keys / "alice.pub", "--reviewer", keys / "bob.pub")
    assert found.count("signed by ssh-ed25519") == 2 and found.endswith("ok   1 files are as they were signed\n")
    (code / "later.py").write_text("value = 2\n")
    with pytest.raises(SystemExit):
        call("code", "verify", code)
    assert "with 1 signatures" in call("code", "sign", code, "--key", keys / "bob"), "alice signed other code"
    with pytest.raises(SystemExit):
        call("code", "verify", code, "--reviewer", keys / "alice.pub")


def test_mistakes_are_named(code: Path, keys: Path) -> None:
    with pytest.raises(ConfigError, match="ssh-keygen"):
        call("code", "sign", code, "--key", code / "app.py")
    with pytest.raises(ConfigError, match="no Python file"):
        (keys / "empty").mkdir()
        call("code", "sign", keys / "empty", "--key", keys / "alice")
    with pytest.raises(ConfigError, match="no such folder"):
        call("code", "verify", keys / "none")
    (code / "code-review.json").write_text("{")
    with pytest.raises(ConfigError, match="the review is damaged"):
        call("code", "verify", code)
