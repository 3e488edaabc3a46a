"""The study of examples/heart: what its figures are, beside those of other libraries."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedsync.evaluation.metrics.score_histograms import ScoreCounts, edges
from fedsync.extras.cross_site.site_evaluation import Site, sites_of_run
from fedsync.tasks.task_protocol import SiloSlot
from tests.examples.reader import FOLDER

pytestmark = pytest.mark.examples

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
ROWS = ("alone", "fedavg", "lb-bsp", "lb-bsp encrypted", "pooled")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    command = [sys.executable, str(FOLDER / "heart" / "study.py"), "--seeds", "1", "--out", str(folder)]
    subprocess.run(command, check=True, timeout=500)
    return folder


@pytest.fixture(scope="module")
def figures(out: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads((out / "study.json").read_text())
    return found


def test_every_way_to_train_at_every_hospital(figures: dict[str, list[dict[str, Any]]]) -> None:
    assert set(figures) == {f"{row}, {place}" for row in ROWS for place in (*HOSPITALS, "all")}
    for name, (cell,) in figures.items():
        # Of its test patients two are well, too few to say how sure the number is.
        few = name.endswith("switzerland")
        assert cell["support"]["0"] >= 5 or few
        assert (cell["low"] is None) == few
        assert few or cell["low"] < cell["value"] < cell["high"]


def test_pooled_figures_are_those_of_all_scores_together(out: Path, figures: dict[str, list[dict[str, Any]]]) -> None:
    sites = sites_of_run(out / "seed-0" / "lb-bsp", [])
    scored = [scores(site, index, out / "seed-0" / "lb-bsp" / "best.pt") for index, site in enumerate(sites)]
    positive, labels = (torch.cat(parts) for parts in zip(*scored, strict=True))
    wanted = roc_auc_score(labels, positive)
    assert figures["lb-bsp, all"][0]["value"] == pytest.approx(wanted, abs=1 / ScoreCounts().resolution)
    for site, (own, classes) in zip(sites, scored, strict=True):
        found = figures[f"lb-bsp, {site.name}"][0]
        assert found["value"] == pytest.approx(roc_auc_score(classes, own), abs=tied(own, classes) / 2 + 1e-9)
        assert found["support"] == {str(label): int((classes == label).sum()) for label in (0, 1)}


def tied(positive: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of pairs of a well and a sick patient whose scores lie in one bin: each counts half, right or wrong."""
    bins = np.searchsorted(edges(ScoreCounts().resolution), positive.double().numpy())
    well, sick = (np.bincount(bins[labels.numpy() == label], minlength=ScoreCounts().bins) for label in (0, 1))
    return float(well @ sick / (well.sum() * sick.sum()))


def scores(site: Site, index: int, model: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Probability of disease of each test patient, and whether there was one, by PyTorch alone."""
    task = site.spec.task.build()
    inputs, labels = task.data(SiloSlot(site.name, index, len(HOSPITALS), site.spec.seed)).test.tensors  # type: ignore[attr-defined]
    network = task.model()
    network.load_state_dict(torch.load(model, weights_only=True))
    with torch.no_grad():
        return torch.softmax(network(inputs), 1)[:, 1], labels


def test_sealed_is_as_plain(out: Path) -> None:
    """What silos attest of a sealed run is what the same run says in the clear."""
    plain, sealed = (
        json.loads((out / "seed-0" / run / "summary.json").read_text()) for run in ("lb-bsp", "lb-bsp-encrypted")
    )
    assert sealed["best"]["version"] == plain["best"]["version"]
    for name, value in plain["best"]["metrics"].items():
        # Updates travel as integers of 16 bits, and of the pooled figures four digits are told.
        assert sealed["best"]["metrics"][name] == pytest.approx(value, rel=2e-3), name


def test_each_run_has_its_report_and_card(out: Path) -> None:
    for run in ("fedavg", "lb-bsp", "lb-bsp-encrypted", "pooled"):
        folder = out / "seed-0" / run
        assert (folder / "report.html").stat().st_size < 5_000_000
        assert "auroc" in (folder / "model-card.md").read_text()
