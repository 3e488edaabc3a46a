"""Plain lines for people: one a round, none twice, none left out."""

import io
import logging

import pytest

from fedsync.core.coordinator import Coordinator
from fedsync.core.events import OperatorAsked
from fedsync.core.operator.operator_commands import ChangeStop, ContinueRun, DropSilo, PauseRun
from fedsync.core.stopping import StopRules
from fedsync.flower import result
from fedsync.observe.ledger import Ledger
from fedsync.observe.progress import RunProgress
from fedsync.observe.rounds import Round, Rounds, SiloShare
from fedsync.observe.terminal import Terminal
from tests.core.make import answer, joined, orders, policies


def row(version: int) -> Round:
    share = SiloShare(8, 4, 32, compute_s=1.5, overhead_s=0.5, wait_s=0.0)
    return Round(version, at_s=2.0 * version, seconds=2.0, loss=1.0, silos={"a": share})


def lines_of(versions: list[int], before: int = 0) -> list[str]:
    """Of a run that goes on behind this many rounds, the same for each version."""
    text = io.StringIO()
    ledger = Ledger(rounds=Rounds(row(version) for version in range(1, before + 1)))
    with RunProgress(Terminal(file=text, width=200), "mine", rounds=9) as progress:
        progress.follow(ledger)
        for version in versions:
            ledger.rounds.append(row(version))
            progress.follow(ledger)
            progress.follow(ledger)
    return text.getvalue().splitlines()


def test_each_round_gets_one_line() -> None:
    one, two = lines_of([1, 2])
    assert "mine" in one
    assert "1/9" in one
    assert "2/9" in two
    assert "slowest a (2.0 s)" in one


def test_a_resumed_run_shows_what_is_new_and_expects_the_rest_to_take_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round in 60 s, and five to go."""
    times = iter([100.0, 160.0])
    monkeypatch.setattr("fedsync.observe.progress.time.monotonic", lambda: next(times, 160.0))
    (line,) = lines_of([4], before=3)
    assert "4/9" in line and "ETA 5:00" in line


def test_the_start_of_processes_is_not_taken_for_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The display begins 90 s before the first silo joins, and the first round takes 2 s: eight more take 16 s."""
    now_s = 10.0
    monkeypatch.setattr("fedsync.observe.progress.time.monotonic", lambda: now_s)
    text, ledger = io.StringIO(), Ledger()
    progress = RunProgress(Terminal(file=text, width=200), "mine", rounds=9)
    now_s = 100.0
    progress.follow(ledger)
    now_s = 102.0
    ledger.rounds.append(row(1))
    progress.follow(ledger)
    assert "ETA 0:16" in text.getvalue()


def test_a_version_that_was_rolled_back_to_is_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions 2 and 4 are rollbacks: nine rounds are nine commits, and one round in 60 s leaves eight to go."""
    times = iter([100.0, 160.0])
    monkeypatch.setattr("fedsync.observe.progress.time.monotonic", lambda: next(times, 160.0))
    lines = lines_of([3, 5, 6])
    assert [line.split()[2] for line in lines] == ["1/9", "2/9", "3/9"]
    assert "ETA 8:00" in lines[0]


@pytest.mark.parametrize("terminal", [False, True])
def test_what_an_operator_did_is_told_and_the_rule_that_was_changed_is_gone_by(
    terminal: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result.logger, "disabled", False)
    caplog.set_level(logging.INFO, logger=result.logger.name)
    text, ledger, coordinator = io.StringIO(), Ledger(), Coordinator(policies(stop=StopRules(rounds=9)))
    asked = [PauseRun(), PauseRun(), ContinueRun(), ChangeStop(rounds=20), DropSilo("c")]
    console = Terminal(file=text, width=200, force_terminal=terminal)
    with RunProgress(console, "mine", rounds=9) as progress:
        log = result.RoundLog(9)
        first = coordinator.handle(joined("a", "b", "c"), 0.0)
        entries = [first, *(coordinator.handle([OperatorAsked(t, str(t), q)], t) for t, q in enumerate(asked, 1))]
        done = [answer(name, order, 6.0) for name, order in orders(first).items() if name != "c"]
        for entry in [*entries, coordinator.handle(done, 6.0)]:
            ledger.add(entry)
            progress.follow(ledger)
            log.follow(ledger)
    shown = text.getvalue()
    for words in (
        "the operator paused the run, 1.0 s after the server began",
        "the operator may not pause the run: the run is paused already, 2.0 s",
        "the operator continued the run, 3.0 s",
        "the operator changed when the run ends: rounds 20, 4.0 s",
        "the operator dropped c, 5.0 s",
        "1/20",
    ):
        assert shown.count(words) == 1 or (terminal and words == "1/20" and words in shown), words
    assert "[ROUND 1/20]" in caplog.text
