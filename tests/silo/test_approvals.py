"""Runs that wait for a silo's owner: nothing is answered before, and what is confirmed is what was shown."""

import json
import os
import stat
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from fedsync.common.errors import ConfigError, LimitReached, OwnerRefusal
from fedsync.config.run_spec import RunSpec
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Dispatch
from fedsync.core.orders import Subject, WorkOrder
from fedsync.silo.owner import approvals as module
from fedsync.silo.owner.approvals import APPROVALS, MOST_WAITING, UNUSED_S, Approvals, AwaitsApproval
from fedsync.silo.owner.owner_policy import OwnerPolicy, owner_environment
from fedsync.silo.owner.refusals import PASSING, explained, refuse
from fedsync.silo.protocol import AskModel, Describe, Hello, Identity, Refusal, Refused, exchange
from fedsync.silo.session.service import TrainerService
from tests.simulation.fake import machines, simulate

SPEC = RunSpec.of(StrategyConfig.load("fedavg", ["local.threads=1", "stop.rounds=5"]), None, 3)
ORDER = WorkOrder("berlin/1", 0, 1, 8, 2, 0.1, seed=1)
ASKED = Identity(SPEC.model_copy(update={"run": "run-1"}).dump(), 0, "berlin")


@pytest.fixture
def approvals(tmp_path: Path) -> Approvals:
    tmp_path.chmod(0o700)
    return Approvals(tmp_path / APPROVALS)


def waits(approvals: Approvals, identity: Identity = ASKED) -> str:
    """The digest under which a run waits."""
    with pytest.raises(AwaitsApproval):
        approvals.check(identity)
    return approvals.waiting()[-1].digest


def test_a_run_waits_until_its_owner_decides_and_until_the_owner_says_otherwise(approvals: Approvals) -> None:
    digest = waits(approvals)
    assert waits(approvals) == digest and len(approvals.waiting()) == 1
    assert approvals.waiting()[0].spec == ASKED.spec
    for approve in (True, False, True, False):
        approvals.decide(digest, approve=approve)
        assert approvals.waiting() == [] and approvals.decided() == [(digest, approve)]
        with nullcontext() if approve else pytest.raises(OwnerRefusal, match="has refused this run"):
            Approvals(approvals._folder).check(ASKED)  # another process


def test_what_the_owner_changes_is_no_other_run_and_settings_of_the_server_are(approvals: Approvals) -> None:
    """Another specification waits in `tests.attacks.test_lying_server_approvals`."""
    approvals.decide(waits(approvals), approve=True)
    for same in (ASKED, replace(ASKED, index=1, device="cpu", node_config='{"a": 1}')):
        approvals.check(same)
    assert waits(approvals, replace(ASKED, run_config='{"rate": 1}')) != approvals.decided()[0][0]


def test_what_waits_is_bounded_and_a_decision_pushes_nothing_out(approvals: Approvals) -> None:
    first = waits(approvals)
    approvals.decide(first, approve=True)
    folder = approvals._folder / "waiting"
    for number in range(MOST_WAITING + 5):
        with pytest.raises(AwaitsApproval):
            approvals.check(replace(ASKED, spec=f"{ASKED.spec}{number}"))
        for path in folder.iterdir():  # as if a second had gone by
            os.utime(path, (path.stat().st_mtime - 1,) * 2)
    left = [run.spec.removeprefix(ASKED.spec) for run in approvals.waiting()]
    assert left == [str(number) for number in range(5, MOST_WAITING + 5)]
    approvals.check(ASKED)


def test_a_specification_of_any_length_fills_no_disk(approvals: Approvals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 2 * len(ASKED.spec) + 200)
    with pytest.raises(LimitReached):
        approvals.check(replace(ASKED, spec=ASKED.spec + " " * 2 * len(ASKED.spec)))
    assert approvals.waiting() == []


def test_decisions_end_a_week_after_their_run(approvals: Approvals) -> None:
    digest = waits(approvals)
    approvals.decide(digest, approve=True)
    path = approvals._folder / "approved" / digest
    os.utime(path, (time.time() - UNUSED_S + 60,) * 2)
    approvals.check(ASKED)  # it is used: the week begins anew
    assert path.stat().st_mtime > time.time() - 60
    os.utime(path, (time.time() - UNUSED_S - 60,) * 2)
    waits(approvals)
    assert approvals.decided() == []


