"""Parts of a model that stay at the silo: they never travel, and are whole again after a restart."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsync.client import Silo, SiloApp
from fedsync.common.errors import ConfigError, Diverged
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.model.tensor_parts import UNSAID
from fedsync.silo.protocol import EvaluateModel, Identity
from fedsync.silo.session.session import SiloSession
from fedsync.train import module_parts
from fedsync.train.guests.guest import GuestTrainer
from fedsync.train.module_parts import PrivateParts, parts_of
from fedsync.train.options import LocalOptions
from tests.commands.call import call
from tests.train.make import order

APP = '''
from pathlib import Path

import torch
from torch import nn

from fedsync.client import SiloApp

app = SiloApp()


class Net(nn.Module):
    """A body that travels; a head, with a counter, that stays; a table that nothing trains."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.head = nn.Sequential(nn.Linear(3, 1, dtype=torch.float64), nn.BatchNorm1d(1, dtype=torch.float64))
        self.register_buffer("table", torch.arange(4))


@app.setup()
def setup(silo):
    return silo.use(Net, range(20), name=silo.name, out=Path(silo.options["out"]), private=["head.", "table"])


@app.train()
def fit(work, model, name, out):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in work.batches([None] * work.max_steps):
        loss = model.head(model.body(torch.randn(8, 2)).double()).square().mean() + model.head[0].bias.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        work.log(loss=loss)
        if (out / "crash").exists():
            raise KeyboardInterrupt


@app.evaluate()
def test(model, name, out):
    with open(out / f"{name}.txt", "a") as file:
        print(model.head[0].bias.item(), int(model.head[1].num_batches_tracked), file=file)
    return {"loss": (0.0, 1)}
