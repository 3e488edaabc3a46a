"""LSTM network for sequences."""

from __future__ import annotations

from torch import Tensor, nn

from fedsync.common.errors import ConfigError


class LstmClassifier(nn.Module):
    """LSTM layers, and a dense layer on the last layer's output at the end of the sequence.

    ``shape`` is (frames, features); raises `ConfigError` for other shapes.

    Source: LB-BSP, section 5.5 (two recurrent layers).
    """

    def __init__(self, shape: tuple[int, ...], hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        if len(shape) != 2:
            problem = f"inputs of shape {shape} are no sequences"
            raise ConfigError("task.data", problem, "Choose data of (frames, features)")
        self.recurrent = nn.LSTM(shape[1], hidden, num_layers=layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, sequences: Tensor) -> Tensor:
        """Logits [n, classes] of sequences [n, frames, features]."""
        states, _ = self.recurrent(sequences)
        logits: Tensor = self.head(states[:, -1])
        return logits
