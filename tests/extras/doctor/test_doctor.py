"""Every check, where it passes and where it does not."""

import json
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsync.cipher.keys.authority import emulated_keys
from fedsync.cipher.keys.keyring import open_ring
from fedsync.common.errors import ConfigError
from fedsync.common.locks import held
from fedsync.common.proxies import Way
from fedsync.common.sandbox.confinement import can_confine
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.extras.doctor import health, preflight
from fedsync.extras.doctor import machine_checks as checks
from fedsync.extras.doctor import network_checks as network
from fedsync.extras.doctor.machine_checks import Check
from fedsync.flower.registration import NODES_FILE, Registered
from fedsync.identity.certificates import Authority, ServerCertificate, make_authority, make_server_certificate
from fedsync.identity.node_keys import make_node_key
from fedsync.ops import start
from fedsync.ops.supervisor import LOCK_FILE, alone_in
from fedsync.silo.owner.lockout import Lockout
from fedsync.silo.owner.refusals import refuse
from fedsync.silo.protocol import STATE

NOW = datetime.now(UTC)
LOCKS = ExitStack()


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def locks() -> Iterator[None]:
    with LOCKS:
        yield


def supervised(state: Path) -> Path:
    """A state folder whose supervisor lives until the end of the test."""
    if not held(state / LOCK_FILE):
        LOCKS.enter_context(alone_in(state))
    return state


def health_file(state: Path, age_s: float = 0.0, /, **told: object) -> None:
    """File of a supervisor that was written so long ago."""
    at = (NOW - timedelta(seconds=age_s)).isoformat()
    said = {"state": "running", "since": "x", "restarts": 0, "at": at, **told}
    (state / "health.json").write_text(json.dumps(said))


def failed(check: Check, detail: str, remedy: str) -> None:
    assert not check.ok and detail in check.detail and remedy in check.remedy, check


def test_a_certificate_expires(certificates: Path) -> None:
    path = ServerCertificate.at(certificates).certificate
    assert checks.check_certificate(path, "certificate", NOW).ok
    soon = checks.check_certificate(path, "certificate", NOW + timedelta(days=364 - 9))
    assert soon.ok and ("9 days left" in soon.detail or "10 days left" in soon.detail)
    failed(checks.check_certificate(path, "c", NOW + timedelta(days=364)), "1 days left", "--renew")
    failed(checks.check_certificate(path, "c", NOW + timedelta(days=366)), "expired", "--renew")
    authority = certificates / "ca.crt"
    failed(checks.check_certificate(authority, "c", NOW + timedelta(days=3651)), "expired", "another authority")
    failed(checks.check_certificate(certificates / "no.crt", "c", NOW), "cannot be read", "fedsync certs init")


def test_an_authoritys_key_belongs_on_another_machine(certificates: Path, tmp_path: Path) -> None:
    assert "move it offline" in checks.check_authority_key(certificates).detail
    assert "not on this machine" in checks.check_authority_key(tmp_path).detail


def test_a_node_key_is_its_owners(tmp_path: Path) -> None:
    key = make_node_key("berlin", tmp_path / "k")
    assert key.fingerprint in checks.check_node_key(key.private).detail
    key.private.chmod(0o644)
    failed(checks.check_node_key(key.private), "open to others", "chmod 600")


def test_keys_for_encrypted_runs(tmp_path: Path) -> None:
    made = emulated_keys(["berlin", "paris"], tmp_path / "keys", 7)
    ring = checks.check_ring(tmp_path / "keys" / "silos" / "berlin", "berlin")
    assert ring.ok and "epoch 1" in ring.detail and "for berlin, paris" in ring.detail
    failed(checks.check_ring(tmp_path / "keys" / "silos" / "berlin", "rome"), "keys of 'berlin'", "of 'rome'")
    failed(checks.check_ring(tmp_path, "berlin"), "silo.key", "fedsync keys silo")
    server = checks.check_server_keys(made.server_file)
    assert server.ok and "epoch 1" in server.detail and "berlin, paris" in server.detail
    failed(checks.check_server_keys(tmp_path / "server.json"), "No such file", "See the message")


