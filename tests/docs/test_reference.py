"""The YAML reference has every key of every file, with its meaning."""

from __future__ import annotations

import pytest
import reference

from fedsync.config.section import Section


def row(page: str, heading: str, key: str) -> list[str]:
    """Cells of a key's row under the heading with this anchor."""
    text = reference.pages()[page].split(f"{{ #{heading} }}")[1].split("\n#")[0]
    (line,) = (line for line in text.splitlines() if line.startswith(f"| `{key}` |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("chapter", reference.CHAPTERS.values(), ids=lambda chapter: chapter.title)
def test_all_sections_of_the_schema_are_there(chapter: reference.Chapter) -> None:
    for root in chapter.roots.values():
        schema = root.model_json_schema()
        wanted = {frozenset(part["properties"]) for part in [schema, *schema.get("$defs", {}).values()]}
        found = [section for place in reference.places_of(root) for section in place.sections]
        assert {frozenset(section.model_fields) for section in found} == wanted
        assert len(found) == len(set(found)) == 1 + len(schema.get("$defs", {}))


@pytest.mark.parametrize("section", reference.sections(), ids=lambda section: section.__name__)
def test_every_key_has_a_meaning(section: type[Section]) -> None:
    assert section.__doc__
    for key in section.model_fields.keys() - {"kind"}:
        assert reference.meaning(section, key), f"write one into the docstring of {section.__name__}: {key}"


def test_no_meaning_is_left_over() -> None:
    owners = {owner for section in reference.sections() for owner in section.__mro__ if issubclass(owner, Section)}
    known = {(owner.__module__.rpartition(".")[2], owner.__name__): owner.model_fields for owner in owners}
    for module, names in reference.meanings().items():
        for name, keys in names.items():
            assert keys.keys() <= known[module, name].keys(), name


@pytest.mark.parametrize(
    ("page", "heading", "key", "kind", "default"),
    [
        ("yaml/strategy.md", "stop", "rounds", "whole number, at least 1", "none"),
        ("yaml/strategy.md", "local", "momentum", "number, at least 0, below 1", "`0.0`"),
        ("yaml/strategy.md", "local", "optimizer", "`sgd`, `adam`", "`sgd`"),
        ("yaml/strategy.md", "barrier-ssp", "staleness", "whole number, at least 0", "`3`"),
        ("yaml/strategy.md", "barrier-fsp", "wait_for", "[section](#barrier-wait_for)", "none"),
        ("yaml/strategy.md", "barrier-elastic", "floor", "whole number, at least 1", "none"),
        ("yaml/strategy.md", "task-data-speech", "words", "list of text, 2 or more", "required"),
        ("yaml/silos.md", "silos", "bandwidth_mbps", "number above 0", "none"),
        ("yaml/strategy.md", "cipher-masked", "inner", "[bfv](#cipher-bfv)", "`{kind: bfv}`"),
        ("yaml/start.md", "server", "port", "whole number, at least 1, at most 65,535", "`9092`"),
        ("yaml/start.md", "silo", "logs", "[section](#silo-logs)", "the defaults"),
    ],
)
def test_types_bounds_and_defaults(page: str, heading: str, key: str, kind: str, default: str) -> None:
    assert row(page, heading, key)[1:3] == [kind, default]


def test_meanings_come_from_docstrings_where_these_have_them() -> None:
    assert row("yaml/silos.md", "silos", "overhead_s")[3] == "Seconds an order costs besides training and transfer."
