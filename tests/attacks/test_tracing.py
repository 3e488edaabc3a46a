"""Who spoiled a version is found afterwards, if the owners consent; without them nobody sees a single update.

The spoiler has all that a silo has. Then the server and a silo misuse what is kept and what owners gave: the gain is
how many updates are opened that nobody consented to, or an honest silo that is accused.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from typer.testing import CliRunner

import fedsync.cipher.encoding.quantization as quantization
import fedsync.cipher.encoding.tally as tally
from fedsync import cli
from fedsync.cipher.keys.key_files import set_passphrase
from fedsync.cipher.keys.keyring import open_ring
from fedsync.cipher.keys.material import SiloKeys
from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.common.run_claim import EVIDENCE
from fedsync.extras.tracing.consent import Consent, give_consent
from fedsync.extras.tracing.disclosure import Disclosure
from fedsync.extras.tracing.evidence import give_out, versions
from fedsync.extras.tracing.notice import Notice
from fedsync.extras.tracing.trace_at_silo import Consented, Traced, consent_to, trace
from tests.attacks.adversary import Federation
from tests.attacks.conftest import Make
from tests.commands.call import call

LIAR, EXAMINER, OTHER = "silo-a", "silo-b", "silo-c"
CIPHERS = {
    "bfv": "{kind: bfv, members: 2}",
    "pad": "{kind: pad, members: 2}",
    "masked": "{kind: masked, inner: {kind: bfv, members: 3}}",
}


Spoiler = Callable[[pytest.MonkeyPatch, Any], None]


def _beyond_the_limit(patch: pytest.MonkeyPatch, liar: Any) -> None:
    honest = quantization.round_fixed

    def lie(*given: Any) -> tuple[Any, int]:
        integers, clipped = honest(*given)
        return np.where(integers != 0, 5 * 2**15, 0).astype(np.int32), clipped

    patch.setattr(quantization, "round_fixed", lie)


def _grid_of_its_own(patch: pytest.MonkeyPatch, liar: Any) -> None:
    scales = replace(liar._state.scales, exponents=((9, 9),))
    patch.setattr(liar, "_state", replace(liar._state, scales=scales))


def _wrong_tag(patch: pytest.MonkeyPatch, liar: Any) -> None:
    patch.setattr(liar._authenticator, "tag", lambda *_: (1, 2))


def _one_more_vote(slots: Any) -> Any:
    slots[tally._VOTES] += 1
    return slots


def _header(change: Callable[..., Any]) -> Spoiler:
    """A lie in the header: ``change`` gets the honest way to build it, and what that gets."""

    def lie(patch: pytest.MonkeyPatch, liar: Any) -> None:
        patch.setattr(tally, "build", partial(change, tally.build))

    return lie


SPOILERS: dict[str, tuple[Spoiler, str]] = {
    "beyond the limit": (_beyond_the_limit, "clipping"),
    "a header of two": (_header(lambda build, *own: 2 * build(*own)), "count"),
    "two votes": (_header(lambda build, *own: _one_more_vote(build(*own))), "votes"),
    "progress without end": (_header(lambda build, own, *more: build(replace(own, progress=2.0**74), *more)), "size"),
    "a grid of its own": (_grid_of_its_own, "grid"),
    "a wrong tag": (_wrong_tag, "tag"),
}


def spoiled(
    make: Make, cipher: str = "bfv", spoiler: str = "beyond the limit", count: int = 3, **options: Any
) -> Federation:
    """One honest version, and one that the liar spoiled."""
    federation: Federation = make(count, cipher=CIPHERS[cipher], on_disk=True, **options)
    federation.round()
    with pytest.MonkeyPatch.context() as patch:
        # The order's package first: only what it seals is a lie.
        liar = federation.silos[LIAR].replica
        send, done = liar.send, []

        def lie(*given: Any) -> Any:
            SPOILERS[spoiler][0](patch, liar)
            done.append(send(*given))
            patch.undo()
            return done[0]

        patch.setattr(liar, "send", lie)
        ids = [federation.collect(LIAR)]
    federation.commit([*ids, *(federation.collect(name) for name in federation.names[1:])])
    federation.bring()
    return federation


def honest(make: Make, cipher: str = "bfv", rounds: int = 3) -> Federation:
    """A run in which nothing is wrong."""
    federation: Federation = make(cipher=CIPHERS[cipher], on_disk=True)
    for _ in range(rounds):
        federation.round()
    federation.bring()
    return federation


def notice(federation: Federation, version: int = 2) -> bytes:
    return (federation.out / EVIDENCE / f"{version}.notice").read_bytes()


def consented(federation: Federation, name: str, version: int = 2, *examiners: str) -> Consented:
    return consent_to(federation.config(name), notice(federation, version), examiners or (EXAMINER,))


def consents(federation: Federation, names: Sequence[str] = (), version: int = 2) -> list[tuple[str, bytes]]:
    each = [(name, consented(federation, name, version)) for name in names or federation.names]
    return [(f"the file of {name}", one.consent.canonical()) for name, one in each]


def disclosed(federation: Federation, given: Sequence[tuple[str, bytes]], version: int = 2) -> Path:
    out = federation.folder / "disclosed"
    give_out(federation.out / EVIDENCE, version, EXAMINER, given, federation.keys, out)
    return out


def traced(federation: Federation, file: Path) -> Traced:
    return trace(federation.config(EXAMINER), file)


def accused(done: Traced) -> dict[str, tuple[str, ...]]:
    return {one.silo: one.faults for one in done.findings if one.faults}


@pytest.mark.slow
@pytest.mark.parametrize("cipher", CIPHERS)
def test_the_silo_that_went_beyond_the_clipping_limit_is_found(cipher: str, make: Make) -> None:
    federation = spoiled(make, cipher)
    done = traced(federation, disclosed(federation, consents(federation)))
    assert list(accused(done)) == [LIAR] and "clipping" in accused(done)[LIAR]
    largest = {one.silo: one.largest or 0.0 for one in done.findings}
    assert 4.9 < largest.pop(LIAR) < 5.1
    assert all(0 < one <= 1 for one in largest.values()), "how large the honest ones are is told relative to the limit"


@pytest.mark.slow
@pytest.mark.parametrize("spoiler", SPOILERS)
def test_each_way_to_spoil_a_version_is_named(spoiler: str, make: Make) -> None:
    # Of three silos that say which grid it is, the server leaves out the one that says otherwise.
    # The header takes no more progress than spoils a sum where silos weigh as one each.
    changes = {"aggregation": {"kind": "fednova", "weight": "silo"}} if "progress" in spoiler else {}
    federation = spoiled(make, spoiler=spoiler, count=2 if "grid" in spoiler else 3, changes=changes)
    found = accused(traced(federation, disclosed(federation, consents(federation))))
    assert list(found) == [LIAR] and SPOILERS[spoiler][1] in found[LIAR]


@pytest.mark.slow
@pytest.mark.parametrize("cipher", CIPHERS)
def test_an_honest_version_accuses_nobody(cipher: str, make: Make) -> None:
    federation = honest(make, cipher)
    done = traced(federation, disclosed(federation, consents(federation)))
    assert accused(done) == {} and done.known
    assert all(one.largest is not None and not one.unexamined for one in done.findings)


# What a server and silos may try with it.


def refused(federation: Federation, given: Sequence[tuple[str, bytes]], version: int = 2) -> str:
    """Why the server's operator does not give anything out."""
    with pytest.raises(ProtocolError) as caught:
        disclosed(federation, given, version)
    assert not (federation.folder / "disclosed").exists()
    return str(caught.value)


