"""A lying server's catch-ups: how far it moves the model away from what an honest server would have made.

It has every sum that silos sealed, authentic all, and chooses which of them each silo gets, in what order and how
often. The gain is the distance of the silo's model from the honest one, in lengths of one silo's honest update.
"""

from collections.abc import Callable

import numpy as np
import pytest

from fedsync.cipher.encoding.catch_up import Link
from fedsync.model.layout import Vector
from tests.attacks.adversary import Federation, Victim
from tests.attacks.conftest import Make
from tests.attacks.forgery import EMPTY, add, aggregate, beginning, give, onward, sent, summed, undo


def steps(federation: Federation, silo: Victim, honest: Vector) -> float:
    """How far the silo's model is from the honest one, in honest updates; 0 where it has none."""
    model = silo.model
    if not len(model):
        return 0.0
    return float(np.linalg.norm(model - honest)) / federation.honest_step()


@pytest.fixture
def two_rounds(make: Make) -> Federation:
    federation = make()
    for _ in range(2):
        federation.round()
    federation.follow()
    return federation


Game = Callable[[Federation, tuple[Link, ...]], list[Link]]

GAMES: dict[str, Game] = {
    "a sum three times": lambda f, links: [links[0], links[0], links[0]],
    "a sum again as another version": lambda f, links: [links[0], links[1], add(3, summed(f, f.ids[:3], 3))],
    "taken back, never added": lambda f, links: [undo(links[0])],
    "taken back twice": lambda f, links: [links[0], undo(links[0]), undo(links[0])],
    "taken back twice in one link": lambda f, links: [links[0], undo(links[0], links[0])],
    "the older one taken back": lambda f, links: [*links, undo(links[0])],
    "taken back in the wrong order": lambda f, links: [*links, undo(*links)],
    "taken back with less": lambda f, links: [links[0], undo(add(1, summed(f, f.ids[:2], 1)))],
    "taken back, and added again": lambda f, links: [links[0], undo(links[0]), links[0]],
    "overlapping sums": lambda f, links: [add(1, summed(f, f.ids[:2], 1)), add(2, summed(f, f.ids[1:3], 2))],
    "overlapping sums in one version": lambda f, links: [add(1, summed(f, f.ids[:2], 1), summed(f, f.ids[1:3], 1))],
    "a sum of one round twice in one version": lambda f, links: [add(1, *[summed(f, f.ids[:3], 1)] * 2)],
    "the second round first": lambda f, links: [links[1], links[0]],
    "the second round alone": lambda f, links: [links[1]],
    "the second round after a part of the first": lambda f, links: [add(1, summed(f, f.ids[:2], 1)), links[1]],
    "the second round after nothing": lambda f, links: [EMPTY, links[1]],
    "both rounds in one sum": lambda f, links: [add(1, summed(f, f.ids, 1))],
    "one forged sum behind honest ones": lambda f, links: [*links, add(3, forged(f))],
    "one forged sum before honest ones": lambda f, links: [add(1, forged(f)), links[1]],
}


def forged(federation: Federation) -> bytes:
    """An honest sum with one word changed by one."""
    honest = federation.envelope(federation.ids[0])
    words = honest.words.copy()
    words[0, 5] ^= np.uint64(1)
    return aggregate(federation, honest, 1, words=words)


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
def test_no_game_with_authentic_sums_moves_a_model(game: str, two_rounds: Federation) -> None:
    """A silo that joins gets the game in place of the honest chain; one that followed honestly gets it behind that."""
    follower, joiner = two_rounds.silos["silo-a"], two_rounds.silo("silo-a")
    honest, links = follower.model, GAMES[game](two_rounds, sent(two_rounds))
    heard = give(joiner, beginning(two_rounds, *links), len(links))
    assert steps(two_rounds, joiner, honest) == 0
    assert heard.refused and joiner.replica.holds == -1, "all or nothing"
    give(follower, onward(2, *links), 2 + len(links))
    assert steps(two_rounds, follower, honest) == 0
    assert follower.replica.holds == 2


# A server that lies can say that it lost its newest checkpoint, and go on under another name from before.


def fork(federation: Federation, name: str, back_to: int) -> Victim:
    """Silo-a's trainer under another name of the run, with another version after ``back_to``: of two silos only."""
    links = sent(federation)[:back_to]
    part = add(back_to + 1, summed(federation, federation.ids[3 * back_to : 3 * back_to + 2], back_to + 1))
    silo = federation.silo("silo-a", federation.spec(run=name, began=federation.run))
    give(silo, beginning(federation, *links, part), back_to + 1)
    return silo


@pytest.mark.slow
def test_another_name_leads_back_a_few_versions_a_few_times(make: Make) -> None:
    """The difference of two sums of one version is one silo's update. Without a bound every version gave one."""
    federation = make(cipher="{kind: pad, members: 2}")
    for _ in range(9):
        federation.round()
    federation.follow()
    assert federation.silos["silo-a"].replica.holds == 9
    forks = [(back_to, fork(federation, f"name-{n}", back_to)) for n, back_to in enumerate((1, 2, 3, 4, 5, 2))]
    followed = [back_to for back_to, silo in forks if silo.replica.holds == back_to + 1]
    assert followed == [2, 3, 4], "from the eighth version before the newest on, under three more names"
    assert federation.train("silo-a").refused, "and the run under its first name is over"
