"""Prometheus exporter: ``/metrics``, computed on request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.common.errors import ConfigError, not_installed
from fedsync.config.sections.strategy_sections import PrometheusConfig
from fedsync.observe.ledger import Ledger

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily


class PrometheusExporter:
    """HTTP server for the newest figures, in a thread of the run's process until the run ends.

    ``url_file``: file that receives the URL of ``/metrics``; deleted at the end. Raises `ConfigError` if
    prometheus_client is not installed, or the port is in use.
    """

    def __init__(self, config: PrometheusConfig, url_file: Path) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise not_installed("export.prometheus", "prometheus_client", "prometheus") from error
        self._ledger: Ledger | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(config.port, config.host, registry)
        except OSError as error:
            place = f"{config.host}:{config.port}"
            problem = f"cannot listen on {place}: {error.strerror}"
            raise ConfigError("export.prometheus", problem, "Choose another port; 0 finds one") from error
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        self._url_file = url_file
        url_file.parent.mkdir(parents=True, exist_ok=True)
        url_file.write_text(self.url + "\n", encoding="utf-8")

    def follow(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._url_file.unlink(missing_ok=True)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the current figures for the registry; called from the HTTP server's thread."""
        from prometheus_client.core import GaugeMetricFamily

        ledger = self._ledger
        if ledger is None:
            return
        whole = (
            ("round", "Commits so far.", len(ledger.rounds)),
            ("seconds", "Seconds since training began, on the run's own clock.", ledger.seconds),
            ("loss", "Mean training loss a sample in the newest commit that has one.", ledger.training_loss),
            ("accuracy", "Accuracy of the newest version that was evaluated.", ledger.accuracy),
            ("bytes_up", "Payload bytes from silos.", ledger.bytes_up),
            ("bytes_down", "Payload bytes to silos.", ledger.bytes_down),
            ("stopped", "1 once the run has stopped.", int(ledger.stopped is not None)),
        )
        for name, text, value in whole:
            if value is not None:
                yield GaugeMetricFamily(f"fedsync_{name}", text, value)
        # A copy, because another thread updates the ledger.
        silos = list(ledger.silos.items())
        for name, text, field in (
            ("working", "1 while an order is in work.", None),
            ("batch_size", "Samples a local step of the newest order.", "batch_size"),
            ("orders", "Orders that ended with an update.", "orders"),
            ("failures", "Orders that ended without one.", "failures"),
            ("samples", "Samples processed.", "samples"),
            ("compute_seconds", "Seconds of training.", "compute_s"),
            ("busy_seconds", "Seconds of ended orders, overhead included.", "busy_s"),
        ):
            family = GaugeMetricFamily(f"fedsync_silo_{name}", text, labels=["silo"])
            for silo, totals in silos:
                family.add_metric([silo], float(totals.order is not None if field is None else getattr(totals, field)))
            yield family
        metrics = GaugeMetricFamily(
            "fedsync_silo_metric", "What a silo reports, pooled over its orders.", labels=["silo", "metric"]
        )
        for silo, totals in silos:
            for name, value in totals.metrics.values().items():
                metrics.add_metric([silo, name], value)
        yield metrics
        pooled = GaugeMetricFamily("fedsync_metric", "What silos report, pooled over all orders.", labels=["metric"])
        for name, value in ledger.metrics.values().items():
            pooled.add_metric([name], value)
        yield pooled
