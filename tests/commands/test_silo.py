"""``fedsync silo unlock`` and ``fedsync silo digest``."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsync.cipher.keys.authority import emulated_keys
from fedsync.cipher.keys.keyring import open_ring
from fedsync.common.errors import ConfigError
from fedsync.silo.owner.lockout import COUNT, Lockout
from fedsync.tasks.digits import DigitsTask
from fedsync.tasks.partition import Iid
from fedsync.train.weights import TaskModel
from tests.commands.call import call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return emulated_keys(["berlin"], tmp_path / "keys", 1, lambda: b"context").silos["berlin"]


def silo(tmp_path: Path, folder: Path | None) -> Path:
    file = tmp_path / "silo.yaml"
    keys = "" if folder is None else f", keys: {folder}"
    file.write_text(f"{{name: berlin, server: 'x:1', insecure: true, state: /tmp/s{keys}}}")
    return file


def test_a_silo_is_unlocked_and_told_what_happened(tmp_path: Path, folder: Path) -> None:
    lockout = Lockout(open_ring(folder))
    for number in range(3):
        lockout.count(f"forgery {number}")
    told = call("silo", "unlock", "--silo", silo(tmp_path, folder))
    assert [line.partition(" ")[2] for line in told.splitlines()[:3]] == ["forgery 0", "forgery 1", "forgery 2"]
    assert "silo berlin is open" in told
    lockout.check()
    assert "forgery" not in call("silo", "unlock", "--silo", silo(tmp_path, folder))


def test_a_damaged_count_is_replaced(tmp_path: Path, folder: Path) -> None:
    Lockout(open_ring(folder))
    (folder / COUNT).unlink()
    assert "missing or damaged" in call("silo", "unlock", "--silo", silo(tmp_path, folder))
    Lockout(open_ring(folder)).check()


def test_a_silo_without_keys_has_nothing_to_unlock(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a silo without keys is never locked"):
        call("silo", "unlock", "--silo", silo(tmp_path, None))


# `fedsync silo digest`: what an owner pins is what the silo finds of a model that comes in the clear.


def test_the_digest_is_that_of_the_values_that_travel(tmp_path: Path) -> None:
    task = DigitsTask(Iid(), 0.2)
    vector = TaskModel(task, 7).initial()
    TaskModel(task, 7).save_model(tmp_path / "model.pt", vector)
    expected = hashlib.sha256(np.ascontiguousarray(vector, dtype="<f4").tobytes()).hexdigest()
    assert call("silo", "digest", tmp_path / "model.pt").strip() == expected
    # Tied weights travel once, and whole numbers as float32.
    one = torch.nn.Parameter(torch.ones(2))
    torch.save({"a": one, "b": one, "n": torch.tensor(3)}, tmp_path / "tied.pt")
    values = np.array([1, 1, 3], dtype="<f4")
    assert call("silo", "digest", tmp_path / "tied.pt").strip() == hashlib.sha256(values.tobytes()).hexdigest()


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_text("secret")
    for name, why in {"x.pt": "not a state dict", "none.pt": "there is no such file"}.items():
        with pytest.raises(ConfigError, match=why) as caught:
            call("silo", "digest", tmp_path / name)
        assert "secret" not in str(caught.value)
