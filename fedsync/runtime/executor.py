"""A resident ClientApp process: runs one message after another, with model and data kept hot.

Stock Flower starts a process a message, which costs seconds of imports each time. This one asks the
SuperNode for the next task instead, in the way that Flower's own ClientApp process does. It uses
internals of flwr, so it serves only the versions in `TESTED`; `fedsync.runtime.local` uses the stock
way with any other.

Usage: ``python -m fedsync.runtime.executor HOST:PORT [POLL_S]``
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from importlib.metadata import version
from types import FrameType
from typing import Any, TypeVar

from fedsync.runtime.child import exit_with_parent
from fedsync.runtime.pauses import pull_soon

TESTED = frozenset({"1.41.0"})
"""Versions of flwr with which the resident executor and the faster poll were tested."""

_WANTED_S = 1.0

Pulled = TypeVar("Pulled")


def supported() -> bool:
    """Whether the installed flwr is one of the tested versions."""
    return version("flwr") in TESTED


def serve(address: str, poll_s: float) -> None:
    """Run tasks until the process is told to stop.

    Args:
        address: of the SuperNode's runtime interface, ``host:port``.
        poll_s: pause after a look that found no task [s].
    """
    from flwr.clientapp.utils import get_load_client_app_fn
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType

    # The trainer's imports are the slow part of a first task: have them done before it comes.
    import fedsync.runtime.silo  # noqa: F401

    pull_soon()
    load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    apps: dict[str, Any] = {}
    request = AcquireTaskRequest(supported_task_types={TaskType.CLIENT_APP})
    acquirer = _client(address)

    def acquire() -> str | None:
        # While the SuperNode starts or restarts there is nobody to ask.
        with contextlib.suppress(OSError, RuntimeError):
            answer = acquirer.AcquireTask(request)
            return answer.token if answer.HasField("task") and answer.token else None
        return None

    token: str | None = None
    while True:
        token = token or acquire()
        if token is None:
            time.sleep(poll_s)
        else:
            token = _run_task(address, token, load, apps, acquire)


def _client(address: str, *interceptors: Any) -> Any:
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient

    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), *interceptors],
        retry_invoker=make_simple_http_retry_invoker(),
    )


def _run_task(
    address: str, token: str, load: Any, apps: dict[str, Any], acquire: Callable[[], str | None]
) -> str | None:
    """Pull one message, have the app answer it, push the answer or the error.

    Returns:
        The token of the task that came in its place, if the SuperNode gave the message up.
    """
    from flwr.app import Message
    from flwr.app.error import Error
    from flwr.cli.install import install_from_fab
    from flwr.common.constant import ErrorCode, SubStatus
    from flwr.supercore.heartbeat import HeartbeatSender
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

    client = _client(address, RuntimeTokenHttpInterceptor(token))
    # Flower's own heartbeat interrupts the process when the task is taken back. This one is to live on.
    heartbeat = HeartbeatSender(lambda: _wanted(client) or True)
    heartbeat.start()
    message = context = reply = following = None
    status, details = SubStatus.FAILED, "no task input"
    try:
        message, context, run, fab = _unless_given_up(lambda: pull_task_input(client), lambda: _wanted(client), acquire)
        if fab.hash_str not in apps:
            install_from_fab(fab.content, skip_prompt=True)
            apps[fab.hash_str] = load(run.fab_id, run.fab_version, fab.hash_str)
        reply = apps[fab.hash_str](message=message, context=context)
        status, details = SubStatus.COMPLETED, ""
    except _GivenUp as error:
        following, details = error.following, str(error)
    except Exception as error:  # whatever an app raises is an answer too
        traceback.print_exc()
        details = f"{type(error).__name__}: {error}"
        if message is not None:
            reply = Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=details), reply_to=message)
    try:
        if reply is not None and context is not None:
            push_message(client, reply, context)
        push_task_output(client=client, context=context, sub_status=status, details=details)
    except Exception:  # the SuperNode went away meanwhile: it will hand the message out again
        traceback.print_exc()
    finally:
        heartbeat.stop()
        client.close()
    return following


class _GivenUp(Exception):
    """The SuperNode does not want a message answered any more; ``following`` is the token of the next task, if any."""

    def __init__(self, following: str | None) -> None:
        super().__init__("the SuperNode gave the message up")
        self.following = following


def _unless_given_up(
    pull: Callable[[], Pulled], wanted: Callable[[], bool], acquire: Callable[[], str | None]
) -> Pulled:
    """What ``pull`` returns; by itself it waits up to two hours for the rest of a message.

    A SuperNode hands out one message at a time. Where it hands out another, the rest of the first will never come: its
    run has ended in between.

    Args:
        pull: gets the message.
        wanted: whether the SuperNode still counts it as in work.
        acquire: token of another task, if there is one.

    Raises:
        _GivenUp: the rest of the message will never come.
    """
    pulled: Future[Pulled] = Future()

    def work() -> None:
        try:
            pulled.set_result(pull())
        except BaseException as error:
            pulled.set_exception(error)

    # Left behind where it goes on: it ends once its client is closed.
    threading.Thread(target=work, daemon=True).start()
    while True:
        with contextlib.suppress(TimeoutError):
            return pulled.result(timeout=_WANTED_S)
        following = acquire()
        if following is not None or not wanted():
            raise _GivenUp(following)


def _wanted(client: Any) -> bool:
    """Tell the SuperNode that the task is in work; False if it has taken it back."""
    import httpx
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    try:
        return bool(client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)
    except httpx.HTTPStatusError as error:
        return not error.response.is_client_error  # the token is no longer valid
    except (httpx.HTTPError, OSError, RuntimeError):
        return True  # it cannot be asked


def _terminate(number: int, frame: FrameType | None) -> None:
    # Not sys.exit: worker threads of HTTP clients would keep the process.
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    exit_with_parent(os.getppid())
    serve(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.1)
