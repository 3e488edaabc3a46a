"""Which word an error becomes, what goes with it and to whom, and what is put down for the silo's owner."""

import errno
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from fedsync.common.errors import (
    SERVER,
    ConfigError,
    Diverged,
    IntegrityError,
    LimitReached,
    OwnerRefusal,
    ProtocolError,
    RunError,
    SiloAway,
    SiloBusy,
    SiloLocked,
)
from fedsync.config.silo_start import SiloStartConfig
from fedsync.silo.owner.owner_policy import owner_environment
from fedsync.silo.owner.refusals import MEANINGS, NOTES, StillLoading, explained, last_refusals, refuse
from fedsync.silo.protocol import STATE, Refusal, Refused, read_reply, write_reply


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


FULL = OSError(errno.ENOSPC, "no space left")
WORDS: list[tuple[Exception, Refusal]] = [
    (StillLoading("loading"), Refusal.LOADING),
    (SiloBusy("three runs"), Refusal.BUSY),
    (SiloAway(60.0), Refusal.AWAY),
    (SiloLocked("locked"), Refusal.LOCKED),
    (IntegrityError(SERVER, "tag", "forged"), Refusal.INTEGRITY),
    (caused(IntegrityError(SERVER, "tag", "forged"), MemoryError()), Refusal.INTEGRITY),
    (caused(SiloLocked("it could not be counted"), FULL), Refusal.LOCKED),
    (ProtocolError(SERVER, "message", "nonsense"), Refusal.PROTOCOL),
    (OwnerRefusal("task", "not allowed", "Ask"), Refusal.OWNER),
    (LimitReached("orders", "too many", "Wait"), Refusal.LIMIT),
    (Diverged("local.learning_rate", "nan", "Lower it"), Refusal.DIVERGED),
    (ConfigError("task", "no such file", "Make it"), Refusal.CONFIG),
    (caused(ConfigError("answer.bin", "cannot be written", "Check"), FULL), Refusal.DISK),
    (caused(ConfigError("answer.bin", "cannot be written", "Check"), PermissionError(13, "no")), Refusal.CONFIG),
    (FULL, Refusal.DISK),
    (OSError(errno.EDQUOT, "quota"), Refusal.DISK),
    (OSError(errno.EROFS, "read-only"), Refusal.DISK),
    (OSError(errno.ENOMEM, "no memory"), Refusal.MEMORY),
    (FileNotFoundError(2, "no such file"), Refusal.INTERNAL),
    (MemoryError("12 GB"), Refusal.MEMORY),
    (torch.OutOfMemoryError("CUDA out of memory"), Refusal.MEMORY),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1 TB"), Refusal.MEMORY),
    (caused(RuntimeError("a step failed"), torch.OutOfMemoryError("CUDA")), Refusal.MEMORY),
    (RunError("the trainer died"), Refusal.INTERNAL),
    (RuntimeError("a user's own"), Refusal.INTERNAL),
    (KeyError("patient 7"), Refusal.INTERNAL),
]


def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **said: object) -> None:
    """This process is a real silo's, whose file says so."""
    config = SiloStartConfig.model_validate(
        {"name": "a", "server": "x:1", "insecure": True, "state": str(tmp_path), **said}
    )
    for name, value in owner_environment(config).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("error", "word"), WORDS, ids=repr)
def test_the_server_of_a_real_silo_gets_the_word_alone(
    error: Exception, word: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for how long the silo is away."""
    own(tmp_path, monkeypatch)
    more = ',"back_s":60.0' if word is Refusal.AWAY else ""
    assert write_reply(refuse(error)) == f'{{"type":"Refused","code":"{word.value}"{more}}}'


def test_every_word_has_a_meaning_and_is_read_back() -> None:
    assert set(MEANINGS) == set(Refusal)
    for code in Refusal:
        assert read_reply(write_reply(Refused(code)), "a") == Refused(code)
        assert code.name in explained("berlin", Refused(code))


def test_an_emulated_silo_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = refuse(ConfigError("task", "no file\n\tx\x1b[2J", "Make it"))
    assert refused == Refused(Refusal.CONFIG, "task: no file x\\x1b[2J. Make it")
    assert read_reply(write_reply(refused), "a") == refused, "the codec takes only what prints"


@pytest.mark.parametrize(
    ("said", "leaves"),
    [({}, False), ({"errors": "codes"}, False), ({"errors": "text"}, True), ({"errors": "text", "keys": "/k"}, False)],
)
def test_words_leave_a_real_silo_only_in_the_clear_and_if_its_owner_says_so(
    said: dict[str, object], leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(tmp_path, monkeypatch, **said)
    assert bool(refuse(ConfigError("task", "no file", "Make it")).text) is leaves


class _Mute(Exception):
    """One that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_error_that_cannot_be_printed_is_a_word_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE, str(tmp_path))
    own(tmp_path, monkeypatch)
    assert refuse(_Mute()) == Refused(Refusal.INTERNAL)
    assert "_Mute" in last_refusals(tmp_path)[0].reason


# What the owner finds.


@pytest.fixture
def trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE, str(tmp_path))
    return tmp_path


def test_reasons_are_put_down_for_the_owner_alone(trainers: Path) -> None:
    for error in (ValueError("cell 'x'"), MemoryError("12 GB"), MemoryError("12 GB"), StillLoading("it goes on")):
        refuse(error)
    first, second = last_refusals(trainers)
    assert (first.code, first.reason, first.times) == (Refusal.INTERNAL, "ValueError: cell 'x'", 1)
    assert (second.code, second.times) == (Refusal.MEMORY, 2), "the same again is one line"
    assert stat.S_IMODE((trainers / NOTES).stat().st_mode) == 0o600


def test_the_file_does_not_grow(trainers: Path) -> None:
    for number in range(100):
        refuse(ValueError(f"{number} {'long' * 10_000}"))
    notes = last_refusals(trainers)
    assert notes[-1].reason.startswith("ValueError: 99 ") and len(notes) <= 40
    assert (trainers / NOTES).stat().st_size < 60_000


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"notes":[1]}'])
def test_a_torn_file_is_begun_anew(trainers: Path, content: bytes) -> None:
    (trainers / NOTES).write_bytes(content)
    assert last_refusals(trainers) == ()
    refuse(MemoryError())
    assert len(last_refusals(trainers)) == 1


def test_that_nothing_can_be_put_down_changes_no_answer(trainers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = caused(ConfigError("notes", "cannot be written", "Make room"), FULL)
    monkeypatch.setattr("fedsync.silo.owner.refusals.write_atomically", Mock(side_effect=full))
    assert refuse(MemoryError()).code is Refusal.MEMORY
    monkeypatch.setenv(STATE, str(trainers / "nowhere"))
    assert refuse(MemoryError()).code is Refusal.MEMORY
