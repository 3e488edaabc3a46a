"""When a checkpoint is due, which of them stay, and from which a run goes on: files alone, without a run."""

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fedsync.common.errors import ConfigError
from fedsync.core.actions import Action, Commit, Dispatch, Evaluate, OperatorAnswered, Rollback, WakeAt
from fedsync.core.events import Event, OperatorAsked, SiloJoined, SiloLost
from fedsync.core.journal import JOURNAL, JournalEntry
from fedsync.core.operator.operator_commands import PauseRun
from fedsync.core.orders import SiloFacts, Split, Subject, WorkOrder
from fedsync.model.layout import Layout
from fedsync.server.checkpoints import FOLDER, Checkpoints, Moment, Origin, newest_version, prepare

ORDER = Dispatch("a", WorkOrder("a/1", 0, 1, 8, 1, 0.1, seed=0))
COMMIT = b'{"actions":[{"type":"Commit"}]}\n'


def origin(kind: str = "plain") -> Origin:
    return Origin("config", json.dumps({"run": "first", "cipher": {"kind": kind}}), Layout(("x",), ((1,),)))


def checkpoints(out: Path, kind: str = "plain", keep: int = 3, resumed: Moment | None = None) -> Checkpoints:
    return Checkpoints(out, origin(kind), keep, resumed)


def entry(*actions: Action, events: tuple[Event, ...] = ()) -> JournalEntry:
    return JournalEntry(1.0, events, actions, "")


def save(files: Checkpoints, version: int, position: int = 0) -> None:
    coordinator: Any = SimpleNamespace(version=version, state=lambda: {"version": version})
    files.save(coordinator, {}, 2.5, position, (7.0,))


def journal(out: Path, data: bytes = b"") -> None:
    out.mkdir(exist_ok=True)
    (out / JOURNAL).write_bytes(data)


def test_one_is_due_before_silos_learn_what_no_checkpoint_has(tmp_path: Path) -> None:
    files = checkpoints(tmp_path)
    assert files.due(None), "what a run is sent first is made with the beginning"
    assert not files.due(entry(WakeAt(3.0)))
    assert files.due(entry(ORDER)), "there is a first model"
    assert not files.due(entry(ORDER))
    assert files.due(entry(Commit(1, {"a/1": 1.0}))) and files.due(entry(Rollback(2)))


def test_what_an_operator_asked_is_in_a_checkpoint_before_it_is_answered(tmp_path: Path) -> None:
    """Whatever else the entry says: it would be done after a restart, and who asked was told so."""
    asked = OperatorAsked(1.0, "1", PauseRun())
    assert not checkpoints(tmp_path).due(entry())
    assert checkpoints(tmp_path).due(entry(OperatorAnswered("1"), events=(asked,)))


def test_a_run_that_goes_on_has_begun(tmp_path: Path) -> None:
    journal(tmp_path)
    save(checkpoints(tmp_path), 0)
    moment = prepare(tmp_path, "config").moment
    assert (moment.elapsed_s, moment.timers) == (2.5, (7.0,))
    assert not checkpoints(tmp_path, resumed=moment).due(entry(ORDER))


def test_who_is_here_and_what_is_evaluated_is_in_it(tmp_path: Path) -> None:
    journal(tmp_path)
    files = checkpoints(tmp_path)
    joined = tuple(SiloJoined(0.0, name, SiloFacts(10)) for name in "abc")
    files.due(entry(events=joined))
    files.due(entry(events=(SiloLost(1.0, "b", ""),)))
    asked = Evaluate(4, ("a", "c"), Split.TEST, Subject.BEST)
    assert files.due(entry(asked))
    save(files, 4)
    moment = prepare(tmp_path, "config").moment
    assert (moment.silos, moment.evaluating) == (("a", "c"), asked)
    again = checkpoints(tmp_path, resumed=moment)
    again.due(entry(events=(SiloLost(2.0, "a", ""),)))
    save(again, 5)
    assert prepare(tmp_path, "config").moment.silos == ("c",)


def test_the_newest_by_number_stay_and_the_newest_of_them_is_gone_on_from(tmp_path: Path) -> None:
    """Also those that are written before there is a journal."""
    files = checkpoints(tmp_path)
    for version in range(8, 12):
        save(files, version)
    files.close()
    journal(tmp_path)
    assert sorted(path.name for path in (tmp_path / FOLDER).glob("*.ckpt")) == ["10.ckpt", "11.ckpt", "9.ckpt"]
    assert newest_version(tmp_path) == prepare(tmp_path, "config").moment.version == 11


