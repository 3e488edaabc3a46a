"""Why a silo had no order: each reason by itself, which counts of several, and how the reports show it."""

from pathlib import Path

import pytest

from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Event, OperatorAsked, SiloLost, TimerFired, WorkFailed
from fedsync.core.journal import JOURNAL, JournalEntry, JournalWriter
from fedsync.core.operator.operator_commands import ContinueRun, DropSilo, OperatorQuestion, PauseRun, ReadmitSilo
from fedsync.core.orders import Presence
from fedsync.core.stopping import StopRules
from fedsync.extras.page.run_view import RunView
from fedsync.extras.report.data import read_run
from fedsync.extras.report.drawing.timeline import timeline
from fedsync.extras.watch.absences import AWAY, DROPPED, GONE, PAUSED, WAITING, Absences, Span, pieces
from fedsync.policies.barrier.kinds.ssp import Asp
from tests.core.make import answer, joined, orders, policies


class Run:
    """ASP of a, b and c, whose events the test makes up."""

    def __init__(self) -> None:
        self.coordinator = Coordinator(policies(barrier=Asp(), stop=StopRules(rounds=99)))
        self.entries: list[JournalEntry] = []
        self.absences = Absences()

    def at(self, at_s: float, *events: Event) -> JournalEntry:
        self.entries.append(self.coordinator.handle(events or [TimerFired(at_s)], at_s))
        self.absences.add(self.entries[-1])
        return self.entries[-1]

    def ask(self, at_s: float, question: OperatorQuestion) -> None:
        self.at(at_s, OperatorAsked(at_s, f"{at_s}", question))

    def seen(self, silo: str, now_s: float) -> list[Span]:
        return [one for one in pieces(0.0, now_s, self.absences.of(silo, now_s)) if one.why != WAITING]

    def write(self, folder: Path) -> Path:
        header = {"runtime": "local", "config": {"name": "mine"}, "model_bytes": 40}
        writer = JournalWriter(folder / JOURNAL, header)
        for entry in self.entries:
            writer.append(entry)
        writer.close()
        return folder


def test_what_is_not_absence_is_waiting_and_all_of_the_time_is_told() -> None:
    assert pieces(1.0, 1.0, [Span(0.0, 9.0, GONE)]) == []
    assert pieces(1.0, 4.0, []) == [Span(1.0, 4.0, WAITING)]
    found = pieces(
        1.0, 9.0, [Span(0.0, 2.0, GONE), Span(5.0, 6.0, PAUSED), Span(6.0, 7.0, PAUSED), Span(8.0, 20.0, AWAY)]
    )
    assert found == [
        *(Span(1.0, 2.0, GONE), Span(2.0, 5.0, WAITING), Span(5.0, 7.0, PAUSED)),
        *(Span(7.0, 8.0, WAITING), Span(8.0, 9.0, AWAY)),
    ]


def test_of_several_reasons_the_operators_drop_counts_first_and_a_pause_last() -> None:
    all_day = [Span(0.0, 9.0, why) for why in (PAUSED, GONE, AWAY, DROPPED)]
    assert [pieces(0.0, 9.0, all_day[:count])[0].why for count in (1, 2, 3, 4)] == [PAUSED, GONE, AWAY, DROPPED]


def test_a_pause_is_everybodys_and_a_drop_one_silos() -> None:
    run = Run()
    run.at(0.0, *joined("a", "b"))
    run.ask(2.0, PauseRun())
    run.ask(3.0, PauseRun())  # refused: it is paused
    run.ask(5.0, ContinueRun())
    run.ask(6.0, DropSilo("b"))
    run.ask(8.0, ReadmitSilo("b"))
    run.ask(9.0, DropSilo("b"))
    assert run.seen("a", 10.0) == [Span(2.0, 5.0, PAUSED)]
    assert run.seen("b", 10.0) == [Span(2.0, 5.0, PAUSED), Span(6.0, 8.0, DROPPED), Span(9.0, 10.0, DROPPED)]
    assert [run.absences.why(name, 10.0) for name in "ab"] == [WAITING, DROPPED]
    run.ask(10.0, PauseRun())
    assert run.absences.why("a", 10.0) == PAUSED


def test_a_silo_is_not_connected_until_it_joins_and_while_it_is_lost() -> None:
    run = Run()
    run.at(0.0, *joined("a"))
    run.at(3.0, *joined("b", at_s=3.0))
    run.at(5.0, SiloLost(5.0, "b", "its node is gone"))
    run.at(6.0, SiloLost(6.0, "b", "again"))
    run.at(7.0, *joined("b", at_s=7.0))
    run.at(8.0, *joined("b", at_s=8.0))
    run.at(9.0, SiloLost(9.0, "b", "its node is gone"))
    assert run.seen("b", 10.0) == [Span(0.0, 3.0, GONE), Span(5.0, 7.0, GONE), Span(9.0, 10.0, GONE)]
    assert run.absences.why("b", 10.0) == GONE and run.seen("a", 10.0) == []


