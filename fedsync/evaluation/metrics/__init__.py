"""Metrics of model quality, computed from sums that silos form over their samples.

A *statistic* is a silo's sum over the samples of one split: a flat vector, added elementwise over silos. A *metric* is
a number computed from the sums of one statistic. Several metrics share one statistic: a histogram of scores by class
gives AUROC, average precision and calibration. The sum of all silos' statistics is the statistic of
all their samples together. So every metric exists per silo and pooled, and no sample leaves its silo.

NumPy only, since the server has no torch. Server and silos compute the same bits: arithmetic is elementwise or in
order, without BLAS. `fedsync.tasks.metrics` measures a model's outputs.
"""
