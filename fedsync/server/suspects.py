"""Search for silos that spoil encrypted sums, and their temporary exclusion without an operator.

A lying silo can encrypt values that no honest silo may encrypt. A sum with this update is useless at every silo. Silos
report the spoiled versions (`PooledFigures.spoiled`), but neither silos nor server see whose update it was. The
suspects are the silos that were in all spoiled sums.

| event | reaction |
|---|---|
| a sum is spoiled | silos outside the sum are cleared and return; half of the suspects stay out, next the other half |
| a sum is spoiled, and a single suspect was in all spoiled sums | it stays out; an operator can readmit it |
| no sum is spoiled for `PATIENCE` versions, doubled each time no silo is cleared | excluded silos return |
| too few silos would be left for a sum | no silo is excluded; the run's notes name the suspects |

A sound version clears no silo: a lying silo can wait until others are excluded. So no silo stays out without evidence.
A silo that spoils a version now and then costs this version, and the work of half of the suspects.

Exclusions are sent to the coordinator like an operator's requests, so journals, checkpoints and ledgers stay the same.
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
"""Versions for which half of the suspects is excluded: at first, and at most."""

_OUT, _GUILTY, _BACK, _KEPT = "suspect", "spoils", "back", 64
_WHY = "it may be who spoils sums"
_SURE = "it was in all sums that were spoiled, and is the only one"
_FREE = "others may be who spoils sums"


class Suspects:
    """Source of requests that adds exclusions of suspects to the operator's requests.

    ``answered`` are requests that a resumed run has answered, ``dropped`` the silos that are excluded in it.
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
        wanted, self._wanted = self._wanted, []
        mine = [OperatorAsked(now_s, request, question) for request, question in wanted]
        return [*self._operator.events(now_s), *mine]

    def settle(self, entry: JournalEntry) -> None:
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
            return  # the version began before the exclusion
        among = self._among & silos or silos
        if among != self._among:
            self._among, self._turns = among, 0
        self._quiet, suspects = 0, sorted(among)
        half = suspects[: len(suspects) // 2] if self._turns % 2 == 0 else suspects[len(suspects) // 2 :]
        self._turns += 1
        self._readmit(self._out - set(half))
        if len(suspects) == 1:
            self._ask(_GUILTY, suspects[0], DropSilo(suspects[0], _SURE))
            self._among, self._under_way = set(), self._version + 1  # the next version may still contain the silo
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
