"""A Flower ClientApp, hosted: what it is told of an order, what its reply comes to, and what it keeps."""

import itertools
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from torch import nn
from torch.utils.data import BatchSampler, ChainDataset, DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from fedsync.client import steps, untimed
from fedsync.common.errors import ConfigError, RunError
from fedsync.core.orders import MISSIZED, Cursor
from fedsync.silo.protocol import Completed
from fedsync.silo.session.current_order import LastOrder
from fedsync.train.guests.guest_clientapp import read_state, write_state
from tests.client.clientapps import SAMPLES, SITE, Loop, Tied, app_of, hosted, loader, opaque, remembering, stepwise
from tests.train.make import Clock, order


@pytest.mark.parametrize("held", [359, 20])
@pytest.mark.parametrize("loads", [True, False], ids=["a loader", "arrays"])
def test_an_app_that_tells_how_many_samples_it_trained_on_is_asked_how_many_it_has(held: int, loads: bool) -> None:
    def loop(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
        config = msg.content["config"]
        size, steps = int(config["batch-size"]), int(config["max-steps"])
        rows = torch.zeros(held, 3)
        batches = DataLoader(TensorDataset(rows), batch_size=size) if loads else [[each] for each in rows.split(size)]
        return {"num-examples": sum(len(batch[0]) for batch in itertools.islice(batches, steps))}

    before = DataLoader.__iter__
    assert hosted(app_of(loop)).examples == held
    assert DataLoader.__iter__ is before


@pytest.mark.parametrize("held", [20, 359, 1600])
def test_an_app_that_counts_batches_has_the_samples_of_its_loader(held: int) -> None:
    """Of three silos, those with few batches counted by samples, and the largest by its 50 batches."""

    def loop(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
        batches = DataLoader(TensorDataset(torch.zeros(held, 3)), batch_size=32)
        for _ in batches:
            pass
        return {"num-examples": len(batches)}

    assert hosted(app_of(loop)).examples == held


def test_all_steps_of_an_app_that_keeps_its_iterator_count() -> None:
    kept: list[Iterator[Any]] = []

    def loop(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
        kept.append(iter(steps(msg, loader(5))))
        return {"train_loss": sum(float(next(kept[-1])[0].mean()) for _ in range(3))}

    guest = hosted(app_of(loop))
    report = guest.run(order(batch_size=5, max_steps=3), guest.initial_model(), Cursor()).report
    assert report.steps == 3 and report.compute_s > 0.0


ROWS = SubsetRandomSampler(range(300))  # the others are for validation


@pytest.mark.parametrize("counts", [True, False], ids=["steps", "batches"])
@pytest.mark.parametrize(
    "draws", [{"batch_size": 32, "sampler": ROWS}, {"batch_sampler": BatchSampler(ROWS, 32, drop_last=False)}]
)
def test_an_app_whose_loader_draws_from_a_part_of_its_data_has_that_part(draws: dict[str, Any], counts: bool) -> None:
    def loop(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
        loader = DataLoader(TensorDataset(torch.zeros(359, 3)), **draws)
        return {"num-examples": len(next(iter(steps(msg, loader) if counts else loader))[0])}

    assert hosted(app_of(loop)).examples == 300


def test_an_app_with_an_endless_batch_sampler_has_the_samples_that_it_tells() -> None:
    def loop(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
        loader = DataLoader(TensorDataset(torch.zeros(359, 3)), batch_sampler=itertools.cycle([[0, 1]]))  # type: ignore[arg-type]
        next(iter(loader))
        return {"num-examples": 359}

    assert hosted(app_of(loop)).examples == 359


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.zeros(40, 3))


@pytest.mark.filterwarnings("ignore:Your `IterableDataset`")  # ChainDataset itself
def test_a_chain_of_streams_has_the_samples_that_the_app_tells() -> None:
    def loop(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
        for _ in steps(msg, DataLoader(ChainDataset([Stream(), Stream()]), batch_size=8)):
            pass
        return {"num-examples": 80}

    assert hosted(app_of(loop)).examples == 80


def test_it_is_told_of_the_order_of_its_site_and_of_the_run(tmp_path: Path) -> None:
    told: list[tuple[dict[str, Any], Context]] = []

    def loop(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
        told.append((dict(msg.content["config"]), context))
        assert msg.metadata.message_type == "train"
        return {}

    (tmp_path / "pyproject.toml").write_text("[tool.flwr.app.config]\nlocal-epochs = 2\nnet.width = 8\n")
    site = replace(SITE, node_config={"site": "north", "num-examples": 12}, run_config={"local-epochs": 1})
    guest = hosted(app_of(loop), tmp_path, site)
    guest.run(replace(order(batch_size=6, max_steps=4), budget_s=2.5), guest.initial_model(), Cursor())
    ((config, context),) = told
    assert config == {
        "lr": 0.1, "learning-rate": 0.1, "batch-size": 6, "max-steps": 4, "deadline-s": 2.5, "server-round": 4,
        "warm": True,
    }  # fmt: skip
    assert context.node_config == {"partition-id": 1, "num-partitions": 3, "site": "north", "num-examples": 12}
    assert context.run_config == {"local-epochs": 1, "net.width": 8}
    assert guest.examples == 12, "as the owner says"


def test_arrays_have_the_names_types_and_values_of_its_model_and_what_is_tied_travels_once() -> None:
    seen: list[dict[str, np.ndarray[Any, Any]]] = []

    def loop(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
        seen.append({name: array.numpy() for name, array in msg.content["arrays"].items()})
        model.norm.num_batches_tracked += 3
        with torch.no_grad():
            model.encode.weight += 1.0
        return {}

    guest = hosted(app_of(loop))
    base = guest.initial_model()
    base[-1] = 4.6  # the counter, which commits do not keep whole
    update = guest.run(order(), base, Cursor()).update
    state = Tied().state_dict()
    assert {name: (array.dtype, array.shape) for name, array in seen[-1].items()} == {
        name: (tensor.numpy().dtype, tuple(tensor.shape)) for name, tensor in state.items()
    }
    assert (seen[-1]["decode.weight"] == seen[-1]["encode.weight"]).all() and seen[-1]["norm.num_batches_tracked"] == 5
    assert "decode.weight" not in guest.layout.names and len(guest.layout.names) == len(state) - 1
    moved = guest.layout.split(update)
    assert moved["encode.weight"] == pytest.approx(np.ones((3, 3)))
    assert moved["norm.num_batches_tracked"] == pytest.approx(3.4)


def test_steps_are_counted_and_end_where_the_order_does() -> None:
    guest = hosted(app_of(stepwise))
    whole = guest.run(order(batch_size=8, max_steps=12), guest.initial_model(), Cursor()).report
    assert (whole.steps, whole.samples) == (12, 96), "12 steps of 5 a pass: the loader begins again"
    assert whole.loss and whole.loss > 0
    halted = guest.run(
        order(batch_size=8, max_steps=12), guest.initial_model(), Cursor(), watch=lambda done, _: done < 7
    )
    assert halted.report.steps == 7
    late = guest.run(order(max_steps=12, budget_s=0.0), guest.initial_model(), Cursor())
    assert late.report.steps == 1
    assert guest.examples == SAMPLES, "counted by the loader, before the first step"


def test_a_validation_within_the_loop_is_no_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, step_s=0.0)

    def loop(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
        for _ in steps(msg, loader(8)):
            clock.now_s += 0.1
            with untimed(msg):
                clock.now_s += 1.0
        return {}

    guest = hosted(app_of(loop))
    report = guest.run(order(max_steps=5), guest.initial_model(), Cursor()).report
    assert report.compute_s == pytest.approx(0.5)
    assert report.overhead_s["evaluate"] == pytest.approx(5.0)


def test_without_steps_an_order_counts_as_a_whole() -> None:
    guest = hosted(app_of(opaque))
    outcome = guest.run(order(batch_size=8, max_steps=5, budget_s=0.0), guest.initial_model(), Cursor())
    assert (outcome.report.steps, outcome.report.samples, outcome.report.loss) == (5, 40, 0.5)
    assert guest.layout.split(outcome.update)["encode.weight"] == pytest.approx(np.full((3, 3), 40.0), rel=1e-6)
    assert outcome.report.metrics["f1_score"] == 0.25 and "lost" not in outcome.report.metrics


@pytest.mark.parametrize(("own", "warnings"), [(True, 1), (False, 0)], ids=["a size of its own", "the order's size"])
def test_a_generator_ends_an_order_and_is_warned_of(own: bool, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    """Forty samples in batches of 16: two steps and a half of an order of five."""

    def loop(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
        size = 16 if own else msg.content["config"]["batch-size"]
        return {"train_loss": float(sum(1 for _ in steps(msg, (batch for batch in loader(size)))))}

    guest = hosted(app_of(loop))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            outcome = guest.run(order(batch_size=16, max_steps=5), guest.initial_model(), Cursor())
            assert (outcome.report.steps, outcome.report.loss) == (3, 3.0)
    assert len([each for each in caplog.records if "no plain DataLoader" in each.message]) == warnings


class Poisson(BatchSampler):
    """Each sample is in a batch with the same probability, whatever is ordered."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(5):
            yield [row for row in range(SAMPLES) if random.random() < 0.4]


def poisson(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
    assert msg.content["config"]["batch-size"]
    list(steps(msg, DataLoader(loader(1).dataset, batch_sampler=Poisson(range(SAMPLES), 16, False))))
    return {}


def reads_nothing(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
    return {}


def takes_all(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
    return {"n": len([*msg.content["config"].items()])}


def own_batches(size: int) -> Loop:
    def loop(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
        assert msg.content["config"]["batch-size"]
        list(steps(msg, [[torch.zeros(len(rows), 3), rows.sum(1)] for (rows,) in loader(size)]))
        return {}

    return loop


@pytest.mark.parametrize(
    ("loop", "follows"),
    [
        (stepwise, True),
        (opaque, True),
        (takes_all, True),
        (own_batches(16), True),  # 16, 16 and 8 samples
        (own_batches(32), False),
        (poisson, False),
        (reads_nothing, False),
    ],
    ids=[
        "a plain loader",
        "reads both",
        "takes all of config",
        "own batches",
        "other batches",
        "Poisson",
        "reads nothing",
    ],
)
def test_a_report_says_if_batches_followed_orders(loop: Loop, follows: bool, caplog: pytest.LogCaptureFixture) -> None:
    guest = hosted(app_of(loop))
    for _ in range(2):
        report = guest.run(order(batch_size=16, max_steps=5), guest.initial_model(), Cursor()).report
        assert report.metrics.get(MISSIZED) == (None if follows else report.steps)
    told = [
        each for each in caplog.records if "changed nothing" not in each.getMessage()
    ]  # most loops here do not train
    assert len(told) == (not follows), "it is warned of once"
    assert ("does not read batch-size" in caplog.text) == (loop is reads_nothing)


def test_context_state_survives_a_restart_and_an_order_that_fails_leaves_it(tmp_path: Path) -> None:
    guest = hosted(app_of(remembering))
    first = guest.run(order(), guest.initial_model(), Cursor())
    with pytest.raises(RunError, match=r"clientapps.py, line \d+: OSError: the disk is gone"):
        guest.run(order(learning_rate=2.0), guest.initial_model(), first.cursor)
    LastOrder(order(), Completed(first.report, first.update), first.cursor).save(tmp_path / "last")
    kept = LastOrder.load(tmp_path / "last")
    assert kept is not None
    other = hosted(app_of(remembering))  # another process
    second = other.run(order(), other.initial_model(), kept.cursor)
    assert second.report.metrics["orders"] == 1.0
    state = read_state(second.cursor.private)
    assert state["counts"] == {"orders": 2, "losses": [0.5, 0.25]}
    assert state["about"] == {"key": b"\x00\xff", "words": ["a", "b"], "on": True}
    assert state["head"]["weight"].numpy().tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert state["head"]["weight"].numpy().dtype == np.float64


def test_an_order_that_only_scores_changes_nothing_that_is_kept() -> None:
    guest = hosted(app_of(remembering))
    assert guest.run(order(learning_rate=0.0), guest.initial_model(), Cursor()).cursor == Cursor()


def test_a_state_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsync.train.guests.guest_clientapp.MOST_BYTES", 100)
    assert write_state(RecordDict()) == b""
    with pytest.raises(ConfigError, match=r"context.state: .* at most 100"):
        write_state(RecordDict({"head": ArrayRecord([np.zeros(100)])}))
