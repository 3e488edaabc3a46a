"""A published Flower app, five lines changed, deployed as Flower documents it: by its programs and its command."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from socket import create_connection

import pytest

from fedsync.common.locks import wait_until
from fedsync.common.processes import end_processes, free_ports
from fedsync.flower.process_environment import flower_environment
from fedsync.flower.registration import flwr_command, write_connection
from fedsync.silo.protocol import STATE_FOLDER
from fedsync.silo.session.trainer_client import stop_trainers

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart-pytorch"
PROGRAMS = Path(sys.executable).parent


MOD = """
def note(msg, context, call_next):
    from pathlib import Path
    Path({folder!r}, f"node-{{context.node_id}}-{{context.run_id}}-{{msg.metadata.run_id}}").touch()
    return call_next(msg, context)

app = ClientApp(mods=[note])
"""


def listens(port: int) -> bool:
    try:
        with create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


@pytest.mark.full
def test_it_trains_on_supernodes_that_know_nothing_of_fedsync(tmp_path: Path) -> None:
    app, home = tmp_path / "app", tmp_path / "home"
    shutil.copytree(EXAMPLE, app)
    for file, before, now in (
        ("pyproject.toml", "num-server-rounds = 12", "num-server-rounds = 2"),
        ("quickstart/server_app.py", "min_available_nodes=3", "min_available_nodes=2"),
        ("quickstart/client_app.py", "app = ClientApp()", MOD.format(folder=str(tmp_path))),
    ):
        text = (app / file).read_text(encoding="utf-8")
        assert before in text
        (app / file).write_text(text.replace(before, now), encoding="utf-8")
    home.mkdir(mode=0o700)
    port, *nodes = free_ports(3)
    address = f"127.0.0.1:{port}"
    write_connection(home, "local-deployment", address, None)
    environment = flower_environment(home)
    started: list[subprocess.Popen[bytes]] = []

    def start(program: str, *options: str) -> None:
        with (tmp_path / f"{program}-{len(started)}.log").open("wb") as log:
            command = [str(PROGRAMS / program), "--insecure", *options]
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))

    try:
        start("flower-superlink", "--host", "127.0.0.1", "--port", str(port))
        wait_until(lambda: listens(port), 60, 0.2)
        for index, own in enumerate(nodes):
            node = f"partition-id={index} num-partitions=2"
            start("flower-supernode", "--superlink", address, "--node-config", node, "--port", str(own))
        done = subprocess.run(
            [flwr_command(), "run", str(app), "local-deployment", "--stream"],
            env={**os.environ, **environment}, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
    finally:
        stop_trainers(home / STATE_FOLDER)
        end_processes(list(reversed(started)))
    assert done.returncode == 0, done.stdout + done.stderr
    rounds = re.findall(r"\[ROUND (\d)/2\].*batches silo-0 (\d+), silo-1 (\d+)", done.stdout + done.stderr)
    assert [(number, int(one) + int(other)) for number, one, other in rounds] == [("1", 64), ("2", 64)]
    assert "files of the run" in done.stdout + done.stderr
    (run,) = re.findall(r"run (\d{6,})", done.stdout)
    seen = [path.name.split("-")[1:] for path in tmp_path.glob("node-*")]
    assert len(seen) == 2 and {(own, said) for _, own, said in seen} == {(run, run)}, "mods see Flower's numbers"
