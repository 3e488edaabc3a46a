"""Somebody at a silo's machine changes its audit log afterwards: what `fedsync silo audit` does not notice.

The gain is a log that says something else than what left the house, and passes. Who has the machine has its node key,
so against that one only heads elsewhere help.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.silo_start import AuditConfig, SiloStartConfig
from fedsync.identity.node_keys import make_node_key
from fedsync.ops.audit_check import check_audit, table
from fedsync.ops.audit_heads import HEAD, HeadKeeper
from fedsync.silo.owner.audit import AuditLog
from fedsync.silo.owner.audit_chain import AUDIT, UNWRITTEN, AuditReader, file_name, sealed_line
from fedsync.silo.owner.owner_policy import audit_place
from fedsync.silo.owner.refusals import code_of
from fedsync.silo.protocol import Refusal

LINE = {"who": "x:1", "run": "run-1", "spec": "ab", "asked": "Train", "of": "a/1", "got": 1, "said": "WorkReport"}


@pytest.fixture
def config() -> Iterator[SiloStartConfig]:
    with TemporaryDirectory() as name:
        yield made(Path(name), "berlin")


def owned(folder: Path, name: str, **audit: Any) -> SiloStartConfig:
    """A silo with a node key, whose heads go to a share."""
    (folder / name).mkdir(mode=0o700)
    key = make_node_key(name, folder / f"{name}-keys").private
    return SiloStartConfig(
        name=name, server="x:1", authority="ca.crt", node_key=str(key), state=str(folder / name),
        audit=AuditConfig(head_to=str(folder / "share"), **audit),
    )  # fmt: skip


def made(folder: Path, name: str) -> SiloStartConfig:
    """A silo whose log has lines of yesterday and today, signed, with a head of yesterday elsewhere."""
    (folder / "share").mkdir()
    config = owned(folder, name)
    log = AuditLog(audit_place(config))
    now = datetime(2026, 1, 1, tzinfo=UTC)
    keeper = HeadKeeper(config, lambda: now)
    for day in range(2):
        for number in range(5):
            log.add("answered", {**LINE, "of": f"a/{day}{number}", "bytes": 100, "sent": "00"})
        keeper.tend()
        now += timedelta(hours=6)
    assert not check_audit(config).broken
    return config


def add(config: SiloStartConfig) -> None:
    AuditLog(audit_place(config)).add("answered", {**LINE, "bytes": 1, "sent": "00"})


def log_of(config: SiloStartConfig) -> Path:
    return Path(config.state) / AUDIT / file_name(1)


def head_of(config: SiloStartConfig) -> Path:
    return Path(config.state) / AUDIT / HEAD


def rewrite(config: SiloStartConfig, keep: int = 10, **changes: object) -> None:
    """Write the whole chain anew, as whoever has the code can."""
    lines = [json.loads(line) for line in log_of(config).read_bytes().splitlines()][:keep]
    before, whole = "0" * 64, b""
    for line in lines:
        line.pop("digest")
        raw, before = sealed_line({**line, **changes, "before": before})
        whole += raw
    log_of(config).write_bytes(whole)


@pytest.mark.parametrize("what", ["changed", "removed", "swapped", "twice"])
def test_a_line_that_is_whole_by_itself_and_not_in_its_place(config: SiloStartConfig, what: str) -> None:
    lines = log_of(config).read_bytes().splitlines(keepends=True)
    match what:
        case "changed":
            line = json.loads(lines[4])
            line.pop("digest")
            lines[4], _ = sealed_line({**line, "bytes": 99})
        case "removed":
            del lines[4]
        case "swapped":
            lines[4], lines[5] = lines[5], lines[4]
        case "twice":
            lines.insert(4, lines[4])
    log_of(config).write_bytes(b"".join(lines))
    assert "does not follow the line before" in check_audit(config).broken


def test_a_chain_that_was_written_anew_fits_no_head(config: SiloStartConfig) -> None:
    rewrite(config, bytes=99)
    assert AuditReader(log_of(config).parent).digests({10}) != {}  # a chain it is
    assert "is not that of" in check_audit(config).broken


def test_a_tail_that_was_cut_off(config: SiloStartConfig) -> None:
    rewrite(config, keep=7)
    assert "ends with line 7" in check_audit(config).broken
    log_of(config).unlink()
    assert "ends with line 0" in check_audit(config).broken


def test_an_old_head_in_the_place_of_the_new_one_hides_no_cut(config: SiloStartConfig) -> None:
    """The machine set back as a whole: its own head fits, the one elsewhere does not."""
    yesterday = json.loads(next(Path(str(config.audit.head_to)).iterdir()).read_text())
    assert yesterday["n"] == 5
    rewrite(config, keep=3)
    head_of(config).unlink()
    assert "ends with line 3" in check_audit(config).broken


def test_who_has_the_key_signs_another_log_and_the_head_elsewhere_disagrees(config: SiloStartConfig) -> None:
    share = Path(str(config.audit.head_to))
    rewrite(config, bytes=99)
    head_of(config).unlink()
    HeadKeeper(config.model_copy(update={"audit": AuditConfig()})).tend()  # the tamperer's, with the node key
    assert "is not that of" in check_audit(config).broken
    assert "is not that of" in check_audit(config.model_copy(update={"audit": AuditConfig()}), share).broken
    assert not check_audit(config.model_copy(update={"audit": AuditConfig()})).broken  # what no head elsewhere means


def test_heads_are_this_silos_own(config: SiloStartConfig) -> None:
    mine = json.loads(head_of(config).read_text())
    elsewhere = Path(config.state).with_name("o")
    elsewhere.mkdir()
    other = json.loads(head_of(made(elsewhere, "paris")).read_text())
    changes = ({"silo": "paris"}, {"n": mine["n"] - 1}, {"signature": "00" * 100}, {"key": "SHA256:x"})
    for lie in (other, {}, *({**mine, **change} for change in changes)):
        head_of(config).write_text(json.dumps(lie))
        assert HEAD in check_audit(config).broken, lie


def test_a_log_that_does_not_go_on_is_not_signed(config: SiloStartConfig, caplog: pytest.LogCaptureFixture) -> None:
    before = head_of(config).read_bytes()
    rewrite(config, bytes=99)
    add(config)
    for keeper in (HeadKeeper(config), HeadKeeper(config)):
        keeper.tend(last=True)
    assert "the audit log is not signed" in caplog.text and head_of(config).read_bytes() == before


def test_a_share_that_is_gone_is_told_and_tried_anew(config: SiloStartConfig, caplog: pytest.LogCaptureFixture) -> None:
    share = Path(str(config.audit.head_to))
    shutil.rmtree(share)
    keeper = HeadKeeper(config)
    keeper.tend()
    mark = Path(config.state) / AUDIT / UNWRITTEN
    assert mark.exists() and "cannot be written off this machine" in caplog.text
    add(config)  # training goes on
    share.mkdir()
    keeper.tend()
    assert not mark.exists() and len(list(share.iterdir())) == 1


def test_nothing_leaves_before_the_first_head_or_after_the_day_s_where_the_share_is_gone(tmp_path: Path) -> None:
    """Heads that the owner demands; the first line of a new log has no head before it."""
    share, config = tmp_path / "share", owned(tmp_path, "berlin", required=True)
    keeper = HeadKeeper(config)
    for _ in range(2):
        keeper.tend()
        with pytest.raises(ConfigError, match="cannot be written to another machine") as caught:
            add(config)
        assert code_of(caught.value) is Refusal.DISK
        share.mkdir()
        keeper.tend()
        add(config)
        keeper.tend()
        shutil.rmtree(share)


def test_a_flood_that_pushes_out_what_was_read_ends_no_signing(tmp_path: Path) -> None:
    """The silo's process never signed again, so what came later could be cut off."""
    (tmp_path / "share").mkdir()
    config = owned(tmp_path, "berlin", bytes=100_000, keep=2)
    log, keeper = AuditLog(audit_place(config)), HeadKeeper(config)
    for count in (1, 900, 1):
        with patch("os.fdatasync"):
            for _ in range(count):
                log.add("answered", {**LINE, "bytes": 1, "sent": "00"})
        keeper.tend()
        assert not any("after the last signed head" in note for note in check_audit(config).notes)
    assert not log_of(config).exists()
    for folder in (log_of(config).parent, tmp_path / "share"):
        shutil.rmtree(folder)
    log.add("answered", {**LINE, "bytes": 1, "sent": "00"})
    for _ in range(2):  # a log that does not continue from the signed line is no flood
        keeper.tend()
    assert not head_of(config).exists()


