"""Final evaluation of a run: silos evaluate the finished models, then the run stops.

| step | action | until |
|---|---|---|
| halt | if silos train local baselines (`fedsync.evaluation.local_baselines`): halt orders in work | all are idle |
| apart | before a question about silos' own models: orders to train these models | all are done |
| tally | if figures are sealed: evaluation-only orders; orders in work are halted | all answered, failed or are lost |
| commit | if figures are sealed: commit their updates, which change nothing, as one more version | |
| question | `Evaluate`; if figures are sealed, it brings the sum | all silos have answered |

Halt happens once. The other steps are repeated for each question below; tally also after the loss of all its silos:

| question | reason | skipped if |
|---|---|---|
| last version, validation split | it may be the best; sealed: it brings the sum of scores | all have evaluated it |
| last version, test split | the run's result, on samples that influenced no decision | see below |
| best version, test split | the best model's result | see below, or the best version is the last |
| silos' own models, test split | each silo's gain from the run | ``cross_site`` is off |
| another silo's local model, test split | cross-site matrix | ``cross_site`` is off, or the owner shares no model |

Without ``cross_site``, a run skips the test split if no silo holds out a validation split. A sealed run skips it unless
all silos do. Sealed answers are released for one fixed set of silos (`fedsync.cipher.silo.figure_pool`). So a sealed
run asks about silos' own models only if all silos have such models, and skips other silos' models.

Sealed (encrypted) figures can be added up only within a version. So after training, one more version, without a change
of the model, carries the scores of the last trained version. A silo evaluates each model only once for the server, with
its order on this model. So a repeated evaluation-only order, as after a restart of the server, has the same id. The run
does not end while orders on the newest version are in work. Only a time limit can end it; this version gets no score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from fedsync.core.actions import Action, Discard, Dispatch, Evaluate, HaltEarly, Note
from fedsync.core.events import Evaluated
from fedsync.core.orders import Split, Subject
from fedsync.core.speed.sizing import Plan
from fedsync.core.state import MAX_FAILURES, CoordinatorState, Policies
from fedsync.core.views import Verdict

if TYPE_CHECKING:
    from fedsync.evaluation.local_baselines import Apart

Question = tuple[Subject, Split, str]
"""Model, split, and owner of the model; owner "" if each silo has its own model or all share it."""

QUESTIONS: tuple[Question, ...] = (
    (Subject.LAST, Split.VALIDATION, ""),
    (Subject.LAST, Split.TEST, ""),
    (Subject.BEST, Split.TEST, ""),
)
"""The first question may still change the best version."""

_NOTHING_COMPARED = (
    "nothing is compared (evaluation.cross_site): figures are sealed, and not every silo holds out a validation split, "
    "or there is no version"
)


def begin(state: CoordinatorState, policies: Policies, actions: list[Action]) -> None:
    state.final_version, state.sums_ordered = state.version, 1
    known = state.evaluated
    if policies.apart:
        _halt(state, state.silos, actions)
        if not _comparable(state, policies):
            actions.append(Note(_NOTHING_COMPARED))
    if policies.tally:
        actions.extend(Discard(update_id, f"the run is over: {state.closing}") for update_id in state.pending)
        state.pending.clear()
    if policies.tally and state.commits and not known:
        _sum(state, policies, actions)


def advance(
    state: CoordinatorState,
    policies: Policies,
    plan: Callable[[], Plan],
    recent: Sequence[object],
    now_s: float,
    actions: list[Action],
) -> bool:
    """Take the next steps; return whether all are done. ``recent`` journal entries go into error messages."""
    while not state.awaiting and state.questions_asked < len(questions(state, policies)):
        if state.sums_ordered <= state.questions_asked and not _trained(state, policies, plan, now_s, actions):
            return False
        if policies.tally and state.sums_ordered == state.questions_asked:
            state.sums_ordered += 1
            if _worth_asking(state, policies, *questions(state, policies)[state.questions_asked][:2]):
                _sum(state, policies, actions)
        if state.pending_evaluations:
            _order(state, policies, plan, now_s, actions)
            return False
        if not state.questions_asked and _awaited(state, policies):
            return False
        if policies.tally and state.pending:
            metas = [state.pending.pop(update_id) for update_id in sorted(state.pending)]
            state.version += 1
            actions.append(policies.weighed(metas, state.version, recent))
        _ask(state, policies, actions)
    return not state.awaiting


def _sum(state: CoordinatorState, policies: Policies, actions: list[Action]) -> None:
    here = [name for name, silo in state.silos.items() if silo.failures < MAX_FAILURES]
    here.sort(key=lambda name: state.silos[name].busy)
    state.pending_evaluations = set(here[: policies.tally])
    _halt(state, here[: policies.tally], actions)


def sum_again(state: CoordinatorState, actions: list[Action]) -> None:
    """Make the sum of scores due again after a loss of all its silos, as when a run is resumed."""
    # Silos that join again have other masks, which do not cancel out against those of earlier updates.
    actions.extend(Discard(update_id, "its sum is ordered again") for update_id in state.pending)
    state.pending.clear()
    state.sums_ordered = state.questions_asked


def _order(
    state: CoordinatorState, policies: Policies, plan: Callable[[], Plan], now_s: float, actions: list[Action]
) -> None:
    subject, split, _ = questions(state, policies)[state.questions_asked]
    for name in [name for name in state.silos if name in state.pending_evaluations and not state.silos[name].busy]:
        order = state.next_order(name, plan()[name], Verdict(), policies.seed)
        update_id = state.scoring_ids.setdefault(name, order.update_id)
        order = replace(order, update_id=update_id, learning_rate=0.0, subject=subject, split=split)
        state.silos[name] = state.silos[name].begun(order, now_s)
        actions.append(Dispatch(name, order))


def questions(state: CoordinatorState, policies: Policies) -> list[Question]:
    """Return all questions known now; silos that share a local model are known only after local training."""
    found = list(QUESTIONS)
    for subject in policies.apart:
        found.append((subject, Split.TEST, ""))
        if subject is Subject.LOCAL:
            found.extend((subject, Split.TEST, owner) for owner in apart(state).shared)
    return found


def answers(state: CoordinatorState, policies: Policies, event: Evaluated) -> bool:
    asked = (event.subject, event.split, event.owner) == questions(state, policies)[state.questions_asked - 1]
    return event.silo in state.awaiting and asked and event.version == _version(state, policies, event.subject)


def decides(state: CoordinatorState) -> bool:
    return state.questions_asked == 1


def apart(state: CoordinatorState) -> Apart:
    return cast("Apart", state.extensions.own("apart"))


def _halt(state: CoordinatorState, names: Iterable[str], actions: list[Action]) -> None:
    for name in names:
        order = state.silos[name].order
        if order is not None and state.halted.get(name) != order.update_id:
            state.halted[name] = order.update_id
            actions.append(HaltEarly(name, order.update_id))


def _awaited(state: CoordinatorState, policies: Policies) -> bool:
    return bool(policies.apart) and any(silo.busy for silo in state.silos.values())


def _trained(
    state: CoordinatorState, policies: Policies, plan: Callable[[], Plan], now_s: float, actions: list[Action]
) -> bool:
    subject, _, owner = questions(state, policies)[state.questions_asked]
    rules, version = policies.cross_site, _base(state, subject)
    if rules is None or not subject.own or owner or version < 0 or not _comparable(state, policies):
        return True
    progress = apart(state)
    progress.begin({name: plan()[name] for name in state.silos})
    for name in [name for name, silo in state.silos.items() if not silo.busy]:
        following = progress.next(name, subject, rules)
        if following is not None:
            work, after, share = following
            order = state.next_order(name, work, Verdict(), policies.seed, evaluate=False)
            order = replace(order, base_version=version, subject=subject, after=after, share=share)
            state.silos[name] = state.silos[name].begun(order, now_s)
            actions.append(Dispatch(name, order))
    if any(silo.busy for silo in state.silos.values()):
        return False
    progress.finish(subject, rules)
    return True


def _ask(state: CoordinatorState, policies: Policies, actions: list[Action]) -> None:
    subject, split, owner = questions(state, policies)[state.questions_asked]
    state.questions_asked += 1
    state.scoring_ids.clear()
    version, silos = _version(state, policies, subject), tuple(state.silos)
    if owner:
        silos = tuple(name for name in silos if name != owner)
    elif subject.own and not policies.tally:
        silos = tuple(name for name in apart(state).trained.get(subject, ()) if name in state.silos)
    if not silos or not _worth_asking(state, policies, subject, split):
        return
    if split is Split.VALIDATION:
        state.scores.restart(version)
        state.scores.begin(version, len(silos))
    state.awaiting = set(silos)
    actions.append(Evaluate(version, silos, split, subject, owner))


def _worth_asking(state: CoordinatorState, policies: Policies, subject: Subject, split: Split) -> bool:
    if not (state.silos and policies.evaluate):
        return False
    if split is Split.VALIDATION:
        return not state.scores.covers(_version(state, policies, subject), state.silos)
    if subject is Subject.BEST and state.best.version in (-1, state.final_version):
        return False
    if policies.tally:
        all_have_one = state.silos.keys() <= set(apart(state).trained.get(subject, ())) or not subject.own
        return all_have_one and _comparable(state, policies)
    return bool(policies.apart) or any(silo.facts.validates for silo in state.silos.values())


def _comparable(state: CoordinatorState, policies: Policies) -> bool:
    """Whether the test split can tell anything; a sealed run without validation splits would evaluate samples twice."""
    return not policies.tally or (state.commits > 0 and all(silo.facts.validates for silo in state.silos.values()))


def _version(state: CoordinatorState, policies: Policies, subject: Subject) -> int:
    """Return the version that a question is about; if figures are sealed, the version with the sum."""
    return state.version if policies.tally else _base(state, subject)


def _base(state: CoordinatorState, subject: Subject) -> int:
    if subject is Subject.LOCAL:
        return 0
    return state.best.version if subject in (Subject.BEST, Subject.TUNED) else state.version
