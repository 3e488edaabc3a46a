"""Runs of a few silos that answer at once; a server that dies, and one that goes on from what is on disk."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.flower_strategy import FedSync
from fedsync.server.timeouts import Timeouts
from fedsync.silo.owner.key_lookup import KEYS, emulated_rings
from fedsync.silo.protocol import Request, Train
from tests.e2e.deployed import SMALL
from tests.flower.grid import Answer, DirectGrid, unless


def named_silos(names: Iterable[str]) -> ClusterConfig:
    """Silos whose training takes no time."""
    return ClusterConfig.model_validate({"silos": [{"name": name, "speed": 1e6} for name in names]})


SILOS = named_silos("abc")
QUICK = [SMALL, "local.steps=2", "local.batch_size=8", "stop.rounds=4"]
TIMING = Timeouts(poll_s=0.001, order_timeout_s=20, join_timeout_s=60)


class Killed(BaseException):
    """The server dies."""


def with_keys(
    config: StrategyConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, silos: ClusterConfig = SILOS
) -> Path | None:
    """Keys for the silos in the environment; returns the server's file, or None where nothing is encrypted."""
    rings = emulated_rings(config, silos, folder)
    if rings is None:
        return None
    monkeypatch.setenv(KEYS, str(rings[0]))
    return rings[1]


def keys_for(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Path:
    """The same for `strategy_in` with these overrides, which encrypt."""
    keys = with_keys(StrategyConfig.load("fedavg", [*QUICK, *overrides]), folder, monkeypatch)
    assert keys is not None
    return keys


def strategy_in(out: Path, *overrides: str, name: str = "fedavg", **options: object) -> FedSync:
    config = StrategyConfig.load(name, [*QUICK, *overrides])
    return FedSync(config, SILOS, out=out, timing=TIMING, **options)  # type: ignore[arg-type]


def killed_when(dies: Callable[[Request], bool]) -> Answer:
    """Silos that are honest until the server dies, which it does when it sends such a request."""

    def sent(request: Request) -> None:
        if dies(request):
            raise Killed

    return unless(sent)


def killed_at(version: int) -> Answer:
    return killed_when(lambda request: isinstance(request, Train) and request.order.base_version == version)


def cut_off(strategy: FedSync, version: int, node: int = 1) -> None:
    """Run until this version is sent to ``node``; those before it have it."""
    with pytest.raises(Killed):
        strategy.start(DirectGrid(3, {node: killed_at(version)}))


def all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models, updates and sums have files of their own, as those of large models have."""
    monkeypatch.setattr("fedsync.model.chunked_arrays.LARGE_BYTES", 1000)
