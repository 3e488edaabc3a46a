"""A lying server that shows a silo one run in two texts, to have it forget what it was asked.

The gain is a second evaluation of one model: two sums of other silos, of which the difference is one silo's.
"""

import shutil
from pathlib import Path

import pytest

from fedsync.cipher.encoding import tally
from fedsync.cipher.suites import open_suite
from fedsync.silo.protocol import Identity, Train
from tests.attacks.adversary import Federation, Heard, Victim
from tests.attacks.conftest import Make
from tests.attacks.forgery import beginning

VICTIM = "silo-b"


def evaluated(federation: Federation, silo: Victim) -> bool:
    """Whether the silo evaluates the first model in an update: for the judge."""
    order = federation.order(VICTIM, evaluate=True)
    heard: Heard = silo.ask(Train(order), beginning(federation))
    if heard.payload is None:
        return False
    federation.updates[order.update_id] = heard.payload.tobytes()
    federation.bases[order.update_id] = 0, 0
    envelope = federation.envelope(order.update_id)
    slots = open_suite("bfv", federation.group).open(envelope.words[:1], list(envelope.head.members))
    read = tally.read(slots, 1, federation.plan.cap, federation.plan.header, VICTIM)
    return bool(read.evaluators and read.holders)


def restarted(federation: Federation, text: str, folder: Path) -> Victim:
    """The trainer that the silo starts for a text of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    identity = Identity(text, federation.names.index(VICTIM), VICTIM)
    return Victim(identity, federation.config(VICTIM), folder)


TEXTS = {
    "a blank at the end": lambda text: f"{text} ",
    "a blank within": lambda text: text.replace(",", ", ", 1),
    "a field twice": lambda text: text.replace('"seed":', '"seed":1,"seed":', 1),
    "other words for one letter": lambda text: text.replace("linear", "l\\u0069near", 1),
    "a default left out": lambda text: text.replace(',"survey":null', ""),
    "another order of fields": lambda text: "{" + text.split(",", 1)[1][:-1] + "," + text.split(",", 1)[0][1:] + "}",
}


@pytest.mark.parametrize("changed", TEXTS)
def test_a_run_in_another_text_has_no_other_memory(changed: str, make: Make, tmp_path: Path) -> None:
    federation = make(3)
    text = federation.spec().dump()
    assert evaluated(federation, restarted(federation, text, tmp_path / "one"))
    other = TEXTS[changed](text)
    assert other != text
    assert not evaluated(federation, restarted(federation, other, tmp_path / "two")), "one model evaluated twice"


def test_a_trainer_s_folder_that_is_gone_takes_no_memory_along(make: Make, tmp_path: Path) -> None:
    """The state folder may be tidied while a run goes on, and an owner's own settings change the folder."""
    federation = make(3)
    text = federation.spec().dump()
    assert evaluated(federation, restarted(federation, text, tmp_path / "one"))
    shutil.rmtree(tmp_path / "one")
    assert not evaluated(federation, restarted(federation, text, tmp_path / "one")), "one model evaluated twice"
