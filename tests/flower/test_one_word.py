"""Whatever is raised at a silo, wherever on the way: no byte of what it says is in what goes to Flower."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.run import Run

from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.errors import SERVER, ConfigError, IntegrityError, ProtocolError, RunError
from fedsync.core.orders import WorkOrder
from fedsync.core.transfer import Payload
from fedsync.flower import client_app, messages, payloads
from fedsync.flower.internals import answering, versions
from fedsync.trainer.client import TrainerClient
from fedsync.trainer.owner_policy import ALLOWED
from fedsync.trainer.protocol import (
    STATE,
    AskModel,
    AskSnapshot,
    Describe,
    EvaluateModel,
    InitialModel,
    Question,
    Refused,
    Request,
    Train,
)
from fedsync.trainer.refusals import last_refusals
from fedsync.trainer.service import TrainerService
from fedsync.trainer.session import SiloSession
from tests.flower.grid import said, silos_in_this_process, trainers
from tests.flower.internals.test_answering import SuperNode

MARKER = "Patient-4711-HIV-positive-/srv/fl/group.key"
CONFIG = StrategyConfig.load("fedavg", ["task={kind: digits}", "local.steps=1", "local.batch_size=8"])
SPEC = RunSpec(seed=7, silos=1, task=CONFIG.task, local=CONFIG.local).dump()
ORDER = WorkOrder("a/1", 0, 1, 8, 1, 0.1, seed=1)
MODEL = np.zeros(2, np.float32)


@pytest.fixture(autouse=True)
def _real_silo(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    monkeypatch.setenv(ALLOWED, "{}")
    monkeypatch.setenv(STATE, str(tmp_path))
    with silos_in_this_process():
        yield


def _noted() -> Exception:
    error = ValueError(MARKER)
    error.add_note(MARKER)
    return error


def _caused() -> Exception:
    error = RuntimeError(f"while reading {MARKER}")
    error.__cause__ = OSError(28, MARKER, MARKER)
    return error


ERRORS: dict[str, Callable[[], Exception]] = {
    "configuration": lambda: ConfigError(MARKER, MARKER, MARKER),
    "protocol": lambda: ProtocolError(SERVER, MARKER, MARKER),
    "integrity": lambda: IntegrityError(SERVER, MARKER, f"{MARKER}: 41715360378077 silos are in the sum"),
    "run": lambda: RunError(MARKER),
    "key": lambda: KeyError(MARKER),
    "text": lambda: UnicodeDecodeError("utf-8", MARKER.encode(), 0, 1, MARKER),
    "memory": lambda: MemoryError(MARKER),
    "a name of its own": lambda: type(MARKER.replace("-", "_").replace("/", "_"), (Exception,), {})(MARKER),
    "notes": _noted,
    "cause": _caused,
    "group": lambda: ExceptionGroup(MARKER, [ValueError(MARKER)]),
}


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*arguments: object, **options: object) -> NoReturn:
        raise error

    return fail


PLACES: dict[str, tuple[Any, str, Request]] = {
    "the message is read": (messages, "read_request", Describe()),
    "the payload is unpacked": (messages, "unpack", EvaluateModel(0)),
    "the node's configuration is read": (client_app, "identify", Describe()),
    "a trainer is looked for": (client_app, "connect", Describe()),
    "the specification is read": (RunSpec, "parse", Describe()),
    "the task is made": (SiloSession, "__init__", Describe()),
    "the silo says who it is": (TrainerService, "_handle", Describe()),
    "the first model is made": (SiloSession, "initial_model", AskModel()),
    "it trains": (SiloSession, "train", Train(ORDER)),
    "it evaluates": (SiloSession, "evaluate", EvaluateModel(0)),
    "it answers": (SiloSession, "answer", Question()),
    "it seals its model": (SiloSession, "snapshot", AskSnapshot()),
    "the answer is packed": (payloads, "pack", AskModel()),
}


def asking(request: Request, payload: Payload | None = None) -> tuple[Message, Context]:
    message = messages.request(1, SPEC, request, payloads.pack(MODEL.view(np.uint8) if payload is None else payload), 9)
    message.metadata.__dict__["_message_id"] = "1"
    config = cast(UserConfig, {"partition-id": 0})
    return message, Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})


def leaves(reply: Message) -> bytes:
    """All that Flower sends of an answer."""
    parts = b"".join(part.deflate() for part in get_all_nested_objects(reply).values())
    return parts + repr(reply.metadata).encode() + repr(reply.error if reply.has_error() else "").encode()


def check(reply: Message) -> None:
    whole = leaves(reply)
    # Not the number by itself: clocks and checksums have four such digits now and then.
    for piece in (MARKER, "Patient", "group.key", "HIV", "Error", "Traceback", "fedsync/"):
        assert piece.encode() not in whole, piece
    assert not reply.has_error()
    refused, payload = said(reply)
    assert isinstance(refused, Refused) and not refused.text and payload is None


@pytest.fixture(scope="module")
def model() -> Payload:
    with silos_in_this_process():
        text, model = TrainerService(client_app.identify(SPEC, {}, {})).ask('{"type":"AskModel"}')
    assert InitialModel.__name__ in text and model is not None
    return model


@pytest.mark.parametrize("place", PLACES)
def test_nothing_of_what_is_raised_leaves_the_silo(
    place: str, model: Payload, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    owner, name, request = PLACES[place]
    for kind, make in ERRORS.items():
        trainers.clear()
        message, context = asking(request, model)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raising(make()))
            check(client_app.app(message, context))
        assert MARKER in last_refusals(tmp_path)[-1].reason, f"the owner sees it: {kind}"


@pytest.mark.skipif(not versions.supported(), reason="this flwr is not a tested version")
@pytest.mark.parametrize("place", ["installed_app", "_whole", "the client", "the state", "the bundle"])
@pytest.mark.parametrize("kind", ERRORS)
def test_nor_where_a_supernode_answers_itself(place: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node, fail = SuperNode(), raising(ERRORS[kind]())
    node.hand_in(MARKER)
    if place == "the bundle":
        monkeypatch.setattr("flwr.common.config.get_fab_config", fail)
        node.answers.begin(node.state, node.store)
        (reply,) = node.ready()
    elif place == "the state":
        monkeypatch.setattr(node.state, "get_run", fail)
        reply = node.answer(monkeypatch, fail)
    elif place == "_whole":
        monkeypatch.setattr(answering, "_whole", fail)
        reply = node.answer(monkeypatch, fail)
    else:
        reply = node.answer(monkeypatch, fail)
        if place == "installed_app":
            monkeypatch.setattr(answering, "installed_app", fail)
            node = SuperNode()
            node.hand_in(MARKER)
            node.answers.begin(node.state, node.store)
            (reply,) = node.ready()
    check(node.sent(reply))


def test_a_bundle_s_own_words_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the server learns nothing that it did not write itself, and still gets one word."""
    from fedsync.flower.internals.apps import installed_app

    client = {"tool": {"flwr": {"app": {"components": {"clientapp": MARKER}}}}}
    monkeypatch.setattr("flwr.common.config.get_fab_config", lambda content: client)
    fab = Fab(hashlib.sha256(MARKER.encode()).hexdigest(), b"", {})
    run = Run.create_empty(1)
    node = SuperNode()
    node.hand_in("hello")
    check(node.sent(node.answer(monkeypatch, lambda message, context: installed_app(run, fab)(message, context))))


def test_a_trainer_that_cannot_be_started_is_one_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    tmp_path.chmod(0o755)  # open to others
    monkeypatch.setattr(client_app, "connect", lambda identity: TrainerClient(identity).ask)
    check(client_app.app(*asking(Describe())))
    tmp_path.chmod(0o700)
    for error in (FileNotFoundError(2, MARKER, MARKER), OSError(28, MARKER), PermissionError(13, MARKER)):
        monkeypatch.setattr("subprocess.Popen", raising(error))
        check(client_app.app(*asking(Describe())))