@pytest.mark.slow
def test_nothing_is_given_out_without_a_majority(make: Make) -> None:
    federation = spoiled(make, count=4)
    given = consents(federation, federation.names[:2])
    assert "2 of 4 silos' owners consent, 3 must" in refused(federation, given)
    assert "2 of 4" in refused(federation, [*given, *given, *given]), "each owner counts once"
    # Nor does the examining silo look at what a server gives out all the same.
    file = disclosed(federation, consents(federation))
    honest = Disclosure.open(file)
    data = file.read_bytes()
    for gone in honest.consents[2:]:
        data = data.replace(gone, b"x" * len(gone))
    file.write_bytes(data)
    with pytest.raises(ProtocolError, match="2 of 4"):
        traced(federation, file)


def test_a_consent_is_good_for_one_version_one_run_and_one_examiner(make: Make) -> None:
    federation = spoiled(make)
    other = consented(federation, OTHER, 2, OTHER).consent
    fresh = [consented(federation, name).consent for name in federation.names]
    ring = open_ring(federation.rings[LIAR])
    members = ring.group.members

    def all_about(**changes: Any) -> list[tuple[str, bytes]]:
        """Honest signatures, of all, about something else."""
        owners = [open_ring(federation.rings[name]).own for name in federation.names]
        matter = replace(fresh[0].matter, **changes)
        return [(one.name, give_consent(one, matter, {EXAMINER: members[EXAMINER]}).canonical()) for one in owners]

    assert "examination by silo-c only" in refused(federation, [("it", other.canonical())])
    assert "to something else: version 1" in refused(federation, consents(federation, version=1))
    for changes in ({"run": "run-2"}, {"epoch": 2}, {"group": bytes(16)}, {"content": bytes(32)}, {"version": 3}):
        assert "to something else" in refused(federation, all_about(**changes)), changes
    assert disclosed(federation, all_about()).exists(), "the control"