def test_a_checkpoint_that_knows_more_than_the_journal_is_left_by_a_machine_that_died(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is on disk, and the end of its journal is not: silos heard of it, so they begin anew from the one before."""
    journal(tmp_path, b"12345")
    files = checkpoints(tmp_path)
    save(files, 1, position=5)
    save(files, 2, position=6)
    journal(tmp_path, b"12345")
    found = prepare(tmp_path, "config")
    assert found.moment.version == 1 and json.loads(found.origin.spec)["run"] != "first"
    assert f"{tmp_path / JOURNAL} is shorter than its 6 bytes; resuming from the checkpoint before" in caplog.text
    journal(tmp_path, b"1234")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"no checkpoint is whole\. Start another run"):
            prepare(tmp_path, "config")
        assert newest_version(tmp_path) == 2, "a server does not take it for a run that never began, and begins anew"


@pytest.mark.parametrize("kind", ["plain", "pad"])
def test_a_journal_is_on_disk_before_what_needs_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[tuple[str, bool]] = []
    main = threading.current_thread()

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_relative_to(tmp_path):  # not of another test's checkpoints, whose threads may still be at it
            settled.append((path.name.split(".ckpt")[0], threading.current_thread() is main))

    monkeypatch.setattr(os, "fsync", fsync)
    journal(tmp_path, b"12345")
    files = Checkpoints(tmp_path, origin(kind), required=kind == "pad")
    save(files, 1, position=5)
    files.close()
    in_line = kind == "pad"
    names = [(name.lstrip("."), where) for name, where in settled if name != tmp_path.name and name != FOLDER]
    assert names == [(JOURNAL, in_line), ("1", in_line)], "and under encryption before `save` returns"


def test_fields_are_written_by_name(tmp_path: Path) -> None:
    """A later version may order them otherwise."""
    save(checkpoints(tmp_path), 1)
    data = (tmp_path / FOLDER / "1.ckpt").read_bytes()
    assert all(name in data for name in (b"elapsed_s", b"position", b"evaluating", b"aggregator"))


@pytest.mark.parametrize(
    ("kind", "behind", "boot", "anew"),
    [
        ("plain", COMMIT, "", False),  # the process died while it wrote the checkpoint
        ("plain", 2 * COMMIT, "", True),
        ("plain", COMMIT, "another", True),  # the machine died, and a checkpoint with it
        ("plain", COMMIT, "none", True),
        ("plain", b"", "another", False),
        ("pad", COMMIT, "another", False),
    ],
)
def test_silos_that_may_know_more_begin_anew_and_say_so(
    kind: str, behind: bytes, boot: str, anew: bool, tmp_path: Path
) -> None:
    """A commit behind the checkpoint: under encryption nobody has heard of it, for none goes out without one."""
    journal(tmp_path, b"line\n")
    save(checkpoints(tmp_path, kind), 1, position=5)
    if boot == "none":
        (tmp_path / FOLDER / "boot").unlink()
    elif boot:
        (tmp_path / FOLDER / "boot").write_text(boot)
    journal(tmp_path, b"line\n" + behind + b"half a li")
    first = prepare(tmp_path, "config").origin.spec
    assert (json.loads(first)["run"] != "first") == anew
    assert (tmp_path / JOURNAL).read_bytes() == b"line\n"
    assert prepare(tmp_path, "config").origin.spec == first, "asked twice it says the same"


def test_silos_begin_anew_where_the_last_checkpoint_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, full = checkpoints(tmp_path), Mock(side_effect=ConfigError("disk", "is full", "Make room"))
    journal(tmp_path)
    save(files, 1)
    with monkeypatch.context() as patch:
        patch.setattr("fedsync.server.checkpoints.write_atomically", full)
        save(files, 2)
    journal(tmp_path, COMMIT)
    assert json.loads(prepare(tmp_path, "config").origin.spec)["run"] != "first"
    save(files, 3)
    journal(tmp_path, COMMIT)
    assert json.loads(prepare(tmp_path, "config").origin.spec)["run"] == "first", "it can be written again"


def test_a_torn_one_is_remembered_and_the_run_keeps_its_first_name(tmp_path: Path) -> None:
    journal(tmp_path, COMMIT)
    files = checkpoints(tmp_path, "pad")
    save(files, 1)
    save(files, 2, position=len(COMMIT))
    (tmp_path / FOLDER / "2.ckpt").write_bytes(b"torn")
    names = []
    for _ in range(2):
        spec = json.loads(prepare(tmp_path, "config").origin.spec)
        names.append((spec["run"], spec["began"]))
        journal(tmp_path, COMMIT)
    assert [began for _, began in names] == ["first", "first"]
    assert len({"first", *(run for run, _ in names)}) == 3, "each time silos may have heard of another version"
