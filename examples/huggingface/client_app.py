"""A BERT, made on the spot, learns from reviews, made on the spot, whether somebody was content."""

import random
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from fedsync.client import SiloApp
from fedsync.client.huggingface import trainer_for

GOOD, BAD = ["kind", "warm", "quick", "clean", "friendly", "tasty"], ["rude", "cold", "slow", "dirty", "bland", "noisy"]
OTHERS = ["the", "food", "staff", "room", "place", "was", "were", "a", "very", "and", "so", "then", "we", "it"]

app = SiloApp()


def make_tokenizer():
    words = ["[PAD]", "[UNK]", *GOOD, *BAD, *OTHERS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def make_reviews(count, rng):
    """Sentences of any length: three words say what is meant, one says the contrary."""
    for number in range(count):
        label = number % 2
        meant, other = (GOOD, BAD) if label else (BAD, GOOD)
        words = rng.choices(OTHERS, k=rng.randint(4, 12)) + rng.choices(meant, k=3) + rng.choices(other, k=1)
        rng.shuffle(words)
        yield {"text": " ".join(words), "labels": label}


def make_model():
    config = BertConfig(
        vocab_size=len(make_tokenizer()),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return BertForSequenceClassification(config)


@app.setup()
def setup(silo):
    tokenizer, rng = make_tokenizer(), random.Random(silo.index)
    samples = [
        {"labels": review["labels"], **tokenizer(review["text"], return_token_type_ids=False)}
        for review in make_reviews(500, rng)
    ]
    return silo.use(make_model, samples[:400], samples[400:], collate=DataCollatorWithPadding(tokenizer))


@app.train()
def fit(work, model, train, collate):
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            learning_rate=work.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            weight_decay=0.01,
            seed=work.seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer_for(work, Trainer(model=model, args=arguments, train_dataset=train, data_collator=collate)).train()


@app.evaluate()
def test(model, val, collate):
    batch = collate(val).to(model.device)
    found = model(**batch)
    right = (found.logits.argmax(dim=1) == batch["labels"]).float().mean()
    return {"loss": (found.loss, len(val)), "accuracy": (right, len(val))}
