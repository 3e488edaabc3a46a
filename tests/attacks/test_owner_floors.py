"""A lying server that says how many silos stand behind what is told: each owner's floors win over its word (S1)."""

from typing import Any

import pytest

from fedsync.config.run_spec import RunSpec
from fedsync.silo.protocol import Describe, Refusal, Refused
from tests.attacks.adversary import Federation
from tests.attacks.conftest import Make

MASKED = "{kind: masked, inner: {kind: bfv, members: 2, colluding: 1}}"


def run_of(federation: Federation, said: dict[str, Any]) -> RunSpec:
    """The specification with what the server says of the numbers; ``least`` is of a survey that asks before the run."""
    least = said.pop("least", None)
    spec = federation.spec(**{key: value for key, value in said.items() if key == "quorum"})
    cipher = spec.cipher.model_dump()
    for key, value in said.items():
        if key != "quorum":
            (cipher["inner"] if key in cipher.get("inner", ()) else cipher)[key] = value
    spec = RunSpec.model_validate({**spec.model_dump(), "cipher": cipher})
    if least is None:
        return spec
    table = {"kind": "csv", "files": [str(federation.table)] * federation.count, "target": "y"}
    asked = {"bins": 4, "ranges": {}, "least": least}
    weight = {"kind": "fedavg", "weight": "silo"}
    task = {"kind": "survey", "of": {**table, "positive_above": 0.0, "statistics": asked, "standardise": "federated"}}
    return federation.spec(task=task, aggregation=weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cipher", "said", "floors"),
    [
        ("{kind: bfv, members: 2}", {"members": 2}, {"seal": {"members": 3}}),
        ("{kind: bfv, members: 2}", {"quorum": 2}, {"seal": {"quorum": 3}}),
        (MASKED, {"colluding": 1}, {"seal": {"masks": True, "colluding": 2}}),
        (MASKED, {"work_ratio": 4.0}, {"seal": {"masks": True, "work_ratio": 2.0}}),
        ("{kind: bfv, members: 2}", {"least": 5}, {"limits": {"statistics": 10}}),
    ],
)
def test_a_run_below_the_owners_floor_is_refused_and_at_it_taken(
    cipher: str, said: dict[str, Any], floors: dict[str, Any], make: Make
) -> None:
    federation = make(5, cipher=cipher)
    spec = run_of(federation, dict(said))
    ((place, floor),) = floors.items()
    reply = federation.silo("silo-a", spec, **floors).ask(Describe()).reply
    assert isinstance(reply, Refused) and reply.code is Refusal.OWNER, "the server's number is below the owner's"
    at = {key: said.get(key, value) for key, value in floor.items()}
    at = {"statistics": said["least"]} if "least" in said else at
    assert not isinstance(federation.silo("silo-a", spec, **{place: at}).ask(Describe()).reply, Refused)
