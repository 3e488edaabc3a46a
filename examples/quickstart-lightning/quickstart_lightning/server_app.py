"""What the server does: it begins with a model and averages."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedsync import FedSync
from quickstart_lightning.task import LitAutoEncoder

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    num_rounds = context.run_config["num-server-rounds"]
    arrays = ArrayRecord(LitAutoEncoder().state_dict())
    strategy = FedSync.lb_bsp(min_available_nodes=3, local_steps=13)
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=num_rounds)
