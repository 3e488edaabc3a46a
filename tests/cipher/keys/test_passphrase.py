"""Key files under a passphrase: what is on disk tells nothing, and who knows the passphrase works as before."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsync.cipher.keys import passphrase
from fedsync.cipher.keys.authority import ADMINISTRATOR_FILE, issue, new_authority, open_authority, rotate
from fedsync.cipher.keys.key_files import set_passphrase
from fedsync.cipher.keys.keyring import GROUP_FILE, SILO_FILE, accept, new_silo, open_ring
from fedsync.cipher.keys.keywrap import announce
from fedsync.commands.keys import app
from fedsync.common.errors import ConfigError
from tests.cipher.given_keys import some_context
from tests.commands.call import call

WORDS = "correct horse"


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cheap scrypt, and nobody who knows the passphrase."""
    monkeypatch.setattr(passphrase, "_COST", 4)
    monkeypatch.delenv(passphrase.DEFAULT, raising=False)
    monkeypatch.delenv(passphrase.NAMED_BY, raising=False)
    monkeypatch.setitem(sys.modules, "keyring", None)
    token = passphrase.GIVEN.set(None)
    yield
    passphrase.GIVEN.reset(token)


def folders(home: Path) -> tuple[Path, Path]:
    """An administrator and a silo that accepted its bundle."""
    admin, silo = home / "admin", home / "silo"
    public = new_authority(admin, new_context=some_context)
    line = announce(new_silo(silo, "a")).encode()
    accept(silo, issue(admin, [("a", line)], some_context).bundles["a"].read_bytes(), public)
    return admin, silo


def test_a_folder_with_a_passphrase_opens_and_stays_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    admin, silo = folders(tmp_path)
    ring, held = open_ring(silo), open_authority(admin)
    before = {path: path.read_bytes() for folder in (admin, silo) for path in folder.glob("*.key")}
    assert {path.name for path in before} == {ADMINISTRATOR_FILE, SILO_FILE, GROUP_FILE}
    for folder in (admin, silo):
        set_passphrase(folder, WORDS)
    for path, plain in before.items():
        sealed = path.read_bytes()
        assert passphrase.is_sealed(sealed) and b"fedsync" not in sealed and plain[40:60] not in sealed
        assert path.stat().st_mode & 0o777 == 0o600
    for name, words in ((None, ""), (passphrase.DEFAULT, "wrong")):
        if name is not None:
            monkeypatch.setenv(name, words)
        with pytest.raises(ConfigError, match=r"none was given.*FEDSYNC_PASSPHRASE|the passphrase is wrong"):
            open_ring(silo)
    monkeypatch.setenv(passphrase.NAMED_BY, "MY_WORDS")
    monkeypatch.setenv("MY_WORDS", WORDS)
    assert open_ring(silo) == ring and open_authority(admin) == held
    accept(silo, rotate(admin, (), some_context).bundles["a"].read_bytes())
    assert open_ring(silo).group.epoch == 2
    assert all(passphrase.is_sealed(path.read_bytes()) for path in before), "what is written anew is sealed, too"
    assert set_passphrase(silo, None) and open_ring(silo).group.epoch == 2
    monkeypatch.delenv("MY_WORDS")
    assert open_ring(silo).own == ring.own


def test_the_systems_keyring_may_know_it_and_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, silo = folders(tmp_path)
    set_passphrase(silo, WORDS)
    asked = []

    def get_password(service: str, user: str) -> str:
        asked.append((service, user))
        return WORDS

    monkeypatch.setitem(sys.modules, "keyring", SimpleNamespace(get_password=get_password))
    assert open_ring(silo).own.name == "a"
    assert set(asked) == {("fedsync", str(silo.resolve()))}
    monkeypatch.setattr(passphrase, "_KEYRING_S", 0.05)
    hangs = SimpleNamespace(get_password=lambda *_: time.sleep(5))
    monkeypatch.setitem(sys.modules, "keyring", hangs)
    with pytest.raises(ConfigError, match="none was given"):
        open_ring(silo)


@pytest.mark.parametrize("place", [0, 11, 12, 40, 60, -1])
def test_a_changed_file_does_not_open(place: int) -> None:
    sealed = bytearray(passphrase.seal_file(b"secret", WORDS))
    assert passphrase.open_file(bytes(sealed), WORDS, Path("k")) == b"secret"
    assert bytes(sealed) != passphrase.seal_file(b"secret", WORDS), "a salt of its own"
    sealed[place] ^= 1
    with pytest.raises(ConfigError, match="wrong, or the file is damaged"):
        passphrase.open_file(bytes(sealed), WORDS, Path("k"))
    for cut in (0, 11, 30, len(sealed) - 1):
        with pytest.raises(ConfigError):
            passphrase.open_file(bytes(sealed[:cut]), WORDS, Path("k"))


def test_a_file_may_not_ask_for_any_amount_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = bytearray(passphrase.seal_file(b"secret", WORDS))
    sealed[11] = 60
    monkeypatch.setattr(passphrase, "_key", lambda *_: pytest.fail("scrypt was asked"))
    with pytest.raises(ConfigError):
        passphrase.open_file(bytes(sealed), WORDS, Path("k"))


def test_commands_take_it_from_a_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def given(words: str) -> int:
        reader, writer = os.pipe()
        os.write(writer, words.encode())
        os.close(writer)
        return reader

    silo = tmp_path / "silo"
    call("silo", "a", "--dir", silo, "--passphrase-fd", given(f"{WORDS}\n"), app=app)
    assert passphrase.is_sealed((silo / SILO_FILE).read_bytes())
    passphrase.GIVEN.set(None)
    with pytest.raises(ConfigError, match="none was given"):
        call("silo", "a", "--dir", silo, app=app)
    monkeypatch.setenv(passphrase.DEFAULT, WORDS)
    call("silo", "a", "--dir", silo, app=app)
    assert "encrypted with the passphrase" in call("encrypt", silo, "--passphrase-fd", given("another"), app=app)
    monkeypatch.setenv(passphrase.DEFAULT, "another")
    assert "unencrypted" in call("decrypt", silo, app=app)
    assert not passphrase.is_sealed((silo / SILO_FILE).read_bytes())
    for words in ("", "\n"):
        with pytest.raises(ConfigError, match="the passphrase is empty"):
            call("encrypt", silo, "--passphrase-fd", given(words), app=app)
    with pytest.raises(ConfigError, match="no key files here"):
        call("decrypt", tmp_path, app=app)
