"""Large sealed messages lie in files: who sends, adds or opens them holds a span, and nothing else is different."""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.cipher.encoding.catch_up import CatchUp, Link, LinkEntry, LinkKind, Start, decode
from fedsync.cipher.encoding.integrity import Authenticator
from fedsync.cipher.encoding.sealed_wire import TRAILER_BYTES, Envelope, Kind, unsigned
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.server.chain import total
from fedsync.cipher.server.sealed_aggregator import EncryptedAggregator
from fedsync.cipher.suites.suite import PAD, Adder, Words
from fedsync.core.silo_weight import Weighting
from fedsync.extras.tracing.evidence import Evidence
from fedsync.model.chunked_arrays import ArrayKeeper, file_part
from fedsync.model.layout import Layout
from fedsync.model.transfer import Payload
from tests.cipher.make import Federation
from tests.cipher.messages import head
from tests.cipher.sealers import member
from tests.memory import resident, traced
from tests.model.stores import files_in

MIB = 2**20
LAYOUT = Layout(("body", "head"), ((1000, 600), (5000,)))
"""Of which an update under the pad, three values in eight bytes, has 1.5 MiB."""

CHUNKS = 8 * MIB // PAD.chunk_bytes
WORDS = np.random.default_rng(0).integers(0, 2**63, (CHUNKS, PAD.words), dtype=np.uint64)


def peak_of(work: Callable[[], object]) -> int:
    """Most bytes that work takes at once, and pages of files that it holds when it is done."""
    before = resident()
    with traced() as taken:
        work()
    return taken.peak + max(resident() - before, 0)


@pytest.mark.parametrize("silos", [2, 6])
def test_who_adds_updates_up_holds_a_span_of_each(silos: int, tmp_path: Path) -> None:
    """Of 8 MiB each. Pages of a span are held until it is added up, which is seen below, as they are given back."""
    files, of = ArrayKeeper(tmp_path / "sealed"), head("pad", CHUNKS, (member(0, 7), member(1, 7)), Kind.AGGREGATE)
    updates = [Envelope(of, mapped(files), (1, 2)) for _ in range(silos)]
    held: list[int] = []
    made: list[Payload] = []

    def add() -> None:
        words, tag = total(updates, Adder(PAD), 200)
        made.append(files.write(of.nbytes, unsigned(of, noted(words, held), tag)))

    assert peak_of(add) < 3 * MIB
    assert len(held) == 8 and max(held) - min(held) < MIB, "what is added up is given back"
    sums = made[0][of.nbytes - WORDS.nbytes - TRAILER_BYTES :][: PAD.chunk_bytes].view(np.uint64)
    assert sums.tolist() == [int(word) * silos % PAD.modulus for word in WORDS[0].tolist()]
    brings = CatchUp(Start.HELD, 0, 1, (Link(LinkKind.ADD, (LinkEntry(1, (made[0],)),)),))
    assert peak_of(lambda: made.append(brings.encode(files))) < 2 * MIB
    assert bytes(decode(made[1]).links[0].entries[0].sums[0]) == made[0].tobytes()


def test_who_checks_and_opens_a_sum_holds_a_few_spans_of_it(tmp_path: Path) -> None:
    authenticator = Authenticator(bytes(32), PAD)
    of = head("pad", CHUNKS, (replace(member(0, 7), digest=bytes([1]) * 32),))
    hasher = authenticator.hasher()
    hasher.take(WORDS)
    envelope = Envelope(of, mapped(ArrayKeeper(tmp_path / "sealed")), authenticator.tag(hasher.value(), of))
    assert peak_of(lambda: sum(map(len, authenticator.authenticate(envelope, "silo").spans()))) < 5 * MIB


def mapped(files: ArrayKeeper) -> Words:
    return files.keep(WORDS.view(np.uint8).reshape(-1)).view(np.uint64).reshape(WORDS.shape)


def noted(words: Iterator[Words], held: list[int]) -> Iterator[Words]:
    """Words as they come, and how much is held of files meanwhile."""
    for span in words:
        held.append(resident())
        yield span


