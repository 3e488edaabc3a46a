"""Writer of the files in a run's folder: configuration, journal and rounds during the run, the summary at its end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from fedsync import __version__
from fedsync.common.errors import ConfigError, RunError
from fedsync.common.files import OWNER_FILE, OWNER_FOLDER, write_atomically
from fedsync.core.journal import JOURNAL, JournalEntry, JournalWriter, open_private, read_journal
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.observe.ledger import Ledger
from fedsync.observe.quality import evaluations
from fedsync.observe.rounds import ROUND, SHARE, Round

if TYPE_CHECKING:
    from fedsync.extras.cross_site.cross_site_matrix import CrossSiteBooks

ROUNDS = "rounds.jsonl"
"""File with a line for each round, written once the round's scores are final."""


class RoundFeed:
    """Feed that returns every round of a ledger once, as soon as its scores are final."""

    def __init__(self) -> None:
        self._next = 0

    def closed(self, ledger: Ledger) -> list[Round]:
        begin, self._next = self._next, ledger.closed(self._next)
        return ledger.rounds[begin : self._next]


class Listener(Protocol):
    """Observer of a run, for example a progress bar."""

    def follow(self, ledger: Ledger) -> None:
        """Handle a new entry in the ledger."""


class Exporter(Listener, Protocol):
    """Observer that writes a run's figures for another program."""

    def close(self) -> None:
        """Finish the export after the run's end or failure; idempotent."""


