"""A lying server's runs: what it reads of a silo's disk.

It writes the specification, and so says which file is trained on and how; what is refused it hears of. The gain is the
longest piece of a file that it hears [bytes].
"""

from pathlib import Path
from typing import Any

import pytest

from fedsync.model.table_columns import ColumnForm, digest_of
from fedsync.silo.protocol import Describe
from tests.attacks.adversary import Federation
from tests.attacks.conftest import Make

LEAST = 9
"""Bytes in a row that a text shares with a file for no other reason than chance."""


def words_of(federation: Federation, task: dict[str, Any], **owner: Any) -> str:
    """All that the server hears of a silo that is to begin this task."""
    return federation.silo("silo-a", federation.spec("files", task=task), **owner).ask(Describe()).words


def shared(words: str, secret: str) -> int:
    """Length of the longest piece of a file that is in what the server heard [bytes]."""
    longest = 0
    for start in range(len(secret)):
        while longest < len(secret) - start and secret[start : start + longest + 1] in words:
            longest += 1
    return longest


KINDS = ["table", "csv", "libsvm", "npz", "custom"]


def reading(kind: str, file: Path, target: str = "zzz") -> dict[str, Any]:
    match kind:
        case "csv":
            return {"kind": "csv", "files": [str(file)] * 3, "target": target}
        case "custom":
            return {"kind": "custom", "file": str(file)}
        case "npz":
            return {"kind": "images", "data": {"kind": "npz", "file": str(file)}, "partition": {"kind": "iid"}}
    more = {"target": target, "classes": 0} if kind == "table" else {"features": 4, "classes": 0}
    data = {"kind": kind, "file": str(file), **more}
    return {"kind": "linear", "loss": "squared", "data": data, "partition": {"kind": "iid"}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [[], ["all"]], ids=["no folder is open", "all are"])
def test_a_task_reads_no_key(kind: str, data: list[str], make: Make) -> None:
    """The group's key was in the error that named the table's columns."""
    federation = make()
    file = federation.rings["silo-a"] / "group.key"
    words = words_of(federation, reading(kind, file), data=[str(federation.folder)] if data else [])
    assert shared(words, file.read_text()[:4000]) < LEAST, words[:300]


@pytest.mark.parametrize("way", ["link", "second name", "folder", "dots"])
def test_no_other_way_leads_to_a_key(way: str, make: Make) -> None:
    federation = make()
    key, open_ = federation.rings["silo-a"] / "group.key", federation.folder / "open"
    open_.mkdir()
    file = open_ / "patients.csv"
    match way:
        case "link":
            file.symlink_to(key)
        case "second name":
            file.hardlink_to(key)
        case "folder":
            (open_ / "in").symlink_to(key.parent)
            file = open_ / "in" / "group.key"
        case "dots":
            file = open_ / ".." / "keys" / "silo-a" / "group.key"
    words = words_of(federation, reading("table", file), data=[str(open_)])
    assert shared(words, key.read_text()[:4000]) < LEAST, words[:300]


def test_what_columns_are_called_is_told_to_nobody_and_cannot_be_tried(make: Make) -> None:
    """Two silos of a sealed run say the same of their columns, and the server can hash no guess of it."""
    federation = make()
    (federation.root / "data" / "hiv.csv").write_text("hiv_status,ward,y\n" + "1,a,0\n0,b,1\n1,a,1\n0,b,0\n" * 6)
    file = str(federation.root / "data" / "hiv.csv")
    task = {"kind": "csv", "files": [file] * 3, "target": "y"}
    runs = [federation.spec(run, task=task) for run in ("files-1", "files-2")]
    told = [federation.silo(name, run).ask(Describe()) for run in runs for name in ("silo-a", "silo-b")]
    assert not any("hiv" in heard.words or "ward" in heard.words for heard in told)
    forms = [heard.reply.form for heard in told]  # type: ignore[union-attr]
    assert forms[0] == forms[1] != forms[2] == forms[3], "equal in one run, and of no use in another"
    known = digest_of(tuple(ColumnForm(*one) for one in (("hiv_status", "number"), ("ward", "text"))))
    assert known.hex() not in {form.frozen for form in forms if form is not None}
