"""Who trains when, and with whose weights a silo begins."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from fedsync.core.orders import Window, WorkReport
from fedsync.core.protocols import MachineLoad, SpeedSample
from fedsync.core.speed.forecasts import TURN, Forecasts


@dataclass(frozen=True)
class Pupil:
    """State: (last speed, epochs trained, given by, drivers of the last forecast asked)."""

    learns: bool = True

    def init(self) -> dict[str, Any]:
        return {"speed": None, "epochs": 0, "samples": ()}

    def observe(self, state: dict[str, Any], sample: SpeedSample) -> dict[str, Any]:
        return {**state, "speed": sample.speed, "samples": (*state["samples"], sample)}

    def forecast(self, state: dict[str, Any], drivers: MachineLoad | None = None) -> float | None:
        memory = 0.0 if drivers is None else drivers.memory
        return None if state["speed"] is None else float(state["speed"] + memory)

    def unlearned(self, state: dict[str, Any]) -> bool:
        return bool(state["epochs"] < 25)

    def learn(self, state: dict[str, Any], epochs: int) -> dict[str, Any]:
        return {**state, "epochs": state["epochs"] + epochs}

    def reuse(self, state: dict[str, Any], donor: dict[str, Any]) -> dict[str, Any]:
        return {**state, "epochs": donor["epochs"]}


REPORT = WorkReport(base_version=0, steps=1, samples=100, compute_s=1.0, loss=1.0)


def epochs(forecasts: Forecasts) -> dict[str, int]:
    return {name: state["epochs"] for name, state in forecasts._states.items()}


def started(*names: str) -> Forecasts:
    forecasts = Forecasts(Pupil())
    for name in names:
        forecasts.observe(name, REPORT, 1.0)
    return forecasts


def test_silos_take_turns_and_go_on_where_the_last_one_was() -> None:
    assert TURN == 10
    forecasts = started("a", "b", "c")
    forecasts.learn(15)
    assert epochs(forecasts) == {"a": 10, "b": 5, "c": 0}
    forecasts.learn(12)
    assert epochs(forecasts) == {"a": 12, "b": 5, "c": 10}
    assert forecasts.unlearned


def test_who_has_learned_enough_is_passed_over() -> None:
    forecasts = started("a", "b")
    for _ in range(3):
        forecasts.learn(20)
    assert epochs(forecasts) == {"a": 30, "b": 30}
    forecasts.learn(100)
    assert epochs(forecasts) == {"a": 30, "b": 30}
    assert not forecasts.unlearned


@pytest.mark.parametrize("most", "ab")
def test_a_silo_begins_with_what_the_one_with_most_samples_has_learned(most: str) -> None:
    forecasts = Forecasts(Pupil())
    windows = (Window(90.0, 0.5, 0.5), Window(110.0, 0.5, 0.5))
    for name in "ab":
        forecasts.observe(name, replace(REPORT, windows=windows) if name == most else REPORT, 1.0)
    forecasts.learn(13)
    forecasts.observe("c", REPORT, 1.0)
    learned = {"a": 10, "b": 3}
    assert epochs(forecasts) == {**learned, "c": learned[most]}


def test_a_forecast_gets_the_newest_drivers_and_a_sample_those_of_its_forecast() -> None:
    forecasts = started("a")
    for memory in (0.25, 0.75):
        windows = (Window(1.0, 0.1, 0.9), Window(1.0, 0.5, memory))
        curve = forecasts.observe("a", replace(REPORT, windows=windows), 1.0)
        assert curve is not None
        assert curve.speed == 100 + memory
    samples = forecasts._states["a"]["samples"]
    assert [sample.known for sample in samples] == [None, MachineLoad(0.0, 0.0), MachineLoad(0.5, 0.25)]
    assert samples[1].windows == (Window(1.0, 0.1, 0.9), Window(1.0, 0.5, 0.25))


def test_a_predictor_that_does_not_learn_is_left_alone() -> None:
    forecasts = Forecasts(Pupil(learns=False))
    forecasts.observe("a", REPORT, 1.0)
    forecasts.learn(100)
    assert epochs(forecasts) == {"a": 0}
    assert not forecasts.unlearned
