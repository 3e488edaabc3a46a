"""Integrity check and summary of a silo's audit log, for ``fedsync silo audit`` and ``fedsync doctor``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsync.common.errors import ConfigError
from fedsync.config.silo_start import SiloStartConfig
from fedsync.ops.audit_heads import HEAD, ROTATED, AuditHead, check_fits, check_head, heads_elsewhere, keys_of
from fedsync.silo.owner.audit_chain import AUDIT, UNWRITTEN, AuditBroken, AuditReader

_MOST_NAME = 60


@dataclass
class RunAccount:
    """Totals of one run in an audit log."""

    lines: int = 0
    orders: set[str] = field(default_factory=set)
    evaluations: int = 0
    nbytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def note(self, line: dict[str, Any]) -> None:
        self.lines += 1
        self.nbytes += line["bytes"]
        if line["said"] == "Refused":
            self.refused[str(line["code"])] += 1
        elif line["said"] == "WorkReport":
            self.orders.add(line["of"])
        elif line["said"] in ("Evaluation", "Attestation"):
            self.evaluations += 1


@dataclass
class AuditFound:
    """Result of a check."""

    broken: str = ""
    notes: list[str] = field(default_factory=list)
    lines: int = 0
    runs: dict[tuple[str, str], RunAccount] = field(default_factory=dict)


def check_audit(config: SiloStartConfig, heads_in: Path | None = None) -> AuditFound:
    """Read a silo's log, and compare the log with its signed heads. Raises `ConfigError` if a file cannot be read."""
    folder, found = Path(config.state) / AUDIT, AuditFound()
    if heads_in is not None:
        said = config.audit.model_copy(update={"head_to": str(heads_in)})
        config = config.model_copy(update={"audit": said})
    try:
        heads = {}
        for path in (*(path for path in (folder / HEAD,) if path.exists()), *heads_elsewhere(config)):
            heads[path] = AuditHead.load(path)
        reader, wanted, digests = AuditReader(folder), {head.n for head in heads.values()}, {}
        rotations = []
        for line in reader.lines():
            found.lines += 1
            if line["n"] in wanted:
                digests[line["n"]] = reader.digest
            if line["kind"] == "answered":
                found.runs.setdefault((str(line["run"]), str(line["spec"])), RunAccount()).note(line)
            elif line["kind"] == ROTATED:
                rotations.append(line)
        keys = keys_of(config, rotations) if heads else {}
        for path, head in heads.items():
            if head.n >= reader.first:  # older lines and their key rotations were removed
                check_head(head, config, keys, path)
        check_fits(heads, digests, reader)
        _note(found, config, reader, heads)
    except AuditBroken as error:
        found.broken = str(error)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ConfigError(str(folder), f"cannot be read: {error}", "Check its permissions") from error
    return found


def _note(found: AuditFound, config: SiloStartConfig, reader: AuditReader, heads: dict[Path, AuditHead]) -> None:
    signed = max((head.n for head in heads.values()), default=0)
    if reader.first > 1:
        found.notes.append(f"lines before {reader.first} were removed, as audit.keep says")
    if reader.torn:
        found.notes.append(f"{reader.torn} bytes at the end are a line that was never finished, nor its answer sent")
    if reader.n > signed:
        found.notes.append(f"{reader.n - signed} lines after the last signed head: a cut there would not show")
    if config.audit.head_to is None:
        found.notes.append("heads are on this machine only (audit.head_to): who has its key can write all of it anew")
    elif not any(True for _ in heads_elsewhere(config)):
        found.notes.append(f"no head is in {config.audit.head_to}")
    elif (Path(config.state) / AUDIT / UNWRITTEN).exists():
        found.notes.append(f"the head cannot be written to {config.audit.head_to}")


def table(found: AuditFound) -> list[str]:
    """Format a table by run; names of runs come from the server, and are therefore escaped."""
    names = {run: ascii(run)[1:-1][:_MOST_NAME] for run, _ in found.runs}
    wide = max([24, *map(len, names.values())])
    lines = [
        f"{'run':<{wide}} {'spec':<12} {'messages':>8} {'orders':>7} {'evaluations':>11} {'bytes out':>14}  refused"
    ]
    for (run, spec), each in found.runs.items():
        refused = ", ".join(f"{code} {count}" for code, count in sorted(each.refused.items())) or "-"
        lines.append(
            f"{names[run]:<{wide}} {spec[:12]:<12} {each.lines:>8} {len(each.orders):>7} {each.evaluations:>11} "
            f"{each.nbytes:>14,}  {refused}"
        )
    return lines
