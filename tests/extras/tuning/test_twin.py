"""The twin: machines fitted to journals of machines that are known, and how well it foretells what they do."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsync.common.codec import dumps
from fedsync.common.errors import FedSyncError
from fedsync.config.cluster import AffineCurveConfig, ClusterConfig, CrashesConfig, LinearCurveConfig, MarkovConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.events import SERVER_RESTARTED, Event, UpdateArrived
from fedsync.core.journal import read_journal
from fedsync.core.orders import Window
from fedsync.extras.tuning.fit import SiloFit, fit_silos
from fedsync.extras.tuning.records import read_record, seconds_a_round
from fedsync.extras.tuning.twin import Interval, MapPlace, Twin, write_trace
from fedsync.observe.replay import read_ledger
from fedsync.simulation.machine import Machine
from fedsync.simulation.timing_only import run_timing
from tests.simulation.fake import machines


def played(
    out: Path, *silos: dict[str, Any], strategy: str = "lb-bsp", stop: str = "rounds: 40", seed: int = 7
) -> Path:
    """A run of a shipped strategy on machines that are known, without training."""
    config = StrategyConfig.load(strategy, [f"stop={{{stop}}}", f"seed={seed}"])
    run_timing(config, ClusterConfig(silos=machines(*silos)), out)
    return out


def fitted(out: Path, *silos: dict[str, Any], **run: Any) -> list[SiloFit]:
    return list(fit_silos(read_record(played(out, *silos, **run))))


def test_exact_machines_are_found_exactly(tmp_path: Path) -> None:
    a, b = fitted(tmp_path, {"speed": 100.0}, {"speed": 317.0, "overhead_s": 1.5, "examples": 77, "memory_samples": 60})
    assert (a.config.speed, b.config.speed) == (pytest.approx(100.0), pytest.approx(317.0))
    assert isinstance(a.config.curve, LinearCurveConfig)
    assert (a.config.jitter, a.config.overhead_s, a.load) == (0.0, 0.0, "-")
    assert (b.config.overhead_s, b.config.examples, b.config.memory_samples) == (pytest.approx(1.5), 77, 60)
    assert b.overheads == {"order": pytest.approx(1.5)}


def test_a_run_has_a_place_on_the_map(tmp_path: Path) -> None:
    silos = fitted(tmp_path, {"speed": 100.0, "overhead_s": 0.1}, {"speed": 300.0, "overhead_s": 0.1})
    # Batches of 40 take 0.4 s and 0.133 s. Balance gives 20 and 60 of 80 samples, which take 0.2 s each.
    place = MapPlace.of(tuple(silos), 40, 2)
    assert (place.spread, place.overhead) == (pytest.approx(3.0), pytest.approx(0.25))
    assert place.bound == pytest.approx((2 * 0.2 + 0.1) / (2 * 0.4 + 0.1))
    assert "speeds 1 to 3, overhead 0.25 of the slowest silo's step" in str(place)
    assert "perfect balance takes 0.56 of one with" in str(place)


def test_an_affine_curve_is_found_within_a_hundredth(tmp_path: Path) -> None:
    affine = {"speed": 1000.0, "curve": {"kind": "affine", "launch_s": 0.2}}
    curve = fitted(tmp_path, {"speed": 100.0}, affine)[1].config
    assert isinstance(curve.curve, AffineCurveConfig)
    assert curve.curve.launch_s == pytest.approx(0.2, rel=0.01)
    assert curve.speed == pytest.approx(1000.0, rel=0.01)


def test_jitter_is_found_within_a_quarter_and_speed_within_three_errors(tmp_path: Path) -> None:
    """40 orders: the relative error of a standard deviation is 1 / sqrt(80) = 0.11."""
    fits = fitted(tmp_path, {"speed": 100.0, "jitter": 0.3}, {"speed": 200.0, "jitter": 0.1})
    for fit, speed, jitter in zip(fits, (100.0, 200.0), (0.3, 0.1), strict=True):
        assert fit.config.jitter == pytest.approx(jitter, rel=0.25)
        assert fit.config.speed == pytest.approx(speed, rel=3 * jitter / 800**0.5)
        assert fit.speed_error == pytest.approx(jitter / 800**0.5, rel=0.3)


def test_a_line_is_found_by_the_transfers_that_silos_report(tmp_path: Path) -> None:
    """A megabyte each way at 8 Mbit/s takes 2 s, which is no overhead of the order."""
    fit = fitted(tmp_path, {"speed": 100.0, "bandwidth_mbps": 8.0, "overhead_s": 0.25})[0]
    assert fit.config.bandwidth_mbps == pytest.approx(8.0)
    assert fit.config.overhead_s == pytest.approx(0.25)
    assert fit.overheads == {"order": pytest.approx(0.25), "transfer": pytest.approx(2.0)}


def test_load_of_two_states_is_found(tmp_path: Path) -> None:
    """Over 200 rounds of FedAvg: the factor within a tenth, how long it stays within a half."""
    load = {"kind": "markov", "factor": 0.4, "on_s": 30.0, "off_s": 60.0}
    silo = {"speed": 200.0, "jitter": 0.05, "contention": load}
    (fit,) = fitted(tmp_path, silo, strategy="fedavg", stop="rounds: 200")
    assert isinstance(fit.config.contention, MarkovConfig)
    assert fit.config.contention.factor == pytest.approx(0.4, rel=0.1)
    assert fit.config.contention.on_s == pytest.approx(30.0, rel=0.5)
    assert fit.config.contention.off_s == pytest.approx(60.0, rel=0.5)
    assert fit.config.speed == pytest.approx(200.0, rel=0.05)
    assert fit.pieces == ()


def ramp(folder: Path) -> dict[str, Any]:
    """A silo whose load grows slowly, again and again."""
    write_trace(folder / "ramp.csv", ((10.0 * i, 1 - 0.008 * (i % 100)) for i in range(200)))
    return {"speed": 100.0, "trace": str(folder / "ramp.csv")}


def test_other_load_becomes_a_trace_that_slows_the_twin_alike(tmp_path: Path) -> None:
    """A slow ramp has no two levels. The file plays back within 3 % of the run."""
    run = played(tmp_path / "run", ramp(tmp_path), strategy="fedavg", stop="rounds: 60")
    twin = Twin.of(read_record(run))
    (fit,) = twin.fits
    assert fit.config.contention is None
    assert len(fit.pieces) > 50
    files = twin.write(tmp_path / "twin.yaml")
    assert [path.name for path in files] == ["twin.yaml", "twin-a.csv"]
    run_timing(StrategyConfig.load("fedavg", ["stop={rounds: 60}"]), ClusterConfig.load(files[0]), tmp_path / "again")
    again = seconds_a_round(read_ledger(tmp_path / "again" / "journal.jsonl").rounds)
    assert again == pytest.approx(twin.actual_s, rel=0.03)


def test_crashes_are_found_as_they_were(tmp_path: Path) -> None:
    """Its ups and downs are counted, and the means are theirs."""
    crashes = {"mtbf_s": 60.0, "repair_s": 8.0}
    run = played(tmp_path, {"speed": 100.0}, {"speed": 200.0, "crashes": crashes}, stop="rounds: 150")
    fit = fit_silos(read_record(run))[1]
    events = [event for entry in read_journal(run / "journal.jsonl")[1] for event in entry.events]
    lost = [event for event in events if type(event).__name__ == "SiloLost"]
    back = [event.at_s for event in events if type(event).__name__ == "SiloJoined" and event.silo == "b"][1:]
    assert fit.crashes == len(lost) >= 3
    restarted = (run / "journal.jsonl").read_text().replace(json.dumps(lost[0].reason), json.dumps(SERVER_RESTARTED))
    (run / "journal.jsonl").write_text(restarted)
    assert [each.crashes for each in fit_silos(read_record(run))] == [0, 0], "only the server had ended"
    assert isinstance(fit.config.crashes, CrashesConfig)
    downs = [up - event.at_s for event, up in zip(lost, back, strict=False)]
    assert fit.config.crashes.repair_s == pytest.approx(sum(downs) / len(downs))
    assert 20.0 < fit.config.crashes.mtbf_s < 180.0


def test_a_silo_has_its_files_and_settings_also_in_the_file_of_its_twin(tmp_path: Path) -> None:
    own = {"data": {"train": str(tmp_path / "a.csv")}, "node_config": {"ward": 3, "rate": 0.123456}}
    twin = Twin.of(read_record(played(tmp_path / "run", {"speed": 100.0, **own}, {"speed": 200.0})))
    twin.write(tmp_path / "twin.yaml")
    for silos in (twin.cluster(tmp_path).silos, ClusterConfig.load(tmp_path / "twin.yaml").silos):
        assert [(each.data, each.node_config) for each in silos] == [(own["data"], own["node_config"]), ({}, {})]


def test_a_silo_that_is_away_at_the_end_was_there_only_while_it_was(tmp_path: Path) -> None:
    """It is there from 0 to 40 s and from 50 to 90 s, and has not come back at the end."""
    faults = [{"at_s": 40.0, "down_s": 10.0}, {"at_s": 90.0, "down_s": 500.0}]
    fit = fitted(tmp_path, {"speed": 100.0}, {"speed": 200.0, "faults": faults}, stop="seconds: 150")[1]
    assert fit.config.crashes is not None and fit.crashes == 2
    assert fit.config.crashes.mtbf_s == pytest.approx(40.0, abs=0.5)
    assert fit.config.crashes.repair_s == pytest.approx(10.0, abs=0.5)


def test_windows_tell_load_from_jitter_within_an_order(tmp_path: Path) -> None:
    """Each order's second half is at half speed: windows show it, the orders' means are all alike."""
    out = played(tmp_path, {"speed": 100.0}, strategy="fedavg")

    def halves(event: Event) -> Event:
        if not isinstance(event, UpdateArrived):
            return event
        return replace(event, report=replace(event.report, windows=(Window(150.0), Window(75.0))))

    path = out / "journal.jsonl"
    entries = [replace(entry, events=tuple(map(halves, entry.events))) for entry in read_journal(path)[1]]
    path.write_text("\n".join([path.read_text().partition("\n")[0], *map(dumps, entries)]) + "\n")
    stretches = read_record(out).silos["a"].stretches
    assert len(stretches) == 80
    assert stretches[1].step_s == pytest.approx(2 * stretches[0].step_s)
    assert 10 * (stretches[0].step_s + stretches[1].step_s) == pytest.approx(6.4)


# What it foretells.

KINDS: dict[str, list[dict[str, Any]]] = {
    "jitter": [{"speed": 100.0, "jitter": 0.3}, {"speed": 200.0, "jitter": 0.1}, {"speed": 300.0, "overhead_s": 1.5}],
    "affine": [
        {"speed": 100.0, "jitter": 0.05},
        {"speed": 1000.0, "curve": {"kind": "affine", "launch_s": 0.2}, "overhead_s": 0.5},
        {"speed": 300.0, "bandwidth_mbps": 8.0},
    ],
    "contention": [
        {"speed": 100.0 * i, "jitter": 0.1, "contention": {"kind": "markov", "factor": 0.4, "on_s": 20, "off_s": 30}}
        for i in (1, 2, 3)
    ],
    "daytime": [{"speed": 100.0 * i, "jitter": 0.1} for i in (1, 2, 3)],
    "crashes": [
        {"speed": 100.0},
        {"speed": 200.0, "crashes": {"mtbf_s": 60.0, "repair_s": 8.0}},
        {"speed": 150.0, "jitter": 0.2},
    ],
}


def day(path: Path, phase: float) -> str:
    """Trace of a load that follows a sine with a period of 60 s, in 64 steps a period, for 200 periods."""
    times = [60 * step / 64 for step in range(200 * 64)]
    factors = [1 - (1 + math.sin(2 * math.pi * (at_s / 60 + phase))) / 4 for at_s in times]
    write_trace(path, zip(times, factors, strict=True))
    return str(path)


UNSEEN = ("fedavg", "a-bsp", "fsp", "lb-a-bsp")


@pytest.mark.full
def test_intervals_cover_four_of_five_strategies_that_the_twin_has_not_seen(tmp_path: Path) -> None:
    """20 cases: five federations, fitted to a run of LB-BSP, and four other strategies played with another seed."""
    covered = []
    for kind, silos in KINDS.items():
        if kind == "daytime":
            silos = [{**silo, "trace": day(tmp_path / f"{i}.csv", i / 3)} for i, silo in enumerate(silos, 1)]
        twin, _ = Twin.of(read_record(played(tmp_path / kind, *silos, stop="rounds: 15"))).checked()
        for name in UNSEEN:
            stop = f"seconds: {twin.horizon_s}, rounds: 9999"
            run = played(tmp_path / f"{kind}-{name}", *silos, strategy=name, stop=stop, seed=99)
            happened = seconds_a_round(read_ledger(run / "journal.jsonl").rounds)
            assert happened is not None
            found = twin.predict(StrategyConfig.load(name)).round_s
            covered.append(found.low <= happened <= found.high)
    assert len(covered) == 20
    assert sum(covered) >= 16


def test_an_interval_is_students_for_one_more_value() -> None:
    """Of ten values exp(-0.1) and exp(0.1) by turns: 1.833 x 0.1 sqrt(10 / 9) sqrt(1.1) each way."""
    found = Interval.of([0.904837418, 1.105170918] * 5)
    half = 1.833 * 0.1 * (10 / 9) ** 0.5 * 1.1**0.5
    assert (found.low, found.high) == (pytest.approx(2.718281828**-half), pytest.approx(2.718281828**half))
    assert found.misses(1.0) == 0
    assert found.misses(2.718281828 ** (2 * half)) == pytest.approx(half)


@pytest.mark.slow
def test_intervals_are_wider_by_what_the_replay_missed(tmp_path: Path) -> None:
    twin = Twin.of(read_record(played(tmp_path, {"speed": 100.0}, {"speed": 200.0})))
    checked, replayed = replace(twin, actual_s=2 * (twin.actual_s or 0.0)).checked()
    assert checked.wider == pytest.approx(replayed.round_s.misses(2 * (twin.actual_s or 0.0))) and checked.wider > 0.5
    wide, narrow = checked.predict(twin.config).round_s, twin.predict(twin.config).round_s
    assert wide.high / narrow.high == pytest.approx(narrow.low / wide.low) == pytest.approx(2.718281828**checked.wider)


def test_overhead_of_real_silos_is_known_of_the_strategy_that_ran_alone(tmp_path: Path) -> None:
    """They share a server: another strategy may have a third or three times of 2 s, all silos alike.

    Training takes 6.4 s an order.
    """
    record = read_record(played(tmp_path, {"speed": 100.0, "overhead_s": 2.0}, strategy="fedavg"))
    virtual, real = Twin.of(record), Twin.of(replace(record, runtime="local"))
    fedavg = StrategyConfig.load("fedavg")
    narrow, wide = virtual.predict(fedavg).round_s, real.predict(fedavg).round_s
    assert narrow.high / narrow.low < 1.05
    assert wide.low < (6.4 + 1.2) / (6.4 + 2.0) * narrow.mean and wide.high > (6.4 + 3.6) / (6.4 + 2.0) * narrow.mean
    assert real.checked()[1].round_s == virtual.checked()[1].round_s
    overheads = [[silo.overhead_s for silo in real.cluster(tmp_path, draw).silos] for draw in range(3)]
    assert len({each[0] for each in overheads}) == 3


def test_traces_begin_elsewhere_in_each_draw_and_together(tmp_path: Path) -> None:
    """What slows two silos at once does so in every draw."""
    silo = ramp(tmp_path)
    twin = Twin.of(read_record(played(tmp_path / "run", silo, silo, strategy="fedavg", stop="rounds: 60")))
    speeds = []
    for draw in range(3):
        (tmp_path / str(draw)).mkdir()
        silos = twin.cluster(tmp_path / str(draw), draw).silos
        first, second = (Path(str(silo.trace)).read_text() for silo in silos)
        assert first == second
        speeds.append(first)
        Machine(silos[0], 0)
    assert len(set(speeds)) == 3


# What is no journal.


def test_what_is_no_journal_gives_one_line(tmp_path: Path) -> None:
    path = played(tmp_path, {"speed": 100.0}, strategy="fedavg", stop="rounds: 3") / "journal.jsonl"
    text = path.read_text()
    header, *entries = text.splitlines()
    strangers = [entry for entry in entries if "SiloJoined" not in entry]
    bare = json.dumps({name: value for name, value in json.loads(header).items() if name != "config"})
    for what, broken in {
        "torn": text[: len(text) // 2],
        "without a header": "\n".join(entries),
        "backwards": "\n".join([header, *reversed(entries)]),
        "the last entry comes after centuries": re.sub(r'\{"at_s":[\d.]+(?=[^\n]*\n$)', '{"at_s":1e12', text),
        "an order to a silo that never joined": "\n".join([header, *strangers]),
        "without a configuration": "\n".join([bare, *entries]),
        "times below zero": re.sub(r'"compute_s":(?=6\.[34])', '"compute_s":-', text),
        "empty": "",
        "in capitals": text.upper(),
    }.items():
        path.write_text(broken)
        with pytest.raises(FedSyncError, match=r"journal\.jsonl") as caught:
            fit_silos(read_record(tmp_path))
            pytest.fail(what)
        assert len(str(caught.value)) < 500 and "\n" not in str(caught.value), what


@pytest.mark.slow
def test_the_block_of_the_page_runs_and_a_broken_journal_is_one_line(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tune.md").read_text()
    commands = [line.split()[2:] for line in page.splitlines() if re.match(r"\$ fedsync .*runs/mine", line)]
    assert [command[0] for command in commands] == ["run", "tune"]

    def fedsync(command: list[str]) -> "subprocess.CompletedProcess[str]":
        whole = [sys.executable, "-m", "fedsync", *command]
        return subprocess.run(whole, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    ran, tuned = (fedsync(command) for command in commands)
    assert (ran.returncode, tuned.returncode, tuned.stderr) == (0, 0, "")
    assert "lb-bsp, seconds a round" in tuned.stdout
    was, found = ClusterConfig.load("hetero").silos, ClusterConfig.load(tmp_path / "twin.yaml").silos
    assert [silo.speed for silo in found] == pytest.approx([silo.speed for silo in was], rel=0.05)
    best = StrategyConfig.load(tmp_path / "best.yaml")
    _, _, table = tuned.stdout.partition("Candidates, the best first")
    ranked = [line.replace("│", " ").split() for line in table.splitlines() if re.search(r"\d", line)]
    ranked = [words for words in ranked if words[0] in ("fedavg", "lb-bsp", "fsp")]
    assert best.name == f"{ranked[0][0]}-tuned"
    assert "ranked by samples a second" in (tmp_path / "best.yaml").read_text()
    rates = [float(words[-1]) for words in ranked]
    assert len(rates) == 3
    spread = re.search(r"On the map \(docs/benchmarks/map\.md\): speeds 1 to ([\d.]+)", tuned.stdout)
    assert spread is not None
    assert float(spread[1]) == pytest.approx(max(s.speed for s in was) / min(s.speed for s in was), rel=0.1)
    assert rates == sorted(rates, reverse=True)
    (tmp_path / "runs" / "mine" / "journal.jsonl").write_text("{}\n")
    failed = fedsync(commands[1])
    assert failed.returncode == 1
    assert failed.stderr.startswith("failed: ")
    assert failed.stderr.count("\n") == 1
