"""What other programs get of a run."""

from __future__ import annotations

import csv
import logging
import stat
import struct
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.sections.strategy_sections import ExportConfig, PrometheusConfig
from fedsync.core.journal import JournalEntry
from fedsync.extras.exporters.csv_exporter import CsvExporter, tables
from fedsync.extras.exporters.exporter_base import Guarded, open_exporters
from fedsync.observe.ledger import Ledger
from fedsync.observe.recorder import Recorder
from fedsync.observe.rounds import Round, SiloShare
from fedsync.observe.run_builder import RunBuilder
from tests.observe.runs import A_ROUND, METRICS, two_silos
from tests.simulation.fake import strategy


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[JournalEntry]:
    return two_silos(tmp_path_factory.mktemp("run")).entries


def export(config: ExportConfig, out: Path, entries: list[JournalEntry], **run: Any) -> Ledger:
    exporters, ledger = open_exporters(config, out, run), Ledger()
    for entry in entries:
        ledger.add(entry)
        for exporter in exporters:
            exporter.follow(ledger)
    for exporter in [*exporters, *exporters]:
        exporter.close()
    return ledger


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_tables_have_a_row_a_round_and_a_row_a_silo_and_round(tmp_path: Path, entries: list[JournalEntry]) -> None:
    """The silos say that 20 of 40 are right, with a loss of 40 in all; a waits 1.5 s for b."""
    export(ExportConfig(csv=True), tmp_path, entries)
    rounds, silos = rows(tmp_path / "rounds.csv"), rows(tmp_path / "rounds-silos.csv")
    assert [(row["round"], row["at_s"], row["accuracy"], row["test_loss"]) for row in rounds] == [
        ("1", "2.5", "0.5", "1.0"),
        ("2", "5.0", "0.5", "1.0"),
        ("3", "7.5", "0.5", "1.0"),
    ]
    assert {(row["slowest"], row["silos"], row["samples"]) for row in rounds} == {("b", "2", "200")}
    times = [(row["silo"], row["compute_s"], row["overhead_s"], row["wait_s"]) for row in silos]
    assert times == [("a", "1.0", "0.0", "1.5"), ("b", "2.0", "0.5", "0.0")] * 3
    found = [(row["silo"], row["metric"], float(row["value"])) for row in rows(tmp_path / "rounds-metrics.csv")]
    expected = [(silo, *metric) for silo, metrics in {"": A_ROUND, **METRICS}.items() for metric in metrics.items()]
    assert found == expected * 3


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1", "-2+3", "@SUM(A1)", "\tx", "\rx"])
def test_no_name_of_a_silos_is_a_formula_to_a_spreadsheet(name: str, tmp_path: Path) -> None:
    exporter = CsvExporter(tmp_path / "r.csv")
    figures = {name: -1.5}
    exporter._write(Round(1, 2.0, 2.0, 0.5, {name: SiloShare(8, 1, 8, 1.0, 0.0, 0.0, figures)}, metrics=figures))
    exporter.close()
    for table in tables(tmp_path / "r.csv"):
        for row in rows(table):
            texts = [cell for cell in row.values() if cell.lstrip("'") == name]
            assert texts and all(cell.startswith("'") for cell in texts)
    assert rows(tmp_path / "r-metrics.csv")[0]["value"] == "-1.5", "a number stays one"


def test_a_folder_is_no_table() -> None:
    with pytest.raises(ConfigError, match=r"^\.: this is a folder\. Name a file"):
        CsvExporter(Path())


def test_what_silos_said_is_for_the_owner_of_the_run_alone(tmp_path: Path) -> None:
    run = two_silos(tmp_path / "run")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    export(ExportConfig(csv=True), tmp_path / "run", run.entries)
    csv_tables = ("rounds.csv", "rounds-silos.csv", "rounds-metrics.csv")
    for name in ("journal.jsonl", "rounds.jsonl", "summary.json", *csv_tables):
        assert stat.S_IMODE((tmp_path / "run" / name).stat().st_mode) == 0o600, name


