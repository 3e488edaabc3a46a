"""CKKS encryption as other frameworks use it, for comparison: the library holds, loads and adds a vector per tensor.

NVFLARE's homomorphic encryption works like this (N = 8192, coefficient modulus of 60, 40 and 40 bits, scale
2^40). Its server passes a client's bytes to native code, so a client can crash the server; see docs/security.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import tenseal

from bench.cost.cipher_round import (
    OPENINGS,
    CipherCost,
    Clock,
    cost_of,
    error_of,
    resnet_layout,
    update_of,
    watched_memory,
    weight_of,
)
from fedsync.model.layout import Layout, Vector

_SCALE = 2.0**40

Sealed = list[bytes]
"""One serialised vector for each tensor."""


class PeerSilo:
    """Encrypts and decrypts as peers do."""

    def __init__(self) -> None:
        self._context = tenseal.context(
            tenseal.SCHEME_TYPE.CKKS,
            8192,
            coeff_mod_bit_sizes=[60, 40, 40],
            encryption_type=tenseal.ENCRYPTION_TYPE.SYMMETRIC,
            n_threads=1,
        )
        self._context.global_scale = _SCALE

    def public(self) -> bytes:
        """What the server gets."""
        public: bytes = self._context.serialize(save_secret_key=False, save_galois_keys=False)
        return public

    def seal(self, values: Vector, layout: Layout, weight: int) -> Sealed:
        """Every tensor times the silo's weight, encrypted and serialised."""
        parts = layout.split(values).values()
        return [tenseal.ckks_vector(self._context, part.reshape(-1) * np.float64(weight)).serialize() for part in parts]

    def open(self, sealed: Sealed, layout: Layout) -> Vector:
        """The mean as one vector, float32 [layout.size]."""
        parts = [tenseal.ckks_vector_from(self._context, data).decrypt() for data in sealed]
        return layout.join(dict(zip(layout.names, (np.array(part, dtype=np.float32) for part in parts), strict=True)))


class PeerServer:
    """Loads, adds and scales as peers do.

    Args:
        public: the silos' context without the secret key.
    """

    def __init__(self, public: bytes) -> None:
        self._context = tenseal.context_from(public, n_threads=1)
        self._total: list[tenseal.CKKSVector] = []

    def add(self, sealed: Sealed) -> None:
        """Load one silo's vectors and add them to the sum."""
        loaded = [tenseal.ckks_vector_from(self._context, data) for data in sealed]
        if not self._total:
            self._total = loaded
            return
        self._total = [total + vector for total, vector in zip(self._total, loaded, strict=True)]

    def mean(self, weights: Sequence[int]) -> Sealed:
        """The sum over all weights, serialised; multiplying drops a prime, so it is shorter than what came."""
        factor = 1.0 / sum(weights)
        return [(vector * factor).serialize() for vector in self._total]


class SiloSide(Protocol):
    """What a peer's silo does with an update; what travels are messages of one or several parts."""

    def seal(self, values: Vector, layout: Layout, weight: int) -> list[bytes]:
        """The update times the silo's weight, encrypted and serialised."""
        ...

    def open(self, sealed: list[bytes], layout: Layout) -> Vector:
        """The mean as one vector, float32 [layout.size]."""
        ...


class ServerSide(Protocol):
    """What a peer's server does."""

    def add(self, sealed: list[bytes]) -> None:
        """Load one silo's message and add it to the sum."""
        ...

    def mean(self, weights: Sequence[int]) -> list[bytes]:
        """The sum over all weights, serialised."""
        ...


Sides = tuple[SiloSide, ServerSide]


def tenseals_sides() -> Sides:
    """Both sides, with a key made for them."""
    silo = PeerSilo()
    return silo, PeerServer(silo.public())


def measure_peers(params: int, silos: int, sides: Sides | None = None, kind: str = "ckks") -> CipherCost:
    """One round as peers do it.

    Args:
        params: values of the update.
        silos: how many send one.
        sides: whose work it is; by default `PeerSilo`'s and `PeerServer`'s.
        kind: what the result calls it.
    """
    layout, clock, mean = resnet_layout(params), Clock(), np.zeros(params)
    silo_side, server = sides or tenseals_sides()
    up = 0
    with watched_memory() as peak:
        for silo in range(silos):
            update = update_of(silo, params)
            mean += update.astype(np.float64) * weight_of(silo)
            sealed = clock.time("seal", partial(silo_side.seal, update, layout, weight_of(silo)))
            up = sum(map(len, sealed))
            # The first silo's vectors are only loaded.
            clock.time("add" if silo else "load", partial(server.add, sealed))
            del sealed
        down = server.mean([weight_of(silo) for silo in range(silos)])
        for _ in range(OPENINGS):
            got = clock.time("open", partial(silo_side.open, down, layout))
    mean /= sum(weight_of(silo) for silo in range(silos))
    return cost_of(kind, 64, params, silos, clock, (up, sum(map(len, down))), error_of(got, mean), peak)
