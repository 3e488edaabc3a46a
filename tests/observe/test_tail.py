"""A journal that another process writes, read while it grows."""

from pathlib import Path

import pytest

from fedsync.common.errors import FedSyncError
from fedsync.core.journal import FORMAT, JournalEntry
from fedsync.observe.tail import Tail
from tests.observe.runs import two_silos

HEADER = f'{{"format":{FORMAT}}}'


def test_every_entry_comes_once_however_the_lines_arrive(tmp_path: Path) -> None:
    done = two_silos(tmp_path / "run")
    data, path, seen = done.text.encode(), tmp_path / "growing.jsonl", list[JournalEntry]()
    tail = Tail(path)
    assert list(tail.entries()) == []
    with path.open("wb") as file:
        for first in range(0, len(data), 997):
            file.write(data[first : first + 997])
            file.flush()
            seen += tail.entries()
    assert seen == done.entries
    assert tail.header is not None
    assert tail.header["config"]["name"] == "fake"


def test_half_a_line_is_left_for_later(tmp_path: Path) -> None:
    done, path = two_silos(tmp_path / "run"), tmp_path / "cut.jsonl"
    path.write_text(done.text[:-10])
    tail = Tail(path)
    assert list(tail.entries()) == done.entries[:-1]
    path.write_text(done.text)
    assert list(tail.entries()) == done.entries[-1:]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[1]\n", "first line"),
        (f"{HEADER}\n{{nonsense}}\n", "line 2"),
        (f'{HEADER}\n{{"at_s": 1.0}}\n', "line 2"),
        ("oh\n", "first line"),
    ],
)
def test_what_is_no_journal_is_refused_by_line(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(text)
    with pytest.raises(FedSyncError, match=place):
        list(Tail(path).entries())


def test_a_run_begun_anew_in_the_same_folder_is_noticed(tmp_path: Path) -> None:
    done = two_silos(tmp_path)
    path = done.out / "journal.jsonl"
    tail = Tail(path)
    list(tail.entries())
    path.write_text("{}\n")
    with pytest.raises(FedSyncError, match="another run"):
        list(tail.entries())
