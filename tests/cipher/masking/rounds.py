"""Silos of one masked sum and a server that carries questions and answers, without replicas and aggregators."""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from fedsync.cipher.encoding.fields import annex_stub, pack_named
from fedsync.cipher.keys.material import PublicKeys, SiloKeys
from fedsync.cipher.masking.mask_roster import MaskRoster, announce, fresh_pair
from fedsync.cipher.masking.mask_round import MaskRound, RevealQuestion, SignAnswer, Survivors, read_question
from fedsync.cipher.masking.masked_work import WorkDone
from fedsync.cipher.masking.unmask import Unmasking
from fedsync.model.transfer import Payload

NAMES = tuple(f"silo{i}" for i in range(5))
LONG = {name: SiloKeys(name, bytes([i + 1] * 32), bytes([i + 50] * 32)) for i, name in enumerate(NAMES)}
MEMBERS: dict[str, PublicKeys] = {name: keys.public for name, keys in LONG.items()}
PAIRS = {name: fresh_pair(keys, bytes([i + 100] * 32)) for i, (name, keys) in enumerate(LONG.items())}
RUN = hashlib.sha256(b"a run").digest()
CONTEXT = hashlib.sha256(b"a context").digest()


def announcements(names: Collection[str] = NAMES, run: bytes = RUN) -> dict[str, bytes]:
    return {name: announce(PAIRS[name], run) for name in names}


def roster(names: Collection[str] = NAMES, colluding: int = 1) -> MaskRoster:
    return MaskRoster.read(pack_named(announcements(names)), MEMBERS, RUN, colluding)


WORK = (WorkDone(5, 40, 5 * 2**20, 0), 4.0)


def rounds(names: Collection[str] = NAMES, context: bytes = CONTEXT, colluding: int = 1) -> dict[str, MaskRound]:
    return {name: MaskRound(PAIRS[name], roster(names, colluding), context, *WORK) for name in names}


def survivors_of(of: Mapping[str, MaskRound], names: Collection[str]) -> Survivors:
    stubs = {name: annex_stub(of[name].annex) for name in names}
    return Survivors(next(iter(of.values())).context, stubs)


def answer(own: MaskRound, payload: Payload) -> Payload:
    """What an honest silo answers."""
    question = read_question(payload)
    if isinstance(question, Survivors):
        return SignAnswer(own.context, own.sign(question)).encode()
    return own.reveal(question).encode()


@dataclass
class Carried:
    """A server that unmasks the sum of ``names``.

    ``lost`` says of a silo and a question whether the silo is gone by then; who is gone stays so.
    """

    of: Mapping[str, MaskRound]
    names: Collection[str] = NAMES
    lost: Callable[[str, Survivors | RevealQuestion], bool] = lambda name, question: False
    colluding: int = 1
    gone: set[str] = field(default_factory=set)
    asked: list[tuple[str, type]] = field(default_factory=list)

    def __post_init__(self) -> None:
        annexes = {name: self.of[name].annex for name in self.names}
        signing = {name: keys.signing for name, keys in MEMBERS.items()}
        self.server = Unmasking(annexes, signing, self.colluding)

    def run(self) -> bytes | None:
        """What opens the sum, or None where it stays closed."""
        while not self.server.done and not self.server.closed:
            questions = self.server.questions()
            assert questions, "nobody is asked, and nothing is decided"
            for name, payload in questions.items():
                question = read_question(payload)
                self.asked.append((name, type(question)))
                if name in self.gone or self.lost(name, question):
                    self.gone.add(name)
                    self.server.give_up(name)
                else:
                    self.server.answer(name, answer(self.of[name], payload))
        return self.server.opening() if self.server.done else None
