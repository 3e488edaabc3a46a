"""Flower's pauses in a process of their own, for they change it."""

import subprocess
import sys

import pytest

from fedsync.flower.internals import versions

POLLS = """
import time
from fedsync.flower.internals.polling import poll_often
poll_often(0.01)
import flwr.supernode.start_client_internal as internal
assert internal.time is not time and internal.time.monotonic is time.monotonic
slept = []
time.sleep = slept.append
internal.time.sleep(3)
internal.time.sleep(0.001)
assert slept == [0.01, 0.001], slept
"""

PULLS = """
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from fedsync.flower.internals import polling
polling.FIRST_S = 0.001
polling.pull_soon()
asked = []
def pull(name):
    asked.append(name)
    if len(asked) < 5:
        raise ObjectUnavailableError(name)
    return b"here"
inflatable_utils.random.uniform = lambda low, high: 0.0
import threading
waited = []
wait = threading.Event.wait
threading.Event.wait = lambda self, timeout=None: (waited.append(timeout), wait(self, timeout))[1]
assert inflatable_utils.pull_objects(["a"], pull) == {"a": b"here"}
pauses_s = [each for each in waited if each is not None]
assert pauses_s == [0.001, 0.002, 0.004, 0.008], pauses_s
"""


@pytest.mark.parametrize("code", [POLLS, PULLS], ids=["polls", "pulls"])
def test_pauses_are_cut(code: str) -> None:
    if not versions.supported():
        pytest.skip("this flwr is not a tested version")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
