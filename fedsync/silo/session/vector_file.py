"""File of one JSON line and the vectors that it describes: a trainer finds it again complete, or not at all.

| bytes | content |
|---|---|
| 32 | SHA-256 of the line |
| to a multiple of 64 | JSON line: the caller's data, and types, sizes and SHA-256s of the rest |
| as many as the line says | vectors, one after the other |
| to the end | other bytes |

The file is replaced as a whole. Its vectors are memory maps, and are written span by span, so no vector needs to be in
memory as a whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsync.common.checksums import digested, undigested
from fedsync.common.files import OWNER_FILE, write_pieces
from fedsync.model.chunked_arrays import digest, map_file, pieces

_ALIGNED = 64
"""Alignment of the first vector [bytes], so that its map is an ordinary aligned array."""

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, eq=False)
class VectorFile:
    """Content of a vector file: the caller's JSON data, flat arrays in file order, and other bytes."""

    about: Mapping[str, Any]
    vectors: Mapping[str, NDArray[Any]]
    rest: bytes = b""

    def save(self, path: Path) -> Mapping[str, NDArray[Any]]:
        """Write the file durably, or raise `ConfigError`; return the vectors as maps of the file."""
        described = {name: (each.dtype.name, each.size, digest(each).hex()) for name, each in self.vectors.items()}
        rest = hashlib.sha256(self.rest).hexdigest()
        text = json.dumps({"about": self.about, "vectors": described, "rest": rest}, separators=(",", ":")).encode()
        begins = -(-(_DIGEST_BYTES + len(text) + 1) // _ALIGNED) * _ALIGNED
        head = digested(text.ljust(begins - _DIGEST_BYTES - 1) + b"\n")
        vectors = chain.from_iterable(map(pieces, self.vectors.values()))
        write_pieces(path, chain((head,), vectors, (self.rest,)), OWNER_FILE)
        return _mapped(path, described, begins)

    @classmethod
    def load(cls, path: Path) -> VectorFile | None:
        """Return the file's content; None where it is damaged. Raises `OSError` if it is missing or unreadable."""
        with path.open("rb") as file:
            line = undigested(file.read(_DIGEST_BYTES) + file.readline())
            if line is None:
                return None
            said, begins = json.loads(line), file.tell()
            described = said["vectors"]
            ends = begins + sum(size * np.dtype(dtype).itemsize for dtype, size, _ in described.values())
            file.seek(ends)
            rest = file.read()
        # A truncated file fails the digest of the rest or the size check; surplus bytes change the digest.
        if hashlib.sha256(rest).hexdigest() != said["rest"] or path.stat().st_size < ends:
            return None
        vectors = _mapped(path, described, begins)
        whole = all(digest(vectors[name]).hex() == hashed for name, (_, _, hashed) in described.items())
        return cls(said["about"], vectors, rest) if whole else None


def _mapped(path: Path, described: Mapping[str, tuple[str, int, str]], begins: int) -> dict[str, NDArray[Any]]:
    vectors = {}
    for name, (dtype, size, _) in described.items():
        vectors[name] = map_file(path, np.dtype(dtype), begins, size)
        begins += vectors[name].nbytes
    return vectors
