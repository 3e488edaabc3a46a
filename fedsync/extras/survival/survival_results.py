"""Results of survival analysis, from the pooled sums that a run has stored at the server or at a silo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.config.tasks.survival_task import SurveyConfig
from fedsync.extras.survival.survival_estimates import told
from fedsync.extras.survival.survival_sums import SurvivalForm, read_survival
from fedsync.model.layout import Vector
from fedsync.silo.owner.model_export import MODEL, kept_runs, kept_state
from fedsync.silo.owner.owner_policy import act_for_owner
from fedsync.silo.protocol import STATE_FOLDER, Identity
from fedsync.tasks.task_section import TaskSection


def result_of_run(folder: Path) -> dict[str, Any]:
    """Return the publishable result of a run in ``folder``, as `told`. Raises `ConfigError` if the folder has no
    survival analysis, or its sums allow no result.
    """
    from fedsync.train.weights import load_model

    if not (folder / "config.yaml").is_file():
        raise ConfigError(str(folder), "no run: config.yaml is not there", "Name the folder of a run")
    config, silos = StrategyConfig.load(folder / "config.yaml"), folder / "silos.yaml"
    form = _form(config.task, len(ClusterConfig.load(silos).silos) if silos.is_file() else config.shares, str(folder))
    if not (folder / MODEL).is_file():
        remedy = "Of an encrypted run, the silos have the result: fedsync survival --silo silo.yaml"
        raise ConfigError(str(folder), "the run has no sums here", remedy)
    return _told(form, load_model(folder / MODEL, form.layout, set(form.layout.names)))


def result_here(file: Path, run: str | None = None) -> dict[str, Any]:
    """Return the publishable result of an encrypted run that a real silo took part in, by default of the newest run.
    Raises `ConfigError` if the silo has no sums of such a run, or they allow no result, and `RunError` if the silo's
    copy of the sums is damaged.
    """
    config = SiloStartConfig.load(file)
    for kept in kept_runs(Path(config.state) / STATE_FOLDER):
        spec = RunSpec.parse(kept.text.spec)
        if isinstance(spec.task, SurveyConfig) and spec.task.survival is not None and run in (None, kept.name):
            owner = act_for_owner(config, Identity.load(kept.copies[0].parent))
            checked = owner.checked(spec, config.index)
            form = _form(checked.task, spec.silos, kept.name)
            return _told(form, kept_state(kept.copies, checked, form.layout)[1].model)
    problem = f"no encrypted run of survival analysis has left sums in {config.state}"
    raise ConfigError("fedsync survival", problem, "The server has the result of an unencrypted run")


def _form(task: TaskSection, silos: int, place: str) -> SurvivalForm:
    if not isinstance(task, SurveyConfig) or task.survival is None:
        raise ConfigError(place, "the run is no survival analysis", "Write task: {kind: survey, survival: ...}")
    return task.survival.form(task.of, silos)


def _told(form: SurvivalForm, vector: Vector) -> dict[str, Any]:
    sums = read_survival(form, vector)
    if sums is None:
        raise ConfigError("task.survival", "no silo has sent its sums", "Begin another run")
    return told(form, sums)
