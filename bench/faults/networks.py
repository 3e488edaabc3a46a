"""A real federation over bad networks: does each run reach its last round, and how many bytes are sent again?

Three silos with TLS and node authentication, each in a network namespace of its own, over connections that delay, lose
and throttle packets in both directions (`bench/faults/lossy_lines.py`; TCP is the kernel's own). During one run a silo
gets another address, so its connections die silently. A firewall forgets connections that were silent for 60 s; its
run begins when all silos have been idle for longer. *Again* is the share of TCP's bytes that TCP sent a second time.
*Over clean* is all bytes beyond those of the same run on a good network, so it includes repetitions by FedSync. Needs
root, on Linux.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.common import markdown_table, print_table, write_json
from bench.faults.lossy_lines import Line, Lines
from bench.faults.soak import Run, account
from bench.faults.soak_federation import Federation
from fedsync.config.strategy import StrategyConfig
from fedsync.ops.runs import submit_run

IDLE_S = 60.0
"""After which the firewall forgets a connection [s]."""

CLEAN = "clean"


@dataclass(frozen=True, slots=True)
class Network:
    """One row of the matrix.

    Args:
        line: of each silo.
        moves: the first silo gets another address when a third of the rounds is done.
        rests_s: how long silos are idle before the run [s].
    """

    line: Line = field(default_factory=Line)
    moves: bool = False
    rests_s: float = 0.0


NETWORKS = {
    CLEAN: Network(),
    "5 ms each way": Network(Line(delay_s=0.005)),
    "50 ms each way": Network(Line(delay_s=0.05)),
    "300 ms each way": Network(Line(delay_s=0.3)),
    "1 % loss, 50 ms": Network(Line(delay_s=0.05, loss=0.01)),
    "5 % loss, 50 ms": Network(Line(delay_s=0.05, loss=0.05)),
    "2 Mbit/s": Network(Line(delay_s=0.005, mbps=2)),
    "10 Mbit/s": Network(Line(delay_s=0.005, mbps=10)),
    "100 Mbit/s": Network(Line(delay_s=0.005, mbps=100)),
    "2 Mbit/s, 300 ms, 5 % loss": Network(Line(delay_s=0.3, loss=0.05, mbps=2)),
    "firewall, 60 s": Network(Line(delay_s=0.005, idle_s=IDLE_S), rests_s=IDLE_S + 15),
    "another address": Network(Line(delay_s=0.005), moves=True),
}
COLUMNS = (
    "network",
    "rounds",
    "MB carried",
    "again",
    "over clean",
    "longest silence [s]",
    "longest round [s]",
    "seconds",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run; ``problem`` is empty if it came to its last round with all accounts in order."""

    network: str
    rounds: int
    payload: int
    again: int
    lost: int
    forgotten: int
    silence_s: float
    longest_round_s: float
    seconds: float
    problem: str

    def row(self, clean: int | None) -> Sequence[object]:
        """For the table; ``clean`` is what a run without obstacles carries [bytes]."""
        over = "" if not clean else f"{self.payload / clean - 1:.1%}"
        again = f"{self.again / max(self.payload, 1):.1%}"
        times = [f"{value:.0f}" for value in (self.silence_s, self.longest_round_s, self.seconds)]
        return [self.network, self.problem or self.rounds, f"{self.payload / 1e6:.2f}", again, over, *times]


def one(name: str, number: int, federation: Federation, lines: Lines, options: argparse.Namespace) -> Outcome:
    """A run over lines of one kind, from the first message to the last."""
    network, rounds = NETWORKS[name], options.rounds
    settings = [
        f"task={{kind: mlp, data: {{kind: blobs}}, hidden: [{options.hidden}, {options.hidden}]}}",
        "local.steps=2",
        "local.batch_size=16",
    ]
    settings += ["local.threads=1", f"stop.rounds={rounds}", f"min_silos={len(federation.names)}"]
    config = StrategyConfig.load("fedavg", [*settings, *options.set])
    for silo in federation.names:
        lines.set(silo, network.line)
    time.sleep(network.rests_s)
    counts = [lines.set(silo, network.line) for silo in federation.names]
    begin_s = time.monotonic()
    run = Run(federation, submit_run(federation.config, config, federation.folder / f"run-{number}"), time.time())
    problem = ""
    if network.moves:
        problem = run.wait_for(max(rounds // 3, 1))
        lines.move(federation.names[0])
    problem = problem or run.see_through() or account(run, rounds + (config.policies().tally > 0), lied=False)
    seconds, commits = time.monotonic() - begin_s, run.look()
    counts = [replace(count) for count in counts]
    total = {each: sum(getattr(count, each) for count in counts) for each in ("payload", "again", "lost", "forgotten")}
    silence_s = max(count.silence_s for count in counts)
    return Outcome(name, min(commits, rounds), **total, silence_s=silence_s, longest_round_s=run.longest_s,
                   seconds=seconds, problem=problem)  # fmt: skip


def main() -> None:
    """Print the table, and write it as JSON after each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--silos", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=400, help="width of the model's two layers; 400 are 0.7 MB")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, metavar="NAME", default=list(NETWORKS))
    parser.add_argument("--quick", action="store_true", help="two networks, three rounds")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the strategy")
    parser.add_argument("--out", type=Path, default=Path("bench/results/networks.json"))
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.networks = 3, [CLEAN, "5 % loss, 50 ms"]
    if os.geteuid():
        print("nothing is measured: network namespaces and TUN devices take root")  # others of `make bench` go on
        return
    outcomes: list[Outcome] = []
    names = [f"silo-{index}" for index in range(options.silos)]
    lines = Lines(names)
    with tempfile.TemporaryDirectory(prefix="nets-") as folder:
        federation = Federation(Path(folder), options.silos, lines=lines, keys=False)
        federation.start()
        try:
            for number, name in enumerate(options.networks):
                outcomes.append(one(name, number, federation, lines, options))
                write_json(options.out, [asdict(each) for each in outcomes])
                print(*outcomes[-1].row(_clean(outcomes)), sep=" | ", flush=True)
        finally:
            with suppress(KeyboardInterrupt):
                federation.stop()
            lines.close()
    rows = [outcome.row(_clean(outcomes)) for outcome in outcomes]
    print_table(f"{options.silos} silos, {options.rounds} rounds", COLUMNS, rows)
    print(markdown_table(COLUMNS, rows))
    if any(outcome.problem for outcome in outcomes):
        raise SystemExit(1)


def _clean(outcomes: Sequence[Outcome]) -> int | None:
    return next((each.payload for each in outcomes if each.network == CLEAN), None)


if __name__ == "__main__":
    main()
