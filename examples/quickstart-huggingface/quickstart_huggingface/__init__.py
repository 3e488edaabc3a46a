"""A Flower app that judges reviews, with Hugging Face's transformers."""
