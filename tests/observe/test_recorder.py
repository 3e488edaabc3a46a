"""The files of a run, as they grow."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsync.config.strategy import StrategyConfig
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Evaluated
from fedsync.core.journal import read_journal
from fedsync.core.stopping import StopRules
from fedsync.observe.ledger import Ledger
from fedsync.observe.recorder import Recorder
from fedsync.observe.replay import read_ledger
from fedsync.observe.run_builder import RunBuilder
from tests.core.make import answer, begin, joined, orders, policies, scored


class Counting:
    def __init__(self) -> None:
        self.rounds: list[int] = []

    def follow(self, ledger: Ledger) -> None:
        self.rounds.append(len(ledger.rounds))


def recorder(out: Path, **changes: Any) -> Recorder:
    plain = {"runtime": "virtual", "config": {"name": "x", "seed": 3}, "silos": [{"name": "a"}], "model_bytes": 100}
    return Recorder(out, **{**plain, **changes})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(out: Path, listener: Counting) -> Recorder:
    """Two rounds of one silo, then the evaluation; not finished."""
    files = recorder(out, listeners=[listener], target_accuracy=0.4)
    files.record(Coordinator(policies()).handle(joined("a"), 0.0))
    coordinator, work = begin("a", stop=StopRules(rounds=2))
    for number, accuracy in [(1, 0.1), (2, 0.5)]:
        said = [answer("a", work["a"], float(number), evaluation=scored(accuracy), metrics={"energy_j": 2.0})]
        entry = coordinator.handle(said, float(number))
        work = orders(entry)
        files.record(entry)
    files.record(coordinator.handle([Evaluated(3.0, "a", 2, scored(0.75))], 3.0))
    return files


def test_files_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    listener = Counting()
    files = run(tmp_path / "deep" / "out", listener)
    out = tmp_path / "deep" / "out"
    assert listener.rounds == [0, 1, 2, 2], "told after every entry"
    assert len(list(read_journal(out / "journal.jsonl")[1])) == 4
    rows = lines(out / "rounds.jsonl")
    assert [(row["round"], row["accuracy"], row["slowest"]) for row in rows] == [(1, 0.5, "a"), (2, 0.75, "a")]
    assert rows[0]["batch_sizes"] == {"a": 8}
    assert rows[0]["silos"]["a"] == {
        "batch_size": 8, "steps": 4, "samples": 32, "compute_s": 0.32, "overhead_s": 1 - 0.32, "wait_s": 0.0,
        "metrics": {"energy_j": 2.0},
    }  # fmt: skip
    assert rows[0]["metrics"] == {"energy_j": 2.0}
    assert not (out / "summary.json").exists(), "there is no summary before the end"
    files.finish()


def test_the_summary_says_which_run_it_was(tmp_path: Path) -> None:
    summary = run(tmp_path, Counting()).finish()
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert (summary["strategy"], summary["runtime"], summary["seed"]) == ("x", "virtual", 3)
    assert (summary["rounds"], summary["accuracy"], summary["seconds_to_target"]) == (2, 0.75, 1.0)
    assert summary["metrics"] == summary["silos"][0]["metrics"] == {"energy_j": 4.0}


def test_the_header_rebuilds_the_books(tmp_path: Path) -> None:
    files = run(tmp_path, Counting())
    files.finish()
    ledger = read_ledger(tmp_path / "journal.jsonl")
    assert ledger.summary() == files.ledger.summary()
    assert ledger.target_accuracy == 0.4


def test_the_configuration_lies_beside_the_journal(tmp_path: Path) -> None:
    """Both files are of the form that `fedsync run` reads."""
    recorder(tmp_path).close()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"name": "x", "seed": 3}
    assert yaml.safe_load((tmp_path / "silos.yaml").read_text()) == {"silos": [{"name": "a"}]}


def test_a_second_run_in_the_same_folder_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    run(tmp_path, Counting()).finish()
    files = recorder(tmp_path, silos=None)
    assert not (tmp_path / "summary.json").exists()
    assert not (tmp_path / "silos.yaml").exists()
    assert lines(tmp_path / "rounds.jsonl") == []
    assert len(lines(tmp_path / "journal.jsonl")) == 1
    files.close()


@pytest.mark.parametrize(
    ("sets", "asked", "found"), [([], None, 0.4), (["stop.target_accuracy=0.9"], None, 0.4), ([], 0.6, 0.6)]
)
def test_a_resumed_run_keeps_its_target_unless_it_is_given_another(
    tmp_path: Path, sets: list[str], asked: float | None, found: float
) -> None:
    config = StrategyConfig.load("fedavg", sets)
    RunBuilder(config, None, tmp_path, "local", 0.4).recorder(100).close()
    resumed = RunBuilder(config, None, tmp_path, "local", asked).recorder(100, resume=True)
    assert resumed.finish()["target_accuracy"] == found


def test_a_process_killed_resuming_leaves_what_others_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is written again on each resumption: its files are whole at any instant."""
    run(tmp_path, Counting())
    names, dump = ("config.yaml", "silos.yaml"), yaml.dump
    before = [(tmp_path / name).read_text() for name in names]
    for writes in range(2):
        left = writes

        def killed(*args: Any, **options: Any) -> str:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return str(dump(*args, **options))

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(yaml, "dump", killed)
            recorder(tmp_path, resume=True)
        assert [(tmp_path / name).read_text() for name in names] == before
