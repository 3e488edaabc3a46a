"""Sums of samples whose scores, labels or numbers are given, made with NumPy alone."""

import numpy as np
from numpy.typing import NDArray

from fedsync.evaluation.metrics.classes import ClassCounts
from fedsync.evaluation.metrics.metric_types import Sums
from fedsync.evaluation.metrics.moments import BLOCKS
from fedsync.evaluation.metrics.score_histograms import ScoreCounts, edges, middles

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


def binned(scores: Floats, resolution: int) -> Labels:
    return np.searchsorted(edges(resolution), scores, side="left").astype(np.int64)


def rounded(scores: Floats, resolution: int) -> Floats:
    """Scores as the middles of their bins."""
    return middles(resolution)[binned(scores, resolution)]


def score_sums(statistic: ScoreCounts, scores: Floats, labels: Labels) -> Sums:
    """Of scores [n] of class 1, or [n, classes]."""
    columns = scores[:, None] if statistic.classes == 2 else scores
    wanted = [1] if statistic.classes == 2 else range(statistic.classes)
    table = np.zeros(statistic.shape)
    for place, label in enumerate(wanted):
        np.add.at(table[place], ((labels == label).astype(int), binned(columns[:, place], statistic.resolution)), 1)
    return table.ravel()


def class_sums(statistic: ClassCounts, labels: Labels, predicted: Labels) -> Sums:
    matrix = np.zeros((statistic.classes, statistic.classes))
    np.add.at(matrix, (labels, predicted), 1)
    table = matrix if statistic.full else np.stack([np.diagonal(matrix), matrix.sum(axis=0), matrix.sum(axis=1)])
    return table.ravel()


def block_sums(*columns: Floats) -> Sums:
    """Of the numbers of each sample, [n] each, dealt to blocks in turn."""
    table = np.zeros((BLOCKS, 1 + len(columns)))
    rows = np.stack([np.ones(len(columns[0])), *columns], axis=1)
    np.add.at(table, np.arange(len(rows)) % BLOCKS, rows)
    return table.ravel()


def error_sums(predicted: Floats, truth: Floats) -> Sums:
    error = predicted - truth
    return block_sums(np.abs(error), error**2, truth, truth**2)
