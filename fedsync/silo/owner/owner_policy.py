"""Rules of a real silo's owner for runs: read from silo.yaml, passed in the environment, enforced by the trainer.

The run's specification comes from the server, and so do all settings for encryption and files. The trainer checks them
against these rules. Emulated silos have no owner, so the run's own settings apply there.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fedsync.common.errors import ConfigError, LimitReached, OwnerRefusal, SiloAway
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.common.locks import taken
from fedsync.common.sandbox.path_sandbox import ALLOWED, Fence
from fedsync.config.cipher import PlainConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.presence import PresenceConfig, utc_now
from fedsync.config.sections.privacy import BudgetConfig
from fedsync.config.sections.section import Section
from fedsync.config.silo_start import LimitsConfig, SealConfig, SiloStartConfig
from fedsync.config.tasks.survival_task import SurveyConfig
from fedsync.config.tasks.task_kinds import CsvConfig
from fedsync.core.orders import Presence, WorkOrder
from fedsync.model.layout import matches
from fedsync.silo.owner.app_files import unpacked
from fedsync.silo.owner.approvals import APPROVALS, check_approved
from fedsync.silo.owner.audit_chain import AUDIT, AuditPlace
from fedsync.silo.owner.key_lookup import KEYS, has_keys
from fedsync.silo.owner.privacy_ledger import LEDGERS
from fedsync.silo.protocol import Identity
from fedsync.tasks.task_section import BY_NAME, TaskSection

if TYPE_CHECKING:
    from fedsync.cipher.plan import EncryptionPlan

_MOST_NAMES = 4
_COUNTS = "orders.json"
_AS_GIVEN = (
    *("presence", "limits", "state_bytes", "statistics", "share_local", "emulate", "first_model", "errors"),
    "authority",
)

ALL_DATA = "data"  # name of the budget for all data, where the owner gives no budgets by name


class OwnerPolicy(Section):
    """Rules for runs at a silo; `fedsync.config.silo_start.SiloStartConfig` explains each setting. None leaves the
    choice to the run, or turns off a duty of the silo. Paths are absolute.
    """

    seal: SealConfig | None = None
    data: list[str] | None = None
    """Files and folders that runs may read."""
    named: dict[str, str] = Field(default_factory=dict)
    code_files: list[str] | None = None
    """Code files that runs may name (`fedsync.common.sandbox.named_code`)."""
    reviewers: list[str] | None = None
    never: list[str] = Field(default_factory=list)
    """Files and folders that stay closed, even below the folders in ``data``."""
    presence: PresenceConfig | None = None
    limits: LimitsConfig | None = None
    counts: str | None = None
    state_bytes: int | None = None
    approvals: str | None = None
    audit: AuditPlace | None = None
    statistics: Literal["sealed", "plain"] = "plain"
    share_local: bool | None = None
    emulate: bool = True
    first_model: str | None = "any"
    errors: Literal["codes", "text"] = "codes"
    hub_hosts: list[str] = Field(default_factory=list)
    privacy: dict[str, BudgetConfig] = Field(default_factory=dict)
    """Privacy budgets by the owner's names of the data; a budget under `ALL_DATA` holds for all data."""
    ledgers: str = ""
    authority: str | None = None

    @classmethod
    def of(cls, config: SiloStartConfig) -> OwnerPolicy:
        budgets = config.privacy or {}
        return cls(
            seal=None if config.keys is None else config.seal or SealConfig(),
            data=config.paths,
            named=config.data if isinstance(config.data, dict) else {},
            code_files=None if config.code == "shipped" else config.code_files,
            reviewers=config.reviewers or None,
            never=config.closed(),
            counts=str(Path(config.state) / _COUNTS),
            approvals=str(Path(config.state) / APPROVALS) if config.approve == "ask" else None,
            audit=audit_place(config),
            hub_hosts=config.trusted_hosts,
            privacy={ALL_DATA: budgets} if isinstance(budgets, BudgetConfig) else budgets,
            ledgers=str(Path(config.state) / LEDGERS),
            **{name: getattr(config, name) for name in _AS_GIVEN},
        )

    @classmethod
    def here(cls) -> OwnerPolicy:
        text = os.environ.get(ALLOWED)
        return cls.model_validate_json(text) if text else cls()

    def checked(self, spec: RunSpec, index: int) -> RunSpec:
        """Return the run as the silo ``index`` carries it out, with the paths of its task resolved, and only this
        silo's files.

        Each path must lie in the owner's folders, or be a name that the owner gave to data. A silo without an owner
        resolves paths in the Flower app. Raise `OwnerRefusal` for a closed path, an emulated machine or statistics in
        the clear against the owner's rules.
        """
        if spec.emulate and not self.emulate:
            problem = "the run has silos emulate other machines, and this silo's owner does not allow it"
            raise OwnerRefusal("emulate", problem, "Leave the machines out, or have the owner write emulate: true")
        if isinstance(spec.task, SurveyConfig) and isinstance(spec.cipher, PlainConfig) and self.statistics != "plain":
            problem = "the server requests statistics of columns in the clear, and this silo's owner does not allow it"
            remedy = "Ask for an encrypted run, or have the owner write statistics: plain in silo.yaml"
            raise OwnerRefusal("task.standardise", problem, remedy)
        if isinstance(spec.task, SurveyConfig) and any("statistics" not in one.public for one in self.privacy.values()):
            problem = "the run requests statistics of columns, and the data have a privacy budget"
            remedy = "Write standardise: {COLUMN: [mean, deviation]}, or have the owner declare statistics public"
            raise OwnerRefusal("task.standardise", problem, remedy)
        self._check_statistics(spec.task)
        if self.data is None:
            return unpacked(spec)
        fence = Fence(tuple(self.data), tuple(self.never))
        for machine in spec.emulate:
            if machine.trace is not None:
                fence.located(machine.trace)
        own = spec.task.own(index, spec.silos)
        return spec.model_copy(update={"task": own.relocated(lambda path: str(fence.located(self._found(path))))})

    def _found(self, path: str) -> str:
        if not path.startswith(BY_NAME):
            return path
        name = path.removeprefix(BY_NAME)
        if name not in self.named:
            problem = f"the run asks for data by the name {name!r}, and this silo's silo.yaml has none"
            remedy = f"Have the owner write data: {{{name}: PATH}} in silo.yaml, or ask for another name"
            raise OwnerRefusal("task", problem, remedy)
        return self.named[name]

    def _check_statistics(self, task: TaskSection) -> None:
        asked = task.statistics if isinstance(task, SurveyConfig) else None
        if isinstance(task, CsvConfig):
            asked = task.survey()
        if self.limits is not None and asked is not None and asked.least < self.limits.statistics:
            problem = f"counts from {asked.least} on are shown, and this silo's owner allows {self.limits.statistics}"
            remedy = f"Write least: {self.limits.statistics}, or have the owner lower limits.statistics in silo.yaml"
            raise OwnerRefusal("task.statistics.least", problem, remedy)
        survival = task.survival if isinstance(task, SurveyConfig) else None
        if self.limits is not None and survival is not None and len(survival.times) > self.limits.times:
            problem = f"the grid has {len(survival.times)} times, and this silo's owner allows {self.limits.times}"
            remedy = "Write a coarser grid, or have the owner raise limits.times in silo.yaml"
            raise OwnerRefusal("task.survival.grid", problem, remedy)

    @property
    def confines(self) -> bool:
        """Whether training runs without access to keys, state and network; true where the server ships no code."""
        return self.code_files is not None

    def present(self) -> Presence | None:
        return None if self.presence is None else self.presence.told(utc_now())

    def begin(
        self, order: WorkOrder, *, survey: bool = False, versions: int | None = None, counted: bool = False
    ) -> None:
        """Check that the silo may carry out an order, and count it; a refused order does not count.

        Args:
            survey: whether the order asks for column statistics.
            versions: number of versions that the owner approved.
            counted: whether the order was counted before, and begins again with another payload.

        Raises:
            LimitReached: the order is too small, or exceeds the hourly limit.
            SiloAway: the silo is outside its availability window.
            OwnerRefusal: the order goes beyond the approved versions.
            ConfigError: the order cannot be counted.
        """
        away_s = 0.0 if self.presence is None else self.presence.next_s(utc_now())
        if away_s > 0:
            raise SiloAway(away_s)
        trains = not (order.scores_only or order.apart)
        if self.approvals is not None and versions is not None and trains and order.base_version >= versions:
            problem = f"the order trains version {order.base_version}, and the owner approved {versions} versions"
            raise OwnerRefusal("approve", problem, "Begin another run, which the owner can approve")
        if self.limits is not None:
            _at_least("batch_size", order.batch_size, self.limits.batch_size)
            _at_least("samples", order.planned_samples, self.limits.samples)
            if self._counted is not None and not counted:
                evaluations, surveys = ("evaluations",) * order.evaluate, ("surveys",) * survey
                self._counted.take("orders", *evaluations, *surveys)

    def begin_evaluation(self) -> None:
        if self._counted is not None:
            self._counted.take("evaluations")

    @property
    def least_samples(self) -> int:
        return 0 if self.limits is None else self.limits.samples

    @property
    def least_batch(self) -> int:
        return 1 if self.limits is None else self.limits.batch_size

    def check_done(self, samples: int) -> None:
        _at_least("samples", samples, self.least_samples)

    @cached_property
    def _counted(self) -> OrderCounts | None:
        if self.limits is None or self.counts is None:
            return None
        limits = self.limits
        most = {"orders": limits.orders_per_hour, "evaluations": limits.evaluations_per_hour}
        return OrderCounts(Path(self.counts), {**most, "surveys": limits.surveys_per_hour})

    def check_seal(self, plan: EncryptionPlan | None) -> None:
        """Raise `OwnerRefusal` if a run encrypts less than the owner demands; ``plan`` is None without encryption."""
        if plan is None:
            if has_keys():
                problem = "the server requests updates in the clear, and this silo has keys"
                remedy = "Encrypt the run, or have the owner remove keys from silo.yaml"
                raise OwnerRefusal("cipher.kind", problem, remedy)
            return
        if self.seal is None:
            return
        hidden = set(plan.sealed.names)
        clear = [name for name in plan.layout.names if name not in hidden and not matches(name, self.seal.clear)]
        if clear:
            named = ", ".join(clear[:_MOST_NAMES]) + (", ..." if len(clear) > _MOST_NAMES else "")
            problem = f"{named} would travel in the clear, and this silo's owner does not allow it"
            raise OwnerRefusal(
                "cipher.only", problem, "Encrypt them, or have the owner name them in seal.clear of silo.yaml"
            )
        if self.seal.masks and not plan.masked:
            problem = f"{plan.kind!r} has no masks, and this silo's owner demands them"
            remedy = "Write cipher: {kind: masked}, or have the owner remove seal.masks from silo.yaml"
            raise OwnerRefusal("cipher.kind", problem, remedy)
        from fedsync.cipher.masking.mask_roster import least_survivors

        least = max(plan.members, least_survivors(plan.colluding)) if plan.masked else plan.members
        if least < self.seal.members:
            problem = f"a version may add {least} updates, and this silo's owner demands {self.seal.members}"
            remedy = (
                f"Write members: {self.seal.members} below cipher, or have the owner lower seal.members in silo.yaml"
            )
            raise OwnerRefusal("cipher.members", problem, remedy)
        _check_bounds(plan, self.seal)
        # Under a budget, only scores with noise and figures that the owner declared public leave.
        if self.seal.metrics == "sealed" and not plan.seal_metrics and not self.privacy:
            problem = "metrics would travel in the clear, and this silo's owner wants them sealed"
            remedy = "Write metrics: sealed, or have the owner remove seal.metrics from silo.yaml"
            raise OwnerRefusal("cipher.metrics", problem, remedy)


