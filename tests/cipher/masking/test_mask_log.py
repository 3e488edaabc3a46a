"""Masks blind one update, whatever the server asks, however often, and whatever was restarted."""

import hashlib
import itertools
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsync.cipher.encoding.packing import Slots
from fedsync.cipher.keys.keyring import Ring, open_ring
from fedsync.cipher.masking.mask_log import MAX_ATTEMPTS, MaskLog
from fedsync.cipher.server.sealed_aggregator import EncryptedAggregator
from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.cipher.suites import open_suite
from fedsync.cipher.suites.suite import BFV_PLAIN
from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.common.locks import taken
from fedsync.model.layout import Vector
from fedsync.model.transfer import Payload
from tests.cipher.make import INITIAL, LAYOUT, Federation, change, close, mean_of, order, plan, report
from tests.cipher.masking.rounds import WORK
from tests.cipher.masking.test_masked import FOUR
from tests.cipher.masking.test_masks import looks_uniform


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation(plan("masked"), tmp_path, FOUR)


def _ring(federation: Federation, name: str = "a") -> Ring:
    return open_ring(federation.keys.silos[name])


# The book.

RUN, OTHER = (hashlib.sha256(text).digest() for text in (b"run", b"another run"))


def _book(ring: Ring, run: bytes = RUN) -> Path:
    assert ring.folder is not None
    return ring.folder / "masks" / run.hex()


def test_a_run_has_a_pair_of_keys_of_its_own_that_outlives_the_process(federation: Federation) -> None:
    ring = _ring(federation)
    pair = MaskLog(ring, RUN).pair
    assert MaskLog(ring, RUN).pair == pair
    others = {MaskLog(ring, OTHER).pair.exchange, MaskLog(_ring(federation, "b"), RUN).pair.exchange, ring.own.exchange}
    assert len(others | {pair.exchange}) == 4
    assert pair.signing == ring.own.signing
    assert _book(ring).stat().st_mode & 0o777 == 0o600


def test_a_missing_book_does_not_count_as_unused(federation: Federation) -> None:
    """Where the process lives, it is missed; another process has another pair, so that no mask comes again."""
    ring = _ring(federation)
    log = MaskLog(ring, RUN)
    log.enter(0, 0)
    _book(ring).unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        log.enter(1, 0)
    another = MaskLog(ring, RUN)
    another.enter(0, 0)
    assert another.pair.exchange != log.pair.exchange
    with pytest.raises(ConfigError, match="the masks that were used are unknown"):
        log.enter(1, 0)


def test_a_book_that_cannot_be_read_or_written_masks_nothing(federation: Federation) -> None:
    ring = _ring(federation)
    log = MaskLog(ring, RUN)
    log.enter(0, 0)
    key = log.pair.exchange.hex()
    for text in ("", key, f"{key} 0 -1", f"{key} -2", f"{key[:-2]} 0", "\xff", "nonsense"):
        _book(ring).write_text(text, encoding="latin-1")
        for look in (lambda: log.enter(1, 0), lambda: MaskLog(ring, RUN)):
            with pytest.raises(ConfigError, match=r"damaged.*remove"):
                look()
    _book(ring).unlink()
    lock = _book(ring).with_name("lock")
    lock.unlink()
    lock.mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        log.enter(1, 0)


def test_books_of_runs_that_are_long_over_go_when_another_begins(federation: Federation) -> None:
    ring = _ring(federation)
    for run, days in ((RUN, 6), (OTHER, 8)):
        MaskLog(ring, run)
        then = time.time() - days * 86_400
        os.utime(_book(ring, run), (then, then))
    lock = _book(ring).with_name("lock")
    os.utime(lock, (0.0, 0.0))
    before = lock.stat().st_ino
    MaskLog(ring, bytes(32))
    assert _book(ring).exists() and _book(ring, bytes(32)).exists()
    assert not _book(ring, OTHER).exists()
    assert lock.stat().st_ino == before, "somebody may have it just now"


