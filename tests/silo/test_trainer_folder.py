"""A trainer's folder has one tenant, whom everybody else can name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from fedsync.common.locks import wait_until
from fedsync.common.processes import INTERPRETER
from fedsync.core.orders import Subject
from fedsync.silo.protocol import ANSWER, COPY, IDENTITY, SOCKET
from fedsync.silo.session.own_variate import VARIATE
from fedsync.silo.session.trainer_folder import FolderLock, tenant
from tests.silo.holders import holder


def test_one_process_at_a_time_until_it_is_killed(tmp_path: Path) -> None:
    assert tenant(tmp_path) is None and tenant(tmp_path / "nowhere") is None
    for _ in range(2):  # the second time the file was left there, and means nothing
        with holder(tmp_path) as pid:
            assert tenant(tmp_path) == pid
            assert FolderLock.take(tmp_path) is None
        assert tenant(tmp_path) is None


def test_a_trainer_removes_what_killed_processes_have_not_finished(tmp_path: Path) -> None:
    """Each of these files may be as large as the model, and has another name after each kill."""
    with subprocess.Popen([sys.executable, "-c", ""]) as killed:
        killed.wait()
    for name in (ANSWER, COPY, VARIATE, f"{Subject.LOCAL}.bin"):
        (tmp_path / f".{name}.{killed.pid}").write_bytes(b"half of it")
    being_written, kept = tmp_path / f".{IDENTITY}.{os.getpid()}", tmp_path / VARIATE
    for path in (being_written, kept):
        path.write_bytes(b"whole")
    with subprocess.Popen([*INTERPRETER, "fedsync.silo.session.resident_trainer", str(tmp_path)]) as trainer:
        assert wait_until((tmp_path / SOCKET).exists, 30.0, 0.05)
        left = set(tmp_path.iterdir())
        trainer.kill()
    assert {path for path in left if path.name.startswith(".")} == {being_written} and kept in left


def test_a_tenure_ends_with_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    tenure = FolderLock.take(folder)
    assert tenure is not None and tenure.lasts
    shutil.rmtree(folder)
    assert not tenure.lasts
    folder.mkdir()
    other = FolderLock.take(folder)
    assert other is not None and other.lasts and not tenure.lasts
