"""Metrics, and the sums they are worked out of."""
