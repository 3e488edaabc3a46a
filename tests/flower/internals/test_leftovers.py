"""A server that goes on for weeks keeps nothing of runs whose server process died, and of each run's log the newest."""

from pathlib import Path

import pytest
from flwr.common.constant import SubStatus

from fedsync.config.gate import GateConfig
from fedsync.flower.internals import leftovers, versions
from tests.flower.internals.superlink import SuperLink, begun, serving

pytestmark = pytest.mark.skipif(not versions.supported(), reason="this flwr is not a tested version")


def left(link: SuperLink) -> tuple[int, int]:
    """Messages and parts in the database."""
    tables = ("message_ins", "objects")
    messages, parts = (link.state.query(f"SELECT count(*) AS n FROM {table}")[0]["n"] for table in tables)
    return messages, parts


def test_what_a_run_left_that_failed_goes_when_another_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, GateConfig(), tmp_path / "link.db") as link:
        for silo in (link.silo("berlin"), link.silo("paris")):
            link.order(silo)
        assert link.silo().pull(), "which is never answered"
        assert left(link)[0] == 2 and left(link)[1] >= 2
        begun(link.state)
        assert left(link)[0] == 2, "that run goes on"
        (task,) = link.state.get_tasks(run_ids=[link.run])
        assert link.state.finish_task(task.task_id, SubStatus.FAILED, "No heartbeat received from the task")
        assert left(link)[0] == 2, "nobody has asked for it since"
        begun(link.state)
        assert left(link) == (0, 0)


def test_a_run_that_goes_on_keeps_its_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, GateConfig(), tmp_path / "link.db") as link:
        (task,) = link.state.get_tasks(run_ids=[link.run])
        link.order(link.silo())
        link.run, link.token = begun(link.state)
        link.order(link.silo())
        assert link.state.finish_task(task.task_id, SubStatus.FAILED, "")
        begun(link.state)
        assert left(link)[0] == 1 and len(link.silo().pull()) == 1


def test_of_a_runs_log_the_newest_pieces_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five are kept, which each tenth sees to: of 29 there are the newest five of the first 20, and nine more."""
    monkeypatch.setattr(leftovers, "KEPT_LOGS", 5)
    monkeypatch.setattr(leftovers, "_SELDOM", 10)
    with serving(monkeypatch, GateConfig(), tmp_path / "link.db") as link:
        other, _ = begun(link.state)
        ((task,), (others,)) = (link.state.get_tasks(run_ids=[run]) for run in (link.run, other))
        link.state.add_task_log(others.task_id, "of another run")  # the first piece
        for piece in range(2, 30):
            link.state.add_task_log(task.task_id, f"{piece} ")
        assert link.state.get_task_log(task.task_id, None)[0].split() == [str(piece) for piece in range(16, 30)]
        assert link.state.get_task_log(others.task_id, None)[0] == "of another run"
        with pytest.raises(ValueError, match="not found"):
            link.state.add_task_log(1, "of nobody")
