"""The matrix of models and silos: ``cross_site.json`` in the run's folder, and how it is made.

Rows are models, columns are silos, each cell is how a model does on one silo's test samples:

```json
{"split": "test",
 "silos": ["basel", "bern"],
 "models": [{"subject": "last", "silo": null, "version": 12},
            {"subject": "best", "silo": null, "version": 9},
            {"subject": "local", "silo": "basel", "samples": 7680},
            {"subject": "tuned", "silo": "basel", "samples": 640}, ...],
 "metrics": {"auroc": {"higher_is_better": true,
                       "matrix": [[CELL, CELL], ...],
                       "pooled": {"last": CELL, "best": CELL, "local": CELL, "tuned": CELL},
                       "gain": {"last": {"basel": GAIN, "bern": GAIN}, "best": {...}, "tuned": {...}}}},
 "missing": [{"subject": "local", "silo": "bern", "reason": "it failed to train: ..."}]}
```

- ``models`` are the rows of every ``matrix``, ``silos`` its columns. A model of the federation has ``version``, one
  that a silo trained has the silo's name and the ``samples`` that it was trained with.
- CELL is ``{"value", "low", "high", "support"}`` or null where nobody evaluated that: a local model travels with its
  owner's ``share_local`` only, and what is ``missing`` was not trained, for the reason given. ``value`` is null where
  the silo has no test samples, or the metric is not estimable of what it has; ``low`` and ``high`` are null where there
  is no interval (95 %). ``support`` is the number of test samples.
- ``pooled``: over all silos' test samples together; ``local`` and ``tuned`` there are each silo's own model on its own
  samples. A subject of which there is nothing is left out.
- GAIN is ``{"value", "low", "high"}`` or null: how much better than the silo's own local model, positive is better,
  also where a lower metric is. The interval is of the difference on the same samples.
- Where figures are sealed, ``silos`` and every ``matrix`` are empty, ``gain`` too, and ``models`` have no silo of their
  own: only ``pooled`` is there.
"""

FILE = "cross_site.json"
