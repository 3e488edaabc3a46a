"""How the executor of a silo's messages reaches its SuperNode: on loopback, by a port and a secret that are in files.

It uses internals of flwr, for the versions in `fedsync.flower.internals.executor.TESTED` only.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.supercore.retry import RetryInvoker
    from flwr.supercore.runtime import RuntimeHttpClient

logger = logging.getLogger(__name__)

_TRIES = 5
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


@dataclass(frozen=True, slots=True)
class PendingTask:
    """One message to answer: where it waits, and the token that opens it."""

    address: str
    token: str


class SupernodeClient:
    """The SuperNode's runtime interface on this machine.

    Args:
        port_file: has its port, which is another one each time that it is started.
        secret_file: what proves to it that this process may have its messages.
    """

    def __init__(self, port_file: Path, secret_file: Path) -> None:
        self._port_file = port_file
        self._secret_file = secret_file
        self._client: RuntimeHttpClient | None = None
        self._address = ""
        self._trouble = ""

    @property
    def address(self) -> str:
        """``host:port`` of the SuperNode that was started last; empty before the first."""
        try:
            return f"127.0.0.1:{int(self._port_file.read_text(encoding='ascii'))}"
        except (OSError, ValueError):
            return ""

    def acquire(self) -> PendingTask | None:
        """The next message, if there is one."""
        import httpx
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        try:
            client = self._connected()
            if client is not None:
                answer = client.AcquireTask(AcquireTaskRequest(supported_task_types={TaskType.CLIENT_APP}))
                return PendingTask(self._address, answer.token) if answer.HasField("task") and answer.token else None
        except httpx.ConnectError:
            pass  # while the SuperNode starts or restarts there is nobody to ask
        except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
            trouble = str(error).partition("\n")[0]
            if trouble != self._trouble:
                logger.warning("the SuperNode gives out no messages: %s", trouble)
            self._trouble = trouble
        return None

    def _connected(self) -> RuntimeHttpClient | None:
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        address = self.address
        if address != self._address:
            if self._client is not None:
                self._client.close()
            secret = self._secret_file.read_bytes()
            proof = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={_ACQUIRE})
            self._client = client_of(address, proof, patient=False) if address else None
            self._address = address
        return self._client


def client_of(address: str, *interceptors: Any, patient: bool) -> RuntimeHttpClient:
    """Asks a SuperNode.

    Args:
        address: ``host:port``.
        interceptors: what adds the proofs to requests.
        patient: whether a request is repeated where the SuperNode is there and does not answer.
    """
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), *interceptors],
        retry_invoker=_retries() if patient else None,
    )


def _retries() -> RetryInvoker:
    """Repeats requests that got no answer.

    Flower's own interrupts the process where a token is not valid, and asks a SuperNode that is gone for ever. Either
    is how a task ends whose SuperNode was started again: the errors of those are for the one who asks.
    """
    import httpx
    from flwr.supercore.retry import RetryInvoker, exponential

    busy = frozenset({httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT})

    def is_final(error: Exception) -> bool:
        if isinstance(error, httpx.HTTPStatusError):
            return error.response.status_code not in busy
        return isinstance(error, httpx.ConnectError)

    return RetryInvoker(
        wait_gen_factory=lambda: exponential(base_delay=0.1, max_delay=2),
        recoverable_exceptions=(httpx.TransportError, httpx.HTTPStatusError),
        max_tries=_TRIES,
        max_time=None,
        should_giveup=is_final,
    )
