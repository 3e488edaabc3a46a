"""The ledger of a budget: an entry before its result, and spent for good whatever is killed, changed or put back."""

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedsync.common.errors import BudgetSpent, ConfigError
from fedsync.config.sections.privacy import BudgetConfig
from fedsync.privacy.accounting import epsilon
from fedsync.privacy.release import Release
from fedsync.silo.owner import privacy_ledger
from fedsync.silo.owner.audit import AuditLog
from fedsync.silo.owner.audit_chain import AUDIT, AuditPlace, file_name, sealed_line
from fedsync.silo.owner.privacy_ledger import PrivacyLedger, PrivacyTally, kept_tallies, last_entry

STEP = Release(0.1, 2.0)
BUDGET = BudgetConfig(epsilon=2.0, delta=1e-5)
"""Room for more than a hundred steps."""

TIGHT = BudgetConfig(epsilon=1.0, delta=1e-5, accountant="rdp")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def path(folder: Path) -> Path:
    return folder / "privacy" / "train.jsonl"


def ledger(folder: Path, budget: BudgetConfig = BUDGET) -> PrivacyLedger:
    return PrivacyLedger("train", budget, path(folder)).load()


def audited(folder: Path) -> PrivacyLedger:
    log = AuditLog(AuditPlace(str(folder / AUDIT), "fl.example.org:9092"))
    return PrivacyLedger("train", BUDGET, path(folder), folder / AUDIT, log.add).load()


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path(folder).read_text().splitlines()]


def test_an_entry_is_on_disk_when_enter_returns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, synced = ledger(folder), []
    monkeypatch.setattr(os, "fdatasync", lambda _: synced.append(path(folder).stat().st_size))
    for number in range(1, 4):
        subject.enter("run", f"a/{number}", {STEP: 5})
        assert len(synced) == number and synced[-1] == path(folder).stat().st_size
    assert [(line["n"], line["of"], line["times"]) for line in lines(folder)] == [
        (1, "a/1", 5), (2, "a/2", 5), (3, "a/3", 5),
    ]  # fmt: skip
    assert path(folder).stat().st_mode & 0o777 == 0o600


def test_what_was_spent_is_spent_after_a_restart_and_by_run(folder: Path) -> None:
    subject = ledger(folder)
    subject.enter("one", "a/1", {STEP: 5, Release(1.0, 9.0): 1})
    subject.enter("two", "a/1", {STEP: 7})
    again = ledger(folder)
    assert again.spent == {STEP: 12, Release(1.0, 9.0): 1}
    assert again.by_run == {"one": {STEP: 5, Release(1.0, 9.0): 1}, "two": {STEP: 7}}
    assert again.epsilon() == epsilon(again.spent, BUDGET.delta)
    assert again.epsilon("two") == epsilon({STEP: 7}, BUDGET.delta)
    assert again.epsilon("three") == 0


def test_an_entry_that_a_kill_cut_is_cut_off_and_its_result_never_left(folder: Path) -> None:
    subject = ledger(folder)
    subject.enter("run", "a/1", {STEP: 5})
    subject.enter("run", "a/2", {STEP: 3})
    whole = path(folder).read_bytes()
    for kept in (1, 40, len(whole.splitlines(keepends=True)[1]) - 1):
        path(folder).write_bytes(whole[: len(whole.splitlines(keepends=True)[0]) + kept])
        again = ledger(folder)
        assert again.spent == {STEP: 5}
        again.enter("run", "a/2", {STEP: 3})
        assert ledger(folder).spent == {STEP: 8}


def test_what_an_order_left_out_is_given_back_for_good(folder: Path) -> None:
    subject = ledger(folder)
    subject.enter("one", "a/1", {STEP: 5})
    subject.enter("two", "a/1", {STEP: 5})
    subject.give_back("two", "a/1", {STEP: 4})
    assert [line["kind"] for line in lines(folder)] == ["spent", "spent", "returned"]
    for found in (subject, ledger(folder)):
        assert found.spent == {STEP: 6} and found.by_run == {"one": {STEP: 5}, "two": {STEP: 1}}


def test_a_run_gives_back_no_more_than_it_spent(folder: Path) -> None:
    """A ledger with such a line has other entries than were written."""
    subject = ledger(folder)
    subject.enter("one", "a/1", {STEP: 5})
    subject.enter("two", "a/1", {STEP: 2})
    subject.give_back("two", "a/1", {STEP: 3})
    with pytest.raises(ConfigError, match="its entry 3 was changed"):
        ledger(folder)


def test_more_than_the_budget_is_refused_and_not_entered(folder: Path) -> None:
    subject, most = ledger(folder, TIGHT), 0
    while epsilon({STEP: most + 1}, TIGHT.delta, "rdp") <= TIGHT.epsilon:
        most += 1
    subject.enter("run", "a/1", {STEP: most - 1})
    for ask in (lambda: subject.enter("run", "a/2", {STEP: 2}), lambda: subject.check({STEP: 2})):
        with pytest.raises(BudgetSpent, match=r"would exceed the privacy budget of 'train': epsilon 1 at delta 1e-05"):
            ask()
    assert len(lines(folder)) == 1
    subject.enter("run", "a/2", {STEP: 1})
    assert ledger(folder, TIGHT).spent == {STEP: most}


