"""The YAML reference as Markdown, from the sections that read the files: nothing in it is written twice.

Keys, kinds, types, bounds and defaults come from the pydantic models of `fedsync.config`, what a section is from its
docstring, and what a key means from the string below it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fedsync.config.cluster import ClusterConfig
from fedsync.config.meanings import meanings
from fedsync.config.section import Section
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.strategy import StrategyConfig

LONGEST_DEFAULT = 60
"""Characters of a default that fit the table; of a longer one, the meaning tells."""

_WORDS = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`", Any: "anything"}
_BOUNDS = (("gt", "above {}"), ("ge", "at least {}"), ("lt", "below {}"), ("le", "at most {}"))


@dataclass(slots=True)
class Place:
    """A place in a file, such as ``barrier.interval``, and the sections that may stand there, each once."""

    path: str
    sections: list[type[Section]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Chapter:
    """One file's reference.

    Args:
        title: of the page.
        intro: what the file is, as Markdown.
        roots: sections that make up a whole file, by heading; "" where there is only one.
    """

    title: str
    intro: str
    roots: dict[str, type[Section]]


CHAPTERS = {
    "yaml/strategy.md": Chapter(
        "Strategy file",
        "A strategy file says all that a run does, but for the machines it runs on. `fedsync validate FILE` checks it, "
        "`fedsync schema` prints the JSON Schema for an editor. Where a section has a `kind`, the kind says which "
        "other keys it takes. Unknown keys are errors. YAML reads `1e-3` as text: write `0.001`, or `1.0e-3`.\n\n"
        "```yaml\n{example}```",
        {"": StrategyConfig},
    ),
    "yaml/silos.md": Chapter(
        "Silo file",
        "A silo file describes the machines that virtual time simulates and that the `local` and `flower` runtimes "
        "emulate. `fedsync probe` measures a machine and prints its entry; `fedsync schema --silos` prints the JSON "
        "Schema. Real silos need none of this.",
        {"": ClusterConfig},
    ),
    "yaml/start.md": Chapter(
        "Server and silo start files",
        "What `fedsync server start --server FILE` and `fedsync silo start --silo FILE` read; "
        "[Deployment](../deployment.md) goes through both. `fedsync doctor` checks them and what they name.",
        {"server.yaml": ServerStartConfig, "silo.yaml": SiloStartConfig},
    ),
}


def pages() -> dict[str, str]:
    """The Markdown of every page, by its path in the documentation."""
    return {path: _page(chapter) for path, chapter in CHAPTERS.items()}


def sections() -> list[type[Section]]:
    """Every section of every file, each once."""
    found = [places_of(root) for chapter in CHAPTERS.values() for root in chapter.roots.values()]
    return list(dict.fromkeys(section for places in found for place in places for section in place.sections))


def places_of(root: type[Section]) -> list[Place]:
    """Where sections stand in a file whose whole is ``root``, outer before inner."""
    places = {"": Place("", [root])}
    homes = {root}

    def visit(place: Place, section: type[Section]) -> None:
        for name, info in section.model_fields.items():
            path = f"{place.path}.{name}".lstrip(".")
            inner = [each for each in inner_sections(info.annotation) if each not in homes]
            if inner:
                below = places.setdefault(path, Place(path))
                below.sections += inner
                homes.update(inner)
                for each in inner:
                    visit(below, each)

    visit(places[""], root)
    # What is inside a place follows it, also where it was found later.
    tops = list(dict.fromkeys(path.split(".")[0] for path in places))
    return sorted(places.values(), key=lambda place: tops.index(place.path.split(".")[0]))


def inner_sections(annotation: object) -> Iterator[type[Section]]:
    """The sections that an annotation names, at any depth of unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from inner_sections(part)


