"""Server's part in removing masks from a sum: it relays lists, signatures, annexes and seeds between silos.

The server has no key. It checks everything that silos send, and treats a silo with invalid answers as a lost silo.

| state | request to silos | next |
|---|---|---|
| signing | to each survivor: sign the list | revealing, with t signatures; closed if fewer than t silos are left |
| revealing | to *helpers*, the first t that signed: reveal, and send shares of other silos' | done, with all seeds; |
|  | seeds; if a helper is lost, all silos that have signed become helpers | closed if fewer than t are left |

So slow silos delay nothing: t answers open the sum (t as in `mask_roster`), whichever other silos are lost at any step.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping

from fedsync.cipher.encoding.fields import annex_stub, pack_named
from fedsync.cipher.masking.annex import Annex, Seeds, join
from fedsync.cipher.masking.mask_roster import RUN_BYTES, threshold
from fedsync.cipher.masking.mask_round import RevealAnswer, RevealQuestion, SignAnswer, Survivors, read_answer
from fedsync.cipher.masking.masks import pack_opening
from fedsync.cipher.suites.suite import MASKED
from fedsync.common import foreign
from fedsync.common.errors import ProtocolError
from fedsync.model.transfer import Payload

logger = foreign.logger(__name__)


class Unmasking:
    """Collector of the seeds that open one masked sum; the module has its states. ``annexes`` are those of the sum, by
    silo, all of one context; ``signing`` are the silos' Ed25519 keys.
    """

    def __init__(self, annexes: Mapping[str, bytes], signing: Mapping[str, bytes], colluding: int) -> None:
        self._data = dict(annexes)
        self._annexes = {name: Annex.unpack(data, name, name) for name, data in annexes.items()}
        self._signing = signing
        first = next(iter(self._annexes.values()))
        names = sorted(first.pairs.keys() | self._annexes.keys())
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._dropped = sorted(set(names) - self._data.keys())
        self._threshold = threshold(len(names), colluding)
        self._list = Survivors(first.context, {name: annex_stub(data) for name, data in annexes.items()})
        self._signatures: dict[str, bytes] = {}
        self._first, self._lost = set[str](), set[str]()
        self._asked: dict[str, list[set[str]]] = {}
        self._told: dict[str, Seeds] = {}
        self._shares: dict[str, dict[int, Seeds]] = {name: {} for name in annexes}

    @property
    def done(self) -> bool:
        return all(name in self._told or len(self._shares[name]) >= self._threshold for name in self._data)

    @property
    def closed(self) -> bool:
        here = self._data.keys() - self._lost
        numbers = {self._numbers[name] for name in here}
        most = [len(self._shares[name].keys() | numbers) for name in self._lost - self._told.keys()]
        return not self.done and min([*most, len(self._signatures.keys() | here)]) < self._threshold

    @property
    def _helpers(self) -> set[str]:
        return self._first if not self._first & self._lost else self._signatures.keys() - self._lost

    def questions(self) -> dict[str, Payload]:
        """Questions to send now, by silo; each question is returned once."""
        if self.done or self.closed:
            return {}
        if not self._first:
            due = [name for name in self._data if name not in self._asked and name not in self._lost]
            self._asked.update((name, []) for name in due)
            return dict.fromkeys(due, self._list.encode())
        missing = self._data.keys() - self._helpers - self._told.keys()
        due = [name for name in self._helpers if not any(missing <= asked for asked in self._asked[name])]
        for name in due:
            self._asked[name].append(missing)
        lost = {name: self._data[name] for name in missing}
        quorum = dict(list(self._signatures.items())[: self._threshold])
        return dict.fromkeys(due, RevealQuestion(self._list.context, quorum, lost).encode())

    def answer(self, silo: str, payload: Payload) -> None:
        """Take a silo's answer, or raise `ProtocolError` if it is false; answers about earlier sums are ignored."""
        answer = read_answer(silo, payload)
        if answer.context != self._list.context:
            return
        if silo not in self._data:
            raise ProtocolError(silo, "answer", "nobody asked")
        match answer:
            case SignAnswer(_, signature):
                if not self._list.signed_by(self._signing[silo], signature):
                    raise ProtocolError(silo, "signature", "it is not that of the list of survivors")
                self._signatures[silo] = signature
                if len(self._signatures) == self._threshold:
                    self._first = set(self._signatures)
            case RevealAnswer():
                self._revealed(silo, answer)

    def _revealed(self, silo: str, answer: RevealAnswer) -> None:
        if answer.shares.keys() not in self._asked.get(silo, []):
            raise ProtocolError(silo, "reveal", "shares of other silos than were asked for")
        self._annexes[silo].check(answer.seeds, set(self._dropped), silo)
        if any(sorted(shares.pairs) != self._dropped for shares in answer.shares.values()):
            raise ProtocolError(silo, "reveal", "shares of other seeds than were asked for")
        self._told[silo] = answer.seeds
        for name, shares in answer.shares.items():
            self._shares[name][self._numbers[silo]] = shares

    def give_up(self, silo: str) -> None:
        self._lost |= {silo} & self._data.keys()

    def opening(self) -> bytes | None:
        """Seeds of all survivors, for `Unmasker`; None if shares do not fit a commitment."""
        seeds = {}
        for name, annex in self._annexes.items():
            try:
                seeds[name] = self._told.get(name) or self._joined(name)
                annex.check(seeds[name], set(self._dropped), name)
            except (ProtocolError, ValueError) as error:
                helpers = ", ".join(sorted(self._helpers))
                told = "shares of %s's masks, from %s, are not of what it committed to: %s"
                logger.warning(told, name, helpers, error)
                return None
        return pack_opening(self._data, seeds)

    def _joined(self, name: str) -> Seeds:
        chosen = dict(sorted(self._shares[name].items())[: self._threshold])
        own = join({number: shares.own for number, shares in chosen.items()})
        pairs = {other: join({n: shares.pairs[other] for n, shares in chosen.items()}) for other in self._dropped}
        return Seeds(own, pairs)


