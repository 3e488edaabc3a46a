"""Every key of every file says what it means, in its source and to whoever reads the JSON Schema."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import Field

from fedsync.common.field_docs import meaning, meanings
from fedsync.config.cluster import ClusterConfig
from fedsync.config.sections.section import Section
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.strategy import StrategyConfig


class Base(Section):
    """What both have."""

    size: int = 1
    """Of the base."""

    depth: int = Field(default=2, ge=0)
    """As far down
    as it goes."""


class Narrow(Base):
    """A narrow one.

    There are others.
    """

    kind: Literal["narrow"]
    size: Literal[1] = 1
    depth: Literal[2] = 2
    """Its own word."""

    silent: int = 0

    def build(self) -> None:
        """No key is above this."""


def properties(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Section, key and schema of everything that a file may say."""
    for section, part in [("", schema), *schema.get("$defs", {}).items()]:
        for key, own in part["properties"].items():
            yield section, key, own


@pytest.mark.parametrize("root", [StrategyConfig, ClusterConfig, ServerStartConfig, SiloStartConfig])
def test_every_property_of_the_schema_has_a_description(root: type[Section]) -> None:
    found = list(properties(root.model_json_schema()))

    assert {key for section, key, _ in found if not section} == set(root.model_fields)
    assert [f"{section}.{key}" for section, key, own in found if not own.get("description")] == []


def test_a_meaning_is_the_string_below_a_key_on_one_line() -> None:
    assert meanings(Base) == {"size": "Of the base.", "depth": "As far down as it goes."}


def test_meanings_are_inherited_until_a_section_says_otherwise() -> None:
    assert meanings(Narrow) == {"size": "Of the base.", "depth": "Its own word."}
    assert meaning(Narrow) == "A narrow one."


def test_a_description_stands_beside_a_reference() -> None:
    local = StrategyConfig.model_json_schema()["properties"]["local"]

    assert local["$ref"] == "#/$defs/LocalConfig"
    assert local["description"] == "Local training of a silo."


def test_a_key_without_a_meaning_has_no_description() -> None:
    assert "description" not in Narrow.model_json_schema()["properties"]["silent"]
