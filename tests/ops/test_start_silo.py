"""Which trainer is made ready, and with what; that it can be asked is in test_resident."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsync.common.errors import ConfigError
from fedsync.common.processes import OWNER
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.config.silo_start import SiloStartConfig
from fedsync.core.orders import SiloFacts
from fedsync.ops.start import serve_silo
from fedsync.silo.owner.key_lookup import KEYS
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.protocol import IDENTITY, STATE, Hello, Identity, Refusal, Refused, Reply, write_reply


@pytest.fixture
def config(tmp_path: Path) -> SiloStartConfig:
    return SiloStartConfig(name="berlin", server="localhost:1", insecure=True, state=str(tmp_path / "s"), keys="/k")


def test_the_newest_trainer_is_served_until_it_ends(config: SiloStartConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (STATE, OWNER, KEYS, ALLOWED):
        monkeypatch.setenv(name, "before")
    trainers = Path(config.state) / "state"
    for age, name in enumerate(["older", "newest", "oldest"]):
        (trainers / name).mkdir(parents=True)
        identity = Identity(spec=name, index=3, name="berlin", device="cpu")
        (trainers / name / IDENTITY).write_text(json.dumps(dataclasses.asdict(identity)))
        os.utime(trainers / name / IDENTITY, (age % 2 + 1, age % 2 + 1))
    (trainers / "torn").mkdir()
    (trainers / "torn" / IDENTITY).touch()  # the very newest, and nothing in it
    Path(config.state).chmod(0o700)
    seen: list[tuple[Identity, dict[str, str]]] = []

    def link(identity: Identity) -> SimpleNamespace:
        seen.append((identity, {name: os.environ[name] for name in (STATE, OWNER, KEYS, ALLOWED)}))
        reply: Reply = Refused(Refusal.LOADING) if len(seen) == 1 else Hello("berlin", SiloFacts(examples=5))
        return SimpleNamespace(ask=lambda text, payload: (write_reply(reply), None), alive=False)

    serve_silo(config, link)  # type: ignore[arg-type]
    (identity, environment), again = seen
    assert again == (identity, environment), "asked anew while it loads"
    assert identity == Identity(spec="newest", index=3, name="berlin", device="cpu")
    allowed = OwnerPolicy.of(config).model_dump_json()
    assert environment == {STATE: str(trainers), OWNER: str(os.getpid()), KEYS: "/k", ALLOWED: allowed}


def test_a_silo_that_no_run_has_reached_has_nothing_to_serve(config: SiloStartConfig) -> None:
    with pytest.raises(ConfigError, match="no run has reached this silo yet"):
        serve_silo(config)
