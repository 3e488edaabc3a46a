"""Revoked silos in the file that hubs of active runs read: kills in between, and two writers at once."""

import json
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
