"""``fedsync silo audit`` and what `doctor` says: whether the log is what was written, and what it says by run."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fedsync.config.silo_start import SiloStartConfig
from fedsync.ops.audit_heads import HeadKeeper
from fedsync.ops.doctor.health import check_approvals, check_audit_log
from fedsync.trainer.approvals import APPROVALS, Approvals, AwaitsApproval
from fedsync.trainer.audit import AuditLog
from fedsync.trainer.audit_chain import AUDIT, file_name
from fedsync.trainer.owner_policy import audit_place
from fedsync.trainer.protocol import Identity
from tests.commands.call import call

LINE = {"who": "x:1", "run": "run-1\x1b[2J", "spec": "ab" * 32, "got": 1, "sent": ""}


@pytest.fixture
def silo() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        (Path(name) / "heads").mkdir()
        said = {"name": "berlin", "server": "x:1", "insecure": True, "state": "s", "audit": {"head_to": "heads"}}
        (Path(name) / "silo.yaml").write_text(json.dumps({**said, "approve": "ask"}))
        (Path(name) / "s").mkdir(mode=0o700)
        yield Path(name) / "silo.yaml"


def test_a_log_is_verified_and_shown_by_run(silo: Path) -> None:
    config = SiloStartConfig.load(silo)
    assert call("silo", "audit", "--silo", silo).endswith("ok   0 lines, each as it was written\n")
    log = AuditLog(audit_place(config))
    for of in ("berlin/1", "berlin/1", "berlin/2"):
        log.add("answered", {**LINE, "asked": "Train", "of": of, "said": "WorkReport", "bytes": 1000})
    log.add("answered", {**LINE, "asked": "EvaluateModel", "of": "", "said": "Evaluation", "bytes": 10})
    log.add("answered", {**LINE, "asked": "", "of": "", "said": "Refused", "code": "owner", "why": "no", "bytes": 5})
    assert "5 lines after the last signed head" in call("silo", "audit", "--silo", silo)
    HeadKeeper(config).tend()
    told = call("silo", "audit", "--silo", silo)
    row = next(line for line in told.splitlines() if line.startswith("run-1"))
    assert row.split()[1:] == ["abababababab", "5", "2", "1", "3,015", "owner", "1"] and "\x1b" not in told
    assert "note" not in told and told.endswith("ok   5 lines, each as it was written\n")
    assert check_audit_log(config).ok and "5 lines" in check_audit_log(config).detail


def test_a_log_that_was_changed_fails(silo: Path) -> None:
    config = SiloStartConfig.load(silo)
    AuditLog(audit_place(config)).add("answered", {**LINE, "asked": "", "of": "", "said": "Hello", "bytes": 10})
    HeadKeeper(config).tend()
    path = Path(config.state) / AUDIT / file_name(1)
    path.write_bytes(path.read_bytes().replace(b'"bytes":10', b'"bytes":11'))
    with pytest.raises(SystemExit) as ended:
        call("silo", "audit", "--silo", silo)
    assert ended.value.code == 1
    assert not check_audit_log(config).ok and "was changed" in check_audit_log(config).detail
    path.unlink()
    assert not check_audit_log(config).ok and "it was cut" in check_audit_log(config).detail


def test_doctor_says_what_waits(silo: Path) -> None:
    config = SiloStartConfig.load(silo)
    assert check_approvals(config).detail == "no run waits"
    with pytest.raises(AwaitsApproval):
        Approvals(Path(config.state) / APPROVALS).check(Identity("{}", 0, "berlin"))
    assert check_approvals(config).ok and check_approvals(config).detail.startswith("1 wait for you")
    assert "not asked" in check_approvals(config.model_copy(update={"approve": "never"})).detail
