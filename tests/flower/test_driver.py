"""The Flower driver against silos that answer honestly, wrongly, twice, late or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.app.error import Error

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.errors import ConfigError, FedSyncError, RunError
from fedsync.core.orders import WorkReport
from fedsync.flower import messages
from fedsync.flower.strategy import FedSync
from fedsync.flower.timeouts import Timeouts
from tests.flower.grid import Answer, DirectGrid, honest, silos_in_this_process

ROUNDS = 3
FAST = ["local.steps=1", "local.batch_size=8", f"stop.rounds={ROUNDS}", "task.partition.kind=iid"]
SILOS = [{"name": name, "speed": 1e6} for name in ("a", "b", "c")]


@pytest.fixture(autouse=True)
def _identity() -> Iterator[None]:
    with silos_in_this_process():
        yield


def _overrides(*more: str) -> list[str]:
    return ["task={kind: digits}", *FAST[:3], *more]


def _strategy(tmp_path: Path, *overrides: str, timing: Timeouts | None = None) -> FedSync:
    return FedSync(
        StrategyConfig.load("fedavg", _overrides(*overrides)),
        ClusterConfig.model_validate({"silos": SILOS}),
        out=tmp_path,
        timing=timing or Timeouts(poll_s=0.001, order_timeout_s=20, join_timeout_s=60),
    )


def _spoil_train(change: Any) -> Answer:
    """A silo that is honest but for what ``change`` does to the answer to TRAIN."""

    def answer(message: Message, context: Context) -> Message | None:
        reply = honest(message, context)
        return change(message, reply) if message.metadata.message_type == "train" else reply

    return answer


def _large(reply: Message) -> ArrayRecord:
    """The update of an answer in the form of large ones."""
    data = cast(bytes, reply.content.config_records["fedsync"]["update"])
    return ArrayRecord({"flat": Array(np.frombuffer(data, dtype=np.float32))})


def _bytes(change: Callable[[bytes], Any]) -> Any:
    def spoil(message: Message, reply: Message) -> Message:
        texts = reply.content.config_records["fedsync"]
        texts["update"] = change(cast(bytes, texts["update"]))
        return reply

    return spoil


def _report(**changes: Any) -> Any:
    def change(message: Message, reply: Message) -> Message:
        report = replace(messages.read_report(reply, "a"), **changes)
        return messages.answer_update(message, report, _large(reply))

    return change


def _arrays(change: Any) -> Any:
    def spoil(message: Message, reply: Message) -> Message:
        update = {name: array.numpy() for name, array in _large(reply).items()}
        report = messages.read_report(reply, "a")
        return messages.answer_update(message, report, ArrayRecord({k: Array(v) for k, v in change(update).items()}))

    return spoil


def _nan(update: dict[str, Any]) -> dict[str, Any]:
    first = next(iter(update))
    return {**update, first: np.full_like(update[first], np.nan)}


def _lying_header(message: Message, reply: Message) -> Message:
    """An array whose NumPy header claims a petabyte."""
    update = dict(_large(reply).items())
    first = next(iter(update))
    header = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
    header += b"{'descr': '<f4', 'fortran_order': False, 'shape': (250000000000000,), }".ljust(117) + b"\n"
    update[first] = Array(dtype="float32", shape=(250_000_000_000_000,), stype="numpy.ndarray", data=header)
    return messages.answer_update(message, messages.read_report(reply, "a"), ArrayRecord(update))


def _pickle(message: Message, reply: Message) -> Message:
    """An array of Python objects, which a careless loader would unpickle."""
    update = dict(_large(reply).items())
    first = next(iter(update))
    shape = update[first].shape
    header = f"{{'descr': '|O', 'fortran_order': False, 'shape': {tuple(shape)}, }}".encode().ljust(117) + b"\n"
    data = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header + b"cos\nsystem\n(S'true'\ntR."
    update[first] = Array(dtype="object", shape=tuple(shape), stype="numpy.ndarray", data=data)
    return messages.answer_update(message, messages.read_report(reply, "a"), ArrayRecord(update))


BAD_REPLIES = {
    "nan": (_arrays(_nan), "finite"),
    "wrong shape": (_arrays(lambda u: {k: v.reshape(1, -1) for k, v in u.items()}), "shape"),
    "too short": (_arrays(lambda u: {k: v[:-1] for k, v in u.items()}), "shape"),
    "wrong type": (_arrays(lambda u: {k: v.astype(np.float64) for k, v in u.items()}), "shape"),
    "fewer arrays": (_arrays(lambda u: dict(list(u.items())[1:])), "arrays"),
    "other names": (_arrays(lambda u: {f"x{k}": v for k, v in u.items()}), "arrays"),
    "lying header": (_lying_header, "shape"),
    "pickle": (_pickle, "shape"),
    "too few bytes": (_bytes(lambda data: data[:-4]), "length"),
    "too many bytes": (_bytes(lambda data: data + data), "length"),
    "text for bytes": (_bytes(lambda data: "x" * len(data)), "brings no 'update'"),
    "no bytes are numbers": (_bytes(lambda data: b"\xff" * len(data)), "finite"),
    "no speed": (_report(compute_s=0.0), "compute time"),
    "absurd speed": (_report(compute_s=8e-12), "speed"),
    "nan loss": (_report(loss=1e400 - 1e400), "message"),
    "other version": (_report(base_version=99), "version"),
    "too many steps": (_report(steps=2, samples=16), "steps"),
    "no report": (lambda message, reply: messages.answer_hello(message, messages.Hello("a", None)), "report"),  # type: ignore[arg-type]
    "error": (lambda message, reply: Message(Error(code=2, reason="disk full"), reply_to=message), "disk full"),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_bad_reply_costs_its_silo_the_round_and_nothing_else(name: str, tmp_path: Path) -> None:
    change, check = BAD_REPLIES[name]
    grid = DirectGrid(3, {1: _spoil_train(change)})

    result = _strategy(tmp_path).start(grid)

    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())
    journal = (tmp_path / "journal.jsonl").read_text()
    assert check in journal
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [sorted(row["silos"]) for row in rounds] == [["b", "c"]] * ROUNDS
    silos = {silo["name"]: silo for silo in json.loads((tmp_path / "summary.json").read_text())["silos"]}
    assert (silos["a"]["orders"], silos["a"]["failures"]) == (0, ROUNDS)
    assert silos["b"]["orders"] == ROUNDS


def test_honest_silos_end_with_the_last_round_evaluated(tmp_path: Path) -> None:
    strategy = _strategy(tmp_path)
    result = strategy.start(DirectGrid(3))
    summary = strategy.run_summary
    assert summary is not None
    assert (summary["rounds"], summary["stopped_by"]) == (ROUNDS, f"{ROUNDS} rounds done")
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert result.evaluate_metrics_clientapp[ROUNDS]["accuracy"] == pytest.approx(summary["accuracy"])
    # 3 orders and 3 last evaluations brought the model, 9 updates went up; all are the model's size.
    assert summary["bytes_down"] == (9 + 3) * summary["bytes_up"] // 9


def test_evaluate_fn_sees_every_version_from_zero(tmp_path: Path) -> None:
    seen = []

    def evaluate_fn(version: int, arrays: ArrayRecord) -> None:
        seen.append((version, float(np.sum([array.numpy().sum() for array in arrays.values()]))))

    _strategy(tmp_path).start(DirectGrid(3), evaluate_fn=evaluate_fn)
    assert [version for version, _ in seen] == [0, 1, 2, 3]
    assert len({total for _, total in seen}) == 4


def test_initial_arrays_are_where_training_starts(tmp_path: Path) -> None:
    first = _strategy(tmp_path / "one").start(DirectGrid(3), num_rounds=1).arrays
    seen = []
    _strategy(tmp_path / "two").start(
        DirectGrid(3), first, num_rounds=1, evaluate_fn=lambda version, arrays: seen.append(arrays)
    )
    for name, array in first.items():
        np.testing.assert_array_equal(seen[0][name].numpy(), array.numpy())


def test_a_node_that_vanishes_is_lost_and_the_rest_go_on(tmp_path: Path) -> None:
    grid = DirectGrid(3)
    orders = 0

    def leaves_in_round_two(message: Message, context: Context) -> Message | None:
        nonlocal orders
        orders += message.metadata.message_type == "train"
        if orders == 2:
            grid.nodes.discard(1)
            return None
        return honest(message, context)

    grid.answers[1] = leaves_in_round_two
    _strategy(tmp_path).start(grid)
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [sorted(row["silos"]) for row in rounds] == [["a", "b", "c"], ["b", "c"], ["b", "c"]]
    assert "its node is gone" in (tmp_path / "journal.jsonl").read_text()


def test_what_a_node_was_sent_before_it_was_started_again_is_not_waited_for(tmp_path: Path) -> None:
    grid, orders = DirectGrid(3), 0

    def is_started_again_in_round_two(message: Message, context: Context) -> Message | None:
        nonlocal orders
        orders += message.metadata.message_type == "train"
        if message.metadata.message_type == "train" and orders == 2:
            grid.starts[1] += 1
            return None
        return honest(message, context)

    grid.answers[1] = is_started_again_in_round_two
    _strategy(tmp_path).start(grid)
    journal = (tmp_path / "journal.jsonl").read_text()
    assert journal.count('"type":"SiloLost"') == 1
    assert "no answer in" not in journal


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
    _strategy(tmp_path, "min_silos=3", timing=SOON).start(DirectGrid(3, {1: _loses_first(kind)}))
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [sorted(row["silos"]) for row in rounds] == [["a", "b", "c"]] * ROUNDS
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [silo["failures"] for silo in summary["silos"]] == [0, 0, 0]
    assert summary["accuracy"] is not None


def test_an_order_is_not_sent_again_where_the_model_has_moved_on(tmp_path: Path) -> None:
    grid = DirectGrid(3, {1: _loses_first("train")})
    overrides = ["barrier={kind: asp}", "aggregation={kind: fedbuff}", "stop={seconds: 1.0}"]
    _strategy(tmp_path, *overrides, timing=SOON).start(grid)
    assert "it is lost, and the model has moved on since" in (tmp_path / "journal.jsonl").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["silos"][0]["failures"] == 1 and summary["silos"][0]["orders"] > 0


def test_a_silo_that_is_slow_to_answer_trains_and_evaluates_once(tmp_path: Path) -> None:
    """It answers all that it was asked meanwhile, at last: the same order is trained once, and counts once."""
    grid, held = DirectGrid(2), 0

    def late(message: Message, context: Context) -> Message | None:
        nonlocal held
        reply = honest(message, context)
        kind = message.metadata.message_type
        if kind in ("train", "query.collect") and held < 2:
            held += 1
            return None
        return reply

    grid.answers[1] = late
    _strategy(tmp_path, "min_silos=2", timing=SOON).start(grid)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(silo["orders"], silo["failures"]) for silo in summary["silos"][:2]] == [(ROUNDS, 0)] * 2
    assert [kind for node, kind in grid.pushed if node == 1].count("query.collect") >= 2


def test_silence_is_an_answer_after_the_timeout(tmp_path: Path) -> None:
    def silent(message: Message, context: Context) -> Message | None:
        return None if message.metadata.message_type == "train" else honest(message, context)

    timing = Timeouts(poll_s=0.001, order_timeout_s=0.2, join_timeout_s=60)
    _strategy(tmp_path, "stop.rounds=1", timing=timing).start(DirectGrid(3, {2: silent}))
    assert "no answer in 0.2 s" in (tmp_path / "journal.jsonl").read_text()


def test_two_nodes_with_one_name_count_once(tmp_path: Path) -> None:
    def twin(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query":
            return messages.answer_hello(
                message, messages.Hello("a", messages.read_hello(honest(message, context), "c").facts)
            )
        return honest(message, context)

    strategy = _strategy(tmp_path, "min_silos=2")
    strategy.start(DirectGrid(3, {3: twin}))
    assert strategy.run_summary is not None
    assert [silo["name"] for silo in strategy.run_summary["silos"]] == ["a", "b"]


def test_nobody_joins(tmp_path: Path) -> None:
    timing = Timeouts(poll_s=0.001, join_timeout_s=0.1)
    with pytest.raises(RunError, match="silos here: none"):
        _strategy(tmp_path, timing=timing).start(DirectGrid(0))


def test_all_silos_fail_for_ever(tmp_path: Path) -> None:
    broken = _spoil_train(BAD_REPLIES["error"][0])
    with pytest.raises(RunError, match="disk full"):
        _strategy(tmp_path).start(DirectGrid(3, dict.fromkeys((1, 2, 3), broken)))
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 0


def test_the_steps_of_flowers_own_round_are_refused(tmp_path: Path) -> None:
    strategy = _strategy(tmp_path)
    with pytest.raises(FedSyncError, match=r"call start\(\)"):
        strategy.aggregate_evaluate(1, [])


def test_a_report_survives_the_wire() -> None:
    message = messages.query(1, "{}", 10.0)
    report = WorkReport(base_version=3, steps=2, samples=16, compute_s=0.1, loss=1 / 3, overhead_s={"load": 0.1})
    reply = messages.answer_update(message, report, ArrayRecord())
    assert messages.read_report(reply, "a") == report


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
    strategy = FedSync(config, ClusterConfig.model_validate({"silos": silos}), out=tmp_path)
    strategy.start(DirectGrid(3))
    assert strategy.run_summary is not None
    steps = {silo["name"]: silo["steps"] for silo in strategy.run_summary["silos"]}
    assert steps["c"] == 40
    assert 1 <= steps["a"] < 20 and 1 <= steps["b"] < 20


def test_a_server_without_data_asks_a_silo_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[ArrayRecord] = []
    _strategy(tmp_path / "with").start(DirectGrid(3), evaluate_fn=lambda version, arrays: expected.append(arrays))

    def no_data(*arguments: Any) -> Any:
        raise ConfigError("task.files", "there is no such file", "Only silos have data")

    monkeypatch.setattr("fedsync.flower.strategy.initial_model", no_data)
    seen: list[ArrayRecord] = []
    grid = DirectGrid(3)

    def cannot_send_a_model(message: Message, context: Context) -> Message | None:
        if message.metadata.message_type == "query.model":
            return Message(Error(code=2, reason="no"), reply_to=message)
        return honest(message, context)

    grid.answers[1] = cannot_send_a_model
    _strategy(tmp_path / "without").start(grid, evaluate_fn=lambda version, arrays: seen.append(arrays))
    for name, array in expected[0].items():
        np.testing.assert_array_equal(seen[0][name].numpy(), array.numpy())


def test_nobody_has_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_data(*arguments: Any) -> Any:
        raise ConfigError("task.files", "there is no such file", "Only silos have data")

    monkeypatch.setattr("fedsync.flower.strategy.initial_model", no_data)
    with pytest.raises(RunError, match="no silo sent a model"):
        _strategy(tmp_path, timing=Timeouts(poll_s=0.001, join_timeout_s=0.1)).start(DirectGrid(0))
