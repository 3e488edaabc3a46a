"""Text of a run: the specification and settings that the server sends. Two digests identify it:

| name | of | used by |
|---|---|---|
| `RunText.digest` | the whole text | approvals, the audit log, folders of trainers |
| `RunText.lasting` | the text without the run's name, which changes when a checkpoint is lost | chains, masks, the |
| | | record of evaluated models |

Two texts are two runs, so each meaning may have only one text. `fedsync.config.run_spec.RunSpec.parse` accepts only
output of `RunSpec.dump`, and `RunText.lasting` accepts only the canonical run configuration of this module. Settings of
a single order enter the context of masks (`fedsync.cipher.masking.mask_round`).
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
    """Text of a run: the unchanged specification, and JSON settings for the silo's own code."""

    spec: str
    run_config: str = "{}"

    @property
    def digest(self) -> str:
        return _digest(self.spec, self.run_config)

    @property
    def lasting(self) -> bytes:
        """SHA-256 without the run's identity, 32 bytes, equal at all silos; `ProtocolError` if not canonical."""
        settings = json.loads(self.run_config)
        if run_config_text(settings) != self.run_config:
            raise ProtocolError(SERVER, "run configuration", "it is not in its canonical form")
        rest = {key: value for key, value in json.loads(self.spec).items() if key not in _IDENTITY}
        text = json.dumps(["fedsync run 2", rest, settings], separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()


def run_config_text(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


@lru_cache(maxsize=8)
def _digest(spec: str, run_config: str) -> str:
    return hashlib.sha256(b"fedsync run 2\0" + json.dumps([spec, run_config]).encode()).hexdigest()
