"""Three forgeries, and a silo takes no further part: in any run, after any restart, until its owner says so."""

import os
import stat
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from fedsync.cipher.keys.authority import emulated_keys
from fedsync.cipher.keys.keyring import Ring, open_ring
from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.common.errors import SERVER, ConfigError, ProtocolError, RunError, SiloLocked, SpoiledSum, UserCodeError
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.model.layout import Vector
from fedsync.model.transfer import Payload
from fedsync.silo.owner.key_lookup import KEYS
from fedsync.silo.owner.lockout import COUNT, LIMIT, MARKER, Lockout
from fedsync.silo.owner.owner_policy import ALLOWED
from fedsync.silo.protocol import (
    AskModel,
    AskSnapshot,
    Collect,
    Describe,
    EvaluateModel,
    Hello,
    Identity,
    Question,
    Refusal,
    Refused,
    Request,
    exchange,
)
from fedsync.silo.session.replica_factories import made_initial
from fedsync.silo.session.service import TrainerService
from fedsync.silo.session.silo_setup import GuardedTrainer
from tests.cipher.given_keys import some_context


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return open_ring(emulated_keys(["a", "b"], tmp_path / "keys", 1, some_context).silos["a"])


def folder(ring: Ring) -> Path:
    assert ring.folder is not None
    return ring.folder


def locked(ring: Ring) -> bool:
    """As another process finds it."""
    try:
        Lockout(ring).check()
    except SiloLocked:
        return True
    return False


def fail(ring: Ring, times: int = LIMIT) -> None:
    for number in range(times):
        Lockout(ring).count(f"forgery {number}")


def test_the_owner_sees_what_happened_and_counting_begins_anew(ring: Ring) -> None:
    lockout = Lockout(ring)
    assert {stat.S_IMODE((folder(ring) / name).stat().st_mode) for name in (COUNT, MARKER)} == {0o600}
    for number in range(LIMIT + 2):
        lockout.count(f"forgery {number} {'x' * 5000}")
    assert (folder(ring) / COUNT).stat().st_size < 5000
    happened = Lockout(ring).unlock()
    assert happened is not None and [each.reason[:9] for each in happened] == ["forgery 2", "forgery 3", "forgery 4"]
    lockout.check()
    assert Lockout(ring).unlock() == ()


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"epoch":1,"group":"00"', b"\xff" * 70_000])
def test_a_count_that_is_gone_or_damaged_counts_as_locked(ring: Ring, content: bytes | None) -> None:
    running = Lockout(ring)
    path = folder(ring) / COUNT
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert locked(ring), "the marker says that there was one"
    with pytest.raises(SiloLocked):
        running.check()
    assert Lockout(ring).unlock() is None
    running.check()
    assert not locked(ring)


def test_a_count_without_its_marker_is_a_count(ring: Ring) -> None:
    fail(ring)
    (folder(ring) / MARKER).unlink()  # as a crash between the two leaves it
    assert locked(ring) and (folder(ring) / MARKER).exists()


def test_an_epoch_later_the_count_begins_anew_and_never_goes_back(ring: Ring) -> None:
    fail(ring)
    later = replace(ring, group=replace(ring.group, epoch=2))
    assert locked(ring) and not locked(later)
    Lockout(later).count("in epoch 2")
    assert locked(ring), "old keys have come back"
    assert not locked(later)


