"""The Flower driver against silos that answer honestly, wrongly, twice, late or not at all."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.error import Error

from fedsync.common.errors import ConfigError, RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkReport
from fedsync.flower import flower_messages as messages
from fedsync.flower.flower_strategy import FedSync
from fedsync.model.layout import Vector
from fedsync.model.transfer import Payload
from fedsync.server.timeouts import Timeouts
from fedsync.silo.protocol import Collect, Snapshot, Train
from tests.e2e.deployed import SMALL
from tests.flower.cut_off_runs import SILOS, TIMING
from tests.flower.grid import Answer, DirectGrid, asked, changing, honest, saying

pytestmark = pytest.mark.usefixtures("silos_here")

ROUNDS = 3
FAST = [SMALL, "local.steps=1", "local.batch_size=8", f"stop.rounds={ROUNDS}"]


def fed_sync(tmp_path: Path, *overrides: str, timing: Timeouts | None = None) -> FedSync:
    config = StrategyConfig.load("fedavg", [*FAST, *overrides])
    return FedSync(config, SILOS, out=tmp_path, timing=timing or TIMING)


def _instead(change: Callable[[Message, Message], Message]) -> Answer:
    """A silo that is honest but for what ``change`` makes of the message and its answer to TRAIN."""

    def answer(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        return change(message, reply) if message.metadata.message_type == "train" else reply

    return answer


def _update(change: Callable[[Vector], Payload]) -> Answer:
    return changing(WorkReport, lambda report, update: (report, change(update.view(np.float32))))


def _report(**changes: Any) -> Answer:
    return changing(WorkReport, lambda report, update: (replace(report, **changes), update))


def _record(array: Array | str) -> Answer:
    """The answer with this in place of the update's bytes."""

    def spoilt(message: Message, reply: Message) -> Message:
        texts = reply.content.config_records["fedsync"]
        del texts["payload"]
        if isinstance(array, str):
            texts["payload"] = array
            return reply
        return Message(RecordDict({"fedsync": texts, "payload": ArrayRecord({"flat": array})}), reply_to=message)

    return _instead(spoilt)


