"""Error classes of FedSync: the class tells who is at fault, and the message tells what to do."""

from __future__ import annotations

from collections.abc import Sequence

SERVER, ADMINISTRATOR = "server", "administrator"
"""Senders that are not silos."""


class FedSyncError(Exception):
    """Root of all errors that FedSync raises on purpose."""


class ConfigError(FedSyncError):
    """Error in the user's input: the place (as ``lb-bsp.yaml, line 4, local.steps``), the problem and the remedy."""

    others: tuple[ConfigError, ...] = ()
    """Further mistakes found by the same check."""

    def __init__(self, place: str, problem: str, remedy: str) -> None:
        super().__init__(place, problem, remedy)
        self.place = place
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}. {self.remedy}"


class HugeModel(ConfigError):
    """Error for a model too large for any machine."""


class OwnerRefusal(ConfigError):
    """Refusal by a silo's owner of what a run demands."""


class LimitReached(OwnerRefusal):
    """Refusal of a run that asks for more, or in smaller pieces, than an owner's limits allow."""


class BudgetSpent(OwnerRefusal):
    """Refusal of an order that would exceed the privacy budget of a silo's data."""


class SiloAway(OwnerRefusal):
    """Refusal of orders outside of a silo's window, which begins in ``back_s`` [s]."""

    def __init__(self, back_s: float) -> None:
        remedy = "Ask then; its owner says when by presence in silo.yaml"
        super().__init__("presence", f"this silo takes no orders for {back_s:.0f} s", remedy)
        self.back_s = back_s


def not_installed(place: str, library: str, extra: str) -> ConfigError:
    remedy = f'In a clone of FedSync: pip install -c constraints.txt ".[{extra}]"'
    return ConfigError(place, f"{library} is not installed", remedy)


class ProtocolError(FedSyncError):
    """Invalid message from a peer: the sender, the failed check (as ``finite``) and the finding.

    ``sender`` is a silo name, `SERVER`, `ADMINISTRATOR`, or a phrase with a space, as ``node 7``.
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
    """Claim of a silo to hold a later version than the server: a lie, or the server was restored to an old state."""

    def __init__(self, silo: str, version: int, newest: int) -> None:
        super().__init__(silo, "version", f"it says that it holds {version}, the newest is {newest}")


class IntegrityError(ProtocolError):
    """Integrity failure: sealed data was changed on its way, made outside the group, or made for another place."""


class SpoiledSum(ProtocolError):
    """Error in genuine sealed data: one silo of the group sealed invalid content."""


class SiloLocked(FedSyncError):
    """Exclusion of a silo after integrity failures, until its owner unlocks it."""


class Diverged(ConfigError):
    """Divergence of training: values that are not finite."""


class PolicyError(FedSyncError):
    """Breach of contract by a policy, ours or a user's. Carries the ``recent`` journal entries for the report."""

    def __init__(self, problem: str, recent: Sequence[object] = ()) -> None:
        self.problem = problem
        self.recent = tuple(recent)
        super().__init__(problem, self.recent)

    def __str__(self) -> str:
        story = "".join(f"\n  {entry!r}" for entry in self.recent)
        where = "This is a bug in your policy or, without one, in FedSync"
        return f"{self.problem}. {where}; the last entries were:{story}" if story else self.problem


class RunError(FedSyncError):
    """Failure of a run: a process died, silos did not join, or every silo kept failing."""


class SiloBusy(RunError):
    """Refusal of a silo whose trainers of other runs leave no room for another."""


class UserCodeError(RunError):
    """Exception in a silo's training code: names its file, line and message."""


class Hanging(RunError):
    """Hang of a silo's task, which waits for something that does not come."""
