"""What a real silo's owner allows of runs: said in silo.yaml, taken along in the environment, held to by the trainer.

What a run is comes from the server, and so does all that it says about encryption and files. Here is what it is
measured by. Emulated silos have no owner: there the run's own words count.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedsync.config.run_spec import RunSpec
from fedsync.config.section import Section
from fedsync.config.silo_start import SealConfig, SiloStartConfig
from fedsync.core.errors import OwnerRefusal
from fedsync.core.layout import matches
from fedsync.trainer.key_lookup import KEYS, has_keys

if TYPE_CHECKING:
    from fedsync.cipher.plan import EncryptionPlan

ALLOWED = "FEDSYNC_ALLOWED"
"""Environment variable of a silo: an `OwnerPolicy` as JSON, or nothing where the silo is emulated."""

_MOST_NAMES = 4


class OwnerPolicy(Section):
    """What runs may do at a silo. See `fedsync.config.silo_start.SiloStartConfig` for what each means."""

    seal: SealConfig | None = None
    """What a run must at least seal; None leaves it to the run."""

    data: list[str] | None = None
    """Absolute folders below which its files are; None leaves them to the run."""

    errors: Literal["codes", "text"] = "codes"
    """Whether the server may read what went wrong in runs in the clear."""

    @classmethod
    def of(cls, config: SiloStartConfig) -> OwnerPolicy:
        seal = None if config.keys is None else config.seal or SealConfig()
        return cls(seal=seal, data=config.data, errors=config.errors)

    @classmethod
    def here(cls) -> OwnerPolicy:
        text = os.environ.get(ALLOWED)
        return cls.model_validate_json(text) if text else cls()

    def checked(self, spec: RunSpec) -> RunSpec:
        """The run, with the paths of its task resolved.

        All of them are checked, also those of other silos' files: a task may look for any of them.

        Raises:
            OwnerRefusal: one leads out of the folders that the owner allows.
        """
        if self.data is None:
            return spec
        for machine in spec.emulate:
            if machine.trace is not None:
                self._located(machine.trace)
        return spec.model_copy(update={"task": spec.task.relocated(self._located)})

    def _located(self, path: str) -> str:
        # Links are followed, or one in an allowed folder could lead anywhere.
        found = Path(path).resolve()
        if not any(found.is_relative_to(folder) for folder in self.data or ()):
            remedy = "Name a file in one of its data folders, or have the owner add this one to data in silo.yaml"
            raise OwnerRefusal("task", f"{path} is not where this silo's owner allows runs to read", remedy)
        return str(found)

    def check_seal(self, plan: EncryptionPlan | None) -> None:
        """See that a run seals what it must.

        Args:
            plan: of the run; None in the clear.

        Raises:
            OwnerRefusal: it seals less.
        """
        if plan is None:
            if has_keys():
                problem = "the server asks for updates in the clear, and this silo has keys"
                remedy = "Ask for an encrypted run, or have the owner take keys out of silo.yaml"
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
                "cipher.only", problem, "Seal them, or have the owner name them in seal.clear of silo.yaml"
            )
        if self.seal.masks and not plan.masked:
            problem = f"{plan.kind!r} has no masks, and this silo's owner demands them"
            remedy = "Write cipher: {kind: masked}, or have the owner take seal.masks out of silo.yaml"
            raise OwnerRefusal("cipher.kind", problem, remedy)
        if self.seal.metrics == "sealed" and not plan.seal_metrics:
            problem = "metrics would travel in the clear, and this silo's owner wants them sealed"
            remedy = "Write metrics: sealed, or have the owner take seal.metrics out of silo.yaml"
            raise OwnerRefusal("cipher.metrics", problem, remedy)


def owner_environment(config: SiloStartConfig) -> Mapping[str, str]:
    """Variables of whatever may start a silo's trainer: its keys, and what its owner allows.

    All of them are set, so that what is in the environment of whoever starts the silo is not taken for its own.
    """
    return {KEYS: config.keys or "", ALLOWED: OwnerPolicy.of(config).model_dump_json()}
