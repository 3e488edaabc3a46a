"""Real processes, and a task that raises what it read: the silo's owner finds it, the server has not a byte of it."""

import base64
import os
from pathlib import Path

import pytest

from fedsync.config.server_start import ServerStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.ops.runs import submit_run
from fedsync.server.run_folder import Phase, phase, read_error
from fedsync.silo.owner.refusals import last_refusals
from fedsync.silo.protocol import LOG, STATE_FOLDER, Refusal
from tests.e2e.deployed import deployed, wait_for, write_files

MARKER = "Patient-4711-positive"
TASK = """\
from pathlib import Path

from fedsync.tasks.digits import DigitsTask
from fedsync.tasks.partition import Iid


class Leaks(DigitsTask):
    def __init__(self):
        super().__init__(Iid())

    def loss(self, model, batch):
        raise ValueError("cannot read " + Path(__file__).with_name("patients.csv").read_text())
"""


def holds_marker(file: Path) -> bool:
    content = file.read_bytes()
    words = [MARKER.encode(), MARKER.encode("utf-16-le"), MARKER.encode().hex().encode()]
    # As part of something longer it may begin at any of three places of a group.
    words += [base64.b64encode(b"?" * shift + MARKER.encode())[4:-4] for shift in range(3)]
    return any(word in content for word in words)


@pytest.mark.full
def test_what_a_real_silo_s_task_raises_is_nowhere_at_the_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("w")
    (folder / "data").mkdir()
    (folder / "data" / "task.py").write_text(TASK)
    (folder / "data" / "patients.csv").write_text(MARKER)
    write_files(folder, ["berlin"], own=lambda _: "data: [data], code_files: [data/task.py],")
    with deployed(folder, ["berlin"]):
        quick = [f"task={{kind: custom, file: {folder / 'data' / 'task.py'}}}", "local.steps=1", "min_silos=1"]
        config = ServerStartConfig.load(folder / "server.yaml")
        out = submit_run(config, StrategyConfig.load("fedavg", quick), folder / "out")
        wait_for(lambda: phase(out) is Phase.OVER, "the run did not fail")
        journal = (out / "journal.jsonl").read_text()
        assert "berlin answers CODE" in journal and "CODE" in str(read_error(out))
        note = last_refusals(folder / "berlin" / STATE_FOLDER)[-1]
        assert note.code is Refusal.CODE and MARKER in note.reason
        (log,) = (folder / "berlin" / STATE_FOLDER).glob(f"*/{LOG}")
        assert holds_marker(log), "with its stack"
    files = [file for place in ("server", "out") for file in (folder / place).rglob("*") if file.is_file()]
    files.append(folder / "server.out")
    assert {"superlink.db", "superlink.log", "journal.jsonl"} <= {file.name for file in files}
    assert [os.fspath(file) for file in files if holds_marker(file)] == []