def test_a_book_in_use_stays_where_the_clock_of_the_disk_is_a_week_slow(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = time.time() + 8 * 86_400
    monkeypatch.setattr("fedsync.cipher.masking.mask_log.time.time", lambda: then)
    log = MaskLog(ring := _ring(federation), RUN)
    assert _book(ring).exists()
    log.enter(0, 0)


def test_a_book_is_one_process_s_at_a_time(federation: Federation) -> None:
    """Two that read it at the same time would both find the masks unused."""
    ring = _ring(federation)
    log = MaskLog(ring, RUN)
    with ThreadPoolExecutor(1) as other:
        with taken(_book(ring).with_name("lock")):
            waiting = other.submit(log.enter, 0, 0)
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
        waiting.result()


def test_a_run_under_another_name_has_other_masks(federation: Federation) -> None:
    """It goes on from before what silos had heard of, so versions come again; what was sealed is of the same run."""
    first, second = federation.copy("a", run="first"), federation.copy("a", run="second", origin="first")
    assert first._run == second._run
    assert first._masking is not None and second._masking is not None
    assert first._masking.announcement[:64] != second._masking.announcement[:64]
    assert first._masking.pair.exchange != second._masking.pair.exchange


def test_seeds_of_few_rounds_are_remembered(federation: Federation) -> None:
    """A server that begins rounds and ends none fills no memory."""
    federation.begin("a", 0)
    masking, roster = federation.silos["a"]._masking, federation.silos["a"]._roster
    assert masking is not None and roster is not None
    rounds = [masking.begin(order("a/1", 0), RUN, attempt, roster, *WORK) for attempt in range(8)]
    assert [one for _, one in masking._rounds.values()] == rounds[-4:]


def test_an_update_under_masks_with_a_stranger_is_refused(federation: Federation) -> None:
    """A silo that makes up others: whoever is not of the group can never tell shares, and the sum would stay closed."""
    federation.begin("a", 0)
    silo = federation.silos["a"]
    roster = silo._roster
    assert roster is not None
    silo._roster = replace(roster, keys={**roster.keys, "z": roster.keys["b"]})
    with pytest.raises(ProtocolError, match="issued no key to"):
        federation.answer("a", change(1))


def test_a_server_cannot_fill_the_disk_with_attempts(federation: Federation) -> None:
    """Nor memory, where the book is there with the keys."""
    log = MaskLog(replace(_ring(federation), folder=None), RUN)
    log.enter(0, 1)
    with pytest.raises(ProtocolError):
        log.enter(0, 1)
    for attempt in range(1, MAX_ATTEMPTS):
        log.enter(0, 2**32 - 1 - attempt)
    with pytest.raises(ProtocolError):
        log.enter(0, 0)
    log.enter(1, 0)


_RUNS = itertools.count()
_ASKED = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=25)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=_ASKED)
def test_nothing_is_entered_twice_whatever_is_asked(federation: Federation, asked: list[tuple[int, int, bool]]) -> None:
    ring, run = _ring(federation), hashlib.sha256(str(next(_RUNS)).encode()).digest()
    log = MaskLog(ring, run)
    granted: list[tuple[int, int]] = []
    for base, attempt, restarted in asked:
        log = MaskLog(ring, run) if restarted else log
        try:
            log.enter(base, attempt)
        except ProtocolError:
            assert granted and (base < granted[-1][0] or (base, attempt) in granted)
        else:
            granted.append((base, attempt))
    assert len(set(granted)) == len(granted)
    assert [base for base, _ in granted] == sorted(base for base, _ in granted)


# The server asks a silo twice at one version of the model.


def _seal(silo: EncryptedReplica, number: int, update: Vector, rate: float = 0.1) -> Payload:
    return silo.send(update, replace(order(f"a/{number}", 0, number), learning_rate=rate), report(0))


def test_a_silo_owes_the_server_what_its_masks_are_until_they_are_off(federation: Federation) -> None:
    assert not federation.silos["a"].unrevealed
    federation.begin_all("abcd", 0)
    ids = federation.answer_all("abcd")
    assert all(silo.unrevealed for silo in federation.silos.values())
    federation.commit(1, ids)
    federation.unmask()
    left = [name for name, silo in federation.silos.items() if silo.unrevealed]
    assert left == ["d"], "three of four are enough"
    masks = federation.silos["d"]._masking
    assert masks is not None and len(masks._rounds) == 1
    federation.begin("d", 1)
    assert not federation.silos["d"].unrevealed and not masks._rounds, "its seeds are of no more use, and forgotten"


