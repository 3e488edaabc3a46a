"""The books of what waits of silos' answers: those of plain sums over all of them, at a cost that does not grow."""

from collections.abc import Callable
from random import Random
from types import SimpleNamespace

import pytest

from fedsync.config.gate import GateConfig
from fedsync.flower.internals import replies
from fedsync.flower.internals.replies import SESSION_S, FullError, LieError, Quota

LIMITS = GateConfig(waiting_bytes=2**20, waiting_messages=4)


class Sums:
    """The same rules by sums over all that waits: session -> node, root, parts, bytes, when something came."""

    def __init__(self) -> None:
        self.kept: dict[str, SimpleNamespace] = {}
        self.now_s = 0.0

    def of(self, node: int, root: str | None = None) -> list[SimpleNamespace]:
        return [each for each in self.kept.values() if each.node == node and each.root != root]

    def make_room(self, node: int, root: str | None, parts: int, size: int, store: set[str]) -> bool:
        for last in (False, True):
            own = self.of(node, root)
            many = root is not None and len(own) >= LIMITS.waiting_messages
            much = sum(each.size for each in own) + size > LIMITS.waiting_bytes
            if not (many or much or sum(each.parts for each in own) + parts > replies.MOST_PARTS):
                return True
            if not last:
                self.kept = {
                    name: each
                    for name, each in self.kept.items()
                    if each.node != node or (each.root in store if each.root else each.came_s >= self.now_s - SESSION_S)
                }
        return False

    def check(self, node: int, root: str, parts: int, store: set[str]) -> str:
        return "" if self.make_room(node, root, parts, 0, store) else "FullError"

    def begin(self, node: int, session: str, root: str, parts: int) -> None:
        before = next((name for name, each in self.kept.items() if (each.node, each.root) == (node, root)), None)
        size = 0 if before is None else self.kept.pop(before).size
        self.kept[session] = SimpleNamespace(node=node, root=root, parts=parts, size=size, came_s=self.now_s)

    def add(self, node: int, session: str, size: int, store: set[str]) -> str:
        if session in self.kept and self.kept[session].node != node:
            return "LieError"
        if not self.make_room(node, None, 0, size, store):
            return "FullError"
        fresh = SimpleNamespace(node=node, root="", parts=0, size=0, came_s=0.0)
        waiting = self.kept.setdefault(session, fresh)
        waiting.size, waiting.came_s = waiting.size + size, self.now_s
        return ""

    def refund(self, node: int, session: str, size: int) -> None:
        waiting = self.kept.get(session)
        if waiting is not None and waiting.node == node:
            waiting.size -= size
            if not (waiting.root or waiting.size):
                del self.kept[session]


def told(call: Callable[..., None], *arguments: object) -> str:
    try:
        call(*arguments)
    except (LieError, FullError) as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("seed", range(8))
def test_what_is_counted_is_what_sums_over_all_of_it_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "MOST_PARTS", 20)
    rng, sums, store = Random(seed), Sums(), set[str]()
    quota = Quota(LIMITS, lambda: sums.now_s)
    for turn in range(3000):
        sums.now_s += rng.choice((1.0, 1.0, 20.0))
        node, parts = rng.randrange(3), rng.randrange(1, 9)
        sessions = list(sums.kept) or ["made up"]
        match rng.randrange(5):
            case 0:
                root = rng.choice([f"{node}-{turn}", *(each.root for each in sums.of(node) if each.root)])
                found = told(quota.check, node, root, parts, store)
                assert found == sums.check(node, root, parts, store)
                if found == "":
                    store.add(root)
                    quota.begin(node, f"s{turn}", root, parts)
                    sums.begin(node, f"s{turn}", root, parts)
            case 1 | 2:
                session = rng.choice([*sessions, f"old{turn % 7}"])
                size = rng.choice((10, 1000, 200_000))
                found = told(quota.add, node, session, size, store)
                assert found == sums.add(node, session, size, store)
                if found == "" and rng.random() < 0.3:
                    quota.refund(node, session, size)
                    sums.refund(node, session, size)
            case 3:
                quota.refund(node, "never counted", 5)
            case _:
                store.discard(rng.choice([*sorted(store), ""]))
        for each in range(3):
            own = quota._silos[each]
            assert (len(own.sessions), own.parts, own.bytes) == (
                len(sums.of(each)),
                sum(one.parts for one in sums.of(each)),
                sum(one.size for one in sums.of(each)),
            )
    assert quota._owners == {name: each.node for name, each in sums.kept.items()}


def test_a_part_is_counted_without_a_look_at_other_silos() -> None:
    """Each silo's books count who looks at them."""
    looks = []

    class Watched(replies._Silo):
        def __getattribute__(self, name: str) -> object:
            looks.append(self)
            return object.__getattribute__(self, name)

    quota = Quota(LIMITS)
    quota._silos.default_factory = Watched
    for node in range(50):
        quota.begin(node, f"s{node}", f"root {node}", 1)
    looks.clear()
    quota.add(7, "s7", 100, {"root 7"})  # type: ignore[arg-type]
    assert {id(each) for each in looks} == {id(quota._silos[7])}
