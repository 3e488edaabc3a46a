"""Configuration of exporters: further targets of a run's metrics."""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from fedsync.config.sections.section import Section


class PrometheusConfig(Section):
    """Endpoint ``/metrics`` for Prometheus in the server's process, available during the run."""

    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Port of ``/metrics``; 0 takes a free port, which is written to ``metrics.url`` in the run's folder."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on. Everyone who can reach the address can read the metrics: there is neither encryption nor a
    password."""


class ExportConfig(Section):
    """Further targets of a run's metrics."""

    csv: bool = False
    """Whether to write rounds.csv, rounds-silos.csv and rounds-metrics.csv into the run's folder."""

    tensorboard: Annotated[str, Field(min_length=1)] | None = None
    """Folder for TensorBoard, relative to the run's folder."""

    mlflow: Annotated[str, Field(min_length=1)] | None = None
    """Tracking URI of MLflow, without a user name or password."""

    prometheus: PrometheusConfig | None = None
    """Prometheus endpoint; left out, there is none."""

    @model_validator(mode="after")
    def _no_secret(self) -> Self:
        """Refuse credentials: the run's folder repeats its configuration, and such folders are shared."""
        if self.mlflow is not None and "@" in urlsplit(self.mlflow).netloc:
            raise ValueError(
                "export.mlflow has a user name or a password in it; leave them out, and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where the server runs"
            )
        return self
