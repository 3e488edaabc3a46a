"""A small GPT-2, made on the spot, learns by LoRA which remedy belongs to which complaint; only the adapters travel."""

import random

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from fedsync.client import SiloApp

COMPLAINTS = ["cough", "fever", "rash", "cramp", "burn", "itch", "sprain", "fatigue", "nausea"]
REMEDIES = ["syrup", "rest", "salve", "warmth", "water", "lotion", "ice", "sleep", "ginger"]
OTHERS = [
    "the",
    "guest",
    "reports",
    "a",
    "bad",
    "mild",
    "old",
    "new",
    "again",
    "since",
    "today",
    "monday",
    "so",
    "give",
]
WORDS = {word: number for number, word in enumerate([*COMPLAINTS, *REMEDIES, *OTHERS])}

app = SiloApp()


def make_notes(site, count):
    """Notes of eleven words; the last is the remedy. A site has three of the complaints; None has all."""
    rng = random.Random(site)
    here = [number for number in range(len(COMPLAINTS)) if site is None or number % 3 == site]
    for _ in range(count):
        complaint = rng.choice(here)
        kind, when = rng.choice(["bad", "mild", "old", "new"]), rng.choice(["today", "monday"])
        text = f"the guest reports a {kind} {COMPLAINTS[complaint]} since {when} so give {REMEDIES[complaint]}"
        yield [WORDS[word] for word in text.split()]


def make_model():
    """A body with random weights: in an application, a published model from a file. LoRA freezes it."""
    config = GPT2Config(
        vocab_size=len(WORDS),
        n_positions=16,
        n_embd=64,
        n_layer=2,
        n_head=4,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(GPT2LMHeadModel(config), lora)


@app.setup()
def setup(silo):
    notes = torch.tensor(list(make_notes(silo.index, 400)))
    tests = torch.tensor(list(make_notes(None, 100)))
    return silo.use(make_model, notes, tests)


@app.train()
def fit(work, model, train):
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=work.learning_rate)
    for notes in work.loader(train):
        loss = model(input_ids=notes.to(work.device), labels=notes.to(work.device)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        work.log(loss=loss)


@app.evaluate()
def test(model, val):
    """Of all nine complaints, of which a site alone learns three."""
    notes = val.to(model.device)
    found = model(input_ids=notes, labels=notes)
    right = (found.logits[:, -2].argmax(dim=1) == notes[:, -1]).float().mean()
    return {"loss": (found.loss, len(val)), "accuracy": (right, len(val))}