def federation(root: Path, folder: Path | None) -> Federation:
    """Silos and a server whose files are in a folder, or nowhere; keys are below ``root``."""
    sealed = EncryptionPlan("pad", 16, LAYOUT, Weighting(), 3)
    made = Federation(sealed, root, dict.fromkeys("abc", 10), np.zeros(LAYOUT.size, np.float32))
    evidence = Evidence((folder or root / "memory") / "evidence", "run", 8, 2**30)
    made.aggregator = EncryptedAggregator(sealed, made.keys.server, None, evidence, folder and folder / "sums")
    for name in made.examples:
        (root / name).mkdir(exist_ok=True)
        made.silos[name] = silo = made.copy(name, folder and folder / name / "copy")
        made.aggregator.greet(name, silo.holds, silo.greeting())
    return made


def updates_of(made: Federation, version: int) -> dict[str, Payload]:
    made.begin_all("abc", version)
    update = np.random.default_rng(version).normal(size=LAYOUT.size).astype(np.float32) / 100
    found = dict(made.seal(name, update) for name in "abc")
    for update_id, payload in found.items():
        made.aggregator.put(update_id[0], update_id, payload)
        made.aggregator.holds(update_id[0], version)
    return found


@pytest.fixture
def both(tmp_path: Path) -> dict[str, Federation]:
    """The same run with files and without."""
    return {"files": federation(tmp_path, tmp_path), "memory": federation(tmp_path, None)}


def test_in_files_and_in_memory_all_comes_to_the_same_bits(both: dict[str, Federation], tmp_path: Path) -> None:
    models = {}
    for kind, made in both.items():
        for version in range(2):
            updates = updates_of(made, version)
            assert {file_part(update) is not None for update in updates.values()} == {kind == "files"}
            made.commit(version + 1, list(updates))
        models[kind] = made.begin("a", 2)
        assert (file_part(models[kind]) is not None) == (kind == "files")
    np.testing.assert_array_equal(models["files"], models["memory"])
    assert np.abs(models["files"]).max() > 0.01
    assert len(files_in(tmp_path / "sums")) == 3, "two sums, and what brings the newest version"


def arrays_in(value: Any) -> Iterator[Payload]:
    """The large arrays of a state; it holds no large bytes."""
    if isinstance(value, np.ndarray):
        if value.nbytes > MIB:
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from arrays_in(part)
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from arrays_in(part)
    elif isinstance(value, bytes | memoryview):
        assert len(value) < MIB
    elif hasattr(value, "__slots__"):
        for name in value.__slots__:
            yield from arrays_in(getattr(value, name))


def test_a_state_names_whole_files_and_another_server_goes_on_with_them(both: dict[str, Federation]) -> None:
    """Whole files can be linked by a checkpoint; joined, or parts of files, they would be written again."""
    made = both["files"]
    made.commit(1, list(updates_of(made, 0)))
    updates = list(updates_of(made, 1))
    state = made.aggregator.state()
    found = list(arrays_in(state))
    assert len(found) == 4, "a sum, and three updates that wait"
    for array in found:
        part = file_part(array)
        assert part is not None and not array.flags.writeable
        assert (part.offset, part.nbytes) == (0, part.path.stat().st_size)
    copied = {name: copy(part) for name, part in state.items()}  # it goes on with what is written down at once
    before, made.aggregator = made.aggregator, EncryptedAggregator(made.plan, made.keys.server)
    made.aggregator.restore(copied)
    made.commit(2, updates)
    model = made.begin("a", 2)
    made.aggregator = before
    made.commit(2, updates)
    np.testing.assert_array_equal(made.copy("b").receive(before.outgoing("nobody yet"), 2), model)


def test_what_is_kept_of_an_update_is_the_file_in_which_it_waited(both: dict[str, Federation], tmp_path: Path) -> None:
    """It takes no room and no time; where it waited in memory, it is written."""
    for kind, folder in (("files", tmp_path), ("memory", tmp_path / "memory")):
        updates = updates_of(both[kind], 0)
        both[kind].commit(1, list(updates))
        for number, update in enumerate(updates.values()):
            kept = folder / "evidence" / f"1.{number}.updates"
            assert kept.read_bytes() == update.tobytes() and kept.stat().st_mode & 0o777 == 0o600
            part = file_part(update)
            assert (part is not None and part.path.samefile(kept)) == (kind == "files")
