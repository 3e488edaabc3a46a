"""Examination of a version's single updates at a silo: the owner's consent, and the checks with the run's state."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsync.cipher.keys.keyring import Ring, open_ring
from fedsync.cipher.keys.passphrase import NAMED_BY
from fedsync.cipher.masking.annex import Annex, commitment
from fedsync.cipher.masking.mask_log import kept_pair
from fedsync.cipher.masking.mask_roster import MaskRoster
from fedsync.cipher.masking.mask_round import pair_seeds
from fedsync.cipher.silo.history import History, run_digest
from fedsync.cipher.suites import open_suite
from fedsync.cipher.suites.suite import MASKED
from fedsync.common.errors import SERVER, ConfigError, ProtocolError
from fedsync.common.files import undigested
from fedsync.config.run_spec import RunSpec
from fedsync.config.silo_start import SiloStartConfig
from fedsync.extras.tracing.consent import Consent, Consents, give_consent
from fedsync.extras.tracing.disclosure import Disclosure
from fedsync.extras.tracing.notice import Notice
from fedsync.extras.tracing.update_trace import Finding, Tracer
from fedsync.silo.owner.model_export import KeptRun, kept_runs, kept_state
from fedsync.silo.owner.owner_policy import act_for_owner
from fedsync.silo.protocol import STATE_FOLDER, Identity
from fedsync.silo.room.process_start import keeper_of


@dataclass(frozen=True, slots=True)
class Consented:
    """Consent of a silo's owner, with the facts that the owner is shown.

    Args:
        known: whether the silo reached the version by these updates; None where it keeps nothing of the run.
        unmasks: whether the consent removes the masks of the silo's update; None where the update has no masks.
    """

    consent: Consent
    notice: Notice
    known: bool | None
    unmasks: bool | None


@dataclass(frozen=True, slots=True)
class Traced:
    """Result of an examination: a finding for each update, and the consents; ``known`` as for `Consented`."""

    notice: Notice
    findings: Sequence[Finding]
    consents: Consents
    known: bool


def consent_to(config: SiloStartConfig, notice: bytes, examiners: Sequence[str]) -> Consented:
    """Make a consent of the silo's owner to an examination of a version by the named silos. Raises `ConfigError` if
    there are no keys, an examiner is unknown, the silo has forgotten the version, or the log of used masks is damaged.
    Raises `ProtocolError` if the server's notice is invalid, or does not fit the silo's history.
    """
    ring = _ring(config)
    read = _read(notice, ring)
    members = ring.group.members
    for name in examiners:
        if name not in members:
            remedy = f"These have a key: {', '.join(members)}"
            raise ConfigError("--examiner", f"no silo {name!r} has a key of this group", remedy)
    kept = _kept(config, read.run)
    history = None if kept is None else _history(kept)
    known = None if history is None else read.known(history)
    pairs = None if kept is None or history is None else _pairs(ring, read, kept, history)
    masked = read.head.form is MASKED and read.slip(ring.own.name) is not None
    named = {name: members[name] for name in dict.fromkeys(examiners)}
    return Consented(
        give_consent(ring.own, read.matter, named, pairs), read, known, pairs is not None if masked else None
    )


def trace(config: SiloStartConfig, file: Path) -> Traced:
    """Examine the updates of a version at the silo of ``config``, by the server's disclosure ``file``. Raises
    `ConfigError` if the silo has no keys, the file cannot be read, or the silo keeps nothing of the run. Raises
    `ProtocolError` if too few owners consent, or the file does not fit the silo's history.
    """
    ring, disclosure = _ring(config), Disclosure.open(file)
    notice = _read(disclosure.notice, ring)
    kept = _kept(config, notice.run)
    if kept is None:
        problem = f"this silo keeps nothing of run {notice.run}, so it does not know what is agreed on in it"
        raise ConfigError(config.state, problem, "Have a silo examine that took part")
    identity = Identity.load(kept.copies[0].parent)
    owner = act_for_owner(config, identity)
    spec = owner.checked(RunSpec.parse(kept.text.spec), config.index)
    with keeper_of(identity, spec, owner) as keeper:
        _, state, plan = kept_state(kept.copies, spec, keeper.layout)
    if plan is None:
        raise ConfigError(config.state, f"run {notice.run} is not encrypted", "Nothing is hidden in it")
    senders = _senders(ring)
    files = [(f"consent {number} in it", one) for number, one in enumerate(disclosure.consents, 1)]
    consents = Consents.read(files, notice.matter, senders, ring.own.name)
    consents.check(len(senders), plan.members)
    known = notice.known(state.history)
    tracer = Tracer(plan, ring, open_suite(plan.kind, ring.group), state)
    return Traced(notice, tracer.trace(notice, consents.by_silo, disclosure.updates), consents, known)


def _ring(config: SiloStartConfig) -> Ring:
    if config.keys is None:
        raise ConfigError("keys", "this silo has none, so nothing of it is sealed", "There is nothing to examine")
    os.environ[NAMED_BY] = config.passphrase_env
    return open_ring(Path(config.keys))


def _senders(ring: Ring) -> Mapping[str, bytes]:
    return {name: keys.signing for name, keys in ring.group.members.items()}


def _read(data: bytes, ring: Ring) -> Notice:
    notice, group = Notice.read(data, _senders(ring)), ring.group
    if (notice.matter.group, notice.matter.epoch) != (group.fingerprint, group.epoch):
        detail = f"of key epoch {notice.matter.epoch}, or of another group; this silo has epoch {group.epoch}"
        raise ProtocolError(SERVER, "notice", detail)
    return notice


def _kept(config: SiloStartConfig, run: str) -> KeptRun | None:
    return next((one for one in kept_runs(Path(config.state) / STATE_FOLDER) if one.name == run), None)


def _history(kept: KeptRun) -> History | None:
    """Return the longest history among the undamaged copies."""
    bodies = [body for path in kept.copies if (body := undigested(path.read_bytes())) is not None]
    return max((History.from_bytes(body)[0] for body in bodies), key=lambda one: one.records.newest, default=None)


def _pairs(ring: Ring, notice: Notice, kept: KeptRun, history: History) -> dict[str, bytes] | None:
    """Return the mask seeds that this silo's update shares with others; None if the update has no masks or seeds.

    The update must belong to this very version, or start from the newest version that the silo reached. Raises
    `ProtocolError` if the notice's roster is not the roster of the update's masks, or the update is older. Raises
    `ConfigError` if the log of used masks is damaged.
    """
    slip = notice.slip(ring.own.name)
    if slip is None or slip.head.form is not MASKED:
        return None
    if not notice.known(history) and slip.head.round != history.records.newest:
        raise ProtocolError(SERVER, "notice", "this silo's update in it is an older one")
    group = ring.group
    run = run_digest(kept.name, kept.text.lasting, group.epoch, group.fingerprint)
    pair = kept_pair(ring, run)
    if pair is None:
        return None
    annex = Annex.unpack(slip.head.annex, ring.own.name, SERVER)
    roster = MaskRoster.read(notice.roster, group.members, run, colluding=0)
    seeds = pair_seeds(pair, roster.keys, annex.context)
    if {name: commitment(seed) for name, seed in seeds.items()} != annex.pairs:
        raise ProtocolError(SERVER, "roster", "not the one that this silo's update was masked with")
    return seeds
