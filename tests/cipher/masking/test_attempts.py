"""Which attempt an order belongs to."""

import pickle

from fedsync.cipher.masking.unmask import Attempts


def test_an_order_is_repeated_once_in_the_attempt_of_the_others_and_then_in_others() -> None:
    attempts = Attempts()
    assert [attempts.begin("a", 3) for _ in range(4)] == [0, 0, 1, 2]
    assert attempts.of("a", 3) == 2
    assert attempts.begin("b", 3) == 0, "the others' attempts are not changed"
    assert attempts.of("c", 3) == 0
    assert attempts.begin("a", 4) == 0, "another version"
    assert attempts.of("b", 4) == 0


def test_another_process_begins_attempts_that_are_the_same_for_all_and_unlike_those_before() -> None:
    attempts = Attempts()
    attempts.begin("a", 3)
    found = set()
    for _ in range(5):
        again: Attempts = pickle.loads(pickle.dumps(attempts))
        again.restart(3)
        assert again.begin("a", 3) == again.begin("b", 3) == again.of("c", 3)
        found.add(again.of("a", 3))
    # Five numbers below 2^31 and the 0 of before: two are alike with a probability of 7e-9.
    assert len(found | {0}) == 6
    assert again.begin("a", 4) == 0
