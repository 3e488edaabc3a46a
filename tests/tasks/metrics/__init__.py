"""Sums as torch measures them."""
