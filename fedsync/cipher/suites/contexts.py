"""TenSEAL's contexts: made by the administrator, opened by silos, the same way for every scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tenseal

from fedsync.cipher.suites.seal_format import FormatError
from fedsync.core.errors import ConfigError, RunError

T = TypeVar("T")


def secret_of(context: Any) -> bytes:
    """A context with its secret key and nothing else."""
    secret: bytes = context.serialize(
        save_public_key=False, save_secret_key=True, save_galois_keys=False, save_relin_keys=False
    )
    return secret


def opened(secret: bytes, probe: Callable[[Any], T]) -> tuple[Any, T]:
    """The library's context, and what ``probe`` found out with it about how the library writes ciphertexts.

    Args:
        secret: from `secret_of`. The library parses it, so it must come from the administrator, signed.
        probe: given the context; raises `FormatError` where the library writes otherwise than this version knows.

    Raises:
        ConfigError: it is no such context.
        RunError: the library writes ciphertexts otherwise than this version knows.
    """
    try:
        # One thread: a pool of the library's own would not survive a fork.
        loaded = tenseal.context_from(secret, n_threads=1)
        if not loaded.is_private() or loaded.has_galois_keys():
            raise ValueError("a context with the secret key and no others is needed")
        return loaded.data, probe(loaded.data)
    except FormatError as error:
        raise RunError(f"TenSEAL {tenseal.__version__} writes ciphertexts in an unknown way: {error}") from None
    except (ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(
            "group secret", f"no context of this suite: {error}", "Ask the administrator for a new one"
        ) from None
