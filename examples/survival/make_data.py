"""Made-up patients of four hospitals: months under observation, and whether the illness came back.

    python make_data.py

Writes the files of ``data/`` again. The true logarithms of hazard ratios are 0.03 for a year of age, -0.5 for the new
treatment, and 0.4 and 0.9 for stages II and III.
"""

from pathlib import Path

import numpy as np
import pandas as pd

HOSPITALS = {"rome": 180, "oslo": 120, "lyon": 90, "graz": 60}
STAGES = ["I", "II", "III"]


def main() -> None:
    rng = np.random.default_rng(2026)
    for number, (name, rows) in enumerate(HOSPITALS.items()):
        age = np.round(rng.normal(58 + 2 * number, 10, rows))
        new, stage = rng.random(rows) < 0.5, rng.choice(3, rows, p=[0.4, 0.35, 0.25])
        risk = 0.03 * (age - 60) - 0.5 * new + np.array([0.0, 0.4, 0.9])[stage]
        back, end = rng.exponential(40 / np.exp(risk)), rng.uniform(6, 72, rows)
        table = pd.DataFrame({"months": np.ceil(np.minimum(back, end)).astype(int)})
        table = table.assign(relapse=(back <= end).astype(int), age=age.astype(int))
        table = table.assign(treatment=np.where(new, "new", "usual"), stage=np.array(STAGES)[stage])
        table["age"] = table["age"].astype(object).where(rng.random(rows) > 0.03, "")
        table.to_csv(Path(__file__).parent / "data" / f"{name}.csv", index=False)


if __name__ == "__main__":
    main()
