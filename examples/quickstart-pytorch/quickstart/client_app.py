"""What a site does with a message: train, or evaluate."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedsync.client import steps
from quickstart.task import Net, load_data
from quickstart.task import test as test_fn
from quickstart.task import train as train_fn

app = ClientApp()


def model_and_device(msg: Message):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return model, torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def answer(msg: Message, metrics, **more):
    return Message(content=RecordDict({"metrics": MetricRecord(metrics), **more}), reply_to=msg)


@app.train()
def train(msg: Message, context: Context):
    model, device = model_and_device(msg)
    lr = msg.content["config"]["lr"]
    site, sites = context.node_config["partition-id"], context.node_config["num-partitions"]
    trainloader, _ = load_data(site, sites, context.run_config["batch-size"])
    train_loss = train_fn(model, steps(msg, trainloader), context.run_config["local-epochs"], lr, device)
    metrics = {"train_loss": train_loss, "num-examples": len(trainloader.dataset)}
    return answer(msg, metrics, arrays=ArrayRecord(model.state_dict()))


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model, device = model_and_device(msg)
    site, sites = context.node_config["partition-id"], context.node_config["num-partitions"]
    _, testloader = load_data(site, sites, context.run_config["batch-size"])
    loss, accuracy = test_fn(model, testloader, device)
    return answer(msg, {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(testloader.dataset)})