def test_files_are_the_owners_alone(approvals: Approvals) -> None:
    approvals.decide(waits(approvals), approve=True)
    waits(approvals, replace(ASKED, spec=ASKED.spec + " "))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in approvals._folder.glob("*/*")}
    assert modes == {0o600}


@pytest.mark.parametrize("digest", ["", "abc", "../approved/x", "A" * 64])
def test_part_of_a_digest_confirms_nothing(approvals: Approvals, digest: str) -> None:
    whole = waits(approvals)
    for each in (digest, whole[:32]):
        with pytest.raises(ConfigError, match="64 hexadecimal digits"):
            approvals.decide(each, approve=True)
    with pytest.raises(ConfigError, match="no run 0000"):
        approvals.decide("0" * 64, approve=True)


def test_a_file_that_was_changed_is_not_shown(approvals: Approvals) -> None:
    path = approvals._folder / "waiting" / waits(approvals)
    path.write_text(path.read_text().replace("fedavg", "fedsgd"))
    assert approvals.waiting() == []
    path.write_text("{")
    assert approvals.waiting() == []


def test_the_server_hears_one_word_and_asks_again(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    state = {"name": "berlin", "server": "x:1", "insecure": True, "state": str(tmp_path)}
    config = SiloStartConfig.model_validate({**state, "approve": "ask", "limits": {"samples": 1}})
    with patch.dict(os.environ, owner_environment(config)):
        with pytest.raises(AwaitsApproval) as caught:
            TrainerService(ASKED)
        said = refuse(caught.value)
        assert said == Refused(Refusal.APPROVAL) and said.code in PASSING
        assert "waits for its owner's approval" in explained("berlin", said)
        assert json.loads(owner_environment(config)["FEDSYNC_ALLOWED"])["approvals"] == str(tmp_path / APPROVALS)
        approvals = Approvals(tmp_path / APPROVALS)
        digest = approvals.waiting()[0].digest
        approvals.decide(digest, approve=True)
        service = TrainerService(ASKED)
        assert isinstance(exchange(service.ask, Describe())[0], Hello)
        approvals.decide(digest, approve=False)  # also in the middle of a run
        for request in (Describe(), AskModel()):
            assert exchange(service.ask, request)[0] == Refused(Refusal.OWNER)


def test_a_rollback_takes_no_round_from_those_that_an_owner_approved(tmp_path: Path) -> None:
    """A rollback makes a version, so an order of the last round trains a version beyond the number of rounds."""
    interval = "barrier.interval={kind: linear, interval_s: 1.0}"
    config = StrategyConfig.load("fsp", ["stop.rounds=20", "stop.seconds=null", "stop.target_accuracy=null", interval])
    entries = simulate(tmp_path, machines({"speed": 256.0}, {"speed": 64.0}), config).entries
    found = [action.order for entry in entries for action in entry.actions if isinstance(action, Dispatch)]
    assert max(order.base_version for order in found) > 20 - 1
    versions = RunSpec.of(config, None, 2).versions
    for order in found:
        OwnerPolicy(approvals="/x").begin(order, versions=versions)
    assert versions == 40 and SPEC.versions is None


@pytest.mark.parametrize(
    ("order", "allowed"),
    [
        (ORDER, True),
        (replace(ORDER, base_version=4), True),
        (replace(ORDER, base_version=5), False),
        (replace(ORDER, base_version=5, learning_rate=0.0), True),  # it scores the last version
        (replace(ORDER, base_version=5, subject=Subject.TUNED), True),  # the silo's own
    ],
)
def test_nothing_is_trained_beyond_the_rounds_that_were_confirmed(order: WorkOrder, allowed: bool) -> None:
    OwnerPolicy().begin(order, versions=5)
    with nullcontext() if allowed else pytest.raises(OwnerRefusal, match="the owner approved 5 versions"):
        OwnerPolicy(approvals="/x").begin(order, versions=5)
