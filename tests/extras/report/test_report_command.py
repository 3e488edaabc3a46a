"""``fedsync report``, and what shows a run in the terminal or as tables, on the folder of a run."""

from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from tests.commands.call import call
from tests.observe.runs import two_silos


@pytest.mark.usefixtures("undrawn")
def test_a_report_of_several_is_here_and_may_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x", "y"):
        two_silos(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    shown: list[str] = []
    monkeypatch.setattr("typer.launch", shown.append)
    call("report", "x", "y", "--open")
    assert "<title>Comparison of x, y" in (tmp_path / "report.html").read_text()
    assert shown == [(tmp_path / "report.html").as_uri()]


def test_a_file_that_cannot_be_written_is_refused_before_the_runs_are_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        call("report", tmp_path / "none", "--out", tmp_path / "nowhere" / "x.html")
    with pytest.raises(ConfigError, match=r"^--out: .* is a folder\. Name a file in it"):
        call("report", tmp_path / "none", "--out", tmp_path)


def test_watch_shows_how_a_run_ended(tmp_path: Path) -> None:
    two_silos(tmp_path)
    assert "stopped: 3 rounds done" in " ".join(call("watch", tmp_path).split())


def test_export_writes_what_it_is_asked_for(tmp_path: Path) -> None:
    two_silos(tmp_path / "run")
    call("export", tmp_path / "run", "--csv", tmp_path / "x.csv")
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 1 + 3
    assert len((tmp_path / "x-silos.csv").read_text().splitlines()) == 1 + 6
    with pytest.raises(ConfigError, match="nowhere to write"):
        call("export", tmp_path / "run")
    with pytest.raises(ConfigError, match="no run"):
        call("export", tmp_path, "--csv", tmp_path / "x.csv")
    with pytest.raises(ConfigError, match="Name a file"):
        call("export", tmp_path / "run", "--csv", tmp_path / "no" / "x.csv")
