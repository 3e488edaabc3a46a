"""Curves, orders, views, errors, and how values are built."""

import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from fedsync.common.errors import ConfigError, FedSyncError, PolicyError, ProtocolError
from fedsync.core.orders import fast_dataclass
from fedsync.core.speed.curve import Curve


@pytest.mark.parametrize(
    ("curve", "batch", "seconds"),
    [
        (Curve(100.0), 50, 0.5),
        (Curve(100.0, launch_s=0.25), 50, 0.75),
        (Curve(100.0, launch_s=0.25, saturation=64), 50, 0.89),  # as long as 64
        (Curve(100.0, saturation=64), 65, 0.65),
    ],
)
def test_a_step_takes_launch_plus_samples_by_speed(curve: Curve, batch: int, seconds: float) -> None:
    assert curve.step_s(batch) == pytest.approx(seconds, rel=1e-15)


def test_errors_name_place_problem_and_remedy() -> None:
    assert str(ConfigError("x.yaml, line 2, a.b", "7 is odd", "Write 8")) == "x.yaml, line 2, a.b: 7 is odd. Write 8"
    assert str(ProtocolError("a", "loss", "nan")) == "silo 'a' failed the check 'loss': nan"
    assert str(ProtocolError("server", "tag", "no")) == "the server failed the check 'tag': no"
    assert str(ProtocolError("administrator", "epoch", "0")) == "the administrator failed the check 'epoch': 0"
    assert str(ProtocolError("node 7", "hello", "empty")) == "node 7 failed the check 'hello': empty"
    assert str(PolicyError("it broke")) == "it broke"
    assert str(PolicyError("it broke", ["one", "two"])).splitlines()[1:] == ["  'one'", "  'two'"]


@pytest.mark.parametrize(
    "error", [ConfigError("here", "bad", "Fix it"), ProtocolError("a", "loss", "nan"), PolicyError("broke", ["e"])]
)
def test_errors_cross_processes(error: FedSyncError) -> None:
    """Ray and process pools pickle what a worker raises."""
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


@dataclass(frozen=True, slots=True)
class Usual:
    """As `dataclasses` builds it."""

    a: int
    b: tuple[int, ...] = (1, 2)
    c: dict[str, int] = field(default_factory=dict)


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Quick:
    """The same fields."""

    a: int
    b: tuple[int, ...] = (1, 2)
    c: dict[str, int] = field(default_factory=dict)


@pytest.mark.parametrize("fields", [{"a": 1}, {"a": 1, "b": ()}, {"c": {"x": 1}, "a": 3}])
def test_a_quick_value_is_what_a_dataclass_is(fields: dict[str, object]) -> None:
    usual, value = Usual(**fields), Quick(**fields)  # type: ignore[arg-type]
    assert repr(value) == repr(usual).replace("Usual", "Quick")
    assert value == Quick(*(getattr(usual, name) for name in "abc"))
    assert replace(value, a=9) == replace(value, a=9) != value
    assert pickle.loads(pickle.dumps(value)) == value
    with pytest.raises(FrozenInstanceError):
        value.a = 2  # type: ignore[misc]


def test_a_quick_value_has_the_same_parameters() -> None:
    assert list(inspect.signature(Quick).parameters) == list(inspect.signature(Usual).parameters)
    for arguments in [(), (1, 2, 3, 4)]:
        with pytest.raises(TypeError):
            Quick(*arguments)
    assert Quick(1).c is not Quick(1).c, "what a factory makes is nobody else's"
