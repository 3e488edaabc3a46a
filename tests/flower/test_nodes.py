"""Which node is which silo, by registration and by word."""

from collections.abc import Iterable, Mapping

import pytest
from flwr.proto.node_pb2 import NodeInfo

from fedsync.core.errors import ProtocolError
from fedsync.core.orders import SiloFacts
from fedsync.flower.nodes import Admission, Nodes
from fedsync.trainer.protocol import Hello
from tests.flower.grid import DirectGrid


class NamedGrid(DirectGrid):
    """Nodes that are registered under names; an empty one is none."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__(0)
        self.names = dict(names)
        self.activated: dict[int, str] = {}

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=node, name=name, last_activated_at=self.activated.get(node, "09:00"))
            for node, name in self.names.items()
        ]


def hello(name: str, examples: int = 10) -> Hello:
    return Hello(name, SiloFacts(examples=examples))


def join(nodes: Nodes, node: int, name: str) -> None:
    nodes.enrol(node, nodes.check(node, hello(name)), 10)


def test_nodes_come_and_go() -> None:
    grid = NamedGrid({2: "", 1: ""})
    nodes = Nodes(grid)
    assert nodes.look() == ([], [1, 2])
    join(nodes, 1, "berlin")
    assert (nodes.by_name, nodes.examples, nodes.sender(1), nodes.sender(2)) == (
        {"berlin": 1}, {"berlin": 10}, "berlin", "node 2",
    )  # fmt: skip
    assert nodes.look() == ([], [])
    del grid.names[1]
    assert nodes.look() == ([1], [])
    assert nodes.forget(1) == "berlin" and nodes.forget(2) is None
    assert nodes.by_name == {}


def test_the_grid_is_not_asked_again_too_soon() -> None:
    grid = NamedGrid({1: ""})
    nodes = Nodes(grid, look_s=3600.0)
    assert nodes.look() == ([], [1])
    grid.names = {2: ""}
    assert nodes.look() == ([], [])


def test_a_node_that_was_gone_between_two_looks_is_gone_and_greeted_again() -> None:
    grid = NamedGrid({1: "berlin", 2: "paris"})
    nodes = Nodes(grid)
    nodes.look()
    join(nodes, 1, "berlin")
    grid.activated[1] = "09:01"
    assert nodes.look() == ([1], [])
    assert nodes.forget(1) == "berlin"
    assert nodes.look() == ([], [1])
    join(nodes, 1, "berlin")
    assert nodes.look() == ([], [])


def test_a_node_without_a_usable_answer_is_asked_again() -> None:
    nodes = Nodes(NamedGrid({1: ""}))
    nodes.look()
    nodes.ask_again(1)
    assert nodes.look() == ([], [1])


def test_a_node_that_never_has_a_usable_answer_is_asked_less_and_less_often() -> None:
    grid = NamedGrid({1: ""})
    nodes = Nodes(grid)
    asked = []
    for second in range(300):
        if nodes.look()[1]:
            asked.append(second)
            nodes.ask_again(1)
    assert asked == [0, 1, 3, 7, 15, 31, 63, 127, 191, 255]
    del grid.names[1]
    assert nodes.look() == ([1], [])
    nodes.forget(1)
    grid.names[1] = ""
    assert nodes.look() == ([], [1]), "it may have been mended"


@pytest.mark.parametrize("name", ["", "a/b", "x" * 129])
def test_a_name_that_no_silo_can_have_is_refused(name: str) -> None:
    nodes = Nodes(NamedGrid({1: ""}))
    nodes.look()
    with pytest.raises(ProtocolError, match="node 1 failed the check 'hello'"):
        nodes.check(1, hello(name))


@pytest.mark.parametrize("facts", [SiloFacts(0), SiloFacts(10**9 + 1), SiloFacts(10, memory_samples=0)])
def test_a_silo_that_cannot_be_as_it_says_is_refused(facts: SiloFacts) -> None:
    nodes = Nodes(NamedGrid({1: ""}))
    nodes.look()
    with pytest.raises(ProtocolError, match=r"node 1 failed the check '(examples|memory)'"):
        nodes.check(1, Hello("a", facts))
    assert nodes.by_name == {}


def test_people_are_told_of_a_silo_that_says_it_has_nearly_all_samples(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(NamedGrid({1: "", 2: "", 3: ""}))
    nodes.enrol(1, "a", 10**9)
    nodes.enrol(2, "b", 1000)
    assert not caplog.text, "whoever is first has all there are"
    nodes.enrol(3, "c", 98 * (10**9 + 1000))
    assert not caplog.text
    nodes.enrol(3, "c", 100 * (10**9 + 1000))
    assert "c says that it has 100000100000 of the 101000101000 samples of all" in caplog.text


def test_a_registered_node_has_its_registered_name_and_no_other() -> None:
    nodes = Nodes(NamedGrid({1: "berlin", 2: "paris"}))
    assert nodes.look() == ([], [1, 2])
    with pytest.raises(ProtocolError, match=r"^silo 'berlin' \(node 1\) failed the check 'name': .*'paris'"):
        nodes.check(1, hello("paris"))
    nodes.ask_again(1)
    assert nodes.look() == ([], []), "what was refused is not asked again"
    join(nodes, 2, "paris")
    assert nodes.by_name == {"paris": 2}


def test_a_node_without_a_registered_name_is_refused_where_others_have_one(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(NamedGrid({1: "", 2: "paris"}))
    assert nodes.look() == ([], [2])
    assert "node 1" in caplog.text and "registered under no name" in caplog.text
    caplog.clear()
    assert nodes.look() == ([], [])
    assert not caplog.text, "once is enough"


def test_where_registration_is_demanded_no_node_passes_without(caplog: pytest.LogCaptureFixture) -> None:
    assert Nodes(NamedGrid({1: ""}), Admission(registered=True)).look() == ([], [])
    assert "'registration'" in caplog.text


@pytest.mark.parametrize("registered", [True, False])
def test_only_listed_silos_take_part(registered: bool, caplog: pytest.LogCaptureFixture) -> None:
    names = {1: "berlin", 2: "rome"}
    grid = NamedGrid(names if registered else dict.fromkeys(names, ""))
    nodes = Nodes(grid, Admission(["berlin", "paris"]))
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
    grid = NamedGrid({1: registered, 2: registered})
    nodes = Nodes(grid)
    nodes.look()
    join(nodes, 1, "berlin")
    with pytest.raises(ProtocolError, match="'berlin' is node 1 already"):
        nodes.check(2, hello("berlin"))
    assert nodes.look() == ([], [])
    del grid.names[1]
    assert nodes.look() == ([1], [])
    nodes.forget(1)
    assert nodes.look() == ([], [2])
    join(nodes, 2, "berlin")
    assert nodes.by_name == {"berlin": 2}
