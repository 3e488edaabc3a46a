"""What a user installs: the package with its strategy files, and nothing else."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ("huggingface", "keras", "lightning", "sklearn")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True, timeout=120)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file).namelist()


def test_the_wheel_installs_fedsync_alone(wheel: list[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"fedsync"}


def test_the_wheel_brings_every_strategy_file_and_the_type_marker(wheel: list[str]) -> None:
    strategies = {f"fedsync/{path.relative_to(ROOT)}" for path in (ROOT / "strategies").rglob("*.yaml")}
    assert strategies | {"fedsync/py.typed"} <= set(wheel)


def test_the_wheel_brings_every_file_of_a_project_to_start_from(wheel: list[str]) -> None:
    files = (path for path in (ROOT / "fedsync" / "templates").rglob("*") if "__pycache__" not in path.parts)
    assert {str(path.relative_to(ROOT)) for path in files if path.is_file()} <= set(wheel)


def test_exact_pins_satisfy_the_ranges() -> None:
    from packaging.requirements import Requirement

    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = ("sim", "dev", "examples", *EXAMPLES)
    for text in (*project["dependencies"], *(text for name in named for text in extras[name])):
        requirement = Requirement(text)
        if requirement.name == "fedsync":  # itself, with extras
            assert requirement.extras == set(EXAMPLES)
            continue
        pin = {name.lower(): version for name, version in pins.items()}[requirement.name.lower()]
        assert requirement.specifier.contains(pin), f"{text} is pinned to {pin}"
