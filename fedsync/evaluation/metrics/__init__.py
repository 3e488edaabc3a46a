"""How good a model is: what silos sum over their samples, and the numbers that follow from such sums.

A *statistic* is what a silo sums over the samples of one split: a flat vector, added elementwise over silos. A *metric*
is a number worked out of the sums of one statistic. Several metrics read one statistic: a histogram of scores by class
gives AUROC, average precision and calibration. The sums of many silos say of all their samples what those of one say of
its own, so every number is there per silo and pooled, and no sample leaves its silo.

NumPy only, for the server has no torch; and server and silos find the same bits: arithmetic is elementwise or in
order, without BLAS. Measuring a model's outputs is `fedsync.tasks.metrics`.
"""
