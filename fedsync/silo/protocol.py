"""What server and silos say to each other, and what is said on a trainer's socket.

Every question of the server is one `Request`, every answer one `Reply`; both are JSON by `fedsync.common.codec`, with
bytes beside it where arrays travel. Flower's client app hands both on undecoded: the server writes the request, the
silo's trainer reads it and answers, the server reads the reply. So a new question is a class here, one place that asks
it (`fedsync.server.outbox`) and one that answers it (`fedsync.silo.session.service`).

| request | bytes with it | replies | bytes with them |
|---|---|---|---|
| `Describe` | | `Hello` | greeting, if the silo has one |
| `AskModel` | | `InitialModel` | the model, float32, if it is asked for |
| `Train` | what the silo needs to have the model | `InProgress`, `WorkReport`, `VersionMismatch` | the update |
| `Collect` | | as `Train` | as `Train` |
| `EvaluateModel` | as `Train` | `Evaluation`, `Attestation` where figures are sealed, `VersionMismatch` | |
| `Question` | the aggregator's question | `Answer` | the replica's answer |
| `AskSnapshot` | | `Snapshot` | the model, sealed for other silos |
| any | | `Refused` | |

`Refused` is all that a server learns of a failure, whatever failed: one code of a closed list. See
`fedsync.silo.owner.refusals`.

On the socket a request is inside a `Forward`: what comes from the server cannot end a trainer or probe it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path
from typing import Any, Self

from fedsync.common import codec
from fedsync.common.errors import SERVER, ProtocolError
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.core.actions import Evaluate
from fedsync.core.events import Evaluated
from fedsync.core.orders import Evaluation, PooledFigures, SiloFacts, Split, Subject, WorkOrder, WorkReport
from fedsync.core.report_checks import MAX_COUNT
from fedsync.model.layout import Layout
from fedsync.model.tensor_parts import ModelForm
from fedsync.model.transfer import Payload, VersionMismatch
from fedsync.silo.run_text import RunText

SOCKET, IDENTITY, LOG = "trainer.sock", "identity.json", "trainer.log"
ANSWERS, COPY = ("answer.bin", "answer-2.bin"), "copy.bin"
"""Files in a resident trainer's folder; the second is there where orders are queued."""

PASSING = "passing-"
"""Files there begin with it that have an answer on its way, and are whoever asked's."""

RESOURCES = "FEDSYNC_RESOURCES"
"""Environment variable: ``off`` where a silo's owner does not want to tell of its machine."""

STATE = "FEDSYNC_STATE"
"""Environment variable: folder in which resident trainers keep their folders."""

STATE_FOLDER = "state"
"""Folder of resident trainers in a home folder."""

_DIGEST = re.compile(r"([0-9a-f]{64})?")

MAX_TEXT = 65536
"""Most characters of a peer's request or reply; a report with 64 windows takes a tenth of it."""

MAX_LAYOUT_TEXT = 2**20
"""Most characters of an `InitialModel`: room for the names and shapes of 10,000 tensors."""


# What the server asks.


@dataclass(frozen=True, slots=True)
class Describe:
    """Who are you, and what do you have?"""


@dataclass(frozen=True, slots=True)
class AskModel:
    """Send the model before any training; without ``values``, its layout alone."""

    values: bool = True


@dataclass(frozen=True, slots=True)
class Train:
    """Carry out an order; with ``report_s``, answer after that many seconds at the latest."""

    order: WorkOrder
    report_s: float | None = None


@dataclass(frozen=True, slots=True)
class Collect:
    """Ask for an order; ``halt`` ends it after its current step; answer after ``wait_s`` at the latest."""

    update_id: str
    wait_s: float | None = None
    halt: bool = False


@dataclass(frozen=True, slots=True)
class EvaluateModel:
    """Evaluate the model ``version`` on a split; ``subject`` says which it is, ``owner`` that it is another silo's."""

    version: int
    split: Split = Split.VALIDATION
    subject: Subject = Subject.LAST
    owner: str = ""

    @classmethod
    def of(cls, action: Evaluate) -> Self:
        """What each silo is asked."""
        return cls(action.version, action.split, action.subject, action.owner)

    def answered(
        self, at_s: float, silo: str, found: Evaluation | None, pooled: tuple[PooledFigures, ...] = ()
    ) -> Evaluated:
        """What it means that a silo answers so."""
        return Evaluated(at_s, silo, self.version, found, pooled, self.split, self.subject, self.owner)


@dataclass(frozen=True, slots=True)
class Question:
    """The aggregator has a question; see `fedsync.model.transfer.Aggregator.questions`."""


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Send the model that is kept at the silo, sealed for other silos."""


Request = Describe | AskModel | Train | Collect | EvaluateModel | Question | AskSnapshot


# What a silo answers.


@dataclass(frozen=True, slots=True)
class Hello:
    """A silo's name, what it says of itself and of its model, and the version that it keeps; -1 for none."""

    silo: str
    facts: SiloFacts
    holds: int = 0
    form: ModelForm | None = None


