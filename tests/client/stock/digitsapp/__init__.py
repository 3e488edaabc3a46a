"""A Flower app with the structure of Flower's quickstart for PyTorch, on scikit-learn's digits."""