def test_a_silo_is_away_from_the_end_of_its_window_to_the_next() -> None:
    """There for 4 s of 10. It tells anew with its update, which comes as its window is over. Then it signs off."""
    run = Run()
    work = orders(run.at(0.0, *joined("c", presence=Presence(4.0, 10.0))))
    run.at(4.5, answer("c", work["c"], 4.5, presence=Presence(0.0, 5.5)))
    assert run.absences.why("c", 4.6) == AWAY
    run.at(5.0, SiloLost(5.0, "c", "signed off"))
    assert run.seen("c", 9.0) == [Span(4.0, 9.0, AWAY)]
    assert run.absences.why("c", 9.0) == AWAY
    assert run.seen("c", 11.0) == [Span(4.0, 10.0, AWAY), Span(10.0, 11.0, GONE)], "it should be back"
    run.at(12.0, *joined("c", at_s=12.0, presence=Presence(2.0, 8.0)))
    assert run.seen("c", 13.0) == [Span(4.0, 10.0, AWAY), Span(10.0, 12.0, GONE)]
    assert run.absences.why("c", 15.0) == AWAY, "by what is known"


def test_a_silo_that_says_that_it_is_away_is_and_one_that_is_lost_in_its_window_is_not() -> None:
    run = Run()
    work = orders(run.at(0.0, *joined("b"), *joined("c", presence=Presence(50.0, 99.0))))
    run.at(1.0, WorkFailed(1.0, "b", work["b"].update_id, "AWAY", back_s=20.0))
    run.at(2.0, SiloLost(2.0, "c", "its node is gone"))
    assert run.seen("b", 5.0) == [Span(1.0, 5.0, AWAY)]
    assert run.seen("c", 60.0) == [Span(2.0, 60.0, GONE)]


def test_old_absences_are_let_go_of_where_only_the_newest_are_shown() -> None:
    absences, run = Absences(keep=2), Run()
    run.at(0.0, *joined("a", "b"))
    for at_s in range(1, 9, 2):
        run.ask(float(at_s), DropSilo("b"))
        run.ask(at_s + 1.0, ReadmitSilo("b"))
    for entry in run.entries:
        absences.add(entry)
    assert absences.of("b", 9.0) == [Span(5.0, 6.0, DROPPED), Span(7.0, 8.0, DROPPED)]


@pytest.fixture
def eventful() -> Run:
    """The first orders are given at 2 s; a's ends at 3 s, and the run is paused by then, from 2.5 to 8 s."""
    run = Run()
    work = orders(run.at(2.0, *joined("a", "b", "c", at_s=2.0, presence=None)))
    run.ask(2.5, PauseRun())
    run.at(3.0, *(answer(name, work[name], 3.0) for name in "ab"), SiloLost(3.0, "c", "its node is gone"))
    run.ask(4.0, DropSilo("b"))
    run.at(7.0)
    return run


def test_the_report_draws_and_says_them(eventful: Run, tmp_path: Path) -> None:
    """Orders end at 3 s, which is 1 s after training began; the report ends with the last of them: nothing is left."""
    eventful.ask(7.5, ReadmitSilo("b"))
    work = orders(eventful.at(8.0, OperatorAsked(8.0, "on", ContinueRun())))
    eventful.at(9.0, answer("a", work["a"], 9.0))
    picture = timeline(read_run(eventful.write(tmp_path)))
    assert picture is not None
    # Until 9 s: a is paused from 3 to 8; b from 3 to 4 and from 7.5 to 8, and dropped between; c is gone from 3 on.
    assert picture.alt.endswith(" Of that 6.5 s paused, 3.5 s dropped, 6.0 s not connected.")
    legend = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert legend[3:-1] == ["waiting", "paused", "dropped", "not connected"]
    assert "Away" not in picture.caption


def test_the_page_gets_them(eventful: Run, tmp_path: Path) -> None:
    look = RunView(eventful.write(tmp_path)).look()
    silos = {silo["name"]: silo for silo in look["silos"]}
    assert [silos[name]["state"] for name in "abc"] == ["idle", "dropped", "gone"]
    assert silos["a"]["absences"] == [[0.0, 2.0, GONE], [2.5, pytest.approx(7.0, abs=1.0), PAUSED]]
    assert [why for _, _, why in silos["b"]["absences"]] == [GONE, PAUSED, DROPPED]
    assert [why for _, _, why in silos["c"]["absences"]] == [GONE, PAUSED, GONE]


def test_a_silo_whose_window_is_over_is_away_in_tables_unless_it_works(tmp_path: Path) -> None:
    run = Run()
    work = orders(run.at(0.0, *joined("a"), *joined("c", presence=Presence(4.0, 1000.0))))
    assert RunView(run.write(tmp_path)).look()["silos"][1]["state"] == "working"
    run.at(5.0, answer("c", work["c"], 5.0, presence=Presence(0.0, 995.0)))
    assert RunView(run.write(tmp_path)).look()["silos"][1]["state"] == "away"
