"""The program that the fork servers of `tests/common/test_fork_server.py` fork."""

import json
import os
import random
import secrets
import sys
import time
import uuid
from pathlib import Path

import numpy as np


def run(arguments: list[str]) -> None:
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
            sys.exit(int(code) if code.isdecimal() else code)
        case ["fail"]:
            raise ValueError("this program fails")
        case ["touch", path]:
            Path(path).touch()
        case ["stay"]:
            time.sleep(600)


if __name__ == "__main__":
    run(sys.argv[1:])
