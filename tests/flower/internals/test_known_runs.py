"""What SuperNodes ask of a run when they hear of it: read once for all, and what Flower says of it."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.common.constant import NOOP_FLWR_AID, SubStatus
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab

from fedsync.config.gate import GateConfig
from fedsync.flower.internals import access_middleware, versions
from fedsync.flower.internals.known_runs import KNOWN_S, KnownRuns
from tests.flower.internals.superlink import Silo, SuperLink, refused, serving

pytestmark = pytest.mark.skipif(not versions.supported(), reason="this flwr is not a tested version")

CONTENT = b"an app"
READS = ("get_run_info", "get_run_status", "get_fab")


class Clock:
    """Seconds, as the test says."""

    now_s = 1e6

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(access_middleware, "KnownRuns", lambda state: KnownRuns(state, clock))
    return clock


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> Iterator[SuperLink]:
    with serving(monkeypatch, GateConfig(), tmp_path / "state.db") as link:
        state = link.state
        digest = state.store_fab(Fab(hashlib.sha256(CONTENT).hexdigest(), CONTENT, {}))
        federation = state.federation_manager.get_federations(NOOP_FLWR_AID)[0]
        told: Any = ("f/a", "1", digest, {"rounds": 3}, federation.id, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        link.run = state.create_run(*told)
        (task,) = state.get_tasks(run_ids=[link.run])
        state.claim_task(task.task_id)
        assert state.activate_task(task.task_id)
        yield link


@pytest.fixture
def reads(link: SuperLink, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the database is read for what."""
    found = Counter[str]()
    for name in READS:
        monkeypatch.setattr(link.state, name, _counted(found, name, getattr(link.state, name)))
    return found


def _counted(found: Counter[str], name: str, read: Any) -> Any:
    def counted(*arguments: Any, **options: Any) -> Any:
        found[name] += 1
        return read(*arguments, **options)

    return counted


def run_of(silo: Silo, run: int | None = None) -> Any:
    return silo.client.GetRun(GetRunRequest(node=silo.node, run_id=run or silo.link.run)).run


def app_of(silo: Silo, digest: str) -> bytes:
    asked = GetFabRequest(node=silo.node, hash_str=digest, run_id=silo.link.run)
    return bytes(silo.client.GetFab(asked).fab.content)


def end(link: SuperLink) -> None:
    (task,) = link.state.get_tasks(run_ids=[link.run])
    assert link.state.finish_task(task.task_id, SubStatus.STOPPED, "")


def test_nodes_that_join_together_have_a_run_read_once(link: SuperLink, reads: Counter[str], clock: Clock) -> None:
    silos = [link.join(f"silo-{number}") for number in range(5)]
    runs = [run_of(silo) for silo in silos]
    assert [app_of(silo, runs[0].fab_hash) for silo in silos] == [CONTENT] * 5
    assert {run.run_id for run in runs} == {link.run}
    assert runs[0].override_config["rounds"].sint64 == 3
    assert reads == dict.fromkeys(READS, 1)
    clock.now_s += KNOWN_S
    run_of(silos[0])
    assert reads == {"get_run_info": 2, "get_run_status": 2, "get_fab": 1}


def test_a_run_is_told_as_flower_tells_it(link: SuperLink, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    known = run_of(link.silo())
    monkeypatch.setattr(access_middleware, "RUN_PATHS", ())
    assert run_of(link.silo()) == known


def test_a_run_that_ended_is_told_as_running_for_a_second_at_most(link: SuperLink, clock: Clock) -> None:
    digest = run_of(link.silo()).fab_hash
    end(link)
    assert run_of(link.silo("paris")).run_id == link.run
    clock.now_s += KNOWN_S
    assert refused(run_of, link.silo("paris")) == refused(app_of, link.silo("paris"), digest) == 403


def test_what_flower_refuses_it_refuses_in_its_own_words(link: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    berlin, paris = link.silo(), link.silo("paris")
    digest = run_of(berlin).fab_hash
    nowhere, others = (lambda: run_of(berlin, 7)), GetRunRequest(node=paris.node, run_id=link.run)
    other_app = GetFabRequest(node=berlin.node, hash_str="0" * 64, run_id=link.run)
    others_app = GetFabRequest(node=Node(node_id=paris.number), hash_str=digest, run_id=link.run)

    def words() -> list[int]:
        client = berlin.client
        return [
            refused(nowhere),
            refused(client.GetRun, others),
            refused(client.GetFab, other_app),
            refused(client.GetFab, others_app),
        ]

    told = words()
    assert told[1] == told[3] == 401
    monkeypatch.setattr(access_middleware, "RUN_PATHS", ())
    assert told == words()


def test_who_asks_for_many_runs_takes_little_memory(link: SuperLink, clock: Clock) -> None:
    known = KnownRuns(lambda: link.state, clock)
    for number in range(1, 100):
        asked = GetRunRequest(node=link.silo().node, run_id=number)
        assert known._answered(access_middleware.RUN_PATHS[0], link.silo().number, asked.SerializeToString()) is None
    assert known._read is not None
    assert len(known._read._known) <= 16
