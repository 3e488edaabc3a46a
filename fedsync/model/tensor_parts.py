"""Which tensors of a model travel, which stay at their silo, and which nobody changes.

| a tensor is | if | travels | at the silo |
|---|---|---|---|
| shared | it is trained, or a buffer; or a `share` list names it | always | as the last model says |
| private | a `private` list names it | never | trained, and kept from one order to the next |
| frozen | it has no gradient, or a `share` list leaves it out | never; its digest once | as it was built or loaded |

Two parties may say it: the run, in its strategy file, and the silo's own code. What both share is shared, and what one
of them keeps private is private. The code has the last word on what leaves the silo: a run that shares what the code
keeps private, or what the code's own `share` leaves out, is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.model.layout import Layout, matches
from fedsync.model.table_columns import TableForm, difference

RUN = "model"
"""The section of a strategy file that says it."""

_MOST_NAMED = 400

_Part = Literal["shared", "private", "frozen"]


@dataclass(frozen=True, slots=True)
class PartPatterns:
    """Patterns over names of tensors, in which ``*`` and ``?`` stand for other letters, as in `fnmatch`.

    Args:
        share: what travels; None for all that is trained, and all buffers, but for what is private.
        private: what stays at the silo.
    """

    share: Sequence[str] | None = None
    private: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("share", "private"):
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, (given,))

    @property
    def all(self) -> tuple[str, ...]:
        return (*(self.share or ()), *self.private)


UNSAID = PartPatterns()


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What decides of a tensor, its name apart.

    Args:
        storage: the same for names of one tensor (tied weights).
        trained: it has a gradient, or is a buffer.
    """

    storage: int
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Parts:
    """Names of a model's tensors, in the order of its state dict; each is in one part."""

    shared: tuple[str, ...]
    private: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[str, ...]:
        """What does not travel."""
        return (*self.private, *self.frozen)


class PartsError(ConfigError):
    """A model has no such parts as its patterns say."""


def divide(
    tensors: Mapping[str, TensorFacts],
    run: PartPatterns = UNSAID,
    own: PartPatterns = UNSAID,
    place: str = "task, parts()",
) -> Parts:
    """The parts of a model.

    Args:
        tensors: of the model, by name, in order.
        run: what the strategy file says.
        own: what the silo's own code says.
        place: where that is, for errors.

    Raises:
        PartsError: a pattern fits nothing, a tensor is in two parts by what is said, or by being tied to one in
            another part, or nothing is left that travels.
    """
    sources = {RUN: run, place: own}
    for where, patterns in sources.items():
        for pattern in patterns.all:
            if not any(matches(name, (pattern,)) for name in tensors):
                raise PartsError(where, f"no tensor's name fits {pattern!r}", _names(tensors))
    found = {name: _part(name, facts, sources) for name, facts in tensors.items()}
    _check_ties(tensors, found, place if own.all else RUN)
    parts = Parts(*(tuple(name for name in found if found[name] == part) for part in ("shared", "private", "frozen")))
    if not parts.shared:
        problem = f"nothing is left that travels: {len(parts.private)} tensors are private, {len(parts.frozen)} frozen"
        raise PartsError(place if own.all and not run.all else RUN, problem, f"Share some. {_names(tensors)}")
    return parts


def _part(name: str, facts: TensorFacts, sources: Mapping[str, PartPatterns]) -> _Part:
    private = [where for where, said in sources.items() if matches(name, said.private)]
    lists = {where: said.share for where, said in sources.items() if said.share is not None}
    named = [where for where, share in lists.items() if matches(name, share)]
    if private and named:
        problem = f"{name} is shared by {named[0]}, and private by {private[0]}"
        raise PartsError(private[0], problem, "Name it in one of them; all that is trained travels without a list")
    if private:
        return "private"
    if RUN in named and len(named) < len(lists):
        problem = f"{name} is in share, and the silo's own code shares {', '.join(_other(lists))} only"
        raise PartsError(RUN, problem, "Leave it out: the silo's code decides what leaves the silo")
    shares = len(named) == len(lists) if lists else facts.trained
    return "shared" if shares else "frozen"


def _other(lists: Mapping[str, Sequence[str]]) -> Iterator[str]:
    return (pattern for where, share in lists.items() if where != RUN for pattern in share)


def _check_ties(tensors: Mapping[str, TensorFacts], found: Mapping[str, _Part], where: str) -> None:
    first: dict[int, str] = {}
    for name, facts in tensors.items():
        other = first.setdefault(facts.storage, name)
        if found[other] != found[name]:
            problem = f"{name} is tied to {other}: one is {found[name]}, the other {found[other]}"
            raise PartsError(where, problem, "Name both, or neither")


def _names(tensors: Mapping[str, TensorFacts]) -> str:
    return f"Names are {', '.join(tensors)}"[:_MOST_NAMED]


@dataclass(frozen=True, slots=True)
class ModelForm:
    """What a silo says of its model as it joins.

    Args:
        layout: SHA-256, hexadecimal, of the names and shapes of what travels.
        frozen: that of its frozen tensors, and of the columns of its table, under a key of the silos' where they have
            one; empty where there are neither.
        columns: of its table, where they may be told; empty where not, and None where it has no table.
    """

    layout: str
    frozen: str = ""
    columns: TableForm | None = None

    @classmethod
    def of(cls, layout: Layout, frozen: str = "", columns: TableForm | None = None) -> ModelForm:
        return cls(hashlib.sha256(json.dumps([layout.names, layout.shapes]).encode()).hexdigest(), frozen, columns)


class CommonForm:
    """The form that all silos' models must have: that of the first model.

    What travels was made to go with the frozen tensors of whoever made it, so these count, and no majority of silos:
    who is in it could change from one start of the server to the next, and the model would then go on with others.

    Args:
        layout: of the first model.
        frozen: digest of what stays at whoever made it, as in `ModelForm`; None where the server does not know, as
            under encryption: then the first silo says it.
    """

    def __init__(self, layout: Layout, frozen: str | None) -> None:
        self._layout = ModelForm.of(layout).layout
        self.frozen = frozen
        self._first: tuple[str, TableForm] = ("the first silo", ())

    def check(self, silo: str, form: ModelForm | None) -> None:
        """See that a silo has the common form.

        Raises:
            ProtocolError: it has not; says what differs, and what to do.
        """
        if form is not None and form.columns is not None and self.frozen not in (None, form.frozen):
            raise ProtocolError(silo, "columns", self._other_columns(form.columns))
        if form is None or form.layout != self._layout:
            problem = "what would travel of its model has other names or shapes than the run's"
            raise ProtocolError(silo, "model", f"{problem}; give every silo the same code and libraries")
        if self.frozen is None:
            self.frozen = form.frozen
        if form.frozen != self.frozen:
            problem = f"its frozen tensors {_short(form.frozen)} are not those {_short(self.frozen)} of the first model"
            remedy = "give every silo the same file of weights, in one precision, or let them travel: model.share"
            raise ProtocolError(silo, "model", f"{problem}; {remedy}")
        if form.columns and not self._first[1]:
            self._first = (silo, form.columns)

    def _other_columns(self, columns: TableForm) -> str:
        name, first = self._first
        told = difference(columns, first, name) if columns and first else (
            f"the columns of its table have other names, kinds or categories than at {name}; the log of each silo says "
            "what its columns are"
        )  # fmt: skip
        return f"{told}. Give all silos the same columns, or say in task.columns what they hold"


def _short(digest: str) -> str:
    return f"({digest[:8]!r}...)" if digest else "(none)"
