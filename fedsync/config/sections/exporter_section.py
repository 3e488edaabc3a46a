"""Where else a run's figures go while it goes on."""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from fedsync.config.sections.section import Section


class PrometheusConfig(Section):
    """Serve ``/metrics`` from the server's process while the run goes on."""

    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Where ``/metrics`` is served; 0 takes a free port, which ``metrics.url`` in the run's folder names."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on. Whoever reaches it can read the figures: they are neither encrypted nor protected by a
    password."""


class ExportConfig(Section):
    """Where else a run's figures go."""

    csv: bool = False
    """Write rounds.csv, rounds-silos.csv and rounds-metrics.csv into the run's folder."""

    tensorboard: Annotated[str, Field(min_length=1)] | None = None
    """Folder for TensorBoard, relative to the run's."""

    mlflow: Annotated[str, Field(min_length=1)] | None = None
    """Tracking URI of MLflow, without a user name or password."""

    prometheus: PrometheusConfig | None = None
    """Serve the figures for Prometheus."""

    @model_validator(mode="after")
    def _no_secret(self) -> Self:
        """A run's folder repeats its configuration, and folders of runs are shown around."""
        if self.mlflow is not None and "@" in urlsplit(self.mlflow).netloc:
            raise ValueError(
                "export.mlflow has a user name or a password in it; leave them out, and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where the server runs"
            )
        return self
