"""The examples under deploy/ parse, name commands that exist, and are configurations that FedSync accepts."""

import configparser
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from fedsync.cli import app
from fedsync.common.processes import MOST_FILES
from fedsync.config.section import Section
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))


def takes(arguments: list[str]) -> bool:
    """Whether ``fedsync`` has such a command with such options."""
    command = get_command(app)
    while arguments and hasattr(command, "commands") and arguments[0] in command.commands:
        command, arguments = command.commands[arguments[0]], arguments[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    return not hasattr(command, "commands") and {each for each in arguments if each.startswith("--")} <= known


def read_unit(path: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None, strict=True, delimiters=("=",), comment_prefixes=("#", ";"))
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's keys have capitals
    unit.read_string(path.read_text(encoding="utf-8"))
    return unit


def test_a_command_that_does_not_exist_is_noticed() -> None:
    assert takes(["silo", "start", "--silo", "x"])
    assert not takes(["silo", "begin"]) and not takes(["silo", "start", "--sillo", "x"])


def test_there_is_a_unit_for_either_side() -> None:
    assert [path.stem for path in UNITS] == ["fedsync-server", "fedsync-silo"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_restart_and_are_shut_in(path: Path) -> None:
    unit = read_unit(path)
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    service = unit["Service"]
    assert (service["Restart"], service["UMask"], service["NoNewPrivileges"]) == ("always", "0077", "true")
    assert int(service["LimitNOFILE"]) == MOST_FILES
    assert service["StateDirectoryMode"] == "0700" and unit["Install"]["WantedBy"] == "multi-user.target"
    for key in ("ExecStart", "ExecStartPre"):
        if key in service:
            program, *arguments = shlex.split(service[key])
            assert program.endswith("/bin/fedsync") and takes(arguments), service[key]
    side = path.stem.removeprefix("fedsync-")
    shipped = yaml.safe_load((DEPLOY / f"{side}.yaml").read_text(encoding="utf-8"))
    assert shipped["state"] == f"/var/lib/{service['StateDirectory']}"


@pytest.mark.parametrize(("name", "model"), [("server", ServerStartConfig), ("silo", SiloStartConfig)])
def test_example_files_are_accepted(name: str, model: type[Section]) -> None:
    model.model_validate(yaml.safe_load((DEPLOY / f"{name}.yaml").read_text(encoding="utf-8")))


def test_compose_runs_a_server_and_silos_that_keep_their_state() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    services = compose["services"]
    assert set(services) == {"server", "berlin", "paris"}
    for name, service in services.items():
        assert takes([str(word) for word in service["command"]])
        assert service["restart"] == "always" and service["cap_drop"] == ["ALL"]
        (volume,) = [mount.split(":")[0] for mount in service["volumes"] if not mount.startswith(".")]
        assert volume in compose["volumes"]
        assert ("ports" in service) == (name == "server"), "silos listen to nobody"
    dockerfile = (DEPLOY / services["server"]["build"]["dockerfile"].removeprefix("deploy/")).read_text()
    copied = [word for line in dockerfile.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    assert "USER fedsync" in dockerfile and 'ENTRYPOINT ["fedsync"]' in dockerfile
