"""``fedsync keys`` from the first key to a revoked silo."""

import json
import logging
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsync.cipher.keys.keyring import open_group, open_silo
from fedsync.commands.keys import app
from fedsync.common.errors import ConfigError, FedSyncError
from tests.commands.call import call

done = partial(call, app=app)


def failed(*arguments: str | Path) -> FedSyncError:
    with pytest.raises(FedSyncError) as caught:
        done(*arguments)
    return caught.value


@pytest.fixture
def admin(tmp_path: Path) -> Path:
    return tmp_path / "admin"


def test_keys_from_the_first_to_a_rotation(admin: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    public = done("init", admin).strip()
    (tmp_path / "a.json").write_text(done("silo", "a", "--dir", a))
    line = done("silo", "b", "--dir", b)
    issued = done("issue", admin, "--silo", tmp_path / "a.json", "--silo", line)
    bundles = dict(row.split(" ", 1) for row in issued.splitlines())
    assert list(bundles) == ["a", "b"]
    assert "epoch 1" in done("accept", bundles["a"], "--dir", a, "--admin", public)
    done("accept", bundles["b"], "--dir", b, "--admin", public)
    assert open_group(a) == open_group(b)
    rotated = dict(row.split(" ", 1) for row in done("rotate", admin, "--without", "b").splitlines())
    assert list(rotated) == ["a"]
    done("accept", rotated["a"], "--dir", a)
    assert open_group(a).epoch == 2
    old, others = failed("accept", bundles["a"], "--dir", a), failed("accept", rotated["a"], "--dir", b)
    assert isinstance(old, ConfigError) and old.place == bundles["a"] and "already has epoch 2" in old.problem
    assert isinstance(others, ConfigError) and others.place == rotated["a"] and "is for 'a'" in others.problem
    assert "Ask the administrator for the newest bundle" in old.remedy == others.remedy


def test_the_administrators_public_key_is_printed_again(admin: Path, tmp_path: Path) -> None:
    """A silo that is pinned later needs it, and nobody may have kept what the first command printed."""
    public = done("init", admin)
    bundle = done("issue", admin, "--silo", done("silo", "a", "--dir", tmp_path / "a")).split(" ", 1)[1].strip()
    before = (admin / "administrator.key").read_bytes()
    assert done("init", admin) == public and (admin / "administrator.key").read_bytes() == before
    assert "epoch 1" in done("accept", bundle, "--dir", tmp_path / "a", "--admin", public.strip())


def test_no_command_prints_or_logs_a_secret(admin: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    a, output = tmp_path / "a", ""

    def run(*arguments: str | Path) -> str:
        nonlocal output
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        output += f"{result.output} {result.exception!r}"
        return result.stdout

    public = run("init", admin).strip()
    line = run("silo", "a", "--dir", a)
    bundle = run("issue", admin, "--silo", line).split(" ", 1)[1].strip()
    run("accept", bundle, "--dir", a, "--admin", public)
    run("accept", bundle, "--dir", a)
    run("issue", admin), run("rotate", admin)
    secret = json.loads((admin / "administrator.key").read_bytes()) | json.loads((a / "silo.key").read_bytes())
    group = open_group(a)
    values = [secret["signing"], secret["exchange"], secret["key"], secret["context"][:64], secret["context"][-64:]]
    values += [group.key.hex(), group.context.hex()[-64:], open_silo(a).signing.hex()]
    assert "this silo already has epoch 1" in output
    assert not any(value in output + caplog.text for value in values)


def test_mistakes_are_named(admin: Path, tmp_path: Path) -> None:
    done("init", admin)
    line = done("silo", "a", "--dir", tmp_path / "a")
    assert isinstance(failed("issue", admin, "--silo", tmp_path / "none.json"), ConfigError)
    changed = tmp_path / "changed.json"
    changed.write_text(line.replace('"a"', '"b"'))
    for given, called in ((changed, f"the line in {changed}"), (changed.read_text(), "the line of --silo")):
        error = failed("issue", admin, "--silo", given)
        assert isinstance(error, ConfigError) and error.place == called
        assert error.remedy == "Ask the silo for the line of `fedsync keys silo`, and copy it whole"
    bundle = done("issue", admin, "--silo", line).split(" ", 1)[1].strip()
    assert "is no public key" in str(failed("accept", bundle, "--dir", tmp_path / "a", "--admin", "abc"))
    assert "cannot be read" in str(failed("accept", tmp_path / "none", "--dir", tmp_path / "a"))
    assert "not allowed" in str(failed("silo", "a/b", "--dir", tmp_path / "b"))
    (tmp_path / "a" / "silo.key").chmod(0o644)
    assert "chmod 600" in str(failed("silo", "a", "--dir", tmp_path / "a"))
