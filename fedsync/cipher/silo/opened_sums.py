"""Model of a finished run, computed from all of its sums, for silos that keep nothing of that run."""

from __future__ import annotations

from fedsync.cipher.encoding import catch_up
from fedsync.cipher.encoding.catch_up import Start
from fedsync.cipher.encoding.integrity import Authenticator
from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.keys.material import Purpose
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.history import run_digest
from fedsync.cipher.silo.opening import Opener
from fedsync.cipher.silo.reading import CatchUpReader
from fedsync.cipher.silo.sealing import Serial
from fedsync.cipher.suites.suite import Sealer
from fedsync.common.errors import SERVER, ProtocolError
from fedsync.model.layout import Vector
from fedsync.model.transfer import Payload


def model_of(
    plan: EncryptionPlan, ring: Ring, sealer: Sealer, run: str, specification: bytes, received: Payload, first: Vector
) -> Vector:
    """Compute the model that sums from the beginning lead to, float32 [plan.layout.size].

    Nothing is opened before everything is verified: silos sealed it for that run, in sums of enough silos. The result
    equals, to the last bit, the model of a silo that was in the run and has the same sums.

    Args:
        run: name under which the run began.
        specification: SHA-256 of its specification as the server sent it.
        received: a `CatchUp` from the beginning.
        first: model before any training.

    Raises:
        ProtocolError: ``received`` is something else.
        SpoiledSum: silos meant another run.
    """
    digest = run_digest(run, specification, ring.group.epoch, ring.group.fingerprint)
    reader = CatchUpReader(plan, ring, Authenticator(ring.group.derive(Purpose.TAG), plan.form), digest)
    whole = catch_up.decode(received)
    if whole.start is not Start.HELD or whole.base != -1:
        raise ProtocolError(SERVER, "catch-up", "it does not begin with the first version")
    read = reader.read(whole, None)
    if read.calibration is None:
        raise ProtocolError(SERVER, "catch-up", "it has no calibration")
    opener = Opener(plan, ring, sealer, Serial(sealer))
    state = opener.begin(read.calibration, first, digest)
    for link in read.links:
        state, _ = opener.follow(state, link)
    reader.check_claims(read, state.history.known(), None, None)
    return state.model
