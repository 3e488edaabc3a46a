"""What others may hold of a server: connections, seconds, memory, and what waits in its database."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedsync.config.section import Section
from fedsync.core.transfer import MAX_SEALED_BYTES


class GateConfig(Section):
    """Limits of the server's gate. Where one is reached, a silo is asked to come again, which its SuperNode does."""

    connections: Annotated[int, Field(ge=16, le=100_000)] = 1000
    """Connections in all; fewer where the system lets a process have fewer files. Above it the oldest one of a caller
    who is not known yet is closed."""

    connections_per_address: Annotated[int, Field(ge=0, le=100_000)] = 64
    """Connections from one address of callers who are not known yet; above it the oldest of them is closed. 0 for no
    such limit, where all silos come through one proxy."""

    patience_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """How long a TLS handshake may take, and then again the head of each request [s]."""

    memory_bytes: Annotated[int, Field(ge=2**24)] = 2**28
    """Requests of all silos that are read or worked on [bytes]. Beside it every silo may have one."""

    waiting_bytes: Annotated[int, Field(ge=2**20)] = MAX_SEALED_BYTES + 2**30
    """What may wait in the database of one silo's answers [bytes]. By default the largest sealed update and a quarter
    more."""

    waiting_messages: Annotated[int, Field(ge=1, le=10_000)] = 64
    """How many of one silo's answers may wait in the database."""