def test_a_silo_that_locked_itself_says_why_and_how_to_go_on(tmp_path: Path) -> None:
    folder = emulated_keys(["berlin"], tmp_path / "keys", 1, lambda: b"context").silos["berlin"]
    assert checks.check_open(folder).ok
    for number in range(3):
        Lockout(open_ring(folder)).count(f"the server failed the check 'tag' {number}")
    failed(checks.check_open(folder), "the check 'tag' 2", "")
    assert "fedsync silo unlock --silo" in checks.check_open(folder).detail


def test_the_last_refusals_are_shown_with_their_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(health.check_refusals(tmp_path)) == []
    (tmp_path / "state").mkdir()
    monkeypatch.setenv(STATE, str(tmp_path / "state"))
    for number in range(9):
        refuse(ConfigError("task", f"no file {number}", "Make it"))
    refuse(ConfigError("task", "no file 8", "Make it"))
    found = list(health.check_refusals(tmp_path))
    assert all(check.ok and check.name == "refused" for check in found) and len(found) == health.MOST_REFUSALS
    assert found[-1].detail.endswith("CONFIG, 2 times: task: no file 8. Make it") and found[-1].detail.startswith("20")


def test_disk_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=999_000_000))
    failed(checks.check_disk(tmp_path / "later"), "999.0 MB free", "Free 1.0 GB")
    monkeypatch.setattr(checks.psutil, "virtual_memory", lambda: SimpleNamespace(available=500_000_000))
    assert checks.check_memory().ok
    monkeypatch.setattr(checks.psutil, "virtual_memory", lambda: SimpleNamespace(available=499_000_000))
    failed(checks.check_memory(), "499.0 MB available, 500.0 MB wanted", "larger machine")


def test_an_authority_that_is_no_certificate_is_one_line(port: int, tmp_path: Path) -> None:
    junk = tmp_path / "ca.crt"
    for text in ("junk", ""):
        junk.write_text(text)
        failed(network.check_tls(Way("localhost", port), junk), "no certificate can be read", "Fetch ca.crt")
        failed(network.check_clock(Way("localhost", port), junk, time.time), "no certificate can be", "Fetch ca.crt")
    failed(network.check_tls(Way("localhost", port), tmp_path / "no"), "No such file", "Fetch ca.crt")


def test_a_device_that_is_not_there() -> None:
    assert checks.check_device("cpu").detail == "cpu"
    failed(checks.check_device("tpu"), "'tpu' is unknown", "Write auto, cpu")


def test_the_way_to_the_server(port: int, closed_port: int, certificates: Path, tmp_path: Path) -> None:
    authority = certificates / "ca.crt"
    assert "round trip" in network.check_reachable(Way("127.0.0.1", port)).detail
    failed(network.check_reachable(Way("127.0.0.1", closed_port)), "refused", "firewalls")
    assert "TLSv1.3" in network.check_tls(Way("localhost", port), authority).detail
    (tmp_path / "other").mkdir(mode=0o700)
    stranger = make_authority(tmp_path / "other").certificate
    failed(network.check_tls(Way("localhost", port), stranger), "", "Compare ca.crt")


@pytest.mark.parametrize(
    ("skew_s", "ok"), [(0.0, True), (50.0, True), (-50.0, True), (3600.0, False), (-3600.0, False)]
)
def test_clocks_are_compared_by_the_date_of_an_answer(skew_s: float, ok: bool, port: int, certificates: Path) -> None:
    def clock() -> float:
        return time.time() + skew_s

    check = network.check_clock(Way("localhost", port), certificates / "ca.crt", clock)
    assert check.ok is ok
    if not ok:
        failed(check, "ahead of the server's" if skew_s > 0 else "behind the server's", "NTP")


