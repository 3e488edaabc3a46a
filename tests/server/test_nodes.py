"""Which node is which silo, by registration and by word."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from fedsync.common.errors import LaterVersion, ProtocolError, RunError
from fedsync.core.orders import SiloFacts
from fedsync.extras.relays.relay_messages import RegionReply, RelayedNode, write
from fedsync.observe.run_state import MISSING
from fedsync.server import nodes as nodes_module
from fedsync.server.nodes import Admission, AnotherApp, Nodes
from fedsync.silo.protocol import Hello, Refusal, Refused
from fedsync.transport.port import Peer, SiloAnswer
from tests.flower.named_nodes import hello, join, named, silent
from tests.transport.memory_transport import MemoryTransport


@pytest.mark.parametrize(
    ("took_s", "pause_s"),
    [(0.01, 1.0), (0.1, 0.1 + 20 * 0.1), (60.0, 60.0 + 10.0)],  # by hand: a twentieth of the time, every 10 s at least
)
def test_looks_that_take_long_are_rare(took_s: float, pause_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(nodes_module, "time", SimpleNamespace(monotonic=lambda: now_s[-1]))

    class Slow(MemoryTransport):
        looks = 0

        def peers(self) -> list[Peer]:
            self.looks += 1
            now_s.append(now_s[-1] + took_s)
            return super().peers()

    silos = Slow()
    nodes = Nodes(silos, look_s=1.0)
    for at_s, looks in ((100.0, 1), (99.95 + pause_s, 1), (100.05 + pause_s, 2)):
        now_s.append(at_s)
        nodes.look()
        assert silos.looks == looks


def test_a_node_that_never_has_a_usable_answer_is_asked_less_and_less_often() -> None:
    silos = named({1: ""})
    nodes = Nodes(silos)
    asked = []
    for second in range(300):
        if nodes.look()[1]:
            asked.append(second)
            nodes.ask_again(1)
    assert asked == [0, 1, 3, 7, 15, 31, 63, 127, 191, 255]
    silos.leave(1)
    assert nodes.look() == ([1], [])
    nodes.forget(1)
    silos.join(1, silent)
    assert nodes.look() == ([], [1]), "it may have been mended"


@pytest.mark.parametrize(
    ("said", "check"),
    [
        *((hello(name), "hello") for name in ("", "a/b", "x" * 129)),
        *((Hello("a", SiloFacts(examples)), "examples") for examples in (0, 10**9 + 1)),
        (Hello("a", SiloFacts(10, memory_samples=0)), "memory"),
    ],
)
def test_a_silo_that_cannot_be_as_it_says_is_refused(said: Hello, check: str) -> None:
    nodes = Nodes(named({1: ""}))
    nodes.look()
    with pytest.raises(ProtocolError, match=f"node 1 failed the check '{check}'"):
        nodes.check(1, said)
    assert nodes.by_name == {}


def test_a_silo_that_says_it_holds_more_samples_than_the_strategy_allows_is_refused_and_not_asked_again() -> None:
    nodes = Nodes(named({1: "", 2: ""}), Admission(most_examples=1000))
    assert nodes.look() == ([], [1, 2])
    assert nodes.check(1, Hello("a", SiloFacts(1000))) == "a"
    told = r"node 2 failed the check 'examples': it says that it holds 1001 .* the strategy's most_examples is 1000"
    with pytest.raises(ProtocolError, match=told):
        nodes.check(2, Hello("b", SiloFacts(1001)))
    nodes.ask_again(2)
    assert nodes.look() == ([], [])


def test_people_are_told_of_a_silo_that_says_it_has_nearly_all_samples(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(named({1: "", 2: "", 3: ""}))
    nodes.enrol(1, "a", 10**9)
    nodes.enrol(2, "b", 1000)
    assert not caplog.text, "whoever is first has all there are"
    nodes.enrol(3, "c", 98 * (10**9 + 1000))
    assert not caplog.text
    nodes.enrol(3, "c", 100 * (10**9 + 1000))
    assert "c says that it has 100000100000 of the 101000101000 samples of all" in caplog.text


def test_a_registered_node_has_its_registered_name_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(named({1: "berlin", 2: "paris"}))
    assert nodes.look() == ([], [1, 2])
    with pytest.raises(ProtocolError, match=r"^silo 'berlin' \(node 1\) failed the check 'name': .*'paris'") as why:
        nodes.check(1, hello("paris"))
    nodes.ask_again(1, why.value)
    assert nodes.look() == ([], []), "what was refused is not asked again at once"
    join(nodes, 2, "paris")
    assert nodes.by_name == {"paris": 2}
    assert [nodes.look()[1] for _ in range(63)] == [[]] * 62 + [[1]], "its owner may have mended it"
    nodes.ask_again(1, why.value)
    assert caplog.text.count("'paris'") == 1
    assert nodes.check(1, hello("berlin")) == "berlin"


def test_a_node_without_a_registered_name_is_refused_where_others_have_one(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(named({1: "", 2: "paris"}))
    assert nodes.look() == ([], [2])
    assert "node 1" in caplog.text and "registered under no name" in caplog.text
    caplog.clear()
    assert [nodes.look() for _ in range(200)] == [([], [])] * 200
    assert not caplog.text, "once is enough"


def test_where_registration_is_demanded_no_node_passes_without(caplog: pytest.LogCaptureFixture) -> None:
    assert Nodes(named({1: ""}), Admission(registered=True)).look() == ([], [])
    assert "'registration'" in caplog.text


@pytest.mark.parametrize("registered", [True, False])
def test_only_listed_silos_take_part(registered: bool, caplog: pytest.LogCaptureFixture) -> None:
    names = {1: "berlin", 2: "rome"}
    silos = named(names if registered else dict.fromkeys(names, ""))
    nodes = Nodes(silos, Admission(["berlin", "paris"]))
    fresh = nodes.look()[1]
    join(nodes, 1, "berlin")
    if registered:
        assert fresh == [1] and "'rome' is not among the strategy's silos" in caplog.text
    else:
        with pytest.raises(ProtocolError, match="'rome' is not among"):
            nodes.check(2, hello("rome"))
    assert nodes.by_name == {"berlin": 1}


@pytest.mark.parametrize("registered", ["", "berlin"])
def test_a_name_is_one_nodes_and_free_again_when_that_is_gone(registered: str) -> None:
    """A silo that comes back under another node id, while the SuperLink still thinks the old one there."""
    silos = named({1: registered, 2: registered})
    nodes = Nodes(silos)
    nodes.look()
    join(nodes, 1, "berlin")
    with pytest.raises(ProtocolError, match="'berlin' is node 1 already"):
        nodes.check(2, hello("berlin"))
    assert nodes.look() == ([], [])
    silos.leave(1)
    assert nodes.look() == ([1], [])
    nodes.forget(1)
    assert nodes.look() == ([], [2])
    join(nodes, 2, "berlin")
    assert nodes.by_name == {"berlin": 2}
    assert all(nodes.look() == ([], []) for _ in range(70)), "its rest is over: asked again, it would lose its order"


# Relays.


def _says_that_it_is_a_relay(*here: RelayedNode) -> SiloAnswer:
    return SiloAnswer("", write(RegionReply(here=here)), relay=True)


def test_nodes_behind_a_relay_are_nodes_and_the_relay_is_none() -> None:
    silos = named({1: "", 2: ""})
    nodes = Nodes(silos)
    assert nodes.look() == ([], [1, 2])
    nodes.relay(1, _says_that_it_is_a_relay(RelayedNode(7, "", "now"), RelayedNode(8, "", "now")))
    gone, fresh = nodes.look()
    assert gone == [1] and fresh == [-2, -1] and all(node in nodes.regions for node in fresh)
    nodes.forget(1)
    assert nodes.look() == ([], [])
    silos.leave(1)
    assert nodes.look() == ([-2, -1], [])
    assert -1 not in nodes.regions


@pytest.mark.parametrize(("regions", "may"), [(None, False), ({}, False), ({"north": ["a"]}, True)])
def test_where_nodes_have_names_the_server_names_relays(regions: dict[str, list[str]] | None, may: bool) -> None:
    """Any silo could else speak for others."""
    nodes = Nodes(named({1: "north", 2: "b"}), Admission(silos=["a", "b"] if may else None, regions=regions))
    nodes.look()
    said = _says_that_it_is_a_relay(RelayedNode(1, "a", "now"), RelayedNode(2, "b", "now"), RelayedNode(3, "", "now"))
    if not may:
        with pytest.raises(ProtocolError, match=r"`relays` in server\.yaml has no such name"):
            nodes.relay(1, said)
        assert nodes.look() == ([], [])
        return
    nodes.relay(1, said)
    assert nodes.look() == ([1], [-1]), "its region has `a` alone, and one without a name may not come"
    with pytest.raises(ProtocolError, match="registered"):
        nodes.check(-1, Hello("c", SiloFacts(10)))
    assert nodes.check(-1, Hello("a", SiloFacts(10))) == "a"


def test_the_log_says_who_is_missing_whenever_that_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", nodes_module.logger.name)
    silos = named({1: "berlin"})
    nodes = Nodes(silos, Admission(silos=["berlin", "paris"], registered=True, expected=2))

    def told() -> list[str]:
        nodes.look()
        found = [record.getMessage() for record in caplog.records if MISSING in record.getMessage()]
        caplog.clear()
        return found

    assert told() == [f"{MISSING}: not connected: berlin, paris"]
    nodes.refuses(1, Refused(Refusal.APPROVAL))
    assert told() == [f"{MISSING}: berlin answers APPROVAL; not connected: paris"] and told() == []
    join(nodes, 1, "berlin")
    assert told() == [f"{MISSING}: not connected: paris"]
    silos.join(2, silent, "paris")
    join(nodes, 2, "paris")
    assert told() == [f"{MISSING}: none"]
    anybody = Nodes(named({}), Admission(expected=3))
    anybody.look()
    assert caplog.messages == [f"{MISSING}: 0 of 3 silos are connected"]


@pytest.mark.parametrize(("needed", "joined", "lost"), [(2, False, True), (3, False, False), (2, True, False)])
def test_a_run_that_the_silos_it_needs_are_ahead_of_is_over(needed: int, joined: bool, lost: bool) -> None:
    nodes = Nodes(named({1: "a", 2: "b"}), Admission(needed=needed))
    nodes.look()
    if joined:
        join(nodes, 2, "b")
    nodes.ask_again(1, LaterVersion("a", 9, 4))
    told = r"was set back.*a: it says that it holds 9, the newest is 4; b: "
    with pytest.raises(RunError, match=told) if lost else nullcontext():
        nodes.ask_again(2, LaterVersion("b", 8, 4))


@pytest.mark.parametrize(("here", "times", "over"), [("ab", 4, True), ("ab", 3, False), ("a", 9, False)])
def test_silos_whose_app_raises_again_and_again_end_the_run_once_as_many_as_it_needs_are_here(
    here: str, times: int, over: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A mod of the user's own app may raise before Flower finds that the app answers no questions."""
    nodes = Nodes(named(dict(enumerate(here, 1))), Admission(needed=2))
    nodes.look()
    with pytest.raises(RunError, match="a, b: error 2: KeyError") if over else nullcontext():
        for _ in range(times):
            for node, name in enumerate(here, 1):
                nodes.ask_again(node, AnotherApp(name, "error 2: KeyError", 2))
    assert caplog.text.count("clientapp = ") == (here == "a"), "who waits for others is told once"
