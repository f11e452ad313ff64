"""Small real factors: users and items of the bundled MovieLens ratings.

Implicit-feedback ALS: Hu, Koren, Volinsky, "Collaborative Filtering for Implicit Feedback Datasets" (2008).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

DATA = Path(__file__).parent / "movielens-small"
# What Spark ML's ALS takes when told nothing.
ALPHA, REGULARISATION, ROUNDS = 1.0, 0.1, 10


@dataclass(frozen=True)
class Ratings:
    """user_ids [U] and item_ids [I] are the data set's own; users, items [R] are rows in them; stars [R]."""

    user_ids: npt.NDArray[np.int64]
    item_ids: npt.NDArray[np.int64]
    users: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    stars: npt.NDArray[np.float32]

    def rated_by(self, user: int) -> npt.NDArray[np.int64]:
        """Item ids a user has rated."""
        return np.asarray(self.item_ids[self.items[self.users == user]])


def load_ratings() -> Ratings:
    with open(DATA / "ratings.csv", newline="", encoding="utf-8") as file:
        rows = [(int(r["userId"]), int(r["movieId"]), float(r["rating"])) for r in csv.DictReader(file)]
    user_ids, users = np.unique(np.array([r[0] for r in rows], np.int64), return_inverse=True)
    item_ids, items = np.unique(np.array([r[1] for r in rows], np.int64), return_inverse=True)
    return Ratings(user_ids, item_ids, users, items, np.array([r[2] for r in rows], np.float32))


def load_titles() -> dict[int, str]:
    with open(DATA / "movies.csv", newline="", encoding="utf-8") as file:
        return {int(row["movieId"]): row["title"] for row in csv.DictReader(file)}


def train(ratings: Ratings, dim: int = 64, seed: int = 7) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Factors of users [U, dim] and items [I, dim] whose dot product ranks items for a user."""
    generator = np.random.default_rng(seed)
    users = generator.normal(0, 0.1, (len(ratings.user_ids), dim)).astype(np.float32)
    items = generator.normal(0, 0.1, (len(ratings.item_ids), dim)).astype(np.float32)
    weights = (ALPHA * ratings.stars).astype(np.float32)
    for _ in range(ROUNDS):
        users = _solve(items, ratings.users, ratings.items, weights, len(users))
        items = _solve(users, ratings.items, ratings.users, weights, len(items))
    return users, items


def _solve(
    fixed: npt.NDArray[np.float32], rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float32], n_rows: int,
) -> npt.NDArray[np.float32]:  # fmt: skip
    """One half round: the least-squares factors of every row, the other side held fixed."""
    dim = fixed.shape[1]
    gram = fixed.T @ fixed + REGULARISATION * np.eye(dim, dtype=np.float32)
    order = np.argsort(rows, kind="stable")
    bounds = np.searchsorted(rows[order], np.arange(n_rows + 1))
    factors = np.zeros((n_rows, dim), np.float32)
    for row in range(n_rows):
        chosen = order[bounds[row] : bounds[row + 1]]
        seen, weight = fixed[columns[chosen]], weights[chosen]
        factors[row] = np.linalg.solve(gram + (seen * weight[:, None]).T @ seen, seen.T @ (1 + weight))
    return factors