class Recorder:
    """Writer of ``config.yaml``, ``silos.yaml``, ``journal.jsonl``, ``rounds.jsonl`` and ``summary.json``.

    Writes ``evaluation.json`` too, if there are curves; see `fedsync.observe.quality.evaluations`. ``fedsync run``
    reads the two YAML files, so a run can be repeated from its folder.

    Args:
        sealed_share: share of the model's values that is sent encrypted, 0..1.
        resume: continue the existing journal; the ledger is rebuilt from it.
        journal: False writes neither ``journal.jsonl`` nor ``rounds.jsonl``, and keeps only the slowest silo of each
            round, for runs with very many silos.
    """

    def __init__(
        self,
        out: Path,
        *,
        runtime: str,
        config: dict[str, Any],
        silos: list[dict[str, Any]] | None,
        model_bytes: int,
        target_accuracy: float | None = None,
        sealed_share: float = 0.0,
        listeners: Sequence[Listener] = (),
        exporters: Sequence[Exporter] = (),
        journal: bool = True,
        resume: bool = False,
        metrics: Sequence[AnyMetric] = (),
        keep: int | None = None,
    ) -> None:
        out.mkdir(mode=OWNER_FOLDER, parents=True, exist_ok=True)
        self.out = out
        self._settings, self._known = config, 0
        self._identity = {
            "strategy": config["name"],
            "runtime": runtime,
            "seed": config["seed"],
            "sealed_share": sealed_share,
        }
        self._cross_site: CrossSiteBooks | None = None
        if (config.get("evaluation") or {}).get("cross_site") is not None:
            from fedsync.extras.cross_site.cross_site_matrix import CrossSiteBooks

            self._cross_site = CrossSiteBooks(metrics)
        self._exporters = exporters
        self._feed = RoundFeed()
        self._listeners: Sequence[Listener] = (*listeners, *exporters)
        header = {
            "fedsync": __version__,
            "runtime": runtime,
            "config": config,
            "silos": silos,
            "model_bytes": model_bytes,
            "target_accuracy": target_accuracy,
        }
        self.ledger = Ledger.of(header, detail=journal, measured=tuple(metrics), keep=keep)
        with _writing(out):
            _write_yaml(out / "config.yaml", config)
            outputs = (ROUNDS, "summary.json", evaluations.FILE, evaluations.CROSS_SITE)
            for name in (*outputs, *(["silos.yaml"] if silos is None else []), *([] if resume else [JOURNAL])):
                (out / name).unlink(missing_ok=True)
            if silos is not None:
                _write_yaml(out / "silos.yaml", {"silos": silos})
            self._journal = JournalWriter(out / JOURNAL, None if resume else header) if journal else None
            self._rounds = open_private(out / ROUNDS) if journal else None
        for entry in read_journal(out / JOURNAL)[1] if resume else ():
            self._follow(entry)
            for exporter in exporters:  # before the ledger removes old rounds
                exporter.follow(self.ledger)

    def record(self, entry: JournalEntry) -> None:
        """Write one entry, and update the other files, listeners and exporters; `RunError` if the journal cannot be
        written, or if a silo is lost and the strategy demands that the run fails.
        """
        with _writing(self.out):
            if self._journal is not None:
                self._journal.append(entry)
            self._follow(entry)
        for listener in self._listeners:
            listener.follow(self.ledger)
        if self._known != self.ledger.lost.told:
            self._known = self.ledger.lost.told
            self.check_silos()

    def check_silos(self) -> None:
        """Raise `RunError` if a silo is lost and ``on_lost_silo`` is ``fail``, or the ended run has too few silos."""
        if self.ledger.lost.over or self._settings.get("on_lost_silo") == "fail":
            self.ledger.lost.fail_unless_tolerated(self._settings, self.ledger.missing())

    def _follow(self, entry: JournalEntry) -> None:
        self.ledger.add(entry)
        if self._cross_site is not None:
            self._cross_site.add(entry)
        if self._rounds is not None:
            for row in self._feed.closed(self.ledger):
                self._rounds.write(json.dumps(round_row(row)) + "\n")
                self._rounds.flush()

    def position(self) -> int:
        """Return the size of the journal that is safely on disk [bytes]; `RunError` if it cannot be written."""
        with _writing(self.out):
            return 0 if self._journal is None else self._journal.position()

    def keep(self, name: str, value: object) -> None:
        if value is not None:
            with _writing(self.out), open_private(self.out / name) as file:
                file.write(json.dumps(value) + "\n")

    def finish(self, files: Mapping[str, str] | None = None, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write the summary, close the files, and return the summary. Raises `RunError` if a file cannot be written."""
        estimates, drawn = evaluations.summary(self.ledger.models(), self.ledger.measured or ())
        summary = {**self._identity, **self.ledger.summary(), "evaluation": estimates, **(more or {})}
        for name, digest in (files or {}).items():
            summary[name] = {**(summary[name] or {}), "digest": digest}
        compared = None if self._cross_site is None else self._cross_site.document()
        if self._cross_site is not None and compared is not None:
            summary["evaluation"]["cross_site"] = self._cross_site.without_matrix(compared)
            self.keep(evaluations.CROSS_SITE, compared)
        # Atomic, because other processes wait for this file.
        with _writing(self.out):
            self.keep(evaluations.FILE, drawn or None)
            text = (json.dumps(summary, indent=2) + "\n").encode()
            write_atomically(self.out / "summary.json", text, OWNER_FILE, settle=False)
            self.close()
        return summary

    def close(self) -> None:
        for exporter in self._exporters:
            exporter.close()
        if self._journal is not None:
            self._journal.close()
        if self._rounds is not None:
            self._rounds.close()


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Turn disk errors into a `RunError` that names the run's folder; a run must not continue without its files."""
    try:
        yield
    except (OSError, ConfigError) as error:
        cause = error.__cause__ if isinstance(error, ConfigError) else error
        if not isinstance(cause, OSError):
            raise
        problem = f"{out}: the run's files cannot be written: {cause.strerror}"
        remedy = "Free disk space, and start the run again, or resume it if it has checkpoints"
        raise RunError(f"{problem}. {remedy}") from error


def add_to_summary(out: Path, files: Mapping[str, str], more: Mapping[str, Any]) -> dict[str, Any]:
    """Add digests of models written after the summary, and ``more`` (see `finish`); `ConfigError` if that fails."""
    path = out / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, digest in files.items():
        summary[name] = {**(summary[name] or {}), "digest": digest}
    summary |= more
    write_atomically(path, (json.dumps(summary, indent=2) + "\n").encode(), OWNER_FILE)
    return summary


_share = attrgetter(*SHARE)


def round_row(row: Round) -> dict[str, Any]:
    return {
        "round": row.round,
        "at_s": row.at_s,
        **{name: getattr(row, name) for name in ROUND},
        "slowest": row.slowest,
        "batch_sizes": {name: share.batch_size for name, share in row.silos.items()},
        "metrics": row.metrics,
        "evaluation": {"pooled": row.numbers, "silos": row.found},
        "silos": {
            name: dict(zip(SHARE, _share(share), strict=True), metrics=share.metrics)
            for name, share in row.silos.items()
        },
    }


def _write_yaml(path: Path, value: object) -> None:
    # LibYAML, if PyYAML was built with it, is ten times faster, which matters from 10,000 silos.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    write_atomically(path, yaml.dump(value, Dumper=dumper, sort_keys=False).encode(), settle=False)
