"""``fedsync certs``."""

from functools import partial
from pathlib import Path

import pytest

from fedsync.commands.certs import app
from fedsync.common.errors import ConfigError
from fedsync.identity.certificates import CertificateFacts, read_certificate
from tests.commands.call import call

done = partial(call, app=app)


def failed(*arguments: str | Path) -> str:
    with pytest.raises(ConfigError) as caught:
        done(*arguments)
    return str(caught.value)


def served(folder: Path) -> CertificateFacts:
    return read_certificate(folder / "server.pem")


def test_a_servers_certificate_is_made_and_renewed(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    made = done("init", folder, "--host", "fl.example.org", "--host", "10.0.0.1")
    assert all(str(folder / name) in made for name in ("ca.crt", "ca.key", "server.pem", "server.key"))
    first = served(folder)
    assert set(first.hosts) == {"fl.example.org", "localhost", "10.0.0.1", "127.0.0.1"}
    authority = (folder / "ca.crt").read_bytes()
    assert "authority here already" in failed("init", folder, "--host", "b.example")
    done("init", folder, "--host", "b.example", "--renew", "--days", "20")
    second = served(folder)
    assert set(second.hosts) == {"b.example", "localhost", "127.0.0.1"}
    assert round((first.expires - second.expires).total_seconds() / 86400) == 365 - 20
    done("init", folder, "--renew")
    assert served(folder).hosts == second.hosts and served(folder).expires > second.expires
    assert (folder / "ca.crt").read_bytes() == authority


@pytest.mark.parametrize("lost", ["ca.key", "ca.crt"])
def test_a_renewal_without_the_authority_says_how_to_get_it(tmp_path: Path, lost: str) -> None:
    """The key is kept offline, so it is missing at most renewals; `certs init` would refuse the folder."""
    folder = tmp_path / "certs"
    done("init", folder, "--host", "fl.example.org")
    (folder / lost).unlink()
    said = failed("init", folder, "--renew")
    assert said.startswith(f"{folder / lost}: cannot be read: No such file or directory. Put ca.crt and ca.key of one")
    assert said.endswith("back; if ca.key is lost, make another authority in another folder")


def test_a_node_key_is_made_and_printed_again(tmp_path: Path) -> None:
    made = done("silo", "silo-a", "--dir", tmp_path / "a")
    assert made.endswith("who names it in server.yaml:\n  silos: {silo-a: nodes/silo-a.node.pub}\n")
    assert done("silo", "silo-a", "--dir", tmp_path / "a") == made


def test_mistakes_are_named_and_leave_nothing_behind(tmp_path: Path) -> None:
    assert "neither a host name" in failed("init", tmp_path / "x", "--host", "a:9092")
    assert not (tmp_path / "x").exists()
    assert "--host: missing" in failed("init", tmp_path / "x")
    assert "cannot be read" in failed("init", tmp_path / "x", "--host", "a", "--renew")


@pytest.mark.parametrize("days", ["0", "4000"])
def test_refused_days_leave_nothing_behind_so_that_the_corrected_command_works(tmp_path: Path, days: str) -> None:
    """The authority holds 3,650 days; the server's certificate may hold as long, and not a second longer."""
    wrong = failed("init", tmp_path / "x", "--host", "a", "--days", days)
    assert wrong == f"--days: {days} days. Give a number from 1 to 3650"
    assert not (tmp_path / "x").exists()
    done("init", tmp_path / "x", "--host", "a", "--days", "3650")