def test_a_silo_that_is_restarted_or_set_back_does_not_use_masks_again(federation: Federation) -> None:
    beginning = federation.aggregator.outgoing("a")
    federation.run_round(0, "abcd")
    # Another process, or another trainer for the same run; then the one that was here, set back to the beginning.
    for silo in (federation.copy("a"), federation.silos["a"]):
        silo.receive(beginning, 0)
        with pytest.raises(ProtocolError, match="masks"):
            _seal(silo, 2, change(1))


def _opened_by_a_spy(federation: Federation, update_id: str) -> Slots:
    """Slots of an update, masks still on, as server and a silo together see them."""
    envelope = federation.envelope(update_id)
    group = _ring(federation, "b").group
    return open_suite("masked", group).open(envelope.words, envelope.head.members)


def test_updates_of_two_attempts_have_nothing_in_common(federation: Federation) -> None:
    """The difference of two uploads is that of the updates where masks are used twice, and uniform where not."""
    federation.begin("a", 0)
    one = _opened_by_a_spy(federation, federation.answer("a", change(1)))
    for _ in range(3):
        federation.begin("a", 0)
    other = _opened_by_a_spy(federation, federation.answer("a", change(1)))
    difference = np.remainder(other - one + BFV_PLAIN // 2, BFV_PLAIN) - BFV_PLAIN // 2
    assert looks_uniform(difference)
    assert looks_uniform(one) and looks_uniform(other)


# Honest silos and servers go on.


def test_a_silo_that_failed_before_it_sealed_is_in_the_sum(federation: Federation) -> None:
    federation.begin_all("abbcd", 0)
    federation.commit(1, federation.answer_all("abcd"))
    federation.unmask()
    close(federation.begin("b", 1), INITIAL + mean_of("abcd"))


def test_a_silo_with_a_lost_answer_misses_one_round(federation: Federation, caplog: pytest.LogCaptureFixture) -> None:
    federation.begin_all("abcd", 0)
    federation.seal("b", change(9))  # nobody gets it
    federation.begin("b", 0)
    with pytest.raises(ProtocolError, match="masks"):
        federation.seal("b", change(9))
    federation.begin("b", 0)
    federation.commit(1, federation.answer_all("abcd"))
    assert "b/3 has masks of another" in caplog.text
    federation.unmask()
    after = federation.begin("b", 1)
    close(after, INITIAL + mean_of("acd"))
    updates = federation.run_round(1, "abcd")
    close(federation.begin("b", 2), after + np.mean(updates, axis=0), 2)


def test_what_travels_in_the_clear_counts_for_those_in_the_sum_only(tmp_path: Path) -> None:
    federation = Federation(plan("masked", only=("head.*",)), tmp_path, FOUR)
    federation.begin_all("abcddd", 0)
    federation.commit(1, federation.answer_all("abcd"))
    federation.unmask()
    mean = mean_of("abc")
    clear = slice(0, LAYOUT.size - 600)
    model = federation.begin("a", 1)
    close(model, INITIAL + mean)
    np.testing.assert_allclose(model[clear], (INITIAL + mean)[clear], atol=1e-6)


def test_a_server_that_comes_back_again_and_again_gets_an_update_of_every_silo(federation: Federation) -> None:
    """All silos have sealed at the version from which it goes on, each time."""
    federation.begin("a", 0)
    checkpoint = pickle.dumps(federation.aggregator.state())
    federation.begin_all("abcd", 0)
    federation.answer_all("abcd")
    for _ in range(3):
        federation.aggregator = EncryptedAggregator(federation.plan, federation.keys.server)
        federation.aggregator.restore(pickle.loads(checkpoint))
        federation.begin_all("abcd", 0)
        ids = federation.answer_all("abcd")
    federation.commit(1, ids)
    federation.unmask()
    close(federation.begin("c", 1), INITIAL + mean_of("abcd"))
