"""Key folders: what the administrator gives out, and what silos accept."""

import base64
import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsync.cipher.keys.authority import (
    ADMINISTRATOR_FILE,
    SERVER_FILE,
    emulated_keys,
    emulated_rings,
    issue,
    issued_folder,
    new_authority,
    open_authority,
    rotate,
)
from fedsync.cipher.keys.key_files import write_record
from fedsync.cipher.keys.keyring import GROUP_FILE, SILO_FILE, accept, new_silo, open_group, open_ring, open_silo
from fedsync.cipher.keys.keywrap import ServerKeys, announce, read_server_file, unwrap
from fedsync.cipher.keys.material import Purpose, SiloKeys, open_blob, seal_blob
from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.common.files import private_folder, write_atomically, write_private
from tests.cipher.given_keys import Place, some_context


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.make(tmp_path)


def test_silos_share_a_group_key_that_came_by_bundle(place: Place) -> None:
    bundles = place.issue("a", "b")
    groups = [accept(place.silo(name), bundle, place.public) for name, bundle in bundles.items()]
    assert groups[0] == groups[1] == open_group(place.silo("a")) == open_ring(place.silo("b")).group
    assert groups[0].members == {name: open_silo(place.silo(name)).public for name in "ab"}
    assert open_authority(place.admin).fingerprint == groups[0].fingerprint


def test_every_secret_file_is_its_owners_alone(place: Place) -> None:
    accept(place.silo("a"), place.issue("a")["a"], place.public)
    for path in place.root.rglob("*"):
        expected = 0o700 if path.is_dir() else 0o644 if path.name == SERVER_FILE else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_new_silo_begins_an_epoch_and_the_same_silos_do_not(place: Place) -> None:
    first = accept(place.silo("a"), place.issue("a")["a"], place.public)
    again = unwrap(place.issue("a")["a"], open_silo(place.silo("a")), place.public)
    assert again == first
    bundles = place.issue("b")
    second = accept(place.silo("a"), bundles["a"])
    assert (second.epoch, list(second.members)) == (2, ["a", "b"])
    assert second.key != first.key and second.context != first.context
    assert accept(place.silo("b"), bundles["b"], place.public) == second


def test_rotation_leaves_out_whom_it_is_told_and_older_bundles_are_refused(place: Place) -> None:
    old = place.issue("a", "b")
    issued = rotate(place.admin, ["b"], some_context)
    assert (issued.epoch, list(issued.bundles)) == (2, ["a"])
    group = accept(place.silo("a"), issued.bundles["a"].read_bytes(), place.public)
    with pytest.raises(ProtocolError, match="'epoch'"):
        accept(place.silo("a"), old["a"])
    assert list(group.members) == ["a"] and open_group(place.silo("a")) == group
    with pytest.raises(ProtocolError, match="'silo'"):
        unwrap(issued.bundles["a"].read_bytes(), new_silo(place.silo("b"), "b"), place.public)
    with pytest.raises(ConfigError, match="revoked"):
        place.issue("b")
    half_fresh = SiloKeys("b", open_silo(place.silo("b")).exchange, SiloKeys.generate("b").signing)
    with pytest.raises(ConfigError, match="revoked"):
        issue(place.admin, [("line", announce(half_fresh).encode())], some_context)
    assert open_authority(place.admin).revoked == ("b",)
    (place.silo("b") / SILO_FILE).unlink()
    assert list(place.issue("b")) == ["a", "b"], "with fresh keys it may come back"
    assert open_authority(place.admin).epoch == 3


def test_keys_are_issued_to_pinned_silos_and_to_no_fewer_than_one(place: Place) -> None:
    with pytest.raises(ConfigError, match="no silo is pinned"):
        issue(place.admin, (), some_context)
    with pytest.raises(ConfigError, match="no silo would be left"):
        rotate(place.admin, (), some_context)
    place.issue("a")
    with pytest.raises(ConfigError, match="Pinned are: a"):
        rotate(place.admin, ["b"], some_context)
    with pytest.raises(ConfigError, match="no silo would be left"):
        rotate(place.admin, ["a"], some_context)
    assert open_authority(place.admin).epoch == 1


