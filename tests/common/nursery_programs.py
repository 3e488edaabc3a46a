"""What the nurseries of `tests/common/test_nursery.py` fork."""

import json
import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np


def prepare(how: str = "") -> Callable[[], bool]:
    # Seeded here, before there are forks.
    np.random.random()
    if how == "thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    if how == "slow":
        time.sleep(3)
    return lambda: how != "device"


def forked(arguments: list[str]) -> None:
    match arguments:
        case ["describe", *_]:
            drawn = random.random(), float(np.random.random()), secrets.token_hex(), uuid.uuid4().hex
            print(json.dumps({
                "arguments": sys.argv[1:],
                "environment": dict(os.environ),
                "folder": str(Path.cwd()),
                "session": os.getsid(0),
                "process": os.getpid(),
                "files": sorted(int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()),
                "input": sys.stdin.read(),
                "drawn": drawn,
            }))  # fmt: skip
        case ["exit", code]:
            sys.exit(int(code))
        case ["fail"]:
            raise ValueError("this program fails")
        case ["touch", path]:
            Path(path).touch()
        case ["stay"]:
            time.sleep(600)
