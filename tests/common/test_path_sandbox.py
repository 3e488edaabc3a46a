"""Files that a run may read at a silo, and every way to one that it may not."""

import json
import os
import threading
from pathlib import Path

import pytest

from fedsync.common.errors import OwnerRefusal
from fedsync.common.sandbox import path_sandbox as fence
from fedsync.common.sandbox.path_sandbox import ALLOWED, Fence, open_data

SECRET, PLAIN = b"secret", b"plain"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """``data`` with a file in it and one in ``data/deep``; ``data/keys`` and ``apart``, which are closed; ``other``."""
    for name in ("data/deep", "data/keys", "apart", "other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(PLAIN if name == "data/deep" else SECRET)
    (tmp_path / "data" / "file").write_bytes(PLAIN)
    (tmp_path / "silo.yaml").write_bytes(SECRET)
    fence._files_in.cache_clear()
    return tmp_path


def of(home: Path, below: str = "data") -> Fence:
    never = [str(home / name) for name in ("data/keys", "apart", "silo.yaml")]
    return Fence((str((home / below).resolve()),), tuple(never))


def refused(where: Fence, path: str | Path) -> None:
    with pytest.raises(OwnerRefusal, match="outside the folders that this silo's owner allows runs to read") as caught:
        where.open(path).close()
    assert "secret" not in str(caught.value)


def read(where: Fence, path: Path) -> bytes:
    with where.open(path) as file:
        return file.read()


def test_what_lies_below_a_data_folder_is_read(home: Path) -> None:
    (home / "data" / "link").symlink_to("deep/file")
    os.link(home / "data" / "file", home / "data" / "twin")
    for name in ("file", "deep/file", "link", "twin", "deep/../file"):
        assert read(of(home), home / "data" / name) == PLAIN


@pytest.mark.parametrize(
    "path",
    [
        "other/file", "data/../other/file", "data/keys/file", "data/deep/../keys/file", "apart/file", "silo.yaml",
        "data-not/file", "data/keys", "data",
    ],
)  # fmt: skip
@pytest.mark.parametrize("below", ["data", "."])
def test_what_lies_elsewhere_or_is_closed_is_not(path: str, below: str, home: Path) -> None:
    if below == "." and path.endswith("other/file"):
        return
    with pytest.raises((OwnerRefusal, FileNotFoundError)):
        of(home, below).open(home / path).close()


@pytest.mark.parametrize("target", ["data/keys/file", "apart/file", "silo.yaml", "other/file"])
def test_links_lead_nowhere_else(target: str, home: Path) -> None:
    link, folder = home / "data" / "link", home / "data" / "folder"
    link.symlink_to(home / target)
    folder.symlink_to((home / target).parent)
    refused(of(home), link)
    refused(of(home), folder / Path(target).name)


@pytest.mark.parametrize("target", ["data/keys/file", "apart/file", "silo.yaml"])
def test_a_second_name_of_a_closed_file_is_closed(target: str, home: Path) -> None:
    os.link(home / target, home / "data" / "twin")
    refused(of(home), home / "data" / "twin")


@pytest.mark.parametrize("below", ["/", "/proc"])
def test_the_kernels_files_are_no_data(below: str, home: Path) -> None:
    everything = Fence((below,), ())
    for name in ("environ", "mem", "fd/0", "cwd/pyproject.toml"):
        if not (below == "/" and name.startswith(("fd", "cwd"))):
            refused(everything, f"/proc/self/{name}")
    with (home / "apart" / "file").open("rb") as file:
        refused(of(home), f"/proc/self/fd/{file.fileno()}")
    refused(of(home), f"/proc/self/root{home}/apart/file")


def test_neither_a_circle_nor_a_pipe_holds_anybody_up(home: Path) -> None:
    (home / "data" / "circle").symlink_to("circle")
    os.mkfifo(home / "data" / "pipe")
    for name in ("circle", "pipe", "deep", "nul\0"):
        with pytest.raises((OwnerRefusal, OSError)):
            of(home).open(f"{home}/data/{name}").close()


def test_a_link_that_is_swapped_in_after_the_check_leads_nowhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either of the last part or of a folder on the way."""
    where, inside = of(home), Fence._inside

    def swap(name: str, target: str) -> None:
        place = home / "data" / name
        place.rename(home / f"was-{place.name}")
        place.symlink_to(home / target)

    for name, target, path in (("file", "apart/file", "file"), ("deep", "apart", "deep/file")):

        def checked_then_swapped(self: Fence, given: str | Path, name: str = name, target: str = target) -> object:
            found = inside(self, given)
            swap(name, target)
            return found

        monkeypatch.setattr(Fence, "_inside", checked_then_swapped)
        with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
            where.open(home / "data" / path).close()


def test_a_race_of_swaps_is_never_won(home: Path) -> None:
    where, path, done = of(home), home / "data" / "race", threading.Event()

    def swap() -> None:
        aside = home / "data" / "aside"
        while not done.is_set():
            for target in ("file", "../apart/file"):
                aside.symlink_to(target)
                aside.replace(path)

    path.symlink_to("file")
    thread = threading.Thread(target=swap)
    thread.start()
    found = set()
    try:
        for _ in range(500):
            try:
                found.add(read(where, path))
            except (OwnerRefusal, OSError):
                found.add(b"refused")
    finally:
        done.set()
        thread.join()
    assert found <= {PLAIN, b"refused"}


def test_a_process_goes_by_what_its_environment_says(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOWED, raising=False)
    with open_data(home / "other" / "file") as file:
        assert file.read() == SECRET, "nobody owns an emulated silo"
    for allowed in ({"data": []}, {"data": [str(home)], "never": [str(home / "other")]}):
        monkeypatch.setenv(ALLOWED, json.dumps(allowed))
        with pytest.raises(OwnerRefusal):
            open_data(home / "other" / "file")
