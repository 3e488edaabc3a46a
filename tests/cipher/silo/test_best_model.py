"""Every silo keeps the model of the version that all found to be the best, whatever happens to it meanwhile."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.encoding.catch_up import Start, decode
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.figure_pool import FOLDER, KeptModel
from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.core.orders import Evaluation, Score
from fedsync.evaluation.metrics.score_histograms import Auroc, ScoreCounts
from fedsync.evaluation.version_scores import Selection
from fedsync.model.layout import as_bytes
from tests.cipher.make import Federation, change, plan

SILOS = "abcd"
SCORES = ScoreCounts(resolution=16)


def evaluation(accuracy: float, samples: int = 64) -> Evaluation:
    """Of so many samples, half of each class; scores of the wrong ones are on the other side."""
    wrong = round((1 - accuracy) * samples)
    table = np.zeros((2, SCORES.bins))
    for index in range(samples):
        label, right = index % 2, index >= wrong
        table[label, 20 if (label == 1) == right else 5] += 1
    return Evaluation(samples * (1 - accuracy), samples - wrong, samples, sums={SCORES.key: tuple(table.reshape(-1))})


def best_plan(kind: str = "pad", quorum: int = 4, rule: Selection | None = None) -> EncryptionPlan:
    metrics = (Auroc("auroc", SCORES),)
    rule = rule or Selection()
    return replace(plan(kind, quorum=quorum), seal_metrics=True, metrics=metrics, selection=rule)


def federation(folder: Path, of: EncryptionPlan | None = None) -> Federation:
    made = Federation(of or best_plan(), folder, dict.fromkeys(SILOS, 10))
    for name in SILOS if not made.plan.masked else ():
        made.silos[name] = made.copy(name, folder / name / "copy.bin")
        (folder / name).mkdir()
    return made


def rounds(made: Federation, accuracies: Sequence[float], begin: int = 0, names: str = SILOS) -> dict[int, str]:
    """One version after the other, each evaluated by all; returns the digest of each version's model."""
    found = {}
    for version, accuracy in enumerate(accuracies, begin):
        model, *_ = [made.begin(name, version) for name in names]
        found[version] = hashlib.sha256(as_bytes(model).data).hexdigest()
        ids = [
            made.answer(name, change(17 * version + index), evaluation=evaluation(accuracy))
            for index, name in enumerate(names)
        ]
        made.commit(version + 1, ids)
    return found


def settled(made: Federation, version: int, names: str = SILOS) -> dict[str, tuple[int, str]]:
    """Version and digest of the best model of each silo, once it has come to a version."""
    found = {}
    for name in names:
        made.begin(name, version)
        found[name] = kept(made.silos[name])
    return found


def kept(silo: EncryptedReplica) -> tuple[int, str]:
    best = silo.best
    assert best is not None
    assert hashlib.sha256(as_bytes(best.model).data).hexdigest() == best.digest
    return best.version, best.digest


@pytest.mark.parametrize("kind", ["bfv", "pad"])
def test_all_silos_keep_the_model_of_the_best_version(kind: str, tmp_path: Path) -> None:
    made = federation(tmp_path, best_plan(kind))
    digests = rounds(made, [0.5, 0.75, 0.875, 0.75, 0.875, 0.5])
    found = settled(made, 6)
    assert set(found.values()) == {(2, digests[2])}, "of two that are as good, the first"
    assert made.silos["a"].pooled is not None
    assert [one.best and one.best.version for one in made.silos["a"].pooled] == [2]


def test_catching_up_over_several_versions_comes_to_the_same(tmp_path: Path) -> None:
    """One stays away for six versions, another begins anew, and one is replaced by a trainer that has its file."""
    made = federation(tmp_path, best_plan(quorum=3))
    digests = rounds(made, [0.5, 0.625])
    rounds(made, [0.875, 0.75, 0.5, 0.625, 0.75], 2, "abc")
    made.silos["b"] = made.copy("b", tmp_path / "b" / "copy.bin")
    made.silos["c"] = made.copy("c")
    made.aggregator.leave("c")
    made.aggregator.greet("c", -1, None)
    found = settled(made, 7)
    assert len(set(found.values())) == 1 and found["a"][0] == 2 and found["a"][1] not in digests.values()


@pytest.mark.parametrize("dies", ["model", "state", "others"])
def test_whenever_a_trainer_is_killed_it_comes_to_the_same(dies: str, tmp_path: Path) -> None:
    """Before the model is written, between model and state, and before what is not kept any more is gone."""
    made = federation(tmp_path)
    rounds(made, [0.5, 0.75])
    file = tmp_path / "b" / "copy.bin"
    victim = made.silos["b"] = made.copy("b", file)
    patch = pytest.MonkeyPatch()
    place = {
        "model": "fedsync.cipher.silo.figure_pool.write_pieces",
        "state": "fedsync.cipher.silo.replica_state.write_pieces",
        "others": "fedsync.cipher.silo.replica_state.remove_others",
    }[dies]

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    patch.setattr(place, die)
    with pytest.raises(KeyboardInterrupt):
        made.begin("b", 2)
    patch.undo()
    assert victim.holds == 1 or dies == "model"
    made.silos["b"] = made.copy("b", file)
    assert made.silos["b"].holds == (2 if dies == "others" else 1), "what was on disk before is whole"
    assert len(set(settled(made, 2).values())) == 1
    rounds(made, [0.875, 0.5], 2)
    found = settled(made, 4)
    assert len(set(found.values())) == 1 and found["b"][0] == 2
    names = [path.name for path in (tmp_path / "b" / FOLDER).iterdir()]
    assert len(names) == 1, "and nothing else is left"


