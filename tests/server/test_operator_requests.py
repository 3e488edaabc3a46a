"""A run is steered from another process: asked by files, answered when a checkpoint has it, once."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from fedsync.common import codec
from fedsync.common.errors import ConfigError, RunError
from fedsync.common.locks import wait_until
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Dispatch, OperatorAnswered
from fedsync.core.events import OperatorAsked
from fedsync.core.journal import JOURNAL, JournalEntry
from fedsync.core.operator.operator_commands import ChangeStop, ContinueRun, DropSilo, OperatorQuestion, PauseRun
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.observe.replay import replay
from fedsync.observe.run_state import OPERATOR as FOLDER
from fedsync.server.operator_requests import MOST_WAITING, STALE_S, OperatorRequests, ask, listens, problem_with
from fedsync.server.timeouts import IdleTimeout
from fedsync.silo.protocol import Request, Train
from tests.flower.cut_off_runs import QUICK, Killed, keys_for, strategy_in
from tests.flower.grid import Answer, DirectGrid, unless

pytestmark = pytest.mark.usefixtures("silos_here")


Kind = TypeVar("Kind")
LOOK = "fedsync.server.operator_requests._LOOK_S"


@pytest.fixture(autouse=True)
def _looks_at_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOOK, 0.0)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[OperatorRequests]:
    made = OperatorRequests(tmp_path)
    yield made
    made.close()


def put(out: Path, question: OperatorQuestion | bytes, name: str = "1") -> Path:
    path = out / FOLDER / f"{name}.ask"
    path.write_bytes(question if isinstance(question, bytes) else codec.dumps(question, OperatorQuestion).encode())
    path.chmod(0o600)
    return path


def entry(*answers: OperatorAnswered) -> JournalEntry:
    return JournalEntry(0.0, (), answers, "")


def in_the_background(work: Callable[[], object]) -> tuple[threading.Thread, list[Exception]]:
    failed: list[Exception] = []

    def caught() -> None:
        try:
            work()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=caught, daemon=True)
    thread.start()
    return thread, failed


def heard(desk: OperatorRequests) -> OperatorAsked:
    """The next question; whoever asks does so from another thread."""
    end_s = time.monotonic() + 20
    while not (found := desk.events(3.0)):
        assert time.monotonic() < end_s
    return found[0]


def test_a_question_is_heard_once_and_answered_when_it_is_settled(tmp_path: Path, desk: OperatorRequests) -> None:
    thread, failed = in_the_background(lambda: ask(tmp_path, DropSilo("a")))
    event = heard(desk)
    assert (event.at_s, event.question, event.problem) == (3.0, DropSilo("a"), "")
    assert desk.events(4.0) == [], "it waits for its answer"
    assert thread.is_alive()
    desk.on_saved(entry(OperatorAnswered(event.request)))
    thread.join(20)
    assert failed == []
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["listening"]


def test_who_is_refused_hears_why(tmp_path: Path, desk: OperatorRequests) -> None:
    thread, failed = in_the_background(lambda: ask(tmp_path, PauseRun()))
    desk.on_saved(entry(OperatorAnswered(heard(desk).request, "the run is paused already")))
    thread.join(20)
    assert "the run is paused already" in str(failed[0])
    assert isinstance(failed[0], ConfigError)


def test_nobody_asks_where_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run is at work here"):
        ask(tmp_path, PauseRun())
    OperatorRequests(tmp_path).close()
    assert not listens(tmp_path)
    with pytest.raises(ConfigError, match="no run is at work here"):
        ask(tmp_path, PauseRun())


def test_a_question_that_is_not_answered_says_that_it_may_still_be(tmp_path: Path, desk: OperatorRequests) -> None:
    with pytest.raises(RunError, match="has not answered in 0 s; `fedsync watch` and the journal show"):
        ask(tmp_path, PauseRun(), wait_s=0.0)
    assert heard(desk).question == PauseRun()


def test_questions_are_bounded_and_those_that_are_left_are_read_next(
    tmp_path: Path, desk: OperatorRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOOK, 0.2)
    for number in range(MOST_WAITING + 4):
        put(tmp_path, ContinueRun(), f"{number:03}")
    with pytest.raises(ConfigError, match="16 questions wait"):
        ask(tmp_path, PauseRun())
    assert [event.request for event in desk.events(0.0)] == [f"{number:03}" for number in range(MOST_WAITING)]
    assert [len(desk.events(0.0)) for _ in range(2)] == [4, 0]


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"type":"Stop","reason":"x"}', b'{"type":"DropSilo","silo":"a","more":1}', b" " * 5000]
)
def test_what_is_no_question_is_refused_without_effect(tmp_path: Path, desk: OperatorRequests, content: bytes) -> None:
    path = put(tmp_path, content)
    assert desk.events(0.0) == []
    assert not path.exists()
    told = codec.loads(OperatorAnswered, (tmp_path / FOLDER / "1.answer").read_bytes())
    assert (told.request, told.refused[:27]) == ("1", "this request cannot be read")


@pytest.mark.parametrize("rule", [ChangeStop(seconds=float("nan")), ChangeStop(rounds=0), ChangeStop()])
def test_a_number_that_no_rule_has_is_refused_first(tmp_path: Path, desk: OperatorRequests, rule: ChangeStop) -> None:
    with pytest.raises(ConfigError, match="Nothing was changed"):
        ask(tmp_path, rule, wait_s=0.0)
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["listening"]


def test_a_file_that_others_may_write_or_a_link_is_no_question(tmp_path: Path, desk: OperatorRequests) -> None:
    put(tmp_path, PauseRun()).chmod(0o666)
    assert desk.events(0.0) == []
    (tmp_path / "elsewhere").write_text(codec.dumps(PauseRun(), OperatorQuestion))
    (tmp_path / FOLDER / "2.ask").symlink_to(tmp_path / "elsewhere")
    assert desk.events(0.0) == []


def test_the_folder_is_the_users_alone(tmp_path: Path, desk: OperatorRequests) -> None:
    folder = tmp_path / FOLDER
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="open to others"):
        ask(tmp_path, PauseRun())
    folder.chmod(0o700)


def test_an_old_question_that_nobody_heard_is_refused(tmp_path: Path, desk: OperatorRequests) -> None:
    old_s = time.time() - STALE_S - 5
    os.utime(put(tmp_path, PauseRun()), (old_s, old_s))
    (event,) = desk.events(0.0)
    assert "nobody was there to hear it" in event.problem


def test_rules_are_checked_as_those_of_a_strategy_file_are() -> None:
    config = StrategyConfig.load("fedavg", QUICK)
    assert problem_with(config, ChangeStop(rounds=3, target_accuracy=0.9)) == ""
    assert "a share of right answers" in problem_with(config, ChangeStop(target_accuracy=7.0))
    blind = StrategyConfig.load("fedavg", [*QUICK, "fraction_evaluate=0"])
    assert "fraction_evaluate 0" in problem_with(blind, ChangeStop(target_accuracy=0.9))


def putting(out: Path, version: int, *questions: OperatorQuestion) -> Answer:
    """A silo that is honest; when it is to train from this version, its server's user asks for something."""

    def heard(request: Request) -> None:
        if isinstance(request, Train) and request.order.base_version == version:
            for number, question in enumerate(questions):
                put(out, question, f"{version}-{number}")

    return unless(heard)


