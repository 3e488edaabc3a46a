"""What torch sums is what NumPy sums of the same samples, however they are batched."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsync.common.errors import ConfigError
from fedsync.core.orders import Evaluation, Split
from fedsync.core.report_checks import check_evaluation, usable
from fedsync.evaluation.metrics.classes import ClassCounts
from fedsync.evaluation.metrics.metric_types import AnyMetric, Sums, number, statistics_of
from fedsync.evaluation.metrics.moments import own
from fedsync.evaluation.metrics.named import NAMES, Wanted, classification, regression, shipped
from fedsync.evaluation.metrics.score_histograms import ScoreCounts
from fedsync.tasks.metrics import measurement
from fedsync.tasks.metrics.measurement import Measuring
from fedsync.tasks.task_protocol import Batch
from fedsync.train.options import LocalOptions
from tests.evaluation.metrics.make import block_sums, class_sums, error_sums, score_sums
from tests.evaluation.metrics.test_against_sklearn import pair_sums
from tests.train.make import Cramped, TwoClasses, slot, trainer

CPU = torch.device("cpu")


def measured(metrics: Sequence[AnyMetric], outputs: Tensor, targets: Tensor, size: int = 7) -> dict[str, Sums]:
    """Sums by key, of batches of so many samples; they pass the checks."""
    measuring = Measuring(metrics, CPU)
    found = measuring.begin()
    for rows in torch.arange(len(outputs)).split(size):
        found.add(measuring.of(outputs[rows], targets[rows], rows))
    sums = found.sums(len(outputs))
    check_evaluation("a", Evaluation(0.0, 0.0, len(outputs), sums=sums), statistics_of(metrics))
    return {key: np.array(values) for key, values in sums.items()}


def logits(classes: int, size: int = 60) -> tuple[Tensor, Tensor]:
    torch.manual_seed(classes)
    return 3 * torch.randn(size, classes), torch.randint(0, classes, (size,))


@pytest.mark.parametrize("classes", [2, 3, 40])
def test_classes_and_scores_are_counted(classes: int) -> None:
    outputs, labels = logits(classes)
    found = measured([shipped("f1", classes), shipped("auroc", classes)], outputs, labels)
    counts, scores = ClassCounts(classes), shipped("auroc", classes).statistic
    expected = class_sums(counts, labels.numpy(), outputs.argmax(dim=1).numpy())
    np.testing.assert_array_equal(found[counts.key], expected)
    shares = torch.softmax(outputs.double(), dim=1).numpy()
    given = shares[:, 1] if classes == 2 else shares
    np.testing.assert_array_equal(found[scores.key], score_sums(scores, given, labels.numpy()))


@pytest.mark.parametrize("classes", [2, 3, 40])
def test_what_each_sample_counts_adds_up_to_the_sums(classes: int) -> None:
    """Whatever batches hold it, and in whichever order they come."""
    outputs, labels = logits(classes)
    measuring = Measuring([shipped("f1", classes), shipped("auroc", classes)], CPU)
    found = measuring.begin()
    for rows in reversed(torch.arange(60).split(7)):
        found.add(measuring.of(outputs[rows], labels[rows], rows, each=True))
    sums = found.sums(60)
    judged = found.judged(sums, 60)
    assert judged.cells.keys() == sums.keys()
    for key, cells in judged.cells.items():
        np.testing.assert_array_equal(judged.labels[key], labels.numpy())
        np.testing.assert_array_equal(np.bincount(cells[cells >= 0], minlength=len(sums[key])), sums[key])
    assert not found.judged(sums, 61).cells, "a sample is missing"


def test_pixels_are_no_samples() -> None:
    outputs, labels = torch.randn(6, 2, 4, 4), torch.randint(0, 2, (6, 4, 4))
    summed = Measuring([shipped("accuracy", 2)], CPU).summed(outputs, labels, torch.arange(6), each=True)
    assert summed.sums and not summed.each


@pytest.mark.parametrize("shape", [(60,), (60, 1)])
def test_one_logit_tells_two_classes_apart(shape: tuple[int, ...]) -> None:
    outputs, labels = logits(2)
    margin = (outputs[:, 1] - outputs[:, 0]).double()
    two, one = (measured(classification(2), each, labels) for each in (outputs.double(), margin.reshape(shape)))
    for key in two:
        np.testing.assert_array_equal(one[key], two[key])


def test_a_score_of_one_half_is_the_first_class_s_as_an_arg_max_has_it() -> None:
    found = measured(classification(2), torch.zeros(4, 2), torch.tensor([0, 0, 1, 1]))
    assert found["confusion/2"].tolist() == [2, 0, 2, 0]
    table = ScoreCounts().table(found["scores/256"])[0]
    assert table[:, :128].sum() == 4 and table[:, 127].tolist() == [2, 2]


def test_numbers_have_errors() -> None:
    torch.manual_seed(1)
    predicted, truth = torch.randn(50, 1), torch.randn(50)
    expected = error_sums(predicted[:, 0].double().numpy(), truth.double().numpy())
    np.testing.assert_allclose(measured(regression(), predicted, truth)["errors/16"], expected, rtol=1e-12)


def test_errors_of_several_targets_are_their_means_without_a_common_spread() -> None:
    predicted, truth = torch.randn(50, 2), torch.randn(50, 2) + torch.tensor([170.0, 2.0])
    found = measured(regression(), predicted, truth)["errors/16"]
    error = (predicted - truth).double().numpy()
    assert number(shipped("mae"), found) == pytest.approx(np.abs(error).mean())
    assert number(shipped("rmse"), found) == pytest.approx(np.sqrt(np.square(error).mean()))
    assert number(shipped("r2"), found) is None and shipped("mae").statistic.support(found) == {"samples": 50}


def test_samples_without_a_label_are_left_out() -> None:
    outputs, labels = logits(3)
    masked = labels.clone()
    masked[::2] = -100
    metrics = [shipped("accuracy", 3), shipped("auroc", 3)]
    for key, sums in measured(metrics, outputs, masked).items():
        np.testing.assert_array_equal(sums, measured(metrics, outputs[1::2], labels[1::2])[key])


def test_overlap_is_that_of_each_image() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    torch.manual_seed(2)
    outputs, masks = torch.randn(20, 2, 5, 5), torch.randint(0, 2, (20, 5, 5))
    masks[3] = 0
    outputs[3, 0] = 9  # nothing to find, and nothing found
    masks[4], outputs[4, 0] = 0, -9  # nothing to find, and all found
    found = measured([shipped("dice"), shipped("iou")], outputs, masks)["overlap/16"]
    said = outputs.argmax(dim=1).flatten(1).numpy()
    pairs = list(zip(masks.flatten(1).numpy(), said, strict=True))
    dice = np.array([metrics.f1_score(*pair, zero_division=1.0) for pair in pairs])
    iou = np.array([metrics.jaccard_score(*pair, zero_division=1.0) for pair in pairs])
    assert (dice[3], dice[4]) == (1.0, 0.0)
    np.testing.assert_allclose(found, block_sums(dice, iou), rtol=1e-12)
    one = measured([shipped("dice")], (outputs[:, 1] - outputs[:, 0])[:, None], masks[:, None].float())
    np.testing.assert_allclose(one["overlap/16"], found, rtol=1e-12)


def test_overlap_of_several_classes_is_their_mean() -> None:
    said, truth = torch.tensor([[[1, 1, 2, 0]]]), torch.tensor([[[1, 2, 2, 0]]])
    outputs = nn.functional.one_hot(said, 4).movedim(-1, 1).float()
    found = measured([shipped("dice")], outputs, truth)["overlap/16"]
    assert number(shipped("dice"), found) == pytest.approx((2 / 3 + 2 / 3) / 2)  # class 3 is nowhere
    assert number(shipped("iou"), found) == pytest.approx((1 / 2 + 1 / 2) / 2)


def test_likelihood_is_of_tokens() -> None:
    torch.manual_seed(3)
    outputs, tokens = torch.randn(9, 11, 4), torch.randint(0, 11, (9, 4))
    tokens[:, 3] = -100
    found = measured([shipped("perplexity")], outputs, tokens, size=4)["likelihood/16"]
    expected = torch.exp(nn.functional.cross_entropy(outputs[:, :, :3], tokens[:, :3])).item()
    assert number(shipped("perplexity"), found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [3, 40, 1100])
def test_pairs_are_those_of_the_definition(size: int) -> None:
    torch.manual_seed(4)
    risks, targets = torch.randn(size).round(decimals=1), torch.rand(size, 2).round(decimals=1)
    targets[:, 1] = targets[:, 1].round()
    found = measured([shipped("concordance")], risks, targets, size=512)["pairs/16"]
    if size > 100:
        table = found.reshape(17, 4)
        assert table[0, 1] <= table[1:, 1].sum() <= 2 * table[0, 1]
        return
    times, events = targets.double().numpy().T
    np.testing.assert_array_equal(found, pair_sums(risks.double().numpy(), times, events.astype(np.int64)))


def test_a_metric_of_one_s_own_is_a_formula_of_sums_of_samples() -> None:
    def cost(outputs: Tensor, targets: Tensor) -> Tensor:
        missed = (outputs.argmax(dim=1) == 0) & (targets == 1)
        return torch.stack([missed, targets == 1], dim=1).double()

    metric = own("missed", 2, cost, lambda sums: sums[1] / sums[2], higher_is_better=False)
    outputs, labels = logits(2)
    found = measured([metric], outputs, labels)["missed/16"]
    counts = class_sums(ClassCounts(2), labels.numpy(), outputs.argmax(1).numpy())
    assert number(metric, found) == pytest.approx(1 - (number(shipped("sensitivity", 2), counts) or 0))
    assert metric.interval(found, 1) is not None
    wrong = own("missed", 3, cost, lambda sums: sums[1])
    with pytest.raises(ConfigError, match=r"\[60, 3\]"):
        measured([wrong], outputs, labels, size=60)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_that_are_no_numbers_make_no_evaluation(name: str) -> None:
    metric = shipped(name, 2)
    targets = torch.ones(10, 2) if name == "concordance" else torch.ones(10, dtype=torch.long)
    one_each = name in ("concordance", "mae", "rmse", "r2")
    outputs = torch.ones(10) if one_each else torch.ones(10, 2)
    outputs[3] = torch.nan
    measuring = Measuring([metric], CPU)
    found = measuring.begin()
    found.add(measuring.of(outputs, targets, torch.arange(10)))
    sums = found.sums(10)
    assert np.isnan(list(sums.values())).all()
    assert usable("a", Evaluation(1.0, 1.0, 10, sums=sums), statistics_of([metric])) is None


@pytest.mark.parametrize(
    ("name", "classes", "outputs", "targets"),
    [
        ("accuracy", 2, torch.zeros(3, 4), torch.tensor([0, 1, 1])),
        ("accuracy", 4, torch.zeros(3, 4), torch.tensor([0, 1, 4])),
        ("accuracy", 40, torch.zeros(3, 40), torch.tensor([0, 1, 40])),
        ("auroc", 2, torch.zeros(3, 4), torch.tensor([0, 1, 1])),
        ("auroc", 2, torch.zeros(3, 2), torch.tensor([0, 1, 2])),
        ("accuracy", 2, torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.long)),
        ("mae", None, torch.zeros(3, 2), torch.zeros(3)),
        ("concordance", None, torch.zeros(3), torch.zeros(3)),
    ],
)
def test_outputs_that_do_not_fit_are_named(name: str, classes: int | None, outputs: Tensor, targets: Tensor) -> None:
    with pytest.raises(ConfigError):
        measured([shipped(name, classes)], outputs, targets)


@pytest.mark.parametrize("kept", [1, 30, 10**6])
@pytest.mark.parametrize("size", [1, 7, 60])
def test_counts_are_the_same_bits_whatever_the_batches(kept: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, labels = logits(2)
    times = torch.stack([torch.arange(60) % 9, labels], dim=1)

    def counted(size: int) -> dict[str, bytes]:
        classes = measured(classification(2), outputs, labels, size)
        pairs = measured([shipped("concordance")], outputs[:, 0], times, size)
        return {key: sums.tobytes() for key, sums in {**classes, **pairs}.items()}

    expected = counted(60)
    monkeypatch.setattr(measurement, "_KEPT", kept)
    assert counted(size) == expected


def test_batches_of_other_forms_and_arrays_that_are_used_again_are_counted_as_they_came() -> None:
    outputs, labels = logits(2)
    measuring = Measuring(classification(2), CPU)
    found, room = measuring.begin(), (torch.zeros(10, 2), torch.zeros(10, dtype=torch.long))
    for rows in torch.arange(30).split(10):
        for buffer, values in zip(room, (outputs[rows], labels[rows]), strict=True):
            buffer.copy_(values)
        found.add(measuring.of(*room, rows))
    found.add(measuring.of(outputs[30:].double(), labels[30:], torch.arange(30, 60)))
    expected = measured(classification(2), outputs, labels)
    for key, sums in found.sums(60).items():
        np.testing.assert_array_equal(sums, expected[key])


def test_a_task_may_predict_what_is_no_tensor_where_it_measures_it_itself() -> None:
    """Also on the test split, where results of single samples are kept of metrics that have them."""

    class Parts(TwoClasses):
        def predict(self, model: nn.Module, batch: Batch) -> Any:
            inputs, labels = batch
            return {"logits": model(inputs)}, {"label": labels}

        def assess(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
            return super().assess(outputs["logits"], targets["label"])

        def metrics(self) -> tuple[AnyMetric, ...]:
            return (own("ones", 1, lambda _, targets: targets["label"][:, None], lambda sums: sums[1] / sums[0]),)

    shipped_too = trainer(Parts(), options=LocalOptions(device="cpu", measured=Wanted(("ones", "f1"), 2)))
    with pytest.raises(ConfigError, match=r"Task\.predict: the outputs are a dict, and the metrics need a tensor"):
        shipped_too.evaluate(shipped_too.initial_model())
    subject = trainer(Parts(), options=LocalOptions(device="cpu", measured=Wanted(("ones",))))
    labels = TwoClasses().data(slot()).test.tensors[1]  # type: ignore[attr-defined]
    sums = np.array(subject.evaluate(subject.initial_model(), split=Split.TEST).sums["ones/16"])
    assert number(Parts().metrics()[0], sums) == pytest.approx(float(labels.double().mean()))


def _options() -> LocalOptions:
    return LocalOptions(device="cpu", measured=Wanted.of(classification(2)))


def test_an_evaluation_brings_the_sums_in_one_pass_and_in_pieces() -> None:
    class Counting(TwoClasses):
        passes = 0

        def predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
            type(self).passes += 1
            return super().predict(model, batch)

    silo = trainer(Counting(), 0, _options())
    before = Counting.passes
    found = silo.evaluate(silo.initial_model())
    assert Counting.passes == before + 1
    assert found.sums.keys() == statistics_of(classification(2)).keys()
    assert number(shipped("accuracy", 2), np.array(found.sums["confusion/2"])) == found.correct / found.samples
    assert sum(found.sums["scores/256"]) == found.samples
    assert trainer(TwoClasses()).evaluate(silo.initial_model()) == Evaluation(found.loss, found.correct, found.samples)


def test_a_score_of_one_s_own_goes_with_metrics() -> None:
    class Own(TwoClasses):
        def score(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
            inputs, _ = batch
            return model(inputs).sum() * 0, torch.tensor(float(len(inputs)))

    silo = trainer(Own(), 0, _options())
    found = silo.evaluate(silo.initial_model())
    assert (found.loss, found.correct) == (0.0, found.samples)
    assert found.sums == trainer(TwoClasses(), 0, _options()).evaluate(silo.initial_model()).sums


def test_an_evaluation_that_runs_out_of_memory_counts_no_sample_twice() -> None:
    class CrampedAssessment(Cramped):
        def predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
            self.asked.append(len(batch[0]))
            if len(batch[0]) > self.fits:
                raise torch.OutOfMemoryError("no room")
            return super().predict(model, batch)

    roomy = trainer(TwoClasses(), 0, _options())
    cramped = trainer(CrampedAssessment(3), 0, _options())
    base = roomy.initial_model()
    assert cramped.evaluate(base).sums == roomy.evaluate(base).sums


def test_names_that_are_not_known_are_refused() -> None:
    with pytest.raises(ConfigError, match="aurok"):
        Wanted(("aurok",), 2).metrics(lambda: ())
    mine = own("mine", 1, lambda outputs, _: outputs[:, :1], lambda sums: sums[1])
    assert Wanted(("mine", "f1"), 2).metrics(lambda: (mine,)) == (mine, shipped("f1", 2))
    assert Wanted.of((mine, shipped("f1", 3))) == Wanted(("mine", "f1"), 3)
    for taken in ("loss", "accuracy", "f1", "mae"):  # also where the classes are unknown, or the run names its metrics
        told, message = (mine, own(taken, 1, len, sum)), f"own metric {taken} has the name of .*Give it another name"
        with pytest.raises(ConfigError, match=message):
            Wanted.of(told)
        with pytest.raises(ConfigError, match=message):
            Wanted(("mine", taken)).metrics(lambda told=told: told)
    with pytest.raises(ConfigError, match="auroc is not the shipped metric"):
        Wanted.of((shipped("f1", 3), shipped("auroc", 2)))


def _with_formula(formula: Callable[[Sums], Any]) -> AnyMetric:
    return own("mine", 1, lambda outputs, _: outputs[:, :1], formula)


@pytest.mark.parametrize("formula", [lambda sums: sums["x"], lambda sums: sums, lambda sums: "many", len])
def test_a_formula_of_ones_own_never_ends_a_run(formula: Callable[[Sums], Any]) -> None:
    """It runs at the server, for the sums of each silo and of all."""
    found = number(_with_formula(formula), np.ones(32))
    assert found == (2.0 if formula is len else None)


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ((_with_formula(lambda sums: sums["x"]),), "mine: its formula fails on sums of ones: IndexError"),
        ((_with_formula(lambda sums: sums),), "mine: its formula fails on sums of ones: TypeError"),
        (("f1", "auroc"), r"task, metrics\(\): 'f1' is no metric\. Return a tuple"),
        ({"f1": shipped("f1", 2)}, r"task, metrics\(\): 'f1' is no metric"),
        (None, r"task, metrics\(\): it returned None"),
    ],
)
def test_metrics_that_cannot_be_computed_are_named(metrics: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Wanted.of(metrics)
    undefined = _with_formula(lambda sums: 1 / (sums[0] - sums[1]))
    assert Wanted.of((undefined,)).names == ("mine",)
