"""The version that is kept as the best is the one that an oracle finds, under every policy.

The oracle stores every version: what silos received. Which is the best, it works out of events, in plain steps. Silos
draw their updates, and find in each model something else. One is lost on the way of an order and comes back.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml

from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Dispatch, Evaluate, KeepBest
from fedsync.core.events import Evaluated, SiloJoined, SiloLost, UpdateArrived, WorkFailed
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import Evaluation, SiloFacts, Split, WorkOrder
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.transfer import Payload
from fedsync.observe.replay import replay
from fedsync.silo.protocol import Completed, EvaluateModel
from tests.laws.kinds import COMBINED, VARIANTS, cases, configuration, name_of
from tests.laws.test_wire import BACK, CHANGES, Silo, through

CASES = [case for case in cases() if case[0] in ("barrier", "aggregation")]
RUNS = [*(configuration(case, {"seconds": 9.0}) for case in CASES), StrategyConfig.load("fsp", CHANGES[BACK])]
NAMES = [*map(name_of, CASES), BACK]
VARIED = [name_of(case) for case in (*VARIANTS, *COMBINED) if case[0] == "barrier"]
FEW_BITS = "{up: bf16, down: int8}"


@dataclass
class Finder(Silo):
    """Finds in each model something else than other silos do, and on its test split something else again."""

    asked: list[tuple[Split, int]] = field(default_factory=list)

    @property
    def facts(self) -> SiloFacts:
        return SiloFacts(1000, None, self.machine.speed, validates=True)

    def train(self, order: WorkOrder, received: Payload) -> Completed:
        done = super().train(order, received)
        evaluation = self.found(order.base_version, Split.VALIDATION)
        return replace(done, report=replace(done.report, evaluation=evaluation))

    def evaluate(self, received: Payload, asked: EvaluateModel) -> Evaluation:
        self.asked.append((asked.split, asked.version))
        self.model(received, asked.version)
        return self.found(asked.version, asked.split)

    def found(self, version: int, split: Split) -> Evaluation:
        """Later versions are better as a rule, but not each than the one before."""
        samples = 10_000 + ord(self.machine.name)
        luck = hashlib.sha256(self.versions[version] + self.machine.name.encode() + split.encode()).digest()
        return Evaluation(1.0, 300.0 * min(version, 20) + int.from_bytes(luck[:4]) % 4000, samples)


@dataclass
class Oracle:
    """Follows a journal, and says which version was the best after each entry."""

    at_work: dict[str, dict[str, int]] = field(default_factory=dict)
    under_way: Counter[int] = field(default_factory=Counter)
    own: dict[int, dict[str, Evaluation]] = field(default_factory=dict)
    newest: dict[str, Evaluation] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    first: set[str] = field(default_factory=set)
    """Silos at an order that have finished none."""
    finished: set[str] = field(default_factory=set)
    settled: int = -1
    best: tuple[int, float] | None = None

    def follow(self, entry: JournalEntry) -> tuple[int, float] | None:
        touched = set()
        for event in entry.events:
            match event:
                case UpdateArrived(_, meta, report):
                    touched.add(self._end(meta.silo, meta.update_id, report.evaluation))
                    self.finished.add(meta.silo)
                case WorkFailed(_, silo, update_id):
                    touched.add(self._end(silo, update_id, None))
                case SiloJoined(_, silo) | SiloLost(_, silo):
                    touched |= {self._end(silo, update_id, None) for update_id in [*self.at_work.get(silo, {})]}
                    if isinstance(event, SiloLost):
                        self.newest.pop(silo, None)
                case Evaluated(_, silo, version, evaluation, _, Split.VALIDATION):
                    self.at_work[silo] = {"asked": version}
                    touched.add(self._end(silo, "asked", evaluation))
        for version in sorted(touched - {-1}):
            self._judge(version)
        for action in entry.actions:
            match action:
                case Dispatch(silo, order):
                    self.at_work.setdefault(silo, {})[order.update_id] = order.base_version
                    self.under_way[order.base_version] += 1
                    self.first |= {silo} - self.finished if order.evaluate else set()
                case Evaluate(version, silos, Split.VALIDATION):
                    self.at_work, self.own = {}, {}
                    self.under_way = Counter({version: len(silos)})
        return self.best

    def _end(self, silo: str, update_id: str, evaluation: Evaluation | None) -> int:
        version = self.at_work.get(silo, {}).pop(update_id, -1)
        if version >= 0:
            self.under_way[version] -= 1
            self.first.discard(silo)
            if evaluation is not None:
                self.own.setdefault(version, {}).setdefault(silo, evaluation)
                self.newest[silo] = evaluation
                self.seen.add(silo)
        return version

    def _judge(self, version: int) -> None:
        own = self.own.get(version, {})
        if self.under_way[version] or not own or version < self.settled:
            return
        self.settled = version
        pool = [*(own if len(own) >= len(self.newest) else self.newest).values()]
        value = sum(each.correct for each in pool) / sum(each.samples for each in pool)
        if 2 * len(pool) > len(self.seen | self.first) and (self.best is None or value > self.best[1]):
            self.best = version, value


@pytest.mark.parametrize(
    ("config", "wire"),
    [
        *(
            # Each kind of barrier once; its variants are slow together.
            pytest.param(config, "{}", id=f"{name}-fp32", marks=[pytest.mark.slow] * (name in VARIED))
            for config, name in zip(RUNS, NAMES, strict=True)
        ),
        *(
            # A barrier sees nothing of how models travel.
            pytest.param(config, FEW_BITS, id=f"{name}-int8", marks=[pytest.mark.full] * (case[0] == "barrier"))
            for config, name, case in zip(RUNS, NAMES, [*CASES, ("", "")], strict=True)
        ),
    ],
)
def test_the_kept_best_is_that_of_an_oracle(
    config: StrategyConfig, wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[int, bytes]] = []
    keep_best = PlainAggregator.keep_best

    def kept_best(self: PlainAggregator, version: int) -> None:
        keep_best(self, version)
        kept.append((version, self.best.tobytes()))

    monkeypatch.setattr(PlainAggregator, "keep_best", kept_best)
    config = config.model_validate({**config.model_dump(mode="json"), "wire": yaml.safe_load(wire)})
    outcome = through(config, Finder, tmp_path)
    versions = outcome.silos["a"].versions
    oracle, said = Oracle(), None
    for entry in outcome.result.entries:
        best = oracle.follow(entry)
        said = next((action for action in entry.actions if isinstance(action, KeepBest)), said)
        assert (None if said is None else (said.score.version, said.value)) == best
    assert len(kept) > 1, "the best has changed"
    assert [model for version, model in kept] == [versions[version] for version, _ in kept]
    last, final = max(versions), kept[-1][0]
    tested = [(Split.TEST, last), *([(Split.TEST, final)] if final != last else [])]
    for silo in outcome.silos.values():
        assert [asked for asked in silo.asked if asked[0] is Split.TEST] == tested, "once, when all is decided"
    assert len(replay(tmp_path / "journal.jsonl")) == len(outcome.result.entries)
