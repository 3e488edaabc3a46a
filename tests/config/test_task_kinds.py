"""Tasks in strategy files: what is wrong is named by file, line and key, and what is right is built as it says."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.sections.evaluation import UNASKED
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.readers.idx import IdxSource
from fedsync.extras.readers.npz import NpzSource, RatingsNpz
from fedsync.extras.tasks.neural import ImagesTask
from fedsync.observe.run_builder import measuring
from fedsync.policies.schema import kinds
from fedsync.tasks.partition import Dirichlet, Own

FILE = """\
name: mine
stop: {{rounds: 4}}
local: {{learning_rate: 1.0}}
balancer: {{kind: fixed}}
barrier: {{kind: bsp}}
task:
  {task}
"""

TWICE = """\
from fedsync import Task
from fedsync.tasks import metrics

class Twice(Task):
    def model(self): ...
    def data(self, slot): ...
    def metrics(self): return metrics.shipped("f1", 2), metrics.shipped("f1", 2)
"""

KINDS = kinds("task")
PATHS = {
    "idx": "{kind: idx, folder: here}",
    "cifar": "{kind: cifar, folder: here}",
    "femnist": "{kind: femnist, folder: here}",
    "speech": "{kind: speech, folder: here, words: [up, down]}",
    "libsvm": "{kind: libsvm, file: here, test_file: here, features: 3}",
    "table": "{kind: table, file: here}",
    "npz": "{kind: npz, file: here}",
}


def load(folder: Path, task: str, *overrides: str) -> StrategyConfig:
    path = folder / "mine.yaml"
    path.write_text(FILE.format(task=task.replace(", ", "\n  ") if "{" not in task else task), encoding="utf-8")
    return StrategyConfig.load(path, overrides)


@pytest.mark.parametrize(
    ("task", "place", "message"),
    [
        ("kind: image", "line 7, task.kind", r"unknown kind 'image'. Did you mean 'images'"),
        ("kind: images", "line 6, task.data", "missing"),
        ("{kind: images, data: {kind: keywords}}", "line 7, task.data.kind", "unknown kind 'keywords'. .*digits28"),
        ("{kind: images, data: {kind: digits28}, model: lenet}", "line 7, task.model", "'lenet' is not .*'lenet5'"),
        ("{kind: images, data: {kind: cifar, folder: x, classes: 20}}", "line 7, task.data.classes", "20 is not"),
        ("{kind: sequences, data: {kind: keywords, frames: 1}}", "line 7, task.data.frames", "at least 2"),
        ("{kind: sequences, data: {kind: speech, folder: x, words: [a]}}", "line 7, task.data.words", "at least 2"),
        # YAML's yes is true, and a word of Speech Commands.
        ("{kind: sequences, data: {kind: speech, folder: x, words: [true, up]}}", "task.data.words.0", "in quotes"),
        ("{kind: linear, data: {kind: libsvm, file: x}}", "line 7, task.data.features", "missing"),
        ("{kind: linear, data: {kind: blobs}, l1: -1}", "line 7, task.l1", "at least 0"),
        ("{kind: factorisation, data: {kind: blobs}}", "line 7, task.data.kind", "Allowed: npz, ratings"),
        ("{kind: fuzzy-c-means, data: {kind: blobs}, fuzziness: 1}", "line 7, task.fuzziness", "greater than 1"),
        ("{kind: mlp, data: {kind: blobs}, partition: {kind: shard}}", "line 7, task.partition.kind", "'shards'"),
        ("{kind: mlp, data: {kind: blobs}, partition: {kind: own}}", "task", "every silo the same samples"),
        ("{kind: digits, partition: {kind: own}}", "line 7, task.partition.kind", "unknown kind 'own'"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, task: str, place: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, task)

    assert place in caught.value.place


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("local.learning_rate=1.5", "local.learning_rate.* 1.5 above 1 does not fit task.kind k-means"),
        ("local.momentum=0.9", "local.momentum.* 0.9 does not fit task.kind k-means"),
        ("local.weight_decay=0.1", "local.weight_decay.* 0.1 does not fit task.kind k-means"),
        ("local.clip_norm=1.0", "local.clip_norm.* does not fit task.kind k-means"),
        ("local.optimizer=adam", "local.optimizer.* adam does not fit task.kind k-means"),
    ],
)
def test_statistics_want_plain_steps(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*Use plain sgd"):
        load(tmp_path, "{kind: k-means, data: {kind: blobs}}", override)


def test_networks_do_not(tmp_path: Path) -> None:
    config = load(tmp_path, "{kind: mlp, data: {kind: blobs}}", "local.momentum=0.9", "local.learning_rate=1.5")

    assert config.local.momentum == 0.9


@pytest.mark.parametrize("kind", PATHS)
def test_paths_are_relative_to_the_file_where_something_is_there(tmp_path: Path, kind: str) -> None:
    task = f"{{kind: mlp, data: {PATHS[kind]}}}"
    before = load(tmp_path, task).task.source
    (tmp_path / "here").mkdir()

    after = load(tmp_path, task).task.source

    for key in after.paths:
        assert (getattr(before, key), getattr(after, key)) == ("here", str((tmp_path / "here").resolve()))


def test_what_a_file_says_is_built(tmp_path: Path) -> None:
    data, partition = "{kind: idx, folder: far/away, first_class: 1}", "{kind: dirichlet, alpha: 0.3}"

    task = load(tmp_path, f"{{kind: images, model: cnn, norm: batch, data: {data}, partition: {partition}}}").task

    source = IdxSource("far/away", first_class=1)
    assert task.build() == ImagesTask(source, Dirichlet(0.3), 0.2, network_name="cnn", norm="batch")


def test_no_kind_of_task_is_known_by_importing_torch() -> None:
    code = "import sys; from fedsync.policies.schema import kinds; print(len(kinds('task')), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(KINDS)), "False"]


def test_only_ratings_may_be_missing(tmp_path: Path) -> None:
    data = "{kind: npz, file: a.npz}"

    ratings, points = (
        load(tmp_path, f"{{kind: {kind}, data: {data}}}").task.build() for kind in ("factorisation", "k-means")
    )

    assert (ratings.samples(), points.samples()) == (RatingsNpz("a.npz"), NpzSource("a.npz"))
    assert load(tmp_path, f"{{kind: k-means, data: {data}, partition: {{kind: own}}}}").task.build().partition == Own()


def test_every_kind_is_in_the_schema_and_the_docs() -> None:
    schema = json.dumps(StrategyConfig.model_json_schema())
    page = (Path(__file__).parents[2] / "docs" / "shipped-tasks.md").read_text(encoding="utf-8")

    for kind, section in KINDS.items():
        assert f'"const": "{kind}"' in schema
        assert f"`{kind}`" in page, "say what it is"
        assert section.__doc__
    additive = {kind for kind, section in KINDS.items() if section.additive}
    assert additive == {"k-means", "fuzzy-c-means", "gaussian-mixture", "factorisation"}


def test_metrics_that_a_task_returns_in_error_are_not_left_out(tmp_path: Path) -> None:
    """Training without the metrics would hide the error."""
    (tmp_path / "twice.py").write_text(TWICE, encoding="utf-8")
    with pytest.raises(ConfigError, match="two metrics are called f1"):
        measuring(load(tmp_path, "{kind: custom, file: twice.py}"))


def test_an_unbuilt_task_is_said_once_and_leaves_metrics_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What they are, only silos know: no metrics by mistake, and none that were named left out."""
    config = load(tmp_path, "{kind: custom, file: elsewhere.py}")
    assert measuring(config).evaluation.metrics is None
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(UNASKED) and "elsewhere.py" in said
    caplog.clear()
    for quiet in (
        "evaluation={metrics: []}",
        "evaluation={metrics: [f1], classes: 2}",
        "task={kind: silo-app, file: elsewhere.py}",
    ):
        measuring(load(tmp_path, "{kind: custom, file: elsewhere.py}", quiet))
    assert measuring(load(tmp_path, "{kind: digits}")).evaluation.metrics == ["accuracy", "balanced_accuracy", "f1"]
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["cipher={kind: pad, metrics: plain}", "aggregation={kind: fedavg, weight: silo}"], ""),
        (["cipher={kind: pad, bits: 8, metrics: plain}"], "needs sealed sums of 16 bits"),
        (["cipher={kind: pad, metrics: plain}"], "adds up sums"),
        (["wire={up: int8}"], "without server_optimizer and wire"),
        (["aggregation={kind: median}"], "adds up sums"),
        (["aggregation={kind: fedavg, weight: examples}"], "weight: silo"),
    ],
)
def test_a_survey_by_itself_needs_exact_sums(changes: list[str], problem: str) -> None:
    task = "task={kind: survey, of: {kind: csv, files: [a.csv], target: ill}}"
    with pytest.raises(ConfigError, match=rf"task\.kind: 'survey'.*{problem}") if problem else nullcontext():
        StrategyConfig.load("fedavg", [task, *changes])
