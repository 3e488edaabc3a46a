"""The Flower app that a run is: FedSync's own server and silo side, and the settings of the run."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from fedsync.core.errors import RunError
from fedsync.flower.internals.apps import OWN
from fedsync.flower.internals.registration import flwr_command

_TIMEOUT_S = 120.0
_RUN = re.compile(r"run (\d{5,})", re.IGNORECASE)

_PROJECT = f"""\
[project]
name = "fedsync-run"
version = "1.0.0"
description = "Wiring of a FedSync run"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedsync"

[tool.flwr.app.components]
serverapp = "fedsync.flower.server_app:app"
clientapp = "{OWN}"

[tool.flwr.app.config]
"""


def write_bundle(folder: Path, settings: Mapping[str, str | float]) -> Path:
    """Make the app in a folder that does not exist yet; ``settings`` are those of `fedsync.flower.server_app`."""
    folder.mkdir(parents=True)
    # JSON's strings and numbers are TOML's too.
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (folder / "pyproject.toml").write_text(_PROJECT + lines, encoding="utf-8")
    return folder


def submit(bundle: Path, connection: str, environment: Mapping[str, str]) -> str:
    """Hand the app to the SuperLink that ``connection`` names; returns Flower's number of the run, if it says one.

    Raises:
        RunError: Flower refuses it, does not answer in time, or there is no SuperLink.
    """
    done = _flwr("run", str(bundle), connection, environment=environment)
    if done.returncode != 0:
        raise RunError(f"flwr run failed with code {done.returncode}:\n{done.stdout}{done.stderr}")
    found = _RUN.search(done.stdout)
    return found.group(1) if found else ""


def withdraw(number: str, connection: str, environment: Mapping[str, str]) -> None:
    """Have a SuperLink count a run as ended, whose ServerApp died or is not to begin; if it does so, nothing happens.

    By itself it does so after a minute, in which a SuperNode may wait for the rest of a message that nobody sends.

    Raises:
        RunError: Flower's command line does not answer in time, or cannot be started.
    """
    _flwr("stop", number, connection, environment=environment)


def _flwr(*arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [flwr_command(), *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"flwr {arguments[0]} did not come back in {_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise RunError(f"flwr {arguments[0]} could not be started: {error}") from error
