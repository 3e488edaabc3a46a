"""The books of a run that lasts for weeks: as large as ever, and they say what books that keep all say."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsync.core.actions import Note
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import SiloLost
from fedsync.core.journal import JournalEntry
from fedsync.core.stopping import StopRules
from fedsync.extras.exporters.csv_exporter import CsvExporter
from fedsync.observe import ledger as books
from fedsync.observe import rounds as book_rounds
from fedsync.observe.ledger import Ledger
from fedsync.observe.recorder import Recorder, RoundFeed
from fedsync.observe.rounds import Round, Rounds
from fedsync.policies.barrier.kinds.ssp import Asp
from tests.core.make import answer, begin, joined, orders, policies, scored

KEEP = 10


def entries(commits: int) -> Iterator[JournalEntry]:
    """Two silos that go on by themselves and tell something new in each order; b leaves and comes back now and then."""
    first = Coordinator(policies(barrier=Asp(), stop=StopRules()))
    yield first.handle(joined("a", "b"), 0.0)
    coordinator, work = begin("a", "b", barrier=Asp(), stop=StopRules())
    now_s = 0.0
    for number in range(commits):
        now_s += 1.0
        name = "ab"[number % 2]
        if number % 50 == 37:
            yield coordinator.handle([SiloLost(now_s, "b", "its node is gone")], now_s)
            back = coordinator.handle(joined("b", at_s=now_s), now_s)
            work |= orders(back)
            yield back
        told = {"energy_j": 2.0, f"of_order_{number}": 1.0}
        done = answer(name, work[name], now_s, evaluation=scored(number / commits), metrics=told)
        entry = coordinator.handle([done], now_s)
        work |= orders(entry)
        yield entry


def followed(keep: int | None, commits: int) -> tuple[Ledger, list[int]]:
    """Books that have followed such a run, and the rounds that they handed out on the way."""
    ledger, feed, seen = Ledger(target_accuracy=0.25, keep=keep), RoundFeed(), []
    for entry in entries(commits):
        ledger.add(entry)
        seen += [row.round for row in feed.closed(ledger)]
    return ledger, seen


def test_books_that_let_rounds_go_say_what_those_say_that_keep_all() -> None:
    few, handed_out = followed(KEEP, 300)
    everything, all_rounds = followed(None, 300)
    assert few.summary() == everything.summary()
    assert few.seconds_to_target == everything.seconds_to_target is not None, "it was reached in a round that is gone"
    assert handed_out == all_rounds, "each round once, although the books have let go of it"
    assert len(few.rounds) == len(everything.rounds) == 300
    assert KEEP <= few.rounds.here < 3 * KEEP
    assert few.rounds.points() == everything.rounds.points(), "below the most of them, every point of the curve"
    assert [row.round for row in few.rounds[-3:]] == [298, 299, 300]


@pytest.mark.slow
def test_the_books_do_not_grow_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_rounds, "MOST_OUTLINED", 16)
    sizes = [len(pickle.dumps(followed(KEEP, commits)[0])) for commits in (2_020, 4_020)]
    assert sizes[1] < 1.02 * sizes[0], "2,000 commits more"
    with_all = [len(pickle.dumps(followed(None, commits)[0])) for commits in (520, 1_020)]
    assert with_all[1] > 1.8 * with_all[0], "which books that keep all do"


def test_a_silo_that_never_ends_its_order_holds_up_no_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions that it began with are under way for ever, and nobody evaluates anything."""
    monkeypatch.setattr(books, "MOST_OPEN", 20)
    coordinator, work = begin("a", "b", barrier=Asp(), evaluate=0.0, stop=StopRules())
    ledger, feed, seen = Ledger(keep=KEEP), RoundFeed(), []
    ledger.add(Coordinator(policies(barrier=Asp(), evaluate=0.0, stop=StopRules())).handle(joined("a", "b"), 0.0))
    for number in range(100):
        name = "b" if number == 4 else "a"  # whose next order, of the fifth version, is never heard of again
        entry = coordinator.handle([answer(name, work[name], number + 1.0)], number + 1.0)
        work |= orders(entry)
        ledger.add(entry)
        seen += [row.round for row in feed.closed(ledger)]
        if number < 24:
            assert seen[4:] == [], "scores of the fifth version may come, and rounds are handed out in order"
            assert ledger.rounds.here >= len(ledger.rounds) - 4, "nothing goes that was not handed out"
    assert seen == list(range(1, 100)), "20 others have followed"
    assert ledger.rounds.here < 3 * KEEP


def test_notes_are_kept_up_to_a_number_the_newest() -> None:
    ledger = Ledger()
    for number in range(books.MOST_NOTES + 5):
        ledger.add(JournalEntry(float(number), (), (Note(str(number)),), ""))
    assert (len(ledger.notes), ledger.notes[0], ledger.notes[-1]) == (books.MOST_NOTES, "5", str(books.MOST_NOTES + 4))


def rows(count: int) -> list[Round]:
    return [Round(number, float(number), 1.0, None, {}) for number in range(count)]


def test_an_outline_is_even_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_rounds, "MOST_OUTLINED", 8)
    rounds = Rounds(rows(103))
    rounds.let_go(100)
    # Of 100 every 16th, as 13 and 25 points would be more than 8.
    assert [point.at_s for point in rounds.points()] == [0, 16, 32, 48, 64, 80, 96, 100, 101, 102]
    assert len(rounds) == 103
    assert [row.round for row in rounds] == [row.round for row in rounds[90:]] == [100, 101, 102]
    assert rounds[-1].round == rounds[102].round == 102
    for gone in (99, 103, -4):
        with pytest.raises(IndexError):
            rounds[gone]
    assert rounds.let_go(50) == [], "what is gone, is gone"


def test_a_resumed_run_exports_also_what_its_books_have_let_go_of(tmp_path: Path) -> None:
    options = {"runtime": "flower", "config": {"name": "x", "seed": 0}, "silos": None, "model_bytes": 10}
    files = Recorder(tmp_path, keep=KEEP, **options)  # type: ignore[arg-type]
    for entry in entries(100):
        files.record(entry)
    files.close()
    again = Recorder(tmp_path, keep=KEEP, resume=True, exporters=[CsvExporter(tmp_path / "x.csv")], **options)  # type: ignore[arg-type]
    assert again.ledger.rounds.here < 3 * KEEP
    again.finish()
    written = [str(json.loads(line)["round"]) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    exported = [line.partition(",")[0] for line in (tmp_path / "x.csv").read_text().splitlines()[1:]]
    assert exported == written == [str(number) for number in range(1, 99)], "the last two are not scored yet"
