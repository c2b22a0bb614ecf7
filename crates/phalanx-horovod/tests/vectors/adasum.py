"""Reference values for Adasum, written from the formula of Maleki et al., 2020 (arXiv 2006.02924), in NumPy:

    python3 adasum.py > adasum.json
"""

import json

import numpy as np


def pair(a, b):
    product = np.dot(a, b)
    of = lambda g: 1.0 if np.dot(g, g) == 0 else 1 - product / (2 * np.dot(g, g))
    return of(a) * a + of(b) * b


def adasum(gradients):
    if len(gradients) == 1:
        return gradients[0]
    half = len(gradients) // 2
    return pair(adasum(gradients[:half]), adasum(gradients[half:]))


random = np.random.default_rng(2006)
cases = []
for ranks in (1, 2, 4, 8):
    for elements in (1, 3, 50):
        gradients = [random.standard_normal(elements) for _ in range(ranks)]
        cases.append({"gradients": [g.tolist() for g in gradients], "adasum": adasum(gradients).tolist()})
zeros = [np.zeros(3), random.standard_normal(3), random.standard_normal(3), np.zeros(3)]
cases.append({"gradients": [g.tolist() for g in zeros], "adasum": adasum(zeros).tolist()})
print(json.dumps(cases, indent=0))
