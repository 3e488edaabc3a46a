"""Format of key files: strict JSON, bytes as hexadecimal; errors never repeat the content."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsync.cipher.keys import passphrase
from fedsync.cipher.keys.material import FINGERPRINT_BYTES, KEY_BYTES, MAX_EPOCH, SIGNATURE_BYTES
from fedsync.common.errors import ConfigError
from fedsync.common.files import read_private, write_private
from fedsync.common.names import SILO_NAME

MAX_FILE_BYTES = 16 * 2**20

Name = Annotated[str, Field(pattern=SILO_NAME)]
Key = Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Secret = Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES, repr=False)]
SecretContext = Annotated[bytes, Field(min_length=1, max_length=2**20, repr=False)]
Signature = Annotated[bytes, Field(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Fingerprint = Annotated[bytes, Field(min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)]
Epoch = Annotated[int, Field(ge=1, le=MAX_EPOCH)]


class Record(BaseModel):
    """JSON object with exactly these fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, hide_input_in_errors=True, val_json_bytes="hex", ser_json_bytes="hex"
    )

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Parse a JSON text; `ValueError` says what is wrong and where, without the found value."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(str(part)[:40] for part in first["loc"])
            problem = f"{place}: {first['msg']}" if place else first["msg"]
        # Raised outside the handler: the library's error holds the text, which may be a secret.
        raise ValueError(problem)

    def canonical(self) -> bytes:
        """JSON text that is signed: no spaces, fields in the order of the class, mappings in their own order."""
        return self.model_dump_json().encode()


Kind = TypeVar("Kind", bound=Record)


def write_record(path: Path, record: Record) -> None:
    """Write a secret record; under a passphrase if one was given, or if other key files in the folder have one.
    `ConfigError` if the folder is open to others or not writable, or the passphrase is unknown.
    """
    data = record.canonical() + b"\n"
    others = (read_private(other, MAX_FILE_BYTES) for other in path.parent.glob("*.key"))
    if passphrase.GIVEN.get() or any(map(passphrase.is_sealed, others)):
        data = passphrase.seal_file(data, passphrase.find_passphrase(path.parent))
    write_private(path, data)


def read_record(path: Path, kind: type[Kind], remedy: str) -> Kind:
    if not path.exists():
        raise ConfigError(str(path), "there is no such file", remedy)
    data = _plain(path)
    try:
        return kind.read(data)
    except ValueError as error:
        problem = f"damaged, or another kind of file: {error}"
    raise ConfigError(str(path), problem, "Restore it from a backup")


def set_passphrase(folder: Path, new: str | None) -> list[Path]:
    """Put all key files of a folder under a passphrase, or in the clear (None); return their paths. All files are read
    before the first is written, and each is replaced as a whole. `ConfigError` if there are none, or a file cannot be
    read or written.
    """
    plain = {path: _plain(path) for path in sorted(folder.glob("*.key"))}
    if not plain:
        raise ConfigError(str(folder), "there are no key files here", "Name a folder of `fedsync keys`")
    for path, data in plain.items():
        write_private(path, data if new is None else passphrase.seal_file(data, new))
    return list(plain)


def _plain(path: Path) -> bytes:
    data = read_private(path, MAX_FILE_BYTES)
    if not passphrase.is_sealed(data):
        return data
    return passphrase.open_file(data, passphrase.find_passphrase(path.parent), path)
