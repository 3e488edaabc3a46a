"""Models down as differences: server and silos agree on every bit, and what is lost does not add up."""

from pathlib import Path

import numpy as np
import pytest

from fedsync.common.errors import ProtocolError
from fedsync.model.broadcast_compression import HEAD_BYTES, HeldModel, PublicModel, differences_kept, download_bytes
from fedsync.model.chunked_arrays import SPAN_BYTES, ArrayKeeper
from fedsync.model.layout import Vector
from fedsync.model.plain_wire import FP32, Bf16, Fp16, Int8, WireFormat
from fedsync.model.transfer import OtherVersion, Payload
from tests.memory import traced

SIZE = 1500
FORMATS = [Bf16(), Fp16(), Int8()]
NAMES = ["bf16", "fp16", "int8"]


def models(count: int) -> list[Vector]:
    """A model that moves less and less."""
    rng = np.random.default_rng(2)
    steps = [(rng.standard_normal(SIZE) * 0.7**number).astype(np.float32) for number in range(count)]
    return [np.sum(steps[: number + 1], axis=0, dtype=np.float32) for number in range(count)]


def begun(wire: WireFormat, versions: int = 1) -> PublicModel:
    exact = models(versions)
    server = PublicModel(exact[0], wire)
    for model in exact[1:]:
        server.advance(model)
    return server


@pytest.mark.parametrize("wire", FORMATS, ids=NAMES)
def test_silos_have_the_server_s_model_to_the_bit_however_it_came(wire: WireFormat) -> None:
    """One follows every version, one every other, one comes late."""
    server = begun(wire)
    every, other, late = (HeldModel(SIZE, wire) for _ in range(3))
    exact = models(12)
    for version, model in enumerate(exact):
        if version:
            server.advance(model)
        followers = [every, *([other] if version % 2 else []), *([late] if version > 10 else [])]
        for silo in followers:
            got = silo.receive(server.payload(silo.version), version)
            np.testing.assert_array_equal(got.view(np.uint32), server.model.view(np.uint32))
        loss = np.linalg.norm(server.model - model)
        moved = np.linalg.norm(model - exact[max(version - 1, 0)])
        assert loss <= 0.02 * moved + 1e-6, "of the last difference, not of all of them"


@pytest.mark.parametrize("wire", [FP32, *FORMATS], ids=["fp32", *NAMES])
def test_what_is_sent_has_the_bytes_that_the_simulator_charges(wire: WireFormat) -> None:
    server = begun(wire, 8)
    assert server.payload(-1).nbytes == download_bytes(SIZE, wire, None)
    for held in range(8):
        assert server.payload(held).nbytes == download_bytes(SIZE, wire, 7 - held)
    assert server.payload(8).nbytes == download_bytes(SIZE, wire, -1), "a version that is not made yet"


def test_differences_are_sent_while_they_are_shorter_than_the_model() -> None:
    """Of 1500 values, a bfloat16 difference is half the model: two are as long. int8 has 3 blocks: 1512 bytes."""
    assert [differences_kept(SIZE, wire) for wire in FORMATS] == [1, 1, 3]
    server = begun(Int8(), 8)
    whole = HEAD_BYTES + 4 * SIZE
    sizes = [server.payload(held).nbytes for held in range(8)]
    assert sizes == [whole] * 4 + [HEAD_BYTES + behind * 1512 for behind in (3, 2, 1, 0)]


def test_the_same_is_made_once() -> None:
    server = begun(Int8(), 3)
    assert server.payload(1) is server.payload(1)
    assert server.payload(-1) is server.payload(-1)
    server.advance(models(3)[2])
    assert server.payload(2).nbytes == HEAD_BYTES + 1512


def test_after_a_rollback_silos_have_the_remembered_model_to_the_bit() -> None:
    server = begun(Int8(), 2)
    silo = HeldModel(SIZE, Int8())
    silo.receive(server.payload(-1), 1)
    remembered = server.model
    server.advance(models(3)[2])
    silo.receive(server.payload(1), 2)
    server.restart(remembered)
    np.testing.assert_array_equal(silo.receive(server.payload(silo.version), 3), remembered)


def test_who_began_with_an_older_model_still_has_it() -> None:
    server = begun(Int8(), 2)
    silo = HeldModel(SIZE, Int8())
    model = silo.receive(server.payload(-1), 1)
    before = model.copy()
    server.advance(models(3)[2])
    silo.receive(server.payload(1), 2)
    np.testing.assert_array_equal(model, before)


def test_a_silo_says_what_it_holds_where_that_is_not_continued() -> None:
    server = begun(Int8(), 3)
    restarted = HeldModel(SIZE, Int8())
    with pytest.raises(OtherVersion) as caught:
        restarted.receive(server.payload(1), 2)
    assert caught.value.mismatch.holds == -1
    np.testing.assert_array_equal(restarted.receive(server.payload(-1), 2), server.model)
    assert restarted.version == 2


def header(payload: Payload, base: int, version: int) -> Payload:
    changed = payload.copy()
    changed[:HEAD_BYTES] = np.array([base, version], np.int64).view(np.uint8)
    return changed


@pytest.mark.parametrize("lie", ["short", "no header", "long", "later", "before", "twice", "not finite", "too large"])
def test_what_the_server_should_not_send_is_refused_and_changes_nothing(lie: str) -> None:
    server = begun(Int8(), 3)
    silo = HeldModel(SIZE, Int8())
    before = silo.receive(PublicModel(models(1)[0], Int8()).payload(-1), 0).copy()
    good, whole = server.payload(0), server.payload(-1)
    infinite = whole.copy()
    infinite[HEAD_BYTES : HEAD_BYTES + 4] = np.array([np.inf], np.float32).view(np.uint8)
    scaled = good.copy()
    scaled[HEAD_BYTES : HEAD_BYTES + 4] = np.array([1e38], np.float32).view(np.uint8)
    sent = {
        "short": good[:-1],
        "no header": good[: HEAD_BYTES - 1],
        "long": np.append(good, np.uint8(0)),
        "later": header(good, 0, 3),
        "before": header(good, -2, 2),
        "twice": np.concatenate([good, good[HEAD_BYTES:]]),
        "not finite": infinite,
        "too large": scaled,
    }
    with pytest.raises(ProtocolError, match="the server failed the check"):
        silo.receive(sent[lie], 2)
    assert silo.version == 0
    np.testing.assert_array_equal(silo.model, before)


@pytest.mark.slow
@pytest.mark.parametrize("wire", FORMATS, ids=NAMES)
def test_the_next_version_of_a_large_model_takes_next_to_nothing(wire: WireFormat, tmp_path: Path) -> None:
    """Neither the difference nor what travels of it is ever there as a whole."""
    keeper = ArrayKeeper(tmp_path / "kept")
    large = np.random.default_rng(1).standard_normal(3_000_000, np.float32)
    server, exact = PublicModel(keeper.keep(large), wire, keeper), keeper.keep(large * 2)
    with traced() as taken:
        server.advance(exact)
        payload = server.payload(0)
    assert payload.nbytes == HEAD_BYTES + wire.payload_bytes(large.size)
    assert taken.peak < 8 * SPAN_BYTES < exact.nbytes
