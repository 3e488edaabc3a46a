"""``fedsync certs``."""

from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from fedsync.commands.certs import app, describe
from fedsync.common.errors import ConfigError
from fedsync.identity.certificates import CertificateFacts, make_authority, make_server_certificate
from tests.commands.call import call

NOW = datetime(2030, 1, 1, tzinfo=UTC)


done = partial(call, app=app)


def failed(*arguments: str | Path) -> str:
    with pytest.raises(ConfigError) as caught:
        done(*arguments)
    return str(caught.value)


def test_a_servers_certificate_is_made_shown_and_renewed(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    made = done("init", folder, "--host", "fl.example.org", "--host", "10.0.0.1")
    assert all(str(folder / name) in made for name in ("ca.crt", "ca.key", "server.pem", "server.key"))
    shown = done("show", folder)
    assert "for fl.example.org, localhost, 10.0.0.1, 127.0.0.1, until" in shown and "warning" not in shown
    authority = (folder / "ca.crt").read_bytes()
    assert "authority here already" in failed("init", folder, "--host", "b.example")
    done("init", folder, "--host", "b.example", "--renew", "--days", "20")
    assert "b.example" in done("show", folder) and "expires in 20 days" in done("show", folder)
    done("init", folder, "--renew")
    assert "for b.example, localhost, 127.0.0.1, until" in done("show", folder)
    assert (folder / "ca.crt").read_bytes() == authority


def test_a_node_key_is_made_and_shown(tmp_path: Path) -> None:
    made = done("silo", "silo-a", "--dir", tmp_path / "a")
    assert made.endswith("who names it in server.yaml:\n  silos: {silo-a: nodes/silo-a.node.pub}\n")
    fingerprint = made.split()[1]
    assert f"node key of silo-a, {fingerprint}" in done("show", tmp_path / "a")
    (tmp_path / "nodes").mkdir()
    (tmp_path / "a" / "silo-a.node.pub").rename(tmp_path / "nodes" / "silo-a.node.pub")  # sent to the server's operator
    assert f"public node key of silo-a, {fingerprint}" in done("show", tmp_path / "nodes")
    (tmp_path / "nodes" / "silo-b.node.pub").write_text("ssh-rsa nonsense")
    assert "not a public key" in failed("show", tmp_path / "nodes")


def test_mistakes_are_named_and_leave_nothing_behind(tmp_path: Path) -> None:
    assert "neither a host name" in failed("init", tmp_path / "x", "--host", "a:9092")
    assert not (tmp_path / "x").exists()
    assert "--host: missing" in failed("init", tmp_path / "x")
    assert "cannot be read" in failed("init", tmp_path / "x", "--host", "a", "--renew")
    assert "no certificates" in failed("show", tmp_path)
    done("init", tmp_path / "own", "--host", "a")
    make_server_certificate(make_authority(tmp_path / "other"), ["a"], tmp_path / "own")
    assert "was not signed by" in failed("show", tmp_path / "own")


@pytest.mark.parametrize("days", ["0", "4000"])
def test_days_that_are_refused_leave_nothing_behind_so_that_the_corrected_command_works(
    tmp_path: Path, days: str
) -> None:
    """The authority holds 3,650 days; the server's certificate may hold as long, and not a second longer."""
    wrong = failed("init", tmp_path / "x", "--host", "a", "--days", days)
    assert wrong == f"--days: {days} days. Give a number from 1 to 3650"
    assert not (tmp_path / "x").exists()
    done("init", tmp_path / "x", "--host", "a", "--days", "3650")


@pytest.mark.parametrize(
    ("days", "authority", "warning"),
    [
        (30, False, None),
        (29, False, "expires in 29 days; run `fedsync certs init c --renew`"),
        (29, True, "expires in 29 days; make another authority"),
        (-3, False, "expired 3 days ago; run `fedsync certs init c --renew`"),
    ],
)
def test_a_certificate_that_expires_within_a_month_is_warned_of(
    days: int, authority: bool, warning: str | None
) -> None:
    facts = CertificateFacts("server", ("a", "b"), NOW + timedelta(days=days), authority)
    first, *rest = describe(Path("c/server.pem"), facts, NOW)
    assert first == f"c/server.pem: server, for a, b, until {facts.expires:%Y-%m-%d} 00:00 UTC"
    assert (not rest) if warning is None else (len(rest) == 1 and warning in rest[0])