@dataclass(frozen=True, slots=True)
class InitialModel:
    """What travels of the model before any training has this layout.

    Args:
        layout: of what travels.
        kept: names of the tensors that do not.
        frozen: as in `ModelForm`.
    """

    layout: Layout
    kept: tuple[str, ...] = ()
    frozen: str = ""


@dataclass(frozen=True, slots=True)
class InProgress:
    """An order is in work: local steps and samples done so far."""

    steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class Attestation:
    """What silos found together in the commits that came with the model; nothing of the model or of this silo."""

    pooled: tuple[PooledFigures, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the aggregator's question."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The silo's model, which is ``version``."""

    version: int


class Refusal(StrEnum):
    """Why there is no answer, in one word. The list is closed; what a word means is in `fedsync.silo.owner.refusals`."""

    LOADING = auto()
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
    AWAY = auto()
    APPROVAL = auto()
    INTERNAL = auto()


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no answer. ``text`` is empty but where the silo is emulated, or its owner lets reasons out.

    With AWAY, ``back_s`` says how long it is until the silo takes orders again [s].
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
"""The way to a silo's trainer: text and bytes there, text and bytes back."""


def exchange(ask: Ask, request: Request, payload: Payload | None = None) -> tuple[Reply, Payload | None]:
    """Ask one's own trainer."""
    text, answer = ask(write_request(request), payload)
    reply: Reply = codec.loads(Reply, text, own=True)
    return reply, answer


def write_request(request: Request) -> str:
    """A request as text."""
    return codec.dumps(request, Request)


def write_reply(reply: Reply) -> str:
    """A reply as text."""
    return codec.dumps(reply, Reply)


def read_request(text: str) -> Request:
    """The server's request.

    Raises:
        ProtocolError: it is none.
    """
    request: Request = _read(Request, text, SERVER, MAX_TEXT)
    return request


def read_reply(text: str, sender: str, most: int = MAX_TEXT) -> Reply:
    """A silo's reply; what its figures may be is checked where they are used.

    Args:
        text: what the silo wrote.
        sender: its name, for errors.
        most: characters that it may have.

    Raises:
        ProtocolError: it is none.
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
    """What a silo's session makes of an order: the report, which is the reply, and the update, which goes beside it."""

    report: WorkReport
    update: Payload


# Which trainer it is.


@dataclass(frozen=True, slots=True)
class Identity:
    """Which silo of which run this is.

    Args:
        spec: the run's specification as JSON.
        index: the silo's share of the data.
        name: its name, unless it emulates a machine that has one.
        declared_speed: samples per second, if its owner declares it.
        device: where its owner wants to train, or None for what the run's specification says.
        processes: in how many its owner wants to train, likewise.
        resources: whether its owner allows to tell how much of the machine is left to the trainer; the
            run's specification has to want it too.
        node_config: what else its owner says, for training code of its own, as JSON.
        run_config: what the run says, for the same.
    """

    spec: str
    index: int
    name: str
    declared_speed: float | None = None
    device: str | None = None
    processes: int | None = None
    resources: bool = True
    node_config: str = "{}"
    run_config: str = "{}"

    @property
    def text(self) -> RunText:
        """All that the server says of the run."""
        return RunText(self.spec, self.run_config)

    @classmethod
    def load(cls, folder: Path) -> Identity:
        """What is written in a trainer's folder.

        Raises:
            OSError: nothing is.
            ValueError: it was torn, or is another FedSync's.
        """
        identity: Identity = codec.loads(cls, (folder / IDENTITY).read_bytes(), own=True)
        return identity

    def dump(self) -> str:
        """As text, the same for the same silo of the same run."""
        return codec.dumps(self)

    def save(self, folder: Path) -> None:
        """Write it into a trainer's folder, unless it is there: a full disk takes nothing, not even the same again.

        Raises:
            ConfigError: the disk does not take it.
        """
        path, data = folder / IDENTITY, self.dump().encode()
        try:
            there = path.read_bytes()
        except FileNotFoundError:
            there = b""
        if there != data:
            write_atomically(path, data, OWNER_FILE)


# What is said on a trainer's socket.


@dataclass(frozen=True, slots=True)
class Forward:
    """Answer the request in ``text``; wait so many seconds at most for the trainer to be loaded.

    ``flower_ids`` is the value of `fedsync.common.environment.FLOWER_IDS`.
    """

    text: str
    load_s: float
    flower_ids: str = ""


@dataclass(frozen=True, slots=True)
class Ping:
    """Say what you do."""


@dataclass(frozen=True, slots=True)
class MakeRoom:
    """End if you have nothing to do: another run's trainer needs the memory."""


@dataclass(frozen=True, slots=True)
class Quit:
    """End at once."""


SocketRequest = Forward | Ping | MakeRoom | Quit


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The reply to a request, or why there is none, as text."""

    text: str


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What the trainer does, ``loading``, ``idle``, ``working`` or ``failed``, and since when, ISO 8601."""

    state: str
    since: str


SocketReply = Forwarded | TrainerState
