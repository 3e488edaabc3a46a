"""A silo that spoils sums is left out without an operator; one that is not is not for long."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.cipher.encoding import quantization
from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Action, Attested, Commit, OperatorAnswered
from fedsync.core.events import OperatorAsked
from fedsync.core.journal import JournalEntry
from fedsync.core.operator.operator_commands import DropSilo, ReadmitSilo
from fedsync.core.orders import PooledFigures
from fedsync.flower.flower_strategy import FedSync
from fedsync.server.driver_extension import DriverExtension
from fedsync.server.operator_requests import PATIENCE, Suspects
from tests.e2e.deployed import SMALL
from tests.flower.cut_off_runs import TIMING, named_silos, with_keys
from tests.flower.grid import DirectGrid, trainers

pytestmark = pytest.mark.usefixtures("silos_here")

SILOS = named_silos("abcde")
QUICK = [SMALL, "local.steps=2", "local.batch_size=8"]
SURE = "it is the only silo that was in all invalid sums"


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Mapping[str, Any]:
    """A run whose silo d seals values that no silo may, always; its summary."""
    config = StrategyConfig.load("fedavg", [*QUICK, *overrides])
    honest, send = quantization.round_fixed, EncryptedReplica.send

    def lie(*given: Any) -> tuple[Any, int]:
        integers, clipped = honest(*given)
        return np.where(integers != 0, 2**22, 0).astype(np.int32), clipped

    def sends(self: EncryptedReplica, *given: Any) -> Any:
        monkeypatch.setattr(quantization, "round_fixed", lie if self._ring.own.name == "d" else honest)
        return send(self, *given)

    monkeypatch.setattr(EncryptedReplica, "send", sends)
    keys = with_keys(config, folder, monkeypatch, SILOS)
    return FedSync(config, SILOS, out=folder / "run", timing=TIMING, keys=keys).start(DirectGrid(5)).summary


@pytest.mark.parametrize(
    "cipher",
    [pytest.param("{kind: pad, members: 2}", marks=pytest.mark.full), "{kind: masked, inner: {kind: bfv, members: 2}}"],
)
@pytest.mark.slow
def test_a_silo_that_spoils_every_sum_is_left_out_and_the_run_learns(
    cipher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = run(tmp_path, monkeypatch, f"cipher={cipher}", "stop.rounds=30", "min_silos=2")
    (lost,) = summary["lost"]
    assert lost["silo"] == "d" and SURE in lost["why"]
    (spoiled,) = [note for note in summary["notes"] if "one silo made" in note]
    assert spoiled.endswith(": d") and int(spoiled.split()[0]) <= 18, "six questions, and silos tell a version later"
    models = {trainer._session.replica.model.tobytes() for trainer in trainers.values()}  # type: ignore[attr-defined]
    assert len(models) <= 2 and summary["accuracy"] is not None, "all but the one that is out have the newest"


def test_where_all_silos_are_needed_none_is_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = run(tmp_path, monkeypatch, "cipher={kind: pad}", "stop.rounds=4")
    assert summary["lost"] == []
    (note,) = [note for note in summary["notes"] if "one silo made" in note]
    assert note.endswith(": a, b, c, d, e")


class Nobody(DriverExtension):
    """An operator who asks nothing."""

    def __init__(self) -> None:
        self.seen: list[Action] = []

    def on_saved(self, entry: JournalEntry) -> None:
        self.seen += entry.actions


class Run:
    """Versions of the silos that are in, of which a rule says whether they are spoiled."""

    def __init__(self, count: int, suspects: Suspects) -> None:
        self.names = {f"s{index}" for index in range(count)}
        self.suspects, self.version, self.out, self.spoiled = suspects, 0, set[str](), 0

    def round(self, spoils: bool, late: Collection[str] = (), refused: str = "") -> None:
        """``late``: silos that are out, with an update that was under way; ``refused``: why nobody can be left out."""
        self.version += 1
        silos = sorted({*self.names - self.out, *late})
        actions: list[Action] = [Commit(self.version, {f"{silo}/1": 0.1 for silo in silos})]
        if spoils:
            self.spoiled += 1
            actions.append(Attested(PooledFigures(self.version, None, spoiled=tuple(silos))))
        self._settle(actions)
        for event in self.suspects.events(0.0):
            assert isinstance(event.question, DropSilo) or event.question.silo in self.out  # type: ignore[union-attr]
            name: str = event.question.silo  # type: ignore[union-attr]
            if not refused:
                (self.out.add if isinstance(event.question, DropSilo) else self.out.discard)(name)
            self._settle([OperatorAnswered(event.request, refused)])

    def _settle(self, actions: list[Action]) -> None:
        self.suspects.on_saved(JournalEntry(0.0, (), tuple(actions), ""))


@pytest.mark.parametrize("count", [3, 4, 10, 20])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_one_that_always_spoils_is_found_in_a_few_versions(count: int, place: int) -> None:
    operator = Nobody()
    run = Run(count, Suspects(operator))
    liar = sorted(run.names)[place]
    for _ in range(100):
        run.round(liar not in run.out)
    assert run.out == {liar}, "and nobody else is out in the end"
    assert run.spoiled <= 2 * int(np.ceil(np.log2(count))) + 1
    assert not [action for action in operator.seen if isinstance(action, OperatorAnswered)], "no operator asked"


def test_one_that_spoils_only_while_all_are_in_keeps_nobody_out() -> None:
    """It is never alone, and honest silos are out for as long as it behaves."""
    run = Run(8, Suspects(Nobody()))
    away = dict.fromkeys(run.names, 0)
    for _ in range(400):
        run.round(not run.out)
        for silo in run.out:
            away[silo] += 1
    assert run.spoiled <= 13, "a half is out for twice as long each time, up to 64 versions"
    assert max(away.values()) < 260, "halves take turns"


def test_one_that_comes_into_a_sum_of_before_is_no_proof_against_the_others() -> None:
    """Sums that were under way when a half was left out say nothing of it."""
    run = Run(4, Suspects(Nobody()))
    run.round(True)
    assert run.out == {"s0", "s1"}
    late = PooledFigures(1, None, spoiled=("s0", "s1", "s2", "s3"))
    run._settle([Attested(late)])
    assert not run.suspects.events(0.0)


def test_an_update_that_was_under_way_of_one_that_is_out_accuses_nobody() -> None:
    run = Run(3, Suspects(Nobody()))
    while run.out != {"s2"}:
        run.round("s2" not in run.out)
    run.round(True, late=["s2"])
    assert run.out == {"s2"}


def test_one_that_cannot_be_left_out_is_not_taken_for_out() -> None:
    """Else no later sum that it spoils would be looked at."""
    run = Run(4, Suspects(Nobody()))
    run.round(True, refused="2 silos would be left")
    assert not run.out
    run.round(True)
    assert run.out == {"s2", "s3"}


@pytest.mark.parametrize("refused", ["", "'s0' was not dropped"])
def test_one_that_an_operator_takes_in_again_is_not_taken_for_out(refused: str) -> None:
    """Else no other suspect would come back, and no later sum that is spoiled would be looked at."""
    run = Run(4, Suspects(Nobody()))
    run.round(True)
    assert run.out == {"s0", "s1"}
    asked = OperatorAsked(0.0, "17-of-the-operator", ReadmitSilo("s0"))
    run.suspects.on_saved(JournalEntry(0.0, (asked,), (OperatorAnswered(asked.request, refused),), ""))
    run.out -= {"s0"} if not refused else set()
    for _ in range(PATIENCE):
        run.round(False)
    assert run.out == set()


def test_silos_that_were_left_out_come_back_after_a_restart() -> None:
    answered = ["suspect-4-1:s1", "spoils-9-3:s2", "17-of-the-operator"]
    run = Run(4, Suspects(Nobody(), answered, ["s1", "s2", "s3"]))
    run.out = {"s1", "s2", "s3"}
    for _ in range(PATIENCE):
        run.round(False)
    assert run.out == {"s2", "s3"}, "one that spoils sums, and one that an operator dropped, stay out"


def test_one_that_was_found_guilty_stays_out_after_a_restart_although_it_was_a_suspect_before() -> None:
    answered = ["suspect-4-1:s0", "suspect-4-1:s1", "back-8-1:s0", "back-8-1:s1", "suspect-9-1:s1", "spoils-11-2:s0"]
    run = Run(4, Suspects(Nobody(), answered, ["s0", "s1"]))
    run.out = {"s0", "s1"}
    for _ in range(PATIENCE):
        run.round(False)
    assert run.out == {"s0"}