def _check_bounds(plan: EncryptionPlan, seal: SealConfig) -> None:
    least = {
        "cipher.colluding": (plan.colluding, seal.colluding, "silos that may work with the server"),
        "min_silos": (plan.quorum, seal.quorum, "silos in a round (metrics are pooled over more than half of them)"),
    }
    for place, (found, wanted, what) in least.items():
        if found < wanted:
            problem = f"the run assumes {found} {what}, and this silo's owner demands {wanted}"
            name = "quorum" if place == "min_silos" else "colluding"
            raise OwnerRefusal(place, problem, f"Write {wanted}, or have the owner lower seal.{name} in silo.yaml")
    if plan.masked and plan.work_ratio > seal.work_ratio:
        problem = (
            f"one update in a sum may be {plan.work_ratio:g} times the work of another, and this silo's owner allows "
            f"{seal.work_ratio:g}"
        )
        remedy = f"Write work_ratio: {seal.work_ratio:g} below cipher, or have the owner raise seal.work_ratio"
        raise OwnerRefusal("cipher.work_ratio", problem, remedy)


def audit_place(config: SiloStartConfig) -> AuditPlace:
    said = config.audit
    return AuditPlace(str(Path(config.state) / AUDIT), config.server, said.bytes, said.keep, said.required)


