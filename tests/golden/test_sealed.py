"""What silos seal for one round, byte by byte: who changes the format raises its number (``VERSION`` of the wire).

The random numbers of one process come from a counter here. BFV draws its own, also below masks, so of these the sizes
and the opened model are compared.

    python -m tests.golden.test_sealed
"""

import hashlib
import itertools
import json
import tempfile
from functools import partial
from pathlib import Path

import pytest

from fedsync.cipher.keys.authority import emulated_keys
from tests.cipher.make import Federation, change, plan
from tests.cipher.test_aggregator_and_replica import THREE

GOLDEN = Path(__file__).parent / "sealed.json"
KINDS = ["pad", "bfv", "masked"]


def counted() -> object:
    """In the place of ``secrets.token_bytes``."""
    numbers = itertools.count()

    def token_bytes(size: int) -> bytes:
        return hashlib.shake_256(str(next(numbers)).encode()).digest(size)

    return token_bytes


def sha(data: object) -> str:
    return hashlib.sha256(memoryview(data)).hexdigest()  # type: ignore[arg-type]


def sealed(kind: str, bits: int, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, str]:
    """Digests of what three silos sealed in a round, and of the model that they opened."""
    patch.setattr("secrets.token_bytes", counted())
    if kind == "pad":  # which has no use for a context, and it would be another one each time
        patch.setattr("tests.cipher.make.emulated_keys", partial(emulated_keys, new_context=lambda: b"none"))
    else:
        patch.setattr("tests.cipher.make.emulated_keys", emulated_keys)
    federation = Federation(plan(kind, bits), folder, THREE)
    ids, found = [], {}
    for name in THREE:
        federation.begin(name, 0)
    for name in THREE:
        update_id, payload = federation.seal(name, change(ord(name)))
        federation.aggregator.put(name, update_id, payload)
        federation.aggregator.holds(name, 0)
        ids.append(update_id)
        found[name] = sha(payload) if kind == "pad" else f"{payload.nbytes} bytes"
    federation.commit(1, ids)
    federation.unmask()
    catch_up = federation.aggregator.outgoing("a")
    return {**found, "sums": sha(catch_up) if kind == "pad" else "", "model": sha(federation.begin("a", 1))}


def everything(patch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    found = {}
    for kind, bits in itertools.product(KINDS, (8, 12, 16)):
        with tempfile.TemporaryDirectory() as folder:
            found[f"{kind} {bits}"] = sealed(kind, bits, Path(folder), patch)
    return found


@pytest.mark.slow
def test_a_round_has_the_bytes_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    found = everything(monkeypatch)
    assert found == json.loads(GOLDEN.read_text(encoding="utf-8"))
    for bits in (8, 12, 16):
        models = {found[f"{kind} {bits}"]["model"] for kind in KINDS}
        assert len(models) == 1, "what hides the sum changes nothing in it"


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as everywhere:
        GOLDEN.write_text(json.dumps(everything(everywhere), indent=1) + "\n", encoding="utf-8")
