"""``fedsync silo unlock``: what happened, and the silo takes part again."""

from pathlib import Path

import pytest

from fedsync.cipher.keys.authority import emulated_keys
from fedsync.cipher.keys.keyring import open_ring
from fedsync.common.errors import ConfigError
from fedsync.silo.owner.lockout import COUNT, Lockout
from tests.commands.call import call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return emulated_keys(["berlin"], tmp_path / "keys", 1, lambda: b"context").silos["berlin"]


def silo(tmp_path: Path, folder: Path | None) -> Path:
    file = tmp_path / "silo.yaml"
    keys = "" if folder is None else f", keys: {folder}"
    file.write_text(f"{{name: berlin, server: 'x:1', insecure: true, state: /tmp/s{keys}}}")
    return file


def test_a_silo_is_unlocked_and_told_what_happened(tmp_path: Path, folder: Path) -> None:
    lockout = Lockout(open_ring(folder))
    for number in range(3):
        lockout.count(f"forgery {number}")
    told = call("silo", "unlock", "--silo", silo(tmp_path, folder))
    assert [line.partition(" ")[2] for line in told.splitlines()[:3]] == ["forgery 0", "forgery 1", "forgery 2"]
    assert "silo berlin is open" in told
    lockout.check()
    assert "forgery" not in call("silo", "unlock", "--silo", silo(tmp_path, folder))


def test_a_damaged_count_is_replaced(tmp_path: Path, folder: Path) -> None:
    Lockout(open_ring(folder))
    (folder / COUNT).unlink()
    assert "missing or damaged" in call("silo", "unlock", "--silo", silo(tmp_path, folder))
    Lockout(open_ring(folder)).check()


def test_a_silo_without_keys_has_nothing_to_unlock(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a silo without keys is never locked"):
        call("silo", "unlock", "--silo", silo(tmp_path, None))
