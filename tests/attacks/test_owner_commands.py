"""What the owner's own commands run and read: training code of a run, and files of a folder that others wrote."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsync.cli import app
from fedsync.common.sandbox.confinement import can_confine
from tests.silo.test_model_export import TASK, keep

pytestmark = pytest.mark.skipif(not can_confine(), reason="this kernel has no Landlock")

HOSTILE = (
    TASK
    + """
import os, socket
from pathlib import Path

HERE = Path(__file__).parent

def tried():
    ways = {
        "reads a key": lambda: Path("KEYS", "group.key").read_bytes(),
        "reads the state": lambda: os.listdir(HERE / "s" / "state"),
        "writes to the data": lambda: (HERE / "escaped").open("x").close(),
        "asks a server": lambda: socket.create_connection(("127.0.0.1", PORT), timeout=5).close(),
        "finds where keys are": lambda: os.environ["FEDSYNC_KEYS"],
        "signals another process": lambda: os.kill(os.getppid(), 0),
    }
    for name, way in ways.items():
        try:
            way()
            yield name
        except (OSError, KeyError):
            continue

class Small(Small):
    def model(self):
        raise RuntimeError("could: " + (", ".join(tried()) or "nothing") + ".")
"""
)


@pytest.fixture
def file(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Iterator[Path]:
    """Of a silo that has kept a run, whose owner named the code; the code is hostile."""
    path = tmp_path_factory.mktemp("e") / "silo.yaml"
    (tmp_path / "group.key").write_text("secret")
    path.write_text(
        "{name: berlin, server: 'localhost:1', insecure: true, state: s, data: [.], emulate: true, "
        "code_files: [small.py]}",
        encoding="utf-8",
    )
    keep(path, "run", at_s=1e9)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = HOSTILE.replace("PORT", str(server.getsockname()[1])).replace("KEYS", str(tmp_path))
        path.with_name("small.py").write_text(code, encoding="utf-8")
        yield path


@pytest.mark.slow
@pytest.mark.parametrize("command", [("silo", "export", "--out", "out"), ("evaluate",)])
def test_training_code_gets_data_alone(command: tuple[str, ...], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had the owner's rights: keys, state and network."""
    monkeypatch.chdir(file.parent)
    done = CliRunner().invoke(app, [*command, "--silo", str(file)])
    found = re.search(r"could: ([^\n.]*)\.", str(done.exception))
    assert found is not None, done.exception
    assert found[1] == "nothing"
    assert not (file.parent / "escaped").exists()


RESULTS = {"evaluate": ("evaluated.json",), "report": ("report.html", "model-card.md")}


@pytest.mark.slow
@pytest.mark.parametrize("command", RESULTS)
def test_results_in_a_folder_that_others_wrote_are_written_through_no_link(command: str, tmp_path: Path) -> None:
    """``evaluated.json`` in a run's folder could be a link to any file of the user's."""
    mine, folder = tmp_path / "authorized_keys", tmp_path / "run"
    quick = ["task={kind: digits}", "local.steps=1", "local.batch_size=8", "stop.rounds=1"]
    told = ["run", "fedavg", "--runtime", "virtual", "--silos", "homogeneous", "--out", str(folder)]
    run = CliRunner().invoke(app, [*told, *(word for each in quick for word in ("--set", each))])
    assert run.exception is None, run.output
    mine.write_text("mine")
    for name in RESULTS[command]:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(mine)
    done = CliRunner().invoke(app, [command, str(folder)])
    assert done.exception is None, done.output
    assert mine.read_text() == "mine"
    assert all((folder / name).stat().st_size > 10 for name in RESULTS[command])
