"""Identity and admission of nodes: Flower's connections to the silos.

If the SuperLink authenticates nodes, a node's key is registered under a name (``flwr supernode register KEY.pub
CONNECTION --name berlin``). The grid reports this name, and the node must present itself as the silo of this name.
Without registration, the server relies on the name that the node reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from fedsync.common import foreign
from fedsync.common.backoff import Backoff
from fedsync.common.errors import LaterVersion, ProtocolError, RunError
from fedsync.core.report_checks import MAX_NAME, check_facts
from fedsync.model.tensor_parts import CommonForm
from fedsync.observe.run_state import MISSING
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
from fedsync.transport.port import SiloAnswer, Transport

if TYPE_CHECKING:
    from fedsync.extras.relays.region_clients import Regions
    from fedsync.model.layout import Layout

logger = foreign.logger(__name__)

MOST_OF_ALL = 0.99
"""Share of all samples above which a silo's reported number causes a warning."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Rules for the admission of silos.

    Args:
        silos: accepted names; None accepts every name.
        registered: whether only nodes that are registered by name are accepted. Otherwise this rule begins with the
            first node with a registered name.
        expected: number of silos that the run counts on. The run fails if this many silos refuse it and no other silo
            is present; None waits for other silos.
        regions: silos of each relay, by relay name. None accepts relays, unless nodes are registered by name: then a
            relay must be listed here, or any silo could act for others.
        most_examples: maximum number of training samples that a silo may report; None for no further limit.
        needed: minimum number of silos for the run to begin. The run fails if all expected silos are present, and fewer
            than these can take part without a change of their configuration.
    """

    silos: Sequence[str] | None = None
    registered: bool = False
    expected: int | None = None
    regions: Mapping[str, Sequence[str]] | None = None
    most_examples: int | None = None
    needed: int = 0


_NOT_LOADED, _RAISED, _MOD_REFUSED = 1, 2, 6
APP_ERRORS = (_NOT_LOADED, _RAISED, _MOD_REFUSED)
"""Flower's error codes for an app that does not load or raises. FedSync's app never raises to Flower."""

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
    """Error: a node's first answer is a Flower error; `clientapp` is the user's own app, or FedSync's does not load."""

    def __init__(self, silo: str, problem: str, code: int) -> None:
        asked_in_vain = _NO_QUERIES in problem  # under Ray, at the end of a stack trace
        super().__init__(silo, "answer", f"error {code}: {_NO_QUERIES}" if asked_in_vain else problem)
        self.certain = asked_in_vain or code != _RAISED


RESTS = Backoff(1, 64)
"""Number of looks between two requests to a node that gives no usable answer."""

_MOST_REFUSALS, _MOST_ERRORS = 2, 4
"""Number of consecutive refusals after which a temporary refusal is final, and of consecutive ClientApp errors."""

_MOST_NAMED = 10
_PAUSE, _MOST_PAUSE_S = 20.0, 10.0


def make_regions(layout: Layout | None = None, *, adds: bool = True, hold_s: float = 0.0) -> Regions:
    from fedsync.extras.relays.region_clients import Regions

    return Regions(layout, adds=adds, hold_s=hold_s)


