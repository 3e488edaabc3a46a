"""What a ServerApp says to `FedSync.start`, as Flower's quickstart does."""

import logging
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message
from flwr.clientapp import ClientApp
from torch import nn

from fedsync.common.errors import ConfigError, RunError
from fedsync.common.run_claim import Existing, claimed
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.journal import JOURNAL
from fedsync.core.orders import WorkOrder
from fedsync.flower import flower_messages as messages
from fedsync.flower import result
from fedsync.flower.flower_strategy import FedSync
from fedsync.observe.replay import replay
from fedsync.server.timeouts import Timeouts
from fedsync.silo.protocol import Request, Train
from tests.e2e.deployed import SMALL
from tests.flower.grid import DirectGrid, honest, unless

pytestmark = pytest.mark.usefixtures("silos_here")

QUICK = [SMALL, "local.steps=1", "local.batch_size=8", "min_silos=2", "stop.rounds=2"]
TIMING = Timeouts(poll_s=0.001, order_timeout_s=20, join_timeout_s=60)


def _strategy(out: Path, *overrides: str) -> FedSync:
    return FedSync(StrategyConfig.load("fedavg", [*QUICK, *overrides]), out=out, timing=TIMING)


def test_its_configurations_reach_silos_with_the_run(tmp_path: Path) -> None:
    specs: set[str] = set()

    def answer(message: Message, context: Context) -> Message | None:
        specs.add(messages.read_request(message)[0])
        return honest(message, context)

    told, judged = ConfigRecord({"lr": 0.01}), ConfigRecord({"full": True})
    strategy = _strategy(tmp_path, "train_config={lr: 1.0, epochs: 2}")
    result = strategy.start(DirectGrid(2, {1: answer}), num_rounds=1, train_config=told, evaluate_config=judged)
    assert result.summary["rounds"] == 1
    [spec] = [RunSpec.parse(text) for text in specs]
    assert (spec.train_config, spec.evaluate_config) == ({"lr": 0.01, "epochs": 2}, {"full": True})
    assert dict(told) == {"lr": 0.01}, "what the caller gave stays as it is"


def test_a_run_without_rounds_is_refused(tmp_path: Path) -> None:
    for wrong in (0, 2.5, "3"):
        with pytest.raises(ConfigError, match=rf"^FedSync.start, num_rounds: {wrong!r} is not allowed. Write a whole"):
            _strategy(tmp_path).start(DirectGrid(2, {}), num_rounds=wrong)  # type: ignore[arg-type]


def test_a_second_start_does_not_replace_the_run_in_its_folder(tmp_path: Path) -> None:
    _strategy(tmp_path).start(DirectGrid(2, {}))
    kept = (tmp_path / JOURNAL).read_bytes()
    with pytest.raises(ConfigError, match=r"has the files of a run\. Choose another folder.*overwrite=True"):
        _strategy(tmp_path).start(DirectGrid(2, {}))
    assert (tmp_path / JOURNAL).read_bytes() == kept
    again = FedSync(StrategyConfig.load("fedavg", QUICK), out=tmp_path, timing=TIMING, overwrite=True)
    with claimed(tmp_path, Existing.RESUME), pytest.raises(ConfigError, match="a run is at work here"):
        again.start(DirectGrid(2, {}))
    again.start(DirectGrid(2, {}))
    assert (tmp_path / JOURNAL).read_bytes() != kept


MODEL = """
import torch
from torch import nn
from fedsync import SiloData, Task
from fedsync.client import SiloApp

def make():
    norm = nn.LayerNorm(4)  # used twice, and equal to another until it is trained
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LayerNorm(4), norm, norm)
    model[2].weight = model[0].weight  # tied
    return model

DATA = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(0, 4, (40,)))
"""
TASK = """
class Mine(Task):
    def model(self):
        return make()

    def data(self, slot):
        return SiloData(train=DATA, test=DATA)
"""
OWN_LOOP = """
app = SiloApp()

@app.setup()
def setup(silo):
    return silo.use(make, DATA)

@app.train()
def fit(work, model, train):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in work.loader(train):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def _theirs() -> nn.Module:
    """What a ServerApp makes of the silos' model: with weights of its own, tied and counted."""
    norm = nn.LayerNorm(4)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LayerNorm(4), norm, norm)
    model[2].weight = model[0].weight
    model(torch.randn(8, 4))
    return model


def _started(folder: Path, kind: str, given: ArrayRecord) -> tuple[list[ArrayRecord], DirectGrid]:
    """The versions of a run that begins with these arrays, and what it asked of whom."""
    file = folder / "mine.py"
    file.write_text(MODEL + (TASK if kind == "custom" else OWN_LOOP))
    grid, versions = DirectGrid(2), list[ArrayRecord]()
    strategy = _strategy(folder / "run", f"task={{kind: {kind}, file: {file}}}")
    strategy.start(grid, given, evaluate_fn=lambda version, arrays: versions.append(arrays))  # type: ignore[func-returns-value]
    assert len(versions) == 3
    return versions, grid


