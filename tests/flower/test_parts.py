"""Silos whose model is not the first one's are refused by name, through the Flower driver; the others go on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedsync.common.errors import ConfigError
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.first_model import task_model
from fedsync.flower.flower_strategy import FedSync
from fedsync.flower.result import RunResult
from fedsync.model.tensor_parts import ModelForm
from fedsync.model.transfer import Payload
from fedsync.observe.run_builder import measuring
from fedsync.server.checkpoints import digest, prepare
from fedsync.silo.owner.key_lookup import KEYS
from fedsync.silo.protocol import Hello
from fedsync.train.weights import read_arrays
from tests.flower import cut_off_runs
from tests.flower.cut_off_runs import SILOS, with_keys
from tests.flower.grid import Answer, DirectGrid, changing
from tests.simulation.test_parts import APP, TASK

pytestmark = pytest.mark.usefixtures("silos_here")

QUICK = ["local.steps=2", "local.batch_size=8", "stop.rounds=2", "min_silos=2"]
TIMING = replace(cut_off_runs.TIMING, look_s=0.05)


def started(
    folder: Path, monkeypatch: pytest.MonkeyPatch, task: object, *overrides: str, grid: DirectGrid | None = None
) -> RunResult:
    """Result of a run, with keys where it is encrypted."""
    config = StrategyConfig.load("fedavg", [*QUICK, f"task={json.dumps(task)}", *overrides])
    keys = with_keys(config, folder, monkeypatch)
    return FedSync(config, SILOS, out=folder / "run", timing=TIMING, keys=keys).start(grid or DirectGrid(3))


def app(folder: Path, **options: str) -> dict[str, object]:
    (folder / "app.py").write_text(APP)
    return {"kind": "silo-app", "file": str(folder / "app.py"), "options": options}


def lying(form: ModelForm | None) -> Answer:
    """A silo that is honest but for what it says of its model."""
    return changing(Hello, lambda hello, payload: (replace(hello, form=form), payload))


@pytest.mark.parametrize(
    "form", [None, ModelForm("", ""), ModelForm("0" * 64, ""), ModelForm("x\n" * 4000, "y"), ModelForm("", "1" * 65)]
)
def test_a_liar_with_another_layout_or_with_nonsense_is_refused(
    form: ModelForm | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    result = started(tmp_path, monkeypatch, {"kind": "digits"}, grid=DirectGrid(3, {2: lying(form)}))
    assert {silo["name"] for silo in result.summary["silos"] if silo["orders"]} == {"a", "c"}
    assert "failed the check" in caplog.text and len(max(caplog.text.splitlines(), key=len)) < 400


def test_what_the_server_is_told_of_frozen_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the clear their digest; with keys something of this run alone, which nobody without a key can compute."""
    told: list[str] = []

    def heard(hello: Hello, payload: Payload | None) -> tuple[Hello, Payload | None]:
        assert hello.form is not None
        told.append(hello.form.frozen)
        return hello, payload

    for number, cipher in enumerate(("plain", "plain", "pad", "pad")):
        (tmp_path / str(number)).mkdir()
        grid = DirectGrid(3, dict.fromkeys((1, 2, 3), changing(Hello, heard)))
        started(tmp_path / str(number), monkeypatch, app(tmp_path), f"cipher={{kind: {cipher}}}", grid=grid)
        monkeypatch.delenv(KEYS, raising=False)
    runs = [set(told[start : start + 3]) for start in range(0, 12, 3)]
    assert all(len(each) == 1 and "" not in each for each in runs), "silos of a run say the same"
    assert runs[0] == runs[1] and len(runs[0] | runs[2] | runs[3]) == 3


def test_a_resumed_run_remembers_whose_frozen_tensors_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(version: int, arrays: ArrayRecord) -> None:
        if version == 1:
            raise KeyboardInterrupt

    config = StrategyConfig.load("fedavg", [*QUICK, f"task={json.dumps(app(tmp_path))}"])
    with pytest.raises(KeyboardInterrupt):
        FedSync(config, SILOS, out=tmp_path / "run", timing=TIMING).start(DirectGrid(3), evaluate_fn=dies)
    origin = prepare(tmp_path / "run", digest(measuring(config), SILOS)).origin
    assert origin.frozen is not None and len(origin.frozen) == 64 and origin.kept == ("body.weight", "body.bias")


def task_arrays(config: StrategyConfig, file: Path) -> dict[str, Any]:
    built = task_model(config)
    built.save_model(file, built.initial())
    return read_arrays(file)


def test_given_arrays_may_have_what_does_not_travel_and_come_back_with_it(tmp_path: Path) -> None:
    (tmp_path / "bodied.py").write_text(TASK)
    task = {"kind": "custom", "file": str(tmp_path / "bodied.py"), "options": {"body": True}}
    config = StrategyConfig.load("fedavg", [*QUICK, f"task={json.dumps(task)}"])
    given = {"own.bias": np.zeros(30, np.float32), **task_arrays(config, tmp_path / "model.pt")}
    # A frozen array with the values of one that travels is not taken for tied to it.
    given["net.bias"] = given["body.bias"][:5].copy()
    run = FedSync(config, SILOS, out=tmp_path / "run", timing=TIMING)
    result = run.start(DirectGrid(3), ArrayRecord({name: Array(value) for name, value in given.items()}))
    assert set(result.arrays) == set(given)
    np.testing.assert_array_equal(result.arrays["body.bias"].numpy(), given["body.bias"])
    assert (result.arrays["net.weight"].numpy() != given["net.weight"]).any()
    given["body.bias"] = np.zeros_like(given["body.bias"])
    with pytest.raises(ConfigError, match=r"initial_model: 'body\.\w+', or another frozen tensor, differs"):
        FedSync(config, SILOS, out=tmp_path / "another", timing=TIMING).start(
            DirectGrid(3), ArrayRecord({name: Array(value) for name, value in given.items()})
        )
    with pytest.raises(ConfigError, match="which the model at the silos has not"):
        FedSync(config, SILOS, out=tmp_path / "other", timing=TIMING).start(
            DirectGrid(3), ArrayRecord({**result.arrays, "odd": Array(np.ones(3, np.float32))})
        )