class Nodes:
    """Connected nodes and their silos.

    A refused node is asked again about once a minute, because its operator may have mended it, and as soon as the node
    is gone that has its name. A node's problem is logged once.

    ``look_s`` is the shortest time between two checks for new and lost nodes [s]; it grows if a check takes long.
    ``regions`` makes the run's `Regions`, once the first node has identified itself as a relay.
    """

    def __init__(
        self,
        members: Transport,
        admission: Admission | None = None,
        look_s: float = 0.0,
        regions: Callable[[], Regions] = make_regions,
    ) -> None:
        self._members, self._admission = members, admission or Admission()
        self.regions: Regions | None = None
        self._make_regions = regions
        self._look_s, self._next_s, self._registered_only = look_s, -inf, self._admission.registered
        self._registered: dict[int, str] = {}
        self._seen: set[int] = set()
        self._activated: dict[int, str] = {}
        self._useless: dict[int, int] = {}
        self._rests: dict[int, int] = {}
        self._refused: dict[int, str] = {}
        self._refusing: dict[int, Refused] = {}
        self._names: dict[int, str] = {}
        self._answers: dict[int, str] = {}
        self._warned: dict[int, str] = {}
        self._hopeless: dict[int, LaterVersion | AnotherApp] = {}
        self._told = ""
        self.by_name: dict[str, int] = {}
        """Node of each connected silo."""
        self.examples: dict[str, int] = {}
        """Number of samples that each silo reported, including lost silos."""

    def sender(self, node: int) -> str:
        return self._names.get(node) or self._registered.get(node) or f"node {node}"

    def look(self, *, at_once: bool = False) -> tuple[list[int], list[int]]:
        """Return the nodes lost since the last look, and the new nodes, both ascending.

        A node that was lost and is back is reported as lost first, and as new by the next look: its messages are lost.
        Both lists are empty if the last look was less than ``look_s`` ago, unless ``at_once``.
        """
        begun_s = time.monotonic()
        if begun_s < self._next_s and not at_once:
            return [], []
        peers = self._members.peers()
        if self.regions is not None:
            peers = self.regions.around(peers)
        if self._look_s:
            # Flower lists all nodes each time, which takes a busy server long for a thousand nodes.
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
            self._refused.pop(node, None)
            self._seen.discard(node)
        fresh = []
        for node in sorted(here.keys() - self._seen):
            self._seen.add(node)
            try:
                if (name := self._registered.get(node)) is not None:
                    self._check_name(node, name)
                elif self._registered_only:
                    raise self._refusal(node, "registration", "it is registered under no name; register it with --name")
                fresh.append(node)
            except ProtocolError as error:
                self.ask_again(node, error)
        self._tell_who_is_missing()
        return gone, fresh

    def is_relayed(self, node: int) -> bool:
        return self.regions is not None and node in self.regions

    def relay(self, node: int, answer: SiloAnswer) -> None:
        """Register a node that answers as a relay; `ProtocolError` if it may not be one, or the answer is invalid."""
        name, regions = self._registered.get(node, ""), self._admission.regions
        if name not in regions if regions is not None else self._registered_only:
            raise self._refusal(node, "relay", "it says it is a relay, and `relays` in server.yaml has no such name")
        self.regions = self.regions or self._make_regions()
        self.regions.enrol(node, name or f"relay {node}", self._activated[node], answer)

    def forget(self, node: int) -> str | None:
        self._seen.discard(node)
        about = (self._refused, self._registered, self._refusing, self._useless, self._rests, self._answers)
        for kept in (*about, self._hopeless, self._warned):
            kept.pop(node, None)
        name = self._names.pop(node, None)
        if name is not None:
            del self.by_name[name]
            for other in [other for other, wanted in self._refused.items() if wanted == name]:
                del self._refused[other]
                self._rests.pop(other, None)
                self._seen.discard(other)
        return name

    def ask_again(self, node: int, why: str | ProtocolError | None = None) -> None:
        """Ask a node without a usable answer (error ``why``, logged if it is new) again at a later look.

        The pause doubles each time, because each request may start a trainer at the silo. Raise `RunError` if all
        connected silos are at a later version than this run, which was set back, or run another ClientApp.
        """
        if why is not None and self._warned.get(node) != str(why):
            self._warned[node] = str(why)
            logger.warning("%s", why)
        match why:
            case LaterVersion():
                self._give_up(node, why, "that it is at a later version", _SET_BACK)
            case AnotherApp() if why.certain or self._useless.get(node, 0) + 1 >= _MOST_ERRORS:
                self._give_up(node, why, "with an error of its ClientApp", _NOT_OURS)
        if node not in self._refused:
            self._rests[node] = int(RESTS.pause_s(self._useless.get(node, 0)))
            self._useless[node] = self._useless.get(node, 0) + 1

    def refuses(self, node: int, refused: Refused) -> None:
        """Record a silo's refusal of the run; raise `RunError` if the run cannot succeed any more.

        The run fails if all expected silos refuse it for one permanent reason, or so many that the run cannot begin. A
        run that has begun fails only if all privacy budgets are spent: other refusals are likely to pass then.
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
        ends = not self.examples or refused.code is Refusal.BUDGET
        if ends and here <= self._refusing.keys() and len({self._refusing[one].code for one in here}) == 1:
            raise RunError(explained_together({self.sender(one): self._refusing[one] for one in sorted(here)}))
        out = {node: why for node, why in self._refusing.items() if node in here and why.code in UNTIL_CHANGED}
        left = len(here) - len(out)
        if max(len(self.examples), left) < self._admission.needed:
            told = {self.sender(node): why for node, why in sorted(out.items())}
            raise RunError(explained_too_few(told, self._admission.needed, left))

    def refusals(self) -> list[str]:
        silos: dict[Refused, list[str]] = {}
        for node, why in sorted(self._refusing.items()):
            if node not in self._names:
                silos.setdefault(why, []).append(self.sender(node))
        groups = {listed(names) if len(names) == 1 else f"each of {listed(names)}": why for why, names in silos.items()}
        return [f"took no part: {explained(who, why)}" for who, why in list(groups.items())[:_MOST_NAMED]]

    def _give_up(self, node: int, error: LaterVersion | AnotherApp, answer: str, verdict: str) -> None:
        """End the run if all connected silos give this answer; ``verdict`` has a placeholder for their answers."""
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
        # A single lying silo must not end the run: as many silos as the run needs must all give this answer.
        if len(here) >= self._admission.needed:
            raise RunError(told)
        if not known:
            logger.warning("%s", told)

    def check(self, node: int, hello: Hello, form: CommonForm | None = None) -> str:
        """Check a node's identity and its data; return the silo's name.

        Raises:
            ProtocolError: ``hello`` is invalid; the name is not the node's registered name, not accepted, or in use; or
                the model or table differs from ``form``.
            RunError: because of this refusal, the run cannot begin.
        """
        name = hello.silo
        # "/" separates the silo's name from the order's number in update ids.
        if not name or "/" in name or len(name) > MAX_NAME:
            raise ProtocolError(self.sender(node), "hello", f"name {name[:MAX_NAME]!r}")
        check_facts(self.sender(node), hello.facts)
        registered = self._registered.get(node)
        if registered is not None and name != registered:
            raise self._refusal(node, "name", f"it says that it is {name!r}, and its key is registered as another's")
        if name in (self._admission.regions or {}) and not self.is_relayed(node):
            raise self._refusal(node, "relay", f"{name!r} is a relay's name, and a relay is no silo")
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
        self._names[node] = name
        self._useless.pop(node, None)
        self._answers.pop(node, None)
        self.by_name[name] = node
        self.examples[name] = examples
        others = sum(self.examples[other] for other in self.by_name if other != name)
        if others and examples > MOST_OF_ALL * (examples + others):
            told = "%s says that it has %d of the %d samples of all: weighed by examples, it decides alone. %s"
            remedy = "Limit them by most_examples, or write weight: silo"
            logger.warning(told, name, examples, examples + others, remedy)

    def _tell_who_is_missing(self) -> None:
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

    def _check_name(self, node: int, name: str) -> None:
        accepted, regions = self._admission.silos, self._admission.regions or {}
        region = regions.get(self.regions.relay_of(node)) if self.regions is not None else None
        if region is not None and name not in region:
            raise self._refusal(node, "region", f"{name[:MAX_NAME]!r} is not among the silos of its relay")
        if accepted is not None and name not in accepted and name not in regions:  # a strategy names no relays
            raise self._refusal(node, "list", f"{name[:MAX_NAME]!r} is not among the strategy's silos")
        if self.by_name.get(name, node) != node:
            raise self._refusal(node, "name", f"{name!r} is node {self.by_name[name]} already", waits_for=name)

    def _refusal(self, node: int, check: str, detail: str, waits_for: str = "") -> ProtocolError:
        self._refused[node], self._rests[node] = waits_for, int(RESTS.longest_s)
        who = self._registered.get(node)
        return ProtocolError(f"node {node}" if who is None else f"silo {who!r} (node {node})", check, detail)
