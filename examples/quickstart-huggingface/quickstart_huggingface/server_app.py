"""What the server does: it begins with a model and averages."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedsync import FedSync
from quickstart_huggingface.task import load_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    fraction_train = context.run_config["fraction-train"]
    num_rounds = context.run_config["num-server-rounds"]
    arrays = ArrayRecord(load_model(context.run_config["num-labels"]).state_dict())
    strategy = FedSync.lb_bsp(fraction_train=fraction_train, batch_size=16, local_steps=10)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=num_rounds)
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