_SAME, _ATTEMPTS = 2, 2**31


class Attempts:
    """Attempts at one version under masks: the attempt number of each silo's newest order.

    A silo's masks of one attempt blind one update only, and a sum has updates of one attempt only. A failed order is
    first repeated in the same attempt, which works if the silo failed before it sealed. After a second failure, the
    silo may have sealed already. Its next order begins another attempt, whose update no sum needs. The silo takes part
    again from the next version on.
    """

    def __init__(self) -> None:
        self._version = self._first = 0
        self._orders: dict[str, int] = {}

    def begin(self, silo: str, version: int) -> int:
        if version != self._version:
            self._version, self._first, self._orders = version, 0, {}
        self._orders[silo] = self._orders.get(silo, 0) + 1
        return self.of(silo, version)

    def of(self, silo: str, version: int) -> int:
        """Attempt of the silo's newest order; 0 where no order began with this version."""
        if version != self._version:
            return 0
        return self._first + max(0, self._orders.get(silo, 0) - _SAME)

    def restart(self, version: int) -> None:
        """Continue from ``version`` in another process, with unused attempts: not all earlier orders are known."""
        self._version, self._first, self._orders = version, secrets.randbelow(_ATTEMPTS), {}


class Announcements:
    """Rosters of silos that announce, leave and return; ``here`` has the checked announcement of each present silo.

    Masks cancel only between silos that were sent the same roster. So the roster stays fixed for the duration of a
    version, also if a silo leaves. A silo that joins meanwhile gets a roster that includes it. Its update cannot be
    added to other updates. From the next version on, the silo is in the common roster.
    """

    def __init__(self) -> None:
        self.here: dict[str, bytes] = {}
        self._fixed: dict[str, bytes] | None = None

    def put(self, silo: str, announcement: bytes) -> None:
        """Add a silo, or renew its key; `ProtocolError` if the roster is full."""
        if len(self.here.keys() | {silo}) > MASKED.additions:
            detail = f"{MASKED.additions} silos mask their updates, and no more can; it can when one of them leaves"
            raise ProtocolError(silo, "announcement", detail)
        self.here[silo] = announcement

    def renew(self) -> None:
        self._fixed = None

    def roster(self, silo: str) -> bytes:
        """Roster to send to a silo, without silos that announce another run than most."""
        if self._fixed is None:
            self._fixed = dict(self.here)
        same = self._fixed.get(silo) == self.here.get(silo)
        found = self._fixed if same else self.here
        runs = Counter(announcement[:RUN_BYTES] for announcement in found.values())
        run = max(sorted(runs), key=runs.__getitem__, default=b"")
        return pack_named({name: one for name, one in found.items() if one.startswith(run)})
