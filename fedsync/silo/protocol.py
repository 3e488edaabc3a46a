"""Protocol between server and silos, and the messages on a trainer's socket.

Every question of the server is a `Request`, and every answer is a `Reply`. Both are JSON by `fedsync.common.codec`;
arrays are bytes beside the JSON. Flower's client app passes both on undecoded. A new question needs a class here, a
sender (`fedsync.server.outbox`) and a handler (`fedsync.silo.session.service`).

| request | bytes with it | replies | bytes with them |
|---|---|---|---|
| `Describe` | | `Hello` | encrypted run: the *greeting*, sealed size of the silo's updates |
| `AskModel` | | `InitialModel` | the model, float32, if it is asked for |
| `Train` | the model, or the changes that the silo lacks | `InProgress`, `WorkReport`, `VersionMismatch` | the update |
| `Collect` | | as `Train` | as `Train` |
| `EvaluateModel` | as `Train` | `Evaluation`, `Attestation` where figures are sealed, `VersionMismatch` | |
| `Question` | the aggregator's question | `Answer` | the replica's answer |
| `AskSnapshot` | | `Snapshot` | the model, sealed for other silos |
| any | | `Refused` | |

A server learns of a failure only by `Refused`: one code of a closed list. See `fedsync.silo.owner.refusals`. On the
socket a request is inside a `Forward`, so that a server's message cannot end a trainer or probe it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from pathlib import Path
from typing import Any, Self

from fedsync.common import codec
from fedsync.common.errors import SERVER, ProtocolError
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.core.actions import Evaluate
from fedsync.core.events import Evaluated
from fedsync.core.orders import Evaluation, PooledFigures, SiloFacts, Split, Subject, WorkOrder, WorkReport
from fedsync.core.report_checks import MAX_COUNT, MAX_SUMS
from fedsync.model.layout import Layout
from fedsync.model.tensor_parts import ModelForm
from fedsync.model.transfer import Payload, VersionMismatch
from fedsync.silo.run_text import RunText

SOCKET, IDENTITY, LOG = "trainer.sock", "identity.json", "trainer.log"
ANSWER, COPY = "answer.bin", "copy.bin"  # last answer, and model

PASSING = "passing-"  # prefix of files in a trainer's folder with a travelling answer; the requester owns them

STATE = "FEDSYNC_STATE"  # environment variable: parent folder of the resident trainers' folders

STATE_FOLDER = "state"

_DIGEST = re.compile(r"([0-9a-f]{64})?")

MAX_TEXT = 65536  # characters of a request or reply without sums; a report with 64 windows takes a tenth of it

MAX_EVALUATION_TEXT = MAX_TEXT + 26 * MAX_SUMS  # characters: a float has at most 24 in JSON

MAX_LAYOUT_TEXT = 2**20  # characters: names and shapes of 10,000 tensors


# Requests of the server.


@dataclass(frozen=True, slots=True)
class Describe:
    """Request for the silo's name, its facts and the form of its model."""


@dataclass(frozen=True, slots=True)
class AskModel:
    """Request for the model before any training; without ``values``, for its layout only."""

    values: bool = True


@dataclass(frozen=True, slots=True)
class Train:
    """Request to carry out an order; with ``report_s``, a reply is due after that many seconds."""

    order: WorkOrder
    report_s: float | None = None


@dataclass(frozen=True, slots=True)
class Collect:
    """Request for an order's result, due after ``wait_s``; ``halt`` ends the order after its current step."""

    update_id: str
    wait_s: float | None = None
    halt: bool = False


@dataclass(frozen=True, slots=True)
class EvaluateModel:
    """Request to evaluate a model version on a split; ``owner`` names the silo whose own model it is, or is empty."""

    version: int
    split: Split = Split.VALIDATION
    subject: Subject = Subject.LAST
    owner: str = ""

    @classmethod
    def of(cls, action: Evaluate) -> Self:
        return cls(action.version, action.split, action.subject, action.owner)

    def answered(
        self, at_s: float, silo: str, found: Evaluation | None, pooled: tuple[PooledFigures, ...] = ()
    ) -> Evaluated:
        return Evaluated(at_s, silo, self.version, found, pooled, self.split, self.subject, self.owner)


@dataclass(frozen=True, slots=True)
class Question:
    """Question of the aggregator; see `fedsync.model.transfer.Aggregator.questions`."""


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Request for the model kept at the silo, sealed for other silos."""


Request = Describe | AskModel | Train | Collect | EvaluateModel | Question | AskSnapshot


# Replies of a silo.


@dataclass(frozen=True, slots=True)
class Hello:
    """Introduction of a silo: its name, facts, model form and held version; -1 where it holds none."""

    silo: str
    facts: SiloFacts
    holds: int = 0
    form: ModelForm | None = None


@dataclass(frozen=True, slots=True)
class InitialModel:
    """Layout of the travelling part of the initial model; ``kept`` names the tensors that stay at the silo. ``ties``
    has the further names of tied tensors, each with the name in ``layout``.
    """

    layout: Layout
    kept: tuple[str, ...] = ()
    frozen: str = ""
    ties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InProgress:
    """Progress of a running order: finished local steps and samples."""

    steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class Attestation:
    """Pooled figures of the commits that came with the model; discloses nothing of the model or of this silo."""

    pooled: tuple[PooledFigures, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to the aggregator's question."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Version of the silo's model, which travels beside it."""

    version: int


