"""App of a relay (regional aggregator): runs on the relay's own SuperLink, and answers the main server's requests.

upstream server's hub <- agent of the relay -> socket -> this app -> the relay's hub -> silos of the region
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from fedsync.common import codec, foreign
from fedsync.common.errors import SERVER, FedSyncError, ProtocolError
from fedsync.extras.relays.relay import RelayService
from fedsync.extras.relays.relay_line import RelayLine
from fedsync.extras.relays.relay_messages import RelayCall
from fedsync.model.transfer import Payload
from fedsync.silo.owner.refusals import refuse
from fedsync.silo.protocol import Forward, Forwarded, write_reply
from fedsync.silo.session import trainer_socket
from fedsync.transport.port import Transport

logger = foreign.logger(__name__)

UPDATES = "updates"
"""Folder of updates that wait for a sum, in the folder of the relay's run."""

_LOOK_S, _IDLE_S = 0.02, 0.2


def serve_relay(silos: Transport, socket: Path, keys: Path | None, folder: Path) -> None:
    """Serve until this process ends.

    Args:
        silos: connection to the silos of the region.
        socket: path of the socket to listen on.
        keys: the server's key file for encrypted runs; None for none.
        folder: folder of the relay's run.
    """
    from fedsync.cipher.keys.keywrap import read_server_file

    server = None if keys is None else read_server_file(keys.read_bytes(), str(keys))
    line = RelayLine(silos)
    service = RelayService(line, server, folder / UPDATES)
    service.turn()
    listener = trainer_socket.listen(socket)
    listener.setblocking(True)

    def let_in() -> None:
        while True:
            caller = Connection(listener.accept()[0].detach())
            threading.Thread(target=_answer, args=(service, caller), daemon=True).start()

    threading.Thread(target=let_in, daemon=True).start()
    while True:
        try:
            service.turn()
        except Exception:  # for example while the SuperLink restarts
            logger.exception("the silos of the region cannot be asked")
            time.sleep(1.0)
        line.wait(_LOOK_S if service.waits else _IDLE_S)


def _answer(service: RelayService, caller: Connection) -> None:
    """Answer one call, and wait until the caller has received the answer, which may be a temporary file."""
    with caller:
        answer: Payload | None = None
        try:
            asked, payload = trainer_socket.receive(caller)
            if not isinstance(asked, Forward):
                raise ProtocolError(SERVER, "message", "a relay answers what is handed on to it")
            call: RelayCall = codec.loads(RelayCall, asked.text, own=True)
            text, answer = service.ask(call.spec, call.text, payload)
        except FedSyncError as error:
            text = write_reply(refuse(error.with_traceback(None)))  # the operator acts by the text
        except Exception as error:
            text = write_reply(refuse(error))
        with suppress(OSError, EOFError):
            trainer_socket.send(caller, Forwarded(text), answer)
            caller.recv_bytes()
