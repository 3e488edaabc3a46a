"""What a silo does with an order, and on what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fedsync.config.section import Section

if TYPE_CHECKING:
    from fedsync.train.options import LocalOptions

PositiveInt = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]


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

    optimizer: Literal["sgd", "adam"] = "sgd"
    """Local optimiser; it keeps no memory from one order to the next."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of ``sgd``; with ``adam`` leave it out."""

    weight_decay: NonNegative = 0.0
    """Strength of the L2 penalty."""

    proximal: NonNegative = 0.0
    """The mu of FedProx, which holds a silo back from the model it started from; 0 does not."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """Where silos train; ``auto`` takes a GPU if there is one."""

    threads: PositiveInt | None = None
    """Processor threads of the trainer; null leaves the number to the machine: PyTorch's own choice at a real silo, one
    where several silos share a machine."""

    resources: bool = True
    """Whether silos tell how much of their machine is left to training; ``narx`` goes by that."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the computation, by automatic mixed precision; updates are float32 always."""

    channels_last: bool = False
    """A memory layout for convolutions over images that suits tensor cores."""

    deterministic: bool = False
    """Ask for algorithms that give the same bits from the same order, though they be slower."""

    def build(self) -> LocalOptions:
        from fedsync.train.options import LocalOptions

        return LocalOptions(
            optimizer=self.optimizer,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            proximal=self.proximal,
            device=self.device,
            threads=self.threads,
            resources=self.resources,
            precision=self.precision,
            channels_last=self.channels_last,
            deterministic=self.deterministic,
        )
