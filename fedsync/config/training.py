"""What a silo does with an order, and on what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from fedsync.common.errors import ConfigError
from fedsync.common.names import near_miss
from fedsync.config.sections.section import Section

if TYPE_CHECKING:
    from fedsync.train.options import LocalOptions
    from fedsync.train.schedule import Schedule, TorchSchedule

PositiveInt = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]

OptimizerName = Literal[
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "asgd",
    "muon",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
]
"""PyTorch's that fit the local loop; the newest, of a PyTorch that has them."""

_Number = bool | int | float
_Keyword = _Number | Annotated[str, Field(max_length=64)] | Annotated[list[_Number | None], Field(max_length=8)] | None
_KEYWORDS: TypeAdapter[dict[str, _Keyword]] = TypeAdapter(dict[str, _Keyword])
_NAMES = get_args(OptimizerName)


def _optimizer(given: Any) -> str | dict[str, _Keyword]:
    """A name, or a section with a ``kind`` and whatever keywords that one takes; PyTorch is asked in `LocalConfig`."""
    if isinstance(given, Mapping):
        if given.get("kind") not in _NAMES:
            raise ValueError(f"its kind is {given.get('kind')!r}; {near_miss(str(given.get('kind')), _NAMES)}")
    elif given not in _NAMES:
        names = " or ".join(f"'{name}'" for name in _NAMES)
        raise PydanticCustomError("literal_error", "one of {expected}", {"expected": names})
    return _keywords(given) if isinstance(given, Mapping) else str(given)


def _keywords(given: Mapping[str, Any]) -> dict[str, _Keyword]:
    """A ``kind`` with keywords of PyTorch's, as far as types go."""
    try:
        return _KEYWORDS.validate_python(given, strict=True)
    except ValidationError as error:
        raise ValueError(f"{error.errors()[0]['loc'][0]} is no number, word or short list; change it") from error


class ScheduleConfig(Section):
    """How the learning rate goes within an order, over the most steps that the order may have."""

    shape: Literal["constant", "cosine", "linear"]
    """How it goes after the warm-up."""

    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps at the beginning of each order in which the rate climbs to the order's."""

    end: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the order's rate to which ``cosine`` and ``linear`` fall."""

    def build(self) -> Schedule:
        from fedsync.train.schedule import Schedule

        return Schedule(self.shape, self.warmup, self.end)


def _whose(given: Any) -> str:
    """Whether a schedule is one of ours, or of PyTorch's."""
    return "~pytorch" if isinstance(given, Mapping) and "kind" in given else "~ours"


_Schedule = Annotated[
    Annotated[ScheduleConfig, Tag("~ours")] | Annotated[dict[str, Any], AfterValidator(_keywords), Tag("~pytorch")],
    Discriminator(_whose),
]


