"""Command ``fedsync code``: signature of training code by a reviewer, and the check of signatures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsync.common.errors import ConfigError
from fedsync.observe.terminal import say

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedsync.common.sandbox.confirmed_code import Review

app = typer.Typer(help="Reviewed code, for silos with code: reviewed.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder that the code's modules are imported from.")]


@app.command()
def sign(
    folder: Folder,
    key: Annotated[Path, typer.Option("--key", help="Your private key, as `ssh-keygen -t ed25519` makes it.")],
) -> None:
    """Sign every Python file of a folder as it is now; the signature goes into its code-review.json."""
    from fedsync.common.sandbox.confirmed_code import Review, code_below

    files = code_below(_there(folder))
    if not files:
        raise ConfigError(str(folder), "there is no Python file", "Name the folder that modules are imported from")
    try:
        data = key.read_bytes()
        try:
            own = _private_key(data, None)
        except TypeError:
            own = _private_key(data, typer.prompt(f"Passphrase of {key}", hide_input=True))
    except (OSError, ValueError) as error:
        raise ConfigError("--key", f"{key} cannot be used: {error}", "Make one: ssh-keygen -t ed25519") from error
    before = _review(folder)
    # Signatures on other content do not apply to this content.
    review = Review(files, before.signatures if before is not None and before.files == files else {}).sign(own)
    say(*(f"{digest}  {name}" for name, digest in files.items()), most=None)
    say(f"signed {len(files)} files: {review.write(folder)}, with {len(review.signatures)} signatures")


@app.command()
def verify(
    folder: Folder,
    reviewer: Annotated[
        list[Path] | None, typer.Option("--reviewer", metavar="FILE", help="Public key whose signature is required.")
    ] = None,
) -> None:
    """Print the signers of a folder's code, and the files that differ from the signed files."""
    from fedsync.common.sandbox.confirmed_code import bare, code_below

    files, review = code_below(_there(folder)), _review(folder)
    if review is None:
        raise ConfigError(str(folder), "no reviewer signed this code", "Sign it with `fedsync code sign`")
    good = [key for key in review.signatures if review.signed_by(key)]
    say(*(f"signed by {key}" for key in good), most=None)
    say(*(f"FAIL the signature of {key} is of other files" for key in review.signatures.keys() - good), most=None)
    changed = sorted({name for name, _ in files.items() ^ review.files.items()})
    say(*(f"FAIL {name} is not as it was signed" for name in changed), most=None)
    missing = []
    for path in reviewer or ():
        try:
            wanted = bare(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("--reviewer", f"{path} is no public key: {error}", "Name a file .pub") from error
        missing += [path] if wanted not in good else []
    say(*(f"FAIL not signed by {path}" for path in missing), most=None)
    if changed or missing or not good or len(good) < len(review.signatures):
        raise typer.Exit(1)
    say(f"ok   {len(files)} files are as they were signed")


def _there(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(str(folder), "there is no such folder", "Name the folder that modules are imported from")
    return folder


def _review(folder: Path) -> Review | None:
    from fedsync.common.sandbox.confirmed_code import REVIEW, Review

    try:
        return Review.read(folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"the review is damaged: {error}"
        raise ConfigError(str(folder / REVIEW), problem, "Remove it, and sign anew") from error


def _private_key(data: bytes, passphrase: str | None) -> Ed25519PrivateKey:
    """Parse a reviewer's key, as ``ssh-keygen -t ed25519`` makes it. Raises `ValueError` for another key or a wrong
    passphrase, and `TypeError` if the key is encrypted and ``passphrase`` is None.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    key = load_ssh_private_key(data, None if passphrase is None else passphrase.encode())
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError("it is no Ed25519 key")
    return key
