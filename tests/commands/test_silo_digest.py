"""``fedsync silo digest``: what an owner pins is what the silo finds of a model that comes in the clear."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsync.common.errors import ConfigError
from fedsync.tasks.digits import DigitsTask
from fedsync.tasks.partition import Iid
from fedsync.train.weights import TaskModel, initial_model
from tests.commands.call import call


def test_the_digest_is_that_of_the_values_that_travel(tmp_path: Path) -> None:
    task = DigitsTask(Iid(), 0.2)
    vector, _ = initial_model(task, 7)
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