class LocalConfig(Section):
    """What a silo does with an order, and on what.

    A silo's owner may choose another device, or to tell nothing of its resources, in its node configuration
    (``device="cuda:1" resources="off"``); that goes before this.
    """

    steps: PositiveInt = 20
    """Local steps of an order; tau in the papers."""

    batch_size: PositiveInt = 32
    """Samples of a local step; with a balancer, the mean over silos [samples]."""

    learning_rate: Annotated[float, Field(gt=0)] = 0.1
    """Learning rate of the local optimiser; eta in the papers."""

    optimizer: Annotated[
        OptimizerName | dict[str, Any],
        PlainValidator(_optimizer, json_schema_input_type=OptimizerName | dict[str, Any]),
    ] = "sgd"
    """One of PyTorch's, by its name in small letters, or a section of its name as ``kind`` and its own keywords, as in
    ``{kind: adamw, betas: [0.9, 0.98], weight_decay: 0.01}``. It keeps no memory from one order to the next."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of an ``optimizer`` that is only named; 0 is PyTorch's default."""

    weight_decay: NonNegative = 0.0
    """Strength of the penalty of an ``optimizer`` that is only named; 0 is PyTorch's default, which is 0.01 for
    ``adamw``."""

    schedule: _Schedule | None = None
    """How the learning rate goes within an order, also as one word (``cosine``); left out, it stays. Or a scheduler of
    PyTorch's, by its name as ``kind`` and its own keywords, as in ``{kind: CosineAnnealingLR, eta_min: 0.001}``."""

    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Gradients with a longer norm are shortened to it."""

    accumulate: PositiveInt = 1
    """Pieces in which the gradient of a step's batch is computed, one after the other, to save memory."""

    workers: Annotated[int, Field(ge=0, le=64)] = 0
    """Processes of a silo that fetch samples ahead, where a task's data are no tensors; none in virtual time."""

    proximal: NonNegative = 0.0
    """The mu of FedProx, which holds a silo back from the model it started from; 0 does not."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """Where silos train; ``auto`` takes a GPU if there is one."""

    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes of a silo that train together, each its share of every batch: on as many GPUs, from ``device`` on, or
    on the processor. One in virtual time."""

    threads: PositiveInt | None = None
    """Processor threads of each of the trainer's processes; null leaves the number to the machine: PyTorch's own choice
    at a real silo, one where several silos share a machine."""

    resources: bool = True
    """Whether silos tell how much of their machine is left to training; ``narx`` goes by that."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the computation, by automatic mixed precision; updates are float32 always. A processor may lack an
    operation in half floats, as LSTMs in ``fp16``: a silo tries one step before it joins, and refuses."""

    channels_last: bool = False
    """A memory layout for convolutions over images that suits tensor cores."""

    compile: bool = False
    """Have PyTorch compile the model, which takes its time in the first orders. Batch sizes that are multiples of a
    number (``balancer.multiple``) suit it."""

    deterministic: bool = False
    """Ask for algorithms that give the same bits from the same order, though they be slower."""

    @field_validator("schedule", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return {"shape": given} if isinstance(given, str) else given

    @field_validator("schedule", mode="after")
    @classmethod
    def _is_torch_s(cls, given: Any) -> Any:
        try:
            cls._schedule(given)
        except ConfigError as error:
            raise ValueError(f"{error.problem}; {error.remedy}") from error
        return given

    @staticmethod
    def _schedule(given: ScheduleConfig | dict[str, Any] | None) -> Schedule | TorchSchedule | None:
        if not isinstance(given, dict):
            return None if given is None else given.build()
        from fedsync.train.schedule import TorchSchedule

        return TorchSchedule(str(given["kind"]), {name: value for name, value in given.items() if name != "kind"})

    @field_validator("optimizer", "momentum", "weight_decay", mode="after")
    @classmethod
    def _suits_torch(cls, given: Any, info: ValidationInfo) -> Any:
        asked: dict[str, Any] = {name: info.data[name] for name in ("optimizer", "momentum") if name in info.data}
        asked[str(info.field_name)] = given
        if not given or asked.get("optimizer", "sgd") == "sgd" or asked == {"optimizer": "adam"}:
            # PyTorch takes seconds to load, and these need no looking at.
            return given
        from fedsync.train.options import LocalOptions

        try:
            LocalOptions(**asked)
        except ConfigError as error:
            raise ValueError(f"{error.problem}; {error.remedy}") from error
        if isinstance(given, dict) and given["kind"] == "sgd" and not 0 <= given.get("momentum", 0) < 1:
            raise ValueError(f"momentum {given['momentum']} is not in 0..1; write, for example, 0.9")
        return given

    @property
    def sgd_momentum(self) -> float:
        """What steps of SGD remember of earlier ones; 0 with other optimizers."""
        match self.optimizer:
            case "sgd":
                return self.momentum
            case {"kind": "sgd", "momentum": int() | float() as momentum}:
                return float(momentum)
        return 0.0

    def build(self) -> LocalOptions:
        from fedsync.train.options import LocalOptions

        return LocalOptions(
            optimizer=self.optimizer,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            schedule=self._schedule(self.schedule),
            clip_norm=self.clip_norm,
            accumulate=self.accumulate,
            workers=self.workers,
            proximal=self.proximal,
            device=self.device,
            processes=self.processes,
            threads=self.threads,
            resources=self.resources,
            precision=self.precision,
            channels_last=self.channels_last,
            compile="inductor" if self.compile else "",
            deterministic=self.deterministic,
        )