def questions_in(out: Path) -> list[OperatorQuestion]:
    return [
        event.question for each in replay(out / JOURNAL) for event in each.events if isinstance(event, OperatorAsked)
    ]


def actions_of(kind: type[Kind], out: Path) -> list[Kind]:
    """Those in the journal, which replays."""
    return [action for each in replay(out / JOURNAL) for action in each.actions if isinstance(action, kind)]


def ordered_from(version: int, out: Path) -> set[str]:
    """Silos that had an order from this version."""
    return {action.silo for action in actions_of(Dispatch, out) if action.order.base_version == version}


def test_a_run_is_steered_and_its_journal_replays(tmp_path: Path) -> None:
    grid = DirectGrid(3, {1: putting(tmp_path, 1, DropSilo("c"), ChangeStop(rounds=3))})
    summary = strategy_in(tmp_path).start(grid).summary
    assert questions_in(tmp_path) == [DropSilo("c"), ChangeStop(rounds=3)]
    assert (summary["rounds"], summary["stopped_by"]) == (3, "3 rounds done")
    assert summary["notes"][0].startswith("the operator dropped c, ")
    assert ordered_from(2, tmp_path) == {"a", "b"}


def test_a_paused_run_survives_its_servers_death_and_what_was_asked_is_not_asked_again(tmp_path: Path) -> None:
    def dies(desk: OperatorRequests, told: JournalEntry) -> None:
        if any(isinstance(action, OperatorAnswered) for action in told.actions):
            raise Killed  # the checkpoint is written, and nobody was answered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OperatorRequests, "on_saved", dies)
        patch.setattr(OperatorRequests, "close", lambda desk: desk._lock.close())
        with pytest.raises(Killed):
            strategy_in(tmp_path).start(DirectGrid(3, {1: putting(tmp_path, 1, DropSilo("c"))}))
        assert (tmp_path / FOLDER / "1-0.ask").exists()

    strategy_in(tmp_path, resume=True).start(DirectGrid(3))
    assert questions_in(tmp_path) == [DropSilo("c"), DropSilo("c")]
    first, again = actions_of(OperatorAnswered, tmp_path)
    assert (first, again) == (OperatorAnswered("1-0"), OperatorAnswered("1-0", again=True)), (
        "not refused as out already"
    )
    assert codec.loads(OperatorAnswered, (tmp_path / FOLDER / "1-0.answer").read_bytes()) == again
    assert ordered_from(3, tmp_path) == {"a", "b"}, "c is out after it, too"


