"""What FedSync's ServerApp reads of the run configuration can be given there: Flower refuses keys that an app lacks."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedsync.common.errors import ConfigError, RunError
from fedsync.flower import server_app
from fedsync.observe.run_state import RUN_LOG
from fedsync.server.run_folder import APP, Phase, phase, read_error, write_error
from tests.flower.grid import DirectGrid


def test_every_setting_of_the_server_is_a_key_of_the_app() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    keys = tomllib.loads(text)["tool"]["flwr"]["app"]["config"].keys()
    read = set(re.findall(r"settings(?:\.get\(|\[|, )\"([a-z-]+)\"", inspect.getsource(server_app)))
    assert {"strategy", "out", "resume", "target-accuracy"} <= read
    assert read == keys
    assert all(f"``{key}``" in str(server_app.__doc__) for key in keys)


def test_a_run_that_was_stopped_before_flower_began_it_does_not_begin(tmp_path: Path) -> None:
    write_error(tmp_path, RunError("stopped by the operator"))
    context = Context(1, 1, {}, RecordDict(), {"control": str(tmp_path), "strategy": "nowhere.yaml"})
    with pytest.raises(RunError, match="was stopped before Flower began it"):
        server_app.main(DirectGrid(0), context)
    assert str(read_error(tmp_path)) == "stopped by the operator"


def test_why_a_run_failed_is_left_for_who_waits_for_it(tmp_path: Path) -> None:
    context = Context(1, 1, {}, RecordDict(), {"control": str(tmp_path), "strategy": "nowhere.yaml"})
    with pytest.raises(ConfigError) as raised:
        server_app.main(DirectGrid(0), context)
    assert str(read_error(tmp_path)) == str(raised.value) and "nowhere.yaml" in str(raised.value)
    (line,) = (tmp_path / RUN_LOG).read_text().splitlines()
    assert re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ ERROR the run failed: .*nowhere.yaml", line)


def test_a_process_with_a_full_disk_is_no_run_that_waits_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / APP).mkdir()

    def full(*arguments: object) -> None:
        raise ConfigError("server.pid", "No space left on device", "Make room")

    monkeypatch.setattr(server_app, "write_atomically", full)
    context = Context(1, 1, {}, RecordDict(), {"control": str(tmp_path), "strategy": "nowhere.yaml"})
    assert phase(tmp_path) is Phase.WAITING
    with pytest.raises(ConfigError, match="No space"):
        server_app.main(DirectGrid(0), context)
    assert phase(tmp_path) is Phase.DIED
