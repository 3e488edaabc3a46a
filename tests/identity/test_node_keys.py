"""Node keys, in the form that Flower reads."""

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedsync.common.errors import ConfigError
from fedsync.identity.node_keys import make_node_key, node_public_line


def test_a_node_key_is_what_flower_registers(tmp_path: Path) -> None:
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    key = make_node_key("st.mary-0", tmp_path / "keys")
    private = load_ssh_private_key(key.private.read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert try_load_public_key(key.public) == public_key_to_bytes(private.public_key())
    assert key.public.read_text().split()[::2] == ["ecdsa-sha2-nistp384", "st.mary-0"]


def test_a_node_key_is_made_once_and_its_public_half_again(tmp_path: Path) -> None:
    first = make_node_key("a", tmp_path / "keys")
    line = first.public.read_bytes()
    first.public.unlink()
    assert make_node_key("a", tmp_path / "keys") == first
    assert first.public.read_bytes() == line
    other = make_node_key("b", tmp_path / "keys")
    assert other.fingerprint != first.fingerprint
    assert line.startswith(node_public_line(first.private))
    assert isinstance(load_ssh_public_key(line), ec.EllipticCurvePublicKey)


def test_the_private_half_is_its_owners_alone_and_damaged_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="silo name"):
        make_node_key("../a", tmp_path / "keys")
    key = make_node_key("a", tmp_path / "keys")
    assert stat.S_IMODE(key.private.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.public.stat().st_mode) == 0o644
    key.private.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        make_node_key("a", tmp_path / "keys")
    key.private.chmod(0o600)
    key.private.write_bytes(key.private.read_bytes()[:100])
    with pytest.raises(ConfigError, match="not an elliptic-curve key"):
        node_public_line(key.private)
