"""Scripts: what a coordinator was told, step by step, so that a failure can be seen again, and made smaller first."""

from dataclasses import replace

from fedsync.common import codec
from fedsync.core.journal import JournalEntry
from tests.laws.calm import calm
from tests.laws.watch import CHECKPOINT, Case, Change, Watch, unchanged

TRIES = 400


def replay(case: Case, script: list[str], change: Change = unchanged) -> Watch:
    """Run the script of a failure again, and the calm after it.

    Args:
        case: (section, kind, settings), as in `kinds.cases`.
        script: lines of a journal without actions, and the word ``checkpoint``.
        change: of the policies, as it was.

    Raises:
        Exception: a law is broken, the same as before.
    """
    watch = Watch(case, change)
    _tell(watch, script)
    return watch


def _tell(watch: Watch, script: list[str]) -> None:
    for line in script:
        if line == CHECKPOINT:
            watch.checkpoint()
        else:
            entry: JournalEntry = codec.loads(JournalEntry, line, own=True)
            watch.step(entry.at_s, list(entry.events))
    calm(watch)


def smallest(watch: Watch) -> list[str]:
    """A script that breaks the same law as ``watch`` did, out of which no step and no event can be left."""
    tries = 0

    def breaks(script: list[str]) -> bool:
        nonlocal tries
        tries += 1
        again = Watch(watch.case, watch.change)
        try:
            _tell(again, script)
        except Exception:
            return again.broken == watch.broken
        return False

    script, size = list(watch.script), max(len(watch.script) // 2, 1)
    while size >= 1 and tries < TRIES:
        begin, before = 0, len(script)
        while begin < len(script):
            fewer = script[:begin] + script[begin + size :]
            if breaks(fewer):
                script = fewer
            else:
                begin += size
        if size > 1 or len(script) == before:
            size //= 2
    for index, line in enumerate(script):
        for shorter in _shorter(line):
            if tries < TRIES and breaks([*script[:index], shorter, *script[index + 1 :]]):
                script[index] = shorter
                break
    return script


def _shorter(line: str) -> list[str]:
    """The step with one event less, each in turn."""
    if line == CHECKPOINT:
        return []
    entry: JournalEntry = codec.loads(JournalEntry, line, own=True)
    events = entry.events
    rests = [events[:index] + events[index + 1 :] for index in range(len(events))] if len(events) > 1 else []
    return [codec.dumps(replace(entry, events=rest)) for rest in rests]


def told(watch: Watch) -> str:
    """What to type to see a failure again."""
    lines = "".join(f"    {line!r},\n" for line in smallest(watch))
    again = f"from tests.laws.script import replay\nreplay({watch.case!r}, [\n{lines}])"
    return f"{watch.broken}; to see it again:\n{again}"
