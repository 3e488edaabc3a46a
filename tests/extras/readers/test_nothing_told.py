"""No complaint about a file has anything of what stands in it, whatever the file is taken for."""

import io
import json
import pickle
import wave
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.extras.readers.cifar import CifarSource
from fedsync.extras.readers.idx import IdxSource
from fedsync.extras.readers.leaf import LeafSource
from fedsync.extras.readers.libsvm import LibsvmSource
from fedsync.extras.readers.npz import NpzSource
from fedsync.extras.readers.speech import SpeechSource
from fedsync.extras.readers.table import TableSource
from fedsync.tasks.csv_ import CsvTask
from fedsync.tasks.custom import load_task
from fedsync.tasks.task_protocol import SiloSlot

WORD = "mueller73519"
"""Stands for whatever a file has and nobody is to hear of."""

NUMBER = 73519


def zipped(name: str, content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, content)
    return out.getvalue()


def arrays(**given: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **given)
    return out.getvalue()


def recording(rate: int) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as writer:
        writer.setparams((1, 2, rate, 0, "NONE", ""))
        writer.writeframes(b"\0\0")
    return out.getvalue()


def csv_task(path: Path, **options: Any) -> object:
    return CsvTask((str(path),), "y", **options).data(SiloSlot("a", 0, 1, 1))


def table(path: Path) -> object:
    return TableSource(str(path), target="y").read()


def folder(kind: Callable[[str], Any], name: str) -> Callable[[Path], object]:
    """A reader of folders, which finds the file under the name that it looks for."""

    def read(path: Path) -> object:
        place = path.with_name("folder") / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
        (path.with_name("folder") / name.replace("images-idx3", "labels-idx1")).write_bytes(path.read_bytes())
        return kind(str(path.with_name("folder"))).read()

    return read


KEY = f'{{"kind":"fedsync group 1","epoch":1,"key":"{WORD}"}}'
LIBSVM: Callable[[Path], object] = lambda path: LibsvmSource(str(path), features=4).read()  # noqa: E731
NPZ: Callable[[Path], object] = lambda path: NpzSource(str(path)).read()  # noqa: E731
IDX = folder(IdxSource, "train-images-idx3-ubyte")
LEAF = folder(LeafSource, "all.json")
CIFAR = folder(CifarSource, "data_batch_1")
SPEECH = folder(lambda path: SpeechSource(path, ("yes", "no")), "yes/a.wav")
READERS = {
    "csv": csv_task, "table": table, "libsvm": LIBSVM, "npz": NPZ, "idx": IDX, "leaf": LEAF, "cifar": CIFAR,
    "speech": SPEECH, "custom": lambda path: load_task(path, {}),
    "parquet": lambda path: table(path.rename(path.with_suffix(".parquet"))),
}  # fmt: skip


def complaint(read: Callable[[Path], object], content: bytes | str, path: Path) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        read(path)
    return str(caught.value)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", [KEY, f"{WORD}\n1,2\n", f"{WORD},y\n{WORD},{WORD}\n", f"\xff{WORD}"])
def test_a_file_that_is_taken_for_something_else_stays_closed(name: str, text: str, tmp_path: Path) -> None:
    """For example the key of the group, as the table of a run."""
    assert WORD not in complaint(READERS[name], text.encode("latin1"), tmp_path / "group.key")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("csv", f"{WORD},{WORD},y\n1,2,0\n"),
        ("csv", f"{WORD}\n1\n"),
        ("csv", f"x,y\n1,{WORD}\n"),
        ("csv", f"x,y\n1,{NUMBER}\n"),
        ("table", f"{WORD}\n1\n"),
        ("table", f"x,y\n{WORD},1\n"),
        ("table", f"{WORD},y\nx,1\n"),
        ("table", f"x,y\n1,{NUMBER}\n"),
        ("csv", f"{WORD},y\n1,0\n5%,1\n"),
        ("csv", f"x,y\n1,0\n{WORD},1\n"),
        ("csv", f"x,y\n1,0\n{NUMBER}%,1\n"),
        ("csv", f"x,y\n1,0\n1,0,{WORD}\n"),
        ("csv", f'x,y\n1,0\n"{WORD},1\n'),
        ("libsvm", f"1 1:{WORD}\n"),
        ("libsvm", f"1 {NUMBER}:1\n"),
        ("libsvm", f"{NUMBER} 1:1\n"),
        ("npz", zipped(f"{WORD}.npy", b"")),
        ("npz", zipped("inputs.npy", WORD.encode())),
        ("npz", zipped("inputs.npy", b"\x93NUMPY\x01\x00v\x00{'descr': '" + WORD.encode() + b"'}")),
        ("npz", arrays(inputs=np.ones((1, 2)), targets=[NUMBER])),
        ("idx", b"\0\0\x08\x03" + NUMBER.to_bytes(4, "big") * 3),
        ("idx", b"\0\0\x73\x51" + bytes(12)),
        ("leaf", json.dumps({"user_data": {WORD: {"x": [[WORD]], "y": [0]}}})),
        ("leaf", json.dumps({"user_data": {WORD: {"x": [[WORD] * 784], "y": [0]}}})),
        ("leaf", json.dumps({"user_data": {"a": {"x": [[0] * 784], "y": [NUMBER]}}})),
        ("cifar", b"c" + WORD.encode() + b"\nsystem\n."),
        ("cifar", pickle.dumps({WORD: 1, "data": 2})),
        ("speech", recording(NUMBER)),
    ],
)
def test_a_damaged_file_is_named_and_not_quoted(name: str, content: bytes | str, tmp_path: Path) -> None:
    told = complaint(READERS[name], content, tmp_path / "a")
    assert WORD not in told and str(NUMBER) not in told
    assert "0x73" not in told


@pytest.mark.parametrize(
    "code",
    [
        f"{WORD}",
        f"raise ValueError('{WORD}')",
        f"from fedsync import Task\nclass {WORD}(Task): ...\nclass B(Task): ...",
        f"from fedsync import Task\nclass {WORD}(Task):\n    def __init__(self, {WORD}): ...",
        f"from fedsync import Task\nclass {WORD}(Task):\n    model = data = None\n    def __init__(self): {WORD}2",
    ],
)
def test_an_owners_code_is_not_quoted_either(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "task.py"
    assert WORD in complaint(READERS["custom"], code, path), "whoever tries it out wants to know"
    monkeypatch.setenv("FEDSYNC_ALLOWED", json.dumps({"data": [str(tmp_path)]}))
    assert WORD not in complaint(READERS["custom"], code, path)
