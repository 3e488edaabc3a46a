"""The best model of an encrypted run on real processes: all silos keep the same, which is the one of the summary."""

import hashlib
import json
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.observe.quality.kept_models import best_of
from fedsync.ops import local
from fedsync.silo.owner.model_export import export_model
from fedsync.silo.protocol import COPY

SILOS = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 2000.0} for name in "abc"]})
RUN = (
    "stop={rounds: 4}",
    "local={steps: 5, batch_size: 16}",
    "task={kind: digits, validation: 0.2}",
    "cipher={kind: pad}",
)


@pytest.mark.full
def test_all_silos_keep_the_best_model_of_the_summary(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    digests: list[str] = []

    def exported(state: Path, out: Path) -> dict[str, str]:
        """Of each silo by itself, before their folders go."""
        for number, copy in enumerate(sorted(state.glob(f"*/{COPY}"))):
            alone, own = tmp_path / f"state-{number}", tmp_path / f"own-{number}"
            alone.mkdir()
            own.mkdir()
            (alone / copy.parent.name).symlink_to(copy.parent)
            digests.append(export_model(alone, own)["best"])
            stated.append(best_of(own))
        return dict(export_model(state, out))

    stated: list[object] = []
    monkeypatch.setattr(local, "export_model", exported)
    out = tmp_path / "run"
    summary = local.run_local(StrategyConfig.load("lb-bsp", RUN), SILOS, out)
    assert json.loads((out / "summary.json").read_text()) == summary
    best = summary["best"]
    assert best["test"] and summary["evaluation"]["test"].keys() == {"last", "best"}
    assert digests == [best["digest"]] * 3
    about = {"version": best["version"], "value": best["metrics"]["accuracy"], "metrics": best["metrics"]}
    assert stated == [about] * 3 and best_of(out) == about
    for name in ("best", "last"):
        assert hashlib.sha256((out / f"{name}.pt").read_bytes()).hexdigest() == summary[name]["digest"]
