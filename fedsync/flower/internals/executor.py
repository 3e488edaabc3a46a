"""A resident ClientApp process: runs one message after another, with model and data kept hot.

Stock Flower starts a process a message, which costs seconds of imports each time. This one asks the
SuperNode for the next task instead, in the way that Flower's own ClientApp process does. It uses
internals of flwr, so it serves only the versions in `TESTED`; `fedsync.ops.local` uses the stock
way with any other.

It outlives the SuperNode: one that is started again has another port, written in a file, and knows nothing of tasks
from before.

Usage: ``python -m fedsync.flower.internals.executor --port-file FILE --secret-file FILE [--poll SECONDS] [--shipped]``
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from fedsync.common.processes import exit_with_parent
from fedsync.flower.internals.apps import Apps
from fedsync.flower.internals.polling import pull_soon
from fedsync.flower.internals.supernode_client import PendingTask, SupernodeClient, client_of

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.supercore.runtime import RuntimeHttpClient

TESTED = frozenset({"1.41.0"})
"""Versions of flwr with which the resident executor and the faster poll were tested."""

_WANTED_S = 1.0

Done = TypeVar("Done")


def supported() -> bool:
    """Whether the installed flwr is one of the tested versions."""
    return version("flwr") in TESTED


def serve(door: SupernodeClient, poll_s: float, apps: Apps) -> None:
    """Run tasks until the process is told to stop.

    Args:
        door: where they come from.
        poll_s: pause after a look that found no task [s].
        apps: what answers them.
    """
    # The trainer's imports are the slow part of a first task: have them done before it comes.
    import fedsync.flower.client_app  # noqa: F401

    pull_soon()
    task: PendingTask | None = None
    while True:
        task = task or door.acquire()
        if task is None:
            time.sleep(poll_s)
        else:
            task = run_task(door, task, apps)


def run_task(door: SupernodeClient, task: PendingTask, apps: Apps) -> PendingTask | None:
    """Pull one message, have the app answer it, push the answer or the error.

    Returns:
        The task that came in its place, if the SuperNode gave the message up.
    """
    from flwr.common.constant import SubStatus
    from flwr.supercore.heartbeat import HeartbeatSender
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

    client = client_of(task.address, RuntimeTokenHttpInterceptor(task.token), patient=True)
    # Flower's own heartbeat interrupts the process when the task is taken back. This one is to live on.
    heartbeat = HeartbeatSender(lambda: _wanted(client) or True)
    heartbeat.start()
    answer, following, given_up = _Answer(), None, False
    status, details = SubStatus.FAILED, ""
    try:
        _unless_given_up(
            lambda: answer.make(client, apps), lambda: door.address == task.address and _wanted(client), door.acquire
        )
        status, details = SubStatus.COMPLETED, ""
    except _GivenUp as error:
        # What is in work goes on in the trainer, for whoever asks again; its answer to this message is nobody's.
        answer, following, details = _Answer(), error.following, str(error)
        given_up = True
    except Exception as error:  # whatever an app raises is an answer too
        traceback.print_exc()
        details = f"{type(error).__name__}: {error}"
        answer.refuse(details)
    try:
        if answer.reply is not None and answer.context is not None:
            push_message(client, answer.reply, answer.context)
        # Without an answer the SuperNode would wait for ever: it makes an error of a message that it stops hearing of.
        if answer.reply is not None or given_up:
            push_task_output(client=client, context=answer.context, sub_status=status, details=details)
    except Exception:  # the SuperNode went away meanwhile: the server sends again
        traceback.print_exc()
    finally:
        heartbeat.stop()
        client.close()
    return following


@dataclass(slots=True)
class _Answer:
    """A message, and what is said to it, as far as that has come."""

    message: Message | None = None
    context: Context | None = None
    reply: Message | None = None

    def make(self, client: RuntimeHttpClient, apps: Apps) -> None:
        from flwr.supernode.runtime.run_clientapp import pull_task_input

        self.message, self.context, run, fab = pull_task_input(client)
        self.reply = apps.of(run, fab)(message=self.message, context=self.context)

    def refuse(self, reason: str) -> None:
        from flwr.app import Message
        from flwr.app.error import Error
        from flwr.common.constant import ErrorCode

        if self.message is not None:
            error = Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason)
            self.reply = Message(error, reply_to=self.message)


class _GivenUp(Exception):
    """The SuperNode does not want a message answered any more; ``following`` is the next task, if any."""

    def __init__(self, following: PendingTask | None) -> None:
        super().__init__("the SuperNode gave the message up")
        self.following = following


def _unless_given_up(
    work: Callable[[], Done], wanted: Callable[[], bool], acquire: Callable[[], PendingTask | None]
) -> Done:
    """What ``work`` returns; by itself it waits up to two hours for the rest of a message, and for all of the training.

    A SuperNode hands out one message at a time. Where it hands out another, nobody waits for the first any more: its
    run has ended in between, or the SuperNode was started again.

    Args:
        work: gets the message and answers it.
        wanted: whether the SuperNode still counts it as in work.
        acquire: another task, if there is one.

    Raises:
        _GivenUp: the answer is not wanted any more, or the rest of the message will never come.
    """
    done: Future[Done] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    # Left behind where it goes on: it ends once its client is closed, or the trainer has answered.
    threading.Thread(target=run, daemon=True).start()
    # Not by the timeout of `result`, for what an app raises may be a timeout too.
    while not wait([done], timeout=_WANTED_S).done:
        following = acquire()
        if following is not None or not wanted():
            raise _GivenUp(following)
    return done.result()


def _wanted(client: RuntimeHttpClient) -> bool:
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


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--port-file", type=Path, required=True, help="has the SuperNode's port")
    parser.add_argument("--secret-file", type=Path, required=True, help="has what the SuperNode asks for")
    parser.add_argument("--poll", type=float, default=0.1, metavar="SECONDS")
    parser.add_argument("--shipped", action="store_true", help="also run clients that come with runs")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("fedsync").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _terminate)
    exit_with_parent(os.getppid())
    serve(SupernodeClient(options.port_file, options.secret_file), options.poll, Apps(shipped=options.shipped))


if __name__ == "__main__":
    main()