@pytest.mark.parametrize("kind", ["custom", "silo-app"])
def test_initial_arrays_are_matched_by_name_whatever_their_order_and_types(kind: str, tmp_path: Path) -> None:
    state = _theirs().state_dict()
    assert state["1.num_batches_tracked"].dtype is torch.int64 and state["2.weight"] is not None
    given = {name: state[name].to(torch.float64) if name == "0.bias" else state[name] for name in reversed(state)}
    versions, grid = _started(tmp_path, kind, ArrayRecord(given))
    for arrays in versions:
        assert {name: array.dtype for name, array in arrays.items()} == {
            name: str(tensor.numpy().dtype) for name, tensor in given.items()
        }, "what comes back has the form of what went"
        _theirs().load_state_dict(arrays.to_torch_state_dict())
    for name, array in versions[0].items():
        np.testing.assert_array_equal(array.numpy(), state[name].numpy())
    last = versions[-1].to_torch_state_dict()
    assert torch.equal(last["0.weight"], last["2.weight"]) and not torch.equal(last["0.weight"], state["0.weight"])
    assert torch.equal(last["4.bias"], last["5.bias"]) and not torch.equal(last["4.bias"], last["3.bias"])
    assert last["1.num_batches_tracked"] == 1 + 2 * 1, "two rounds of one step"
    asked = [question for _, question in grid.pushed].count("AskModel")
    assert bool(asked) == (kind == "silo-app"), "a server that can build the model asks nobody"


MISFITS = [
    ("missing", {"0.bias": None}, "they have no '0.bias', which the model at the silos has"),
    ("too many", {"head.bias": np.ones(3)}, "they have 'head.bias', which the model at the silos has not"),
    ("untied", {"2.weight": np.ones((4, 4))}, "they have '2.weight', which the model at the silos has not"),
    ("another shape", {"2.bias": np.ones((4, 1))}, r"'2.bias' has the shape \(4, 1\), and \(4,\) at the silos"),
    ("complex", {"2.bias": np.ones(4, complex)}, "'2.bias' is of type complex128, and what travels is float32"),
    ("nan", {"2.bias": np.full(4, np.nan)}, "'2.bias' has values that are not finite"),
    ("too large", {"2.bias": np.full(4, 1e60)}, "'2.bias' has values that are not finite"),
]


@pytest.mark.parametrize("kind", ["custom", "silo-app"])
@pytest.mark.parametrize(("change", "problem"), [each[1:] for each in MISFITS], ids=[each[0] for each in MISFITS])
def test_arrays_that_do_not_fit_are_named_before_any_training(
    kind: str, change: dict[str, np.ndarray | None], problem: str, tmp_path: Path
) -> None:
    arrays = {name: tensor.numpy() for name, tensor in _theirs().state_dict().items()} | change
    given = ArrayRecord({name: Array(array) for name, array in arrays.items() if array is not None})
    with pytest.raises(ConfigError, match=problem) as caught:
        _started(tmp_path, kind, given)
    assert caught.value.place == "initial_arrays"


def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test hears what Flower's log shows, whatever other tests have made of loggers."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    monkeypatch.setattr(result.logger, "disabled", False)
    caplog.set_level(logging.INFO, logger=result.logger.name)