'''


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    (tmp_path / "app.py").write_text(APP)
    task = {"kind": "silo-app", "file": str(tmp_path / "app.py"), "options": {"out": str(tmp_path)}}
    config = StrategyConfig.load("fedavg", [f"task={json.dumps(task)}"])
    return RunSpec(seed=7, silos=1, task=config.task, local=config.local)


def session(spec: RunSpec, folder: Path) -> SiloSession:
    return SiloSession(Identity(spec.dump(), 0, "a"), spec, folder=folder)


def seen(folder: Path) -> list[tuple[float, int]]:
    """What evaluations saw of the head: its bias, and the batches that it has normalised."""
    lines = (folder / "a.txt").read_text().splitlines()
    return [(float(bias), int(count)) for bias, count in (line.split() for line in lines)]


def test_a_killed_order_begins_from_the_parts_before_it_and_a_repeated_one_trains_them_once(
    tmp_path: Path, spec: RunSpec
) -> None:
    base = session(spec, tmp_path).initial_model()
    undisturbed = session(spec, tmp_path.joinpath("other"))
    (tmp_path / "other").mkdir()
    updates = [undisturbed.train(each, base).update for each in orders()]

    first = session(spec, tmp_path)
    done = first.train(orders()[0], base)
    first.evaluate(base, EvaluateModel(0))
    (tmp_path / "crash").touch()
    with pytest.raises(KeyboardInterrupt):
        first.train(orders()[1], base)
    first.evaluate(base, EvaluateModel(0))
    (tmp_path / "crash").unlink()

    again = session(spec, tmp_path)
    again.evaluate(base, EvaluateModel(0))
    assert again.last is not None and (again.last.answer.update == done.update).all()
    second = again.train(orders()[1], base)
    again.evaluate(base, EvaluateModel(0))
    undisturbed.evaluate(base, EvaluateModel(0))
    found = seen(tmp_path)
    assert found[0] == found[1] == found[2] and found[0][1] == 3, "neither crash nor restart changed the parts"
    assert found[3] == found[4] and found[3][1] == 6, "two orders trained them, three steps each"
    assert (second.update == updates[1]).all() and second.update.size == 9, "only the body travels"


def orders() -> list[WorkOrder]:
    return [order(batch_size=4, max_steps=3, seed=number, evaluate=False) for number in (1, 2)]


@pytest.mark.parametrize("cipher", ["plain", "pad"])
def test_runs_keep_them_apart(cipher: str, tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("silos.yaml").write_text("silos: [{name: a, speed: 2000}, {name: b, speed: 1000}]")
    task = json.dumps(spec.model_dump()["task"])
    sets = [f"task={task}", f"cipher={{kind: {cipher}}}", "stop={rounds: 3}", "local={steps: 3, batch_size: 4}"]
    words = [word for each in sets for word in ("--set", each)]
    call("run", "fedavg", "--silos", "silos.yaml", "--runtime", "virtual", "--out", "run", *words)
    model = torch.load("run/model.pt", weights_only=True)
    built = session(spec, tmp_path)._trainer.initial_model()
    assert torch.cat([model["body.weight"].flatten(), model["body.bias"]]).numpy() != pytest.approx(built)
    assert (model["head.1.num_batches_tracked"], model["table"].tolist()) == (0, [0, 1, 2, 3]), "as it was built"
    a, b = (Path(f"{name}.txt").read_text().splitlines() for name in "ab")
    assert len(a) == len(b) and a[0] == b[0] and a[-1] != b[-1], "alike at first, each its own then"


class Two(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        if tied:
            self.head.weight = self.body.weight


def test_bits_come_back_whatever_their_type() -> None:
    module = nn.Module()
    module.body = nn.Linear(1, 1)
    for name, value in {"half": torch.bfloat16, "long": torch.int64, "flag": torch.bool, "none": torch.float32}.items():
        module.register_buffer(f"own_{name}", torch.zeros(() if name == "long" else 3, dtype=value))
    module.register_buffer("own_zero", torch.tensor([0.0, 1e-45]))
    parts = PrivateParts(module, [name for name in module.state_dict() if name.startswith("own_")])
    assert parts.keep() == b"", "what did not change is not kept"
    module.own_half.fill_(1.5), module.own_long.fill_(2**53 + 1), module.own_flag.fill_(True)  # type: ignore[operator]
    module.own_zero.mul_(-1)  # type: ignore[operator]
    kept = parts.keep()
    assert b"own_none" not in kept
    parts.restore(b"")
    assert int(module.own_long) == 0  # type: ignore[arg-type]
    parts.restore(kept)
    assert module.own_half.tolist() == [1.5] * 3  # type: ignore[operator]
    assert int(module.own_long) == 2**53 + 1  # type: ignore[arg-type]
    assert module.own_flag.tolist() == [True] * 3  # type: ignore[operator]
    assert torch.signbit(module.own_zero).tolist() == [True] * 2  # type: ignore[arg-type]
    assert parts.keep() == kept


@pytest.mark.parametrize(
    ("prefixes", "tied", "problem"),
    [
        (["haed."], False, r"silo.use: no tensor's name matches 'haed\.\*'\. Names are body.weight"),
        (["head.", "body."], False, "no tensor is left to send: 4 tensors are private, 0 frozen"),
        (["head."], True, "head.weight is tied to body.weight: one is private, the other shared"),
    ],
)
def test_what_cannot_stay_is_said_in_a_line(prefixes: list[str], tied: bool, problem: str) -> None:
    used = Silo(0, "a", 7, "cpu").use(Two, range(9), private=prefixes)
    with pytest.raises(ConfigError, match=problem):
        parts_of(Two(tied=tied), UNSAID, used.patterns, "silo.use")


def test_what_is_too_large_spoiled_or_of_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Two()
    parts = PrivateParts(module, ["head.weight", "head.bias"])
    with torch.no_grad():
        module.head.bias += 1.0
    kept = parts.keep()
    module.head = nn.Linear(2, 5)
    with pytest.raises(ConfigError, match=r"head.bias is stored as torch.float32 \[2\]"):
        PrivateParts(module, ["head.weight", "head.bias"]).restore(kept)
    module.head = nn.Linear(2, 2)
    with torch.no_grad():
        module.head.bias.fill_(torch.nan)
    with pytest.raises(Diverged, match="private part"):
        parts.keep()
    with torch.no_grad():
        module.head.bias.fill_(3.0)
    monkeypatch.setattr(module_parts, "MOST_BYTES", 7)
    with pytest.raises(ConfigError, match="at most 7"):
        parts.keep()


def test_one_name_may_be_a_text_and_a_trainer_may_leave_the_model_elsewhere() -> None:
    app = SiloApp()

    @app.setup()
    def setup(silo: Silo) -> Any:
        return silo.use(Two, range(9), private="head.")

    @app.train()
    def fit(work: Any, model: Two) -> None:
        for _ in work.batches([0] * 9):
            pass
        model.body.weight.data = model.body.weight.data + 1.0  # as moving a module to another device does

    guest = GuestTrainer(app, Silo(0, "a", 7, "cpu"), LocalOptions(device="cpu"))
    for _ in range(2):
        update = guest.run(order(), guest.initial_model(), Cursor()).update
        np.testing.assert_allclose(update, [1, 1, 1, 1, 0, 0], rtol=1e-6)
    with pytest.raises(ConfigError, match="which the model does not have"):
        guest.run(order(), np.zeros(6, np.float32), Cursor(private=b'[["head.none","x",[]]]\n'))
