"""Print the laws of runs and how often they were put to the test: `python -m tests.laws`; takes minutes."""

from collections import Counter

from tests.laws.law import kept, laws
from tests.laws.watched import NAMES


def main() -> None:
    exposures: Counter[str] = Counter()
    cases: Counter[str] = Counter()
    for case in range(len(NAMES)):
        found, broken = kept(case)
        exposures.update(found)
        cases.update(found.keys())
        for each in broken:
            print(f"broken: {each.law}, in the corner {each.corner!r} of {NAMES[case]}: {each.error}")
    print("| law | what it promises | policies | put to the test |")
    print("|---|---|---|---|")
    for law in laws():
        print(f"| {law.name} | {law.promise} | {cases[law.name]} | {exposures[law.name]:,} times |")


if __name__ == "__main__":
    main()
