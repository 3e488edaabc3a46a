"""The examples under deploy/ parse, name commands that exist, and are configurations that FedSync accepts."""

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from fedsync.cli import app
from fedsync.common.processes import MOST_FILES
from fedsync.config.sections.section import Section
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
            program, *arguments = shlex.split(service[key].removeprefix("-"))
            assert program.endswith("/bin/fedsync") and takes(arguments), service[key]
    assert service.get("ExecStartPre", "-").startswith("-"), "what the doctor finds does not keep it from starting"
    side = path.stem.removeprefix("fedsync-")
    shipped = yaml.safe_load((DEPLOY / f"{side}.yaml").read_text(encoding="utf-8"))
    assert shipped["state"] == f"/var/lib/{service['StateDirectory']}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not there")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_are_not_exposed(path: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(path)]  # 2.5 of 10
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-200:]


def test_the_unit_of_a_silo_may_write_where_its_example_says() -> None:
    """Under ``ProtectSystem=strict`` nothing else can be written, also folders whose keys are in comments."""
    text = re.sub(r"^# (\w+: )", r"\1", (DEPLOY / "silo.yaml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    silo = yaml.safe_load(text)
    writable = [
        each.removeprefix("-")
        for each in read_unit(DEPLOY / "fedsync-silo.service")["Service"]["ReadWritePaths"].split()
    ]
    assert {f"/etc/fedsync/{silo['keys']}", silo["audit"]["head_to"]} == set(writable)


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
    assert services["server"]["build"] == {"context": "..", "dockerfile": "deploy/Dockerfile"}


def test_the_image_is_made_of_what_is_named_by_its_digest() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    assert re.fullmatch(r"FROM python:[\w.-]+@sha256:[0-9a-f]{64}", next(line for line in dockerfile if "FROM" in line))
    dependencies, own = (line for line in dockerfile if line.startswith("RUN pip install"))
    assert "--require-hashes" in dependencies and {"--no-deps", "--no-build-isolation"} <= set(own.split())
    assert any(line.startswith("HEALTHCHECK") for line in dockerfile)
    assert "USER fedsync" in dockerfile and 'ENTRYPOINT ["fedsync"]' in dockerfile
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-").split()
    pinned = dict(line.split("==") for line in constraints if "==" in line)
    lines = [line for line in (DEPLOY / "requirements.txt").read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    assert len(lines) > 50
    for line in lines:
        found = re.fullmatch(r"([\w.-]+)==([\w.]+)(\+cpu)? --hash=sha256:[0-9a-f]{64}", line)
        assert found and pinned.get(found[1].lower().replace("_", "-"), found[2]) == found[2], line


def test_what_lies_beside_the_compose_file_does_not_get_into_the_image() -> None:
    everything, *allowed = [
        line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[0] != "#"
    ]
    assert everything == "*"
    copied = [
        word
        for line in (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
        if line.startswith("COPY")
        for word in line.split()[1:-1]
    ]
    assert all((ROOT / name).exists() for name in copied)
    assert {f"!{name}" for name in copied} == {line for line in allowed if line.startswith("!")}