def test_what_cannot_be_counted_locks_until_it_can(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    lockout = Lockout(ring)
    full = ConfigError("count", "cannot be written: No space left on device", "Make room")
    with monkeypatch.context() as patch:
        patch.setattr("fedsync.silo.owner.lockout.write_private", Mock(side_effect=full))
        for _ in range(2):
            with pytest.raises(SiloLocked, match="could not be counted"):
                lockout.count("forged")
        with pytest.raises(SiloLocked, match="could not be counted"):
            lockout.check()
    lockout.check()
    happened = lockout.unlock()
    assert happened is not None and [each.reason for each in happened] == ["forged"], "made up for"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_takes_no_files_is_no_folder_of_keys(ring: Ring) -> None:
    folder(ring).chmod(0o500)
    with pytest.raises(ConfigError, match="Give the silo write access to its key folder"):
        Lockout(ring)


# In a trainer.

EVERYTHING: list[Request] = [
    Describe(), AskModel(), Collect("a/1"), EvaluateModel(0), Question(), AskSnapshot(),
]  # fmt: skip


@pytest.fixture
def keys(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> Ring:
    """Of a real silo, by its environment."""
    monkeypatch.setenv(KEYS, str(folder(ring)))
    monkeypatch.setenv(ALLOWED, "{}")
    return ring


FORGED = np.frombuffer(b"forged" * 100, np.uint8)


def service(run: str) -> TrainerService:
    config = StrategyConfig.load("fedavg", ["task={kind: digits}", "cipher={kind: pad}"])
    spec = RunSpec.of(config, None, 2).model_copy(update={"run": run})
    return TrainerService(Identity(spec.dump(), 0, "a"))


def test_after_three_forgeries_a_silo_answers_nothing_in_any_run(keys: Ring) -> None:
    one, other = service("one"), service("two")
    answers = [exchange(each.ask, EvaluateModel(0), FORGED) for each in (one, other, one)]
    assert answers == [(Refused(Refusal.INTEGRITY), None)] * LIMIT
    for running in (one, other):
        for request in EVERYTHING:
            assert exchange(running.ask, request, FORGED) == (Refused(Refusal.LOCKED), None)
    with pytest.raises(SiloLocked, match=r"3 failures of integrity.*fedsync silo unlock"):
        service("three")
    Lockout(keys).unlock()
    assert isinstance(exchange(one.ask, Describe())[0], Hello)
    service("three")


@pytest.mark.parametrize(
    "error",
    [RunError("ended by signal 9"), UserCodeError("raises"), RuntimeError("a bug"), ProtocolError(SERVER, "x", "y")],
)
def test_training_code_that_fails_forges_nothing(keys: Ring, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(GuardedTrainer, "initial_model", Mock(side_effect=error))
    session = service("one")._session
    for _ in range(LIMIT):
        with pytest.raises(type(error)), session._counted():
            made_initial(session._trainer)
    assert not locked(keys)


def test_an_emulated_silo_leaves_no_lock_behind(keys: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could open it: there is no silo.yaml to name."""
    monkeypatch.setenv(KEYS, str(folder(keys).parent))
    monkeypatch.delenv(ALLOWED)
    running = service("one")
    for _ in range(LIMIT):
        exchange(running.ask, EvaluateModel(0), FORGED)
    assert isinstance(exchange(running.ask, Describe())[0], Refused)
    assert isinstance(exchange(service("one").ask, Describe())[0], Hello)
    assert not (folder(keys) / COUNT).exists()


def test_many_trainers_that_are_asked_at_once_give_three_answers(keys: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """All had looked before the first had counted."""
    running = [service(str(number)) for number in range(5)]
    together = threading.Barrier(len(running))

    def forged(self: EncryptedReplica, payload: Payload, version: int) -> Vector:
        with suppress(threading.BrokenBarrierError):
            together.wait(0.3)
        raise ProtocolError(SERVER, "tag", "forged")

    monkeypatch.setattr(EncryptedReplica, "receive", forged)
    with ThreadPoolExecutor(len(running)) as threads:
        asked = [threads.submit(exchange, one.ask, EvaluateModel(0), np.zeros(8, np.uint8)) for one in running]
    codes = Counter(answer.code for answer, _ in (one.result() for one in asked) if isinstance(answer, Refused))
    assert codes == {Refusal.INTEGRITY: LIMIT, Refusal.LOCKED: len(running) - LIMIT}


def test_what_a_silo_spoiled_is_the_same_word_and_does_not_count(keys: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one silo that lies would lock all others."""

    running, spoiled = service("one"), SpoiledSum(SERVER, "clipping", "a value of 3000")
    monkeypatch.setattr(EncryptedReplica, "receive", Mock(side_effect=spoiled))
    for _ in range(LIMIT + 1):
        answer = exchange(running.ask, EvaluateModel(0), np.zeros(8, np.uint8))
        assert answer == (Refused(Refusal.INTEGRITY), None)


def test_nonsense_that_is_not_sealed_does_not_count(keys: Ring) -> None:
    running = service("one")
    for _ in range(LIMIT + 1):
        assert exchange(running.ask, EvaluateModel(0)) == (Refused(Refusal.PROTOCOL), None), "no payload at all"
        assert running.ask("{", None)[0] == '{"type":"Refused","code":"protocol"}'
    assert isinstance(exchange(running.ask, Describe())[0], Hello)