def test_without_its_file_a_silo_begins_anew(tmp_path: Path) -> None:
    made = federation(tmp_path)
    rounds(made, [0.75, 0.5, 0.5])
    before = settled(made, 3)
    for file in (tmp_path / "b" / FOLDER).iterdir():
        data = bytearray(file.read_bytes())
        data[5] ^= 1
        file.write_bytes(data)
    made.silos["b"] = made.copy("b", tmp_path / "b" / "copy.bin")
    assert made.silos["b"].holds == -1
    assert settled(made, 3) == before


def test_versions_that_are_taken_back_stay_the_best_of_what_was_seen(tmp_path: Path) -> None:
    made = federation(tmp_path)
    made.aggregator.savepoint()
    digests = rounds(made, [0.5, 0.875, 0.5])
    settled(made, 3)
    made.aggregator.rollback()
    found = settled(made, 4)
    assert set(found.values()) == {(1, digests[1])}
    np.testing.assert_allclose(made.silos["a"].model, made.silos["b"].model, rtol=0)


def test_who_begins_with_a_snapshot_keeps_the_same_model(tmp_path: Path) -> None:
    made = federation(tmp_path, best_plan(quorum=3))
    digests = rounds(made, [0.5, 0.875, 0.5])
    settled(made, 3, "a")
    made.aggregator.put_snapshot("a", 3, made.silos["a"].snapshot())
    rounds(made, [0.5, 0.5, 0.5], 3, "abc")
    joiner = made.copy("d", tmp_path / "new" / "copy.bin")
    (tmp_path / "new").mkdir()
    made.silos["d"] = joiner
    made.aggregator.leave("d")
    made.aggregator.greet("d", -1, joiner.greeting())
    assert decode(made.aggregator.outgoing("d")).start is Start.SNAPSHOT
    made.begin("d", 6)
    assert kept(joiner) == settled(made, 6, "abc")["a"] == (1, digests[1])


def test_where_each_arrival_is_a_version_the_best_is_one_that_somebody_evaluated(tmp_path: Path) -> None:
    """Silos come in turn, each with the model of four versions ago: a pool's score is of the version it began with."""
    made = federation(tmp_path, best_plan(quorum=4))
    digests = {0: hashlib.sha256(as_bytes(made.begin("a", 0)).data).hexdigest()}
    for name in SILOS[1:]:
        made.begin(name, 0)
    for version, accuracy in enumerate([0.5] * 4 + [0.875] * 4 + [0.5] * 8):
        name = SILOS[version % 4]
        made.commit(version + 1, [made.answer(name, change(version), evaluation=evaluation(accuracy))])
        digests[version + 1] = hashlib.sha256(as_bytes(made.begin(name, version + 1)).data).hexdigest()
    rest = {name: kept(made.silos[name]) for name in SILOS}
    assert set(rest.values()) == {(4, digests[4])}, "evaluated by the silo that made it, for version 8"
    assert [silo._state.offered is not None for silo in made.silos.values()] == [True, True, True, False]
    for name in SILOS:
        again = made.copy(name, tmp_path / name / "copy.bin")
        assert again._state.digest == made.silos[name]._state.digest
        assert [each.version for each in again._state.kept] == [each.version for each in made.silos[name]._state.kept]


def test_all_snapshots_of_a_run_are_as_long_with_models_in_them_as_without(tmp_path: Path) -> None:
    made = federation(tmp_path)
    lengths = set()
    for version, accuracy in enumerate([0.5, 0.75, 0.625]):
        rounds(made, [accuracy], version)
        settled(made, version + 1)
        lengths.add(len(made.silos["a"].snapshot()))
    state = made.silos["a"]._state
    rounds(made, [0.5], 3, "ab")  # so few are no quorum: the model waits for its score
    settled(made, 4, "ab")
    lengths.add(len(made.silos["a"].snapshot()))
    assert len(lengths) == 1 and state.best is not None and made.silos["a"]._state.offered is not None


@pytest.mark.parametrize(
    "score", [None, Score(4, 0.5, 0.25, {"auroc": 0.1}), Score(4, None, 0.25), Score(4, 0.5, None)]
)
def test_a_kept_model_s_score_comes_back_and_beside_another_model_it_is_refused(score: Score | None) -> None:
    model = np.arange(3, dtype=np.float32)
    kept = KeptModel.of(5, model, score)
    words = json.loads(json.dumps(kept.to_json()))
    again = KeptModel.from_json(words, model)
    assert (again.version, again.digest, again.score) == (kept.version, kept.digest, score)
    with pytest.raises(ValueError, match="version 5"):
        KeptModel.from_json(words, model + 1)