def test_nobody_consents_for_another(make: Make) -> None:
    """A silo under two names, one with no key, one of another group, and a statement that was changed."""
    federation = spoiled(make)
    matter = consented(federation, LIAR).consent.matter
    ring = open_ring(federation.rings[LIAR])
    to = {EXAMINER: ring.group.members[EXAMINER]}
    mine = give_consent(ring.own, matter, to)
    in_another_name = give_consent(replace(ring.own, name=OTHER), matter, to)
    relabelled = Consent.read(mine.canonical().replace(b'"silo":"silo-a"', b'"silo":"silo-c"'))
    stranger = give_consent(SiloKeys.generate("silo-x"), matter, to)
    fake = give_consent(SiloKeys.generate(OTHER), matter, to)
    for lie in (in_another_name, relabelled, stranger, fake):
        assert "1 of 3 silos' owners" in refused(federation, [("own", mine.canonical()), ("it", lie.canonical())])
    more = mine.model_copy(update={"examiners": (EXAMINER, OTHER)})
    for junk in (more.canonical(), b"", b"{}", b"[" * 1000, bytes(2**21)):
        assert "0 of 3" in refused(federation, [("it", junk)])


@pytest.mark.slow
def test_an_honest_silo_is_not_accused_by_what_the_server_exchanges(make: Make) -> None:
    """The server gives one silo's update in the place of another's, an older one, or one that the liar forged."""
    federation = spoiled(make)
    file = disclosed(federation, consents(federation))
    updates = {name: bytes(data) for name, data in Disclosure.open(file).updates}
    forged = updates[f"{LIAR}/2"].replace(LIAR.encode(), OTHER.encode())
    whole = file.read_bytes()
    at = whole.index(updates[f"{OTHER}/2"])
    for lie in (updates[f"{EXAMINER}/2"], federation.updates[f"{OTHER}/1"], forged, bytes(len(forged))):
        assert len(lie) == len(forged)
        file.write_bytes(whole[:at] + lie + whole[at + len(lie) :])
        done = traced(federation, file)
        assert list(accused(done)) == [LIAR]
        why = {one.silo: one.unexamined for one in done.findings if one.unexamined}
        assert why == {OTHER: "what the server gave out is not what the silo signed"}


@pytest.mark.slow
def test_a_server_that_withholds_an_update_is_seen(make: Make) -> None:
    federation = spoiled(make)
    file = disclosed(federation, consents(federation))
    last = dict(Disclosure.open(file).updates)[f"{OTHER}/2"]
    record = len(f"{OTHER}/2") + 10
    file.write_bytes(file.read_bytes()[: -len(last) - record])
    done = traced(federation, file)
    assert {one.silo: one.unexamined for one in done.findings if one.unexamined} == {
        OTHER: "the server has not given it out"
    }


@pytest.mark.slow
def test_owners_and_examiner_refuse_other_updates_than_made_the_version(make: Make) -> None:
    """The server shows what went into version 1 as version 2, so that another update is opened than was meant."""
    federation = honest(make)
    senders = federation.keys.senders
    first = Notice.read(notice(federation, 1), senders)
    relabelled = replace(first, version=2).encode()
    dropped = replace(first, updates=first.updates[:2]).encode()
    for lie in (relabelled, dropped):
        with pytest.raises((ProtocolError, ConfigError)):
            consent_to(federation.config(OTHER), lie, [EXAMINER])
    # Whoever gets consents by fraud, as of silos that keep nothing of the run, fails at an honest examiner.
    (federation.out / EVIDENCE / "2.notice").write_bytes(relabelled)
    for number in range(3):
        shutil.copy(
            federation.out / EVIDENCE / f"1.{number}.updates", federation.out / EVIDENCE / f"2.{number}.updates"
        )
    matter = Notice.read(relabelled, senders).matter
    given = [
        (name, give_consent(open_ring(federation.rings[name]).own, matter, dict(federation.group.members)).canonical())
        for name in federation.names
    ]
    with pytest.raises(ProtocolError, match="not those that made version 2"):
        traced(federation, disclosed(federation, given))


# Masks come off with their owner's consent only.


@pytest.mark.slow
def test_under_masks_an_update_stays_closed_whose_owner_does_not_consent(make: Make) -> None:
    federation = spoiled(make, "masked", count=5)
    willing = [name for name in federation.names if name not in (LIAR, OTHER)]
    done = traced(federation, disclosed(federation, consents(federation, willing)))
    found = {one.silo: (one.largest, one.unexamined) for one in done.findings}
    for closed in (LIAR, OTHER):
        assert found[closed] == (None, "its owner has not consented to unmask it")
    assert all(found[name][0] is not None for name in willing)


