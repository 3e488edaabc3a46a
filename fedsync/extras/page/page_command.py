"""Command ``fedsync page``: live view of a run in a browser, where operators can steer it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsync.common.errors import ConfigError
from fedsync.observe.terminal import say


def page(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run, on the server's machine.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="On 127.0.0.1; 0 takes a free one.")] = 0,
    read_only: Annotated[bool, typer.Option("--read-only", help="Only show; nothing can be changed.")] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Show a running run as a web page on this machine, and steer it there, until Ctrl-C."""
    from fedsync.core.journal import JOURNAL
    from fedsync.extras.page.page_server import PageServer
    from fedsync.observe.run_state import NO_RUN, before_its_beginning

    if not folder.is_dir():
        raise ConfigError(str(folder), "no such folder", f"Name the folder of a run, which has a {JOURNAL}")
    if not (folder / JOURNAL).is_file() and before_its_beginning(folder) is None:
        raise ConfigError(str(folder), NO_RUN, "Name the folder that --out named")
    try:
        server = PageServer(folder, port, steers=not read_only)
    except OSError as error:
        raise ConfigError("--port", f"{port} cannot be used: {error.strerror}", "Leave it out") from None
    with server:
        say(f"Open once, in one tab of a browser on this machine: {server.link}")
        tunnel = f"ssh -L {server.server_port}:127.0.0.1:{server.server_port} this-machine"
        say(f"From elsewhere: {tunnel}, then the same link")
        if open_it:
            typer.launch(server.link)
        server.serve_forever()