@pytest.mark.parametrize(
    "changed", [{"epsilon": 9.0}, {"delta": 1e-3}, {"epsilon": 0.5, "delta": 1e-9}, {"accountant": "rdp"}]
)
def test_another_silo_yaml_gives_nothing_back(changed: dict[str, object], folder: Path) -> None:
    ledger(folder).enter("run", "a/1", {STEP: 20})
    again = ledger(folder, BudgetConfig.model_validate({**BUDGET.model_dump(), **changed}))
    assert again.spent == {STEP: 20}
    assert again.epsilon() == epsilon({STEP: 20}, again.budget.delta, again.budget.accountant)


def test_another_unit_is_refused_since_entries_do_not_bound_it(folder: Path) -> None:
    """A person with many rows discloses more than each row: the entries would count too little."""
    ledger(folder).enter("run", "a/1", {STEP: 20})
    persons = BudgetConfig(epsilon=2.0, delta=1e-5, unit="person", person_column="id")
    with pytest.raises(ConfigError, match=r"counts for each example, and the budget is for each person.*unit: example"):
        ledger(folder, persons)
    assert ledger(folder).spent == {STEP: 20}


def test_an_entry_of_an_older_version_has_no_unit(folder: Path) -> None:
    subject = ledger(folder)
    subject.enter("run", "a/1", {STEP: 20})
    (line,) = lines(folder)
    without = {key: value for key, value in line.items() if key not in ("unit", "digest")}
    path(folder).write_bytes(sealed_line(without)[0])  # type: ignore[arg-type]
    assert ledger(folder).spent == {STEP: 20}


def test_a_smaller_budget_than_what_is_spent_admits_nothing(folder: Path) -> None:
    ledger(folder).enter("run", "a/1", {STEP: 20})
    with pytest.raises(BudgetSpent, match=r"epsilon 0\.1 .*of which 1\.\d{3} is spent"):
        ledger(folder, BudgetConfig(epsilon=0.1, delta=1e-5)).enter("run", "a/2", {STEP: 1})


PROCESS = """
import sys
from pathlib import Path
from tests.privacy.test_ledger import BUDGET, STEP, PrivacyLedger, ledger
subject = ledger(Path(sys.argv[1]))
print("ready", flush=True)
for number in range(8):
    subject.enter("other", f"b/{number}", {STEP: 1})
"""


