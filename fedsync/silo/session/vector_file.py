"""A file of a line of JSON and the vectors that it tells of: what a trainer must find again whole, or not at all.

| bytes | what |
|---|---|
| 32 | SHA-256 of the line |
| to a multiple of 64 | a line of JSON: what the caller says, and types, sizes and SHA-256s of what follows |
| as many as the line says | vectors, one after the other |
| to the end | other bytes |

Such a file is replaced as a whole. Its vectors are maps of it, and are written span by span, so that none needs to be
in memory.
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
"""Bytes; the first vector begins at a multiple of it, so that a map of it is an array like any other."""

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, eq=False)
class VectorFile:
    """What one has.

    Args:
        about: what the caller says of it; JSON.
        vectors: flat arrays, by name, in their order.
        rest: other bytes.
    """

    about: Mapping[str, Any]
    vectors: Mapping[str, NDArray[Any]]
    rest: bytes = b""

    def save(self, path: Path) -> Mapping[str, NDArray[Any]]:
        """Write it; it is on disk when this returns.

        Returns:
            The vectors as maps of the file.

        Raises:
            ConfigError: the disk does not take it.
        """
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
        """What the file has; None where it is not what was written.

        Raises:
            OSError: there is none, or it cannot be read.
        """
        with path.open("rb") as file:
            line = undigested(file.read(_DIGEST_BYTES) + file.readline())
            if line is None:
                return None
            said, begins = json.loads(line), file.tell()
            described = said["vectors"]
            ends = begins + sum(size * np.dtype(dtype).itemsize for dtype, size, _ in described.values())
            file.seek(ends)
            rest = file.read()
        # A shorter file has no rest that fits, a longer one has too much.
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
