"""Every mistake in a strategy file gives one error that names file, line and key and says what to do."""

import os
import re
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.locate import shipped_folder
from fedsync.config.strategy import StrategyConfig
from fedsync.core.speed.sizing import Scale

GOOD = """\
name: mine
seed: 7
stop: {rounds: 4}
local:
  steps: 20
  batch_size: 32
balancer:
  kind: proportional
barrier: {kind: bsp}
task: {kind: digits}
"""


def load(folder: Path, text: str, *overrides: str) -> StrategyConfig:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return StrategyConfig.load(path, overrides)


def complaint(folder: Path, text: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    assert not caught.value.remedy.endswith("."), "the message adds it"
    assert "Input should" not in str(caught.value), "pydantic's words are not ours"
    return caught.value


MISTAKES = [
    # what to replace, by what; line and key that the message names; the problem; the remedy
    ("steps: 20", "stpes: 20", 5, "local.stpes", "unknown key", "Did you mean 'steps'? Allowed: batch_size, "),
    ("seed: 7", "sede: 7", 2, "sede", "unknown key", "Did you mean 'seed'?"),
    ("seed: 7", "seed: -1", 2, "seed", "-1 is not allowed", "at least 0"),
    ("seed: 7", f"seed: {2**63}", 2, "seed", f"{2**63} is not allowed", f"at most {2**63 - 1}"),
    ("seed: 7", "7: 7", 2, "7", "unknown key", "Allowed: aggregation, balancer"),
    ("steps: 20", "steps: many", 5, "local.steps", "'many' is not allowed", "Write a whole number"),
    ("steps: 20", "steps: 20.0", 5, "local.steps", "20.0 is not allowed", "Write a whole number"),
    ("steps: 20", "steps: true", 5, "local.steps", "True is not allowed", "Write a whole number"),
    ("steps: 20", "steps:", 5, "local.steps", "the value is empty", "Write a whole number"),
    ("name: mine", "name: 5", 1, "name", "5 is not allowed", "Write text, in quotes if need be"),
    ("name: mine", "name: two words", 1, "name", "'two words' is not allowed", "[A-Za-z0-9._-]+"),
    ("steps: 20", "resources: 1", 5, "local.resources", "1 is not allowed", "Write true or false"),
    ("steps: 20", "learning_rate: fast", 5, "local.learning_rate", "'fast' is not allowed", "Write a number"),
    ("batch_size: 32", "batch_size: 0", 6, "local.batch_size", "0 is not allowed", "at least 1"),
    ("steps: 20", "learning_rate: -0.1", 5, "local.learning_rate", "-0.1 is not allowed", "greater than 0"),
    ("steps: 20", "learning_rate: .nan", 5, "local.learning_rate", "nan is not allowed", "Write a finite number"),
    ("steps: 20", "learning_rate: .inf", 5, "local.learning_rate", "inf is not allowed", "Write a finite number"),
    ("steps: 20", "momentum: 1.0", 5, "local.momentum", "1.0 is not allowed", "less than 1"),
    ("rounds: 4", "rounds: 4, target_accuracy: 95", 3, "stop.target_accuracy", "95 is not allowed", "at most 1"),
    ("rounds: 4", "rounds: 4, target_accuracy: 0", 3, "stop.target_accuracy", "0 is not allowed", "greater than 0"),
    ("rounds: 4", "rounds: 4, target_accuracy: .inf", 3, "stop.target_accuracy", "inf is not", "a finite number"),
    ("rounds: 4", "rounds: 0", 3, "stop.rounds", "0 is not allowed", "at least 1"),
    ("rounds: 4", "patience: 4", 3, "stop", "nothing bounds the run", "Add `rounds` or `seconds`"),
    ("steps: 20", "optimizer: {kind: addamw}", 5, "local.optimizer", "its kind is 'addamw'", "Did you mean 'adamw'?"),
    ("steps: 20", "optimizer: {betas: [0.9]}", 5, "local.optimizer", "its kind is None", "Allowed: adadelta,"),
    ("steps: 20", "optimizer: {kind: adamw, beta: 1}", 5, "local.optimizer", "adamw takes no 'beta'", "mean 'betas'?"),
    ("steps: 20", "optimizer: {kind: adamw, lr: 1}", 5, "local.optimizer", "adamw takes no 'lr'", "Allowed: amsgrad, "),
    ("steps: 20", "optimizer: {kind: adamw, betas: [2, 1]}", 5, "local.optimizer", "refuses betas [2, 1]", "Correct"),
    ("steps: 20", "optimizer: {kind: adamw, betas: [0.9]}", 5, "local.optimizer", "refuses betas [0.9]", "Correct"),
    ("{kind: digits}", "{kind: digits}\ncipher: {kind: bfv, bits: 10}", 11, "cipher.bits", "10 is not", "12, 16, 8"),
    (
        "{kind: digits}",
        "{kind: csv, target: y, file: x, standardise: federate}",
        *(10, "task.standardise", "'federate' is not allowed", "Did you mean 'federated'?"),
    ),
    (
        "{kind: digits}",
        "{kind: csv, target: y, file: x, columns: {a: {gaps: [[]]}}}",
        *(10, "task.columns.a.gaps.0", "[] is not allowed", "Write a number or text"),
    ),
    (
        "{kind: digits}",
        "{kind: csv, target: y, file: x, columns: {a: {gaps: [{b: 1}]}}}",
        *(10, "task.columns.a.gaps.0", "{'b': 1} is not allowed", "Write a number or text"),
    ),
    ("steps: 20", "optimizer: {kind: rprop, step_sizes: 1}", 5, "local.optimizer", "refuses step_sizes 1", "Correct"),
    ("steps: 20", "optimizer: {kind: adamw, betas: {a: 1}}", 5, "local.optimizer", "betas is no number", "Change it"),
    ("steps: 20", "optimizer: {kind: sgd, momentum: 1}", 5, "local.optimizer", "momentum 1 is not in 0..1", "0.9"),
    ("steps: 20", "optimizer: {kind: sgd, momentum: x}", 5, "local.optimizer", "sgd refuses momentum x", "Correct"),
    ("steps: 20", "optimizer: adam\n  momentum: 0.9", 6, "local.momentum", "it has no effect on adam", "use sgd"),
    ("steps: 20", "optimizer: {kind: adamw}\n  weight_decay: 0.1", 6, "local.weight_decay", "has keywords", "among"),
    ("steps: 20", "precision: bf61", 5, "local.precision", "'bf61' is not allowed", "Did you mean 'bf16'?"),
    ("steps: 20", "clip_norm: 0.0", 5, "local.clip_norm", "0.0 is not allowed", "greater than 0"),
    ("steps: 20", "optimizer: sdg", 5, "local.optimizer", "'sdg' is not allowed", "'sgd'? Allowed: adadelta, "),
    ("steps: 20", "device: gpu", 5, "local.device", "'gpu' is not allowed", "auto|cpu|cuda"),
    ("kind: proportional", "kind: porportional", 8, "balancer.kind", "unknown kind 'porportional'", "'proportional'?"),
    ("kind: proportional", "scale: batch", 7, "balancer", "no kind is chosen", "Write `kind: ...` in this section"),
    ("kind: proportional", "kind: 5", 8, "balancer.kind", "unknown kind '5'", "Allowed: equalise, fixed,"),
    ("kind: bsp", "kind: bspp", 9, "barrier.kind", "unknown kind 'bspp'", "Did you mean 'bsp'?"),
    ("kind: bsp", "", 9, "barrier", "no kind is chosen", "Write `kind: ...` in this section"),
    ("{kind: bsp}", "bsp", 9, "barrier", "a section is expected here, not 'bsp'", "Write barrier: {kind: bsp}"),
    ("{kind: digits}", "digits", 10, "task", "a section is expected here, not 'digits'", "Write task: {kind: digits}"),
    ("{rounds: 4}", "4", 3, "stop", "a section is expected here, not 4", "Write stop: {key: value}"),
    ("{rounds: 4}", "", 3, "stop", "the value is empty", "Write stop: {key: value}"),
    ("barrier: {kind: bsp}\n", "", 1, "barrier", "missing", "Add this key"),
    ("  kind: proportional", "  kind: proportional\n  scale: bacth", 9, "balancer.scale", "'bacth'", "'batch'?"),
    ("seed: 7", "seed: 7\nseed: 8", 3, "seed", "the key 'seed' occurs twice", "Remove one of the two"),
    ("steps: 20", "steps: 20\n  steps: 30", 6, "steps", "the key 'steps' occurs twice", "Remove one of the two"),
    ("{kind: digits}", "{kind: csv, files: a.csv, target: y}", 10, "task.files", "'a.csv' is not", "Write a list"),
    ("{kind: digits}", "{kind: csv, files: [], target: y}", 10, "task.files", "[] is not", "at least 1"),
    ("{kind: digits}", "{kind: csv, files: [1], target: y}", 10, "task.files.0", "1 is not allowed", "Write text"),
    (
        "kind: digits",
        "kind: digits, partition: {kind: dirichlet, alpha: 0}",
        10,
        "task.partition.alpha",
        "0 is",
        "than 0",
    ),
    # Impossible together: the line is that of the key named first.
    ("kind: proportional", "kind: proportional\n  floor: 64", 9, "balancer.floor", "64 exceeds local.batch", "one"),
    ("kind: proportional", "kind: proportional\n  cap: 8", 9, "balancer.cap", "8 lies below local.batch", "one"),
]


@pytest.mark.parametrize(("old", "new", "line", "key", "problem", "remedy"), MISTAKES)
def test_a_mistake_is_named_by_file_line_and_key_with_a_remedy(
    tmp_path: Path, old: str, new: str, line: int, key: str, problem: str, remedy: str
) -> None:
    assert GOOD.count(old) == 1
    error = complaint(tmp_path, GOOD.replace(old, new))
    assert re.search(rf"mine\.yaml, line {line}(, {re.escape(key)})?$", error.place), error.place
    assert key in str(error)
    assert problem in f"{error.place} {error.problem}"
    assert remedy in error.remedy


@pytest.mark.parametrize(
    ("override", "place", "problem", "remedy"),
    [
        ("local.stpes=3", "--set local.stpes", "unknown key", "'steps'"),
        ("local.steps=0", "--set local.steps", "0 is not allowed", "at least 1"),
        ("barrier.kind=bspp", "--set barrier.kind", "unknown kind 'bspp'", "'bsp'"),
        ("barrier=bsp", "--set barrier", "a section is expected here", "Write barrier: {kind: bsp}"),
        ("balancer.floor=64", "--set balancer.floor", "64 exceeds", "Change one of the two"),
        ("local.batch_size=.nan", "--set local.batch_size", "nan is not allowed", "whole number"),
        ("stop={}", "--set stop", "nothing bounds the run", "rounds"),
        ("stop.rounds=null", "stop", "nothing bounds the run", "rounds"),
        ("local.steps", "--set local.steps", "not an assignment", "--set section.key=value"),
        ("=3", "--set =3", "not an assignment", "--set section.key=value"),
        ("seed=99999999999999999999", "--set seed", "is not allowed", f"at most {2**63 - 1}"),
        ("local..steps=3", "--set local..steps=3", "not an assignment", "--set section.key=value"),
        ("local.steps.x=3", "--set local.steps.x=3", "'steps' is not a section", "Set 'steps' itself"),
        ("stop.rounds=[", "--set stop.rounds=[", "is not YAML", "Quote it"),
    ],
)
def test_a_mistake_in_a_command_is_named(tmp_path: Path, override: str, place: str, problem: str, remedy: str) -> None:
    error = complaint(tmp_path, GOOD, override)
    assert error.place.endswith(place)
    assert problem in f"{error.place} {error.problem}"
    assert remedy in error.remedy


def test_an_assignment_leaves_an_alias_of_its_section_alone(tmp_path: Path) -> None:
    config = load(tmp_path, f"{GOOD}train_config: &same {{a: 1}}\nevaluate_config: *same\n", "train_config.a=2")
    assert (config.train_config, config.evaluate_config) == ({"a": 2}, {"a": 1})


NO_VALUES = [
    # the value; what the message says of it
    ("2024-13-45", "takes '2024-13-45' for a date"),
    ("2024-01-01 00:00:00 +99:99", "for a date"),
    ("!!timestamp foo", "takes 'foo' for a date"),
    ("!!timestamp {=: foo}", "takes this for a date"),
    ("0b_", "takes '0b_' for a whole number"),
    ("!!int ''", "takes '' for a whole number"),
    ("9" * 5000, "for a whole number"),
    ("0x" + "f" * 5000, "for a whole number"),
    ("!!float x", "takes 'x' for a number"),
    ("1" + ":1" * 300 + ".5", "for a number"),
    ("!!bool maybe", "takes 'maybe' for true or false"),
    ('"\\UFFFFFFFF"', "not YAML"),
    ("[" * 3000, "nested too deeply"),
    ("{a: " * 3000, "nested too deeply"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("value", "problem"), NO_VALUES, ids=[value[:12] for value, _ in NO_VALUES])
def test_bad_yaml_is_one_mistake_in_a_file_and_on_the_command_line(tmp_path: Path, value: str, problem: str) -> None:
    in_file = complaint(tmp_path, GOOD.replace("steps: 20", f"steps: {value}"))
    said = complaint(tmp_path, GOOD, f"local.steps={value}")
    assert in_file.place.endswith("mine.yaml, line 5")
    assert said.place.startswith("--set local.steps=")
    for error in (in_file, said):
        assert problem in error.problem
        assert "Quote it" in error.remedy
        assert len(error.place) < 80 + len(str(tmp_path)), "what is long is cut"
        assert len(error.problem) < 150


def test_what_is_quoted_is_text(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD.replace("name: mine", "name: '2024-13-45'"))
    assert config.name == "2024-13-45"
    assert load(tmp_path, GOOD, "name='0b_'").name == "0b_"


def test_merge_keys_are_no_keys_that_stand_twice(tmp_path: Path) -> None:
    text = GOOD.replace("local:\n", "local:\n  <<: {steps: 10, batch_size: 8}\n")
    assert load(tmp_path, text).local.steps == 20


def test_the_largest_seed_counts(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, f"seed={2**63 - 1}").policies().seed == 2**63 - 1
    assert load(tmp_path, GOOD, "seed=0").seed == 0


def test_all_mistakes_are_told_at_a_time(tmp_path: Path) -> None:
    text = GOOD.replace("steps: 20", "steps: 0\n  stpes: 3\n  treads: 4").replace("batch_size: 32", "batch_size: 0")
    text = text.replace("seed: 7", "seed: x\non: 3\nsilos: [a, a]")
    error = complaint(tmp_path, text)
    told = [str(each) for each in (error, *error.others)]
    for key in ("seed", "on", "local.steps", "local.batch_size", "local.stpes", "local.treads"):
        assert any(re.search(rf"line \d+, {key}: ", each) for each in told), (key, told)
    assert len(told) == 6
    assert [int(line) for line in re.findall(r"line (\d+), ", "\n".join(told))] == sorted(
        int(line) for line in re.findall(r"line (\d+), ", "\n".join(told))
    )


def test_all_contradictions_between_sections_are_told_at_a_time(tmp_path: Path) -> None:
    error = complaint(
        tmp_path, GOOD, "cipher={kind: bfv, members: 2}", "wire={up: bf16}", "barrier={kind: buffered, size: 1}"
    )
    told = "\n".join(str(each) for each in (error, *error.others))
    assert "wire is for runs in the clear" in told and "silos would decrypt no version" in told


def test_a_pipe_is_refused_clearly(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="a pipe or a device"):
        StrategyConfig.load(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("name: [mine\n", "line 2", "not YAML"),
        ("name: mine\n\tseed: 7\n", "line 2", "not YAML"),
        ("name: 'mine\n", "line 2", "not YAML"),
        ("just words", "mine.yaml", "not a mapping"),
        ("- a\n- b\n", "mine.yaml", "not a mapping"),
        ("", "name", "missing"),
        ("a: &a [*a]\n", "line 1", "anchor|recursive|itself"),
        ("name: \x00", "mine.yaml", "not YAML"),
        ("? [1]\n: 2\n", "line 1", "not YAML"),
    ],
)
def test_what_is_no_strategy_at_all(tmp_path: Path, text: str, place: str, problem: str) -> None:
    error = complaint(tmp_path, text)
    assert place in error.place
    assert re.search(problem, error.problem)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(ConfigError, match=r"mine\.yaml: cannot be read.*encoding"):
        StrategyConfig.load(tmp_path / "mine.yaml")


def test_a_missing_file_lists_what_is_shipped() -> None:
    with pytest.raises(ConfigError, match=r"lb-bps: no such file\. Did you mean 'lb-bsp'\? Allowed: .*fedavg.*lb-bsp"):
        StrategyConfig.load("lb-bps")


def test_a_good_override_counts(tmp_path: Path) -> None:
    overrides = ["local.steps=3", "balancer={kind: fixed}", "stop.seconds=2.5", "aggregation.kind=fedavg"]
    config = load(tmp_path, GOOD, *overrides)
    assert (config.local.steps, config.balancer.kind, config.stop.seconds) == (3, "fixed", 2.5)
    assert config.local.batch_size == 32, "what stands beside it stays"
    assert StrategyConfig.load("lb-bsp", "local.steps=3").local.steps == 3, "a single one, not its letters"


def test_a_whole_number_will_do_where_a_fraction_may_stand(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD.replace("steps: 20", "learning_rate: 1")).local.learning_rate == 1


@pytest.mark.parametrize("path", sorted(shipped_folder().glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_strategy_loads_by_name_and_is_called_like_its_file(path: Path) -> None:
    config = StrategyConfig.load(path.stem)
    assert config.name == path.stem
    assert StrategyConfig.model_validate(config.model_dump(mode="json")) == config, "journals hold it in this form"
    assert path.read_text(encoding="utf-8").startswith("# "), "it says what it is"


def test_paths_of_a_task_are_relative_to_the_file_where_something_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,0\n")
    task = "{kind: csv, files: [a.csv, elsewhere/b.csv], target: y}"
    config = load(tmp_path, GOOD.replace("{kind: digits}", task))
    assert config.task.kind == "csv"
    assert config.task.files == [str((tmp_path / "a.csv").resolve()), "elsewhere/b.csv"]


BLOBS = "data: {kind: blobs}"
RATED = "{kind: factorisation, data: {kind: ratings}}"
SQUARED = "{kind: linear, loss: squared, data: {kind: sparse, features: 30, target: number}}"


@pytest.mark.parametrize(
    ("task", "good", "bad"),
    [
        ("{kind: digits}", [0.01, 1], [0, -0.5, 1.01]),
        (f"{{kind: mlp, {BLOBS}}}", [0.95], [0.0, 95.0]),
        ("{kind: linear, data: {kind: sparse}}", [0.95], [-0.1, 2]),
        (SQUARED, [-0.5, 0], [0.5]),
        (f"{{kind: k-means, {BLOBS}}}", [-1e6, 0.0], [0.9]),
        (f"{{kind: fuzzy-c-means, {BLOBS}}}", [-3], [0.9]),
        (RATED, [-0.1], [0.9]),
        (f"{{kind: gaussian-mixture, {BLOBS}}}", [-2.5, 0.0, 3.5], []),
        ("{kind: custom, file: mine.py}", [-2.5, 0.0, 3.5], []),
    ],
)
def test_a_target_is_one_that_a_task_may_reach(tmp_path: Path, task: str, good: list[float], bad: list[float]) -> None:
    text = GOOD.replace("{kind: digits}", task)
    config = load(tmp_path, text)
    for target in good:
        wanted = load(tmp_path, text, f"stop.target_accuracy={target:f}")
        assert wanted.policies().stop.target_accuracy == target
        config.check_target(target)
    for target in bad:
        with pytest.raises(ConfigError, match=rf"^--set stop\.target_accuracy: {target:g} is not allowed: accuracy of"):
            load(tmp_path, text, f"stop.target_accuracy={target:f}")
        with pytest.raises(ConfigError, match=rf"^--target-accuracy: {target:g} is not allowed.*Write a number"):
            config.check_target(target)
    config.check_target(None)


def test_policies_follow_the_file(tmp_path: Path) -> None:
    balancer = "balancer={kind: proportional, floor: 4, cap: 50, scale: steps, speeds: declared}"
    policies = load(tmp_path, GOOD, balancer).policies()
    sizing = policies.sizing
    assert (sizing.floor, sizing.cap, sizing.scale, policies.declared_speeds) == (4, 50, Scale.STEPS, True)
    assert (sizing.work.steps, sizing.work.batch_size, policies.seed, policies.stop.rounds) == (20, 32, 7, 4)
    fixed = load(tmp_path, GOOD, "balancer={kind: fixed}").policies()
    assert (fixed.sizing.balancer, fixed.declared_speeds) == (None, False)
