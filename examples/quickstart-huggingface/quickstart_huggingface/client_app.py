"""What a site does with a message: train, or evaluate."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedsync.client import steps
from quickstart_huggingface.task import load_data, load_model
from quickstart_huggingface.task import test as test_fn
from quickstart_huggingface.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    # Get this client's dataset partition
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    trainloader, _ = load_data(partition_id, num_partitions)

    # Load the model and initialize it with the received weights
    net = load_model(context.run_config["num-labels"])
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    net.to(device)

    # Train the model
    train_loss = train_fn(net, steps(msg, trainloader), context.run_config["local-epochs"], device)

    # Construct and return reply Message
    metrics = {"train_loss": train_loss, "num-examples": len(trainloader.dataset)}
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    _, testloader = load_data(partition_id, num_partitions)

    net = load_model(context.run_config["num-labels"])
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    net.to(device)

    loss, accuracy = test_fn(net, testloader, device)
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(testloader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
