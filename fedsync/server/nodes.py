"""Which node is which silo, and who may take part at all.

Where the SuperLink authenticates nodes, a node's key is registered under a name (``flwr supernode
register KEY.pub CONNECTION --name berlin``), the grid shows that name, and it is the silo's: what a node
says of itself has to agree. Without registration there is only the node's own word.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from fedsync.common import foreign
from fedsync.common.backoff import Backoff
from fedsync.common.errors import LaterVersion, ProtocolError, RunError
from fedsync.core.report_checks import MAX_NAME, check_facts
from fedsync.model.tensor_parts import CommonForm
from fedsync.observe.fate import MISSING
from fedsync.server.region_clients import Regions
from fedsync.silo.owner.refusals import (
    AT_ONCE,
    PASSING,
    UNTIL_CHANGED,
    explained,
    explained_together,
    explained_too_few,
    listed,
)
from fedsync.silo.protocol import Hello, Refusal, Refused
from fedsync.transport.port import Peer
from fedsync.transport.questions import SiloAnswer

logger = foreign.logger(__name__)

MOST_OF_ALL = 0.99
"""Share of all samples; of a silo that says that it has more of them, people should know."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Who may take part.

    Args:
        silos: names that are accepted; None accepts every name.
        registered: only nodes that are registered by name are accepted. Without it this holds from the moment
            that a node with a registered name is seen.
        expected: silos that the run counts on: where so many refuse it, and nobody else is there, it is over; None
            waits for others.
        regions: silos of each relay, by its name; None accepts relays, unless nodes are registered by name: then a
            relay has to be named here, or any silo could speak for others.
        most_examples: training samples that a silo may say it holds; None for any number that a silo can hold.
        needed: silos without which the run does not begin: where all that are expected are here, and fewer than these
            can take part until somebody changes something, it is over.
    """

    silos: Sequence[str] | None = None
    registered: bool = False
    expected: int | None = None
    regions: Mapping[str, Sequence[str]] | None = None
    most_examples: int | None = None
    needed: int = 0


_NOT_LOADED, _RAISED, _MOD_REFUSED = 1, 2, 6
APP_ERRORS = (_NOT_LOADED, _RAISED, _MOD_REFUSED)
"""Flower's error codes of an app that does not load or raises. FedSync's app never raises to Flower."""

_NO_QUERIES = "No query function registered"

_SET_BACK = (
    "this run was set back, perhaps to a backup, and no silo follows it back ({}). Put back the "
    "newest files of the run's folder and resume it. Or begin another run: `fedsync silo export` writes "
    "the model that silos came to, and first_model in silo.yaml lets a run begin with it"
)
_NOT_OURS = (
    'no silo runs the ClientApp of FedSync ({}). Write clientapp = "fedsync.flower.client_app:app" in pyproject.toml: '
    "it calls your own ClientApp. If the line is there, install FedSync at the silos and read their logs"
)


class AnotherApp(ProtocolError):
    """A silo's first answer is an error of Flower's: `clientapp` is the user's own app, or FedSync's does not load."""

    def __init__(self, silo: str, problem: str, code: int) -> None:
        asked_in_vain = _NO_QUERIES in problem  # at the end of a trace, where Ray reports it
        super().__init__(silo, "answer", f"error {code}: {_NO_QUERIES}" if asked_in_vain else problem)
        self.certain = asked_in_vain or code != _RAISED


RESTS = Backoff(1, 64)
"""Looks between two greetings of a node that gives no usable answer."""

_MOST_REFUSALS, _MOST_ERRORS = 2, 4
"""Refusals in a row after which one is final that may pass, and errors of a ClientApp."""

_MOST_NAMED = 10
_PAUSE, _MOST_PAUSE_S = 20.0, 10.0


class Members(Protocol):
    """What tells who is there: a `Transport`."""

    def peers(self) -> Sequence[Peer]:
        """Nodes that are there."""


class Nodes:
    """The nodes that are there, and the silos that they are.

    A node that is refused is logged once, is asked nothing, and is not looked at again while it stays; one whose
    name another node has is looked at again when that one is gone.

    Args:
        members: tells of nodes.
        admission: who may take part.
        look_s: shortest time between two looks [s]; they are rarer where they take long. 0 for none.
        regions: those of the run, whose nodes are nodes, too.
    """

    def __init__(
        self, members: Members, admission: Admission | None = None, look_s: float = 0.0, regions: Regions | None = None
    ) -> None:
        self._members = members
        self.regions = regions or Regions()
        self._look_s = look_s
        self._next_s = -inf
        self._admission = admission or Admission()
        self._registered_only = self._admission.registered
        self._registered: dict[int, str] = {}
        self._seen: set[int] = set()
        self._activated: dict[int, str] = {}
        self._useless: dict[int, int] = {}
        self._rests: dict[int, int] = {}
        self._refused: dict[int, str] = {}
        self._refusing: dict[int, Refused] = {}
        self._names: dict[int, str] = {}
        self._answers: dict[int, str] = {}
        self._hopeless: dict[int, LaterVersion | AnotherApp] = {}
        self._told = ""
        self.by_name: dict[str, int] = {}
        """Node of each silo that is here."""
        self.examples: dict[str, int] = {}
        """Samples that each silo said it has, also of those that are gone."""

    def sender(self, node: int) -> str:
        """Name for messages about a node: the silo's, else the registered one, else its number."""
        return self._names.get(node) or self._registered.get(node) or f"node {node}"

    def look(self) -> tuple[list[int], list[int]]:
        """Nodes that are gone since the last look, and nodes to greet, both ascending.

        One that was gone and is back is gone first, and to be greeted by the next look: what it was sent is lost.
        Nothing is new too soon after the last look.
        """
        begun_s = time.monotonic()
        if begun_s < self._next_s:
            return [], []
        peers = self.regions.around(self._members.peers())
        if self._look_s:
            # Flower tells of all nodes each time, and of a thousand it takes a server long that has much to do.
            took_s = time.monotonic() - begun_s
            self._next_s = begun_s + max(self._look_s, took_s + min(_PAUSE * took_s, _MOST_PAUSE_S))
        here = {peer.node_id: peer.name for peer in peers}
        self._registered.update((node, name) for node, name in here.items() if name)
        self._registered_only |= bool(self._registered)
        before, self._activated = self._activated, {peer.node_id: peer.since for peer in peers}
        back = {node for node, at in self._activated.items() if before.get(node, at) != at}
        gone = sorted((self._seen - here.keys()) | (self._seen & back))
        self._rests = {node: looks - 1 for node, looks in self._rests.items()}
        for node in [node for node, looks in self._rests.items() if looks <= 0]:
            del self._rests[node]
            self._seen.discard(node)
        fresh = []
        for node in sorted(here.keys() - self._seen):
            self._seen.add(node)
            try:
                self._check_registration(node)
            except ProtocolError as error:
                logger.warning("refused: %s", error)
            else:
                fresh.append(node)
        self._tell_who_is_missing()
        return gone, fresh

    def relay(self, node: int, answer: SiloAnswer) -> None:
        """Take a node for a relay, as it has said.

        Raises:
            ProtocolError: it may be none, or says more that is none.
        """
        name, regions = self._registered.get(node, ""), self._admission.regions
        if name not in regions if regions is not None else self._registered_only:
            raise self._refusal(node, "relay", "it says that it is a relay, and `regions` names none of this name")
        self.regions.enrol(node, name or f"relay {node}", self._activated[node], answer)

    def forget(self, node: int) -> str | None:
        """Strike off a node that is gone; returns the silo's name if it was one."""
        self._seen.discard(node)
        for kept in (self._refused, self._registered, self._refusing, self._useless, self._rests):
            kept.pop(node, None)
        self._answers.pop(node, None)
        self._hopeless.pop(node, None)
        name = self._names.pop(node, None)
        if name is not None:
            del self.by_name[name]
            for other in [other for other, wanted in self._refused.items() if wanted == name]:
                del self._refused[other]
                self._seen.discard(other)
        return name

    def ask_again(self, node: int, why: str | ProtocolError | None = None) -> None:
        """Have a later look name a node again that gave no usable answer, unless it was refused.

        The first time that is the next look, then the second after it, the fourth, and so on: for its silo, each
        question may be the start of a trainer.

        Args:
            node: its number.
            why: what its answer was.

        Raises:
            RunError: all silos that are here are at a later version than this run, which was set back, or run another
                ClientApp.
        """
        match why:
            case LaterVersion():
                self._give_up(node, why, "that it is at a later version", _SET_BACK)
            case AnotherApp() if why.certain or self._useless.get(node, 0) + 1 >= _MOST_ERRORS:
                self._give_up(node, why, "with an error of its ClientApp", _NOT_OURS)
        if node not in self._refused:
            self._rests[node] = int(RESTS.pause_s(self._useless.get(node, 0)))
            self._useless[node] = self._useless.get(node, 0) + 1

    def refuses(self, node: int, refused: Refused) -> None:
        """Take a silo's refusal of the run, and see whether there is any hope left.

        Hope ends where all that are expected refuse for one reason that does not pass, or so many that the run cannot
        begin without them. It does not end for a run that has begun: what silos say long after they could take part is
        more likely to pass.

        Raises:
            RunError: there is none; names the refusals.
        """
        self._answers[node] = refused.code.name
        final = refused.code in AT_ONCE or self._useless.get(node, 0) + 1 >= _MOST_REFUSALS
        if not final or refused.code in PASSING:
            self._refusing.pop(node, None)
            return
        self._refusing[node] = refused
        here = self._activated.keys() - self._refused.keys()
        expected = inf if self._admission.expected is None else self._admission.expected
        if len(here) < expected:
            return
        if not self.examples and here <= self._refusing.keys() and len({self._refusing[one].code for one in here}) == 1:
            raise RunError(explained_together({self.sender(one): self._refusing[one] for one in sorted(here)}))
        out = {node: why for node, why in self._refusing.items() if node in here and why.code in UNTIL_CHANGED}
        left = len(here) - len(out)
        if max(len(self.examples), left) < self._admission.needed:
            told = {self.sender(node): why for node, why in sorted(out.items())}
            raise RunError(explained_too_few(told, self._admission.needed, left))

    def refusals(self) -> list[str]:
        """Notes on silos that are here and took no part because they refused the run."""
        silos: dict[Refused, list[str]] = {}
        for node, why in sorted(self._refusing.items()):
            if node not in self._names:
                silos.setdefault(why, []).append(self.sender(node))
        groups = {listed(names) if len(names) == 1 else f"each of {listed(names)}": why for why, names in silos.items()}
        return [f"took no part: {explained(who, why)}" for who, why in list(groups.items())[:_MOST_NAMED]]

    def _give_up(self, node: int, error: LaterVersion | AnotherApp, answer: str, verdict: str) -> None:
        """End the run if all silos that are here answer so; ``verdict`` has a place for what they say."""
        known, self._answers[node] = bool(self._hopeless), answer
        self._hopeless[node] = error
        here = sorted(self._activated.keys() - self._refused.keys())
        alike = {one: each.detail for one, each in self._hopeless.items() if type(each) is type(error)}
        if self.by_name or not alike.keys() >= set(here):
            return
        said: dict[str, list[str]] = {}
        for one in here[:_MOST_NAMED]:
            said.setdefault(alike[one], []).append(self.sender(one))
        told = verdict.format("; ".join(f"{', '.join(names)}: {detail}" for detail, names in said.items()))
        # One that lies ends no run: as many as the run needs have to be here, and all of them to say so.
        if len(here) >= self._admission.needed:
            raise RunError(told)
        if not known:
            logger.warning("%s", told)

    def check(self, node: int, hello: Hello, form: CommonForm | None = None) -> str:
        """Name of the silo that a node says it is, if it may be.

        Raises:
            ProtocolError: the name is not allowed, not the one that the node is registered under, not on the list,
                or another node's; what else it says of itself cannot be; or its model or table has another ``form``.
            RunError: so that the run cannot begin.
        """
        name = hello.silo
        # "/" separates a silo's name from its order's number in update ids.
        if not name or "/" in name or len(name) > MAX_NAME:
            raise ProtocolError(self.sender(node), "hello", f"name {name[:MAX_NAME]!r}")
        check_facts(self.sender(node), hello.facts)
        registered = self._registered.get(node)
        if registered is not None and name != registered:
            raise self._refusal(node, "name", f"it says that it is {name!r}, and its key is registered as another's")
        if name in (self._admission.regions or {}) and node not in self.regions:
            raise self._refusal(node, "relay", f"{name!r} is a relay's name: it speaks for its silos, and is none")
        self._check_name(node, name)
        most, said = self._admission.most_examples, hello.facts.examples
        if most is not None and said > most:
            detail = f"it says that it holds {said} training samples, and the strategy's most_examples is {most}"
            raise self._refusal(node, "examples", detail)
        try:
            if form is not None:
                form.check(name, hello.form)
        except ProtocolError as error:
            self.refuses(node, Refused(Refusal.CONFIG, str(error)))
            raise
        return name

    def enrol(self, node: int, name: str, examples: int) -> None:
        """Take a node that was checked as the silo ``name``, which has that many samples."""
        self._names[node] = name
        self._useless.pop(node, None)
        self._answers.pop(node, None)
        self.by_name[name] = node
        self.examples[name] = examples
        others = sum(self.examples[other] for other in self.by_name if other != name)
        if others and examples > MOST_OF_ALL * (examples + others):
            logger.warning(
                "%s says that it has %d of the %d samples of all: weighed by examples, it decides alone. "
                "Refuse such by most_examples, or write weight: silo",
                name, examples, examples + others,
            )  # fmt: skip

    def _tell_who_is_missing(self) -> None:
        """Log whom the run waits for, whenever that has changed."""
        refusing = {self.sender(node): code for node, code in self._answers.items()}
        here = self.by_name.keys() | refusing.keys()
        missing = [name for name in self._admission.silos or () if name not in here]
        parts = [f"{name} answers {code}" for name, code in sorted(refusing.items())[:_MOST_NAMED]]
        if missing:
            parts.append(f"not connected: {', '.join(missing[:_MOST_NAMED])}")
        elif (self._admission.expected or 0) > len(here):
            parts.append(f"{len(here)} of {self._admission.expected} silos are connected")
        told = "; ".join(parts)
        if told != self._told:
            self._told = told
            logger.info("%s: %s", MISSING, told or "none")

    def _check_registration(self, node: int) -> None:
        """Refuse a node by what the SuperLink says of it."""
        name = self._registered.get(node)
        if name is not None:
            self._check_name(node, name)
        elif self._registered_only:
            remedy = "its operator has to register its key with --name"
            raise self._refusal(node, "registration", f"it is registered under no name; {remedy}")

    def _check_name(self, node: int, name: str) -> None:
        accepted = self._admission.silos
        region = (self._admission.regions or {}).get(self.regions.relay_of(node))
        if region is not None and name not in region:
            raise self._refusal(node, "region", f"{name[:MAX_NAME]!r} is not among the silos of its relay")
        if accepted is not None and name not in accepted:
            raise self._refusal(node, "list", f"{name[:MAX_NAME]!r} is not among the strategy's silos")
        if self.by_name.get(name, node) != node:
            raise self._refusal(node, "name", f"{name!r} is node {self.by_name[name]} already", waits_for=name)

    def _refusal(self, node: int, check: str, detail: str, waits_for: str = "") -> ProtocolError:
        self._refused[node] = waits_for
        who = self._registered.get(node)
        return ProtocolError(f"node {node}" if who is None else f"silo {who!r} (node {node})", check, detail)
