"""``fedsync silo audit`` and what `doctor` says: whether the log is what was written, and what it says by run."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.silo_start import SiloStartConfig
from fedsync.extras.doctor.health import check_approvals, check_audit_log
from fedsync.identity.node_keys import make_node_key, node_key_fingerprint
from fedsync.ops.audit_heads import ROTATED, HeadKeeper, rotation
from fedsync.silo.owner.approvals import APPROVALS, Approvals, AwaitsApproval
from fedsync.silo.owner.audit import AuditLog
from fedsync.silo.owner.audit_chain import AUDIT, file_name
from fedsync.silo.owner.owner_policy import audit_place
from fedsync.silo.protocol import Identity
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


@pytest.fixture
def keyed(silo: Path) -> SiloStartConfig:
    """A silo with a node key and three entries, whose head is also elsewhere."""
    make_node_key("berlin", silo.parent / "keys")
    (silo.parent / "ca.crt").touch()
    said = {"name": "berlin", "server": "x:1", "authority": "ca.crt", "node_key": "keys/berlin.node", "state": "s"}
    silo.write_text(json.dumps({**said, "audit": {"head_to": "heads"}}))
    config = SiloStartConfig.load(silo)
    write(config, 3)
    HeadKeeper(config).tend()
    return config


def write(config: SiloStartConfig, lines: int) -> None:
    for _ in range(lines):
        AuditLog(audit_place(config)).add("answered", {**LINE, "asked": "", "of": "", "said": "Hello", "bytes": 10})


def test_a_rotated_node_key_is_an_entry_and_no_alarm(keyed: SiloStartConfig, silo: Path) -> None:
    keys = silo.parent / "keys"
    seen = [node_key_fingerprint(keys / "berlin.node")]
    for _ in range(2):
        assert call("silo", "rotate", "--silo", silo).split()[:2] == [
            "berlin",
            node_key_fingerprint(keys / "berlin.node"),
        ]
        seen.append(node_key_fingerprint(keys / "berlin.node"))
        assert check_audit_log(keyed).ok, "also before the silo signs by the new key"
        write(keyed, 1)
    assert len(set(seen)) == 3 and not (keys / "next").exists()
    assert (keys / "berlin.node").stat().st_mode & 0o777 == 0o600
    HeadKeeper(keyed).tend(last=True)
    assert call("silo", "audit", "--silo", silo).endswith("ok   7 lines, each as it was written\n")


@pytest.mark.parametrize("entry", ["none", "of another key", "for another key", "of another silo"])
def test_a_key_that_was_not_signed_over_is_an_alarm(keyed: SiloStartConfig, silo: Path, entry: str) -> None:
    keys = silo.parent / "keys"
    stranger, fresh = (make_node_key("berlin", silo.parent / name).private for name in ("stranger", "fresh"))
    old = keys / "berlin.node"
    said = {
        "none": None,
        "of another key": rotation("berlin", stranger, fresh) | {"old": rotation("berlin", old, fresh)["old"]},
        "for another key": rotation("berlin", old, stranger),
        "of another silo": rotation("paris", old, fresh),
    }[entry]
    if said is not None:
        AuditLog(audit_place(keyed)).add(ROTATED, said)
    fresh.replace(old)
    found = check_audit_log(keyed)
    assert not found.ok and "is not the key of this silo" in found.detail and "fedsync silo rotate" in found.detail


def test_a_folder_for_heads_that_is_not_there_is_a_failure(keyed: SiloStartConfig, silo: Path) -> None:
    assert check_audit_log(keyed).ok
    (silo.parent / "heads").rename(silo.parent / "elsewhere")
    found = check_audit_log(keyed)
    assert not found.ok and str(silo.parent / "heads") in found.detail and "Mount" in found.remedy


def test_a_silo_without_a_node_key_has_none_to_rotate(silo: Path) -> None:
    with pytest.raises(ConfigError, match="no node key"):
        call("silo", "rotate", "--silo", silo)