def test_nothing_leaves_while_the_log_cannot_be_signed_where_its_head_is_required(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    config = owned(tmp_path, "berlin", required=True)
    keeper = HeadKeeper(config)
    keeper.tend()
    add(config)
    good = log_of(config).read_bytes()
    log_of(config).write_bytes(good.replace(b"WorkReport", b"Evaluation") + good)
    keeper.tend()
    with pytest.raises(ConfigError, match="cannot be written to another machine"):
        add(config)
    log_of(config).write_bytes(good)
    keeper.tend()
    add(config)


HOSTILE: dict[str, dict[str, object]] = {
    "number of what was removed": {"kind": "pruned", "first": "x"},
    "bytes": {"kind": "answered", "bytes": "many"},
    "specification": {"kind": "answered", "spec": 5},
    "code": {"kind": "answered", "said": "Refused", "code": [1]},
    "name of the run": {"kind": "answered", "run": {"a": 1}},
    "rotation": {"kind": "rotated", "old": 5, "new": 6, "silo": 7, "signature": 8},
    "key": {"kind": "rotated", "old": "ssh-ed25519 AAAA", "new": "x", "silo": "berlin", "signature": "00"},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_chain_of_nonsense_is_an_error_with_a_place_and_no_stack_trace(what: str, config: SiloStartConfig) -> None:
    """Lines that fit together, of whoever has the machine: the owner's command ended with a stack trace."""
    add(config)
    lines = [json.loads(line) for line in log_of(config).read_bytes().splitlines()]
    lines[-1].pop("digest")
    raw, _ = sealed_line({**lines[-1], **HOSTILE[what]})  # type: ignore[arg-type]  # it is nonsense
    whole = log_of(config).read_bytes().splitlines(keepends=True)
    log_of(config).write_bytes(b"".join([*whole[:-1], raw]))
    try:
        found = check_audit(config)
        assert table(found)
    except ConfigError as error:
        assert AUDIT in str(error)


@pytest.mark.parametrize("place", [f"berlin/{AUDIT}/{file_name(2)}", "share/berlin-2025-12-31.json"])
def test_a_pipe_in_the_place_of_a_log_or_a_head_stops_nobody(place: str, config: SiloStartConfig) -> None:
    """The owner's command waited for ever, and so did the supervisor that signs. Others may write to the share."""
    os.mkfifo(Path(config.state).parent / place)

    def read(by: Callable[[], object]) -> None:
        with suppress(ConfigError):
            by()

    for by in (lambda: check_audit(config), HeadKeeper(config).tend, lambda: add(config)):
        thread = threading.Thread(target=read, args=[by], daemon=True)
        thread.start()
        thread.join(5.0)
        assert not thread.is_alive()