def test_its_log_has_a_line_a_round_and_says_where_the_files_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard(caplog, monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    strategy = FedSync(StrategyConfig.load("fedavg", QUICK), timing=TIMING)
    result = strategy.start(DirectGrid(2))
    assert result.out.parent == tmp_path and (result.out / "summary.json").exists()
    assert result.summary["rounds"] == 2
    told = [each.getMessage() for each in caplog.records if each.name == "flwr.fedsync" and each.levelname == "INFO"]
    assert told[0].endswith(f"files in {result.out}") and told[-1] == f"files of the run: {result.out}"
    first, second = (line for line in told if line.startswith("[ROUND "))
    assert re.fullmatch(r"\[ROUND 1/2\] [\d.]+ s; loss [\d.]+; batches silo-0 8, silo-1 8", first)
    assert re.fullmatch(r"\[ROUND 2/2\] [\d.]+ s; loss [\d.]+; accuracy [\d.]+; batches silo-0 8, silo-1 8", second)


def test_a_run_that_fails_says_where_its_files_are_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard(caplog, monkeypatch)
    failing = dict.fromkeys((1, 2), unless(lambda request: isinstance(request, Train)))
    strategy = FedSync(StrategyConfig.load("fedavg", QUICK), out=tmp_path, timing=replace(TIMING, order_timeout_s=0.1))
    with pytest.raises(RunError):
        strategy.start(DirectGrid(2, failing))
    assert f"files of the run: {tmp_path}" in caplog.text


def test_silos_with_data_of_their_own_may_be_more_than_the_run_begins_with(tmp_path: Path) -> None:
    """``min_silos`` is how many must be there, not how many shares there are: nothing is dealt."""
    file = tmp_path / "mine.py"
    file.write_text(MODEL + OWN_LOOP)
    _strategy(tmp_path / "run", f"task={{kind: silo-app, file: {file}}}").start(DirectGrid(4))
    assert '"silo-3"' in (tmp_path / "run" / "rounds.jsonl").read_text()


def _own_app(message: Message, context: Context) -> Message:
    stock = ClientApp()

    @stock.train()
    def train(msg: Message, context: Context) -> Message:
        raise NotImplementedError

    try:
        return stock(message, context)
    except Exception as error:  # as Flower does
        trace = f"ray::ClientAppActor.run() of node {context.node_id}: {error}"
        return Message(Error(code=2, reason=trace), reply_to=message)


@pytest.mark.parametrize("task", [[], ["task={kind: clientapp, app: 'a:app', model: 'a:Net'}"]], ids=["ours", "own"])
@pytest.mark.parametrize("code", [None, 1, 6])
def test_a_run_whose_silos_have_the_users_own_app_ends_and_names_the_missing_line_once(
    code: int | None, task: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The likeliest slip of who comes from FedAvg; Flower's engine prints a trace for each question."""

    def answer(message: Message, context: Context) -> Message:
        failed = Error(code=code or 0, reason="app error")
        return _own_app(message, context) if code is None else Message(failed, reply_to=message)

    grid = DirectGrid(2, {1: answer, 2: answer})
    missing = 'write clientapp = "fedsync.flower.client_app:app" in pyproject.toml'
    with pytest.raises(RunError, match=f"node 1, node 2: error .*(?i:{re.escape(missing)})"):
        _strategy(tmp_path, *task).start(grid)
    assert len(grid.pushed) == 2 and missing not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("part", "evaluating"), [(1.0, 5), (0.6, 3), (0.59, 2), (0.1, 2), (0.0, 0)])
def test_a_part_of_the_silos_evaluates_each_version(part: float, evaluating: int, tmp_path: Path) -> None:
    """Five silos, three versions that orders bring; the last version all evaluate, unless nobody does."""
    orders: list[WorkOrder] = []

    def heard(request: Request) -> None:
        if isinstance(request, Train):
            orders.append(request.order)

    grid = DirectGrid(5, dict.fromkeys(range(1, 6), unless(heard)))
    strategy = _strategy(tmp_path, f"fraction_evaluate={part}", "stop.rounds=3", "min_silos=5")
    result = strategy.start(grid)
    for version in range(3):
        here = [order for order in orders if order.base_version == version]
        assert (len(here), sum(order.evaluate for order in here)) == (5, evaluating)
    last = [question for _, question in grid.pushed].count("EvaluateModel")
    assert last == (5 if part else 0)
    assert sorted(result.evaluate_metrics_clientapp) == ([1, 2, 3] if part else [])
    by_version = [{each.update_id for each in orders if each.base_version == v and each.evaluate} for v in range(3)]
    drawn = {frozenset(name.partition("/")[0] for name in names) for names in by_version}
    assert len(drawn) > 1 or evaluating in (0, 5), "not always the same"
    replay(tmp_path / JOURNAL)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["fraction_evaluate=0.0", "stop.target_accuracy=0.9"], "gives no scores for"),
        (["fraction_evaluate=0.0", "stop.patience=3"], "gives no scores for"),
        (["fraction_evaluate=0.5", "cipher={kind: bfv}"], "all silos of a round"),
        (["fraction_evaluate=0", "cipher={kind: bfv, metrics: plain}"], "only silos have the model"),
        (
            ["fraction_evaluate=0.5", "cipher={kind: masked, inner: {kind: bfv, metrics: plain}}"],
            "all silos of a round",
        ),
    ],
)
def test_evaluations_that_somebody_needs_are_not_left_out(more: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        StrategyConfig.load("fedavg", more)
    StrategyConfig.load("fedavg", ["fraction_evaluate=0.5", "cipher={kind: bfv, metrics: plain}"])


def test_a_model_that_fits_no_machine_ends_the_run_before_any_silo_is_asked(tmp_path: Path) -> None:
    wide = "task={kind: mlp, hidden: [1000000000000], data: {kind: blobs}, partition: {kind: iid}}"
    grid = DirectGrid(2)
    with pytest.raises(ConfigError, match=r"the model takes .* GiB at least\. Choose narrower or fewer layers"):
        _strategy(tmp_path, wide).start(grid)
    assert grid.pushed == []
