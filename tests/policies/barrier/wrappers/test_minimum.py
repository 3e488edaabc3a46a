"""Nobody starts before enough silos are there; afterwards the wrapped barrier alone decides."""

from dataclasses import dataclass

from fedsync.core.orders import SiloFacts
from fedsync.core.views import ClusterView, SiloView, Verdict
from fedsync.policies.barrier.wrappers.default_wrappers import MinimumSilos


@dataclass(frozen=True)
class Counting:
    """Releases everybody and counts, in its state, how often it was asked."""

    queues = False

    def init(self) -> int:
        return 0

    def decide(self, state: int, view: ClusterView) -> tuple[int, Verdict]:
        return state + 1, Verdict(release=view.idle, wake_at_s=float(state), reason=f"call {state}")


def view(names: str) -> ClusterView:
    return ClusterView(0.0, 0, {name: SiloView(SiloFacts(10)) for name in names}, {})


def test_holds_back_until_enough_have_joined() -> None:
    barrier = MinimumSilos(Counting(), 3)
    state = barrier.init()
    for names in ("", "a", "ab"):
        state, verdict = barrier.decide(state, view(names))
        assert verdict == Verdict(reason=f"{len(names)} of 3 silos have joined")
        assert (state.started, state.inner) == (False, 0), "the inner barrier has not been asked"
    state, verdict = barrier.decide(state, view("abc"))
    assert verdict == Verdict(release=("a", "b", "c"), wake_at_s=0.0, reason="call 0")
    assert (state.started, state.inner) == (True, 1)
