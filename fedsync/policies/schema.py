"""Policies as parts of YAML files: frozen dataclasses that pydantic validates directly.

A policy is one class. Its fields carry their bounds (`annotated_types`), the string below a field is its description,
and `register` sets the ``kind`` by which a strategy file chooses it. A field that holds another policy is annotated
with `Chosen`.

The kinds of a section are found by importing every module of its package, so a new kind is a new file. The import
happens at the first lookup of a kind, and pydantic is imported no sooner: ``import fedsync`` stays light.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from abc import ABC
from collections.abc import Callable, Collection, Iterable, Mapping
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
Several = Annotated[int, Ge(2)]
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
    "extension": "fedsync.policies.extensions",
    "on_round": "fedsync.policies.rounds",
}
_EXTRAS = {
    "predictor": {
        **{kind: f"fedsync.extras.predictors.{kind}" for kind in ("arima", "kalman", "narx")},
        **dict.fromkeys(("lstm", "rnn"), "fedsync.extras.predictors.recurrent"),
    },
    "barrier": {"fedcompass": "fedsync.extras.compass"},
    "aggregation": dict.fromkeys(("median", "trimmed-mean", "krum"), "fedsync.extras.robust"),
    "interval": {
        **dict.fromkeys(("binary", "linear"), "fedsync.extras.intervals.published"),
        "climb": "fedsync.extras.intervals.climbing",
    },
    "data": {
        **{kind: f"fedsync.extras.generators.{kind}" for kind in ("digits28", "keywords")},
        **dict.fromkeys(("blobs", "sparse", "ratings"), "fedsync.extras.generators.numbers"),
        **{kind: f"fedsync.extras.readers.{kind}" for kind in ("idx", "cifar", "speech", "libsvm", "table", "npz")},
        "femnist": "fedsync.extras.readers.leaf",
    },
    "task": {
        "digits": "fedsync.tasks.digits",
        **dict.fromkeys(("csv", "custom", "silo-app"), "fedsync.config.tasks.task_kinds"),
        "survey": "fedsync.config.tasks.survival_task",
        "clientapp": "fedsync.config.tasks.clientapp_task",
        **dict.fromkeys(("images", "sequences", "mlp", "linear"), "fedsync.extras.tasks.neural"),
        **dict.fromkeys(("k-means", "fuzzy-c-means"), "fedsync.extras.tasks.clustering"),
        "gaussian-mixture": "fedsync.extras.tasks.gaussian_mixture",
        "factorisation": "fedsync.extras.tasks.factorisation",
    },
}
"""Kinds outside the main packages, by section: kind -> module, which is imported only where the kind is chosen."""

_KINDS: dict[str, dict[str, type[Policy]]] = {section: {} for section in (*_PACKAGES, "data", "partition", "task")}
_being_written: set[str] = set()
"""Sections whose JSON Schema is under construction."""


class Choice(StrEnum):
    """Enumeration of words, the same in Python and in YAML."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema as cs

        words = cs.literal_schema([word.value for word in cls])
        return cs.no_info_after_validator_function(cls, words, serialization=cs.to_string_ser_schema())


def refuse_unknown_keys(given: Iterable[object], known: Collection[str]) -> None:
    for key in given:
        if key not in known:
            from pydantic_core import PydanticCustomError

            context = {"key": str(key), "hint": near_miss(str(key), known)}
            raise PydanticCustomError("unknown_key", "unknown key '{key}'. {hint}", context)


class Settings:
    """Section of a YAML file as a frozen dataclass, with strict types and without unknown keys."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    spelled: ClassVar[Mapping[str, str]] = {}
    """Keys of the fields that have another name in Python."""

    @classmethod
    def _title(cls) -> str:
        return cls.__name__

    @classmethod
    def _keys(cls) -> list[str]:
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # every subclass is one
        return [cls.spelled.get(name, name) for name in names]

    @classmethod
    def _known(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            refuse_unknown_keys(data, cls._keys())
        return data

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema as cs

        found = handler(source)
        if found["type"] != "dataclass":
            return found  # a reference to the definition below
        fields = cast(dict[str, Any], found)
        fields["strict"] = False  # strictness is for the fields: the section itself is read from a mapping
        for field in fields["schema"]["fields"] if cls.spelled else ():
            key = cls.spelled.get(field["name"], field["name"])
            field |= {"validation_alias": key, "serialization_alias": key}
        ref = fields.pop("ref").replace(f".{cls.__name__}:", f".{cls._title()}:")
        return cs.no_info_before_validator_function(cls._known, found, ref=ref)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler(schema)
        own = handler.resolve_ref_schema(found)
        known = meanings(cls)
        for key, about in own.get("properties", {}).items():
            about["description"] = known.get(key, "")
        own |= {"description": meaning(cls), "title": cls._title()}
        return found


class Policy(Settings, ABC):
    """Base of everything that a section of a strategy file chooses by its ``kind``."""

    section: ClassVar[str]
    kind: ClassVar[str]
    """Name by which a section chooses the policy; of an unregistered policy, the name of its class."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = cls.__name__

    @classmethod
    def is_shipped(cls) -> bool:
        """Whether the policy is part of FedSync, so that silos have it too."""
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
        if "kind" not in own.get("properties", {}):  # a definition that is used twice is visited twice
            own["properties"] = {"kind": kind, **own.get("properties", {})}
            own["required"] = ["kind", *own.get("required", [])]
        return found


