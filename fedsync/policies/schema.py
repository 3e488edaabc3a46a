"""Policies as parts of YAML files: frozen dataclasses that pydantic validates as they are.

A policy is one class. Its fields carry their bounds (`annotated_types`), the string below a field says what it means,
and `register` gives it the ``kind`` by which a section of a strategy file chooses it. Validation, YAML reference and
JSON Schema are made from that; nothing repeats it. Where another policy goes into a field, the field is annotated with
`Chosen`.

The kinds of a section are found by importing every module of its package, so a new kind is a new file. This happens
when a kind is first looked up, and pydantic is imported no sooner: ``import fedsync`` stays light.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, cast

from annotated_types import Ge, Gt, Le

from fedsync.common.errors import ConfigError
from fedsync.common.field_docs import meaning, meanings
from fedsync.common.names import near_miss

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema, core_schema

Count = Annotated[int, Ge(0)]
PositiveInt = Annotated[int, Ge(1)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Gt(0), Le(1)]
PartOfOne = Annotated[float, Ge(0), Le(1)]

_PACKAGES = {
    "predictor": "fedsync.policies.predict",
    "balancer": "fedsync.policies.balance",
    "curve": "fedsync.policies.balance",
    "barrier": "fedsync.policies.barrier",
    "interval": "fedsync.policies.barrier",
    "aggregation": "fedsync.policies.aggregate",
    "staleness": "fedsync.policies.aggregate",
    "server_optimizer": "fedsync.policies.optimize",
    "extension": "fedsync.policies.features",
    "on_round": "fedsync.policies.rounds",
}
_KINDS: dict[str, dict[str, type[Policy]]] = {section: {} for section in _PACKAGES}
_being_written: set[str] = set()
"""Sections whose JSON Schema is in work."""


class Choice(StrEnum):
    """A word out of a few, in Python as in YAML."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema as cs

        words = cs.literal_schema([word.value for word in cls])
        return cs.no_info_after_validator_function(cls, words, serialization=cs.to_string_ser_schema())


class Settings:
    """A frozen dataclass that is a section of a YAML file: unknown keys are errors, and numbers are numbers."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    @property
    def symmetric(self) -> bool:
        """Whether permuted silos permute the actions: names count for nothing. The order of joining may break ties.

        So it is unless something inside says otherwise. Whoever draws by name does.
        """
        return all(part.symmetric for part in self._parts())

    @property
    def scale_free(self) -> bool:
        """Whether twice all speeds and half of all seconds halve all times that it asks for, and change nothing else.

        So it is unless a setting, here or inside, is in seconds, as its name says; no seconds have no scale.
        """
        own = (field.name for field in dataclasses.fields(self) if field.name.endswith("_s"))  # type: ignore[arg-type]
        return not any(getattr(self, name) for name in own) and all(part.scale_free for part in self._parts())

    def _parts(self) -> list[Settings]:
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        inside = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
        return [each for each in inside if isinstance(each, Settings)]

    @classmethod
    def _keys(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # every subclass is one

    @classmethod
    def _known(cls, data: Any) -> Any:
        """The data, if all keys are known."""
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls._keys():
                    from pydantic_core import PydanticCustomError

                    context = {"key": str(key), "hint": near_miss(str(key), cls._keys())}
                    raise PydanticCustomError("unknown_key", "unknown key '{key}'. {hint}", context)
        return data

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema as cs

        found = handler(source)
        if found["type"] != "dataclass":
            return found  # a reference to what is below
        fields = cast(dict[str, Any], found)
        fields["strict"] = False  # that is for the fields: the whole is read from a mapping
        ref = fields.pop("ref")
        return cs.no_info_before_validator_function(cls._known, found, ref=ref)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler(schema)
        own = handler.resolve_ref_schema(found)
        known = meanings(cls)
        for key, about in own.get("properties", {}).items():
            about["description"] = known.get(key, "")
        own["description"] = meaning(cls)
        return found


class Policy(Settings, ABC):
    """What a section of a strategy file chooses by its ``kind``; see the module."""

    __slots__ = ()
    section: ClassVar[str]
    kind: ClassVar[str]
    """By which a section chooses it; of a policy that is not registered the name of its class."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = cls.__name__

    @classmethod
    def is_shipped(cls) -> bool:
        """Whether silos have it too, as part of FedSync."""
        return cls.__module__.startswith("fedsync.")

    @classmethod
    def _keys(cls) -> list[str]:
        return ["kind", *super()._keys()]

    @classmethod
    def _known(cls, data: Any) -> Any:
        known = super()._known(data)
        return {key: known[key] for key in known if key != "kind"} if isinstance(known, Mapping) else known

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = super().__get_pydantic_json_schema__(schema, handler)
        own = handler.resolve_ref_schema(found)
        kind = {"const": cls.kind, "description": meaning(cls), "title": "Kind", "type": "string"}
        if "kind" not in own.get("properties", {}):  # a definition that is used twice comes by twice
            own["properties"] = {"kind": kind, **own.get("properties", {})}
            own["required"] = ["kind", *own.get("required", [])]
        return found


