"""A small set of cases in which every pair of values of any two parameters occurs at least once (greedy, seeded)."""

import itertools
import random


def pairwise(parameters: dict[str, list], *, seed: int = 0, tries: int = 40) -> list[dict]:
    """Cover all pairs: each row takes an uncovered pair and fills in the values that cover most of what is left."""
    rng = random.Random(seed)
    names = list(parameters)
    left = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(parameters[names[a]]))
        for j in range(len(parameters[names[b]]))
    }
    rows = []
    while left:
        best, covered = [], set()
        seeds = rng.sample(sorted(left), min(tries, len(left)))
        for (a, i), (b, j) in seeds:
            row = [rng.randrange(len(parameters[name])) for name in names]
            row[a], row[b] = i, j
            pairs = {((c, row[c]), (d, row[d])) for c, d in itertools.combinations(range(len(names)), 2)} & left
            if len(pairs) > len(covered):
                best, covered = row, pairs
        left -= covered
        rows.append({name: parameters[name][i] for name, i in zip(names, best, strict=True)})
    return rows
