"""Proofs of nodes that serve several requests, and what else they would open."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.supercore.primitives import asymmetric

from fedsync.config.gate import GateConfig
from fedsync.flower.internals import versions
from fedsync.flower.internals.bundles import PULL_NOW
from fedsync.flower.internals.node_proof import PROOF_S, share_proofs
from tests.flower.internals.superlink import SuperLink, serving

pytestmark = pytest.mark.skipif(not versions.supported(), reason="this flwr is not a tested version")

TIME, KEY, SIGNATURE = "flwr-timestamp", "flwr-public-key", "flwr-signature"


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperLink]:
    with serving(monkeypatch, GateConfig()) as found:
        yield found


def look(link: SuperLink, headers: dict[str, str]) -> int:
    return httpx.post(f"http://127.0.0.1:{link.port}{PULL_NOW}", content=b"", headers=headers).status_code


def test_a_proof_is_checked_once_and_proves_nothing_else(link: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, check = list[bytes](), asymmetric.verify_signature

    def noted(key: Any, message: bytes, signature: bytes) -> bool:
        checked.append(message)
        return check(key, message, signature)

    monkeypatch.setattr(asymmetric, "verify_signature", noted)
    berlin, paris = link.silo().headers, link.silo("paris").headers
    assert [look(link, berlin) for _ in range(3)] == [200, 200, 200]
    assert checked == [berlin[TIME].encode()]
    for wrong in ({TIME: paris[TIME]}, {KEY: paris[KEY]}, {SIGNATURE: paris[SIGNATURE]}):
        assert look(link, {**berlin, **wrong}) == 401
    assert look(link, paris) == look(link, berlin) == 200


def test_a_node_makes_a_proof_now_and_then() -> None:
    made, times = list[dict[str, str]](), [0.0]

    def intercept(context: Any, call_next: Any) -> Any:
        made.append({SIGNATURE: str(len(made))})
        context.request.headers.update(made[-1])
        return call_next(context)

    signer = SimpleNamespace(intercept=intercept)
    share_proofs(signer, lambda: times[-1])

    def sent(at_s: float) -> str:
        times.append(at_s)
        request = SimpleNamespace(headers={})
        answer = signer.intercept(SimpleNamespace(request=request), lambda context: context.request.headers[SIGNATURE])
        assert answer == request.headers[SIGNATURE]
        return str(answer)

    assert [sent(at_s) for at_s in (0.0, 1.0, PROOF_S - 1.0, PROOF_S, PROOF_S + 1.0)] == ["0", "0", "0", "1", "1"]
    assert sent(3600.0) == "2", "a machine that slept"
    assert sent(1800.0) == "3", "a clock that was set back"
