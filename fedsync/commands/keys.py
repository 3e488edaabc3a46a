"""Command ``fedsync keys``: creation, wrapping, acceptance and rotation of the keys of encrypted aggregation."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.common.files import read_input
from fedsync.observe.terminal import say

if TYPE_CHECKING:
    from fedsync.cipher.keys.authority import Issue

app = typer.Typer(help="Keys of encrypted aggregation: the server never has any.", no_args_is_help=True)

Descriptor = Annotated[
    int | None, typer.Option("--passphrase-fd", metavar="N", help="Read the passphrase from this file descriptor.")
]
Ask = Annotated[bool, typer.Option("--passphrase", help="Put the keys under a passphrase, which is asked for.")]
AdminFolder = Annotated[Path, typer.Argument(help="The administrator's folder; keep it offline.")]
SiloFolder = Annotated[Path, typer.Option("--dir", help="The silo's folder for its keys.")]

_ANOTHER_BUNDLE = (
    "Ask the administrator for the newest bundle of this silo. If the silo has made new keys, first send the "
    "administrator the line of `fedsync keys silo`"
)

_MAX_FILE_BYTES = 4 * 2**20
_MAX_PASSPHRASE_BYTES = 4096


@app.command()
def encrypt(
    folder: Annotated[Path, typer.Argument(help="A folder of an administrator or a silo.")],
    descriptor: Descriptor = None,
) -> None:
    """Encrypt the key files of a folder with a passphrase, or change their passphrase."""
    from fedsync.cipher.keys.key_files import set_passphrase

    for path in set_passphrase(folder, _passphrase(descriptor, "New passphrase")):
        say(f"{path}: encrypted with the passphrase; without the passphrase, it is lost")


@app.command()
def decrypt(
    folder: Annotated[Path, typer.Argument(help="A folder of an administrator or a silo.")],
) -> None:
    """Remove the passphrase of the key files of a folder."""
    from fedsync.cipher.keys.key_files import set_passphrase

    for path in set_passphrase(folder, None):
        say(f"{path}: unencrypted; only its owner can read it")


@app.command()
def init(folder: AdminFolder, ask: Ask = False, descriptor: Descriptor = None) -> None:
    """Make the administrator's keys, not on the server's machine, and print their public key; or print it again."""
    from fedsync.cipher.keys.authority import new_authority

    _take_passphrase(ask, descriptor)
    public = new_authority(folder)
    sys.stdout.write(public.hex() + "\n")
    _tell("This is the administrator's public key. Give it to each silo in person or by telephone.")


@app.command()
def silo(
    name: Annotated[str, typer.Argument(help="Name of the silo.")],
    folder: SiloFolder,
    ask: Ask = False,
    descriptor: Descriptor = None,
) -> None:
    """Make a silo's own keys, at the silo, and print their public part; or print it again."""
    from fedsync.cipher.keys.keyring import new_silo
    from fedsync.cipher.keys.keywrap import announce

    _take_passphrase(ask, descriptor)
    keys = new_silo(folder, name)
    sys.stdout.write(announce(keys) + "\n")
    _tell("Send this line to the administrator, who is to compare by telephone:", f"{name} {keys.public.fingerprint}")


@app.command()
def issue(
    folder: AdminFolder,
    silos: Annotated[
        list[str] | None,
        typer.Option("--silo", metavar="FILE|LINE", help="The line of a silo to pin, or a file that holds it."),
    ] = None,
) -> None:
    """Pin silos and wrap the group secret for every pinned silo. A new silo begins a new epoch."""
    from fedsync.cipher.keys import authority

    issued = authority.issue(folder, [_line(text) for text in silos or ()])
    members = authority.open_authority(folder).members
    _tell("Compare these with the silos by telephone before you send anything:")
    for name, public in members.items():
        _tell(f"  {name} {public.fingerprint}")
    _say_issued(issued)


@app.command()
def rotate(
    folder: AdminFolder,
    without: Annotated[
        list[str] | None, typer.Option("--without", metavar="NAME", help="Silo that gets no further key.")
    ] = None,
) -> None:
    """Begin a new epoch with a fresh group secret."""
    from fedsync.cipher.keys import authority

    _say_issued(authority.rotate(folder, without or ()))


@app.command()
def accept(
    bundle: Annotated[Path, typer.Argument(help="The silo's bundle from the administrator.")],
    folder: SiloFolder,
    admin: Annotated[
        str | None,
        typer.Option("--admin", metavar="PUBLICKEY", help="The administrator's public key; pinned the first time."),
    ] = None,
) -> None:
    """Check a bundle, at its silo, and keep the group key. Older epochs are refused."""
    from fedsync.cipher.keys import keyring
    from fedsync.cipher.keys.keywrap import MAX_BUNDLE_BYTES

    pin = None if admin is None else _public_key(admin)
    try:
        group = keyring.accept(folder, read_input(bundle, MAX_BUNDLE_BYTES + 1), pin)
    except ProtocolError as error:
        raise ConfigError(str(bundle), error.detail, _ANOTHER_BUNDLE) from None
    say(f"epoch {group.epoch}, group {group.fingerprint.hex()}, silos: {', '.join(group.members)}")


def _say_issued(issued: Issue) -> None:
    _tell(f"Epoch {issued.epoch}. To the server goes {issued.server}; to each silo its bundle:")
    for name, path in issued.bundles.items():
        say(f"{name} {path}")


def _line(text: str) -> tuple[str, bytes]:
    if text.lstrip().startswith("{"):
        return "the line of --silo", text.encode("utf-8", "replace")
    return f"the line in {text}", read_input(Path(text), _MAX_FILE_BYTES).strip()


def _public_key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError("--admin", f"{text[:80]!r} is no public key", "Give the 64 digits that `keys init` printed")
    return key


def _take_passphrase(ask: bool, descriptor: int | None) -> None:
    from fedsync.cipher.keys.passphrase import GIVEN

    if ask or descriptor is not None:
        GIVEN.set(_passphrase(descriptor))


def _passphrase(descriptor: int | None, prompt: str = "Passphrase") -> str:
    """Read a passphrase from a descriptor, without its last newline, or from the terminal, twice."""
    if descriptor is None:
        return str(typer.prompt(prompt, hide_input=True, confirmation_prompt=True, err=True))
    try:
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            text = file.read(_MAX_PASSPHRASE_BYTES).decode().removesuffix("\n")
    except (OSError, ValueError) as error:
        raise ConfigError("--passphrase-fd", "no passphrase can be read there", "Give an open descriptor") from error
    if not text:
        raise ConfigError("--passphrase-fd", "the passphrase is empty", "Give one")
    return text


def _tell(*lines: str) -> None:
    for line in lines:
        say(line, err=True)
