"""Lower bounds of a silo's epsilon by opponents, beside the epsilon in its ledger.

    python bench/privacy/audit.py [--quick] [--breakage NAME] [--shadows N] [--out FILE.json]

A canary is an example that a fair coin puts into the data or leaves out. Opponents see updates and scores (white box:
they know the model and each canary's gradient), and guess for each canary whether it is there. Trainer, guard and
ledger are real, with random numbers of the operating system. The share of right guesses bounds epsilon from below, with
95 % confidence: from one run with many canaries (Steinke, Nasr and Jagielski 2023), or from many runs with one canary.

The bound must be below the ledger's epsilon. Breakages are those of `bench/faults/breakages/privacy.py`, made in this
process: an opponent notices one if the bound exceeds the ledger's epsilon. Nine of them change a figure that a silo
sends under ``dp-sgd``. The others concern the ledger after a crash or with an older file, or noise on whole updates: no
opponent here can see them, and tests notice them.

``--shadows`` trains models on random halves of a small data set, with privacy and without, and finds each model's half
by the losses of the others (likelihood ratio; Carlini et al. 2022, arXiv:2112.03570).
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn

from bench.common import print_table, write_json
from bench.faults.breakages.privacy import MUTANTS
from bench.privacy.audit_bounds import CONFIDENCE, Coins, Scores, membership
from bench.privacy.audit_opponents import DELTA, OPPONENTS, SLOT, Rows, Victim, asked, broken
from fedsync.core.orders import Cursor
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions
from fedsync.train.weights import Weights

CANARIES, QUICK = 1000, 100
_ROWS, _WIDTH, _HIDDEN, _STEPS, _BATCH, _LEARNING_RATE = 200, 30, 16, 80, 50, 1.0


def bounds(size: int, only: str | None) -> list[dict[str, Any]]:
    """Ledger's epsilon and lower bound of each opponent, for the code as it is and for its breakages."""
    found = []
    for opponent, (play, breakages) in OPPONENTS.items():
        chosen = [each for each in breakages if only in (None, each)]
        for breakage in ["", *chosen] if chosen else []:
            with broken(breakage):
                guesses = play(size, 1)
            found.append(
                {"opponent": opponent, "breakage": breakage, "ledger": guesses.ledger, "bound": guesses.bound}
                | {"canaries": len(guesses.scores), "above": guesses.bound > guesses.ledger}
            )
    return found


def shadow_losses(models: int, private: bool, noise: float) -> tuple[Scores, Coins, float]:
    """Loss of each row under each model, float64 [models, rows]; which rows each was trained on; ledger's epsilon."""
    drawn = np.random.default_rng(3)
    inputs = torch.from_numpy(drawn.normal(size=(_ROWS, _WIDTH)).astype(np.float32))
    labels = torch.from_numpy((drawn.random((_ROWS, 1)) < 0.5).astype(np.float32))
    # Each row is in half of the models.
    present = drawn.permuted(np.tile((np.arange(models) % 2 == 0)[:, None], _ROWS), axis=0)
    losses, spent = np.empty((models, _ROWS)), math.inf
    for number, inside in enumerate(present):
        chosen = torch.from_numpy(inside)
        task = Rows(inputs[chosen], labels[chosen], hidden=_HIDDEN)
        order = replace(asked(_BATCH, _STEPS, number + 1), learning_rate=_LEARNING_RATE)
        trainer = Trainer(task, SLOT, LocalOptions(device="cpu", threads=1))
        base = trainer.initial_model()
        if private:
            victim = Victim(task, _ROWS // 2, noise)
            update = victim.guard.released(order, victim.trainer.run(order, base, Cursor())).update
            spent = victim.ledger.epsilon()
        else:
            update = trainer.run(order, base, Cursor()).update
        model = task.model()
        Weights(model).load(base + update)
        with torch.no_grad():
            lost = nn.functional.binary_cross_entropy_with_logits(model(inputs), labels, reduction="none")
        losses[number] = lost[:, 0].double().numpy()
    return losses, present, spent


def likelihoods(losses: Scores, present: Coins) -> Scores:
    """Log-likelihood ratio of each row's presence under each model, from the row's losses under all others."""
    found = np.empty_like(losses)
    for model in range(len(losses)):
        others = np.arange(len(losses)) != model
        ratio = np.zeros(losses.shape[1])
        for inside, sign in ((True, 1), (False, -1)):
            part = np.where(present[others] == inside, losses[others], np.nan)
            spread = np.nanstd(part, axis=0) + 1e-3
            ratio += sign * stats.norm.logpdf(losses[model], np.nanmean(part, axis=0), spread)
        found[model] = ratio
    return found


def shadows(models: int) -> list[dict[str, Any]]:
    """Membership inference with and without privacy."""
    found = []
    for name, private, noise in (("none", False, 0.0), ("noise 1", True, 1.0), ("noise 4", True, 4.0)):
        losses, present, spent = shadow_losses(models, private, noise)
        told = membership(likelihoods(losses, present).ravel(), present.ravel())
        most = min(math.exp(min(spent, 50)) * 0.01 + DELTA, 1.0)
        found.append({"privacy": name, "ledger": spent if private else None, "most": most, **told})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} canaries, eight shadow models")
    parser.add_argument("--breakage", choices=[mutant.name for mutant in MUTANTS], help="this one only")
    parser.add_argument("--shadows", type=int, help="models of the membership inference [64]; 0: none", default=None)
    parser.add_argument("--out", type=Path, default=Path("bench/results/privacy_audit.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = bounds(QUICK if args.quick else CANARIES, args.breakage)
    print_table(
        f"Epsilon at delta {DELTA:g}: the ledger's, and the opponent's lower bound ({CONFIDENCE:.0%} confidence)",
        ["opponent", "breakage", "canaries", "ledger", "lower bound", "above"],
        [
            (
                *(each["opponent"], each["breakage"] or "-", each["canaries"]),
                *(f"{each['ledger']:.2f}", f"{each['bound']:.2f}", "yes" if each["above"] else "no"),
            )
            for each in rows
        ],
    )
    honest, broke = ([each for each in rows if bool(each["breakage"]) == side] for side in (False, True))
    tried = MUTANTS if args.breakage is None else [each for each in MUTANTS if each.name == args.breakage]
    print(f"Breakages with a bound above the ledger's epsilon: {sum(each['above'] for each in broke)} of {len(tried)}.")
    print(f"Opponents with a bound above it for the code as it is: {sum(each['above'] for each in honest)}.")
    models = args.shadows if args.shadows is not None else (8 if args.quick else 64)
    inferred = shadows(models) if models else []
    if inferred:
        print_table(
            f"Membership inference with {models} shadow models: area under the curve, true positives at 1 % false ones",
            ["privacy", "ledger", "area", "true positives", "most by epsilon"],
            [
                (
                    *(each["privacy"], "-" if each["ledger"] is None else f"{each['ledger']:.2f}"),
                    *(f"{each['area']:.3f}", f"{each['true_at_1_percent']:.1%}", f"{each['most']:.1%}"),
                )
                for each in inferred
            ],
        )
    write_json(args.out, {"delta": DELTA, "confidence": CONFIDENCE, "bounds": rows, "shadows": inferred})


if __name__ == "__main__":
    main()
