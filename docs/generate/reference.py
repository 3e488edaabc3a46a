"""The YAML reference as Markdown, from the sections that read the files: nothing in it is written twice.

A section is a pydantic model of `fedsync.config` or a policy. Keys, kinds, types, bounds and defaults come from its
fields, what it is from its docstring (of a policy the first paragraph), and what a key means from the string below it.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic.fields import FieldInfo

from fedsync.common.field_docs import meaning, meanings
from fedsync.config.cluster import ClusterConfig
from fedsync.config.sections.section import Section
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.policies.schema import Choice, Chosen, Policy, Settings

LONGEST_DEFAULT = 60
"""Characters of a default that fit the table; of a longer one, the meaning tells."""

_WORDS = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`", Any: "anything"}
_BOUNDS = (("gt", "above {}"), ("ge", "at least {}"), ("lt", "below {}"), ("le", "at most {}"))

Part: TypeAlias = type[Section] | type[Settings]
"""What may stand in a file: a section or a policy."""

REQUIRED, DEPENDS = object(), object()


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a section: its type with all annotations, and its default, `REQUIRED` or `DEPENDS`."""

    annotation: Any
    default: object


def keys(section: Part) -> dict[str, Key]:
    """The keys of a section but ``kind``."""
    if issubclass(section, Settings):
        hints = get_type_hints(section, include_extras=True)
        fields = dataclasses.fields(section)
        names = {field.name: section.spelled.get(field.name, field.name) for field in fields}
        return {names[field.name]: Key(hints[field.name], _field_default(field)) for field in fields}
    found = {}
    for name, info in section.model_fields.items():
        if name != "kind":
            annotation = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
            found[name] = Key(annotation, _model_default(info))
    return found


def _field_default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return REQUIRED if field.default is dataclasses.MISSING else field.default


def _model_default(info: FieldInfo) -> object:
    if info.is_required():
        return REQUIRED
    return DEPENDS if info.default_factory_takes_validated_data else info.get_default(call_default_factory=True)


@dataclass(slots=True)
class Place:
    """A place in a file, such as ``barrier.interval``, and the sections that may stand there, each once."""

    path: str
    sections: list[Part] = field(default_factory=list)


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
    roots: dict[str, Part]


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
        "emulate. `fedsync tune RUN --silos FILE` writes the file of a run's machines; `fedsync schema --silos` prints "
        "the JSON Schema. Real silos need none of this.",
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


def sections() -> list[Part]:
    """Every section of every file, each once."""
    found = [places_of(root) for chapter in CHAPTERS.values() for root in chapter.roots.values()]
    return list(dict.fromkeys(section for places in found for place in places for section in place.sections))


def places_of(root: Part) -> list[Place]:
    """Where sections stand in a file whose whole is ``root``, outer before inner."""
    places = {"": Place("", [root])}
    homes = {root}

    def visit(place: Place, section: Part) -> None:
        for name, key in keys(section).items():
            path = f"{place.path}.{name}".lstrip(".")
            inner = [each for each in dict.fromkeys(inner_sections(key.annotation)) if each not in homes]
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


def inner_sections(annotation: object) -> Iterator[Part]:
    """The sections that an annotation names, at any depth of unions and lists."""
    chosen = [item for item in get_args(annotation)[1:] if isinstance(item, Chosen)]
    if chosen:
        yield from chosen[0].kinds().values()
    elif isinstance(annotation, type) and issubclass(annotation, Section | Settings):
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
                lines += [_about(section), "", *_table(section, homes), ""]
    return "\n".join(lines)


def _join(*parts: str) -> str:
    return "-".join(part.replace(".", "-") for part in parts if part)


def _anchor(prefix: str, place: Place, section: Part) -> str:
    return _join(prefix, place.path, _kind(section) if len(place.sections) > 1 else "") or "whole"


def _about(section: Part) -> str:
    return meaning(section) if issubclass(section, Settings) else inspect.cleandoc(section.__doc__ or "")


def _kind(section: Part) -> str:
    """The kind that chooses a section; every member of a union has one."""
    if issubclass(section, Settings):
        return section.kind if issubclass(section, Policy) else "section"
    info = section.model_fields.get("kind")
    return get_args(info.annotation)[0] if info is not None else "section"


def _table(section: Part, homes: dict[Part, str]) -> list[str]:
    found = keys(section)
    if not found:
        return ["No other keys."]
    known = meanings(section)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, key in found.items():
        kind = spell(key.annotation, (), homes)
        rows.append(f"| `{name}` | {kind} | {default(key.default)} | {known[name]} |")
    return rows


def default(value: object) -> str:
    """A key's default as it would stand in the file."""
    if value is REQUIRED or value is DEPENDS or value is None:
        return "required" if value is REQUIRED else "depends" if value is DEPENDS else "none"
    plain = _plain(value)
    if isinstance(value, Section) and not plain:
        return "the defaults"
    text = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=10_000).removesuffix("\n...\n").strip()
    return f"`{text}`" if len(text) <= LONGEST_DEFAULT else "see there"


def _plain(value: object) -> object:
    match value:
        case Section():
            return value.model_dump(mode="json", exclude_defaults=True)
        case Settings():
            kind = {"kind": value.kind} if isinstance(value, Policy) else {}
            return kind | {
                name: _plain(own)
                for name, key in keys(type(value)).items()
                if (own := getattr(value, name)) != key.default
            }
        case list() | tuple():
            return [_plain(each) for each in value]
    return str(value) if isinstance(value, Choice) else value


def spell(annotation: Any, metadata: Sequence[object], homes: dict[Part, str]) -> str:
    """A type with its bounds in words; sections are links to their ``homes``."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *more = parts
        chosen = [item for item in more if isinstance(item, Chosen)]
        if chosen:
            every = ", ".join(f"[{kind}](#{homes[policy]})" for kind, policy in chosen[0].kinds().items())
            return f"list of {every}, 1 or more" if chosen[0].several else every
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
    if isinstance(annotation, type) and issubclass(annotation, Section | Settings):
        return f"[{_kind(annotation)}](#{homes[annotation]})"
    if isinstance(annotation, type) and issubclass(annotation, Choice):
        return ", ".join(f"`{word}`" for word in annotation)
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
