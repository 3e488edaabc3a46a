"""Summary of a run's requests, which a silo's owner reads before approval or refusal.

The trainer's own parser reads the waiting specification. The summary omits and truncates nothing: fields without a
special line are shown verbatim, and a run with values too long to read is refused. One line gives the number of fields,
so that the owner notices lines that scrolled away. Text from the server is printed as JSON, without terminal commands.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.common.files import file_digest
from fedsync.common.sandbox.confirmed_code import code_below
from fedsync.config.cipher import PlainConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.section import Section
from fedsync.config.silo_start import SiloStartConfig
from fedsync.silo.owner.approvals import AskedRun, leaves, with_code
from fedsync.silo.owner.owner_policy import OwnerPolicy

_NAME = 12
_TOLD = {"task", "evaluation", "cipher", "local", "stop", "admitted", "silos", "quorum", "run", "survey"}


def summary(run: AskedRun, config: SiloStartConfig, code: Mapping[str, str] | None = None) -> list[str]:
    """Return the lines about a waiting run; the first line has the digest that identifies the run."""
    told = [("since", run.since), ("who asks", _who(config))]
    try:
        told += _of_spec(RunSpec.parse(run.spec), config)
    except ProtocolError:
        told.append(("unreadable", "no trainer would run it; refuse it"))
    if run.run_config != "{}":
        told.append(("settings", _shown(run.run_config)))
    told.append(("fields", f"the run sets {_fields(run)}, all of which are shown above; the rest is as FedSync has it"))
    if code is None:
        code, problem = code_or_problem(run, config)
        told += [("code", f"cannot be approved: {problem}")] if problem else []
    told += [("code file", f"{_shown(path)} (SHA-256 {found})") for path, found in code.items()]
    return [f"run {with_code(run.digest, code)}", *(f"  {name:<{_NAME}} {text}" for name, text in told)]


def code_or_problem(run: AskedRun, config: SiloStartConfig) -> tuple[dict[str, str], str]:
    """Return `code_of` or its error as text, so that one bad run does not prevent listing and refusing runs."""
    try:
        return code_of(run, config), ""
    except ConfigError as error:
        return {}, str(error)


def code_of(run: AskedRun, config: SiloStartConfig) -> dict[str, str]:
    """Return the SHA-256 of a run's code by absolute path: its files, and all files importable from their folders.
    Raises `ConfigError` if there is too much code, or a file cannot be read.
    """
    found: list[Path] = []

    def note(path: str) -> str:
        found.append(Path(path))
        return path

    if config.code == "shipped":
        return {}
    with suppress(ConfigError, ProtocolError):  # the trainer refuses such a run with a reason
        OwnerPolicy.of(config).checked(RunSpec.parse(run.spec), config.index).task.relocated(note)
    files = [path for path in found if path.suffix == ".py" and path.is_file()]
    roots = {file.parent for file in files}
    roots |= {path for path in found if path.is_dir() and any(file.is_relative_to(path) for file in files)}
    return {str(root / name): digest for root in sorted(roots) for name, digest in code_below(root).items()}


def _who(config: SiloStartConfig) -> str:
    if config.authority is None:
        return f"{config.server}, without TLS: whoever answers there"
    return f"{config.server}, by a certificate of {config.authority} (SHA-256 {file_digest(Path(config.authority))})"


def _of_spec(spec: RunSpec, config: SiloStartConfig) -> Iterator[tuple[str, str]]:
    yield "name", _shown(spec.run) + (f", which began as {_shown(spec.began)}" if spec.began else "")
    yield "task", _shown(spec.model_dump(mode="json", include={"task"}, exclude_defaults=True)["task"])
    yield "reads", ", ".join(_paths(spec, config)) or "no file"
    whose = "FedSync's, as installed here" if config.code != "shipped" else "whatever client the server sends"
    yield "code", f"{whose}; files of code are shown below, and your yes is for them as they are"
    yield "metrics", _section(spec.evaluation)
    sealed = not isinstance(spec.cipher, PlainConfig)
    plain = "none: the server reads every update and every figure"
    yield "encryption", _section(spec.cipher, defaults=True) if sealed else plain
    local = spec.local
    yield (
        "training",
        (f"{local.steps} steps of {local.batch_size} samples at a rate of {local.learning_rate}; {_section(local)}"),
    )
    yield "your limits", _section(config.limits, defaults=True)
    yield "ends", "the server does not say" if spec.stop is None else _section(spec.stop)
    members = ", ".join(map(_shown, spec.admitted)) or "whoever the server has registered"
    yield "members", f"{members}; {spec.silos} shares of data, versions of {spec.quorum} updates"
    if spec.survey is not None:
        sums = spec.survey.sums
        found = f"sums of {len(sums)} characters (SHA-256 {hashlib.sha256(sums.encode()).hexdigest()})"
        yield "survey", f"{_shown(spec.survey.columns)}; {found}; {_shown(spec.survey.spec)}"
    for name, field in RunSpec.model_fields.items():
        value = getattr(spec, name)
        if name not in _TOLD and name != "began" and value != field.get_default(call_default_factory=True):
            yield name, _section(value) if isinstance(value, Section) else _shown(value)


def _paths(spec: RunSpec, config: SiloStartConfig) -> list[str]:
    """Return the paths that a task may read; Python files in the owner's folders with their current SHA-256."""
    found: list[str] = []

    def note(path: str) -> str:
        here = Path(path).resolve()
        inside = here.is_file() and any(here.is_relative_to(folder) for folder in config.paths)
        code = f" (SHA-256 {file_digest(here)})" if inside and here.suffix == ".py" else ""
        found.append(f"{_shown(path)}{code}")
        return path

    task = spec.task
    with suppress(ConfigError):  # the trainer reports the error
        task = task.own(config.index, spec.silos)
    task.relocated(note)
    return found


def _fields(run: AskedRun) -> int:
    try:
        said = RunSpec.parse(run.spec).model_dump(mode="json", exclude_defaults=True)
        return sum(1 for each in (said, json.loads(run.run_config)) for _ in leaves(each))
    except (ProtocolError, ValueError):
        return 0


def _section(section: Section, *, defaults: bool = False) -> str:
    return _shown(section.model_dump(mode="json", exclude_defaults=not defaults))


def _shown(value: Any) -> str:
    return json.dumps(value.model_dump(mode="json") if isinstance(value, Section) else value, default=str)