@pytest.mark.slow
def test_two_processes_enter_in_turn(folder: Path) -> None:
    subject = ledger(folder)
    with subprocess.Popen([sys.executable, "-c", PROCESS, str(folder)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"ready\n"
        for number in range(8):
            subject.enter("own", f"a/{number}", {STEP: 1})
    assert other.returncode == 0
    assert [line["n"] for line in lines(folder)] == list(range(1, 17))
    found = ledger(folder)
    assert found.by_run == {"own": {STEP: 8}, "other": {STEP: 8}}


def test_an_older_ledger_is_noticed_by_the_audit_log(folder: Path) -> None:
    subject = audited(folder)
    subject.enter("run", "a/1", {STEP: 5})
    old = path(folder).read_bytes()
    subject.enter("run", "a/2", {STEP: 5})
    assert audited(folder).spent == {STEP: 10}
    assert last_entry(folder / AUDIT, "train") == (2, lines(folder)[1]["digest"])
    assert last_entry(folder / AUDIT, "other") == (0, "0" * 64)
    path(folder).write_bytes(old)
    with pytest.raises(ConfigError, match="entry 2, which the audit log names, is missing: this is an older ledger"):
        audited(folder)
    # An older ledger that went on without the audit log is as long as the newest, or longer, and still another.
    for times in (5, 6):
        ledger(folder).enter("run", "a/2", {Release(0.1, 3.0): times})
        with pytest.raises(ConfigError, match="entry 2, which the audit log names, is missing"):
            audited(folder)
    path(folder).unlink()
    with pytest.raises(ConfigError, match="this is an older ledger"):
        audited(folder)


def test_an_entry_of_another_run_makes_no_ledger_an_older_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run has to wait until this ledger is compared with the audit log."""
    other = audited(folder)
    other.enter("run", "a/1", {STEP: 5})
    entering = threading.Thread(target=other.enter, args=("run", "a/2", {STEP: 5}))

    def slowly(audit: Path, name: str) -> tuple[int, str]:
        entering.start()
        entering.join(0.3)
        return last_entry(audit, name)

    monkeypatch.setattr(privacy_ledger, "last_entry", slowly)
    assert audited(folder).spent == {STEP: 5}
    entering.join()
    assert ledger(folder).spent == {STEP: 10}


def test_a_line_of_the_audit_log_that_a_power_failure_cut_closes_no_budget(folder: Path) -> None:
    subject = audited(folder)
    for number in range(1, 3):
        subject.enter("run", f"a/{number}", {STEP: 5})
    log = folder / AUDIT / file_name(1)
    whole = log.read_bytes()
    for lost in (1, 40):
        log.write_bytes(whole[:-lost])
        assert last_entry(folder / AUDIT, "train") == (1, lines(folder)[0]["digest"])
        assert audited(folder).spent == {STEP: 10}


def test_the_audit_log_has_a_line_for_each_entry_and_no_figure_of_it(folder: Path) -> None:
    subject = audited(folder)
    subject.enter("run", "a/1", {STEP: 5, Release(1.0, 9.0): 1})
    text = (folder / AUDIT / file_name(1)).read_text()
    found = [json.loads(line) for line in text.splitlines()]
    assert [(line["kind"], line["of"], line["entry"], line["run"]) for line in found] == [
        ("privacy", "train", 1, "run"), ("privacy", "train", 2, "run"),
    ]  # fmt: skip
    assert "noise" not in text


@pytest.mark.parametrize(
    "change", [(b'"times":5', b'"times":1'), (b'"noise":2.0', b'"noise":9.0'), (b'"n":1', b'"n":3')]
)
def test_a_changed_entry_is_noticed(change: tuple[bytes, bytes], folder: Path) -> None:
    subject = ledger(folder)
    subject.enter("run", "a/1", {STEP: 5})
    subject.enter("run", "a/2", {STEP: 5})
    whole = path(folder).read_bytes()
    assert change[0] in whole
    path(folder).write_bytes(whole.replace(*change, 1))
    with pytest.raises(ConfigError, match=r"its entry 1 was changed\. Restore the newest"):
        ledger(folder)
    path(folder).write_bytes(whole.splitlines(keepends=True)[1])  # the first is gone
    with pytest.raises(ConfigError, match="entry 1 was changed"):
        ledger(folder)
    path(folder).write_bytes(b"[]\n" + whole)
    with pytest.raises(ConfigError, match="entry 1 was changed"):
        ledger(folder)


def test_a_ledger_that_vanishes_or_shrinks_closes_the_data(folder: Path) -> None:
    subject = ledger(folder)
    subject.enter("run", "a/1", {STEP: 5})
    whole = path(folder).read_bytes()
    path(folder).write_bytes(b"")
    with pytest.raises(ConfigError, match="has become shorter"):
        subject.enter("run", "a/2", {STEP: 5})
    path(folder).unlink()
    with pytest.raises(ConfigError, match="the ledger is missing"):
        subject.check({STEP: 5})
    path(folder).write_bytes(whole)
    subject.enter("run", "a/2", {STEP: 5})


@contextmanager
def limited(most: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``most`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 30])
def test_a_full_disk_takes_no_entry_and_keeps_no_part_of_one(room: int, folder: Path) -> None:
    subject = ledger(folder)
    subject.enter("run", "a/1", {STEP: 5})
    whole = path(folder).read_bytes()
    with limited(len(whole) + room), pytest.raises(ConfigError, match=r"the privacy ledger cannot be written.*Free"):
        subject.enter("run", "a/2", {STEP: 5})
    assert path(folder).read_bytes() == whole and subject.spent == {STEP: 5}
    subject.enter("run", "a/2", {STEP: 5})
    assert ledger(folder).spent == {STEP: 10}


def test_an_entry_that_the_audit_log_refuses_does_not_come_again(folder: Path) -> None:
    """It is spent: an order counts twice rather than never."""
    subject = ledger(folder)

    def refusing(kind: str, fields: object) -> None:
        raise ConfigError("audit", "the audit log cannot be written", "Free disk space")

    subject.tell = refusing
    with pytest.raises(ConfigError, match="audit log cannot be written"):
        subject.enter("run", "a/1", {STEP: 5})
    subject.tell = lambda kind, fields: None
    subject.enter("run", "a/1", {STEP: 5})
    assert ledger(folder).spent == subject.spent == {STEP: 10}


def test_a_silo_of_a_silo_file_has_its_ledger_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subject = PrivacyLedger("cleveland", TIGHT).load()
    subject.enter("run", "a/1", {STEP: 5})
    assert subject.spent == {STEP: 5} and not list(tmp_path.iterdir())
    with pytest.raises(BudgetSpent):
        subject.enter("run", "a/2", {STEP: 10_000})


@pytest.mark.parametrize("damaged", [b"", b'["a", 0.001, 3.0, "pld", [[0.1', b"{}", b'["a", 0.001, 3.0, "pld", [1]]'])
def test_a_damaged_count_of_a_simulated_silo_is_not_begun_anew(damaged: bytes, folder: Path) -> None:
    (folder / "spent-0.json").write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"spent-0.json: damaged: what the silo has spent is unknown. Begin another"):
        kept_tallies(folder)


def test_a_count_of_a_simulated_silo_survives_a_crash_of_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run would tell less than was spent."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    PrivacyTally("a", 1e-3, file=folder / "spent-0.json").count({STEP: 3})
    assert synced and kept_tallies(folder)[0].releases == {STEP: 3}