def test_a_server_that_dies_while_it_drops_a_silo_commits_what_waited_for_this_silo(tmp_path: Path) -> None:
    """No checkpoint may have the version without its model."""
    made, commits = list[int](), PlainAggregator.commit

    def never(request: Request) -> bool:
        if asked := isinstance(request, Train) and request.order.base_version == 1:
            put(tmp_path, DropSilo("c"))
        return asked

    def dies(aggregator: PlainAggregator, commit: Commit) -> None:
        if commit.version == 2:
            raise Killed
        commits(aggregator, commit)

    def counted(aggregator: PlainAggregator, commit: Commit) -> None:
        made.append(commit.version)
        commits(aggregator, commit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainAggregator, "commit", dies)
        patch.setattr(OperatorRequests, "close", lambda desk: desk._lock.close())
        with pytest.raises(Killed):
            strategy_in(tmp_path).start(DirectGrid(3, {3: unless(never)}))
        patch.setattr(PlainAggregator, "commit", counted)
        strategy_in(tmp_path, resume=True).start(DirectGrid(3))
    assert made == [2, 3, 4]


def test_a_run_that_is_paused_waits_however_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is in work, which would otherwise count as a run that nobody works for."""
    answered, counted, looks = tmp_path / FOLDER / "1-0.answer", list[float](), list[float]()
    events = OperatorRequests.events

    def look(desk: OperatorRequests, now_s: float) -> list[OperatorAsked]:
        looks.extend([now_s] * answered.exists())
        return events(desk, now_s)

    monkeypatch.setattr(OperatorRequests, "events", look)
    monkeypatch.setattr(IdleTimeout, "check", lambda vigil, now_s, here: counted.extend([now_s] * answered.exists()))
    run, grid = strategy_in(tmp_path), DirectGrid(3, {1: putting(tmp_path, 1, PauseRun())})
    thread, failed = in_the_background(lambda: run.start(grid))
    assert wait_until(lambda: len(looks) >= 15 or not thread.is_alive(), 120, 0.01)
    assert thread.is_alive(), failed
    assert counted == []
    ask(tmp_path, ContinueRun())
    thread.join(120)
    assert failed == []
    assert run.run_summary is not None
    assert run.run_summary["rounds"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cipher", "why"),
    [("{kind: masked}", "2 silos would be left, and silos decrypt no sum"), ("{kind: bfv, members: 2}", "")],
)
def test_an_encrypted_run_goes_on_without_a_silo_as_far_as_sums_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cipher: str, why: str
) -> None:
    sealed, out = f"cipher={cipher}", tmp_path / "run"
    run = strategy_in(out, sealed, keys=keys_for(tmp_path, monkeypatch, sealed))
    summary = run.start(DirectGrid(3, {1: putting(out, 1, DropSilo("c"))})).summary
    (told,) = actions_of(OperatorAnswered, out)
    assert told.refused.startswith(why)
    assert bool(told.refused) == bool(why)
    assert (summary["rounds"], summary["stopped_by"]) == (4, "4 rounds done")
    assert ordered_from(3, out) == ({"a", "b", "c"} if why else {"a", "b"})


def test_a_question_that_comes_as_the_run_ends_is_answered(
    tmp_path: Path, desk: OperatorRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks at the folder."""
    monkeypatch.setattr(LOOK, 60.0)
    assert desk.events(1.0) == []
    put(tmp_path, PauseRun())
    assert desk.events(1.0) == [], "it is not looked at in each turn"
    desk.close()
    assert "the run is over" in (tmp_path / FOLDER / "1.answer").read_text()
