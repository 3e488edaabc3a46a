"""The one tree of errors: whose fault it was decides the class, and the message says what to do."""

from __future__ import annotations

from collections.abc import Sequence

SERVER, ADMINISTRATOR = "server", "administrator"
"""Senders of messages that are no silos."""


class FedSyncError(Exception):
    """Root of all errors that FedSync raises on purpose."""


class ConfigError(FedSyncError):
    """The user's input is wrong: names the place, what was found and the remedy.

    Args:
        place: where, for example ``lb-bsp.yaml, line 4, local.steps``.
        problem: what is wrong, with the value.
        remedy: what to write instead.
    """

    others: tuple[ConfigError, ...] = ()
    """The other mistakes, where several things were checked."""

    def __init__(self, place: str, problem: str, remedy: str) -> None:
        super().__init__(place, problem, remedy)
        self.place = place
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}. {self.remedy}"


class HugeModel(ConfigError):
    """A model that fits no machine, so that no silo need be asked for it."""


class OwnerRefusal(ConfigError):
    """A run asks for what a silo's owner does not allow."""


class LimitReached(OwnerRefusal):
    """A run asks for more, or in smaller pieces, than a silo's owner allows."""


class SiloAway(OwnerRefusal):
    """A silo takes no orders outside of its window, which begins in ``back_s`` [s]."""

    def __init__(self, back_s: float) -> None:
        remedy = "Ask then; its owner says when by presence in silo.yaml"
        super().__init__("presence", f"this silo takes no orders for {back_s:.0f} s", remedy)
        self.back_s = back_s


def not_installed(place: str, library: str, extra: str) -> ConfigError:
    """The error where a library is missing that an extra of FedSync's brings, for example ``sim``."""
    remedy = f'In a clone of FedSync: pip install -c constraints.txt ".[{extra}]"'
    return ConfigError(place, f"{library} is not installed", remedy)


class ProtocolError(FedSyncError):
    """A peer sent nonsense: names the sender and the check that it failed.

    Args:
        sender: name of a silo, or `SERVER`, or `ADMINISTRATOR`; of anything else a few words, as ``node 7``, which no
            silo can be called.
        check: the check that failed, for example ``finite``.
        detail: what was found.
    """

    def __init__(self, sender: str, check: str, detail: str) -> None:
        super().__init__(sender, check, detail)
        self.sender = sender
        self.check = check
        self.detail = detail

    def __str__(self) -> str:
        if self.sender in (SERVER, ADMINISTRATOR):
            who = f"the {self.sender}"
        else:
            who = self.sender if " " in self.sender else f"silo {self.sender!r}"
        return f"{who} failed the check {self.check!r}: {self.detail}"


class LaterVersion(ProtocolError):
    """A silo says that it holds a version that the server's run has not come to: a lie, or the server was set back."""

    def __init__(self, silo: str, version: int, newest: int) -> None:
        super().__init__(silo, "version", f"it says that it holds {version}, the newest is {newest}")


class IntegrityError(ProtocolError):
    """What came was not made by silos of the group, or not for this place: what was sealed, changed on its way."""


class SpoiledSum(ProtocolError):
    """What came is what silos of the group sealed, and one of them sealed what no silo may."""


class SiloLocked(FedSyncError):
    """A silo takes no part because of failures of integrity, until its owner says so."""


class Diverged(ConfigError):
    """Training came to values that are not finite."""


class PolicyError(FedSyncError):
    """A policy broke its contract: our bug. Carries the last journal entries for the report.

    Args:
        problem: the contract that was broken.
        recent: the last journal entries, newest last.
    """

    def __init__(self, problem: str, recent: Sequence[object] = ()) -> None:
        self.problem = problem
        self.recent = tuple(recent)
        super().__init__(problem, self.recent)

    def __str__(self) -> str:
        story = "".join(f"\n  {entry!r}" for entry in self.recent)
        return f"{self.problem}. This is a bug in FedSync; the last entries were:{story}" if story else self.problem


class RunError(FedSyncError):
    """A run could not go on: a process died, silos did not join, or every silo kept failing."""


class UserCodeError(RunError):
    """A silo's training code raised: names its file, its line and what it said."""


class Hanging(RunError):
    """What a silo was asked to do waits for something that does not come."""
