"""A run on the terminal, while it goes on and afterwards."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.common.locks import taken
from fedsync.common.run_claim import RUN_LOCK
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import OperatorAsked, SiloLost
from fedsync.core.journal import JOURNAL, JournalEntry, JournalWriter
from fedsync.core.operator.operator_commands import ChangeStop, DropSilo, PauseRun, ReadmitSilo
from fedsync.extras.page.run_view import RunView
from fedsync.extras.watch.live import MOST_ROWS, LiveRun, watch
from fedsync.observe.run_state import LISTENING, MISSING, OPERATOR
from fedsync.observe.terminal import Terminal
from tests.core.make import answer, joined, orders, policies
from tests.observe.runs import two_silos


def text(run: LiveRun, quiet_s: float = 0.0) -> str:
    console = Terminal(width=120)
    with console.capture() as capture:
        console.print(run.view(quiet_s))
    return capture.get()


def row(run: LiveRun, silo: str, quiet_s: float = 0.0) -> list[str]:
    return next(line.split() for line in text(run, quiet_s).splitlines() if line.strip().startswith(f"{silo} "))


def header(runtime: str = "local") -> dict[str, object]:
    return {"runtime": runtime, "config": {"name": "mine", "stop": {"rounds": 4, "seconds": None}}}


def half_way(runtime: str = "local") -> LiveRun:
    """BSP of a and b, orders of 32 samples at 100 samples/s. Round 1: a comes after 0.5 s, b after 1 s; then a again.

    So an order trains for 0.32 s, and of a's there is 0.18 s of overhead. At 1.5 s b is still at its second one.
    """
    run = LiveRun(header(runtime))
    coordinator = Coordinator(policies())
    first = coordinator.handle(joined("a", "b"), 0.0)
    work = orders(first)
    run.add(first)
    run.add(coordinator.handle([answer("a", work["a"], 0.5)], 0.5))
    second = coordinator.handle([answer("b", work["b"], 1.0)], 1.0)
    run.add(second)
    run.add(coordinator.handle([answer("a", orders(second)["a"], 1.5)], 1.5))
    return run


def test_the_headline_counts_and_estimates_and_rows_say_who_waits_and_who_works() -> None:
    """One of four rounds took 1 s, so three more should take 3 s.

    Of 1.5 s, a was busy for 0.5 + 0.5 and waited for 0.5, a third; b was busy all the time.
    """
    run = half_way()
    assert " ".join(text(run).split()).startswith("mine (local) round 1/4 loss 1.0000 accuracy - 1.5 s ETA 3 s")
    assert row(run, "a") == ["a", "idle", "2", "8", "100.0", "-", "33.3%"]
    # b's first order took 0.32 s of training and 0.68 s besides: the second, sent at 1 s, should end at 2 s.
    assert row(run, "b") == ["b", "working", "2", "8", "100.0", "0.5", "0.0%"]
    run.add(JournalEntry(1.6, (SiloLost(1.6, "b", "gone"),), (), ""))
    assert row(run, "b")[1] == "gone"


def test_what_the_operator_did_is_in_the_table_and_in_the_books() -> None:
    run, coordinator = LiveRun(header()), Coordinator(policies())
    asked = {1.0: DropSilo("b"), 2.0: ChangeStop(rounds=9), 3.0: PauseRun(), 4.0: PauseRun()}
    run.add(coordinator.handle(joined("a", "b"), 0.0))
    for at_s, question in asked.items():
        run.add(coordinator.handle([OperatorAsked(at_s, str(at_s), question)], at_s))
    assert "round 0/9" in text(run)
    assert "paused by the operator" in text(run)
    assert row(run, "b")[1] == "dropped"
    assert run.ledger.silos["b"].order is None, "it is not busy until the end of the run"
    assert (run.ledger.silos["b"].failures, run.ledger.silos["b"].taken) == (0, 1), "it did not fail"
    assert row(run, "b")[2] == "1", "of its orders"
    assert [silo["failures"] for silo in run.ledger.summary()["silos"]] == [0, 0]
    assert [mark.refused for mark in run.steered.marks] == ["", "", "", "the run is paused already"]
    assert [(each.silo, each.wanted) for each in run.ledger.missing()] == [("b", True)]
    run.add(coordinator.handle([OperatorAsked(5.0, "5.0", ReadmitSilo("b"))], 5.0))
    assert run.ledger.missing() == []


def test_nobody_works_for_a_run_that_was_cut_off_until_it_is_resumed() -> None:
    run = half_way()
    run.note_end(summary=False, gone=True)
    assert row(run, "b", quiet_s=0.3)[1:] == ["cut", "off", "2", "8", "100.0", "-", "0.0%"]
    assert row(run, "a")[1] == "idle" and "cut off" in text(run)
    run.note_end(summary=False, gone=False)
    assert row(run, "b", quiet_s=0.3)[1] == "working" and row(run, "b", quiet_s=0.3)[5] == "0.2"


def test_time_passes_between_entries_of_a_real_run_and_not_of_a_virtual_one() -> None:
    assert row(half_way("local"), "b", quiet_s=0.3)[5] == "0.2"
    assert row(half_way("local"), "b", quiet_s=9.0)[5] == "0.0"
    assert row(half_way("virtual"), "b", quiet_s=0.3)[5] == "0.5"
    assert "nothing new for 12 s" in " ".join(text(half_way(), quiet_s=12.0).split())


def test_of_very_many_silos_some_are_shown() -> None:
    run = LiveRun(header())
    names = [f"s{i}" for i in range(MOST_ROWS + 3)]
    run.add(JournalEntry(0.0, tuple(joined(*names)), (), ""))
    assert "and 3 more" in text(run)


def nothing_comes(seconds: float) -> None:
    pytest.fail("nothing more comes")


def watched(folder: Path, pause: Callable[[float], None] = nothing_comes, terminal: bool | None = None) -> str:
    console = Terminal(width=160, force_terminal=terminal)
    with console.capture() as capture:
        watch(folder, console, wall=lambda: 0.0, pause=pause)
    return capture.get()


def test_a_finished_run_is_shown_once_and_without_a_journal_its_summary(tmp_path: Path) -> None:
    two_silos(tmp_path)
    output = watched(tmp_path)
    assert "stopped: 3 rounds done" in " ".join(output.split())
    assert "60.0%" in output, "a waits 4.5 s of 7.5 s"
    (tmp_path / "journal.jsonl").unlink()
    assert "who waited for whom" in watched(tmp_path)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(ConfigError, match="no run"):
        watched(tmp_path)


def test_a_run_is_followed_to_its_end(tmp_path: Path) -> None:
    done = two_silos(tmp_path / "run")
    lines = done.text.splitlines(keepends=True)
    live, pauses = tmp_path / "live", list[float]()
    live.mkdir()
    (live / "journal.jsonl").write_text(lines[0])

    def grow(seconds: float) -> None:
        pauses.append(seconds)
        with (live / "journal.jsonl").open("a") as file:
            file.write(lines[len(pauses)])

    with taken(live / RUN_LOCK):
        output = watched(live, grow, terminal=True)
    assert len(pauses) == len(lines) - 1
    assert "nothing has happened yet" in output
    assert "stopped: 3 rounds done" in output


def test_a_run_that_failed_and_left_a_summary_ends_the_watch(tmp_path: Path) -> None:
    done = two_silos(tmp_path)
    kept = [entry.at_s < 7.5 for entry in done.entries]
    (tmp_path / "journal.jsonl").write_text("".join(done.text.splitlines(keepends=True)[: 1 + sum(kept)]))
    output = watched(tmp_path)
    assert "round 2/3" in output and "cut off" in output


@pytest.mark.parametrize("runtime", ["local", "deployment", "virtual"])
def test_a_run_whose_process_was_killed_is_cut_off_and_says_how_it_goes_on(tmp_path: Path, runtime: str) -> None:
    journal = JournalWriter(tmp_path / JOURNAL, header(runtime))
    coordinator = Coordinator(policies())
    journal.append(coordinator.handle(joined("a", "b"), 0.0))
    journal.append(coordinator.handle([OperatorAsked(1.0, "1", PauseRun())], 1.0))
    journal.close()
    console = Terminal(width=160, force_terminal=True)

    class Enough(Exception):
        pass

    def seen() -> str:
        def once(seconds: float) -> None:
            raise Enough

        with console.capture() as capture, pytest.raises(Enough):
            watch(tmp_path, console, pause=once)
        return capture.get()

    if runtime == "deployment":
        (tmp_path / "run.json").write_text("{}")
    desk = tmp_path / OPERATOR / LISTENING
    desk.parent.mkdir(mode=0o700)
    with taken(tmp_path / RUN_LOCK if runtime == "virtual" else desk):
        assert "paused by the operator" in seen()
        assert RunView(tmp_path).look()["state"] == "paused"
    ended = watched(tmp_path, terminal=True) if runtime == "virtual" else seen()
    page = RunView(tmp_path)
    look = page.look()
    # Both silos had an order when the process was killed.
    assert "cut off" in ended and "working" not in ended
    assert look["state"] == "cut off" and {silo["state"] for silo in look["silos"]} == {"cut off"}
    assert ("Run it again" if runtime == "virtual" else str(tmp_path)) in str(look["why"])
    page._news_s -= 60.0
    assert page.look()["now_s"] == 1.0, "its clock stands"


@pytest.mark.parametrize(
    ("runtime", "file", "way"),
    [
        ("local", None, "`fedsync run --resume {}`"),
        ("deployment", '{"kind": "run", "message": "stopped by the operator"}', "`fedsync server run --resume {} "),
        ("flower", None, "Run it again"),
    ],
)
def test_a_watch_without_a_terminal_ends_with_a_run_that_nobody_resumes(
    tmp_path: Path, runtime: str, file: str | None, way: str
) -> None:
    journal = JournalWriter(tmp_path / JOURNAL, header(runtime))
    journal.append(Coordinator(policies()).handle(joined("a", "b"), 0.0))
    journal.close()
    (tmp_path / OPERATOR).mkdir(mode=0o700)
    (tmp_path / OPERATOR / LISTENING).touch()
    if file is not None:
        (tmp_path / "run.json").write_text("{}")
        (tmp_path / "error.json").write_text(file)
    assert way.format(tmp_path) in watched(tmp_path).replace("\n", "")


def test_a_run_that_has_not_begun_says_whom_it_waits_for(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    pauses = list[float]()

    def go_on(seconds: float) -> None:
        pauses.append(seconds)
        log = tmp_path / "run.log"
        if len(pauses) == 1:
            log.write_text(f"2026-01-01T12:00:00Z INFO {MISSING}: berlin answers APPROVAL\n2026 INFO \x1b[2J\n")
        elif len(pauses) == 2:
            assert "berlin answers APPROVAL" in str(RunView(tmp_path).look()["why"])
        else:
            (tmp_path / "error.json").write_text('{"kind": "run", "message": "no silo sent a model"}')

    output = " ".join(watched(tmp_path, go_on).split())
    assert len(pauses) == 3 and "its server process has not started" in output
    assert f"the run has not begun: 2026-01-01T12:00:00Z INFO {MISSING}: berlin answers APPROVAL" in output
    assert output.endswith("the run failed before it began: no silo sent a model") and "\x1b" not in output