P = TypeVar("P", bound=Policy)


def register(kind: str) -> Callable[[type[P]], type[P]]:
    """Class decorator: a section of a strategy file may choose the policy by this ``kind``.

    Args:
        kind: not in use in the section. The section is that of the base class: `BarrierPolicy`, `PredictorPolicy`...

    Raises:
        ConfigError: it is in use, or what is decorated is no frozen dataclass.
    """

    def decorate(policy: type[P]) -> type[P]:
        place = f"policy {policy.__qualname__}"
        if not (dataclasses.is_dataclass(policy) and policy.__dataclass_params__.frozen):
            raise ConfigError(place, "not a frozen dataclass", "Write @dataclass(frozen=True) below @register")
        known = _KINDS[policy.section] if policy.is_shipped() else kinds(policy.section)
        other = known.get(kind, policy)
        # A file that is run again registers its own anew.
        if (other.__module__, other.__qualname__) != (policy.__module__, policy.__qualname__):
            raise ConfigError(place, f"{policy.section}.kind {kind!r} is {other.__qualname__} already", "Rename it")
        policy.kind = kind
        _KINDS[policy.section][kind] = policy
        return policy

    return decorate


def kinds(section: str) -> Mapping[str, type[Policy]]:
    """The registered policies of a section by kind, in order of kind."""
    _import_all(_PACKAGES[section])
    return dict(sorted(_KINDS[section].items()))


@cache
def _import_all(package: str) -> None:
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        importlib.import_module(found.name)


@cache
def _adapter(policy: type[Policy]) -> TypeAdapter[Policy]:
    from pydantic import TypeAdapter

    return TypeAdapter(policy)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Annotation of a field that holds a policy: a mapping with the ``kind`` of a registered one, or a ready policy.

    Args:
        section: name of the section, as in a strategy file.
        several: whether it is a list of them, not empty, and in Python a tuple.
    """

    section: str
    several: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema as cs

        show = cs.plain_serializer_function_ser_schema(_plain, info_arg=True)
        one = cs.no_info_plain_validator_function(self._choose, serialization=show)
        if not self.several:
            return one
        several = cs.list_schema(one, min_length=1, strict=False)  # in Python it is a tuple afterwards
        show = cs.plain_serializer_function_ser_schema(_plains, info_arg=True)
        return cs.no_info_after_validator_function(tuple, several, serialization=show)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        from pydantic_core import core_schema as cs

        if not kinds(self.section):  # all are users' own, and an editor does not know them
            return self._listed({"type": "object", "required": ["kind"]})
        # What is inside a kind of the section, as the barrier in a wrapper is, refers to what is being written.
        inside = self.section in _being_written
        choices: dict[Any, CoreSchema] = {}
        for kind, policy in kinds(self.section).items():
            whole: Any = _adapter(policy).core_schema
            choices[kind] = cs.definition_reference_schema(whole["ref"]) if inside else whole
        _being_written.add(self.section)
        try:
            union = handler(cs.tagged_union_schema(choices, discriminator="kind"))
        finally:
            if not inside:
                _being_written.remove(self.section)
        return self._listed(union)

    def _listed(self, one: JsonSchemaValue) -> JsonSchemaValue:
        """The schema of the field, where ``one`` is that of a policy."""
        return {"type": "array", "items": one, "minItems": 1} if self.several else one

    def _choose(self, value: Any) -> Policy:
        from pydantic_core import PydanticKnownError

        if isinstance(value, Policy) and value.section == self.section:
            return value
        if not isinstance(value, Mapping):
            raise PydanticKnownError("dict_type")
        if "kind" not in value:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": "'kind'"})
        known, kind = kinds(self.section), value["kind"]
        if not isinstance(kind, str) or kind not in known:
            context = {"discriminator": "'kind'", "tag": str(kind), "expected_tags": ", ".join(map(repr, known))}
            raise PydanticKnownError("union_tag_invalid", context)
        return _adapter(known[kind]).validate_python(value)


def _plain(policy: Policy, info: core_schema.SerializationInfo) -> dict[str, Any]:
    options: dict[str, Any] = {"mode": info.mode, "exclude_defaults": info.exclude_defaults}
    return {"kind": policy.kind, **_adapter(type(policy)).dump_python(policy, **options)}


def _plains(policies: tuple[Policy, ...], info: core_schema.SerializationInfo) -> list[dict[str, Any]]:
    return [_plain(policy, info) for policy in policies]
