"""Majority vote on encrypted runs' metrics: the server believes a figure that enough silos report alike.

The server cannot read the sums of encrypted metrics: silos decrypt the sums and report them. The server believes a
figure once more than half of the present silos report it, and at least two. One lying silo changes nothing; if two
silos are left and one of them lies, the server believes no figure.

| claims about a version | next |
|---|---|
| no claim has enough silos | wait: every silo reports with its next update |
| one claim has enough silos | `Attested`, once |
| two claims differ | a `Note`, once a run, whichever claim is right |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from fedsync.core.actions import Action, Attested, Note
from fedsync.core.orders import PooledFigures
from fedsync.core.report_checks import usable_figures

KEPT = 64

MOST = 16
"""Number of claims read from one message; the last ones count."""


@dataclass(slots=True)
class Claims:
    """Claims of each silo; picklable. ``said`` has each silo's first claim by version, ``believed`` the versions with a
    believed claim. ``disputed``: silos have contradicted each other.
    """

    said: dict[int, dict[str, PooledFigures]] = field(default_factory=dict)
    believed: set[int] = field(default_factory=set)
    disputed: bool = False

    def hear(
        self, silo: str, claims: Iterable[PooledFigures], silos: int, version: int, actions: list[Action]
    ) -> list[PooledFigures]:
        """Store plausible claims and return the newly believed ones, oldest first, also added to ``actions``."""
        news = []
        for claim in sorted(tuple(claims)[-MOST:], key=lambda each: each.version):
            if not usable_figures(claim, version) or claim.version <= version - KEPT:
                continue
            said = self.said.setdefault(claim.version, {})
            if silo not in said:
                # Equal claims share one object, so a checkpoint writes it once.
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
