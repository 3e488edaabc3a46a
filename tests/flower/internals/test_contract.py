"""What FedSync goes by in Flower's private parts is written down, and a change of it is named."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from flwr.proto.run_pb2 import Run
from flwr.supercore import date
from flwr.superlink.servicer.fleet import fleet_handlers

import fedsync.flower
from fedsync.flower.internals import contract, versions

PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.simulation"}
"""What Flower documents."""

KNOWN = {place for places in contract.POINTS.values() for place in places}


def used() -> Iterator[tuple[str, str]]:
    """Module and name of what is imported from Flower's private parts, and the file that does."""
    for file in sorted(Path(fedsync.flower.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr"):
                yield from ((f"{node.module}:{name.name}", file.name) for name in node.names)
            elif isinstance(node, ast.Import):
                yield from ((f"{name.name}:", file.name) for name in node.names if name.name.startswith("flwr"))


def is_known(place: str) -> bool:
    """Whether it is a point, or the class or module of one."""
    module, _, name = place.partition(":")
    whole = f"{module}.{name}".rstrip(".")
    return place in KNOWN or any(each.startswith((f"{place}.", f"{whole}:")) for each in KNOWN)


@pytest.mark.skipif(not versions.supported(), reason="this flwr is not a tested version")
def test_a_tested_flwr_is_as_it_was_read() -> None:
    """In a process of its own: some tests have FedSync's functions in the place of Flower's."""
    command = [sys.executable, "-W", "ignore", "-m", contract.__name__]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == f"flwr {version('flwr')}: {len(KNOWN)} points, 0 of them changed\n"


def test_every_private_part_that_is_imported_is_a_point() -> None:
    missing = {
        f"{place} in {file}" for place, file in used() if place.partition(":")[0] not in PUBLIC and not is_known(place)
    }
    assert not missing


def test_a_function_that_changed_is_named_with_what_goes_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def pull_messages() -> None: ...

    before = set(contract.changes())
    monkeypatch.setattr(fleet_handlers, "pull_messages", pull_messages)
    (change,) = set(contract.changes()) - before
    assert change.place == "flwr.superlink.servicer.fleet.fleet_handlers:pull_messages"
    assert str(change).endswith("is another (held requests and messages with their parts)")
    assert change.print == contract.fingerprint(change.place)


def test_what_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(date, "now")
    assert "flwr.supercore.date:now is not there (the gate before the SuperLink)" in map(str, contract.changes())
    nowhere = {"something": {"flwr.nowhere:at_all": frozenset({"0"})}}
    assert [str(change) for change in contract.changes(nowhere)] == ["flwr.nowhere:at_all is not there (something)"]


def test_a_field_and_a_value_that_changed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    message, constant = "flwr.proto.node_pb2:Node", "flwr.common.constant:TIMESTAMP_TOLERANCE"
    before = contract.fingerprint(message), contract.fingerprint(constant)
    monkeypatch.setattr("flwr.proto.node_pb2.Node", Run)  # another message
    monkeypatch.setattr("flwr.common.constant.TIMESTAMP_TOLERANCE", 1e9)
    assert contract.fingerprint(message) != before[0]
    assert contract.fingerprint(constant) != before[1]


def test_the_command_names_what_changed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    changed = len(contract.changes())
    monkeypatch.delattr(date, "now")
    contract.main()
    printed = capsys.readouterr().out
    assert f"{len(KNOWN)} points, {changed + 1} of them changed" in printed
    assert "flwr.supercore.date:now is not there" in printed
