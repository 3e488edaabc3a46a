"""One thread for torch: networks this small gain nothing from more, and lose much where other programs run."""

import torch

torch.set_num_threads(1)
