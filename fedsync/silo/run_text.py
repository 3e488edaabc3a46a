"""The text of a run: all that the server says of it, from which every name of the run is taken.

| name | of | used by |
|---|---|---|
| `RunText.digest` | the whole text | approvals, the audit log, folders of trainers |
| `RunText.lasting` | the text without the run's name, which changes when a checkpoint is lost | R: chains, masks, the |
| | | record of what was evaluated |

Two texts are two runs, so there must not be two texts that mean the same: `fedsync.config.run_spec.RunSpec.parse` takes
only what `RunSpec.dump` writes, and `RunText.lasting` takes no other form of a run configuration than the one written
here. What the server says of a single order is bound in the context of masks (`fedsync.cipher.masking.context`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedsync.common.errors import SERVER, ProtocolError

_IDENTITY = ("run", "began")


@dataclass(frozen=True, slots=True)
class RunText:
    """All that the server says of a run.

    Args:
        spec: its specification, as it came.
        run_config: what else the run says, for training code of the silo's own, as JSON.
    """

    spec: str
    run_config: str = "{}"

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, hexadecimal."""
        return _digest(self.spec, self.run_config)

    @property
    def lasting(self) -> bytes:
        """SHA-256 of all of it but the run's identity, 32 bytes; the same at every silo.

        Raises:
            ProtocolError: the run configuration is not in its canonical form.
        """
        settings = json.loads(self.run_config)
        if run_config_text(settings) != self.run_config:
            raise ProtocolError(SERVER, "run configuration", "it is not in its canonical form")
        rest = {key: value for key, value in json.loads(self.spec).items() if key not in _IDENTITY}
        text = json.dumps(["fedsync run 2", rest, settings], separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()


def run_config_text(settings: Mapping[str, Any]) -> str:
    """The canonical form of a run configuration: JSON, by ascending keys."""
    return json.dumps(settings, sort_keys=True)


@lru_cache(maxsize=8)
def _digest(spec: str, run_config: str) -> str:
    return hashlib.sha256(b"fedsync run 2\0" + json.dumps([spec, run_config]).encode()).hexdigest()
