"""Configuration of local training: steps, batch size, optimizer and learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from fedsync.common.errors import ConfigError
from fedsync.common.names import near_miss
from fedsync.config.sections.section import Section
from fedsync.core.silo_weight import Solver
from fedsync.policies.schema import NonNegative, PositiveInt
from fedsync.tasks.task_section import TaskSection

if TYPE_CHECKING:
    from fedsync.train.options import LocalOptions

MOST_ENTRIES = 64
"""Maximum number of entries; they travel with every message."""

LONGEST_KEY, LONGEST_TEXT = 128, 1024
"""Maximum number of characters in a key, and in a text value."""


def _checked(data: Any) -> Any:
    if not isinstance(data, Mapping):
        return data
    if len(data) > MOST_ENTRIES:
        raise ValueError(f"there are {len(data)} entries, at most {MOST_ENTRIES}; keep fewer here")
    for key, value in data.items():
        if not isinstance(key, str) or not 1 <= len(key) <= LONGEST_KEY:
            raise ValueError(f"the key {key!s:.40} is not text of 1 to {LONGEST_KEY} characters; write another")
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"{key:.40} is {type(value).__name__}; write a number, text, true or false")
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise ValueError(f"{key:.40} has {len(value)} characters, at most {LONGEST_TEXT}; write less")
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{key:.40} is {value}; write a finite number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{key:.40} has more than 64 bits; write a smaller number")
    return dict(data)


UserConfig = Annotated[dict[str, bool | int | float | str], BeforeValidator(_checked)]
"""Numbers, text and booleans by name, within the size limits of messages."""

OptimizerName = Literal[
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "muon", "nadam", "radam", "rmsprop", "rprop",
    "sgd",
]  # fmt: skip
"""PyTorch's optimizers that fit the local loop; an older PyTorch may lack the newest."""

_Number = bool | int | float
_Keyword = _Number | Annotated[str, Field(max_length=64)] | Annotated[list[_Number | None], Field(max_length=8)] | None
_KEYWORDS: TypeAdapter[dict[str, _Keyword]] = TypeAdapter(dict[str, _Keyword])
_NAMES = get_args(OptimizerName)


def _optimizer(given: Any) -> str | dict[str, _Keyword]:
    if not isinstance(given, Mapping):
        if given not in _NAMES:
            names = " or ".join(f"'{name}'" for name in _NAMES)
            raise PydanticCustomError("literal_error", "one of {expected}", {"expected": names})
        return str(given)
    if given.get("kind") not in _NAMES:
        raise ValueError(f"its kind is {given.get('kind')!r}; {near_miss(str(given.get('kind')), _NAMES)}")
    try:
        return _KEYWORDS.validate_python(given, strict=True)
    except ValidationError as error:
        raise ValueError(f"{error.errors()[0]['loc'][0]} is no number, word or short list; change it") from error


class LocalConfig(Section):
    """Local training of a silo.

    A silo's owner may override device and resources in the node configuration (``device="cuda:1" resources="off"``).
    """

    steps: PositiveInt = 20
    """Number of local steps of an order; tau in the papers."""

    batch_size: PositiveInt = 32
    """Batch size of a local step [samples]; with a balancer, the mean over silos."""

    learning_rate: Annotated[float, Field(gt=0)] = 0.1
    """Learning rate of the local optimizer; eta in the papers."""

    optimizer: Annotated[
        OptimizerName | dict[str, Any],
        PlainValidator(_optimizer, json_schema_input_type=OptimizerName | dict[str, Any]),
    ] = "sgd"
    """Local optimizer: the name of a PyTorch optimizer in lower case, or a section of this name as ``kind`` and its
    keywords, as in ``{kind: adamw, betas: [0.9, 0.98], weight_decay: 0.01}``. Every order begins with a new
    optimizer state."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum, if ``optimizer`` is only a name; 0 is PyTorch's default."""

    weight_decay: NonNegative = 0.0
    """Weight decay, if ``optimizer`` is only a name; 0 is PyTorch's default, which is 0.01 for ``adamw``."""

    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Maximum norm of gradients; longer gradients are scaled down to it. Left out, there is no limit."""

    workers: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of processes of a silo that load samples ahead, if a task's data are not tensors; none in virtual time."""

    proximal: NonNegative = 0.0
    """Proximal strength mu of FedProx, which pulls a silo back to the model that it started from; 0 disables it."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """Device on which silos train; ``auto`` takes a GPU if there is one."""

    threads: PositiveInt | None = None
    """Number of processor threads of a trainer. Null: PyTorch's own choice at a real silo, and one thread where several
    silos share a machine."""

    resources: bool = True
    """Whether silos report how much of their machine is available for training; the predictor ``narx`` uses it."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the computation, by automatic mixed precision; updates are always float32. A processor may lack a
    half-precision operation, such as LSTMs in ``fp16``: a silo tries one step before it joins, and refuses the run."""

    @field_validator("optimizer", "momentum", "weight_decay", mode="after")
    @classmethod
    def _suits_torch(cls, given: Any, info: ValidationInfo) -> Any:
        asked: dict[str, Any] = {name: info.data[name] for name in ("optimizer", "momentum") if name in info.data}
        asked[str(info.field_name)] = given
        if not given or asked.get("optimizer", "sgd") == "sgd" or asked == {"optimizer": "adam"}:
            # PyTorch takes seconds to load, and these values are always valid.
            return given
        from fedsync.train.options import LocalOptions

        try:
            LocalOptions(**asked)
        except ConfigError as error:
            raise ValueError(f"{error.problem}; {error.remedy}") from error
        if isinstance(given, dict) and given["kind"] == "sgd" and not 0 <= given.get("momentum", 0) < 1:
            raise ValueError(f"momentum {given['momentum']} is not in 0..1; write, for example, 0.9")
        return given

    def solver(self, task: TaskSection) -> Solver:
        """Return the solver, for normalised updates. Steps of statistics pull by ``learning_rate``, as ``proximal``
        does.
        """
        if task.additive:
            return Solver(pull=self.learning_rate * (1 + self.proximal))
        return Solver(self.sgd_momentum, self.learning_rate * self.proximal)

    @property
    def sgd_momentum(self) -> float:
        match self.optimizer:
            case "sgd":
                return self.momentum
            case {"kind": "sgd", "momentum": int() | float() as momentum}:
                return float(momentum)
        return 0.0

    def build(self) -> LocalOptions:
        from fedsync.train.options import LocalOptions

        names = {field.name for field in fields(LocalOptions)} & type(self).model_fields.keys()
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        return LocalOptions(**own)
