"""Figures that silos say they found together, and which of them the server believes.

Where figures are sealed, the server cannot add them up itself: silos open the sums and tell it. All honest silos open
the same sums and say the same, so a figure is believed once more than half of the silos that are here say it, and two
at least. One silo that lies changes nothing; where two silos are left and one lies, nothing is believed.

| claims about a version | next |
|---|---|
| none that enough silos share | wait: every silo tells with its next update |
| enough silos say the same | `Attested`, once |
| two that differ | a `Note`, once a run, whoever is right |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from fedsync.core.actions import Action, Attested, Note
from fedsync.core.orders import PooledFigures
from fedsync.core.report_checks import usable_figures

KEPT = 64
"""Versions back to which claims are remembered."""

MOST = 16
"""Claims of one message that count, the last."""


@dataclass(slots=True)
class Claims:
    """What each silo said. A value that pickles.

    Args:
        said: version -> silo -> its claim, the first one.
        believed: versions of which a claim is.
        disputed: silos have contradicted each other.
    """

    said: dict[int, dict[str, PooledFigures]] = field(default_factory=dict)
    believed: set[int] = field(default_factory=set)
    disputed: bool = False

    def hear(
        self, silo: str, claims: Iterable[PooledFigures], silos: int, version: int, actions: list[Action]
    ) -> list[PooledFigures]:
        """What is believed now that ``silo`` has spoken, oldest first; also added to ``actions``.

        Args:
            silo: who says so.
            claims: what it says; what no silo can have found is left out.
            silos: that are here.
            version: of the model.
            actions: of the coordinator.
        """
        news = []
        for claim in sorted(tuple(claims)[-MOST:], key=lambda each: each.version):
            if not usable_figures(claim, version) or claim.version <= version - KEPT:
                continue
            said = self.said.setdefault(claim.version, {})
            if silo not in said:
                # One object for all that say the same: a checkpoint writes it once, not for each silo.
                said[silo] = next((other for other in said.values() if other == claim), claim)
            self._dispute(claim.version, said, silo, actions)
            if claim.version in self.believed:
                continue
            figures, count = Counter(said.values()).most_common(1)[0]
            if count >= max(2, silos // 2 + 1):
                self.believed.add(claim.version)
                actions.append(Attested(figures))
                news.append(figures)
        for old in [each for each in self.said if each <= version - KEPT]:
            del self.said[old]
            self.believed.discard(old)
        return news

    def _dispute(self, version: int, said: dict[str, PooledFigures], silo: str, actions: list[Action]) -> None:
        if not self.disputed and said[silo] != next(iter(said.values())):
            self.disputed = True
            actions.append(
                Note(
                    f"silos do not agree on what they found together up to version {version}: so far "
                    f"{', '.join(sorted(said))} have spoken. What more than half of all silos say counts"
                )
            )