def scalars(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Of an event file: records of a length (8 bytes), its checksum (4), a message and its checksum (4)."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    (path,) = folder.glob("events.out.tfevents.*")
    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length
        for value in event.summary.value:
            yield value.tag, event.step, event.wall_time if value.tag == "round/seconds" else value.simple_value


def test_tensorboard_gets_scalars_at_the_runs_own_times(tmp_path: Path, entries: list[JournalEntry]) -> None:
    pytest.importorskip("tensorboardX")
    export(ExportConfig(tensorboard="board"), tmp_path, entries)
    seen = set(scalars(tmp_path / "board"))
    assert {("round/seconds", 1, 2.5), ("round/seconds", 2, 5.0), ("round/seconds", 3, 7.5)} <= seen
    assert {("test/accuracy", number, 0.5) for number in (1, 2, 3)} <= seen
    assert {("wait_s/a", 1, 1.5), ("wait_s/b", 1, 0.0), ("batch_size/a", 3, 25.0)} <= seen
    assert {("round/energy_j", 1, 8.0), ("energy_j/a", 3, 2.0), ("energy_j/b", 3, 6.0)} <= seen


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """MLflow's client, which keeps its calls; metrics and parameters are tuples."""
    client = Mock(**{"get_experiment_by_name.return_value": None, "create_experiment.return_value": "7"})
    client.create_run.return_value.info.run_id = "r1"

    def connected(tracking_uri: str) -> Mock:
        if tracking_uri != "http://tracker":
            raise ConnectionError("nobody there")
        return client

    def values(*given: object) -> tuple[object, ...]:
        return given

    monkeypatch.setitem(sys.modules, "mlflow", Mock(MlflowClient=connected))
    monkeypatch.setitem(sys.modules, "mlflow.entities", Mock(Metric=values, Param=values))
    return client


def test_mlflow_gets_parameters_metrics_and_an_end(tmp_path: Path, entries: list[JournalEntry], mlflow: Mock) -> None:
    config = ExportConfig(mlflow="http://tracker")
    export(config, tmp_path, entries, name="mine", stop={"rounds": 3, "seconds": None}, runtime="virtual")
    assert mlflow.create_run.call_args == call("7", run_name="mine")
    sent = [each.kwargs for each in mlflow.log_batch.call_args_list]
    parameters, metrics = ([one for each in sent for one in each.get(part, ())] for part in ("params", "metrics"))
    assert parameters == [("name", "mine"), ("stop.rounds", "3"), ("runtime", "virtual")]
    assert {("accuracy", 0.5, 2500, 1), ("wait_s/a", 1.5, 7500, 3)} <= set(metrics)
    assert {("energy_j", 8.0, 2500, 1), ("energy_j/b", 6.0, 7500, 3)} <= set(metrics)
    assert mlflow.set_terminated.call_args_list == [call("r1", "FINISHED")], "once, though it is closed twice"


def test_mlflow_learns_of_a_run_that_failed_and_a_tracking_server_that_is_down_is_found_before_the_run(
    tmp_path: Path, entries: list[JournalEntry], mlflow: Mock
) -> None:
    export(ExportConfig(mlflow="http://tracker"), tmp_path, entries[:-1], name="mine")
    assert mlflow.set_terminated.call_args_list == [call("r1", "FAILED")]
    with pytest.raises(ConfigError, match="nobody there"):
        open_exporters(ExportConfig(mlflow="http://down"), tmp_path, {})


def test_real_mlflow_takes_a_run(tmp_path: Path, entries: list[JournalEntry]) -> None:
    """With the real library, where it is installed; it makes a database, which takes seconds."""
    real = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    export(ExportConfig(mlflow=uri), tmp_path, entries, name="mine")
    client = real.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("fedsync").experiment_id])
    assert run.data.metrics["accuracy"] == 0.5
    assert run.info.status == "FINISHED"


def test_prometheus_is_served_on_loopback_while_the_run_goes_on(tmp_path: Path, entries: list[JournalEntry]) -> None:
    """After the second commit; by then a has trained for 2 s, and both are at work again."""
    pytest.importorskip("prometheus_client")
    config = ExportConfig(prometheus=PrometheusConfig(port=0))
    (exporter,), ledger = open_exporters(config, tmp_path, {}), Ledger()
    url = (tmp_path / "metrics.url").read_text().strip()
    assert url.startswith("http://127.0.0.1:")
    assert lines(url) == {}
    for entry in entries:
        ledger.add(entry)
        exporter.follow(ledger)
        if len(ledger.rounds) == 2:
            break
    assert (
        lines(url).items()
        >= {
            "fedsync_round": 2.0,
            "fedsync_seconds": 5.0,
            "fedsync_accuracy": 0.5,
            'fedsync_silo_compute_seconds{silo="a"}': 2.0,
            'fedsync_silo_working{silo="b"}': 1.0,
            'fedsync_silo_metric{metric="energy_j",silo="a"}': 4.0,
            'fedsync_metric{metric="energy_j"}': 16.0,
        }.items()
    )
    exporter.close()
    assert not (tmp_path / "metrics.url").exists()
    with pytest.raises(OSError, match="refused"):
        lines(url)


def lines(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_a_port_that_is_taken_is_found_before_the_run_and_the_rest_is_closed(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    (first,) = open_exporters(ExportConfig(prometheus=PrometheusConfig(port=0)), tmp_path / "first", {})
    port = int((tmp_path / "first" / "metrics.url").read_text().split(":")[2].split("/")[0])
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "rounds.csv").write_text("of the run before")
    with pytest.raises(ConfigError, match="Choose another port"):
        open_exporters(ExportConfig(csv=True, prometheus=PrometheusConfig(port=port)), tmp_path / "second", {})
    assert (tmp_path / "second" / "rounds.csv").read_text() == "of the run before"
    first.close()


@pytest.mark.parametrize(
    ("module", "config"),
    [
        ("tensorboardX", ExportConfig(tensorboard="x")),
        ("mlflow", ExportConfig(mlflow="x")),
        ("prometheus_client", ExportConfig(prometheus=PrometheusConfig())),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, config: ExportConfig
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r'pip install .*"\.\[\w+\]"'):
        open_exporters(config, tmp_path, {})


def test_an_exporter_that_fails_is_dropped_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    broken = Mock(**{"follow.side_effect": [None, OSError("no space left")]})
    guarded = Guarded("csv", broken)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            guarded.follow(Ledger())
        guarded.close()
    assert broken.follow.call_count == 2 and not broken.close.called
    assert [record.getMessage() for record in caplog.records] == [
        "export.csv failed and is off for the rest of the run: OSError('no space left')"
    ]


def test_a_recorder_tells_its_exporters_and_closes_them(tmp_path: Path, entries: list[JournalEntry]) -> None:
    exporter, config = Mock(), {"name": "x", "seed": 3}
    recorder = Recorder(tmp_path, runtime="virtual", config=config, silos=None, model_bytes=12, exporters=[exporter])
    for entry in entries:
        recorder.record(entry)
    recorder.finish()
    assert (exporter.follow.call_count, exporter.close.call_count) == (len(entries), 1)


def test_without_a_section_no_exporter_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedsync.extras.exporters.exporter_base", None)
    RunBuilder(strategy(), None, tmp_path, "virtual").recorder(12).close()
    with pytest.raises(ImportError, match="exporter_base"):
        RunBuilder(strategy(export={"csv": True}), None, tmp_path, "virtual").recorder(12)
