"""Plan of a private run at one silo: the releases that its orders and evaluations will make."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from fedsync.privacy.accounting import AccountantKind, epsilon, noise_for
from fedsync.privacy.release import PrivateSettings, Release


@dataclass(frozen=True, slots=True)
class PrivacyPlan:
    """Orders of a whole run, as the strategy asks for them.

    Args:
        rounds: number of orders.
        steps: local steps of an order.
        batch_size: samples of a step, on average.
        score_noise: noise multiplier of an evaluation; None where no score is sent.
    """

    rounds: int
    steps: int
    batch_size: int
    score_noise: float | None = None

    def releases(self, settings: PrivateSettings) -> Counter[Release]:
        """Return the releases of the run; the first and the last version are evaluated besides the rounds."""
        planned = Counter({settings.release(self.batch_size): self.rounds * self.steps})
        if self.score_noise is not None:
            planned[Release(1.0, self.score_noise)] += self.rounds + 2
        return planned

    def noise(
        self,
        settings: PrivateSettings,
        target: float,
        delta: float,
        least: float,
        kind: AccountantKind = "pld",
        *,
        spent: Counter[Release] | None = None,
        guess: float | None = None,
    ) -> float:
        """Return the noise multiplier with which the run, after ``spent``, costs ``target``; see `noise_for`."""

        def planned(noise: float) -> Counter[Release]:
            return (spent or Counter()) + self.releases(replace(settings, noise=noise))

        return noise_for(target, delta, planned, least, kind, guess)

    def epsilon(self, settings: PrivateSettings, delta: float) -> float:
        """Return the epsilon of the whole run."""
        return epsilon(self.releases(settings), delta)
