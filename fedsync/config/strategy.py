"""Strategy file: all settings of a run except its silos, as a checked object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from fedsync.common.errors import ConfigError
from fedsync.common.names import near_miss
from fedsync.common.sandbox.named_code import is_module
from fedsync.config.cipher import CipherConfig, MaskedConfig, PlainConfig, least_silos, sealed_metrics, with_members
from fedsync.config.compatibility import check_together, too_few
from fedsync.config.locate import beside, locate
from fedsync.config.sections.evaluation import TOLD, unreachable
from fedsync.config.sections.strategy_sections import StrategySections
from fedsync.config.yaml_file import YamlFile
from fedsync.core.extension import Extension
from fedsync.core.orders import LocalWork
from fedsync.core.state import Policies
from fedsync.policies.balance.balancer_base import FixedBalancer
from fedsync.policies.barrier.wrappers.default_wrappers import MinimumSilos, OpenableSums, Resting
from fedsync.policies.rounds.settings_by_round import RoundHook
from fedsync.policies.schema import Policy
from fedsync.tasks.task_section import BY_NAME


class StrategyConfig(StrategySections):
    """Strategy of one run."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names, stop, scored = self.silos or [], self.stop, self.fraction_evaluate
        goal = stop.target.at_least if stop.target is not None and stop.target.metric == "accuracy" else None
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"silos names {twice!r} twice; name each silo once")
        if names and (self.min_silos or 0) > len(names):
            raise ValueError(f"min_silos {self.min_silos} of {len(names)} silos can never join; lower it, or name more")
        if names and (found := too_few(self, len(names), "silos")):
            key, problem, remedy = found
            raise ValueError(f"{key} {problem}; {remedy}")
        for key, aim in (("target_accuracy", stop.target_accuracy), ("target", goal)):
            if aim is not None and (wrong := unreachable(aim, self.task)):
                raise ValueError(f"stop.{key} {wrong[0]}; {wrong[1]}")
        if scored == 0 and stop.by_score:
            raise ValueError("fraction_evaluate 0 gives no scores for stop's target and patience; write 1.0")
        if self.evaluation.cross_site is not None:
            self.evaluation.cross_site.check(self.cipher, scored, given=self.initial_model is not None)
        if scored < 1 and (isinstance(self.cipher, MaskedConfig) or sealed_metrics(self.cipher) is not None):
            raise ValueError(
                f"fraction_evaluate {scored:g}: sealed metrics and masks need evaluations of all silos of a round, "
                "otherwise no evaluation can be decrypted; write 1.0"
            )
        if scored == 0 and not isinstance(self.cipher, PlainConfig):
            raise ValueError(
                "fraction_evaluate 0: under encryption only silos have the model, and they receive the last version "
                "only to evaluate it; write 0.1"
            )
        check_together(self)
        return self

    @classmethod
    def load(cls, name: str | Path, overrides: Sequence[str] = ()) -> StrategyConfig:
        """Read a strategy file.

        A path inside ``task`` is relative to the file if it exists there; otherwise to the working folder of a silo.

        Args:
            name: path of a file, or name of a shipped strategy.
            overrides: ``a.b=value`` assignments.

        Raises:
            ConfigError: the file is invalid; the error names the place and the remedy.
        """
        path = locate(name)
        file = YamlFile.read(path)
        file.override(overrides)
        if isinstance(plugin := file.data.get("plugin"), str) and not is_module(plugin):
            file.data["plugin"] = str(beside(path, plugin, f"{name}, plugin"))
        if isinstance(model := file.data.get("initial_model"), str):
            here = beside(path, model, f"{name}, initial_model")
            file.data["initial_model"] = str(here if here.exists() else Path(model).resolve())
        config = file.validate(cls)

        def relocated(relative: str) -> str:
            candidate = beside(path, relative, f"{name}, task")
            return str(candidate) if candidate.exists() else relative

        return config.model_copy(update={"task": config.task.relocated(relocated)})

    def with_policies(self, policies: Mapping[str, Policy]) -> StrategyConfig:
        """Return a copy in which ready policies, registered or not, replace those of their sections. Raises
        `ConfigError` if a policy does not belong in its section, or does not fit the other sections.
        """
        known = ("predictor", "balancer", "barrier", "aggregation", "server_optimizer", "on_round")
        for section, policy in policies.items():
            if section not in known:
                raise ConfigError(f"policies[{section!r}]", "there is no such section", near_miss(section, known))
            if not isinstance(policy, Policy) or policy.section != section:
                problem = f"{type(policy).__name__} is no {section} policy"
                base = section.title().replace("_", "")
                raise ConfigError(f"policies[{section!r}]", problem, f"Subclass fedsync.{base}Policy")
        return self._with("policies", policies, "Choose policies that fit the strategy")

    def told(self, train: Mapping[str, Any], evaluate: Mapping[str, Any]) -> StrategyConfig:
        told = self._with("train_config", {"train_config": {**self.train_config, **train}})
        return told._with("evaluate_config", {"evaluate_config": {**self.evaluate_config, **evaluate}})

    def stopping(self, rules: Mapping[str, float]) -> StrategyConfig:
        """Copy with the stop rules in ``rules`` replaced; raises `ConfigError` if one is invalid for this task."""
        return self._with("stop", {"stop": {**self.stop.model_dump(exclude_unset=True), **rules}})

    def _with(self, place: str, sections: Mapping[str, Any], remedy: str = "Change it") -> StrategyConfig:
        try:
            return self.model_validate({**{name: getattr(self, name) for name in self.model_fields_set}, **sections})
        except ValidationError as error:
            problem, _, better = error.errors()[0]["msg"].removeprefix("Value error, ").splitlines()[0].partition("; ")
            raise ConfigError(place, problem, better[:1].upper() + better[1:] or remedy) from None

    @property
    def report_s(self) -> float | None:
        return self.barrier.innermost.needs_progress

    def check_silos(self, names: Sequence[str], file: str = "the silo file") -> None:
        """Raise `ConfigError` if the strategy cannot run with silos of these ``names``, which ``file`` gives: a name is
        not listed in ``silos``, a listed silo is not available, or silos are too few.
        """
        for name in names:
            if self.silos is not None and name not in self.silos:
                remedy = near_miss(name, self.silos) + "; or leave `silos` out"
                raise ConfigError("silos", f"{file} has {name!r}, which is not listed", remedy)
        for name in self.silos or ():
            if name not in names and self.min_silos is None:
                remedy = near_miss(name, names) + ". Or write min_silos, to begin without it"
                raise ConfigError("silos", f"{name!r} is listed, and {file} does not have it", remedy)
        for name in self.balancer.named:
            if name not in names:
                raise ConfigError("balancer", f"{name!r} is named, and {file} does not have it", near_miss(name, names))
        if problem := too_few(self, len(set(names)), file):
            raise ConfigError(*problem)

    def check_files(self) -> None:
        """Raise `ConfigError` if a relative path of the task, which is no silo's, or the initial model is missing."""
        missing: list[str] = []

        def noted(path: str) -> str:
            if not (Path(path).is_absolute() or path.startswith(BY_NAME) or path in missing):
                missing.append(path)
            return path

        self.task.relocated(noted)
        errors = [
            ConfigError("task", f"{path} does not exist", "Correct the path; it is relative to the strategy file")
            for path in missing
        ]
        if self.initial_model is not None and not Path(self.initial_model).is_file():
            problem = f"{self.initial_model} is no file"
            errors.append(ConfigError("initial_model", problem, "Name a model.pt of an earlier run"))
        if errors:
            errors[0].others = tuple(errors[1:])
            raise errors[0]

    def check_target(self, target: float | None) -> None:
        if target is not None and (wrong := unreachable(target, self.task)):
            raise ConfigError("--target-accuracy", wrong[0], wrong[1].capitalize())

    def quorum(self, silos: int | None = None) -> int:
        """Number of silos that must join before the run begins; ``silos`` of the silo file are present at the start."""
        return self.min_silos or silos or self.shares

    def settled(self, silos: int | None = None) -> CipherConfig:
        """Cipher section with the minimum number of updates in a version filled in; ``silos`` as for `quorum`."""
        there = self.quorum(silos)
        return with_members(self.cipher, self.barrier.least_updates(there))

    @property
    def work_ratio(self) -> float | None:
        """Largest ratio between the work of two silos; None if unbounded. If silos do unequal steps and are weighed by
        samples, the size of an update grows with both, and the limit is the square root of ``cipher.work_ratio``.
        """
        if not isinstance(self.cipher, MaskedConfig):
            return None
        weighting = self.aggregation.weigher(self.solver).weighting
        squared = weighting is not None and weighting.by == "samples" and self._unequal_steps
        return sqrt(self.cipher.work_ratio) if squared else self.cipher.work_ratio

    @property
    def _unequal_steps(self) -> bool:
        return self.balancer.scales_steps or self.barrier.innermost.unequal_steps

    def check_machines(self, speeds: Mapping[str, float]) -> None:
        """Raise `ConfigError` if two ``speeds`` [samples/s] differ too much for masks to hide the fast silo's work."""
        balanced = not isinstance(self.balancer, FixedBalancer) or self._unequal_steps
        if self.work_ratio is None or not balanced or not speeds:
            return
        slow, fast = min(speeds, key=speeds.__getitem__), max(speeds, key=speeds.__getitem__)
        ratio = speeds[fast] / speeds[slow]
        if ratio > self.work_ratio:
            problem = (
                f"{fast} is {ratio:.3g} times as fast as {slow}, and silos decrypt no sum in which one update has "
                f"more than {self.work_ratio:g} times the work of another (cipher.work_ratio)"
            )
            remedy = "Give all the same work with balancer: {kind: fixed} and barrier: {kind: bsp}, leave the slow "
            raise ConfigError("cipher.work_ratio", problem, f"{remedy}silo out, or raise work_ratio if owners allow it")

    @property
    def shares(self) -> int:
        return len(self.silos or ()) or self.min_silos or 2

    def policies(self, silos: int | None = None) -> Policies:
        local, sealed, evaluation = self.local, sealed_metrics(self.cipher), self.evaluation
        compared, quorum, least = evaluation.cross_site, self.quorum(silos), least_silos(self.settled(silos))
        if evaluation.metrics or self.stop.by_metric or evaluation.best.metric not in TOLD:
            evaluation = evaluation.of_task(self.task)
        metrics = evaluation.built(self.task)
        if sealed is not None:
            from fedsync.cipher.plan import check_sums

            check_sums(metrics)
        extensions: list[Callable[[], Extension | None]] = [each.followed for each in self.extensions or ()]
        if self.on_round is not None:
            extensions.append(partial(RoundHook, self.on_round, self.local.learning_rate))
        sizing = self.balancer.sizing(LocalWork(local.steps, local.batch_size, local.learning_rate))
        weigher = self.aggregation.weigher(self.solver)
        by_samples = weigher.weighting is not None and weigher.weighting.by == "samples"
        noise = sizing.noise if self.barrier.innermost.waits_for_all and not by_samples else 0.0
        return Policies(
            seed=self.seed,
            predictor=self.predictor,
            predicts=sizing.balances or self.barrier.needs_forecasts or self.predictor.learns,
            sizing=replace(sizing, within=self.work_ratio, noise=noise),
            barrier=MinimumSilos(Resting(self.barrier if least == 1 else OpenableSums(self.barrier, least)), quorum),
            weigher=weigher,
            stop=self.stop.build(metrics),
            declared_speeds=self.balancer.declared,
            tally=0 if sealed is None else sealed.limit,
            evaluate=self.fraction_evaluate,
            metrics=metrics,
            selection=evaluation.best.build(metrics),
            cross_site=None if compared is None else compared.build(share=isinstance(self.cipher, PlainConfig)),
            controls=self.controlled,
            least=least,
            extensions=tuple(extensions),
        )
