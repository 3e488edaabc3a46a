"""A lying server that asks what the columns of silos' tables hold, and one that tells silos what they found."""

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsync.config.run_spec import RunSpec
from fedsync.core.orders import WorkReport
from fedsync.evaluation.survey.table_sums import SurveyForm
from fedsync.silo.protocol import Describe, Refusal, Refused
from tests.attacks.adversary import FEATURES, Federation
from tests.attacks.conftest import Make

Told = dict[str, Any]

WEIGHT = {"kind": "fedavg", "weight": "silo"}


def table(federation: Federation, **changes: Any) -> Told:
    """The run that trains: all silos have the same patients here."""
    files = [str(federation.table)] * federation.count
    asked = {"bins": 4, "ranges": {}, "least": 5}
    made = {"kind": "csv", "files": files, "target": "y", "positive_above": 0.0, "statistics": asked}
    return {**made, "standardise": "federated", **changes}


@pytest.fixture
def surveying(make: Make) -> Callable[..., Federation]:
    def made(count: int = 3, **options: Any) -> Federation:
        plain = make(count)  # knows where the table is
        changes = {"task": {"kind": "survey", "of": table(plain)}, "aggregation": WEIGHT}
        return make(count, **{"changes": changes, "run": "survey-1", **options})

    return made


def surveyed(federation: Federation, **changes: Any) -> RunSpec:
    """The specification of the run after the survey of this federation, as an honest server writes it."""
    form = SurveyForm.of(federation.plan.layout, 4)
    sums = federation.aggregator.from_the_beginning(2)
    told = {
        "spec": federation.spec().dump(),
        "columns": dict(form.columns),
        "sums": base64.b64encode(sums.tobytes()).decode(),
        **changes,
    }
    return federation.spec("run-2", task=table(federation), aggregation=WEIGHT, survey=told)


Surveying = Callable[..., Federation]


def finished(surveying: Surveying, count: int = 3, **options: Any) -> Federation:
    federation = surveying(count, **options)
    for _ in range(2):
        federation.round()
    return federation


def test_an_honest_survey_is_opened_by_silos_that_were_in_it_and_by_others(surveying: Surveying) -> None:
    federation = surveying()
    federation.round()
    federation.round(["silo-a", "silo-b"])
    for name in federation.names:
        victim = federation.silo(name, surveyed(federation))
        assert victim.refusal() is None
        scales = victim.session._trainer._trainer._task._scales  # type: ignore[attr-defined]
        assert set(scales) == {f"x{index:02}" for index in range(FEATURES)}
        assert all(abs(scale.mean) < 1 and 0.5 < scale.deviation < 2 for scale in scales.values())


def test_nothing_of_a_silos_columns_is_in_what_it_sends(surveying: Surveying) -> None:
    """Neither how many rows it has nor a sum: what it sends for one table twice is not even alike."""
    federation = surveying()
    first, second = (federation.train("silo-a", federation.order("silo-a", seed=7)) for _ in range(2))
    assert isinstance(first.reply, WorkReport)
    assert first.reply.loss is None and first.reply.evaluation is None and not first.reply.metrics
    assert (first.reply.samples, first.reply.steps) == (8, 2), "what the order says"
    assert first.payload is not None and second.payload is not None
    words = [each.payload.view(np.uint8)[-(2**16) :] for each in (first, second) if each.payload is not None]
    assert np.mean(words[0] == words[1]) < 0.3
    heard = federation.silos["silo-a"].ask(Describe())
    rows = federation.silos["silo-a"].session._trainer.facts.examples
    assert f":{rows}," not in heard.words


def test_a_survey_in_the_clear_is_refused_unless_the_owner_allows_it(surveying: Surveying) -> None:
    federation = surveying()
    clear = federation.spec(cipher={"kind": "plain"})
    assert federation.silo("silo-a", clear).refusal() is Refusal.OWNER
    assert federation.silo("silo-a", clear, statistics="plain").refusal() is Refusal.OWNER, "it has keys"
    assert federation.silo("silo-a", clear, keys=None).refusal() is Refusal.OWNER
    assert federation.silo("silo-a", clear, keys=None, statistics="plain").refusal() is None


