"""Every kind of predictor builds what it says."""

from __future__ import annotations

import pytest

from fedsync.config.predictors import PREDICTORS, default_predictor
from fedsync.policies.predict.arima import Arima
from fedsync.policies.predict.ema import Ema
from fedsync.policies.predict.mixture import Mixture
from tests.sim.fake import strategy


def test_every_kind_has_a_default_and_is_in_the_union() -> None:
    for kind in PREDICTORS:
        assert strategy(predictor={"kind": kind}).policies().predictor == default_predictor(kind)


def test_a_mixture_holds_all_others_by_default() -> None:
    mixture = default_predictor("mixture")
    assert isinstance(mixture, Mixture)
    assert mixture.experts == tuple(default_predictor(kind) for kind in PREDICTORS if kind != "mixture")


def test_options_reach_the_predictor() -> None:
    assert strategy(predictor={"kind": "arima", "p": 1, "d": 0, "q": 2}).policies().predictor == Arima((1, 0, 2))
    nested = strategy(predictor={"kind": "mixture", "experts": [{"kind": "ema", "alpha": 0.5}]})
    assert nested.policies().predictor == Mixture((Ema(0.5),))


@pytest.mark.parametrize(
    "predictor", [{"kind": "mixture", "experts": []}, {"kind": "mixture", "experts": [{"kind": "mixture"}]}]
)
def test_a_mixture_needs_experts_and_holds_no_mixture(predictor: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        strategy(predictor=predictor)
