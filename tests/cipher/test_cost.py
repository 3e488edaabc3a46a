"""``bench/cost/cipher.py`` prints what docs/benchmarks/encryption.md says; every suite takes the promised bytes."""

import json
import subprocess
import sys

import pytest

from bench.cost import cipher
from bench.cost.cipher_round import KINDS, CipherCost, measure_suite, resnet_layout
from fedsync.cipher.encoding.packing import Packing
from fedsync.cipher.encoding.quantization import QuantizationGrid
from fedsync.cipher.encoding.sealed_wire import Head, Kind
from fedsync.cipher.suites.suite import Member, form_of

KEYS = {
    "kind", "params", "silos", "bits", "seal_mparams_s", "server_add_mparams_s", "open_mparams_s",
    "bytes_per_param_up", "bytes_per_param_down", "max_error", "peak_mib", "tag_mparams_s", "check_mparams_s",
}  # fmt: skip


@pytest.mark.slow
def test_json_has_the_keys_of_the_contract_and_nothing_else_is_printed() -> None:
    """As a process of its own, for the library prints past Python."""
    command = [sys.executable, "bench/cost/cipher.py", "--params", "50000", "--silos", "2"]
    done = subprocess.run([*command, "--against", "ckks", "--json"], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result.keys() == KEYS | {"against", "ratio"}
    assert result["against"].keys() == KEYS
    assert result["ratio"].keys() == {"seal", "server_add", "open", "bytes_up"}
    assert (result["kind"], result["params"], result["silos"], result["bits"]) == ("bfv", 50_000, 2, 16)
    up, other = result["bytes_per_param_up"], result["against"]["bytes_per_param_up"]
    assert result["ratio"]["bytes_up"] == pytest.approx(other / up)
    # One step of 2^-15 of a tensor's range, at most twice its largest value.
    assert result["max_error"] < 2.0**-13
    assert result["against"]["max_error"] < 1e-4


@pytest.mark.parametrize(
    ("kind", "bits", "most"), [("bfv", 16, 8.1), ("masked", 16, 8.1), ("bfv", 8, 4.1), ("pad", 16, 2.7)]
)
def test_a_million_values_take_no_more_bytes_than_promised(kind: str, bits: int, most: float) -> None:
    """By the length that a message must have; messages of that length are made by the other tests."""
    form, layout = form_of(kind), resnet_layout(10**6)
    packing = Packing(bits, form.slot_bits)
    grid = QuantizationGrid(layout, packing, (0,) * len(layout.names), 1)
    members = tuple(Member(f"silo{i}/1000", 0, bytes(16), bytes(32)) for i in range(8))
    for what, named in ((Kind.UPDATE, members[:1]), (Kind.AGGREGATE, members)):
        head = Head(what, form, packing, "silo", 0, 0, 1, bytes(16), grid.digest, grid.chunks, named)
        assert head.nbytes / 10**6 <= most


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [8, 16])
def test_every_suite_can_be_measured(kind: str, bits: int) -> None:
    cost = measure_suite(kind, bits, 3000, 3)
    assert isinstance(cost, CipherCost)
    assert cost.max_error < 2.0 ** (3 - bits)
    assert min(cost.seal_mparams_s, cost.server_add_mparams_s, cost.open_mparams_s) > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--bits", "8", "--silos", "17"], "hold 16 updates"), (["--kind", "masked", "--silos", "2"], "masks need 3")],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["cipher.py", "--params", "2000", *options])
    with pytest.raises(SystemExit):
        cipher.main()
    assert words in capsys.readouterr().err


def test_without_json_a_table_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["cipher.py", "--params", "2000", "--kind", "pad"])
    cipher.main()
    assert "bytes a value, up" in capsys.readouterr().out
