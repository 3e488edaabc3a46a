"""The YAML reference has every key of every file, with its meaning."""

from functools import cache

import pytest
import reference

pages = cache(reference.pages)


def row(page: str, heading: str, key: str) -> list[str]:
    """Cells of a key's row under the heading with this anchor."""
    text = pages()[page].split(f"{{ #{heading} }}")[1].split("\n#")[0]
    (line,) = (line for line in text.splitlines() if line.startswith(f"| `{key}` |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("chapter", reference.CHAPTERS.values(), ids=lambda chapter: chapter.title)
def test_all_sections_of_the_schema_are_there(chapter: reference.Chapter) -> None:
    for root in chapter.roots.values():
        schema = root.model_json_schema()
        parts = [schema, *schema.get("$defs", {}).values()]
        wanted = {frozenset(part["properties"].keys() - {"kind"}) for part in parts}
        found = [section for place in reference.places_of(root) for section in place.sections]
        assert {frozenset(reference.keys(section)) for section in found} == wanted
        assert len(found) == len(set(found)) == 1 + len(schema.get("$defs", {}))


@pytest.mark.parametrize(
    ("page", "heading", "key", "cells"),
    [
        ("yaml/strategy.md", "stop", "rounds", ["whole number, at least 1", "none"]),
        ("yaml/strategy.md", "local", "momentum", ["number, at least 0, below 1", "`0.0`"]),
        ("yaml/strategy.md", "local", "precision", ["`fp32`, `bf16`, `fp16`", "`fp32`"]),
        ("yaml/strategy.md", "barrier-ssp", "staleness", ["whole number, at least 0", "`3`"]),
        ("yaml/strategy.md", "barrier-fsp", "wait_for", ["[section](#barrier-wait_for)", "none"]),
        ("yaml/strategy.md", "barrier-elastic", "floor", ["whole number, at least 1", "none"]),
        ("yaml/strategy.md", "task-data-speech", "words", ["list of text, 2 or more", "required"]),
        ("yaml/silos.md", "silos", "bandwidth_mbps", ["number above 0", "none"]),
        ("yaml/strategy.md", "cipher-masked", "inner", ["[bfv](#cipher-bfv)", "`{kind: bfv}`"]),
        ("yaml/start.md", "server", "port", ["whole number, at least 1, at most 65,535", "`9092`"]),
        ("yaml/start.md", "silo", "logs", ["[section](#silo-logs)", "the defaults"]),
        ("yaml/silos.md", "silos", "overhead_s", ["Time that an order costs besides training and transfer [s]."]),
        # Of its base, which stands on no page.
        ("yaml/strategy.md", "balancer-equalise", "cap", ["Largest batch of a silo [samples]. Default: no limit."]),
    ],
)
def test_types_bounds_defaults_and_meanings(page: str, heading: str, key: str, cells: list[str]) -> None:
    found = row(page, heading, key)
    assert cells in (found[1:3], found[3:4])


def test_every_row_has_a_meaning() -> None:
    rows = [line for page in pages().values() for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert not [line for line in rows if line.endswith("|  |")]
