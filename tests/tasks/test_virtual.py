"""Every kind of task, from YAML to a finished run in virtual time: the loss falls, and the same bytes come again."""

import json
from pathlib import Path

import pytest
import torch

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.simulation.run import run_virtual

pytest.importorskip("sklearn")

IMAGES = "data: {kind: digits28, samples: 120, test_samples: 20}"
BLOBS = "data: {kind: blobs, samples: 120, blobs: 3}"
SPARSE = "{kind: sparse, samples: 150, features: 300, nonzeros: 8, informative: 20"
RUNS = {
    "lenet5": (f"{{kind: images, model: lenet5, {IMAGES}, partition: {{kind: pathological}}}}", 0.1, 6),
    "cnn": (f"{{kind: images, model: cnn, norm: batch, {IMAGES}, partition: {{kind: shards}}}}", 0.02, 3),
    "resnet20": (f"{{kind: images, model: resnet20, {IMAGES}}}", 0.01, 1),
    "lstm": ("{kind: sequences, hidden: 8, data: {kind: keywords, samples: 120, words: 3, frames: 8}}", 1.0, 6),
    "mlp": (f"{{kind: mlp, hidden: [8], {BLOBS}, partition: {{kind: dirichlet}}}}", 0.05, 3),
    "logistic": (f"{{kind: linear, data: {SPARSE}}}}}", 2.0, 3),
    "svm": (f"{{kind: linear, loss: hinge, l2: 0.001, data: {SPARSE}}}}}", 0.5, 3),
    "lasso": (f"{{kind: linear, loss: squared, l1: 0.001, data: {SPARSE}, target: number}}}}", 0.5, 3),
    "ridge": (f"{{kind: linear, loss: squared, l2: 0.001, data: {SPARSE}, target: number}}}}", 0.5, 3),
    "k-means": (f"{{kind: k-means, clusters: 3, spread: 3.0, {BLOBS}, partition: {{kind: dirichlet}}}}", 0.5, 3),
    "fuzzy c-means": (f"{{kind: fuzzy-c-means, clusters: 3, spread: 3.0, {BLOBS}}}", 0.5, 3),
    "mixture": (f"{{kind: gaussian-mixture, components: 3, spread: 3.0, {BLOBS}}}", 0.5, 3),
    "factorisation": ("{kind: factorisation, data: {kind: ratings, users: 100, items: 12}}", 0.5, 3),
    "non-negative factorisation": (
        "{kind: factorisation, non_negative: true, data: {kind: ratings, users: 100, items: 12, non_negative: true}}",
        0.5,
        3,
    ),
}
STRATEGY = """\
name: tried
seed: 7
stop: {{rounds: 3}}
local: {{steps: {steps}, batch_size: 16, learning_rate: {rate}, device: cpu, resources: false}}
balancer: {{kind: proportional}}
barrier: {{kind: bsp}}
task: {task}
"""


CLUSTER = ClusterConfig.model_validate({"silos": [{"name": "a", "speed": 200.0}, {"name": "b", "speed": 100.0}]})


def tried(folder: Path, task: str, rate: float, steps: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tried.yaml").write_text(STRATEGY.format(task=task, rate=rate, steps=steps))
    return folder / "tried.yaml"


def run(folder: Path, task: str, rate: float, steps: int) -> tuple[list[dict[str, object]], bytes]:
    """The rounds of a run over two silos, one twice as fast as the other, and the bytes of its model."""
    run_virtual(StrategyConfig.load(tried(folder, task, rate, steps)), CLUSTER, folder)
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    state = torch.load(folder / "model.pt", weights_only=True)
    return rounds, b"".join(tensor.numpy().tobytes() for tensor in state.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["factorisation", "non-negative factorisation"])
def test_encrypted_factors_are_those_in_the_clear_up_to_their_integers(tmp_path: Path, name: str) -> None:
    """Changes of statistics travel as integers of 16 bits: what they are off by must not make a solve run away."""
    file = tried(tmp_path, *RUNS[name])
    losses = []
    for cipher in ("{kind: plain}", "{kind: bfv, bits: 16, metrics: plain}"):
        config = StrategyConfig.load(file, [f"cipher={cipher}", "stop.rounds=6"])
        losses.append(run_virtual(config, CLUSTER, tmp_path / str(len(losses)))["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_three_rounds_lower_the_loss(tmp_path: Path, name: str) -> None:
    rounds, model = run(tmp_path / "one", *RUNS[name])
    assert len(rounds) == 3
    assert rounds[-1]["loss"] < rounds[0]["loss"]  # type: ignore[operator]  # numbers, out of JSON
    assert run(tmp_path / "two", *RUNS[name]) == (rounds, model)
