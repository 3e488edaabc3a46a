"""Silos that may spoil sealed sums, and who is left out for a while, so that a run goes on without its operator.

A silo that lies can seal what no silo may: the sum that has it brings nothing, at no silo. Silos say of which versions
that is so (`PooledFigures.spoiled`), and nobody sees whose update it was. Who is in all spoiled sums may have done it.

| what happens | then |
|---|---|
| a sum is spoiled | who was not in it is cleared, and comes back; half of the others stay out, next time the other |
| a sum is spoiled that one suspect alone was in all of | it stays out; an operator can readmit it |
| none is spoiled for `PATIENCE` versions, and for twice as many each time that clears nobody | who is out comes back |
| too few silos would be left for a sum | nobody is left out; the run's notes name the suspects |

That a version is sound clears nobody: a silo that lies can wait until others are out. So nobody stays out for what did
not happen, and a silo that spoils one version in a while costs this version, and work of half of the suspects.

What is wanted is asked of the coordinator as an operator would, so journals, checkpoints and books need nothing new.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fedsync.common import foreign
from fedsync.core.actions import Attested, Commit, OperatorAnswered
from fedsync.core.events import OperatorAsked
from fedsync.core.journal import JournalEntry
from fedsync.core.operator.operator_commands import DropSilo, OperatorQuestion, ReadmitSilo
from fedsync.server.operator_requests import Requests

logger = foreign.logger(__name__)

PATIENCE, _LONGEST = 4, 64
"""Versions for which a half is out, the first time and at most."""

_OUT, _GUILTY, _BACK, _KEPT = "suspect", "spoils", "back", 64
_WHY = "it may be who spoils sums"
_SURE = "it was in all sums that were spoiled, and is the only one"
_FREE = "others may be who spoils sums"


class Suspects:
    """Takes the place of what an operator asks, and adds to it what it wants itself.

    Args:
        operator: the operator's own questions.
        answered: questions that a resumed run has answered.
        dropped: silos that are out in it.
    """

    def __init__(self, operator: Requests, answered: Iterable[str] = (), dropped: Iterable[str] = ()) -> None:
        self._operator = operator
        mine = {request.partition(":")[2] for request in answered if request.startswith(f"{_OUT}-")}
        self._out = set(dropped) & mine
        self._among: set[str] = set()
        self._of: dict[int, set[str]] = {}
        self._version = self._turns = self._quiet = self._under_way = 0
        self._wanted: list[tuple[str, OperatorQuestion]] = []

    def close(self) -> None:
        self._operator.close()

    def events(self, now_s: float) -> list[OperatorAsked]:
        """As of `Requests`."""
        wanted, self._wanted = self._wanted, []
        mine = [OperatorAsked(now_s, request, question) for request, question in wanted]
        return [*self._operator.events(now_s), *mine]

    def settle(self, entry: JournalEntry) -> None:
        """As of `Requests`."""
        theirs = []
        for action in entry.actions:
            match action:
                case OperatorAnswered(request) if request.partition("-")[0] in (_OUT, _GUILTY, _BACK):
                    self._settled(request, action.refused)
                    continue
                case Commit(version, weights):
                    self._committed(version, {update_id.rpartition("/")[0] for update_id in weights})
                case Attested(figures) if figures.spoiled:
                    self._spoiled(figures.version, set(figures.spoiled))
                case _:
                    pass
            theirs.append(action)
        self._operator.settle(replace(entry, actions=tuple(theirs)))

    def _committed(self, version: int, silos: set[str]) -> None:
        self._version, self._of[version] = version, silos
        self._of.pop(version - _KEPT, None)
        self._quiet += not silos & self._out
        if self._out and self._quiet >= min(PATIENCE * 2 ** max(self._turns - 1, 0), _LONGEST):
            self._readmit(self._out)

    def _spoiled(self, version: int, said: set[str]) -> None:
        silos = said & self._of.get(version, set())
        if not silos or silos & self._out or version <= self._under_way:
            return  # of before they were left out
        among = self._among & silos or silos
        if among != self._among:
            self._among, self._turns = among, 0
        self._quiet, suspects = 0, sorted(among)
        half = suspects[: len(suspects) // 2] if self._turns % 2 == 0 else suspects[len(suspects) // 2 :]
        self._turns += 1
        self._readmit(self._out - set(half))
        if len(suspects) == 1:
            self._ask(_GUILTY, suspects[0], DropSilo(suspects[0], _SURE))
            self._among, self._under_way = set(), self._version + 1  # which may be under way with it
            return
        for silo in half:
            self._out.add(silo)
            self._ask(_OUT, silo, DropSilo(silo, _WHY))

    def _readmit(self, silos: Iterable[str]) -> None:
        for silo in sorted(silos):
            self._ask(_BACK, silo, ReadmitSilo(silo, _FREE))
            self._out.discard(silo)

    def _ask(self, kind: str, silo: str, question: OperatorQuestion) -> None:
        self._wanted.append((f"{kind}-{self._version}-{self._turns}:{silo}", question))

    def _settled(self, request: str, refused: str) -> None:
        if refused:
            kind, _, silo = request.partition(":")
            logger.warning("%s cannot be left out or taken in again: %s", silo, refused)
            if kind.startswith(_OUT):
                self._out.discard(silo)
