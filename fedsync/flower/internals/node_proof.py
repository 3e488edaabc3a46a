"""A node's proof that it sends a request, shared by requests that come soon after each other.

Flower signs the time for each request, and the SuperLink checks each signature: half a millisecond of its processor
time for each. What is signed is the time and nothing else, and a SuperLink takes it for five minutes. So a proof that
is used for a minute says no less than one that is made each time, and whoever could steal it could use it for no
longer. The gate checks one that it has checked before by comparing it (`fedsync.flower.internals.callers`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf
from types import SimpleNamespace
from typing import Any

PROOF_S = 60.0
"""How long a proof is used [s]; clocks of silo and server may differ by so much less than Flower allows."""


def share_proofs(signer: Any, clock: Callable[[], float] = time.time) -> None:
    """Have Flower's interceptor make a new proof each `PROOF_S`, not for each request.

    Args:
        signer: adds the proof to a request's headers.
        clock: time of day [s], which goes on while a machine sleeps, and may be set.
    """
    sign: Callable[[Any, Callable[[Any], Any]], Any] = signer.intercept
    kept: tuple[Mapping[str, str], float] = {}, -inf

    def intercept(context: Any, call_next: Callable[[Any], Any]) -> Any:
        nonlocal kept
        proof, made_s = kept
        if not 0.0 <= clock() - made_s < PROOF_S:
            made_s, headers = clock(), dict[str, str]()
            sign(SimpleNamespace(request=SimpleNamespace(headers=headers)), lambda _: None)
            proof, kept = headers, (headers, made_s)
        context.request.headers.update(proof)
        return call_next(context)

    vars(signer)["intercept"] = intercept