def test_keys_other_than_the_pinned_ones_are_refused(place: Place) -> None:
    place.issue("a")
    imposter = announce(SiloKeys.generate("a")).encode()
    held = open_silo(place.silo("a"))
    alias = announce(SiloKeys("b", held.exchange, held.signing)).encode()
    half = announce(SiloKeys("b", held.exchange, SiloKeys.generate("b").signing)).encode()
    for line, check in ((imposter, "pinned with other keys"), (alias, "already pinned"), (half, "already pinned")):
        with pytest.raises(ConfigError, match=check):
            issue(place.admin, [("line", line)], some_context)
    assert list(open_authority(place.admin).members) == ["a"]


def test_the_administrator_is_pinned_with_the_first_bundle(place: Place, tmp_path: Path) -> None:
    bundles = place.issue("a")
    with pytest.raises(ConfigError, match="no administrator is pinned"):
        accept(place.silo("a"), bundles["a"])
    with pytest.raises(ProtocolError, match="'administrator'"):
        accept(place.silo("a"), bundles["a"], bytes(32))
    assert not (place.silo("a") / GROUP_FILE).exists()
    accept(place.silo("a"), bundles["a"], place.public)
    usurper = new_authority(tmp_path / "usurper", new_context=some_context)
    forged = issue(tmp_path / "usurper", [place.line("a")], some_context).bundles["a"]
    with pytest.raises(ProtocolError, match="'administrator'"):
        accept(place.silo("a"), forged.read_bytes())
    with pytest.raises(ConfigError, match="has pinned"):
        accept(place.silo("a"), forged.read_bytes(), usurper)


def test_keys_that_are_there_are_not_overwritten(place: Place) -> None:
    first = new_silo(place.silo("a"), "a")
    assert new_silo(place.silo("a"), "a") == first
    with pytest.raises(ConfigError, match="keys of 'a'"):
        new_silo(place.silo("a"), "b")
    before = (place.admin / ADMINISTRATOR_FILE).read_bytes()
    assert new_authority(place.admin, new_context=some_context) == place.public
    assert (place.admin / ADMINISTRATOR_FILE).read_bytes() == before


def test_a_ring_needs_both_files_and_that_they_fit(place: Place) -> None:
    with pytest.raises(ConfigError, match="fedsync keys silo"):
        open_ring(place.silo("a"))
    bundles = place.issue("a", "b")
    with pytest.raises(ConfigError, match="fedsync keys accept"):
        open_ring(place.silo("a"))
    for name in "ab":
        accept(place.silo(name), bundles[name], place.public)
    (place.silo("b") / SILO_FILE).unlink()
    new_silo(place.silo("b"), "b")
    with pytest.raises(ConfigError, match="not issued to these keys"):
        open_ring(place.silo("b"))


@pytest.mark.parametrize("name", [ADMINISTRATOR_FILE, SILO_FILE, GROUP_FILE])
def test_a_damaged_or_open_file_is_refused_without_telling_its_secret(place: Place, name: str) -> None:
    accept(place.silo("a"), place.issue("a")["a"], place.public)
    folder = place.admin if name == ADMINISTRATOR_FILE else place.silo("a")
    opened = {ADMINISTRATOR_FILE: open_authority, SILO_FILE: open_silo, GROUP_FILE: open_group}[name]
    path = folder / name
    whole = path.read_bytes()
    secret = json.loads(whole)["signing" if name != GROUP_FILE else "key"]
    for damaged in (b"", whole[:-3], whole.replace(b'"kind":"fedsync', b'"kind":"other'), whole[:-2] + b',"x":1}'):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="damaged") as caught:
            opened(folder)
        assert str(path) in str(caught.value)
        assert not any(secret[:16] in text for text in told(caught.value))
    path.write_bytes(whole)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        opened(folder)


def told(error: BaseException | None) -> Iterator[str]:
    """All that an error carries: its words and values, and those of the errors behind it."""
    while error is not None:
        yield f"{error!r} {error} {error.args!r} {vars(error)!r} {getattr(error, 'doc', '')!r}"
        if hasattr(error, "errors"):
            yield repr(error.errors())
        error = error.__cause__ or error.__context__


