"""The best model's file is at every instant one of which best.json says the version."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.core.actions import KeepBest
from fedsync.core.orders import Score
from fedsync.model.layout import Vector
from fedsync.observe.quality import kept_models
from fedsync.observe.quality.kept_models import BEST, LAST, MODEL, STATED, KeptModels


class KilledError(BaseException):
    """Nothing catches it, as nothing is done by a process that is killed."""


def best(version: int) -> KeepBest:
    return KeepBest(Score(version, version / 10, None, {"auroc": 0.5}), version / 10)


def model(version: int) -> Vector:
    return np.full(4, version, np.float32)


def save(path: Path, vector: Vector) -> None:
    path.write_bytes(vector.tobytes())


def there(out: Path) -> int | None:
    """Version of the model in the file; None where there is none."""
    path = out / BEST
    return int(np.frombuffer(path.read_bytes(), np.float32)[0]) if path.exists() else None


def best_of(out: Path) -> Any:
    """Entry of best.json for the file; None where there is none, or another."""
    path = out / BEST
    return json.loads((out / STATED).read_bytes()).get(_digest(path)) if path.exists() else None


def said(out: Path) -> int | None:
    found = best_of(out)
    return None if found is None else found["version"]


def test_what_is_said_of_the_best_is_its_version_value_and_metrics(tmp_path: Path) -> None:
    models = KeptModels(tmp_path, save)
    models.keep(best(3), model(3))
    models.finish(model(5))
    assert models.digests == {name: _digest(tmp_path / f"{name}.pt") for name in ("best", "last")}
    assert list(json.loads((tmp_path / STATED).read_text())) == [models.digests["best"]], "people can read it"
    assert best_of(tmp_path) == {"version": 3, "value": 0.3, "metrics": {"accuracy": 0.3, "auroc": 0.5}}
    assert (there(tmp_path), (tmp_path / LAST).read_bytes()) == (3, (tmp_path / MODEL).read_bytes())
    (tmp_path / BEST).write_bytes(b"another file")
    assert best_of(tmp_path) is None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


STEPS = {
    "it is hashed": (kept_models, "file_digest"),
    "its version is said": (kept_models, "write_atomically"),
    "it takes its place": (Path, "replace"),
}


@pytest.mark.parametrize("deaths", [1, 3])
@pytest.mark.parametrize("before", STEPS)
def test_wherever_a_process_is_killed_the_file_is_what_is_said_of_it(tmp_path: Path, before: str, deaths: int) -> None:
    """Also where each that goes on is killed again at the same place, with another version."""
    models = KeptModels(tmp_path, save)
    models.keep(best(1), model(1))
    models.write_if_due()

    def die(*_: object) -> None:
        raise KilledError

    for death in range(deaths):
        models = KeptModels(tmp_path, save, resume=True)
        models.keep(best(2 + death), model(2 + death))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*STEPS[before], die)
            with pytest.raises(KilledError):
                models.write_if_due()
        assert said(tmp_path) == there(tmp_path) == 1
    models = KeptModels(tmp_path, save, resume=True)
    models.keep(best(9), model(9))
    models.write_if_due()
    assert said(tmp_path) == there(tmp_path) == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([STATED, BEST])


def test_a_large_file_is_written_now_and_then_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes 1 s here: the next is written no sooner than 20 s later, and is the newest then."""
    clock = [100.0]
    monkeypatch.setattr(kept_models.time, "monotonic", lambda: clock[0])
    written: list[int] = []

    def slowly(path: Path, vector: Vector) -> None:
        save(path, vector)
        clock[0] += 1.0
        written.append(int(vector[0]))

    models = KeptModels(tmp_path, slowly)
    for version, at_s in ((1, 100.0), (2, 102.0), (3, 120.9), (4, 121.0), (5, 122.5)):
        clock[0] = at_s
        models.keep(best(version), model(version))
        models.write_if_due()
    assert written == [1, 4]
    models.finish(model(6))
    assert written == [1, 4, 5, 6] and said(tmp_path) == there(tmp_path) == 5


def test_a_run_that_begins_has_no_best_of_another_and_one_that_goes_on_has(tmp_path: Path) -> None:
    models = KeptModels(tmp_path, save)
    models.keep(best(1), model(1))
    models.finish(model(2))
    KeptModels(tmp_path, save, resume=True)
    assert there(tmp_path) == 1 and not (tmp_path / LAST).exists()
    KeptModels(tmp_path, save)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_no_run_but_is_said_at_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def full(path: Path, vector: Vector) -> None:
        raise ConfigError(str(path), "cannot be written: no space", "Make room")

    models = KeptModels(tmp_path, full)
    for version in (1, 2):
        models.keep(best(version), model(version))
        models.write_if_due()
    assert len(caplog.records) == 1
    models.finish(None)
    assert models.digests == {}
    with pytest.raises(ConfigError):
        models.finish(model(3))


def test_a_best_model_that_found_no_room_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    room = [True, False]

    def until_full(path: Path, vector: Vector) -> None:
        if not room.pop(0):
            raise ConfigError(str(path), "cannot be written: no space", "Make room")
        save(path, vector)

    models = KeptModels(tmp_path, until_full)
    models.keep(best(1), model(1))
    models.write_if_due()
    assert models.digests == {"best": _digest(tmp_path / BEST)}
    models.keep(best(2), model(2))
    models.finish(None)
    assert models.digests == {}


@pytest.mark.parametrize("text", ["[]", "7", "null", "{", ""])
def test_a_damaged_best_json_ends_no_resumed_run(tmp_path: Path, text: str) -> None:
    (tmp_path / STATED).write_text(text)
    models = KeptModels(tmp_path, save, resume=True)
    models.keep(best(3), model(3))
    models.finish(model(5))
    assert (there(tmp_path), said(tmp_path)) == (3, 3)
