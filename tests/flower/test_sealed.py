"""Encrypted runs through the Flower driver: the server sees sealed bytes only, silos keep the model."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.app.error import Error

from fedsync.common.errors import ConfigError
from fedsync.common.run_claim import EVIDENCE
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.tracing.evidence import UPDATES, versions
from fedsync.flower.flower_strategy import FedSync
from fedsync.model.transfer import VersionMismatch
from fedsync.silo.owner.key_lookup import KEYS
from fedsync.silo.protocol import COPY, EvaluateModel, Hello, Question, Request, Train
from fedsync.train.loop import Trainer
from fedsync.train.weights import TaskModel
from tests.e2e.deployed import SMALL
from tests.flower.cut_off_runs import SILOS, TIMING, named_silos, with_keys
from tests.flower.grid import Answer, DirectGrid, asked, changing, honest, keep_state, saying, trainers, unless

pytestmark = pytest.mark.usefixtures("silos_here")

QUICK = [SMALL, "local.steps=2", "local.batch_size=8", "stop.rounds=3"]


def _start(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    *overrides: str,
    grid: DirectGrid | None = None,
    silos: ClusterConfig = SILOS,
) -> tuple[Mapping[str, Any], list[np.ndarray]]:
    """Run; returns the summary and the silos' models, or the server's where nothing is encrypted."""
    config = StrategyConfig.load(strategy, [*QUICK, *overrides])
    keys = with_keys(config, folder, monkeypatch, silos)
    result = FedSync(config, silos, out=folder / "run", timing=TIMING, keys=keys).start(grid or DirectGrid(3))
    if keys is None:
        return result.summary, [np.concatenate([array.numpy().ravel() for array in result.arrays.values()])]
    assert not result.arrays, "the server has no model"
    return result.summary, [trainer._session.replica.model for trainer in trainers.values()]  # type: ignore[attr-defined]


def _all_are_one(models: list[np.ndarray]) -> None:
    for model in models:
        np.testing.assert_array_equal(model, models[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfv", "pad"])
def test_an_encrypted_run_ends_as_a_plain_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What rounding adds, and training makes of it, stays far below what training moves."""
    summary, models = _start(tmp_path / "sealed", monkeypatch, "fedavg", f"cipher={{kind: {kind}}}")
    monkeypatch.delenv(KEYS)
    trainers.clear()
    _, [plain] = _start(tmp_path / "plain", monkeypatch, "fedavg")
    assert len(models) == 3
    _all_are_one(models)
    moved = np.abs(plain - TaskModel(StrategyConfig.load("fedavg", QUICK).task.build(), 7).initial())
    assert np.abs(models[0] - plain).max() < moved.max() / 50
    assert summary["accuracy"] is not None


@pytest.mark.slow
def test_the_server_s_files_and_messages_have_no_key_or_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    def listening(message: Message, context: Context) -> Message | None:
        reply = honest(message, context)
        update = reply.content.config_records["fedsync"].get("payload")
        if isinstance(update, bytes):
            sent.append(update)
        return reply

    grid = DirectGrid(3, dict.fromkeys((1, 2, 3), listening))
    _start(tmp_path, monkeypatch, "fedavg", "task={kind: digits}", "cipher={kind: bfv, kept_versions: 2}", grid=grid)
    folder = tmp_path / "run" / EVIDENCE
    kept = b"".join(file.read_bytes() for file in folder.glob(f"*{UPDATES}"))
    newest = versions(folder)
    assert len(newest) == 2 and newest[0] == newest[1] + 1
    assert sum(data in kept for data in sent) == 6, "single updates are kept as they were sent, of so many versions"
    updates = [np.frombuffer(data, dtype=np.uint8) for data in sent if len(data) > 100_000]
    assert len(updates) == 12, "of three rounds, and of the version that scores the last"
    for update in updates:
        counts = np.bincount(update[2048:-2048], minlength=256)
        # Words lie below a prime of 60 bits: of each eighth byte the upper half is zero.
        assert counts[0] < 2 * len(update) / 256 + len(update) / 8
    journal = (tmp_path / "run" / "journal.jsonl").read_text()
    assert "secret" not in journal and json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 3
    assert not (tmp_path / "run" / "model.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("metrics", ["sealed", "plain"])
def test_what_a_silo_finds_is_in_none_of_its_messages_unless_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metrics: str
) -> None:
    said_by_silos: list[str] = []
    own: set[str] = set()
    train = Trainer.run

    def listening(message: Message, context: Context) -> Message | None:
        reply = honest(message, context)
        said_by_silos.append(json.dumps(dict(reply.content.config_records["fedsync"]), default=repr))
        return reply

    def trained(self: Trainer, *arguments: Any, **more: Any) -> Any:
        outcome = train(self, *arguments, **more)
        evaluation = outcome.report.evaluation
        if evaluation is not None:
            own.update((repr(outcome.report.loss), repr(evaluation.loss), f'examples\\":{self.examples}'))
        return outcome

    monkeypatch.setattr(Trainer, "run", trained)
    grid = DirectGrid(3, dict.fromkeys((1, 2, 3), listening))
    _start(tmp_path, monkeypatch, "fedavg", f"cipher={{kind: pad, metrics: {metrics}}}", grid=grid)
    text = "".join(said_by_silos)
    found = [figure for figure in own if figure in text]
    assert len(own) > 9 and (found == [] if metrics == "sealed" else len(found) == len(own))


