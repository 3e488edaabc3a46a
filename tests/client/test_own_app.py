"""The app around a training loop of one's own: what setup gives to functions, and what is refused in a line."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ChainDataset, DataLoader, Dataset, TensorDataset

from fedsync.client import Silo, SiloApp, Work
from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor
from fedsync.train.guests.guest import GuestTrainer
from tests.client.test_own_loop import OPTIONS, SITE, app_of, trainer
from tests.train.make import EXAMPLES, order


def test_setup_is_told_of_its_site_and_gives_whatever_functions_name() -> None:
    app, told = SiloApp(), []

    @app.setup()
    def setup(silo: Silo) -> Any:
        told.append((silo.name, silo.index, silo.node_config["site"], silo.options["width"]))
        return silo.use(lambda: nn.Linear(silo.options["width"], 1), [1, 2], tokenizer="mine")

    @app.train()
    def fit(work: Work, tokenizer: str, silo: Silo) -> None:
        told.append((tokenizer, silo.name))
        for _ in work.batches([0] * 9):
            pass

    guest = GuestTrainer(app, SITE, OPTIONS)
    guest.run(order(), guest.initial_model(), Cursor())
    assert told == [("silo-0", 0, "north", 3), ("mine", "silo-0")]
    assert guest.examples == 2 and guest.layout.shapes == ((1, 3), (1,))


PAIR = torch.zeros(9, 2), torch.zeros(9)


@pytest.mark.parametrize("train", [PAIR, dict(enumerate(PAIR)), DataLoader(TensorDataset(*PAIR), batch_size=4)])
def test_a_length_that_counts_no_samples_is_not_taken_for_their_number(train: Any) -> None:
    with pytest.raises(ConfigError, match=r"has no length in samples.*Give examples="):
        SITE.use(nn.Linear(2, 1), train)
    assert SITE.use(nn.Linear(2, 1), train, examples=9).examples == 9


@pytest.mark.parametrize(("word", "meant"), [("privat", "private"), ("sahre", "share"), ("tokeniser", "tokenizer")])
def test_a_name_that_no_function_takes_is_refused(word: str, meant: str) -> None:
    """A head that was to stay at the silo would travel."""
    app = SiloApp()
    app.setup()(lambda silo: silo.use(nn.Linear(2, 1), [1, 2], **{word: ["head."]}))
    app.train()(lambda work, tokenizer=None: None)
    with pytest.raises(ConfigError, match=rf"silo.use: no function of the app takes '{word}'. Did you mean '{meant}'"):
        GuestTrainer(app, SITE, OPTIONS)


def test_what_the_run_says_reaches_training_and_evaluation() -> None:
    told: list[Any] = []

    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        told.append(dict(work.config))
        for _ in work.loader(train):
            pass

    app = app_of(loop)

    @app.evaluate()
    def evaluate(config: Any) -> dict[str, tuple[float, int]]:
        told.append(dict(config))
        return {}

    guest = GuestTrainer(app, replace(SITE, train_config={"warm": 2}, evaluate_config={"top": 3}), OPTIONS)
    guest.run(order(evaluate=True), guest.initial_model(), Cursor())
    assert told == [{"top": 3}, {"warm": 2}]


def none_taken(work: Work, model: nn.Module) -> None:
    """Trains on nothing."""


def with_a_size(work: Work, train: Dataset[Any]) -> None:
    work.loader(train, batch_size=3, shuffle=True)


def of_other_data(work: Work) -> None:
    work.loader(TensorDataset(torch.zeros(3)))


def of_a_stream(work: Work) -> None:
    work.loader(ChainDataset([]))


def wants_a_net(work: Work, net: nn.Module) -> None:
    """Names what nobody gives."""


@pytest.mark.parametrize(
    ("loop", "problem"),
    [
        (none_taken, "took no batch"),
        (with_a_size, "batch_size, shuffle: the order decides"),
        (of_other_data, f"does not have the {EXAMPLES} samples"),
        (of_a_stream, r"no samples by number\. Loop over work\.batches"),
        (wants_a_net, r"it takes net, which has no value\. Use work, model, train, val, silo"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(loop: Any, problem: str) -> None:
    guest = trainer(loop)
    with pytest.raises(ConfigError, match=problem):
        guest.run(order(), guest.initial_model(), Cursor())


def test_an_app_without_its_functions_says_which() -> None:
    app = SiloApp()
    with pytest.raises(ConfigError, match="no such function"):
        GuestTrainer(app, SITE, OPTIONS)

    @app.setup()
    def setup(silo: Silo) -> Tensor:
        return torch.zeros(1)

    with pytest.raises(ConfigError, match=r"returned Tensor.*return silo.use"):
        GuestTrainer(app, SITE, OPTIONS)
    with pytest.raises(ConfigError, match="two of them"):
        app.setup()(setup)
    with pytest.raises(ConfigError, match="no length"):
        SITE.use(nn.Linear(1, 1), iter([1]))
    with pytest.raises(ConfigError, match="Choose another name"):
        SITE.use(nn.Linear(1, 1), [1], work=3)
