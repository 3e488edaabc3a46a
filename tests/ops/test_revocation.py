"""Revoked silos in the file that hubs of active runs read: kills in between, and two writers at once."""

import json
import os
import socket
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from fedsync.common.errors import ConfigError
from fedsync.common.files import write_atomically
from fedsync.config.server_start import ServerStartConfig
from fedsync.flower.registration import NODES_FILE, Registered
from fedsync.ops import start
from fedsync.ops.programs import STRUCK_FILE
from fedsync.ops.registration_loop import note_registered, read_registered
from fedsync.server.run_folder import struck_silos


@pytest.fixture
def config(certificates: Path, tmp_path: Path) -> ServerStartConfig:
    return ServerStartConfig(host="127.0.0.1", port=9, certificates=str(certificates), state=str(tmp_path))


def struck(config: ServerStartConfig) -> list[str]:
    found: list[str] = json.loads((Path(config.state) / STRUCK_FILE).read_text())
    return found


def test_a_killed_revocation_leaves_silos_in_no_hub(config: ServerStartConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the SuperLink took the keys back; the next command finds none, and records the revocation."""
    note_registered(Path(config.state), {"rome": "registered"})
    monkeypatch.setattr(start, "revoke_keys", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        start.revoke_silo(config, "rome")
    assert struck(config) == ["rome"]
    monkeypatch.setattr(start, "revoke_keys", lambda *arguments: None)
    start.revoke_silo(config, "rome")
    assert read_registered(Path(config.state)) == {"rome": "revoked"}


def test_a_name_that_was_never_registered_is_refused_and_stays_out_of_the_hubs(
    config: ServerStartConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silo that is registered by hand under this name later would be turned away; and the true one stayed in."""
    monkeypatch.setattr(start, "revoke_keys", lambda *arguments: pytest.fail("nothing is revoked"))
    with pytest.raises(ConfigError, match=r"under 'roma'\. Check the name; registered were: none"):
        start.revoke_silo(config, "roma")
    note_registered(Path(config.state), {"rome": "registered"})
    known = [{"name": name, "key": "00", "node": "1"} for name in ("paris", "rome")]
    (Path(config.state) / NODES_FILE).write_text(json.dumps(known))
    with pytest.raises(ConfigError, match="registered were: paris, rome"):
        start.revoke_silo(config, "roma")
    assert not (Path(config.state) / STRUCK_FILE).exists()


def test_two_revocations_at_once_are_both_kept(config: ServerStartConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    note_registered(Path(config.state), {"rome": "registered", "paris": "registered"})
    monkeypatch.setattr(start, "revoke_keys", lambda *arguments: None)
    others = list[threading.Thread]()

    def slow(path: Path, data: bytes, mode: int) -> None:
        """Writes what the first command has read, after a second command had time for all that it does."""
        if not others:
            others.append(threading.Thread(target=start.revoke_silo, args=(config, "rome")))
            others[0].start()
            others[0].join(0.5)
        write_atomically(path, data, mode)

    monkeypatch.setattr(start, "write_atomically", slow)
    start.revoke_silo(config, "paris")
    others[0].join()
    assert struck(config) == ["paris", "rome"]


def test_a_silo_that_is_registered_again_comes_back(
    config: ServerStartConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    note_registered(Path(config.state), {"rome": "registered"})
    monkeypatch.setattr(start, "revoke_keys", lambda *arguments: None)
    start.revoke_silo(config, "rome")
    monkeypatch.setattr(start, "register_each", lambda *arguments: Registered())
    start.register_silos(config.model_copy(update={"silos": {"rome": str(tmp_path / "rome.node.pub")}}))
    assert struck(config) == []


def test_a_damaged_file_of_revoked_silos_is_named_with_its_remedy(config: ServerStartConfig) -> None:
    """Neither the command nor a hub may go on as if no silo was revoked."""
    note_registered(Path(config.state), {"rome": "registered"})
    (Path(config.state) / STRUCK_FILE).write_text('["par')
    with pytest.raises(ConfigError, match=rf"{STRUCK_FILE}: cannot be read: .*Remove it, and repeat"):
        start.revoke_silo(config, "rome")
    with pytest.raises(ConfigError, match="cannot be read"):
        struck_silos(Path(config.state) / STRUCK_FILE)


def test_a_running_server_does_not_register_a_silo_that_was_revoked(
    config: ServerStartConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It knows the file that it was started with, and tries a key that was refused again every minute."""
    asked = list[set[str]]()
    monkeypatch.setattr(start, "register_each", lambda keys, *arguments: asked.append(set(keys)) or Registered())
    monkeypatch.setattr(start, "revoke_keys", lambda *arguments: None)
    note_registered(tmp_path, {"rome": "its key could not be registered"})
    start.revoke_silo(config, "rome")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        files = {name: str(tmp_path / f"{name}.node.pub") for name in ("rome", "paris")}
        started = config.model_copy(update={"silos": files, "port": listener.getsockname()[1]})
        assert start._register_if_up(started, ["rome", "paris"]) == Registered()
    assert asked == [{"paris"}] and struck(config) == ["rome"]
    assert read_registered(tmp_path) == {"rome": "revoked", "paris": "registered"}


def test_root_changes_nothing_in_the_state_of_another_user(
    config: ServerStartConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server could not read what root wrote: its hubs would keep the silo, and let nobody in."""
    note_registered(tmp_path, {"rome": "registered"})
    tmp_path.chmod(0o755)  # where root runs the tests: a closed folder of root counts as anybody's own
    before, me = sorted(tmp_path.iterdir()), os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: me + 1)
    for changes in (lambda: start.revoke_silo(config, "rome"), lambda: start.register_silos(config)):
        with pytest.raises(ConfigError, match=rf"belongs to user {me}, .* Run the command as user {me}"):
            changes()
    assert sorted(tmp_path.iterdir()) == before
