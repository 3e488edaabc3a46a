"""What a user installs: the package with its strategy files, and nothing else."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
EXAMPLES = ("huggingface", "keras", "lightning", "sklearn")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True, timeout=120)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file).namelist()


@pytest.mark.slow
def test_the_wheel_installs_fedsync_alone(wheel: list[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"fedsync"}


def test_the_wheel_brings_every_strategy_file_and_the_type_marker(wheel: list[str]) -> None:
    strategies = {f"fedsync/{path.relative_to(ROOT)}" for path in (ROOT / "strategies").rglob("*.yaml")}
    assert strategies | {"fedsync/py.typed"} <= set(wheel)


def test_the_wheel_brings_every_file_of_a_project_to_start_from(wheel: list[str]) -> None:
    files = (
        path
        for path in (ROOT / "fedsync" / "extras" / "new_project" / "templates").rglob("*")
        if "__pycache__" not in path.parts
    )
    assert {str(path.relative_to(ROOT)) for path in files if path.is_file()} <= set(wheel)


CONSTRAINTS = {
    "constraints.txt": ("sim", "dev", "examples", *EXAMPLES),
    "constraints-lowest.txt": ("sim", "dev"),
    "constraints-highest.txt": ("sim", "dev"),
}
"""Extras that each file pins."""


def pins_of(file: str) -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    return {name.lower().replace("_", "-"): pin for name, pin in (line.split("==") for line in lines)}


@pytest.mark.parametrize("file", CONSTRAINTS)
def test_exact_pins_satisfy_the_ranges(file: str) -> None:
    pins = pins_of(file)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *(text for name in CONSTRAINTS[file] for text in extras[name])):
        requirement = Requirement(text)
        if requirement.name == "fedsync":  # itself, with extras
            assert requirement.extras == set(EXAMPLES)
            continue
        pin = pins[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(pin), f"{text} is pinned to {pin}"


def test_the_lowest_version_of_flower_and_a_later_one_are_tested_and_no_next_major_one_is_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (flower,) = [each for each in map(Requirement, project["dependencies"]) if each.name == "flwr"]
    pinned = {Version(pins_of(file)["flwr"]) for file in CONSTRAINTS}
    allowed = [minor for minor in range(200) if flower.specifier.contains(f"1.{minor}.0")]
    assert (
        min(pinned).minor == min(allowed) and len(pinned) > 1 and all(flower.specifier.contains(pin) for pin in pinned)
    )
    assert not flower.specifier.contains("2.0.0")
    assert Version(pins_of("constraints-lowest.txt")["flwr"]) == min(pinned)
    assert Version(pins_of("constraints-highest.txt")["flwr"]) == max(pinned)
    assert len({pins_of(file)["torch"] for file in CONSTRAINTS}) == 1, "another build brings gigabytes along"


@pytest.mark.full
@pytest.mark.parametrize("file", CONSTRAINTS)
def test_the_pinned_versions_can_be_installed_together(file: str) -> None:
    """A dry run, which asks the package index."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--constraint", str(ROOT / file), f"{ROOT}[sim,dev]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
