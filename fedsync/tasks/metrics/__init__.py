"""Metrics for `Task.metrics`, and the measurement of their sums on the device; see docs/metrics.md."""

from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.metrics.moments import own
from fedsync.evaluation.metrics.named import NAMES, Wanted, classification, regression, segmentation, shipped

__all__ = ["NAMES", "AnyMetric", "Wanted", "classification", "own", "regression", "segmentation", "shipped"]
