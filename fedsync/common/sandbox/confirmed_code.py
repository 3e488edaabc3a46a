"""Confirmation of code: a file runs only with the content that an owner approved or a reviewer signed.

A file is compared with its confirmed SHA-256 when it is read for execution, so only the compared bytes run. The same
holds for imported modules, except from the folders in ``sys.path`` at process start (the standard library and installed
packages). `confirm_imports` does this with a Python path hook that finds Python source only: other folders yield no
bytecode, no native module and no archive.

A review is a file, ``code-review.json``, in the folder that modules are imported from:

| field | content |
|---|---|
| ``files`` | SHA-256 (hexadecimal) of every Python file, by path relative to the folder |
| ``signatures`` | Ed25519 signatures (base64) over the result of `_signed`, by public key in OpenSSH's form |
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from fedsync.common.errors import ConfigError, OwnerRefusal
from fedsync.common.files import file_digest, write_atomically
from fedsync.common.sandbox.path_sandbox import open_data

REVIEW = "code-review.json"

MOST_FILES, _MOST_ENTRIES, _MOST_BYTES = 1000, 20_000, 2**20

_INSTALLED = tuple({Path(folder).resolve() for folder in sys.path})

Check = Callable[[Path, bytes], None]
"""Raises `OwnerRefusal` if a file, given by its absolute path, may not run with this content."""


def code_below(root: Path) -> dict[str, str]:
    """SHA-256, hexadecimal, of the Python files below a folder, by relative path; raises `ConfigError` on failure."""
    found: dict[str, str] = {}
    entries = 0
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith(".") and name != "__pycache__")
        entries += len(inner) + len(names)
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            try:
                if not path.is_file():  # reading a pipe would block
                    raise ConfigError(str(path), "this is no file", "Remove it, or change its file extension")
                found[path.relative_to(root).as_posix()] = file_digest(path)
            except OSError as error:
                raise ConfigError(str(path), f"cannot be read: {error.strerror}", "Fix or remove the file") from error
        if entries > _MOST_ENTRIES or len(found) > MOST_FILES:
            problem = f"more than {MOST_FILES} Python files or {_MOST_ENTRIES} files of any kind lie here"
            raise ConfigError(str(root), problem, "Give the code a folder of its own")
    return found


@dataclass(frozen=True, slots=True)
class Review:
    """Reviewers' signatures on the Python files of a folder, by public key in OpenSSH's form without a comment."""

    files: Mapping[str, str]
    signatures: Mapping[str, bytes]

    @classmethod
    def read(cls, folder: Path) -> Review | None:
        """Read the review in a folder; None without a review. Raises `ValueError` if the file is damaged."""
        try:
            with open_data(folder / REVIEW) as file:
                text = file.read(_MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        said = json.loads(text)
        files, signatures = said["files"], said["signatures"]
        if not all(isinstance(each, str) for pair in (*files.items(), *signatures.items()) for each in pair):
            raise ValueError("it is no review")
        return cls(files, {key: base64.b64decode(text, validate=True) for key, text in signatures.items()})

    def write(self, folder: Path) -> Path:
        signatures = {key: base64.b64encode(signature).decode() for key, signature in self.signatures.items()}
        text = json.dumps({"files": dict(self.files), "signatures": signatures}, indent=1, sort_keys=True)
        write_atomically(folder / REVIEW, f"{text}\n".encode())
        return folder / REVIEW

    def signed_by(self, key: str) -> bool:
        key = bare(key)
        try:
            _public(key).verify(self.signatures[key], _signed(self.files))
        except (KeyError, InvalidSignature):
            return False
        return True

    def sign(self, key: Ed25519PrivateKey) -> Review:
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        return replace(self, signatures={**self.signatures, public: key.sign(_signed(self.files))})


def bare(key: str) -> str:
    """Return a public key in OpenSSH's form without its comment; raises `ValueError` unless it is an Ed25519 key."""
    text = " ".join(key.split()[:2])
    _public(text)
    return text


def _public(key: str) -> Ed25519PublicKey:
    found = load_ssh_public_key(key.encode())
    if not isinstance(found, Ed25519PublicKey):
        raise ValueError("it is no Ed25519 key")
    return found


def _signed(files: Mapping[str, str]) -> bytes:
    return b"fedsync code review 1\0" + json.dumps(files, sort_keys=True).encode()


def confirmed_by_approval(record: Path) -> Check:
    try:
        files = json.loads(record.read_bytes())["code"]
    except (OSError, ValueError, KeyError, TypeError):
        files = {}

    def check(path: Path, data: bytes) -> None:
        if files.get(str(path)) != hashlib.sha256(data).hexdigest():
            if str(path) not in files:
                problem = f"{path} is none of the files of code that this silo's owner approved"
                raise OwnerRefusal("approve", problem, "Put it in a folder below the code, or install it at the silo")
            problem = f"{path} has changed since this silo's owner approved the run"
            raise OwnerRefusal("approve", problem, "Have the owner refuse and approve the run again")

    return check


def confirmed_by_review(root: Path, reviewers: Sequence[str]) -> Check:
    """Return the check of ``code: reviewed``; raises `OwnerRefusal` if no listed reviewer signed the folder's files."""
    try:
        review = Review.read(root)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "Sign the folder anew with `fedsync code sign`"
        raise OwnerRefusal("code", f"unreviewed: {root / REVIEW} is damaged", remedy) from error
    if review is None or not any(review.signed_by(key) for key in reviewers):
        problem = f"unreviewed: no reviewer whose key this silo's owner lists signed the code in {root}"
        raise OwnerRefusal("code", problem, "Have one sign it with `fedsync code sign`")

    def check(path: Path, data: bytes) -> None:
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else None
        if name is None or review.files.get(name) != hashlib.sha256(data).hexdigest():
            problem = f"unreviewed: {path} is {'not as the reviewer signed it' if name else f'outside of {root}'}"
            raise OwnerRefusal("code", problem, "Have a reviewer sign the code anew with `fedsync code sign`")

    return check


class _ConfirmedLoader(SourceFileLoader):
    """Loader that runs the checked bytes of a module."""

    def __init__(self, name: str, path: str, check: Check) -> None:
        super().__init__(name, path)
        self._check = check

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.get_filename(fullname))
        with open_data(path) as file:
            data = file.read()
        self._check(path, data)
        code: CodeType = compile(data, str(path), "exec", dont_inherit=True)
        return code


def confirm_imports(root: Path, check: Check) -> Callable[[], None]:
    """Require a check of every module imported from now on, except installed modules; return a function that undoes
    this. ``root`` is the folder of the code, absolute and without links; it may lie above or below installed folders.
    """

    loader = partial(_ConfirmedLoader, check=check)

    def finder(folder: str) -> FileFinder:
        here = Path(folder).resolve()
        above = [each for each in (root, *_INSTALLED) if here.is_relative_to(each)]
        nearest = max(above, key=lambda each: len(each.parts), default=root)
        if nearest != root:
            raise ImportError(f"{folder} is installed")  # makes Python ask its other hooks
        return FileFinder(str(here), (loader, [".py"]))  # type: ignore[arg-type]  # a loader's maker

    def back() -> None:
        sys.path_hooks.remove(finder)
        sys.path_importer_cache.clear()

    sys.path_hooks.insert(0, finder)
    sys.path_importer_cache.clear()
    return back
