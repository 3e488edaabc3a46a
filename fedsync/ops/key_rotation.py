"""Rotation of a silo's node key, recorded in its audit log."""

from __future__ import annotations

from pathlib import Path

from fedsync.common.errors import ConfigError
from fedsync.common.files import private_folder, read_private, write_private
from fedsync.config.silo_start import SiloStartConfig
from fedsync.identity.node_keys import NodeKey, make_node_key, read_node_keys
from fedsync.ops.audit_heads import ROTATED, rotation
from fedsync.silo.owner.audit import AuditLog
from fedsync.silo.owner.owner_policy import audit_place

_NEXT = "next"
_MOST_BYTES = 2**16


def rotate_node_key(config: SiloStartConfig) -> NodeKey:
    """Replace a silo's node key with a new key; the old key stays beside it as ``NAME.node.old``.

    The entry of the audit log is on disk before the key changes. After a crash in between, run the command again.

    Raises:
        ConfigError: the silo has no node key, or a file cannot be written.
    """
    if config.node_key is None:
        remedy = "There is nothing to do: with insecure: true no node proves who it is"
        raise ConfigError("silo.yaml, node_key", "the silo has no node key", remedy)
    private = Path(config.node_key)
    name = private.stem
    fresh = make_node_key(name, private.parent / _NEXT)
    private_folder(Path(config.state))
    AuditLog(audit_place(config)).add(ROTATED, rotation(config.name, private, fresh.private))
    write_private(private.with_name(f"{private.name}.old"), read_private(private, _MOST_BYTES))
    fresh.private.replace(private)
    fresh.public.replace(private.with_name(f"{private.name}.pub"))
    fresh.private.parent.rmdir()
    return next(key for key in read_node_keys(private.parent) if key.name == name)
