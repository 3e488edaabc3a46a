"""A Flower app that compresses digits, with PyTorch Lightning."""
