"""How joins reach an agent, and what of them is believed."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.common.locks import held
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.identity.certificates import make_authority, read_certificate
from fedsync.silo.agent import joins
from fedsync.silo.agent.joins import JOIN, JoinedRun, drop, dropped, hand_over, name_of, stop_agent, trusted
from fedsync.transport.hub_line import HubLine
from fedsync.transport.join import Join, new_secret

JOINED = Join(("https://fed.example:9093/v1/fedsync",), new_secret(), "PEM", "run", "12 berlin")


def joined(join: Join = JOINED) -> JoinedRun:
    return JoinedRun(join.dump(), {"partition-id": 1}, {"rate": 0.5}, "1 2", "/app")


def test_a_join_goes_through_the_inbox_once(tmp_path: Path) -> None:
    drop(tmp_path, joined())
    assert dropped(tmp_path) == {name_of(JOINED): joined()}
    assert dropped(tmp_path) == {} and not list(tmp_path.iterdir())


WRONG: dict[str, Callable[[Path, Path], object]] = {
    "no JSON": lambda file, outside: file.write_bytes(b"\xff\x00"),
    "another name": lambda file, outside: joined(replace(JOINED, run="other")).save(file),
    "too long": lambda file, outside: file.write_text(" " * joins.MOST_BYTES + json.dumps({})),
    "a link": lambda file, outside: file.symlink_to(outside),
    "a folder": lambda file, outside: file.mkdir(),
    "no join": lambda file, outside: replace(joined(), join="{}").save(file),
    "other fields": lambda file, outside: file.write_text(json.dumps({"secret": "x"})),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_join_goes(what: str, tmp_path: Path) -> None:
    inbox, file, outside = tmp_path / "inbox", tmp_path / "inbox" / f"{name_of(JOINED)}{JOIN}", tmp_path / "outside"
    inbox.mkdir()
    joined().save(outside)
    WRONG[what](file, outside)
    assert dropped(inbox) == {}
    old = time.time() - 60
    os.utime(file, (old, old), follow_symlinks=False) if file.is_symlink() or file.exists() else None
    dropped(inbox)
    assert what == "a folder" or not list(inbox.iterdir())
    assert outside.exists()


def test_a_flood_of_joins_is_cut(tmp_path: Path) -> None:
    for number in range(3 * joins.MOST_JOINS):
        drop(tmp_path, joined(replace(JOINED, run=f"run {number}")))
    assert len(dropped(tmp_path)) == joins.MOST_JOINS
    dropped(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_owner_says_where_hubs_may_be_and_what_they_prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ca.crt").write_text("OWNER'S")
    owner = {"hub_hosts": ["fed.example"], "authority": str(tmp_path / "ca.crt")}
    monkeypatch.setenv(ALLOWED, json.dumps(owner))
    assert trusted(JOINED, {"hub-hosts": "evil.example"}).authority == "OWNER'S"
    for address in ("https://evil.example/", "https://localhost:1/", "https://10.0.0.1/"):
        with pytest.raises(ConfigError, match="which this silo's owner has not"):
            trusted(replace(JOINED, addresses=(address,)), {"hub-hosts": "evil.example"})
    monkeypatch.setenv(ALLOWED, json.dumps({**owner, "hub_hosts": ["Fed.Example"]}))
    assert trusted(JOINED, {}).addresses == JOINED.addresses, "names of hosts are the same in capitals"
    with pytest.raises(ConfigError, match=r"the server's hub at fed.example does not speak HTTPS"):
        trusted(replace(JOINED, addresses=("http://fed.example:1/",), authority=""), {})


def test_an_owner_may_write_a_comment_into_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = make_authority(tmp_path).certificate
    authority.write_text(f"# Universit\u00e4t Z\u00fcrich\n{authority.read_text()}", encoding="utf-8")
    assert read_certificate(authority).authority, "as `fedsync doctor` reads it"
    monkeypatch.setenv(ALLOWED, json.dumps({"hub_hosts": ["fed.example"], "authority": str(authority)}))
    HubLine(trusted(JOINED, {}), new_secret()).close()


def test_an_agent_is_started_once_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    nobody = replace(JOINED, addresses=("https://localhost:1/v1/fedsync",))
    for run in ("a", "b"):
        hand_over(tmp_path, joined(replace(nobody, run=run)))
    folder = tmp_path / joins.FOLDER
    assert held(folder / joins.LOCK)
    assert len([pid for pid in Path("/proc").glob("[0-9]*") if str(folder).encode() in _command(pid)]) == 1
    stop_agent(tmp_path)
    assert not held(folder / joins.LOCK)
    stop_agent(tmp_path)  # there is none


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""