def _at_least(limit: str, found: int, least: int) -> None:
    if found < least:
        problem = f"an order of {found}, and this silo's owner demands at least {least}"
        raise LimitReached(f"limits.{limit}", problem, "Ask for more, or have the owner lower the limit in silo.yaml")


def owner_environment(config: SiloStartConfig) -> Mapping[str, str]:
    from fedsync.cipher.keys.passphrase import NAMED_BY

    return {KEYS: config.keys or "", NAMED_BY: config.passphrase_env, ALLOWED: OwnerPolicy.of(config).model_dump_json()}


def act_for_owner(config: SiloStartConfig, identity: Identity) -> OwnerPolicy:
    os.environ.update(owner_environment(config))
    check_approved(identity)
    return OwnerPolicy.of(config)


_MINUTES = 60
_LOCK_S = 10.0


class OrderCounts:
    """Counts of a silo's orders within the last hour, over all runs and restarts; ``most`` is the limit by kind.

    One file has the counts of each minute. They count until they are an hour old. Counts of future minutes, after a
    clock was set back, count too.
    """

    def __init__(self, file: Path, most: Mapping[str, int]) -> None:
        self._file = file
        self._most = most

    def take(self, *kinds: str) -> None:
        """Count one more of each kind. Raise `LimitReached` beyond the owner's limit, and count nothing then;
        `ConfigError` if the file is damaged, locked or cannot be written.
        """
        minute = int(time.time() // 60)
        with taken(self._file.with_suffix(".lock"), _LOCK_S) as got:
            if not got:
                raise ConfigError(str(self._file), "another process holds the lock", "End other trainers of this silo")
            known = {
                kind: Counter({key: count for key, count in counts.items() if int(key) >= minute - _MINUTES})
                for kind, counts in self._load().items()
            }
            for kind in kinds:
                counts = known.setdefault(kind, Counter())
                if counts.total() >= self._most[kind]:
                    problem = f"{counts.total()} {kind} within an hour, which is what this silo's owner allows"
                    raise LimitReached("limits", problem, f"Wait, or have the owner raise limits.{kind}_per_hour")
                counts[str(minute)] += 1
            write_atomically(self._file, json.dumps(known).encode(), OWNER_FILE)

    def _load(self) -> dict[str, dict[str, int]]:
        try:
            known: dict[str, dict[str, int]] = json.loads(self._file.read_bytes())
            if all(type(n) is int and int(key) for counts in known.values() for key, n in counts.items()):
                return known
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError):
            pass
        raise ConfigError(str(self._file), "damaged: the number of past orders is unknown", "Remove it")
