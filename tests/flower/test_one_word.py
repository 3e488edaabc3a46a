"""Whatever is raised at a silo, wherever on the way: no byte of what it says is in what goes to Flower."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedsync.common.errors import SERVER, ConfigError, IntegrityError, ProtocolError, RunError
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkOrder
from fedsync.flower import client_app
from fedsync.flower import flower_messages as messages
from fedsync.model.transfer import Payload
from fedsync.silo.agent import answers
from fedsync.silo.agent.joins import INBOX
from fedsync.silo.owner.owner_policy import ALLOWED
from fedsync.silo.owner.refusals import last_refusals
from fedsync.silo.protocol import (
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
from fedsync.silo.session.service import TrainerService
from fedsync.silo.session.session import SiloSession
from fedsync.silo.session.trainer_client import TrainerClient
from fedsync.transport.join import Join, new_secret
from tests.flower.grid import posing, said, silos_in_this_process, trainers

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
    "the app is looked for": (client_app, "announced", Describe()),
    "the node's configuration is read": (answers, "identify", Describe()),
    "its owner's approval is looked for": (answers, "check_approved", Describe()),
    "the trainer's folder is looked for": (answers, "trainer_folder", EvaluateModel(0)),
    "a trainer is looked for": (answers, "connect", Describe()),
    "the specification is read": (RunSpec, "parse", Describe()),
    "the task is made": (SiloSession, "__init__", Describe()),
    "the silo says who it is": (TrainerService, "_handle", Describe()),
    "the first model is made": (SiloSession, "initial_model", AskModel()),
    "it trains": (SiloSession, "train", Train(ORDER)),
    "it evaluates": (SiloSession, "evaluate", EvaluateModel(0)),
    "it answers": (SiloSession, "answer", Question()),
    "it seals its model": (SiloSession, "snapshot", AskSnapshot()),
    "the answer is put down": (answers, "audit_answer", AskModel()),
    "the answer is packed": (messages, "pack", AskModel()),
}


def asking(request: Request, payload: Payload | None = None) -> tuple[Message, Context]:
    return sent(posing(request, MODEL.view(np.uint8) if payload is None else payload, SPEC))


def joining(text: str) -> tuple[Message, Context]:
    return sent(messages.join(1, text, 9.0))


def sent(message: Message) -> tuple[Message, Context]:
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
        text, model = TrainerService(answers.identify(SPEC, {})).ask('{"type":"AskModel"}')
    assert InitialModel.__name__ in text and model is not None
    return model


@pytest.mark.slow
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


JOIN = Join(("http://127.0.0.1:1/v1/fedsync",), new_secret(), "", "run", "a").dump()
JOINING: dict[str, tuple[Any, str]] = {
    "the message is read": (messages, "read_join"),
    "the join is read": (Join, "parse"),
    "the owner is asked": (client_app, "trusted"),
    "the app is looked for": (client_app, "announced"),
    "the state folder is looked for": (client_app, "state_folder"),
    "it is handed over": (client_app, "hand_over"),
}


@pytest.mark.parametrize("place", JOINING)
def test_nothing_raised_at_a_join_leaves_the_silo(place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    owner, name = JOINING[place]
    for kind, make in ERRORS.items():
        message, context = joining(JOIN)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raising(make()))
            check(client_app.app(message, context))
        assert MARKER in last_refusals(tmp_path)[-1].reason, f"the owner sees it: {kind}"


@pytest.mark.parametrize(
    "join",
    [
        MARKER,
        JOIN.replace("http://127.0.0.1:1/", f"http://{MARKER.replace('/', '.').lower()}:1/"),
        JOIN.replace("http:", f"{MARKER}:"),
    ],
    ids=["none", "of a host that is not the owner's", "of no address"],
)
def test_a_join_that_is_refused_is_one_word(join: str) -> None:
    """Here the server learns nothing that it did not write itself, and still gets one word."""
    check(client_app.app(*joining(join)))


def test_an_inbox_that_is_not_there_is_one_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv(INBOX, str(tmp_path / MARKER.replace("/", "-")))
    check(client_app.app(*joining(JOIN)))


def test_a_trainer_that_cannot_be_started_is_one_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    tmp_path.chmod(0o755)  # open to others
    monkeypatch.setattr(answers, "connect", lambda identity: TrainerClient(identity).ask)
    check(client_app.app(*asking(Describe())))
    tmp_path.chmod(0o700)
    for error in (FileNotFoundError(2, MARKER, MARKER), OSError(28, MARKER), PermissionError(13, MARKER)):
        monkeypatch.setattr("subprocess.Popen", raising(error))
        check(client_app.app(*asking(Describe())))
