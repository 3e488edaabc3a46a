"""Whose code answers a message at a silo: FedSync's own client, as it is installed.

Every run brings a bundle of files from the server, and says in it which ClientApp answers. FedSync's bundles have no
code at all: they name the client that is installed at the silo. A bundle of others has, and it would run beside the
silo's keys and data.
"""

from __future__ import annotations

import io
import tomllib
import zipfile
from typing import TYPE_CHECKING, Any

from fedsync.core import foreign
from fedsync.core.errors import SERVER, OwnerRefusal, ProtocolError

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.supercore.fab import Fab
    from flwr.supercore.run import Run

logger = foreign.logger(__name__)

OWN = "fedsync.flower.client_app:app"
"""The client as it is installed."""

WIRING = "client.app:app"
"""What FedSync's repository, submitted as a Flower app, calls it: that file does nothing but import it."""

MOST_BYTES = 2**20
"""Of a bundle's ``pyproject.toml``, inflated."""

_seen: set[str] = set()


def installed_app(run: Run, fab: Fab) -> ClientApp:
    """The app that answers messages of a run. Nothing of its bundle is installed or imported.

    Raises:
        OwnerRefusal: the bundle brings its own client.
        ProtocolError: it is no bundle.
    """
    from fedsync.flower.client_app import app

    if fab.hash_str not in _seen:
        try:
            client = _manifest(fab.content)["tool"]["flwr"]["app"]["components"]["clientapp"]
        except Exception as error:  # what anybody's bytes may do to the reading of them
            raise ProtocolError(SERVER, "bundle", f"{type(error).__name__}: {error}") from error
        # Names prove nothing, and need not: what they lead to is here already.
        if client not in (OWN, WIRING):
            problem = f"the bundle {run.fab_id} brings its own client, {client}, and this silo runs only FedSync's"
            remedy = f"Name {OWN} as clientapp, or have the owner write code: shipped in silo.yaml"
            raise OwnerRefusal("clientapp", problem, remedy)
        logger.info("messages of %s, bundle %.12s, go to FedSync's own client", run.fab_id, fab.hash_str)
        _seen.add(fab.hash_str)
    return app


def _manifest(bundle: bytes) -> dict[str, Any]:
    """The manifest of a bundle; nothing else of it is inflated, and of the manifest no more than is allowed."""
    with zipfile.ZipFile(io.BytesIO(bundle)) as files, files.open("pyproject.toml") as file:
        # What the bundle says of the length may be false.
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"its pyproject.toml has more than {MOST_BYTES} bytes")
    return tomllib.loads(text.decode())