P = TypeVar("P", bound=Policy)


def register(kind: str) -> Callable[[type[P]], type[P]]:
    """Class decorator that makes a policy available under ``kind`` in the section of its base class.

    Raises `ConfigError` if ``kind`` is already in use in the section, or the class is not a frozen dataclass.
    """

    def decorate(policy: type[P]) -> type[P]:
        place = f"policy {policy.__qualname__}"
        if not (dataclasses.is_dataclass(policy) and policy.__dataclass_params__.frozen):
            raise ConfigError(place, "not a frozen dataclass", "Write @dataclass(frozen=True) below @register")
        known = _KINDS[policy.section] if policy.is_shipped() else kinds(policy.section)
        other = known.get(kind, policy)
        # A file that is executed again registers its class again.
        if (other.__module__, other.__qualname__) != (policy.__module__, policy.__qualname__):
            raise ConfigError(place, f"{policy.section}.kind {kind!r} is {other.__qualname__} already", "Rename it")
        policy.kind = kind
        _KINDS[policy.section][kind] = policy
        return policy

    return decorate


class DataPart(Policy):
    """Base of tasks, of sources of data, and of partitions of them."""

    @classmethod
    def _title(cls) -> str:
        return f"{cls.kind.title().replace('-', '')}Config"


def kinds(section: str) -> Mapping[str, type[Policy]]:
    _import_all(_PACKAGES.get(section))
    for module in _EXTRAS.get(section, {}).values():
        importlib.import_module(module)
    return dict(sorted(_KINDS[section].items()))


def find_kind(section: str, kind: str) -> type[Policy] | None:
    """Return the policy of a kind, or None; other kinds of `fedsync.extras` are not imported."""
    _import_all(_PACKAGES.get(section))
    if kind not in _KINDS[section] and kind in _EXTRAS.get(section, {}):
        importlib.import_module(_EXTRAS[section][kind])
    return _KINDS[section].get(kind)


@cache
def _import_all(package: str | None) -> None:
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.") if package else ():
        importlib.import_module(found.name)


@cache
def _adapter(policy: type[Policy]) -> TypeAdapter[Policy]:
    from pydantic import TypeAdapter

    return TypeAdapter(policy)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Annotation of a field that holds a policy: a mapping with the ``kind`` of a registered policy, or a policy.

    Args:
        several: whether the field holds a nonempty list of policies, a tuple in Python.
        among: allowed kinds, in the order of the JSON Schema; empty for all of ``section``.
    """

    section: str
    several: bool = False
    among: tuple[str, ...] = ()

    def kinds(self) -> Mapping[str, type[Policy]]:
        known = kinds(self.section)
        return {kind: known[kind] for kind in self.among} if self.among else known

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

        if not self.kinds():  # all kinds are users' own, unknown to an editor
            return self._listed({"type": "object", "required": ["kind"]})
        # A policy of the same section inside, such as a wrapper's barrier, refers to the schema under construction.
        inside = self.section in _being_written
        choices: dict[Any, CoreSchema] = {}
        for kind, policy in self.kinds().items():
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
        return {"type": "array", "items": one, "minItems": 1} if self.several else one

    def _choose(self, value: Any) -> Policy:
        from pydantic_core import PydanticKnownError

        if isinstance(value, Policy) and value.section == self.section:
            return value
        if not isinstance(value, Mapping):
            raise PydanticKnownError("dict_type")
        if "kind" not in value:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": "'kind'"})
        kind = value["kind"]
        here = isinstance(kind, str) and kind in (self.among or (kind,))
        policy = find_kind(self.section, kind) if here else None
        if policy is None:
            known = ", ".join(map(repr, self.among or kinds(self.section)))
            context = {"discriminator": "'kind'", "tag": str(kind), "expected_tags": known}
            raise PydanticKnownError("union_tag_invalid", context)
        return _adapter(policy).validate_python(value)


def _plain(policy: Policy, info: core_schema.SerializationInfo) -> dict[str, Any]:
    options: dict[str, Any] = {"mode": info.mode, "exclude_defaults": info.exclude_defaults, "by_alias": True}
    return {"kind": policy.kind, **_adapter(type(policy)).dump_python(policy, **options)}


def _plains(policies: tuple[Policy, ...], info: core_schema.SerializationInfo) -> list[dict[str, Any]]:
    return [_plain(policy, info) for policy in policies]
