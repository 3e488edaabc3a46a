"""A lying server asks for models that silos train for themselves, and for figures of them.

It chooses when, how long and in which batches, and no model: what the silo trains, and from what, it holds itself.
"""

from dataclasses import replace

import numpy as np
import pytest

from fedsync.core.orders import Split, Subject, WorkOrder, WorkReport
from fedsync.model.transfer import NO_PAYLOAD, Payload
from fedsync.silo.protocol import Attestation, EvaluateModel, Refusal, Refused, Train
from fedsync.train.loop import Trainer
from tests.attacks.adversary import Federation, Victim
from tests.attacks.conftest import Make

OPEN = "{kind: bfv, members: 2, metrics: plain}"
SHARES = {"seal": {"metrics": "plain"}, "share_local": True}
COMPARES = {"evaluation": {"metrics": [], "cross_site": {"local": True, "fine_tune": 2}}}


@pytest.fixture
def sharing(make: Make) -> Federation:
    """One whose owners share their models, in the clear figures of them, and which compares them."""
    return make(cipher=OPEN, owner=SHARES, changes=COMPARES)


def alone(federation: Federation, **changes: object) -> WorkOrder:
    return replace(federation.order("silo-a"), base_version=0, subject=Subject.LOCAL, share=True, **changes)


def local_model(silo: Victim) -> Payload:
    return silo.session._own.model(Subject.LOCAL)[0].copy()


@pytest.mark.parametrize("subject", [Subject.LOCAL, Subject.TUNED])
def test_a_sealed_run_that_compares_nothing_has_no_own_models_trained(make: Make, subject: Subject) -> None:
    """What it compares is in its specification, which silos can read."""
    federation = make()
    silo = federation.silos["silo-a"]
    trained = silo.ask(Train(replace(alone(federation), subject=subject)), NO_PAYLOAD)
    assert trained.reply == Refused(Refusal.PROTOCOL)


@pytest.mark.parametrize("subject", [Subject.LOCAL, Subject.TUNED])
def test_where_figures_are_sealed_none_of_an_own_model_is_told(make: Make, subject: Subject) -> None:
    """Losses of a model that only this silo trained, on its own test rows, in the clear."""
    federation = make(changes=COMPARES)
    silo = federation.silos["silo-a"]
    federation.train("silo-a")
    trained = silo.ask(Train(replace(alone(federation), subject=Subject.LOCAL)), NO_PAYLOAD)
    assert isinstance(trained.reply, WorkReport) and trained.reply.loss is None and trained.reply.metrics == {}
    assert trained.payload is None or trained.payload.nbytes == 0
    asked = silo.ask(EvaluateModel(0, Split.TEST, subject), federation.aggregator.outgoing("silo-a"))
    assert asked.reply == Attestation(())


@pytest.mark.parametrize("subject", [Subject.LOCAL, Subject.TUNED])
def test_a_silo_without_an_own_model_evaluates_no_other_in_its_place(
    make: Make, monkeypatch: pytest.MonkeyPatch, subject: Subject
) -> None:
    """The newest one, which it may have evaluated before: in two sums of different silos that would be its figures."""
    monkeypatch.setattr(Trainer, "validates", True)
    federation = make(changes=COMPARES)
    asked = federation.order("silo-a", learning_rate=0.0, evaluate=True, subject=subject, split=Split.TEST)
    assert federation.train("silo-a", asked).reply == Refused(Refusal.PROTOCOL)


@pytest.mark.parametrize("validates", [True, False])
def test_a_silo_that_holds_out_no_validation_split_does_not_tell_of_its_test_split(
    make: Make, monkeypatch: pytest.MonkeyPatch, validates: bool
) -> None:
    """Its rounds are evaluated on it: the same model, on the same rows, would be in two sums of different silos."""
    monkeypatch.setattr(Trainer, "validates", validates)
    federation = make()
    asked = federation.order("silo-a", learning_rate=0.0, evaluate=True, split=Split.TEST)
    assert federation.train("silo-a", asked).refused is not validates


def test_under_encryption_no_model_travels_though_its_owner_shares_it(sharing: Federation) -> None:
    silo = sharing.silos["silo-a"]
    heard = silo.ask(Train(alone(sharing)), NO_PAYLOAD)
    assert isinstance(heard.reply, WorkReport), heard.reply
    assert heard.payload is None or heard.payload.nbytes == 0
    assert np.any(local_model(silo)), "it is there, at the silo"


def test_under_encryption_the_server_chooses_no_model_to_begin_with(sharing: Federation) -> None:
    """What it sends along is not looked at, and the best model, which silos do not have, is not asked for."""
    honest, misled = (sharing.silos[name] for name in ("silo-a", "silo-b"))
    model, order = honest.session.initial_model(), alone(sharing)
    fresh = sharing.silo("silo-a", **SHARES)
    assert isinstance(honest.ask(Train(order), NO_PAYLOAD).reply, WorkReport)
    assert isinstance(fresh.ask(Train(order), (model + 1000).view(np.uint8)).reply, WorkReport)
    np.testing.assert_array_equal(local_model(fresh), local_model(honest))
    tuned = replace(order, subject=Subject.TUNED, update_id="silo-b/1")
    assert misled.ask(Train(tuned), (model + 1000).view(np.uint8)).reply == Refused(Refusal.PROTOCOL)


def test_under_encryption_no_other_silos_model_is_evaluated(sharing: Federation) -> None:
    """It would be one of the server's choice: the loss of chosen models tells rows of data."""
    silo = sharing.silos["silo-a"]
    chosen = np.zeros_like(silo.session.initial_model()).view(np.uint8)
    heard = silo.ask(EvaluateModel(0, Split.TEST, Subject.LOCAL, "silo-b"), chosen)
    assert heard.reply == Refused(Refusal.PROTOCOL)


def test_owners_limits_hold_for_what_is_trained_apart(make: Make) -> None:
    federation = make(cipher=OPEN, owner={**SHARES, "limits": {"samples": 8, "orders_per_hour": 2}}, changes=COMPARES)
    silo = federation.silos["silo-a"]
    small = silo.ask(Train(alone(federation, batch_size=1, max_steps=1)), NO_PAYLOAD)
    assert small.reply == Refused(Refusal.LIMIT)
    heard = [silo.ask(Train(alone(federation, after=after)), NO_PAYLOAD) for after in range(3)]
    assert [isinstance(each.reply, WorkReport) for each in heard] == [True, True, False]
    assert heard[-1].reply == Refused(Refusal.LIMIT)