BAD_REPLIES: dict[str, tuple[Answer, str]] = {
    "nan": (_update(lambda update: np.full_like(update, np.nan)), "finite"),
    "too few bytes": (_update(lambda update: update[:-1]), "length"),
    "wrong type": (_update(lambda update: update.astype(np.float64)), "length"),
    "no update": (changing(WorkReport, lambda report, update: (report, None)), "brings no 'payload'"),
    "text for bytes": (_record("x"), "brings no 'payload'"),
    "an array for NumPy's loader, which might unpickle": (_record(Array(np.zeros(3))), "arrays"),
    "no speed": (_report(compute_s=0.0), "compute time"),
    "absurd speed": (_report(compute_s=8e-12), "speed"),
    "nan loss": (_report(loss=1e400 - 1e400), "message"),
    "other version": (_report(base_version=99), "version"),
    "too many steps": (_report(steps=2, samples=16), "steps"),
    "no report": (_instead(lambda message, reply: saying(message, Snapshot(1))), "Train is answered with Snapshot"),
    "no text": (_instead(lambda message, reply: Message(RecordDict(), reply_to=message)), "brings no 'text'"),
    "no such reply": (_instead(lambda message, reply: messages.answer(message, '{"type":"Nonsense"}')), "message"),
    "error": (_instead(lambda message, reply: Message(Error(2, "disk full"), reply_to=message)), "disk full"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_bad_reply_costs_its_silo_the_round_and_nothing_else(name: str, tmp_path: Path) -> None:
    answer, check = BAD_REPLIES[name]
    result = fed_sync(tmp_path).start(DirectGrid(3, {1: answer}))
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())
    journal = (tmp_path / "journal.jsonl").read_text()
    assert check in journal
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [sorted(row["silos"]) for row in rounds] == [["b", "c"]] * ROUNDS
    silos = {silo["name"]: silo for silo in json.loads((tmp_path / "summary.json").read_text())["silos"]}
    assert (silos["a"]["orders"], silos["a"]["failures"]) == (0, ROUNDS)
    assert silos["b"]["orders"] == ROUNDS


def test_honest_silos_end_with_the_last_round_evaluated(tmp_path: Path) -> None:
    result = fed_sync(tmp_path).start(DirectGrid(3))
    summary = result.summary
    assert (summary["rounds"], summary["stopped_by"]) == (ROUNDS, f"{ROUNDS} rounds done")
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert result.evaluate_metrics_clientapp[ROUNDS]["accuracy"] == pytest.approx(summary["accuracy"])
    # 3 orders and 3 last evaluations brought the model, 9 updates went up; all are the model's size.
    assert summary["bytes_down"] == (9 + 3) * summary["bytes_up"] // 9


def test_evaluate_fn_sees_the_version_of_a_rollback(tmp_path: Path) -> None:
    """The first trial of this interval has three rounds from version 0, then version 4 is version 0 again."""
    seen: dict[int, float] = {}

    def evaluate_fn(version: int, arrays: ArrayRecord) -> MetricRecord:
        seen[version] = float(np.sum([array.numpy().sum() for array in arrays.values()]))
        return MetricRecord({"sum": seen[version]})

    barrier = "barrier={kind: fsp, interval: {kind: linear, interval_s: 0.1}}"
    result = fed_sync(tmp_path, barrier, "stop.rounds=4").start(DirectGrid(3), evaluate_fn=evaluate_fn)
    assert "Rollback" in (tmp_path / "journal.jsonl").read_text()
    assert list(seen) == [0, 1, 2, 3, 4, 5]
    assert seen[4] == seen[0] != seen[3]
    assert list(result.evaluate_metrics_serverapp) == list(seen)


def _loses_first(kind: str) -> Answer:
    """A silo whose line breaks as it fetches its first message of a kind; the server takes it for delivered."""
    lost = False

    def answer(message: Message, context: Context) -> Message | None:
        nonlocal lost
        if message.metadata.message_type == kind and not lost:
            lost = True
            return None
        return honest(message, context)

    return answer


SOON = Timeouts(poll_s=0.001, ask_s=0.1, report_s=0.1, order_timeout_s=60.0)


@pytest.mark.parametrize("kind", ["query", "train", "evaluate"])
def test_a_message_that_is_lost_on_its_way_is_sent_again(kind: str, tmp_path: Path) -> None:
    fed_sync(tmp_path, "min_silos=3", timing=SOON).start(DirectGrid(3, {1: _loses_first(kind)}))
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [sorted(row["silos"]) for row in rounds] == [["a", "b", "c"]] * ROUNDS
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [silo["failures"] for silo in summary["silos"]] == [0, 0, 0]
    assert summary["accuracy"] is not None


def test_an_order_is_not_sent_again_where_the_model_has_moved_on(tmp_path: Path) -> None:
    """The others wait for the silo that has lost its first order: until it has told so, and until it has another."""
    loses, told, orders, others = _loses_first("train"), False, 0, 0

    def asked_late(message: Message, context: Context) -> Message | None:
        """It tells of its loss once another has a second order, and so the model has moved on."""
        nonlocal told, orders
        if isinstance(asked(message), Collect):
            told = told or others >= 3
            return loses(message, context) if told else None
        orders += isinstance(asked(message), Train)
        return loses(message, context)

    def waits(message: Message, context: Context) -> Message | None:
        nonlocal others
        if isinstance(asked(message), Train | Collect) and others >= (4 if not told else 8 if orders < 2 else 100):
            return None
        others += isinstance(asked(message), Train)
        return honest(message, context)

    grid = DirectGrid(3, {1: asked_late, 2: waits, 3: waits})
    fed_sync(tmp_path, "barrier={kind: asp}", "aggregation={kind: fedbuff}", "stop.rounds=16", timing=SOON).start(grid)
    assert "it is lost, and the model has moved on since" in (tmp_path / "journal.jsonl").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["silos"][0]["failures"] == 1 and summary["silos"][0]["orders"] > 0


def test_a_silo_that_is_slow_to_answer_trains_and_evaluates_once(tmp_path: Path) -> None:
    """It answers all that it was asked meanwhile, at last: the same order is trained once, and counts once."""
    grid, held = DirectGrid(2), 0

    def late(message: Message, context: Context) -> Message | None:
        nonlocal held
        reply = honest(message, context)
        if isinstance(asked(message), Train | Collect) and held < 2:
            held += 1
            return None
        return reply

    grid.answers[1] = late
    fed_sync(tmp_path, "min_silos=2", timing=SOON).start(grid)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(silo["orders"], silo["failures"]) for silo in summary["silos"][:2]] == [(ROUNDS, 0)] * 2
    assert [kind for node, kind in grid.pushed if node == 1].count("Collect") >= 2


def test_all_silos_fail_for_ever(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="disk full"):
        fed_sync(tmp_path).start(DirectGrid(3, dict.fromkeys((1, 2, 3), BAD_REPLIES["error"][0])))
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 0


def test_the_word_to_stop_reaches_silos_at_work(tmp_path: Path) -> None:
    """A-BSP: once c is done, half of all samples are, and a and b stop where they are."""
    silos = [{"name": "a", "speed": 16.0}, {"name": "b", "speed": 16.0}, {"name": "c", "speed": 800.0}]
    config = StrategyConfig.load(
        "fedavg",
        [
            "task={kind: digits}",
            "local={steps: 40, batch_size: 8}",  # a and b need 0.5 s a step, 20 s in all
            "barrier={kind: a-bsp, sync_ratio: 0.34, report_s: 0.1}",
            "aggregation={kind: fednova}",
            "stop.rounds=1",
        ],
    )
    result = FedSync(config, ClusterConfig.model_validate({"silos": silos}), out=tmp_path).start(DirectGrid(3))
    steps = {silo["name"]: silo["steps"] for silo in result.summary["silos"]}
    assert steps["c"] == 40
    assert 1 <= steps["a"] < 20 and 1 <= steps["b"] < 20


def test_where_the_models_find_no_room_the_summary_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Any:
        raise ConfigError("last.pt", "cannot be written: no space left on device", "Make room")

    monkeypatch.setattr("fedsync.flower.flower_strategy.model_writer", lambda *run: full)
    with pytest.raises(ConfigError, match="no space"):
        fed_sync(tmp_path).start(DirectGrid(3))
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] > 0