class Refusal(StrEnum):
    """Closed list of reasons for a missing answer. `fedsync.silo.owner.refusals` explains each code."""

    LOADING = auto()
    BUSY = auto()
    CONFIG = auto()
    OWNER = auto()
    PROTOCOL = auto()
    INTEGRITY = auto()
    DIVERGED = auto()
    CODE = auto()
    HANGS = auto()
    MEMORY = auto()
    DISK = auto()
    LOCKED = auto()
    LIMIT = auto()
    BUDGET = auto()
    AWAY = auto()
    APPROVAL = auto()
    INTERNAL = auto()


@dataclass(frozen=True, slots=True)
class Refused:
    """Refusal of a request; with AWAY, ``back_s`` is the time until the silo takes orders again [s]. ``text`` is empty
    unless the silo is emulated or its owner discloses reasons.
    """

    code: Refusal
    text: str = ""
    back_s: float | None = None


Reply = (
    Hello
    | InitialModel
    | InProgress
    | WorkReport
    | VersionMismatch
    | Evaluation
    | Attestation
    | Answer
    | Snapshot
    | Refused
)

Ask = Callable[[str, Payload | None], tuple[str, Payload | None]]


def exchange(ask: Ask, request: Request, payload: Payload | None = None) -> tuple[Reply, Payload | None]:
    text, answer = ask(write_request(request), payload)
    reply: Reply = codec.loads(Reply, text, own=True)
    return reply, answer


def write_request(request: Request) -> str:
    return codec.dumps(request, Request)


def write_reply(reply: Reply) -> str:
    return codec.dumps(reply, Reply)


def read_request(text: str) -> Request:
    request: Request = _read(Request, text, SERVER, MAX_TEXT)
    return request


def most_text(request: Request) -> int:
    match request:
        case AskModel():
            return MAX_LAYOUT_TEXT
        case Train() | Collect() | EvaluateModel():
            return MAX_EVALUATION_TEXT
        case _:
            return MAX_TEXT


def read_reply(text: str, sender: str, most: int = MAX_TEXT) -> Reply:
    """Parse a silo's reply; the caller checks its figures. `ProtocolError` if the text is no reply, longer than
    ``most`` characters, or has an invalid count, version or digest.
    """
    reply: Reply = _read(Reply, text, sender, most)
    match reply:
        case InProgress(steps, samples) if not (0 <= steps <= MAX_COUNT and 0 <= samples <= MAX_COUNT):
            raise ProtocolError(sender, "progress", f"{steps} steps, {samples} samples")
        case Hello(form=ModelForm(_, frozen)) | InitialModel(frozen=frozen) if not _DIGEST.fullmatch(frozen):
            raise ProtocolError(sender, "message", f"{frozen[:80]!r} is no digest of frozen tensors")
        case VersionMismatch(version) | Snapshot(version) if not -1 <= version <= MAX_COUNT:
            raise ProtocolError(sender, "message", f"version {version} of the model")
    return reply


def _read(union: Any, text: str, sender: str, most: int) -> Any:
    if len(text) > most:
        raise ProtocolError(sender, "message", f"it has {len(text)} characters, at most {most}")
    try:
        return codec.loads(union, text)
    except codec.DecodeError as error:
        raise ProtocolError(sender, "message", str(error)) from error


@dataclass(frozen=True, slots=True)
class Completed:
    """Result of an order in the silo's session: the report is the reply, and the update travels beside it."""

    report: WorkReport
    update: Payload


# Identity of a trainer.


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a silo in a run.

    Args:
        spec: the run's specification as JSON.
        index: number of the silo's share of the data.
        name: the silo's name; an emulated machine's own name takes precedence.
        declared_speed: speed that the owner declares [samples/s].
        device: device that the owner wants; None for the device in the run's specification.
        resources: whether the owner allows the report of free machine resources; the specification must ask for it.
        node_config: further settings of the owner for the silo's own training code, as JSON.
        run_config: settings of the run for the same code, as JSON.
    """

    spec: str
    index: int
    name: str
    declared_speed: float | None = None
    device: str | None = None
    resources: bool = True
    node_config: str = "{}"
    run_config: str = "{}"

    @property
    def text(self) -> RunText:
        return RunText(self.spec, self.run_config)

    @classmethod
    def load(cls, folder: Path) -> Identity:
        """Read the identity from a trainer's folder; `ValueError` if torn or of another version of FedSync."""
        identity: Identity = codec.loads(cls, (folder / IDENTITY).read_bytes(), own=True)
        return identity

    def dump(self) -> str:
        return codec.dumps(self)

    def save(self, folder: Path) -> None:
        """Write the identity into a trainer's folder, unless it is there already: the disk may be full."""
        path, data = folder / IDENTITY, self.dump().encode()
        try:
            there = path.read_bytes()
        except FileNotFoundError:
            there = b""
        if there != data:
            write_atomically(path, data, OWNER_FILE)


# Messages on a trainer's socket.


@dataclass(frozen=True, slots=True)
class Forward:
    """Request in ``text``; ``load_s`` limits the wait for a trainer that loads [s]."""

    text: str
    load_s: float


@dataclass(frozen=True, slots=True)
class Ping:
    """Request for the trainer's state."""


@dataclass(frozen=True, slots=True)
class MakeRoom:
    """Request to end if idle: another run's trainer needs the memory."""


@dataclass(frozen=True, slots=True)
class Quit:
    """Request to end at once."""


SocketRequest = Forward | Ping | MakeRoom | Quit


@dataclass(frozen=True, slots=True)
class Forwarded:
    """Reply to a forwarded request, or its `Refused`, as text."""

    text: str


@dataclass(frozen=True, slots=True)
class TrainerState:
    """State of the trainer: ``loading``, ``idle``, ``working`` or ``failed``, and its start in ISO 8601."""

    state: str
    since: str


SocketReply = Forwarded | TrainerState
