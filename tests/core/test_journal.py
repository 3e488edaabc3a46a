"""What was written reads back exactly, and a file that is no journal says on which line."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedsync.common.errors import FedSyncError
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Event, UpdateArrived, WorkFailed
from fedsync.core.journal import FORMAT, JournalEntry, JournalWriter, read_journal, replay
from fedsync.observe.tail import Tail
from tests.core.make import answer, begin, joined, policies, scored


def a_run() -> list[JournalEntry]:
    """Two rounds of three silos: one is late, one fails, one is lost."""
    coordinator, first = begin("a", "b", "c")
    entries = [Coordinator(policies()).handle(joined("a", "b", "c"), 0.0)]
    batches: list[tuple[float, list[Event]]] = [
        (1.0, [answer("a", first["a"], 1.0, evaluation=scored(0.1)), WorkFailed(1.0, "b", "b/1", "disk full")]),
        (2.0, [answer("c", first["c"], 2.0, overhead_s={"load": 0.1 + 0.2})]),
        (3.0, [answer("a", first["a"], 3.0)]),  # a duplicate
        (3.5, []),
    ]
    return entries + [coordinator.handle(events, at_s) for at_s, events in batches]


def write(path: Path, entries: list[JournalEntry]) -> Path:
    writer = JournalWriter(path, {"seed": 7})
    for entry in entries:
        writer.append(entry)
    writer.close()
    return path


def test_an_entry_can_be_read_as_soon_as_it_is_written_and_all_decide_the_same_again(tmp_path: Path) -> None:
    path, entries = tmp_path / "journal.jsonl", a_run()
    writer = JournalWriter(path, {"seed": 7})
    for count, entry in enumerate(entries, start=1):
        writer.append(entry)
        header, back = read_journal(path)
        assert header == {"format": FORMAT, "seed": 7} and list(back) == entries[:count]
    writer.close()
    recorded = list(read_journal(path)[1])
    assert list(replay(recorded, Coordinator(policies()))) == entries
    assert list(replay(recorded, Coordinator(policies(seed=8)))) != entries


@pytest.mark.parametrize(
    "bad",
    [
        {"loss": math.nan},
        {"loss": math.inf},
        {"compute_s": -math.inf},
        {"evaluation": scored(math.nan)},
        {"overhead_s": {"load": math.nan}},
    ],
)
def test_a_refused_report_with_numbers_json_lacks_is_written_and_replayed(tmp_path: Path, bad: dict[str, Any]) -> None:
    """Otherwise one silo's NaN ends the server's run, in the recorder."""
    coordinator, first = begin("a", "b")
    entries = [Coordinator(policies()).handle(joined("a", "b"), 0.0)]
    entries.append(coordinator.handle([answer("a", first["a"], **bad)], 1.0))
    path = write(tmp_path / "journal.jsonl", entries)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    recorded = list(read_journal(path)[1])
    assert list(replay(recorded, Coordinator(policies()))) == recorded
    (event,) = recorded[1].events
    assert isinstance(event, UpdateArrived)
    assert repr(event) == repr(entries[1].events[0])


HEADER = f'{{"format":{FORMAT},"seed":7}}'
GOOD = '{"at_s":0.0,"events":[],"actions":[],"reason":""}'


@pytest.mark.parametrize(
    "line",
    [
        "{",
        GOOD[:-9],  # cut off in the middle, as by a full disk
        "",
        "[1, 2]",
        "{}",
        '{"at_s":0.0,"events":[{"type":"Nonsense"}],"actions":[],"reason":""}',
        '{"at_s":0.0,"events":[{"type":"TimerFired"}],"actions":[],"reason":""}',
        '{"at_s":0.0,"events":[{"type":"TimerFired","at_s":1.0,"late":1}],"actions":[],"reason":""}',
        '{"at_s":0.0,"events":7,"actions":[],"reason":""}',
    ],
)
def test_a_corrupt_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("\n".join([HEADER, GOOD, line, GOOD]) + "\n")
    header, entries = read_journal(path)
    assert header == {"format": FORMAT, "seed": 7}
    with pytest.raises(FedSyncError, match=r"journal\.jsonl, line 3: not a journal line"):
        list(entries)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(HEADER.encode() + b"\n\xff\xfe\n")
    with pytest.raises(FedSyncError, match=r"journal\.jsonl"):
        list(read_journal(path)[1])


@pytest.mark.parametrize("text", ["", "[]\n", "7\n", "PNG\n"])
def test_a_file_without_a_header_is_no_journal(tmp_path: Path, text: str) -> None:
    path = tmp_path / "picture.png"
    path.write_text(text)
    with pytest.raises(FedSyncError, match=r"picture\.png.*not a journal"):
        read_journal(path)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ('{"fedsync":"0.1","seed":7}', "of format 1, written by FedSync 0.1; this FedSync reads format 3 only"),
        ('{"format":99}', "a journal of format 99; this"),
    ],
)
def test_a_journal_of_another_format_is_refused(tmp_path: Path, header: str, said: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(f"{header}\n{GOOD}\n")
    for read in (read_journal, lambda path: list(Tail(path).entries())):
        with pytest.raises(FedSyncError, match=said):
            read(path)