def test_a_server_without_its_key_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = StrategyConfig.load("fedavg", [*QUICK, "cipher={kind: bfv}"])
    given = {None: "the server was given no key file", tmp_path / "keys.json": "keys.json: cannot be read: No such"}
    for keys, problem in given.items():
        with pytest.raises(ConfigError, match=problem):
            FedSync(config, SILOS, out=tmp_path / problem[:4], timing=TIMING, keys=keys).start(DirectGrid(3))


@pytest.mark.slow
def test_a_silo_that_does_not_reveal_costs_a_round_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[str] = []

    def forgetful(message: Message, context: Context) -> Message | None:
        """The second silo does not answer the first question of the run."""
        if isinstance(asked(message), Question):
            questions.append("")
            if len(questions) == 1:
                return Message(Error(code=0, reason="restarted"), reply_to=message)
        return honest(message, context)

    grid = DirectGrid(3, {2: forgetful})
    summary, models = _start(tmp_path, monkeypatch, "fedavg", "cipher={kind: masked}", grid=grid)
    assert summary["rounds"] == 3
    assert len(questions) == 1 + 3 * 2, "one in the round that was lost, two in each other and for the last score"
    _all_are_one(models)


@pytest.mark.slow
def test_a_silo_lost_as_the_last_sum_opens_is_not_asked_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final evaluation waits for the sum, and the loss ends this wait."""
    scores_are_sealed = False

    def leaves(request: Request) -> bool:
        nonlocal scores_are_sealed
        scores_are_sealed |= isinstance(request, Train) and request.order.scores_only
        if gone := isinstance(request, Question) and scores_are_sealed:
            grid.nodes.discard(3)
        return gone

    grid = DirectGrid(3, {3: unless(leaves)})
    summary, _ = _start(tmp_path, monkeypatch, "fedavg", "cipher={kind: masked}", "stop.rounds=1", grid=grid)
    assert summary["rounds"] == 1
    assert [node for node, kind in grid.pushed if kind == "EvaluateModel"] == [1, 2]


# What silos keep is lost, or they say so.


@pytest.mark.slow
def test_a_silo_that_is_restarted_with_a_damaged_copy_is_sent_the_model_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep_state(monkeypatch, lambda identity: tmp_path / "state" / str(identity.index))
    orders: list[str] = []

    def unlucky(message: Message, context: Context) -> Message | None:
        """At its second order the second silo has a new process, and a bit of its file has changed."""
        if message.metadata.message_type == "train":
            orders.append("")
        if len(orders) == 2 and message.metadata.message_type == "train":
            del trainers[next(identity for identity in trainers if identity.index == 1)]
            file = tmp_path / "state" / "1" / COPY
            data = bytearray(file.read_bytes())
            data[-2] ^= 1
            file.write_bytes(data)
        return honest(message, context)

    grid = DirectGrid(3, {2: unlucky})
    summary, models = _start(tmp_path, monkeypatch, "fedavg", "cipher={kind: pad}", grid=grid)
    assert "copy.bin is damaged: its checksum does not fit" in caplog.text
    assert summary["rounds"] == 3 and len(orders) == 5, (
        "three, of which one was sent again from the beginning, and one for the last score"
    )
    assert "WorkFailed" not in (tmp_path / "run" / "journal.jsonl").read_text()
    for model in models:
        np.testing.assert_allclose(model, models[0], atol=1e-6)


def _hello_with(holds: int) -> Answer:
    return changing(Hello, lambda hello, greeting: (replace(hello, holds=holds), greeting))


def _lacking(holds: int, kind: type) -> Answer:
    def liar(message: Message, context: Context) -> Message | None:
        return saying(message, VersionMismatch(holds)) if isinstance(asked(message), kind) else honest(message, context)

    return liar


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "liar"),
    [
        ("pad", _hello_with(999)),
        ("pad", _hello_with(-7)),
        ("pad", _lacking(999, Train)),
        ("pad", _lacking(-7, Train)),
        ("pad", _lacking(1, EvaluateModel)),
        ("masked", _lacking(-1, Train)),
    ],
)
def test_no_number_that_a_silo_says_of_its_version_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, liar: Answer
) -> None:
    more = [f"cipher={{kind: {kind}}}", "min_silos=3", "stop.rounds=2"]
    grid = DirectGrid(4, {2: liar})
    summary, models = _start(tmp_path, monkeypatch, "fedavg", *more, grid=grid, silos=named_silos("abcd"))
    assert summary["rounds"] == 2
    others = [model for model, silo in zip(models, trainers.values(), strict=True) if silo.name != "b"]
    _all_are_one(others)
    moved = np.abs(others[0] - TaskModel(StrategyConfig.load("fedavg", QUICK).task.build(), 7).initial())
    assert moved.max() > 1e-3, "the others' updates have counted"


def test_a_masked_round_whose_answers_were_all_lost_is_repeated_under_other_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every trainer dies with its first answer. It has sealed, so it refuses to do so again in the same attempt."""
    died: set[int] = set()

    def dies(message: Message, context: Context) -> Message | None:
        reply = honest(message, context)
        if message.metadata.message_type == "train" and context.node_id not in died:
            died.add(context.node_id)
            del trainers[next(identity for identity in trainers if identity.index == context.node_id - 1)]
            return Message(Error(code=0, reason="died"), reply_to=message)
        return reply

    grid = DirectGrid(3, dict.fromkeys((1, 2, 3), dies))
    summary, models = _start(tmp_path, monkeypatch, "fedavg", "cipher={kind: masked}", "stop.rounds=2", grid=grid)
    assert summary["rounds"] == 2
    assert "have blinded an update already" in (tmp_path / "run" / "journal.jsonl").read_text()
    assert "would disclose too much" not in caplog.text and "does not count" not in caplog.text, "the sum was opened"
    _all_are_one(models)
