"""The audit log of a silo: a line before anything leaves, a chain over all of it, and nothing of the data in it."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from fedsync.common.errors import SERVER, ConfigError, IntegrityError, OwnerRefusal
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.core.orders import Evaluation, WorkOrder
from fedsync.silo.owner.audit import AuditLog, audit_answer
from fedsync.silo.owner.audit_chain import AUDIT, AuditBroken, AuditPlace, AuditReader, file_name, log_files
from fedsync.silo.owner.refusals import code_of, refuse
from fedsync.silo.protocol import STATE, Collect, Describe, Identity, InProgress, Train, write_reply, write_request

MARK = "8675309.125"
WHO = Identity('{"run": "run-1"}', 0, "berlin")
ORDER = WorkOrder("berlin/1", 0, 1, 8, 2, 0.1, seed=1)


@pytest.fixture
def place(tmp_path: Path) -> AuditPlace:
    tmp_path.chmod(0o700)
    return AuditPlace(str(tmp_path / AUDIT), "fl.example.org:9092")


@pytest.fixture
def small(place: AuditPlace) -> AuditPlace:
    """Of which three files of a thousand bytes are kept."""
    return replace(place, bytes=1000, keep=3)


def filled(place: AuditPlace, count: int = 40) -> AuditLog:
    """A log with so many lines, which are numbered."""
    log = AuditLog(place)
    for number in range(count):
        log.add("answered", {"x": number})
    return log


def lines(place: AuditPlace) -> list[dict[str, object]]:
    return list(AuditReader(Path(place.folder)).lines())


def first_file(place: AuditPlace) -> Path:
    return Path(place.folder) / file_name(1)


def test_what_leaves_is_put_down_and_nothing_of_the_data(place: AuditPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Path(place.folder).parent
    monkeypatch.setenv(STATE, str(state))
    allowed = {"audit": {"folder": place.folder, "asks": place.asks}}
    update = np.full(1000, float(MARK), np.float32)
    with patch.dict(os.environ, {ALLOWED: json.dumps(allowed)}):
        audit_answer(WHO, write_request(Train(ORDER)), 4000, write_reply(InProgress(1, 8)), update)
        audit_answer(WHO, write_request(Describe()), 0, write_reply(Evaluation(8, float(MARK), float(MARK))), None)
        for error in (
            ValueError(f"could not convert string to float: {MARK}"),
            IntegrityError(SERVER, "tally", f"{MARK} silos are in the sum"),
            ConfigError("data", f"a label is {MARK}", "Mend it"),
            OwnerRefusal("task", "/etc/passwd is not where runs may read", "Ask"),
        ):
            audit_answer(None, "no request", 0, write_reply(refuse(error)), None)
    found = lines(place)
    assert [(line["asked"], line["of"], line["said"], line["got"]) for line in found[:2]] == [
        ("Train", "berlin/1", "InProgress", 4000), ("Describe", "", "Evaluation", 0),
    ]  # fmt: skip
    assert found[0]["who"] == place.asks and found[0]["run"] == "run-1"
    text = write_reply(InProgress(1, 8)).encode()
    assert found[0]["bytes"] == len(text) + update.nbytes
    assert found[0]["sent"] == hashlib.sha256(text + update.tobytes()).hexdigest()
    assert [line["code"] for line in found[2:]] == ["internal", "integrity", "config", "owner"]
    assert [bool(line["why"]) for line in found[2:]] == [False, False, False, True]
    data = first_file(place).read_bytes()
    assert MARK.encode() not in data and b"8675309" not in data and update.tobytes()[:8] not in data


def test_a_line_is_on_disk_before_it_is_said(place: AuditPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda _: synced.append(first_file(place).stat().st_size))
    log = AuditLog(place)
    for number in range(3):
        log.add("answered", {"x": number})
        assert len(synced) == number + 1 and synced[-1] == first_file(place).stat().st_size


def test_each_line_has_the_digest_of_the_line_before(place: AuditPlace) -> None:
    AuditLog(place).add("answered", {"x": 1})
    other = AuditLog(place)  # another process
    other.add("answered", {"x": 2})
    AuditLog(place).add("answered", {"x": 3})
    other.add("answered", {"x": 4})
    found = [json.loads(line) for line in first_file(place).read_text().splitlines()]
    assert [line["n"] for line in found] == [1, 2, 3, 4]
    assert [line["before"] for line in found] == ["0" * 64, *(line["digest"] for line in found[:-1])]
    assert len(lines(place)) == 4 and first_file(place).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("at", [5, 60, 200, -70, -3, -1])
def test_a_changed_byte_shows_wherever_it_is(place: AuditPlace, at: int) -> None:
    filled(place, 3)
    path = first_file(place)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    reader = AuditReader(path.parent)
    with pytest.raises(AuditBroken) if at != -1 else pytest.MonkeyPatch.context():
        list(reader.lines())
    assert reader.n < 3


def test_a_torn_line_was_never_said_and_is_cut_off(place: AuditPlace) -> None:
    AuditLog(place).add("answered", {"x": 1})
    path = first_file(place)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"at":"20')
    reader = AuditReader(path.parent)
    assert [line["x"] for line in reader.lines()] == [1] and reader.torn == 9
    AuditLog(place).add("answered", {"x": 2})
    found = lines(place)
    assert [(line["kind"], line.get("bytes"), line.get("x")) for line in found] == [
        ("answered", None, 1), ("repaired", 9, None), ("answered", None, 2),
    ]  # fmt: skip
    path.write_bytes(b'{"at":"20')  # the very first line
    AuditLog(place).add("answered", {"x": 1})
    assert [line["kind"] for line in lines(place)] == ["repaired", "answered"]


def test_a_writer_that_is_killed_leaves_a_log_that_goes_on(place: AuditPlace) -> None:
    code = (
        "import sys; from fedsync.silo.owner.audit import AuditLog\n"
        "from fedsync.silo.owner.audit_chain import AuditPlace\n"
        "log = AuditLog(AuditPlace(sys.argv[1], ''))\nwhile True: log.add('answered', {}); print('x', flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code, place.folder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(20)]
        process.kill()
        said += process.stdout.readlines()
    AuditLog(place).add("answered", {})
    assert len(lines(place)) >= len(said) + 1


def test_a_full_disk_is_one_refusal_and_no_half_line(place: AuditPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(place)
    log.add("answered", {"x": 1})
    write = os.write
    with monkeypatch.context() as full:

        def half(descriptor: int, data: bytes) -> int:
            write(descriptor, data[:7])
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(os, "write", half)
        with pytest.raises(ConfigError, match="the audit log cannot be written") as caught:
            log.add("answered", {"x": 2})
        assert code_of(caught.value).name == "DISK"
    assert len(lines(place)) == 1 and AuditReader(Path(place.folder)).torn == 0
    log.add("answered", {"x": 2})
    assert [line["x"] for line in lines(place)] == [1, 2]


def test_files_follow_each_other_and_the_oldest_go_by_name(small: AuditPlace) -> None:
    filled(small)
    files = log_files(Path(small.folder))
    assert len(files) == 3 and files[0][0] > 1 and all(path.stat().st_size < 2000 for _, path in files)
    reader = AuditReader(Path(small.folder))
    assert [line["x"] for line in reader.lines() if line["kind"] == "answered"][-1] == 39
    assert reader.first > 1
    files[0][1].unlink()  # not by the log itself
    with pytest.raises(AuditBroken, match="no line says that those before were removed"):
        lines(small)
    AuditLog(small).add("answered", {"x": 40})
    files[1][1].unlink()
    with pytest.raises(AuditBroken):
        lines(small)


def test_a_reader_goes_on_while_the_oldest_files_go(small: AuditPlace) -> None:
    """A supervisor that started on a shortened log reads new lines for months, and signs nothing after an error."""
    log = filled(small)
    reader, kinds = AuditReader(Path(small.folder)), list[str]()
    before = list(reader.lines())
    assert before[0]["n"] == reader.first > 1
    for _ in range(20):
        log.add("answered", {})
        kinds += [str(line["kind"]) for line in reader.lines()]
    assert kinds.count("pruned") > 1 and kinds.count("answered") == 20


def test_a_kill_before_the_oldest_files_are_removed_breaks_nothing(small: AuditPlace) -> None:
    filled(small)
    with patch.object(Path, "unlink", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        filled(small)
    assert len(log_files(Path(small.folder))) == 4 and lines(small)[-1]["kind"] == "pruned"


def test_a_file_in_the_middle_is_missed(place: AuditPlace) -> None:
    filled(replace(place, bytes=500), 20)
    log_files(Path(place.folder))[1][1].unlink()
    with pytest.raises(AuditBroken, match="a file between"):
        lines(place)


def test_whatever_a_server_says_a_line_is_short(place: AuditPlace) -> None:
    nasty = "\N{OLD PERSIAN SIGN A}" * 5000
    allowed = {"audit": {"folder": place.folder, "asks": place.asks}}
    with patch.dict(os.environ, {ALLOWED: json.dumps(allowed)}):
        for spec in (json.dumps({"run": nasty}), "[" * 100_000, nasty):
            asked = write_request(Collect(nasty))
            audit_answer(Identity(spec, 0, "berlin"), asked, 0, write_reply(InProgress(0, 0)), None)
    assert len(lines(place)) == 3 and max(map(len, first_file(place).read_bytes().splitlines())) < 10_000
