"""Every example does what its README says, by its own commands: in virtual time and encrypted."""

import re
import socket
import tomllib
from pathlib import Path

import pytest

from tests.examples.reader import FOLDER, PUBLISHED, ROOT, SCORES, as_published, carry_out, changes, check, commands

QUICK = ("heart", "sklearn")
EVERYWHERE = [pytest.param(name, marks=() if name in QUICK else pytest.mark.examples) for name in SCORES]


@pytest.mark.slow
@pytest.mark.parametrize("run", ["virtual", "encrypted"])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_in_virtual_time(name: str, run: str, example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(self: socket.socket, address: object) -> None:
        raise AssertionError(f"it wants to download something from {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    carry_out(commands(example)[run], monkeypatch)
    check(example, run)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_app_is_changed_where_its_readme_says(name: str, tmp_path: Path) -> None:
    """Else FedSync is not in it."""
    assert len(changes(FOLDER / name)) <= 5
    published = as_published(FOLDER / name, tmp_path / name)
    for file in published.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "fedsync" not in text.lower()
        assert "steps" not in text
    components = tomllib.loads((published / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"]
    assert components == {part: components["serverapp"].replace("server", part[:6]) for part in components}


def test_none_is_forgotten_and_what_they_need_can_be_installed() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(.+?)\]\(\1\) \|.*`fedsync(?:\[(.+?)\])?` \|$", page, re.MULTILINE)
    documented = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert listed == re.findall(r"^\| `([\w-]+)` \|.*`fedsync(?:\[(.+?)\])?` \|$", documented, re.MULTILINE)
    assert {name for name, _ in listed} == {each.name for each in FOLDER.iterdir() if each.is_dir()}
    assert set(SCORES) <= {name for name, _ in listed}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, wanted in listed:
        readme = (FOLDER / name / "README.md").read_text(encoding="utf-8")
        assert len(readme.splitlines()) <= 50, f"{name}: a screen, no more"
        assert not wanted or (set(wanted.split(",")) <= extras.keys() and f"fedsync[{wanted}]" in readme)
