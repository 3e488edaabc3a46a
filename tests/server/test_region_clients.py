"""Runs with relays: what silos and server do is as without, and what passes between relays and server is by region."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.app.error import Error

from fedsync.cipher.keys.keywrap import read_server_file
from fedsync.config.compatibility import adds_regions
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkReport
from fedsync.extras.relays.relay import RelayService
from fedsync.extras.relays.relay_line import RelayLine
from fedsync.extras.relays.relay_messages import RegionAsk, RegionReply, RegionRequest, read_region_reply, write
from fedsync.flower import flower_messages as messages
from fedsync.flower.flower_strategy import FedSync
from fedsync.model.layout import Vector
from fedsync.model.transfer import Payload
from fedsync.server.timeouts import Timeouts
from fedsync.silo.protocol import Describe, InProgress, write_reply, write_request
from fedsync.transport.port import SiloAnswer
from tests.e2e.deployed import SMALL
from tests.flower.cut_off_runs import named_silos, with_keys
from tests.flower.grid import DirectGrid, changing, honest, trainers
from tests.flower.named_nodes import silos_of
from tests.flower.relayed import RelayNode

pytestmark = pytest.mark.usefixtures("silos_here")

NAMES = ("a", "b", "c", "d", "e")
SILOS = named_silos("abcde")
QUICK = [SMALL, "local.steps=1", "local.batch_size=8", "stop.rounds=3"]
TIMING = Timeouts(poll_s=0.001, order_timeout_s=20, join_timeout_s=60, look_s=0.0, hold_s=0.0)
SOON = replace(TIMING, ask_s=0.2, report_s=0.1)
"""What is lost is asked for again after 0.3 s."""


def relays_of(**options: Any) -> list[RelayNode]:
    """Two relays of two silos each; with the fifth silo alone they are the nodes of `grid_of`."""
    return [RelayNode((0, 1), **options), RelayNode((2, 3), **options)]


def grid_of(relays: list[RelayNode]) -> DirectGrid:
    grid = DirectGrid(3, {1: relays[0], 2: relays[1], 3: honest})
    node: Any = grid._contexts[3]
    node.node_config["partition-id"] = 4
    return grid


def run(folder: Path, grid: DirectGrid, *overrides: str, strategy: str = "fedavg", keys: Path | None = None) -> Vector:
    """Returns the final model; nothing where the server has none."""
    config = StrategyConfig.load(strategy, [*QUICK, *overrides])
    result = FedSync(config, SILOS, out=folder, timing=TIMING, keys=keys).start(grid)
    return np.concatenate([np.zeros(0, np.float32), *(array.numpy().ravel() for array in result.arrays.values())])


def journal(folder: Path) -> str:
    return (folder / "journal.jsonl").read_text()


def committed(folder: Path) -> list[list[str]]:
    return [sorted(json.loads(line)["silos"]) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def sums_of(relays: list[RelayNode]) -> list[tuple[str, ...]]:
    return [each.update_ids for relay in relays for reply in relay.told for each in reply.sums]


@pytest.mark.parametrize("strategy", ["fedavg", "a-bsp", "fedbuff", "fedasync"])
def test_a_run_with_relays_ends_with_the_model_of_one_without(strategy: str, tmp_path: Path) -> None:
    """Sums are made where what an update counts is known before, and a commit takes all that is there."""
    relays = relays_of()
    found = run(tmp_path / "relayed", grid_of(relays), strategy=strategy)
    np.testing.assert_array_equal(np.isfinite(found), True)
    if strategy == "fedavg":
        alone = run(tmp_path / "alone", DirectGrid(5), strategy=strategy)
        assert committed(tmp_path / "relayed") == committed(tmp_path / "alone") == [list(NAMES)] * 3
        np.testing.assert_allclose(found, alone, atol=1e-6)
        assert len(sums_of(relays)) == 6 and all(len(ids) == 2 for ids in sums_of(relays)), "one a round and region"
    assert bool(sums_of(relays)) == (strategy in ("fedavg", "a-bsp"))
    assert "WorkFailed" not in journal(tmp_path / "relayed")


@pytest.mark.parametrize(
    ("strategy", "overrides", "adds"),
    [
        ("fedavg", (), True),
        ("fedbuff", (), False),
        ("fedbuff", ("aggregation={kind: fedbuff, server_rate: 1.0, staleness: {kind: constant}}",), False),
        ("fedasync", (), False),
        ("ssp", (), False),
    ],
)
def test_sums_are_made_before_a_commit_only_where_it_takes_all_and_weights_are_known(
    strategy: str, overrides: tuple[str, ...], *, adds: bool
) -> None:
    assert adds_regions(StrategyConfig.load(strategy, overrides)) == adds


@pytest.mark.parametrize("kind", ["bfv", "masked"])
def test_silos_behind_relays_open_sealed_sums(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = StrategyConfig.load("fedavg", [*QUICK, f"cipher={{kind: {kind}}}"])
    keys = with_keys(config, tmp_path, monkeypatch, SILOS)
    assert keys is not None
    relays = relays_of(keys=read_server_file(keys.read_bytes(), "server.json"), folder=tmp_path / "updates")
    run(tmp_path / "run", grid_of(relays), f"cipher={{kind: {kind}}}", keys=keys)
    assert committed(tmp_path / "run") == [list(NAMES)] * 3
    assert len(sums_of(relays)) >= 6
    models = [silo._session.replica.model for silo in trainers.values()]
    assert len(models) == 5
    for model in models:
        np.testing.assert_array_equal(model, models[0])


# Silos and relays that fail.


BAD: dict[str, tuple[Callable[[WorkReport, Vector], tuple[WorkReport, Vector]], str]] = {
    "nan": (lambda report, update: (report, np.full_like(update, np.nan)), "finite"),
    "short": (lambda report, update: (report, update[:-1]), "length"),
    "absurd speed": (lambda report, update: (replace(report, compute_s=8e-12), update), "speed"),
    "other version": (lambda report, update: (replace(report, base_version=99), update), "version"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_update_costs_its_silo_the_round_and_its_region_nothing(name: str, tmp_path: Path) -> None:
    change, check = BAD[name]
    spoilt = changing(WorkReport, lambda report, update: change(report, update.view(np.float32)))
    relays = relays_of(answers={1: spoilt})
    run(tmp_path, grid_of(relays))
    assert check in journal(tmp_path)
    assert committed(tmp_path) == [["a", "c", "d", "e"]] * 3


def _again(relay: RelayNode, grid: DirectGrid, node: int, when: str, *, started: bool) -> None:
    """The relay's process dies with the first order that it gets, and comes back at once."""
    inner, died = grid.answers[node], list[str]()

    def dies(message: Message, context: Context) -> Message | None:
        asked = messages.read_request(message)[1]
        if '\\"Train\\"' not in asked or died:
            return inner(message, context)
        if when == "after":
            inner(message, context)
        died.append("")
        relay.start()
        grid.starts[node] += started
        return None if started else Message(Error(code=5, reason="its node is gone"), reply_to=message)

    grid.answers[node] = dies


