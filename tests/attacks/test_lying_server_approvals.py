"""A lying server, and an owner who wants to be asked: what it gets a silo to do that the owner has not read.

The gain is an answer that is no refusal by one word, the same each time.
"""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fedsync.config.run_spec import RunSpec
from fedsync.ops.approval_summary import summary
from fedsync.silo.owner.approvals import APPROVALS, Approvals, check_approved
from fedsync.silo.owner.owner_policy import OwnerRefusal, owner_environment
from fedsync.silo.protocol import AskModel, AskSnapshot, Collect, Describe, Identity, Question, Refusal, Refused
from tests.attacks.adversary import Federation, Victim
from tests.attacks.conftest import Make

SILENT = Refused(Refusal.APPROVAL)
ASKS = [Describe(), AskModel(), AskSnapshot(), Collect("silo-a/1"), Question()]


@pytest.fixture
def federation(make: Make) -> Federation:
    return make(owner={"approve": "never"})


def approvals(federation: Federation) -> Approvals:
    return Approvals(federation.folder / "state" / "silo-a" / APPROVALS)


def silo(federation: Federation, spec: RunSpec) -> Victim:
    return federation.silo("silo-a", spec, approve="ask")


def waits(federation: Federation, text: str, settings: str = "{}") -> None:
    """A run in this text is not answered before its owner decides."""
    asks = owner_environment(federation.config("silo-a", approve="ask"))
    with patch.dict(os.environ, asks), pytest.raises(OwnerRefusal):
        check_approved(Identity(text, 0, "silo-a", run_config=settings))


def test_a_silo_says_nothing_of_a_run_before_its_owner_does(federation: Federation) -> None:
    for request in ASKS:
        heard = silo(federation, federation.spec("run-a")).ask(request)
        assert heard.reply == SILENT and heard.payload is None


def test_a_specification_that_is_swapped_after_the_approval_waits_anew(federation: Federation) -> None:
    spec = federation.spec("run-a")
    assert silo(federation, spec).ask(Describe()).reply == SILENT
    approvals(federation).decide(approvals(federation).waiting()[0].digest, approve=True)
    assert not silo(federation, spec).ask(Describe()).refused
    swapped = [
        federation.spec("run-a", cipher={"kind": "plain"}),
        federation.spec("run-a", seed=8),
        federation.spec("run-a", local={"steps": 3}),
        federation.spec("run-a", stop={"rounds": 6}),
        federation.spec("run-b"),  # the approval played again for another run
        federation.spec("run-a", began="run-0"),
    ]
    for other in swapped:
        assert silo(federation, other).ask(Describe()).reply == SILENT
    text = spec.dump()  # the same to a parser, and not what was confirmed
    for same in (f" {text}", text.replace('"seed":', '"seed":1,"seed":', 1)):
        waits(federation, same)


def test_nothing_of_a_run_that_waits_is_read(federation: Federation, tmp_path: Path) -> None:
    """The answer is the same where the data are there, and where they are not."""
    task = {**federation.task(), "data": {"kind": "table", "file": str(tmp_path / "none.csv"), "target": "y"}}
    heard = silo(federation, federation.spec("run-a", task=task)).ask(Describe())
    assert heard.words == silo(federation, federation.spec("run-b")).ask(Describe()).words


LONG: list[dict[str, Any]] = [
    {"train_config": {"a": "x" * 2500, "zz": "hidden"}},
    {"train_config": {"a" * 2500: 1, "zz": "hidden"}},
    {"evaluate_config": {**{f"{number:030}": number for number in range(60)}, "zz": "hidden"}},
    {"admitted": [*(f"silo-{number}" for number in range(400)), "hidden"]},
    {"train_config": {"a": 10**2500, "zz": "hidden"}},
]


@pytest.mark.parametrize(
    ("said", "settings"), [*((said, {}) for said in LONG), ({}, {"a": "x" * 2500, "zz": "hidden"})], ids=range(6)
)
def test_a_long_value_hides_nothing(said: dict[str, Any], settings: dict[str, str], federation: Federation) -> None:
    """Of the specification or of the run configuration: the owner would confirm what he has not seen."""
    text = json.dumps(json.loads(federation.spec("run-a").dump()) | said, separators=(",", ":"))
    waits(federation, text, json.dumps(settings))
    for run in approvals(federation).waiting():
        assert "hidden" in "\n".join(summary(run, federation.config("silo-a")))