@pytest.mark.parametrize(
    ("there", "before", "after", "ok"),
    # The server's second began at 1000. Asked at 1061 or later, its clock is at least a minute behind.
    [(1000.0, 1000.2, 1000.3, True), (1000.0, 1061.0, 1062.0, True), (1000.0, 1061.5, 1062.0, False),
     (1060.0, 999.0, 1000.0, True), (1060.5, 999.0, 1000.0, False)],
)  # fmt: skip
def test_skew_counts_from_the_nearest_it_can_be(there: float, before: float, after: float, ok: bool) -> None:
    assert network.judge_skew(there, before, after).ok is ok


def test_a_trainer_that_does_not_answer_is_a_failure(tmp_path: Path) -> None:
    trainers = {"0a": {"pid": 7, "state": "idle", "since": "x"}, "0b": {"pid": 8, "state": "silent", "since": "y"}}
    health_file(supervised(tmp_path), trainers=trainers)
    failed(health.check_health(tmp_path, NOW), "the trainer in 0b has not answered since y", "process, 8")
    del trainers["0b"]
    health_file(tmp_path, trainers=trainers)
    assert health.check_health(tmp_path, NOW).ok


@pytest.mark.parametrize(
    ("abi", "can", "own", "said"),
    [
        (7, True, True, "memory and network (Landlock); trainers have a network and shared memory of their own"),
        (7, True, False, "trainers cannot open sockets; runs with `workers` are refused"),
        (3, True, True, "Linux 6.7"),
        (0, False, False, ""),
    ],
)
def test_what_a_system_keeps_code_that_is_sent_from_is_told(
    abi: int, can: bool, own: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SiloStartConfig(name="north", server="localhost:1", insecure=True, state="s")
    monkeypatch.setattr(checks, "landlock_abi", lambda: abi)
    monkeypatch.setattr(checks, "can_confine", lambda: can)
    monkeypatch.setattr(checks, "can_own_namespaces", lambda: own)
    found = checks.check_code(config)
    assert found.ok is can and said in found.detail
    if not can:
        failed(found, "cannot isolate the client code of a run", "Landlock (5.13, better 6.7), or write code: shipped")
    shipped = checks.check_code(config.model_copy(update={"code": "shipped"}))
    assert shipped.ok and "whatever client the server sends" in shipped.detail


def test_what_the_supervisor_says(tmp_path: Path) -> None:
    assert health.check_health(tmp_path, NOW).detail == "not running"
    supervised(tmp_path)
    health_file(tmp_path, 5, restarts=3)
    assert health.check_health(tmp_path, NOW).detail == "running since x, 3 restarts"
    assert health.is_running(tmp_path)
    health_file(tmp_path, 5, state="restarting", restarts=3, last_error="no data")
    failed(health.check_health(tmp_path, NOW), "3 restarts; no data", "logs")
    for age_s, restarts, ok in ((59, 3, False), (61, 3, True), (59, 2, True)):
        since = (NOW - timedelta(seconds=age_s)).isoformat()
        health_file(tmp_path, 5, restarts=restarts, last_error="its key is not registered", since=since)
        found = health.check_health(tmp_path, NOW)
        assert (found.ok, found.detail.endswith("restarts; its key is not registered")) == (ok, not ok)
    health_file(tmp_path, 500, state="restarting")
    LOCKS.close()
    failed(health.check_health(tmp_path, NOW), "although nobody stopped it; it was restarting at 2", "start it again")
    assert not health.is_running(tmp_path)
    health_file(tmp_path, 500, state="stopped")
    assert health.check_health(tmp_path, NOW) == checks.Check("health", True, "not running")
    (tmp_path / "health.json").write_text("{")
    assert health.check_health(tmp_path, NOW).detail == "not running"


def test_a_supervisor_that_cannot_write_is_running(tmp_path: Path) -> None:
    health_file(supervised(tmp_path), 500)
    failed(health.check_health(tmp_path, NOW), "it runs, but has not written health.json since 2", "Free the disk")
    assert health.is_running(tmp_path) and health.check_runs(tmp_path, NOW).detail == "see health"


def test_a_supervisor_that_was_killed_is_not_running_although_its_last_words_are_recent(tmp_path: Path) -> None:
    with alone_in(tmp_path):
        health_file(tmp_path)
        assert health.is_running(tmp_path)
        assert health.check_health(tmp_path, NOW).detail == "running since x, 0 restarts"
    assert not health.check_health(tmp_path, NOW).ok
    for check in (health.check_registration, health.check_runs):
        assert check(tmp_path, NOW).detail == "not running"


def test_what_the_keeper_says(tmp_path: Path) -> None:
    assert health.check_runs(supervised(tmp_path), NOW).detail == "not running"
    run = {"phase": "at work", "tries": 5, "next": None, "reason": "its server process died"}

    def ago(age_s: float) -> str:
        return (NOW - timedelta(seconds=age_s)).isoformat()

    def check(looked_s: float | None, since_s: float = 5000.0, **changed: object) -> Check:
        keeper = {} if looked_s is None else {"looked": ago(looked_s), "runs": {"/r/a": {**run, **changed}}}
        health_file(tmp_path, 5, since=ago(since_s), keeper=keeper)
        return health.check_runs(tmp_path, NOW)

    assert check(10).ok and "1 not over" in check(10).detail
    assert check(None, since_s=3).ok, "it has just started"
    assert check(None, since_s=3).detail == "not checked yet since the server started"
    failed(check(601), "looked at", "Restart `fedsync server start`")
    failed(check(None), "looked at None", "Restart")
    failed(check(10, tries=6), "/r/a: its server process died, tried 6 times", "fedsync server stop")
    refused = check(10, next="12:00", reason="not resumed: no space")
    failed(refused, "no space, tried 5 times, next try at 12:00", "logs")
    health_file(tmp_path, 5, keeper={"looked": ago(0), "runs": {}, "failed": {"/r/b": "no silo sent a model"}})
    failed(health.check_runs(tmp_path, NOW), "/r/b: no silo sent a model", "/r/b/run.log")
    assert check(10, next="12:00").ok, "a run that has died once or twice is being cared for"


def registration(config: ServerStartConfig) -> Check:
    return next(each for each in preflight.check_server(config, NOW) if each.name == "registration")


def test_what_was_registered_since_the_last_health_file_counts(
    certificates: Path, closed_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `fedsync server register`, by another process than the one that writes the health file, and revoked."""
    silos = {name: str(make_node_key(name, tmp_path / "k").public) for name in ("berlin", "rome")}
    config = running_server(certificates, closed_port, tmp_path / "state", silos={"berlin": "registered"})
    config = config.model_copy(update={"silos": silos})

    failed(registration(config), "rome: not registered", "fedsync server register")
    problem = ConfigError("silos, rome", "its key was revoked before", "Make another")
    monkeypatch.setattr(start, "register_each", lambda *arguments: Registered({"rome": problem}))
    start.register_silos(config)
    failed(registration(config), "rome: silos, rome: its key was revoked", "")
    monkeypatch.setattr(start, "register_each", lambda *arguments: Registered())
    start.register_silos(config)
    assert registration(config).detail == "berlin, rome"
    monkeypatch.setattr(start, "revoke_keys", lambda *arguments: None)
    start.revoke_silo(config.model_copy(update={"silos": {"berlin": silos["berlin"]}}), "rome")
    failed(registration(config), "rome: revoked", "fedsync server register")


def test_a_revoked_silo_is_not_shown_as_registered_by_a_server_that_registered_it_before(
    certificates: Path, closed_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The health file is written by the server, which still remembers the silo."""
    key = str(make_node_key("berlin", tmp_path / "k").public)
    both = {"berlin": "registered", "rome": "registered"}
    config = running_server(certificates, closed_port, tmp_path / "state", silos=both)
    config = config.model_copy(update={"silos": {"berlin": key}})
    known = [{"name": "rome", "key": "00", "node": "1"}]
    (tmp_path / "state" / NODES_FILE).write_text(json.dumps(known))
    monkeypatch.setattr(start, "revoke_keys", lambda *arguments: None)
    start.revoke_silo(config, "rome")
    found = registration(config)
    assert found.ok and found.detail == "berlin"


def test_a_silo_is_checked_from_end_to_end(port: int, certificates: Path, tmp_path: Path) -> None:
    key = make_node_key("berlin", tmp_path / "k").private
    config = SiloStartConfig(
        name="berlin", server=f"localhost:{port}", authority=str(certificates / "ca.crt"), node_key=str(key),
        state=str(tmp_path / "state"), device="cpu",
    )  # fmt: skip
    found = list(preflight.check_silo(config, NOW))
    assert [check.name for check in found] == [
        "versions", "code", "authority", "node key", "disk", "memory", "device", "server", "TLS", "clock",
        "health", "approvals", "audit",
    ]  # fmt: skip
    assert all(check.ok or check.name == "code" for check in found), found
    assert found[1].ok == can_confine()
    soon = {check.name: check for check in preflight.check_silo(config, NOW + timedelta(days=364))}
    failed(soon["TLS"], "1 days left", "server's operator")


def test_a_server_is_checked_from_end_to_end(certificates: Path, closed_port: int, tmp_path: Path) -> None:
    config = ServerStartConfig(
        host="127.0.0.1", port=closed_port, certificates=str(certificates), state=str(tmp_path / "state")
    )
    found = list(preflight.check_server(config, NOW))
    assert [check.name for check in found] == [
        "versions", "authority", "certificate", "authority key", "disk", "memory", "served",
        "health", "registration", "runs",
    ]  # fmt: skip
    assert all(check.ok for check in found), found


def running_server(certificates: Path, port: int, state: Path, **told: object) -> ServerStartConfig:
    """A server's file whose supervisor is at work, as its health file says."""
    health_file(supervised(state), **{"since": NOW.isoformat(), **told})
    return ServerStartConfig(host="127.0.0.1", port=port, certificates=str(certificates), state=str(state))


def test_a_renewed_certificate_not_served_yet_is_a_failure(port: int, certificates: Path, tmp_path: Path) -> None:
    renewed = tmp_path / "certs"
    shutil.copytree(certificates, renewed)

    def found(now: datetime = NOW) -> dict[str, Check]:
        config = running_server(renewed, port, tmp_path / "state", at=now.isoformat())
        return {check.name: check for check in preflight.check_server(config, now)}

    assert found()["served"].ok
    failed(found(NOW + timedelta(days=364))["served"], "1 days left", "restart")
    make_server_certificate(Authority.at(renewed), ["fl.example.org"], renewed)
    assert found()["certificate"].ok, "the file is good"
    failed(found()["served"], "shown another certificate", "Restart `fedsync server start`")


@pytest.mark.parametrize("there", [True, False])
def test_a_relay_is_checked_up_to_the_server_above_it(
    port: int, certificates: Path, closed_port: int, tmp_path: Path, there: bool
) -> None:
    key = make_node_key("north", tmp_path / "k").private
    above = {"name": "north", "authority": str(certificates / "ca.crt"), "node_key": str(key)}
    config = ServerStartConfig.model_validate(
        {
            "host": "127.0.0.1", "port": closed_port, "certificates": str(certificates), "state": str(tmp_path / "s"),
            "upstream": {**above, "server": f"localhost:{port if there else closed_port}"},
        }
    )  # fmt: skip
    found = {check.name: check for check in preflight.check_server(config, NOW)}
    upstream = ["upstream CA", "node key", "server", *(["TLS", "clock"] if there else [])]
    assert [name for name in found if name in upstream] == upstream
    assert [name for name, check in found.items() if not check.ok] == ([] if there else ["server"])
