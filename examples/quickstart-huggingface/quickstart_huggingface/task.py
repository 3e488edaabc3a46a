"""Model, data and loops."""

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

GOOD, BAD = ["kind", "warm", "quick", "clean", "friendly", "tasty"], ["rude", "cold", "slow", "dirty", "bland", "noisy"]
OTHERS = ["the", "food", "staff", "room", "place", "was", "were", "a", "very", "and", "so", "then", "we", "it"]
WORDS = ["[PAD]", "[UNK]", *GOOD, *BAD, *OTHERS]


def load_model(num_labels=2):
    """A BERT with random weights; `from_pretrained` would stand here."""
    config = AutoConfig.for_model(
        "bert",
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=num_labels,
    )
    return AutoModelForSequenceClassification.from_config(config)


def load_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def make_reviews(count, rng):
    """Sentences of any length: three words say what is meant, one says the contrary."""
    for number in range(count):
        label = number % 2
        meant, other = (GOOD, BAD) if label else (BAD, GOOD)
        words = rng.choices(OTHERS, k=rng.randint(4, 12)) + rng.choices(meant, k=3) + rng.choices(other, k=1)
        rng.shuffle(words)
        yield " ".join(words), label


def load_data(partition_id, num_partitions):
    """A site's own reviews, the last fifth of them to test on."""
    tokenizer = load_tokenizer()
    reviews = make_reviews(500, random.Random(partition_id))
    samples = [{"labels": label, **tokenizer(text, return_token_type_ids=False)} for text, label in reviews]
    collator = DataCollatorWithPadding(tokenizer)
    trainloader = DataLoader(samples[:400], shuffle=True, batch_size=16, collate_fn=collator)
    return trainloader, DataLoader(samples[400:], batch_size=16, collate_fn=collator)


def train(net, trainloader, epochs, device):
    optimizer = AdamW(net.parameters(), lr=4e-3)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for batch in trainloader:
            batch = {key: value.to(device) for key, value in batch.items()}
            loss = net(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
    return total / (epochs * len(trainloader))


def test(net, testloader, device):
    net.eval()
    loss, right = 0.0, 0
    for batch in testloader:
        batch = {key: value.to(device) for key, value in batch.items()}
        with torch.no_grad():
            outputs = net(**batch)
        loss += outputs.loss.item() * len(batch["labels"])
        right += (outputs.logits.argmax(dim=-1) == batch["labels"]).sum().item()
    return loss / len(testloader.dataset), right / len(testloader.dataset)