@pytest.mark.slow
@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_relay_that_dies_with_its_orders_costs_no_round(when: str, tmp_path: Path, *, started: bool) -> None:
    """Its node is another, or the message alone is lost: its silos are asked again, and each update counts once."""
    relays = relays_of()
    grid = grid_of(relays)
    _again(relays[0], grid, 1, when, started=started)
    config = StrategyConfig.load("fedavg", [*QUICK, "min_silos=5", "stop.rounds=30"])
    FedSync(config, SILOS, out=tmp_path, timing=SOON).start(grid)
    rounds = committed(tmp_path)
    assert len(rounds) == 30 and rounds[-1] == list(NAMES)
    counted = [update_id for line in journal(tmp_path).splitlines() for update_id in _committed_ids(line)]
    assert len(counted) == len(set(counted)) > 90


def _committed_ids(line: str) -> list[str]:
    actions = json.loads(line).get("actions", [])
    return [update_id for each in actions if each["type"] == "Commit" for update_id in each["weights"]]


@pytest.mark.parametrize("lie", ["others", "twice", "of nobody", "nonsense", "no piece", "altered"])
def test_updates_of_a_sum_that_is_none_come_alone(lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    relays, lied = relays_of(), list[str]()
    honestly = relays[0].service.__class__.ask

    def ask(self: Any, spec: str, text: str, payload: Payload | None) -> tuple[str, Payload | None]:
        said, answer = honestly(self, spec, text, payload)
        reply = read_region_reply(said, "relay") if self is relays[0].service else RegionReply()
        if not reply.sums or lied:
            return said, answer
        lied.append(lie)
        (members,) = reply.sums
        changed = {
            "others": replace(members, update_ids=("a/1", "e/1")),
            "twice": replace(members, numbers=members.numbers[:1] * 2, update_ids=members.update_ids[:1] * 2),
            "of nobody": replace(members, numbers=("x", "y")),
            "no piece": replace(members, piece=7),
        }
        assert answer is not None
        if lie == "altered":
            answer = np.full(answer.nbytes, 255, np.uint8)
        if lie == "nonsense":
            return "nonsense", None
        return write(replace(reply, sums=(changed.get(lie, members),))), answer

    monkeypatch.setattr(relays[0].service.__class__, "ask", ask)
    config = StrategyConfig.load("fedavg", [*QUICK, "min_silos=5"])
    # What is refused is asked for at once.
    timing = SOON if lie in ("nonsense", "no piece") else replace(TIMING, ask_s=60.0)
    FedSync(config, SILOS, out=tmp_path, timing=timing).start(grid_of(relays))
    assert lied and len(committed(tmp_path)) == 3 and committed(tmp_path)[-1] == list(NAMES)
    # What cannot be read or added is asked for again, and comes alone; what is told to be in no sum comes in none.
    missing = {"twice": {"b"}, "of nobody": {"a", "b"}}.get(lie, set())
    assert committed(tmp_path)[0] == [name for name in NAMES if name not in missing]
    assert ("WorkFailed" in journal(tmp_path)) == bool(missing)


def test_an_answer_to_what_was_asked_while_the_relay_looked_is_not_lost() -> None:
    """The server asks just when another thread has seen what is waited for."""
    silos = silos_of(lambda asked, payload: SiloAnswer("", write_reply(InProgress(1, 8))))

    class Asked(RelayLine):
        late = False

        def arrived(self, most: Mapping[str, int]) -> Sequence[SiloAnswer]:
            if not self.late:
                self.late = True
                service.ask("{}", write(RegionRequest("s", (asked,))), None)
            return super().arrived(most)

    asked = RegionAsk("s/1", 1, write_request(Describe()))
    service = RelayService(Asked(silos, look_s=0.0))
    service.turn()
    service.turn()
    answers = read_region_reply(service.ask("{}", write(RegionRequest("s")), None)[0], "relay").answers
    assert [each.number for each in answers] == ["s/1"]


def test_a_silo_that_comes_late_to_its_region_is_met(tmp_path: Path) -> None:
    relays = relays_of()
    grid = grid_of(relays)
    relays[0].below.nodes.discard(2)
    inner, asked = grid.answers[3], list[str]()

    def comes(message: Message, context: Context) -> Message | None:
        asked.append("")
        if len(asked) == 3:
            relays[0].below.nodes.add(2)
        return inner(message, context)

    grid.answers[3] = comes
    run(tmp_path, grid, "min_silos=4", "stop.rounds=6")
    rounds = committed(tmp_path)
    assert rounds[0] == ["a", "c", "d", "e"] and rounds[-1] == list(NAMES)


def test_what_goes_to_a_region_is_a_message_for_all_of_it(tmp_path: Path) -> None:
    relays = [RelayNode((0, 1, 2, 3, 4))]
    grid = DirectGrid(1, {1: relays[0]})
    run(tmp_path, grid)
    busy = [reply for reply in relays[0].told if reply.answers]
    assert len(busy) == 5, "who they are, three rounds, and the last score"
    assert [len(reply.answers) for reply in busy] == [5] * 5
    assert sorted(len(each.pieces) for each in relays[0].asked if each.asks) == [0, 1, 1, 1, 1], (
        "a model goes there once"
    )
