"""Whose code answers the messages of a bundle; bundles are made as Flower makes them."""

import hashlib
import sys
import tomllib
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run

from fedsync.core.errors import ConfigError
from fedsync.flower import client_app
from fedsync.flower.internals.apps import OWN, WIRING, installed_app
from fedsync.ops.runs import write_bundle

ROOT = Path(__file__).parents[3]
PROJECT = """\
[project]
name = "other"
version = "1.0.0"
description = "Somebody's app"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "someone"

[tool.flwr.app.components]
serverapp = "{client}"
clientapp = "{client}"
"""
CODE = """\
from pathlib import Path

from flwr.clientapp import ClientApp

Path(__file__).with_name("was-here").touch()
app = ClientApp()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Flower installs bundles."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "home"


def bundle(folder: Path) -> tuple[Run, Fab]:
    content = build_fab_from_disk(folder)
    digest = hashlib.sha256(content).hexdigest()
    facts = tomllib.loads((folder / "pyproject.toml").read_text())
    run = Run.create_empty(1)
    run.fab_id = f"{facts['tool']['flwr']['app']['publisher']}/{facts['project']['name']}"
    run.fab_version, run.fab_hash = facts["project"]["version"], digest
    return run, Fab(digest, content, {})


def others(folder: Path, client: str) -> tuple[Run, Fab]:
    """A bundle that ships a client."""
    module, _, _ = client.partition(":")
    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(CODE)
    (folder / "pyproject.toml").write_text(PROJECT.format(client=client))
    return bundle(folder)


def test_fedsyncs_bundles_are_answered_by_what_is_installed(tmp_path: Path, home: Path) -> None:
    run, fab = bundle(write_bundle(tmp_path / "app", {"strategy": "fedavg"}))
    assert installed_app(run, fab) is client_app.app
    assert not home.exists()


def test_the_repository_as_a_flower_app_is_answered_by_what_is_installed(tmp_path: Path, home: Path) -> None:
    """Whatever its client/app.py says: a bundle of that name may say anything."""
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert facts["tool"]["flwr"]["app"]["components"]["clientapp"] == WIRING
    run, fab = others(tmp_path / "app", WIRING)
    assert installed_app(run, fab) is client_app.app
    assert not home.exists()


def test_a_client_of_others_is_refused_and_neither_installed_nor_run(tmp_path: Path, home: Path) -> None:
    run, fab = others(tmp_path / "app", "refused_client:app")
    with pytest.raises(ConfigError) as caught:
        installed_app(run, fab)
    error = caught.value
    assert "someone/other brings its own client, refused_client:app" in error.problem
    assert "code: shipped in silo.yaml" in error.remedy and OWN in error.remedy
    assert not home.exists() and "refused_client" not in sys.modules


def test_what_is_no_bundle_is_an_error(home: Path) -> None:
    with pytest.raises(Exception, match="zip"):
        installed_app(Run.create_empty(1), Fab("x", b"no bundle", {}))
