"""Files that only their owner may read, and damage to them, which is noticed wherever it is."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.common.files import (
    ANYBODY_FILE,
    check_result,
    digested,
    private_folder,
    read_private,
    remove_unfinished,
    undigested,
    write_atomically,
    write_private,
    write_result,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return private_folder(tmp_path / "own")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_is_written_for_its_owner_alone_whatever_the_umask(folder: Path) -> None:
    with umask(0):
        write_private(folder / "key", b"secret")
        open_to_all = private_folder(folder / "inner")
    assert (mode(folder / "key"), mode(folder), mode(open_to_all)) == (0o600, 0o700, 0o700)
    assert read_private(folder / "key", 6) == b"secret"


def test_a_public_file_can_be_read_by_all_even_under_a_strict_umask(folder: Path) -> None:
    with umask(0o077):
        write_atomically(folder / "public", b"x", ANYBODY_FILE)
    assert mode(folder / "public") == 0o644


@pytest.mark.parametrize("mask", [0o077, 0o027, 0o022])
@pytest.mark.parametrize("write", [write_atomically, write_result])
def test_new_files_have_the_processs_permissions(folder: Path, write: Callable[[Path, bytes], None], mask: int) -> None:
    with umask(mask):
        write(folder / "model.pt", b"x")
    assert mode(folder / "model.pt") == 0o666 & ~mask


@pytest.mark.parametrize("write", [write_private, write_result])
def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(
    folder: Path, write: Callable[[Path, bytes], None], request: pytest.FixtureRequest
) -> None:
    write(folder / "key", b"old")
    request.getfixturevalue("full_disk")
    with pytest.raises(ConfigError, match="No space left on device"):
        write(folder / "key", b"new")
    assert [path.name for path in folder.iterdir()] == ["key"]
    assert (folder / "key").read_bytes() == b"old"


def test_a_result_keeps_its_permissions(folder: Path) -> None:
    (folder / "old").touch(0o600)
    write_result(folder / "old", b"y")
    assert mode(folder / "old") == 0o600 and (folder / "old").read_bytes() == b"y"


def test_a_result_goes_behind_links_and_into_pipes(folder: Path) -> None:
    (folder / "link").symlink_to("file")
    check_result(folder / "link", "--out")
    write_result(folder / "link", b"x")
    assert (folder / "link").is_symlink() and (folder / "file").read_bytes() == b"x"
    os.mkfifo(folder / "pipe")
    reader = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    check_result(folder / "pipe", "--out")
    write_result(folder / "pipe", b"y")
    assert os.read(reader, 9) == b"y"
    os.close(reader)
    assert (folder / "pipe").is_fifo()


def test_a_result_joins_what_the_process_prints(folder: Path) -> None:
    """/dev/stdout may lead to a file, which has what was there before, and what is printed before and after."""
    code = (
        "from pathlib import Path; from fedsync.common.files import write_result as w\n"
        "print('first'); w(Path('/dev/stdout'), b'result\\n'); print('last')"
    )
    (folder / "out").write_text("history\n")
    with (folder / "out").open("ab") as out:
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=out, check=True)
    assert (folder / "out").read_text() == "history\nfirst\nresult\nlast\n"


def test_where_no_result_can_be_written_is_known_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "link").symlink_to("nowhere/file")
    for path, problem in (
        (folder / "none" / "x", "there is no folder"),
        (folder / "link", "there is no folder .*nowhere"),
        (folder, "is a folder. Name a file in it"),
    ):
        with pytest.raises(ConfigError, match=f"^--out: .*{problem}"):
            check_result(path, "--out")
    write_result(folder / "x", b"old")
    for shut in (folder, folder / "x"):
        # The superuser may write everywhere, so the answer is made up.
        monkeypatch.setattr(os, "access", lambda path, mode, shut=shut: path != shut)
        with pytest.raises(ConfigError, match=f"'{shut}' cannot be written"):
            check_result(folder / "x", "--out")


def test_what_killed_writers_have_left_goes_and_nothing_else(folder: Path) -> None:
    for name in ("a.bin", ".a.bin.12", ".a.bin.34", ".a.bin.x", ".a.bin", ".b.bin.12"):
        (folder / name).touch()
    remove_unfinished(folder, "a.bin", lambda pid: pid == 34)
    assert {path.name for path in folder.iterdir()} == {"a.bin", ".a.bin.34", ".a.bin.x", ".a.bin", ".b.bin.12"}
    remove_unfinished(folder)
    assert {path.name for path in folder.iterdir()} == {"a.bin", ".a.bin.x", ".a.bin"}


@pytest.mark.parametrize("wrong", [0o640, 0o604, 0o644, 0o660])
def test_a_file_open_to_others_is_refused_with_the_remedy(folder: Path, wrong: int) -> None:
    write_private(folder / "key", b"secret")
    (folder / "key").chmod(wrong)
    with pytest.raises(ConfigError, match=rf"mode is {wrong:04o}.*chmod 600"):
        read_private(folder / "key", 100)


def test_a_folder_open_to_others_is_refused_for_reading_and_writing(folder: Path) -> None:
    write_private(folder / "key", b"secret")
    folder.chmod(0o750)
    for attempt in (
        lambda: private_folder(folder),
        lambda: write_private(folder / "key", b"new"),
        lambda: read_private(folder / "key", 100),
    ):
        with pytest.raises(ConfigError, match=r"mode is 0750.*chmod 700"):
            attempt()
    assert (folder / "key").read_bytes() == b"secret"


def test_another_users_folder_is_not_called_open_but_anothers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o755)
    me = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: me)
    with pytest.raises(
        ConfigError,
        match=rf"belongs to user {me - 1}, not to user {me}\. Run the command as user {me - 1}\..*: `chown -R {me} ",
    ):
        private_folder(folder)


def test_what_is_no_plain_file_or_too_long_is_refused(folder: Path, tmp_path: Path) -> None:
    write_private(folder / "key", b"secret")
    (folder / "link").symlink_to(folder / "key")
    os.mkfifo(folder / "pipe", 0o600)
    for name, problem in (("link", "cannot be read"), ("pipe", "plain file"), ("none", "No such file")):
        with pytest.raises(ConfigError, match=problem):
            read_private(folder / name, 100)
    with pytest.raises(ConfigError, match="longer than 5 bytes"):
        read_private(folder / "key", 5)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="no folder can be made"):
        private_folder(tmp_path / "file")


def test_what_was_written_comes_back_and_nothing_else_does() -> None:
    data = digested(b"model")
    assert undigested(data) == b"model"
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        assert undigested(bytes(changed)) is None
        assert undigested(data[:at]) is None
    assert undigested(data + b"\0") is None
    assert undigested(digested(b"")) == b""
