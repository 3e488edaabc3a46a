"""Commands ``fedsync validate`` and ``fedsync schema``: the errors in a file, and its allowed content."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedsync.common.errors import ConfigError
from fedsync.config.cipher import sealed_metrics
from fedsync.config.cluster import ClusterConfig
from fedsync.config.locate import shipped_folder
from fedsync.config.sections.section import Section
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.config.yaml_file import YamlFile
from fedsync.core.coordinator import Coordinator
from fedsync.observe.run_builder import measuring
from fedsync.observe.terminal import Terminal


def validate(
    file: Annotated[str, typer.Argument(help="Strategy or silo file: a path, or a shipped name.")],
    silos: Annotated[str | None, typer.Option("--silos", help="Silo file that the strategy is to run on.")] = None,
) -> None:
    """Check a strategy, or a silo file for simulations; `fedsync doctor` checks server.yaml and silo.yaml."""
    path = Path(file)
    if path.is_file() and (option := _option_of_start_file(path)):
        problem = "this starts a real " + ("silo" if option == "--silo" else "server")
        raise ConfigError(file, problem, f"Check it with `fedsync doctor {option} {file}`, on its machine")
    shipped = shipped_folder() / "silos" / f"{file}.yaml"
    if _lists_machines(path) if path.is_file() else shipped.is_file():
        if silos is not None:
            raise ConfigError("--silos", f"{file} is a silo file itself", "Name the strategy before --silos")
        cluster = ClusterConfig.load(file)
        Terminal().print(f"{file}: a silo file with {len(cluster.silos)} silos, no errors")
        return
    config = StrategyConfig.load(file)
    config.check_files()
    if silos is not None:
        _check_on(config, ClusterConfig.load(silos))
    # Under sealed metrics, the inputs of all metrics must fit a header; the task may define these metrics.
    # The coordinator also builds the extensions.
    Coordinator((config if sealed_metrics(config.cipher) is None else measuring(config)).policies())
    Terminal().print(f"{file}: strategy {config.name!r}, no errors")


def _check_on(config: StrategyConfig, cluster: ClusterConfig) -> None:
    config.check_silos([silo.name for silo in cluster.silos])
    config.check_machines({silo.name: silo.speed for silo in cluster.silos})
    config.task.emulated({silo.name: silo.data for silo in cluster.silos})
    if config.privacy is None:
        return
    from fedsync.extras.privacy_plan.private_plan import check_plan, plan_table, planned_spending

    if planned := planned_spending(config, cluster):
        Terminal().print(plan_table(config, cluster, planned))
        for warning in check_plan(config, cluster, planned):
            Terminal().print(f"Warning: {warning}")


def _lists_machines(path: Path) -> bool:
    """Whether a file is a silo file; a strategy may also have ``silos``, but has sections for the work."""
    data = YamlFile.read(path).data
    return "silos" in data and not {"barrier", "balancer", "task"} & data.keys()


def _option_of_start_file(path: Path) -> str | None:
    """Return the option of `fedsync doctor` for a file that starts a real silo or server; None for other files."""
    keys = YamlFile.read(path).data.keys()
    if keys & {"state", "certificates", "node_key"} and not keys & {"barrier", "balancer", "task"}:
        return "--silo" if keys & {"server", "node_key"} else "--server"
    return None


def schema(
    silos: Annotated[bool, typer.Option("--silos", help="Print the schema of silo files for simulations.")] = False,
    server: Annotated[bool, typer.Option("--server", help="Print the schema of server.yaml.")] = False,
    silo: Annotated[bool, typer.Option("--silo", help="Print the schema of silo.yaml.")] = False,
) -> None:
    """Print the JSON Schema of strategy files, for editors."""
    models: dict[type[Section], bool] = {ClusterConfig: silos, ServerStartConfig: server, SiloStartConfig: silo}
    chosen = [model for model, wanted in models.items() if wanted] or [StrategyConfig]
    if len(chosen) > 1:
        raise ConfigError("schema", "several files are chosen", "Choose one")
    sys.stdout.write(json.dumps(chosen[0].model_json_schema(), indent=2) + "\n")
