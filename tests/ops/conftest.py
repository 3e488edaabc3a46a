"""Certificates of a server."""

from pathlib import Path

import pytest

from fedsync.identity.certificates import make_authority, make_server_certificate


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    folder.chmod(0o700)
    make_server_certificate(make_authority(folder), ["fl.example.org"], folder)
    return folder
