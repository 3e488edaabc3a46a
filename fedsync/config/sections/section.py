"""Base class of all sections of a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from fedsync.common.field_docs import meaning, meanings
from fedsync.policies.schema import refuse_unknown_keys

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


class Section(BaseModel):
    """Frozen part of a configuration file. Unknown keys are errors, and text is not converted to numbers.

    The string below a key is its description for users; see `fedsync.common.field_docs`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            refuse_unknown_keys(data, cls.model_fields)
        return data

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        known = {**meanings(cls), "kind": meaning(cls)}
        for key, own in handler.resolve_ref_schema(schema).get("properties", {}).items():
            if key in known:
                own["description"] = known[key]
        return schema


class SparingSection(Section):
    """Section whose unused ``features`` are left out of its plain values: the text of a run is its identity."""

    features: ClassVar[tuple[str, ...]] = ()
    """Keys of optional features, which are None where they are not used."""

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        plain: dict[str, Any] = handler(self)
        for name in self.features:
            if getattr(self, name) is None:
                plain.pop(name, None)
        return plain


SECTION, VALUE = Tag("~section"), Tag("~value")
"""Marks of the two forms of a key that is a section or a plain value; the union of both is marked by `EITHER`."""

EITHER = Discriminator(lambda given: "~section" if isinstance(given, Mapping | Section) else "~value")
