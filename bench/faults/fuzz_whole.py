"""The server's store and a silo's copy as targets for mutated messages: signatures are checked, state is kept."""

from __future__ import annotations

import numpy as np

from fedsync.cipher.keys.authority import emulated_rings
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.server.sealed_aggregator import EncryptedAggregator
from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.cipher.suites import open_suite
from fedsync.common.errors import ProtocolError
from fedsync.core.actions import Commit
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.core.silo_weight import Weighting
from fedsync.model.layout import Layout
from fedsync.model.transfer import OtherVersion

SIZE = 3000
NAMES = ("a", "b")


class Whole:
    """A federation of two silos after one commit; silo ``a`` has a second order, silo ``b`` is sent the sum."""

    def __init__(self) -> None:
        layout = Layout(("x", "y"), ((SIZE - 500,), (500,)))
        self._plan = EncryptionPlan("bfv", 16, layout, Weighting(), 2, only=("x",))
        server, self._rings = emulated_rings(NAMES, seed=1)
        self._start = np.zeros(SIZE, dtype=np.float32)
        self._store = EncryptedAggregator(self._plan, server)
        silos = {name: self._copy(name) for name in NAMES}
        for name, silo in silos.items():
            self._store.greet(name, silo.holds, silo.greeting())
        for name, silo in silos.items():
            self._store.begin(f"{name}/1")
            silo.receive(self._store.outgoing(name), 0)
            self._store.put(name, f"{name}/1", self._sealed(silo, f"{name}/1", 0))
            self._store.holds(name, -1 if name == "b" else 0)
        self._store.commit(Commit(1, {"a/1": 0.5, "b/1": 0.5}))
        self._model = silos["a"].receive(self._store.outgoing("a"), 1)
        self._store.begin("a/2")
        self.update = self._sealed(silos["a"], "a/2", 1).tobytes()
        self.sum = self._store.outgoing("b").tobytes()

    def server(self, data: bytes | bytearray) -> bool:
        """The server takes an update. True: it was the one that was sent."""
        self._store.put("a", "a/2", np.frombuffer(bytes(data), dtype=np.uint8))
        self._store.discard("a/2")
        self._store.begin("a/2")
        return bytes(data) == self.update

    def silo(self, data: bytes | bytearray) -> bool:
        """A silo that has nothing yet takes a catch-up. True: it ends with the model of all."""
        silo = self._copy("b")
        try:
            model = silo.receive(np.frombuffer(bytes(data), dtype=np.uint8), 1)
        except OtherVersion as error:
            raise ProtocolError("server", "version", str(error)) from error
        # What travels in the clear is not protected from the server; only that it is finite is checked.
        return bool((self._plan.divide(model)[0] == self._plan.divide(self._model)[0]).all())

    def _copy(self, name: str) -> EncryptedReplica:
        ring = self._rings[name]
        likely = np.full(SIZE, 0.1, dtype=np.float32)
        return EncryptedReplica(
            self._plan, ring, open_suite("bfv", ring.group), 10, lambda: self._start, lambda: (likely, 5, 40, None)
        )

    @staticmethod
    def _sealed(silo: EncryptedReplica, update_id: str, base: int) -> np.ndarray:
        update = np.random.default_rng(base).normal(size=SIZE).astype(np.float32) / 50
        order = WorkOrder(update_id, base, 1, 8, 5, 0.1, seed=3)
        return silo.send(update, order, WorkReport(base, 5, 40, compute_s=1.0, loss=0.5))
