"""``fedsync validate`` tells the kinds of files apart; tests/config has what is wrong inside them."""

from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from tests.commands.call import call

DEPLOY = Path(__file__).parents[2] / "deploy"


PLAIN = "{stop: {rounds: 1}, balancer: {kind: fixed}, barrier: {kind: bsp}, %s}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("silos: [{name: a, speed: 1.0}, {name: b, speed: 2.0}]", "a silo file with 2 silos"),
        (PLAIN % "name: mine, silos: [a, b], task: {kind: digits}", "strategy 'mine', no errors"),
    ],
)
def test_strategies_and_silo_files_are_told_apart(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
    assert said in call("validate", tmp_path / "x.yaml")


def test_a_silo_file_is_not_checked_on_another() -> None:
    with pytest.raises(ConfigError, match=r"--silos: hetero is a silo file itself"):
        call("validate", "hetero", "--silos", "homogeneous")


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ((DEPLOY / "server.yaml").read_text(encoding="utf-8"), "server"),
        ((DEPLOY / "silo.yaml").read_text(encoding="utf-8"), "silo"),
        ("{state: s, insecure: true}", "server"),
        ("{server: 'a:1', state: s}", "silo"),
    ],
)
def test_a_file_that_starts_a_process_is_the_doctors(tmp_path: Path, text: str, side: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"this starts a real {side}.*`fedsync doctor --{side} {file}`"):
        call("validate", file)


def test_metrics_that_do_not_fit_a_sealed_header_are_refused_before_the_run(tmp_path: Path) -> None:
    file, metrics = tmp_path / "x.yaml", "{metrics: [accuracy, auroc], classes: 60}"
    sealed = PLAIN % f"name: mine, silos: [a, b], task: {{kind: digits}}, evaluation: {metrics}, cipher: %s"
    file.write_text(sealed % "{kind: pad}")
    with pytest.raises(ConfigError, match=r"evaluation.metrics.*'auroc' needs .* slots of a sealed header"):
        call("validate", file)
    file.write_text(sealed % "{kind: pad, metrics: plain}")
    assert "no errors" in call("validate", file)


@pytest.mark.parametrize("private", ["", "privacy: {kind: dp-sgd, clip: 1.0, noise_multiplier: 1.0}, "])
def test_metrics_of_classes_need_no_number_of_classes_before_a_run_either(tmp_path: Path, private: str) -> None:
    file, silos = tmp_path / "x.yaml", tmp_path / "silos.yaml"
    file.write_text(PLAIN % f"name: mine, {private}task: {{kind: digits}}, evaluation: {{metrics: [f1]}}")
    silos.write_text("silos: [{name: a, speed: 1.0}, {name: b, speed: 2.0}]")
    assert "no errors" in call("validate", file, "--silos", silos)
    timed = call("run", file, "--silos", silos, "--runtime", "virtual", "--timing-only", "--out", tmp_path / "out")
    assert "1 rounds" in timed


PLUGIN = """
from dataclasses import dataclass
from fedsync import FeaturePolicy, register
from fedsync.core.extension import Extension

class Plain(Extension):
    name = "plain"

@register("plain-feature")
@dataclass(frozen=True)
class Feature(FeaturePolicy):
    \"\"\"A feature.\"\"\"

    def build(self):
        return Plain()
"""


def test_an_extension_that_cannot_be_resumed_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "plug.py").write_text(PLUGIN)
    own = "plugin: plug.py, extensions: [{kind: plain-feature}], name: mine, silos: [a, b], task: {kind: digits}"
    (tmp_path / "x.yaml").write_text(PLAIN % own)
    with pytest.raises(ConfigError, match=r"extensions, kind 'plain-feature': Plain is no dataclass"):
        call("validate", tmp_path / "x.yaml")


STARTS = [
    ["validate", "STRATEGY", "--silos", "SILOS"],
    ["run", "STRATEGY", "--silos", "SILOS", "--runtime", "virtual", "--out", "OUT"],
    ["run", "STRATEGY", "--silos", "SILOS", "--runtime", "virtual", "--timing-only", "--out", "OUT"],
    ["run", "STRATEGY", "--silos", "SILOS", "--runtime", "local", "--out", "OUT"],
    ["run", "STRATEGY", "--silos", "SILOS", "--runtime", "flower", "--out", "OUT"],
    ["compare", "STRATEGY", "--silos", "SILOS", "--out", "OUT"],
    ["server", "run", "STRATEGY", "--server", "SERVER", "--out", "OUT"],
]


@pytest.mark.parametrize("command", STARTS, ids=lambda command: "-".join(command[:6:5]))
def test_every_start_finds_too_few_silos_for_the_strategy(tmp_path: Path, command: list[str]) -> None:
    """They would wait for ever."""
    text = PLAIN % "name: x, min_silos: 3, waiting: {idle_s: 1.0}, task: {kind: digits}"
    (tmp_path / "STRATEGY").write_text(text)
    (tmp_path / "SILOS").write_text("silos: [{name: a, speed: 1.0}, {name: b, speed: 1.0}]")
    for name in ("a", "b"):
        (tmp_path / name).touch()
    (tmp_path / "SERVER").write_text("{certificates: ., state: state, silos: {a: a, b: b}}")
    (tmp_path / "SERVER").chmod(0o600)
    with pytest.raises(ConfigError, match=r"min_silos: 3, and the (silo|server's) file has 2 silos"):
        call(*(tmp_path / word if word.isupper() else word for word in command))


def test_all_files_of_the_task_that_are_not_there_are_told(tmp_path: Path) -> None:
    text = PLAIN % "name: x, task: %s"
    for task, missing in [
        ("{kind: custom, file: task.py}", ["task.py"]),
        ("{kind: silo-app, file: nothing.py}", ["nothing.py"]),
        ("{kind: csv, files: [a.csv, b.csv], target: t}", ["a.csv", "b.csv"]),
        ("{kind: clientapp, app: 'theirs.client_app:app'}", ["theirs/client_app.py"]),
    ]:
        (tmp_path / "x.yaml").write_text(text % task)
        with pytest.raises(ConfigError) as caught:
            call("validate", tmp_path / "x.yaml")
        told = [each.problem for each in (caught.value, *caught.value.others)]
        assert told == [f"{name} does not exist" for name in missing]
    (tmp_path / "x.yaml").write_text(text % "{kind: csv, files: [/srv/at/the/silo.csv], target: t}")
    assert "no errors" in call("validate", tmp_path / "x.yaml")


@pytest.mark.parametrize("named", ["patients", "others"])
def test_data_by_name_are_the_silos_and_need_no_file_beside_the_strategy(tmp_path: Path, named: str) -> None:
    text = PLAIN % "name: x, silos: [a, b], task: {kind: csv, file: 'data:patients', target: ill}"
    (tmp_path / "x.yaml").write_text(text)
    machines = ", ".join(f"{{name: {name}, speed: 1.0, data: {{{named}: {name}.csv}}}}" for name in "ab")
    (tmp_path / "silos.yaml").write_text(f"silos: [{machines}]")
    assert "no errors" in call("validate", tmp_path / "x.yaml")
    if named == "patients":
        assert "no errors" in call("validate", tmp_path / "x.yaml", "--silos", tmp_path / "silos.yaml")
        return
    with pytest.raises(ConfigError, match="asks for data:patients, and silo 'a' has no data by that name"):
        call("validate", tmp_path / "x.yaml", "--silos", tmp_path / "silos.yaml")
