"""Processes that choose their port when they begin; that real ones find it is in tests/e2e."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from fedsync.flower.internals import port


def test_the_program_gets_a_free_port_that_is_written_down_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(port.os, "execv", lambda program, arguments: became.append((program, arguments)))
    monkeypatch.setattr(port, "free_ports", lambda count: [4000 + count])
    tmp_path.chmod(0o700)
    file = tmp_path / "supernode.port"
    port.main([str(file), "some.module", "supernode", "--insecure"])
    wanted = [sys.executable, "-m", "some.module", "supernode", "--insecure", "--port", "4001"]
    assert became == [(sys.executable, wanted)]
    assert file.read_text() == "4001" and stat.S_IMODE(file.stat().st_mode) == 0o600
