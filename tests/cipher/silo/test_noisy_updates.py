"""Updates with shares of noise under encryption: only the whole sum opens, and nothing beside it tells of a silo."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.cipher.encoding import tally
from fedsync.cipher.encoding.silo_noise import SiloNoise
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.server.inbox import Gathered
from fedsync.common.errors import ProtocolError
from tests.cipher.make import INITIAL, LAYOUT, Federation, change, plan

NOISE = SiloNoise(clip=1.0, multiplier=0.8, shares=2)
FOUR = dict.fromkeys("abcd", 10)


def noisy(kind: str = "bfv") -> EncryptionPlan:
    return replace(plan(kind, quorum=4, members=3), noise=NOISE)


def deviation(silos: int) -> float:
    """Standard deviation of the noise in the sum of that many silos' updates."""
    fit = NOISE.fit(LAYOUT.size, 16)
    return NOISE.multiplier * math.sqrt(fit.longest * silos / NOISE.shares) * math.ldexp(1.0, fit.exponent - 15)


@pytest.mark.parametrize("kind", ["bfv", "pad"])
def test_the_model_moves_by_the_mean_and_the_noise_of_all_shares(kind: str, tmp_path: Path) -> None:
    federation = Federation(noisy(kind), tmp_path, FOUR)
    expected = INITIAL.copy()
    for version in range(3):
        expected += np.mean(federation.run_round(version, size=0.001), axis=0)
    models = [federation.begin(name, 3) for name in FOUR]
    for model in models:
        np.testing.assert_array_equal(model, models[0])
    residual = models[0] - expected
    wanted = deviation(4) / 4 * math.sqrt(3)
    assert np.std(residual) == pytest.approx(wanted, rel=0.05)
    assert abs(residual.mean()) < 5 * wanted / math.sqrt(residual.size)


def test_a_long_update_moves_the_model_no_further_than_the_clip(tmp_path: Path) -> None:
    federation = Federation(noisy(), tmp_path, FOUR)
    whole = np.mean(federation.run_round(0, size=50.0), axis=0)
    moved = federation.begin("a", 1) - INITIAL
    direction = whole / np.linalg.norm(whole)
    assert abs(moved @ direction) <= 1.0 + 5 * deviation(4) / 4


def test_a_header_tells_nothing_of_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes on the size of updates would."""
    told: list[tally.Contribution] = []
    build = tally.build
    monkeypatch.setattr(tally, "build", lambda own, *rest: told.append(own) or build(own, *rest))
    federation = Federation(noisy(), tmp_path, FOUR)
    for version, size in enumerate((1e-6, 1e3)):
        federation.run_round(version, size=size)
    exponents = {own.exponents for own in told}
    assert exponents == {federation.plan.first_exponents} and {own.weight for own in told} == {1}
    assert all(own.loss is None and own.evaluation is None for own in told)
    assert {silo._state.scales.exponents for silo in federation.silos.values()} == {tuple(exponents)}


def test_nothing_is_trained_for_a_greeting(tmp_path: Path) -> None:
    federation = Federation(noisy(), tmp_path, FOUR)

    def measure() -> Any:
        raise AssertionError("the data were looked at")

    silo = federation.copy("a")
    silo._measure = measure
    silo.greeting()


def test_a_version_in_parts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part has only its own silos' noise."""
    federation = Federation(noisy(), tmp_path, FOUR)
    gather = Gathered.of

    def halves(*given: Any) -> Gathered:
        found = gather(*given)
        (envelopes,) = found.by_grid.values()
        return replace(found, by_grid={b"1": envelopes[:2], b"2": envelopes[2:]})

    monkeypatch.setattr(Gathered, "of", halves)
    federation.run_round(0, size=0.001)
    with pytest.raises(ProtocolError, match="2 sums, each with a part of a version's noise"):
        federation.begin("a", 1)


def test_a_sum_of_too_few_silos_is_refused(tmp_path: Path) -> None:
    federation = Federation(noisy(), tmp_path, FOUR)
    federation.aggregator._plan = replace(federation.plan, members=1)
    federation.begin_all("ab", 0)
    federation.commit(1, [federation.answer(name, change(1)) for name in "ab"])
    with pytest.raises(ProtocolError, match="a sum of 2 silos"):
        federation.begin("a", 1)
