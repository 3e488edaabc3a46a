"""Metrics for `Task.metrics`, and how their sums are measured on the device: see docs/your-task.md."""

from fedsync.core.metrics.base import AnyMetric
from fedsync.core.metrics.moments import own
from fedsync.core.metrics.named import NAMES, Wanted, classification, regression, segmentation, shipped

__all__ = ["NAMES", "AnyMetric", "Wanted", "classification", "own", "regression", "segmentation", "shipped"]
