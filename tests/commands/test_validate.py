"""``fedsync validate`` tells the kinds of files apart; tests/config has what is wrong inside them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsync.cli import app
from fedsync.core.errors import ConfigError

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("silos: [{name: a, speed: 1.0}, {name: b, speed: 2.0}]", "a silo file with 2 silos"),
        (
            "{name: mine, silos: [a, b], stop: {rounds: 1}, balancer: {kind: fixed}, barrier: {kind: bsp}, "
            "task: {kind: digits}}",
            "strategy 'mine', no errors",
        ),
    ],
)
def test_strategies_and_silo_files_are_told_apart(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
    assert said in CliRunner().invoke(app, ["validate", str(tmp_path / "x.yaml")]).stdout


@pytest.mark.parametrize("side", ["server", "silo"])
def test_a_file_that_starts_a_process_is_the_doctors(side: str) -> None:
    file = DEPLOY / f"{side}.yaml"
    error = CliRunner().invoke(app, ["validate", str(file)]).exception
    assert isinstance(error, ConfigError)
    assert error.problem == f"this starts a real {side}" and f"`fedsync doctor --{side} {file}`" in error.remedy


@pytest.mark.parametrize(
    ("text", "side"), [("{state: s, insecure: true}", "server"), ("{server: 'a:1', state: s}", "silo")]
)
def test_so_is_one_for_a_trial(tmp_path: Path, text: str, side: str) -> None:
    (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
    error = CliRunner().invoke(app, ["validate", str(tmp_path / "x.yaml")]).exception
    assert isinstance(error, ConfigError) and error.problem == f"this starts a real {side}"
