"""Which answers an app's look is for."""

from flwr.proto.runtime_pb2 import PullAppMessagesRequest

from fedsync.flower.internals.answer_looks import WHOLE_S, AnswerLooks

ME, OTHER, RUN = b"me", b"other", 7


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def look(looks: AnswerLooks, *ids: str, token: bytes = ME, run: int = RUN) -> list[str]:
    """What Flower is to look for; nothing where it is not asked at all."""
    asked = PullAppMessagesRequest(message_ids=ids)
    return list(asked.message_ids) if looks.worth_it(token, run, asked) else []


def test_a_look_is_for_answers_that_were_stored_since_the_last_one() -> None:
    looks = AnswerLooks(Clock())
    assert look(looks, "a", "b", "c") == ["a", "b", "c"], "nobody knows what was stored before"
    assert look(looks, "a", "b", "c") == []
    looks.stored(RUN, "b")
    looks.stored(RUN, "x")
    looks.stored(RUN + 1, "c")
    assert look(looks, "a", "b", "c") == ["b"]
    assert look(looks, "a", "c") == []


def test_now_and_then_a_look_is_for_all() -> None:
    clock = Clock()
    looks = AnswerLooks(clock)
    look(looks, "a")
    clock.now_s += WHOLE_S - 0.1
    assert look(looks, "a") == []
    clock.now_s += 0.1
    assert look(looks, "a") == ["a"]
    assert look(looks, "a") == []


def test_another_process_of_the_run_has_seen_nothing() -> None:
    looks = AnswerLooks(Clock())
    look(looks, "a")
    assert look(looks, "a", token=OTHER) == ["a"]
    assert look(looks, "a", run=RUN + 1) == ["a"]


def test_a_look_brings_so_many_answers_at_most_and_the_next_one_others() -> None:
    clock = Clock()
    looks, names = AnswerLooks(clock), [f"{number:03}" for number in range(100)]
    look(looks, *names)
    for name in names[:80]:
        looks.stored(RUN, name)
    assert look(looks, *names) == names[:64] and looks.any(RUN)
    assert look(looks, *names[64:]) == names[64:80] and not looks.any(RUN)
    for name in names[:80]:
        looks.stored(RUN, name)
    clock.now_s += WHOLE_S
    assert look(looks, *names) == names[:64] + names[80:], "also one that is for all"
    assert look(looks, *names[64:]) == names[64:80]


def test_a_look_for_all_that_takes_long_is_rare() -> None:
    clock = Clock()
    looks = AnswerLooks(clock)
    look(looks, "a")
    clock.now_s += 2.0
    looks.done(RUN)
    for wait_s, expected in ((37.9, []), (0.2, ["a"])):  # 20 x 2 s after it began
        clock.now_s += wait_s
        assert look(looks, "a") == expected
    looks.done(RUN)
    clock.now_s += WHOLE_S
    assert look(looks, "a") == ["a"], "it took no time"
