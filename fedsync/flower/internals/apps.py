"""Whose code answers a message at a silo: FedSync's own, or what came with the run.

Every run brings a bundle of files from the server, and says in it which ClientApp answers. FedSync's bundles have no
code at all: they name the client that is installed at the silo. A bundle of others has, and it would run beside the
silo's keys and data.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fedsync.core.errors import ConfigError

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.supercore.fab import Fab
    from flwr.supercore.run import Run

logger = logging.getLogger(__name__)

OWN = "fedsync.flower.client_app:app"
"""The client as it is installed."""

WIRING = "client.app:app"
"""What FedSync's repository, submitted as a Flower app, calls it: that file does nothing but import it."""


class Apps:
    """Finds the ClientApp of a bundle, once for each.

    Args:
        shipped: whether a bundle may bring its own. Without it nothing of a bundle is installed or imported.
    """

    def __init__(self, *, shipped: bool = False) -> None:
        self._shipped = shipped
        self._found: dict[str, ClientApp] = {}

    def of(self, run: Run, fab: Fab) -> ClientApp:
        """The app that answers messages of a run.

        Raises:
            ConfigError: the bundle brings its own, and the silo's owner does not allow that.
            Exception: it is no bundle, or its app cannot be loaded.
        """
        if fab.hash_str not in self._found:
            self._found[fab.hash_str] = self._find(run, fab)
        return self._found[fab.hash_str]

    def _find(self, run: Run, fab: Fab) -> ClientApp:
        from flwr.common.config import get_fab_config

        client = get_fab_config(fab.content)["tool"]["flwr"]["app"]["components"]["clientapp"]
        # Names prove nothing, and need not: what they lead to is here already.
        if client == OWN or (client == WIRING and not self._shipped):
            from fedsync.flower.client_app import app

            logger.info("messages of %s, bundle %.12s, are answered by FedSync's own client", run.fab_id, fab.hash_str)
            return app
        if not self._shipped:
            problem = f"the bundle {run.fab_id} brings its own client, {client}, and this silo runs only FedSync's"
            raise ConfigError(
                "clientapp", problem, f"Name {OWN} as clientapp, or have the owner write code: shipped in silo.yaml"
            )
        logger.warning("messages of %s, bundle %.12s, are answered by code of its own", run.fab_id, fab.hash_str)
        return _installed(run, fab)


def _installed(run: Run, fab: Fab) -> ClientApp:
    from flwr.cli.install import install_from_fab
    from flwr.clientapp.utils import get_load_client_app_fn

    install_from_fab(fab.content, skip_prompt=True)
    load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    return load(run.fab_id, run.fab_version, fab.hash_str)
