"""``fedsync server register``: what it says of each silo."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsync.cli import app
from fedsync.common.errors import ConfigError
from fedsync.flower.registration import Registered
from fedsync.ops import start
from tests.commands.call import call


def test_register_says_who_is_registered_and_fails_for_who_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("berlin", "paris"):
        (tmp_path / f"{name}.node.pub").touch()
    (tmp_path / "certs").mkdir()
    file = tmp_path / "server.yaml"
    silos = "{berlin: berlin.node.pub, paris: paris.node.pub}"
    file.write_text(f"{{certificates: certs, state: state, silos: {silos}}}\n")
    problem = ConfigError("silos, berlin", "its key was revoked before", "Make another")
    monkeypatch.setattr(start, "register_silos", lambda config: Registered({"berlin": problem}))
    done = CliRunner().invoke(app, ["server", "register", "--server", str(file)])
    assert done.exception is problem and "registered: paris\n" in done.stdout
    monkeypatch.setattr(start, "register_silos", lambda config: Registered())
    assert call("server", "register", "--server", file) == "registered: berlin, paris\n"
