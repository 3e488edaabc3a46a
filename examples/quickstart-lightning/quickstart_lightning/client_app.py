"""What a site does with a message: train, or evaluate."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedsync.client import steps
from quickstart_lightning.task import LitAutoEncoder, load_data, quiet_trainer

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    # Load the model and initialize it with the received weights
    model = LitAutoEncoder()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())

    # Load the data
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    train_loader, val_loader, _ = load_data(partition_id, num_partitions)

    # Train
    max_epochs = context.run_config["max-epochs"]
    trainer = quiet_trainer(max_epochs=max_epochs)
    trainer.fit(model=model, train_dataloaders=steps(msg, train_loader), val_dataloaders=val_loader)

    # Construct and return reply Message
    metrics = {"train_loss": trainer.callback_metrics["train_loss"].item(), "num-examples": len(train_loader.dataset)}
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model = LitAutoEncoder()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())

    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    _, _, test_loader = load_data(partition_id, num_partitions)

    trainer = quiet_trainer()
    (found,) = trainer.test(model, test_loader, verbose=False)

    metrics = {
        "eval_loss": found["test_loss"],
        "eval_r2": found["test_explained"],
        "num-examples": len(test_loader.dataset),
    }
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
