"""What a tuner chooses, on machines that are known: no training, all norms as a test says."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Action, Commit, Discard, Dispatch, Note, Stop
from fedsync.core.backlog import OrderInWork
from fedsync.core.coordinator import Coordinator
from fedsync.core.curve import Curve
from fedsync.core.events import Event, Folded, SiloJoined, UpdateArrived
from fedsync.core.journal import JournalEntry
from fedsync.core.kernel import Kernel, Priority
from fedsync.core.machines import RecordedMachine
from fedsync.core.orders import PooledFigures, SiloFacts, UpdateMeta, WorkOrder, WorkReport
from fedsync.core.transfer import NO_PAYLOAD, Payload
from fedsync.core.tuning import CommitSeen, OrderSeen
from fedsync.policies.tuning.record import Lap
from fedsync.policies.tuning.tuner import CHANCE, AutoChoice, AutoTuner
from tests.sim.fake import strategy

Lie = Callable[[float], float]
FACTS = SiloFacts(1000)
BATCH = 32
QUEUED: dict[str, Any] = {"overlap": 0.25, "barriers": [{"kind": "bsp"}]}
SEALED: dict[str, Any] = {"cipher": {"kind": "bfv", "members": 2}}
MASKED: dict[str, Any] = {"cipher": {"kind": "masked"}}
EVERY_SECOND: dict[str, Any] = {"kind": "fixed", "interval_s": 1.0}


class Played(Kernel[RecordedMachine]):
    """A run of so many commits, whose silos may lie about how long they trained, and may tell the norms themselves."""

    upload_bytes = 0

    def __init__(self, config: StrategyConfig, commits: int, lies: dict[str, Lie], **curves: Curve) -> None:
        self.policies = config.policies(len(curves))
        machines = {name: RecordedMachine(curve) for name, curve in curves.items()}
        super().__init__(Coordinator(self.policies), machines)
        self.lies, self.left, self.entries = lies, commits, list[JournalEntry]()
        self.norms: tuple[float, float] | None = (1.0, 4.0)
        self.sealed = False
        self.loss: Callable[[int], float] = lambda version: 0.5
        for name in curves:
            self._push(0.0, SiloJoined(0.0, name, FACTS), Priority.PRESENCE)

    def given(self, silo: str, order: WorkOrder) -> Payload:
        return NO_PAYLOAD

    def happens(self, happening: SiloJoined, now_s: float) -> Event:
        return happening

    def ended(self, work: OrderInWork, now_s: float) -> Event:
        assert work.course is not None
        order, steps = work.order, len(work.course.after_s)
        seconds = self.lies.get(work.silo, lambda true: true)(work.course.last_s - work.start_s)
        loss = self.loss(order.base_version)
        report = WorkReport(order.base_version, steps, steps * order.batch_size, seconds, None if self.sealed else loss)
        if self.sealed and order.base_version:
            report = replace(report, pooled=(PooledFigures(order.base_version, loss, norms=self.norms),))
        return UpdateArrived(now_s, UpdateMeta.of(work.silo, order, report, FACTS.examples, 0), report)

    def added(self, now_s: float) -> list[Event]:
        committed = self.entries and any(isinstance(action, Commit) for action in self.entries[-1].actions)
        if not committed or self.sealed or self.norms is None:
            return []
        return [Folded(now_s, self._coordinator.version, *self.norms)]

    def act(self, action: Action, now_s: float) -> None:
        self.left -= isinstance(action, Commit)

    def decided(self, entry: JournalEntry) -> None:
        self.entries.append(entry)
        if self.left <= 0:
            self._stop = Stop("enough")

    def actions(self, kind: type[Any]) -> list[Any]:
        return [action for entry in self.entries for action in entry.actions if isinstance(action, kind)]

    @property
    def reasons(self) -> list[str]:
        return [note.text for note in self.actions(Note) if note.text.startswith("auto: ")]


def tuned(auto: dict[str, Any] | None = None, **sections: Any) -> StrategyConfig:
    return strategy(
        stop={"rounds": 1000},
        local={"steps": 4, "batch_size": BATCH},
        balancer={"kind": "fixed"},
        predictor={"kind": "memoryless"},
        auto=auto or {},
        **sections,
    )


def play(config: StrategyConfig, commits: int = 16, lies: dict[str, Lie] | None = None, **curves: Curve) -> Played:
    run = Played(config, commits, lies or {}, **curves)
    run.run()
    return run


ONE_SLOW = {name: Curve(200.0, overhead_s=1.0) for name in "abc"} | {"d": Curve(20.0, overhead_s=1.0)}
ALIKE = {name: Curve(200.0, overhead_s=1.0) for name in "abcd"}


def test_a_slow_silo_gets_less_and_the_journal_says_why() -> None:
    """Unbalanced, an order of d takes 1 s + 4 x 1.6 s."""
    run = play(tuned(), **ONE_SLOW)
    assert "instead of 4 steps, fixed, bsp" in run.reasons[0]
    assert "times the progress a second" in run.reasons[0]
    times = [entry.at_s for entry in run.entries if any(isinstance(action, Commit) for action in entry.actions)]
    assert times[0] == pytest.approx(1 + 4 * 1.6)
    assert times[-1] - times[-2] < times[0] / 2


def test_nothing_changes_unless_the_gain_is_clear() -> None:
    assert play(tuned({"gain": 50.0}), **ONE_SLOW).reasons == []
    assert play(tuned({"gain": 0.1}), **ONE_SLOW).reasons != []


class Wavering(Played):
    """Two commits whose updates agree, then two whose updates cancel, and so on."""

    def decided(self, entry: JournalEntry) -> None:
        super().decided(entry)
        self.norms = (0.81, 1.0) if self.left // 2 % 2 else (0.04, 1.0)


def test_it_looks_at_its_choice_at_the_first_commit_and_every_so_many_commits() -> None:
    run = Wavering(tuned({"gain": 0.0, "every": 5}), 40, {}, **ONE_SLOW)
    run.run()
    commits, at = 0, []
    for entry in run.entries:
        for action in entry.actions:
            commits += isinstance(action, Commit)
            if isinstance(action, Note) and action.text.startswith("auto: "):
                at.append(commits)
    assert len(at) >= 4
    assert {number % 5 for number in at} == {1}


def last_steps(
    norms: tuple[float, float] | None, *, sealed: bool = False, sections: dict[str, Any] | None = None, **auto: Any
) -> int:
    config = tuned({"gain": 0.01, "barriers": [{"kind": "bsp"}], **auto}, **sections or {})
    run = Played(config, 24, {}, **ALIKE)
    run.norms, run.sealed = norms, sealed
    run.run()
    steps: int = run.actions(Dispatch)[-1].order.max_steps
    return steps


def test_steps_follow_what_they_are_worth() -> None:
    """Alike machines, 1 s of overhead, 0.16 s a step: the best number is e / (1 - e) x 1 / 0.16."""
    assert last_steps((1.0, 4.0)) == pytest.approx(6.25, abs=1)
    assert last_steps((0.64, 1.0)) == pytest.approx(25, abs=3)
    assert last_steps((1.0, 100.0)) <= 2
    assert last_steps((1.0, 1.0), most_steps=10) == 10
    assert last_steps((1.0, 100.0), least_steps=3) == 3


def test_where_the_server_s_steps_have_their_own_length_more_steps_only_turn_them() -> None:
    """A mean of four updates that is half as long as each may be all noise: e is 1 / 4, so a third of 6.25."""
    chosen = {"server_optimizer": {"kind": "cautious-adam"}}
    assert last_steps((1.0, 4.0), sections=chosen) == 2
    assert last_steps((0.81, 1.0), sections=chosen) == 1


@pytest.mark.parametrize(("norms", "expected"), [((1.0, 4.0), 6.25), ((0.64, 1.0), 25)])
def test_norms_that_silos_tell_together_count_alike(norms: tuple[float, float], expected: float) -> None:
    assert last_steps(norms, sealed=True) == pytest.approx(expected, abs=3)


def test_without_norms_it_goes_by_throughput_and_loss() -> None:
    """All losses are 0.5 here, so training takes as long as overhead: 1 / 0.16 steps."""
    assert last_steps(None) == pytest.approx(6.25, abs=1)


def test_the_loss_that_silos_find_together_stands_in_where_nobody_tells_norms() -> None:
    """It falls to a sixteenth, so training is worth a quarter of overhead: 6.25 / 4 steps."""
    run = Played(tuned({"gain": 0.01, "barriers": [{"kind": "bsp"}]}), 24, {}, **ALIKE)
    run.norms, run.sealed, run.loss = None, True, lambda version: 0.5 if version < 2 else 0.5 / 16
    run.run()
    assert run.actions(Dispatch)[-1].order.max_steps <= 2


def test_one_look_at_most_doubles_or_halves_the_steps() -> None:
    run = Wavering(tuned({"gain": 0.0, "every": 4}), 40, {}, **ALIKE)
    run.run()
    steps = [[int(each.partition(" steps")[0]) for each in text[6:].split(" instead of ")[:2]] for text in run.reasons]
    assert any(after > before for after, before in steps)
    assert all(before <= 2 * after <= 4 * before for after, before in steps), steps


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_every_silo_keeps_the_least_share(share: float) -> None:
    """Of the samples that are sent in, and of each batch; d is ten times as slow."""
    run = play(tuned({"least_share": share, "gain": 0.0}), 24, **ONE_SLOW)
    arrived = [event for entry in run.entries for event in entry.events if isinstance(event, UpdateArrived)]
    samples = {name: sum(event.meta.samples for event in arrived if event.meta.silo == name) for name in ONE_SLOW}
    assert min(samples.values()) >= 0.9 * share * sum(samples.values()) / 4
    assert min(action.order.batch_size for action in run.actions(Dispatch)) >= share * BATCH


@pytest.mark.parametrize("factor", [1e-6, *(pytest.param(each, marks=pytest.mark.full) for each in (1e-3, 0.05)), 50.0])
def test_a_silo_that_lies_about_its_speed_starves_nobody(factor: float) -> None:
    """It claims to train so many times as long as it does. Believed, it would be given nearly all work.

    The others keep their least share, and a step of all takes at most half as long again as without lie and tuner.
    """
    honest = play(tuned({"gain": 50.0}), 30, **ALIKE)
    run = play(tuned(), 30, {"a": lambda true: max(true * factor, 1e-6)}, **ALIKE)
    arrived = [event.meta for entry in run.entries for event in entry.events if isinstance(event, UpdateArrived)]
    for name in "bcd":
        samples = sum(meta.samples for meta in arrived if meta.silo == name)
        assert samples >= 0.1 * sum(meta.samples for meta in arrived) / 4
    done, usual = (sum(action.order.max_steps for action in each.actions(Dispatch)) for each in (run, honest))
    assert run.entries[-1].at_s / done <= 1.5 * honest.entries[-1].at_s / usual


def test_the_same_events_and_a_checkpoint_give_the_same_choices() -> None:
    """A new coordinator told the same events, and one restored in the middle, decide what the first one did."""
    run = play(tuned({"gain": 0.0, "every": 2}), 20, **ONE_SLOW)
    assert len(run.reasons) >= 2
    again, middle = Coordinator(run.policies), len(run.entries) // 2
    resumed: Coordinator | None = None
    for number, entry in enumerate(run.entries):
        assert again.handle(entry.events, entry.at_s) == entry
        if resumed is not None:
            assert resumed.handle(entry.events, entry.at_s) == entry
        if number == middle:
            resumed = Coordinator(run.policies)
            resumed.restore(pickle.loads(pickle.dumps(again.state())))


@pytest.mark.parametrize(
    ("sections", "tried"),
    [
        ({}, ["bsp", "a-bsp", "fsp", "overlap", "overlap"]),
        ({"aggregation": {"kind": "fedavg"}}, ["bsp", "overlap"]),
        (SEALED, ["bsp", "a-bsp", "overlap", "overlap"]),
        (MASKED, ["bsp", "a-bsp"]),
        (
            {"barrier": {"kind": "overlap", "inner": {"kind": "bsp"}}},
            ["overlap", "bsp", "a-bsp", "fsp", *2 * ["overlap"]],
        ),
    ],
)
def test_of_what_nobody_names_it_tries_what_the_strategy_allows(sections: dict[str, Any], tried: list[str]) -> None:
    config = strategy(**{"local": {"steps": 4, "batch_size": BATCH}, "auto": {"overlap": 0.25}, **sections})
    assert [each.kind for each in config.policies(4).tuner.barriers] == tried  # type: ignore[union-attr]


def overlapped(run: Played) -> list[bool]:
    """Of each choice that was made, whether orders are queued."""
    return ["overlap around" in reason.partition(" instead of ")[0] for reason in run.reasons]


def test_overlap_is_chosen_where_it_brings_more_than_the_age_of_updates_costs() -> None:
    """Training 0.64 s, overhead 1 s: twice the commits, of which each brings 2^-1/2. Momentum bears no old updates."""
    assert any(overlapped(play(tuned(QUEUED), **ALIKE)))
    assert not any(overlapped(play(tuned({"barriers": [{"kind": "bsp"}]}), **ALIKE)))
    momentum = {"kind": "fedavgm", "momentum": 0.6}
    assert not any(overlapped(play(tuned(QUEUED, server_optimizer=momentum), **ALIKE)))
    cheap = {name: replace(curve, overhead_s=0.05) for name, curve in ALIKE.items()}
    assert not any(overlapped(play(tuned({**QUEUED, "least_steps": 4}), **cheap)))


def test_two_overlapped_rounds_are_rehearsed_to_take_one_way() -> None:
    """Training 0.64 s, overhead 1 s: commits come in pairs, 0.64 s and 1 s apart in turn."""
    run = play(tuned({**QUEUED, "least_steps": 4, "most_steps": 4}), 3, **ALIKE)
    assert overlapped(run) == [True]
    assert run._coordinator.state()["tuning.state"].expected_s == pytest.approx(0.82)


class Turning(Played):
    """Updates agree for 20 commits, then they cancel."""

    def decided(self, entry: JournalEntry) -> None:
        super().decided(entry)
        self.norms = (0.81, 1.0) if self.left > 20 else (0.04, 1.0)


def test_what_is_queued_counts_when_orders_are_queued_no_more() -> None:
    """24 steps take 3.84 s, so overlap hides a fifth of a round: worth it only as long as old updates still agree.

    Every order ends by name, none is given twice, and each silo has one at a time once those that were queued are in.
    """
    run = Turning(tuned({**QUEUED, "least_steps": 24, "most_steps": 24}), 40, {}, **ALIKE)
    run.run()
    assert overlapped(run) == [True, False], run.reasons
    given = [action.order.update_id for action in run.actions(Dispatch)]
    ended = [update_id for action in run.actions(Commit) for update_id in action.weights]
    discarded = [action.update_id for action in run.actions(Discard)]
    assert len(given) == len(set(given))
    assert discarded == []
    state = run._coordinator.state()["silos.views"]
    outstanding = [order.update_id for silo in state.values() for order in silo.orders]
    assert sorted(given) == sorted([*ended, *run._coordinator.state()["pending"], *outstanding])
    queues, held = False, dict.fromkeys(ALIKE, 0)
    for entry in run.entries:
        for event in entry.events:
            if isinstance(event, UpdateArrived):
                held[event.meta.silo] -= 1
        for action in entry.actions:
            if isinstance(action, Note) and action.text.startswith("auto: "):
                queues = "overlap around" in action.text.partition(" instead of ")[0]
            elif isinstance(action, Dispatch):
                held[action.silo] += 1
                assert held[action.silo] <= 1 + queues
    again = Coordinator(run.policies)
    assert all(again.handle(entry.events, entry.at_s) == entry for entry in run.entries)


def test_what_a_queued_order_costs_besides_is_what_the_one_before_it_cost() -> None:
    """Two orders of 2 s, given at 0, of which each costs 1 s besides: they are in at 3 and 5."""
    report = WorkReport(0, 4, 4 * BATCH, 2.0, 0.5)
    first = OrderSeen("a", 0.0, 3.0, WorkOrder("a/1", 0, 1, BATCH, 4, 0.1, 1), report)
    second = OrderSeen("a", 3.0, 5.0, WorkOrder("a/2", 0, 2, BATCH, 4, 0.1, 1, behind="a/1"), report)
    laps = (Lap.of(first),)
    laps += (Lap.of(second, laps),)
    assert [lap.overhead_s for lap in laps] == [1.0, 1.0]
    assert [lap.steps_s for lap in laps] == [(0.5,), (0.5,)]
    # It was given while the one before was at work: so long it may have trained, and no longer.
    boast = replace(second, report=replace(report, compute_s=50.0))
    assert Lap.of(boast, laps[:1]).steps_s == (5.0 / 4,)


def test_wrappers_stay_around_whatever_is_tried() -> None:
    run = play(tuned({"gain": 0.0}, barrier={"kind": "capped", "cap_s": 60.0, "inner": {"kind": "bsp"}}), **ONE_SLOW)
    assert run.policies.tuner is not None
    assert [barrier.kind for barrier in run.policies.tuner.barriers] == ["capped"] * 3  # type: ignore[attr-defined]
    assert run.reasons


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"balancer": {"kind": "proportional", "scale": "steps"}}, "choose fixed, proportional or equalise"),
        ({"aggregation": {"kind": "fedavg"}, "auto": {"barriers": [{"kind": "a-bsp"}]}}, "unequal numbers of steps"),
        ({"auto": {"least_steps": 9, "most_steps": 3}}, "above most_steps"),
        (
            {**SEALED, "auto": {"barriers": [{"kind": "fsp", "interval": EVERY_SECOND}]}},
            "auto may choose fixed with fsp",
        ),
        ({**MASKED, "auto": {**QUEUED}}, "auto may choose fixed with bsp: cipher.kind 'masked' opens"),
    ],
)
def test_what_it_cannot_try_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        strategy(**{"local": {"steps": 4, "batch_size": BATCH}, "auto": {}, "balancer": {"kind": "fixed"}, **sections})


def test_a_timed_round_takes_what_its_steps_take_a_machine_of_mean_speed() -> None:
    """An order costs 1 s besides, and in a second silos process (3 x 200 + 20) / 4 samples in the mean."""
    auto = {"balancers": [{"kind": "fixed"}], "barriers": [{"kind": "fsp", "interval": EVERY_SECOND}]}
    choice = play(tuned(auto), 8, **ONE_SLOW)._coordinator.state()["tuning.state"].choice
    assert choice.barrier == 1
    assert choice.pace_s == pytest.approx(1.0 + choice.steps * BATCH / 155.0, rel=0.05)


def test_a_balanced_batch_is_not_below_the_least_share() -> None:
    tuner = tuned({"least_share": 0.25}).policies(4).tuner
    assert isinstance(tuner, AutoTuner)
    assert tuner.sized(AutoChoice(4, balancer=1)).floor == BATCH / 4


@pytest.mark.parametrize(("samples", "stays"), [(100, True), (0, False)])
def test_a_way_that_leaves_a_silo_nothing_is_left_however_good_it_seems(samples: int, stays: bool) -> None:
    """Balanced batches are rehearsed at half the seconds of equal ones; since the last look d had so many samples."""
    run = play(tuned({"barriers": [{"kind": "bsp"}]}), 8, **ONE_SLOW)
    tuner, known = run.policies.tuner, run._coordinator.state()
    assert isinstance(tuner, AutoTuner)
    state = replace(known["tuning.state"], commits=2, samples={**dict.fromkeys("abc", 500), "d": samples})
    assert state.choice.way == (1, 0)
    seen = CommitSeen(state.since_s + 4.0, 7, known["silos.views"], {}, (), 0.5)
    after, reason = tuner.advance(state, seen)
    assert (after.choice.way == (1, 0)) == stays, reason
    assert after.starving == (frozenset() if stays else {(1, 0)})


def test_what_takes_longer_than_rehearsed_counts_as_longer() -> None:
    """Three commits in 9 s where 1 s each was rehearsed: 3 times as long, less what is chance."""
    run = play(tuned(), 4, **ALIKE)
    assert isinstance(run.policies.tuner, AutoTuner)
    seen = CommitSeen(9.0, 7, run._coordinator.state()["silos.views"], {}, (), 0.5)
    state = replace(run.policies.tuner.init(), expected_s=1.0, commits=2)
    after, _ = run.policies.tuner.advance(state, seen)
    assert after.delays[0, 0] == pytest.approx(3.0 / CHANCE)
