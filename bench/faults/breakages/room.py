"""Mutants of the confined training process: its room, its guard, and the checks of what it sends."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = ("tests/attacks/test_training_room.py", "tests/attacks/test_training_room_answers.py")

_CHANGES: Changes = {
    "silo/room/program.py": (
        ("the-process-is-not-confined", "    confine(room)\n", "    pass\n"),
        ("the-process-may-write-the-owner-s-data", "writable=(home, Path", "writable=(*map(Path, data), home, Path"),
        ("the-process-has-the-machine-s-network", "alone = own_namespaces()\n    devices", "alone = True\n    devices"),
        ("what-the-process-started-lives-on", "        os.killpg(inner, signal.SIGKILL)\n", "        pass\n"),
    ),
    "silo/room/process_start.py": (
        (
            "the-process-has-the-session-s-variables",
            'if key != secret and not key.startswith("FEDSYNC_")',
            "",
        ),
        ("second-names-of-closed-files-are-not-looked-for", "        fence.check_names()\n", ""),
        ("an-ended-process-is-not-killed", "    process.send_signal(signal.SIGTERM)", "    return"),
    ),
    "silo/room/room_messages.py": (
        ("more-steps-than-ordered-are-believed", "1 <= report.steps <= order.max_steps and", ""),
        ("another-version-is-believed", "report.base_version == order.base_version", "True"),
        ("a-device-may-be-a-message", "_DEVICE.fullmatch(facts.device) is not None", "True"),
    ),
    "silo/room/process.py": (
        ("a-halt-is-not-passed-on", "channel.send(messages.HaltOrder(asked.order.update_id))", "pass"),
        (
            "changed-data-are-accepted-by-a-new-process",
            "if replace(built.facts, device=device) != self.facts:",
            "if False:",
        ),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