def test_seeds_in_a_consent_are_for_the_examiner_and_of_one_update(make: Make) -> None:
    federation = spoiled(make, "masked")
    mine = consented(federation, OTHER)
    assert mine.unmasks
    rings = {name: open_ring(path) for name, path in federation.rings.items()}
    seeds = mine.consent.pair_seeds(rings[EXAMINER].own)
    assert sorted(seeds) == [LIAR, EXAMINER]
    assert mine.consent.pair_seeds(rings[LIAR].own) == {}
    stolen = mine.consent.model_copy(update={"masks": {LIAR: mine.consent.masks[EXAMINER]}})
    with pytest.raises(ProtocolError, match="cannot be decrypted"):
        stolen.pair_seeds(rings[LIAR].own)
    before = consented(federation, OTHER, 1).consent.pair_seeds(rings[EXAMINER].own)
    assert set(seeds.values()).isdisjoint(before.values())
    text = mine.consent.canonical()
    own, book = rings[OTHER].own, next((federation.rings[OTHER] / "masks").glob("?" * 64)).read_text().split()[0]
    for secret in (own.exchange.hex(), own.signing.hex(), book, *(seed.hex() for seed in seeds.values())):
        assert secret.encode() not in text


def test_seeds_of_an_older_update_are_not_had_by_a_version_that_never_came(make: Make) -> None:
    """The server says that an update of version 1 made version 3, which no silo has seen."""
    federation = honest(make, "masked")
    first = Notice.read(notice(federation, 1), federation.keys.senders)
    newest = federation.silos[OTHER].replica.holds
    lie = replace(first, version=newest + 1).encode()
    with pytest.raises(ProtocolError, match="an older one"):
        consent_to(federation.config(OTHER), lie, [EXAMINER])


# Commands, and what is on disk.


@pytest.mark.slow
def test_commands_find_spoilers_with_passphrases(make: Make, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = spoiled(make)
    monkeypatch.setenv("SECRET", "open sesame")
    server = federation.folder / "server.json"
    shutil.copy(next(federation.root.glob("keys-3/administrator/issued/*/server.json")), server)
    files = []
    for name in federation.names:
        set_passphrase(federation.rings[name], "open sesame")
        shutil.copytree(federation.folder / "state" / name, place / name)
        said = {**federation.config(name).model_dump(exclude_none=True), "state": str(place / name)}
        file = place / f"{name}.yaml"
        file.write_text(json.dumps({**said, "passphrase_env": "SECRET"}))
        files.append(place / f"{name}.consent")
        told = call(
            "keys", "consent", federation.out / EVIDENCE / "2.notice", "--silo", file, "--examiner", EXAMINER,
            "--out", files[-1],
        )  # fmt: skip
        assert f"{name} consents that {EXAMINER} examine version 2" in told and f"{LIAR}/2" in told
    given = [part for file in files for part in ("--consent", file)]
    out = place / "disclosed"
    call(
        "server", "disclose", federation.out, "--version", 2, "--examiner", EXAMINER, *given, "--keys", server,
        "--out", out,
    )  # fmt: skip
    assert out.stat().st_mode & 0o777 == 0o600
    done = CliRunner().invoke(cli.app, ["keys", "trace", str(out), "--silo", str(place / f"{EXAMINER}.yaml")])
    assert done.exit_code == 1
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip().startswith("silo-")}
    assert "clipping" in rows[LIAR] and all("nothing" in rows[name] for name in (EXAMINER, OTHER))


def test_the_server_keeps_a_number_of_versions_and_of_bytes_for_its_owner_alone(make: Make) -> None:
    federation: Federation = make(2, on_disk=True)
    kept = federation.aggregator._evidence
    assert kept is not None
    folder = federation.out / EVIDENCE
    kept._versions = 2
    for _ in range(4):
        federation.round()
    assert versions(folder) == [4, 3]
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o077 == 0
    size = sum(file.stat().st_size for file in folder.glob("4.*"))
    kept._most_bytes = size + 100
    federation.round()
    assert versions(folder) == [5], "older ones go where there is no room"
    kept._most_bytes = 1000
    federation.round()
    assert versions(folder) == [5], "what is larger than the room is not kept, and the run goes on"
    assert federation.aggregator._chain.newest == 6


def test_a_disk_that_takes_nothing_costs_no_round(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    federation: Federation = make(2, on_disk=True)
    full = ConfigError("disk", "full", "Make room")
    monkeypatch.setattr("fedsync.extras.tracing.evidence.write_pieces", Mock(side_effect=full))
    federation.round()
    assert federation.aggregator._chain.newest == 1 and versions(federation.out / EVIDENCE) == []
