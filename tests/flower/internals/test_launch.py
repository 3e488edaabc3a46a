"""Programs of Flower as children, in processes of their own."""

import subprocess
import sys

RETURNS = """
import importlib, threading, time
from fedsync.flower.internals import launch
program = importlib.import_module("flwr.supernode.cli.flower_supernode")
program.flower_supernode = lambda: threading.Thread(target=time.sleep, args=(600,)).start()
launch.main(["supernode"])
"""


def test_a_supernode_without_a_connection_ends_whatever_it_has_begun() -> None:
    done = subprocess.run([sys.executable, "-c", RETURNS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, "")