def test_sums_of_one_silo_are_refused(surveying: Surveying) -> None:
    """Whoever adds one silo's sums alone has others read them."""
    federation = surveying()
    alone = federation.spec(cipher={"kind": "bfv", "members": 1})
    assert federation.silo("silo-a", alone).refusal() is Refusal.OWNER
    federation.aggregator._plan = replace(federation.plan, members=1)
    federation.round(["silo-a"])
    assert federation.silo("silo-b", surveyed(federation)).refusal() is Refusal.INTEGRITY


def changed(sums: bytes, at: int) -> str:
    spoiled = bytearray(sums)
    spoiled[at] ^= 1
    return base64.b64encode(bytes(spoiled)).decode()


def test_what_silos_did_not_find_is_refused_alike_and_locks(surveying: Surveying) -> None:
    federation = finished(surveying)
    honest = surveyed(federation)
    assert honest.survey is not None
    true = base64.b64decode(honest.survey.sums)
    forged = [{"sums": changed(true, at)} for at in (-100_000, -1000)]
    of_other_run = federation.spec("survey-9").dump()
    words = set()
    nonsense = {"sums": base64.b64encode(b"nonsense").decode()}
    for told in (*forged, {"spec": of_other_run}, nonsense):
        victim = federation.silo("silo-a", surveyed(federation, **told))
        heard = victim.ask(Describe())
        assert isinstance(heard.reply, Refused) and heard.reply.code is Refusal.INTEGRITY
        words.add(heard.words)
    assert len(words) == 1
    assert federation.silo("silo-a", honest).refusal() is Refusal.LOCKED


def test_a_survey_of_another_task_is_refused(surveying: Surveying) -> None:
    """One that was made of columns which the run does not have, or that was not sealed."""
    federation = finished(surveying)
    other = surveyed(federation).model_copy(
        update={"task": federation.spec(task=table(federation, ignore=["x00"])).task}
    )
    assert federation.silo("silo-a", other).refusal() is Refusal.INTEGRITY
    clear = federation.spec(cipher={"kind": "plain"}).dump()
    assert federation.silo("silo-b", surveyed(federation, spec=clear)).refusal() is Refusal.INTEGRITY


@pytest.mark.slow
def test_silos_that_were_told_different_sums_do_not_add_up(surveying: Surveying) -> None:
    federation = finished(surveying, 4)
    one = surveyed(federation)
    two = surveying(4, run="survey-2")
    two.round(["silo-a", "silo-b"])
    two.round(["silo-a", "silo-b"])
    other = surveyed(two)
    changes = {"task": table(federation), "aggregation": WEIGHT, "survey": one.survey}
    run = replace(federation, changes=changes, run="run-2")
    run.silos["silo-d"] = run.silo("silo-d", other)
    assert run.silos["silo-d"].refusal() is None, "each of the two is honest"
    run.greet("silo-d", run.silos["silo-d"])
    heard = run.train("silo-d")
    before = run.silos["silo-a"].model if run.silos["silo-a"].replica.holds >= 0 else None
    run.round(["silo-a", "silo-b", "silo-c"])
    run.follow(["silo-a", "silo-b", "silo-c"])
    assert heard.refused or not np.array_equal(run.silos["silo-a"].model, before)
    assert heard.refused, "it does not even take the calibration of the others"


def test_surveys_are_counted(surveying: Surveying) -> None:
    """Each gives one more sum, which may have other silos in it."""
    federation = finished(surveying, owner={"limits": {"surveys_per_hour": 3}})
    assert not federation.train("silo-a").refused
    heard = federation.train("silo-a")
    assert isinstance(heard.reply, Refused) and heard.reply.code is Refusal.LIMIT
    again = surveying(owner={"limits": {"surveys_per_hour": 3}}, run="survey-2")
    heard = again.train("silo-a")
    assert isinstance(heard.reply, Refused) and heard.reply.code is Refusal.LIMIT, "over all runs"