def _page(chapter: Chapter) -> str:
    example = (Path(__file__).parents[2] / "strategies" / "lb-bsp.yaml").read_text(encoding="utf-8")
    lines = [f"# {chapter.title}", "", chapter.intro.replace("{example}", example), ""]
    for heading, root in chapter.roots.items():
        places = places_of(root)
        prefix = heading.partition(".")[0]
        homes = {section: _anchor(prefix, place, section) for place in places for section in place.sections}
        for place in places:
            title = ": ".join(part for part in (heading, place.path) if part) or "The whole"
            lines += [f"## {title} {{ #{_join(prefix, place.path) or 'whole'} }}", ""]
            for section in place.sections:
                if len(place.sections) > 1:
                    lines += [f"### `{_kind(section)}` {{ #{homes[section]} }}", ""]
                lines += [inspect.cleandoc(section.__doc__ or ""), "", *_table(section, homes), ""]
    return "\n".join(lines)


def _join(*parts: str) -> str:
    return "-".join(part.replace(".", "-") for part in parts if part)


def _anchor(prefix: str, place: Place, section: type[Section]) -> str:
    return _join(prefix, place.path, _kind(section) if len(place.sections) > 1 else "") or "whole"


def _kind(section: type[Section]) -> str:
    """The kind that chooses a section; every member of a union has one."""
    info = section.model_fields.get("kind")
    return get_args(info.annotation)[0] if info is not None else section.__name__


def _table(section: type[Section], homes: dict[type[Section], str]) -> list[str]:
    keys = [name for name in section.model_fields if name != "kind"]
    if not keys:
        return ["No other keys."]
    told = meanings(section)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name in keys:
        info = section.model_fields[name]
        kind = spell(info.annotation, info.metadata, homes)
        rows.append(f"| `{name}` | {kind} | {default(info)} | {told[name]} |")
    return rows


def default(info: FieldInfo) -> str:
    """A key's default as it would stand in the file."""
    if info.is_required():
        return "required"
    if info.default_factory_takes_validated_data:
        return "depends"
    value = info.get_default(call_default_factory=True)
    if value is PydanticUndefined or value is None:
        return "none"
    plain = _plain(value)
    if isinstance(value, Section) and not plain:
        return "the defaults"
    text = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=10_000).removesuffix("\n...\n").strip()
    return f"`{text}`" if len(text) <= LONGEST_DEFAULT else "see there"


def _plain(value: object) -> object:
    if isinstance(value, Section):
        return value.model_dump(mode="json", exclude_defaults=True)
    return [_plain(each) for each in value] if isinstance(value, list) else value


def spell(annotation: Any, metadata: Sequence[object], homes: dict[type[Section], str]) -> str:
    """A type with its bounds in words; sections are links to their ``homes``."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *more = parts
        flat = [item for each in more for item in (each.metadata if isinstance(each, FieldInfo) else [each])]
        return spell(inner, flat, homes)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        known = [part for part in parts if part is not types.NoneType]
        return (" or " if homes.keys().isdisjoint(known) else ", ").join(spell(part, metadata, homes) for part in known)
    if origin is list:
        least = next((item.min_length for item in metadata if hasattr(item, "min_length")), 0)
        return f"list of {spell(parts[0], (), homes)}" + (f", {least} or more" if least else "")
    if origin is dict:
        return f"{spell(parts[0], (), homes)} to {spell(parts[1], (), homes)}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        name = _kind(annotation) if "kind" in annotation.model_fields else "section"
        return f"[{name}](#{homes[annotation]})"
    return ", ".join([_WORDS[annotation], *_limits(metadata)]).replace("number, above", "number above")


def _limits(metadata: Sequence[object]) -> Iterator[str]:
    for name, words in _BOUNDS:
        for item in metadata:
            value = getattr(item, name, None)
            if value is not None:
                yield words.format(f"{value:,}" if isinstance(value, int) else f"{value:g}")
    for item in metadata:
        pattern = getattr(item, "pattern", None)
        if pattern is not None:
            yield f"of the form `{pattern.removeprefix('^').removesuffix('$')}`"
        elif getattr(item, "min_length", None):
            yield "not empty"
