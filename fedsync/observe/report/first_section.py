"""Opening text of a report: task, quality of the model, cost of waiting, and failures."""

from __future__ import annotations

from collections.abc import Iterator

from fedsync.observe.report.data import RunData
from fedsync.observe.report.results import SUBJECTS, short

MEANINGS = {
    "accuracy": "share of samples whose class is right",
    "balanced_accuracy": "share that is right, averaged over classes: a rare class counts as much",
    "f1": "harmonic mean of precision and recall; with more than two classes, averaged over them",
    "f1_macro": "f1 of each class against the rest, averaged over classes",
    "sensitivity": "share of the class's samples that are found",
    "specificity": "share of the other samples that are left alone",
    "auroc": "chance that a sample of the class scores higher than one of another; 0.5 is guessing",
    "average_precision": "precision averaged over all thresholds that find one more sample of the class",
    "brier": "mean squared difference of predicted probabilities and what is true; 0 is perfect",
    "calibration_error": "how far predicted probabilities are from the shares that come true; 0 is perfect",
    "dice": "twice the overlap of two areas over the sum of both; 1 is perfect",
    "iou": "overlap of two areas over what both cover; 1 is perfect",
    "mae": "mean distance from the true value, in its unit",
    "rmse": "root of the mean squared distance from the true value, in its unit",
    "r2": "share of the variance that is explained; 1 is perfect, 0 is no better than the mean",
    "concordance": "share of comparable pairs that are put in the right order; 0.5 is guessing",
    "perplexity": "exponential of the mean loss of a token; lower is better",
    "loss": "what training minimises, averaged over samples; lower is better",
}


def opening(run: RunData) -> Iterator[str]:
    summary = run.summary
    silos, seconds, rounds = len(summary["silos"]), summary["seconds"], summary["rounds"]
    task = run.settings.get("task")
    what = f"task {task.get('app') or task.get('kind')}" if isinstance(task, dict) else "a model"
    has = "trained" if run.ended else "has so far trained"
    yield (
        f"{summary['strategy']} {has} {what} at {silos} silo{'s' * (silos != 1)}: {rounds} round{'s' * (rounds != 1)} "
        f"in {seconds:.1f} {run.clock}."
    )
    yield _quality(run)
    yield _waiting(run)
    missing = [str(each["silo"]) for each in summary.get("lost", ())]
    if missing:
        yield f"Missing from the result: {', '.join(missing[:5])}{' and others' * (len(missing) > 5)}."
    failed = {str(silo["name"]): silo["failures"] for silo in summary["silos"] if silo["failures"]}
    most = sorted(failed.items(), key=lambda pair: -pair[1])
    told = ", ".join(f"{count} of {name}" for name, count in most[:5]) + (" and others" if len(most) > 5 else "")
    if failed or not missing:
        yield f"Orders that failed: {told}." if failed else "No order failed."


def _quality(run: RunData) -> str:
    main = run.results.main
    known = {} if main is None else {name: each for name, each in main.pooled.items() if each.value is not None}
    if main is not None and known:
        name = "accuracy" if "accuracy" in known else next(iter(known))
        each = known[name]
        model = SUBJECTS.get(main.subject, main.subject) + ("" if main.version is None else f" ({main.version})")
        on = (
            f"on the {each.samples:,} samples of the {main.split} split"
            if each.samples
            else f"on the {main.split} split"
        )
        interval = (
            "" if each.low is None or each.high is None else f" (95 % interval {short(each.low)} to {short(each.high)})"
        )
        return f"The {model} has {name.replace('_', ' ')} {short(each.value or 0.0)} {on}{interval}."
    for name in ("accuracy", "loss"):
        if run.summary[name] is not None:
            return f"At the last scored round: {name} {run.summary[name]:.4f}."
    return "No version was evaluated."


def _waiting(run: RunData) -> str:
    silos, seconds = run.summary["silos"], run.summary["seconds"]
    cost = f"Waiting cost {run.summary['wait_fraction']:.1%} of the silos' time"
    worst = max(silos, key=lambda silo: silo["wait_s"], default=None)
    if worst is None or not seconds or not worst["wait_s"]:
        return f"{cost}."
    share = worst["wait_s"] / seconds
    return f"{cost}; {worst['name']} waited longest, {worst['wait_s']:.1f} s or {share:.1%} of the run."