def test_the_servers_file_has_no_secret_and_opens_nothing(tmp_path: Path) -> None:
    keys = emulated_keys(["a", "b"], tmp_path / "keys", new_context=some_context)
    ring = open_ring(keys.silos["a"])
    data = keys.server_file.read_bytes()
    own = [open_silo(folder) for folder in keys.silos.values()]
    whole = [ring.group.key, *(secret for silo in own for secret in (silo.exchange, silo.signing))]
    whole += [ring.group.derive(purpose) for purpose in Purpose if purpose is not Purpose.FINGERPRINT]
    # The context: no eight bytes of it, in any spelling.
    pieces = [ring.group.context[i : i + 8] for i in range(len(ring.group.context) - 7)]
    for secret in (*whole, *pieces):
        spellings = (secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"="))
        assert not any(spelling in data for spelling in spellings)
    # Whatever the file holds, tried as the key: it neither opens a blob nor a bundle.
    fields = json.loads(data)
    values = [fields["fingerprint"] * 2, fields["administrator"], fields["signature"][:64], *fields["senders"].values()]
    blob = seal_blob(ring.group, Purpose.SNAPSHOT, b"", b"model")
    bundle = keys.server_file.with_name("a.bundle").read_bytes()
    for value in map(bytes.fromhex, values):
        guess = type(ring.group)(1, ring.group.context, value, ring.group.members, ring.group.administrator)
        with pytest.raises(ProtocolError):
            open_blob(guess, Purpose.SNAPSHOT, b"", blob)
        with pytest.raises(ProtocolError):
            unwrap(bundle, SiloKeys("a", value, value), ring.group.administrator)


def test_emulated_keys_are_those_of_the_commands_and_are_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys = emulated_keys(["a", "b"], folder, 7, some_context)
    rings = {name: open_ring(path) for name, path in keys.silos.items()}
    assert rings["a"].group == rings["b"].group
    assert keys.server == ServerKeys.of(rings["a"].group)
    assert emulated_keys(["b", "a"], folder, 7, some_context) == keys
    with pytest.raises(ConfigError, match="other silos: a, b"):
        emulated_keys(["a"], folder, 7, some_context)
    (keys.silos["a"] / GROUP_FILE).unlink()
    emulated_keys(["a", "b"], folder, 7, some_context)
    assert open_ring(keys.silos["a"]) == rings["a"]


@pytest.mark.parametrize("written", range(6))
def test_emulated_keys_are_made_although_a_process_was_killed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """It dies before one of its files: two pairs, the administrator's record, two bundles, the server's file."""
    folder, left = tmp_path / "keys", [written]
    new_authority(private_folder(folder) / "administrator", new_context=some_context)

    def dying(write: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*arguments: Any, **more: Any) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            write(*arguments, **more)

        return wrapped

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        for module in ("keyring", "authority"):
            patch.setattr(f"fedsync.cipher.keys.{module}.write_record", dying(write_record))
        for name, write in (("write_private", write_private), ("write_atomically", write_atomically)):
            patch.setattr(f"fedsync.cipher.keys.authority.{name}", dying(write))
        emulated_keys(["a", "b"], folder, None, some_context)
    keys = emulated_keys(["a", "b"], folder, None, some_context)
    first, second = (open_ring(path) for path in keys.silos.values())
    assert first.group == second.group and keys.server == ServerKeys.of(first.group)


def test_a_seed_gives_the_same_pairs_but_never_the_same_group_secret() -> None:
    (_, first), (_, again), (_, other), (_, fresh) = (
        emulated_rings(["a", "b"], seed, some_context) for seed in (7, 7, 8, None)
    )
    assert {name: ring.own for name, ring in first.items()} == {name: ring.own for name, ring in again.items()}
    assert first["a"].group.key != again["a"].group.key
    owns = {ring["a"].own.exchange for ring in (first, other, fresh)} | {first["b"].own.exchange}
    assert len(owns) == 4


def test_what_an_interrupted_issue_left_can_be_issued_again(place: Place) -> None:
    place.issue("a")
    out = issued_folder(place.admin, 1)
    for path in out.iterdir():
        path.unlink()
    out.rmdir()
    accept(place.silo("a"), place.issue()["a"], place.public)
    server = read_server_file((out / SERVER_FILE).read_bytes(), "server.json", place.public)
    assert server == ServerKeys.of(open_group(place.silo("a")))
