"""What a silo remembers of its runs beside its keys: how far another name leads back, and what is forgotten."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.silo import replay_log
from fedsync.cipher.silo.replay_log import KEPT_RUNS, KEPT_VERSIONS, MOST_NAMES, ChainLog
from fedsync.common.errors import ConfigError


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


CHAINS = {version: digest(version) for version in range(12)}
RUN = digest(1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def log(folder: Path | None, name: str = "first", run: bytes = RUN, epoch: int = 1) -> ChainLog:
    ring: Any = SimpleNamespace(folder=folder, group=SimpleNamespace(epoch=epoch))
    return ChainLog(cast(Ring, ring), run, name)


def test_the_newest_versions_are_known_to_every_trainer_of_the_run(folder: Path) -> None:
    log(folder).enter(CHAINS)
    assert log(folder).followed == {version: CHAINS[version] for version in range(12 - KEPT_VERSIONS, 12)}
    assert log(folder, run=digest(5)).followed == {}


def test_another_name_has_to_lead_through_the_oldest_of_them(folder: Path) -> None:
    log(folder).enter(CHAINS)
    oldest = 12 - KEPT_VERSIONS
    other = log(folder, "second")
    assert other.followed == {oldest: CHAINS[oldest]}
    assert len(log(folder).followed) == KEPT_VERSIONS, "nothing was followed yet under the other"
    other.enter({version: CHAINS[version] for version in range(6)})
    assert log(folder, "second").followed == {4: CHAINS[4], 5: CHAINS[5]}
    assert log(folder, "third").followed == {4: CHAINS[4]}, "no further back than the second"


def test_a_name_that_another_has_followed_is_over_also_for_a_trainer_that_runs(folder: Path) -> None:
    first = log(folder)
    first.enter(CHAINS)
    log(folder, "second").enter(CHAINS)
    for call in (lambda: first.followed, lambda: first.enter(CHAINS), lambda: log(folder).followed):
        with pytest.raises(ConfigError, match="continues under another name"):
            call()


def test_a_run_has_so_many_names_and_no_more(folder: Path) -> None:
    for number in range(MOST_NAMES):
        log(folder, str(number)).enter(CHAINS)
    with pytest.raises(ConfigError, match=f"newest checkpoint {MOST_NAMES} times"):
        _ = log(folder, "one more").followed


def test_of_many_runs_the_newest_stay_and_the_others_are_over(folder: Path) -> None:
    for number in range(KEPT_RUNS + 5):
        log(folder, run=digest(number)).enter(CHAINS)
        os.utime(folder / "chains" / f"1-{digest(number).hex()}", (number, number))
    log(folder, run=digest(7)).enter(CHAINS)
    files = {file.name for file in (folder / "chains").iterdir()}
    assert len(files) == KEPT_RUNS + 1 and f"1-{digest(7).hex()}" in files
    with pytest.raises(ConfigError, match="since this silo last saw this run: it is over"):
        _ = log(folder, run=digest(0)).followed
    with pytest.raises(ConfigError, match="it is over"):
        log(folder, "another name", run=digest(1)).enter(CHAINS)


def test_the_oldest_run_is_not_forgotten_while_its_own_trainer_starts(folder: Path) -> None:
    for number in range(KEPT_RUNS):
        log(folder, run=digest(number)).enter(CHAINS)
        os.utime(folder / "chains" / f"1-{digest(number).hex()}", (number, number))
    assert log(folder, run=digest(0)).followed


def test_a_new_epoch_forgets_all_and_an_old_one_nothing(folder: Path) -> None:
    """Keys of an earlier epoch may come back from a backup; what is newer stays then."""
    log(folder).enter(CHAINS)
    log(folder, epoch=2).enter(CHAINS)
    assert [file.name[:2] for file in (folder / "chains").iterdir()] == ["2-"]
    log(folder, epoch=1, run=digest(3)).enter(CHAINS)
    assert len(list((folder / "chains").iterdir())) == 2


def test_where_no_more_can_be_noted_nothing_is_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_log, "_MAX_OVER_BYTES", 32)
    for number in range(KEPT_RUNS + 5):
        log(folder, run=digest(number)).enter(CHAINS)
    assert len(list((folder / "chains").iterdir())) == KEPT_RUNS + 5


def test_keys_in_memory_have_a_log_in_memory() -> None:
    kept = log(None)
    kept.enter(CHAINS)
    assert max(kept.followed) == 11
