"""A kept model's words in a silo's state come back as they were."""

import json

import numpy as np
import pytest

from fedsync.cipher.silo.figure_pool import KeptModel
from fedsync.core.orders import Score

MODEL = np.arange(3, dtype=np.float32)


@pytest.mark.parametrize(
    "score",
    [None, Score(4, 0.5, 0.25, {"auroc": 0.1}), Score(4, None, 0.25), Score(4, 0.5, None)],
)
def test_a_score_comes_back(score: Score | None) -> None:
    kept = KeptModel.of(5, MODEL, score)
    again = KeptModel.from_json(json.loads(json.dumps(kept.to_json())), MODEL)
    assert (again.version, again.digest, again.score) == (kept.version, kept.digest, score)


def test_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="version 5"):
        KeptModel.from_json(KeptModel.of(5, MODEL).to_json(), MODEL + 1)
