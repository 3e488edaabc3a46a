"""Division of a model's tensors into shared, private and frozen parts.

| part | a tensor belongs to it if | is sent | at the silo |
|---|---|---|---|
| shared | it is trained or a buffer, or a `share` list names it | always | equals the last received model |
| private | a `private` list names it | never | trained, and kept between orders |
| frozen | it has no gradient, or a `share` list omits it | never; its digest once | as built or loaded |

Patterns come from the run's strategy file and from the silo's own code. A tensor is shared if both sources share it,
and private if either names it private. The silo's code decides what may leave the silo: a run may not share a tensor
that the code keeps private or that its `share` list omits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.model.layout import Layout, matches
from fedsync.model.table_columns import TableForm, difference

RUN = "model"

_MOST_NAMED = 400

_Part = Literal["shared", "private", "frozen"]


@dataclass(frozen=True, slots=True)
class PartPatterns:
    """Patterns over tensor names; ``*`` and ``?`` are wildcards as in `fnmatch`.

    ``share`` None means all trained tensors and buffers that are not private.
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
    """Properties of a tensor, besides its name, that decide its part. Names of one tensor (tied weights) have the same
    ``storage``. A ``trained`` tensor has a gradient or is a buffer.
    """

    storage: int
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Parts:
    """Names of a model's tensors by part, in the order of its state dict; each name is in one part."""

    shared: tuple[str, ...]
    private: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[str, ...]:
        return (*self.private, *self.frozen)


class PartsError(ConfigError):
    """Error: the patterns do not fit the model."""


def divide(
    tensors: Mapping[str, TensorFacts],
    run: PartPatterns = UNSAID,
    own: PartPatterns = UNSAID,
    place: str = "task, parts()",
) -> Parts:
    """Divide a model's tensors into parts by the run's and the silo's ``own`` patterns, which lie at ``place``. Raise
    `PartsError` if a pattern matches no tensor, a tensor or tied tensors get two parts, or no tensor is shared.
    """
    sources = {RUN: run, place: own}
    for where, patterns in sources.items():
        for pattern in patterns.all:
            if not any(matches(name, (pattern,)) for name in tensors):
                raise PartsError(where, f"no tensor's name matches {pattern!r}", _names(tensors))
    found = {name: _part(name, facts, sources) for name, facts in tensors.items()}
    _check_ties(tensors, found, place if own.all else RUN)
    parts = Parts(*(tuple(name for name in found if found[name] == part) for part in ("shared", "private", "frozen")))
    if not parts.shared:
        problem = f"no tensor is left to send: {len(parts.private)} tensors are private, {len(parts.frozen)} frozen"
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
        other = [pattern for where, share in lists.items() if where != RUN for pattern in share]
        problem = f"{name} is in share, and the silo's own code shares {', '.join(other)} only"
        raise PartsError(RUN, problem, "Leave it out: the silo's code decides what leaves the silo")
    shares = len(named) == len(lists) if lists else facts.trained
    return "shared" if shares else "frozen"


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
    """Description of a silo's model, sent when the silo joins.

    Args:
        layout: SHA-256 of the names and shapes of the shared tensors, hexadecimal.
        frozen: digest of the frozen tensors and of the table's columns, keyed if the silos share a key; empty if the
            silo has no frozen tensor and no table.
        columns: columns of the silo's table; empty if they may not be disclosed, None if the silo has no table.
    """

    layout: str
    frozen: str = ""
    columns: TableForm | None = None

    @classmethod
    def of(cls, layout: Layout, frozen: str = "", columns: TableForm | None = None) -> ModelForm:
        told = json.dumps([layout.names, layout.shapes, layout.buffers])
        return cls(hashlib.sha256(told.encode()).hexdigest(), frozen, columns)


class CommonForm:
    """Form that all silos' models must have: the form of the first model.

    Shared and frozen tensors belong together, so the digest of the first model's frozen tensors is the reference. A
    majority of silos is not: it could change between two starts of the server, and the model would continue with other
    frozen tensors. If the server does not know the digest (``frozen`` is None, as under encryption), the first silo's
    digest is the reference.
    """

    def __init__(self, layout: Layout, frozen: str | None) -> None:
        self._layout = ModelForm.of(layout).layout
        self.frozen = frozen
        self._first: tuple[str, TableForm] = ("the first silo", ())

    def check(self, silo: str, form: ModelForm | None) -> None:
        """Check that a silo's model has the common form; raises `ProtocolError` with a remedy if it differs."""
        if form is not None and form.columns is not None and self.frozen not in (None, form.frozen):
            raise ProtocolError(silo, "columns", self._other_columns(form.columns))
        if form is None or form.layout != self._layout:
            problem = "the tensors of its model that would be sent have other names or shapes than the run's"
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
