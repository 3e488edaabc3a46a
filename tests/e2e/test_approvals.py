"""Real processes, and an owner who is asked: a run goes on without a silo until its owner says yes, then with it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedsync import replay
from fedsync.common.processes import end_processes, free_ports
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.ops.runs import stop_run, submit_run
from fedsync.server.run_folder import Phase, phase
from fedsync.silo.owner.approvals import APPROVALS, Approvals
from fedsync.silo.owner.refusals import last_refusals
from fedsync.silo.protocol import ANSWERS, STATE_FOLDER, Refusal
from tests.e2e.deployed import fedsync, wait_for

ENDLESS = ["task={kind: digits}", "local={steps: 1, batch_size: 8, threads: 1}", "min_silos=1", "stop.rounds=100000"]


def owner(*arguments: str, cwd: Path) -> str:
    """What ``fedsync silo`` prints at a silo."""
    command = [sys.executable, "-m", "fedsync", "silo", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_a_run_goes_on_without_a_silo_until_its_owner_confirms_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("w")
    (port,) = free_ports(1)
    (folder / "server.yaml").write_text(f"{{host: 127.0.0.1, port: {port}, insecure: true, state: server}}")
    for name, asks in (("berlin", ", approve: ask"), ("paris", "")):
        said = f"{{name: {name}, server: 'localhost:{port}', insecure: true, state: {name}{asks}}}"
        (folder / f"{name}.yaml").write_text(said)
    started = [fedsync("server", "start", "--server", "server.yaml", cwd=folder)]
    started += [fedsync("silo", "start", "--silo", f"{name}.yaml", cwd=folder) for name in ("berlin", "paris")]
    try:
        wait_for(lambda: (folder / "server" / "superlink.db").exists(), "the server did not come up")
        config = ServerStartConfig.load(folder / "server.yaml")
        out = submit_run(config, StrategyConfig.load("asp", ENDLESS), folder / "out")

        def updates_of(silo: str) -> int:
            if not (out / "journal.jsonl").exists():
                return 0
            commits = (action for entry in replay(out / "journal.jsonl") for action in entry.actions)
            used = (update for action in commits if isinstance(action, Commit) for update in action.weights)
            return sum(update.startswith(f"{silo}/") for update in used)

        approvals = Approvals(folder / "berlin" / APPROVALS)
        wait_for(lambda: updates_of("paris") > 2 and bool(approvals.waiting()), "nothing waits, or nothing is trained")
        assert updates_of("berlin") == 0
        assert not list((folder / "berlin" / STATE_FOLDER).glob(f"*/{ANSWERS[0]}")), "no trainer has worked"
        listed = owner("approve", "--silo", "berlin.yaml", cwd=folder)
        (asked,) = approvals.waiting()
        assert asked.digest in listed and "digits" in listed
        said = owner("approve", "--silo", "berlin.yaml", asked.digest, cwd=folder)
        assert said.endswith(f"approved {asked.digest}\n")
        wait_for(lambda: updates_of("berlin") > 2, "a silo whose owner said yes takes no part")
        checked = owner("audit", "--silo", "berlin.yaml", cwd=folder)
        assert "each as it was written" in checked
        stop_run(out)
        wait_for(lambda: phase(out) is Phase.OVER, "the run did not end")
        # The next run is another question.
        again = submit_run(config, StrategyConfig.load("asp", ENDLESS), folder / "again")
        wait_for(lambda: bool(approvals.waiting()), "the next run does not wait")
        (asked,) = approvals.waiting()
        owner("approve", "--silo", "berlin.yaml", "--refuse", asked.digest, cwd=folder)
        notes = folder / "berlin" / STATE_FOLDER
        wait_for(lambda: Refusal.OWNER in {note.code for note in last_refusals(notes)}, "its owner's no is not heard")
        stop_run(again)
        wait_for(lambda: phase(again) is Phase.OVER, "the run did not end")
        for process in started:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
    finally:
        end_processes(started)
    assert '"berlin/' not in (folder / "again" / "journal.jsonl").read_text(), "an order after a no"
