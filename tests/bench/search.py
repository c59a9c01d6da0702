"""Search for the best items of a user, exact and approximate, beside libraries: `python -m tests.bench.search`.

Prints Markdown. Vectors are of length 1, in clusters, and users near them. CPU time of one thread, as others use the
machine: the rounds go through all methods in turn. The peers are measured where they are installed: `pip install
faiss-cpu usearch hnswlib`; HNSW graphs take minutes to build, and come with `--graphs`.

All vectors move with each version of a model. So *build* is what each version costs: rounding for Headrace, assignment
to the centroids of the version before for IVF, and all of the graph for HNSW. Recall is that of the 100 best.
"""

import argparse
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np  # noqa: E402  # reads the variable
from numpy.typing import NDArray  # noqa: E402

from headrace.trainer.serving.item_catalogue import ItemCatalogue  # noqa: E402
from headrace.trainer.serving.item_index import ItemIndex  # noqa: E402

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
CLUSTERS, SPREAD, MOVED = 2000, 0.6, 0.05
"""Clusters of items, the spread within one, and how far a version moves a vector."""
USERS, TOGETHER = 256, 64
"""Users that are searched for, and users of a large request."""
WANTED = 0.97
"""Recall of an approximate index; its effort is the least that reaches it."""
EFFORTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class Searched:
    """An index that can be searched."""

    name: str
    search: Callable[[F32, int], I64]
    """(B, K) the places of the best items."""
    build_s: float
    mib: float


def normal(rng: np.random.Generator, vectors: NDArray[np.float64]) -> F32:
    """The vectors with noise, of length 1."""
    moved = vectors + MOVED * rng.normal(size=vectors.shape) / np.sqrt(vectors.shape[1])
    return (moved / np.linalg.norm(moved, axis=1, keepdims=True)).astype(np.float32)


def vectors_of(items: int, dim: int) -> tuple[F32, F32, F32]:
    """The items by a version, by the next one, and users of that."""
    rng = np.random.default_rng(1)
    centre = rng.normal(size=(CLUSTERS, dim))
    near = lambda count: centre[rng.integers(CLUSTERS, size=count)] + SPREAD * rng.normal(size=(count, dim))  # noqa: E731
    found = near(items)
    return normal(rng, found), normal(rng, found), normal(rng, near(USERS))


def cpu(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and its CPU time."""
    begin_s = time.process_time()
    return work(), time.process_time() - begin_s


def exact(item_IV: F32) -> ItemIndex:
    """Headrace's index."""
    import pyarrow as pa

    ids = pa.array(np.arange(len(item_IV), dtype=np.uint64))
    catalogue = ItemCatalogue(ids, np.arange(len(item_IV), dtype=np.uint64), {}, {}, pa.table({"item": ids}))
    return ItemIndex.of(catalogue, item_IV, np.ones(len(item_IV), np.bool_))


def ours(item_IV: F32) -> Searched:
    exact(item_IV[:2000]).search(item_IV[:2], 5, np.ones(2000, np.bool_))  # compiled
    index, build_s = cpu(lambda: exact(item_IV))
    search = lambda user_BV, k: np.array([at for _, at in index.search(user_BV, k, index.there_I)])  # noqa: E731
    held = [index.vectors_IV, *index.rounded]
    return Searched("Headrace, exact", search, build_s, sum(each.nbytes for each in held) / 2**20)


def flat(item_IV: F32) -> Searched:
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatIP(item_IV.shape[1])
    _, build_s = cpu(lambda: index.add(item_IV))
    return Searched(
        "faiss flat, exact", lambda user_BV, k: index.search(user_BV, k)[1], build_s, item_IV.nbytes / 2**20
    )


def usearch_exact(item_IV: F32) -> Searched:
    from usearch.index import MetricKind, search

    find = lambda user_BV, k: search(item_IV, user_BV, k, MetricKind.IP, exact=True, threads=1).keys  # noqa: E731
    return Searched(
        "usearch, exact", lambda user_BV, k: find(user_BV, k).reshape(len(user_BV), -1), 0, item_IV.nbytes / 2**20
    )


def centroids(before_IV: F32) -> Any:
    """The centroids of the version before, trained."""
    import faiss

    dim = before_IV.shape[1]
    found = faiss.IndexFlatIP(dim)
    training = faiss.Clustering(dim, int(2 * np.sqrt(len(before_IV))))
    training.niter, training.max_points_per_centroid, training.spherical = 10, 40, True
    training.train(before_IV, found)
    return found


def ivf(quantizer: Any, item_IV: F32, truth: I64, user_BV: F32, *, short: bool) -> Searched:
    """Lists of this version by centroids of the version before. With `short`, vectors of 8 bits."""
    import faiss

    dim, lists = item_IV.shape[1], quantizer.ntotal
    if short:
        kind = faiss.ScalarQuantizer.QT_8bit
        index = faiss.IndexIVFScalarQuantizer(quantizer, dim, lists, kind, faiss.METRIC_INNER_PRODUCT)
    else:
        index = faiss.IndexIVFFlat(quantizer, dim, lists, faiss.METRIC_INNER_PRODUCT)
    index.train(item_IV[:10_000])  # the bounds of short numbers; the centroids are there
    _, build_s = cpu(lambda: index.add(item_IV))

    def find(asked_BV: F32, k: int) -> I64:
        found: I64 = index.search(asked_BV, k)[1]
        return found

    for effort in EFFORTS:
        index.nprobe = effort
        if recall(find(user_BV, truth.shape[1]), truth) >= WANTED:
            break
    name = f"faiss IVF{lists}{',SQ8' if short else ',Flat'}, {index.nprobe} lists"
    return Searched(name, find, build_s, (item_IV.nbytes / (4 if short else 1) + 8 * len(item_IV)) / 2**20)


def hnsw(item_IV: F32, truth: I64, user_BV: F32) -> Searched:
    import hnswlib

    index = hnswlib.Index("ip", item_IV.shape[1])
    index.init_index(len(item_IV), ef_construction=100, M=16)
    index.set_num_threads(1)
    _, build_s = cpu(lambda: index.add_items(item_IV))

    def find(asked_BV: F32, k: int) -> I64:
        found: I64 = index.knn_query(asked_BV, k)[0].astype(np.int64)
        return found

    for effort in (100, 150, 200, 300, 400, 600, 800):
        index.set_ef(effort)
        if recall(find(user_BV, truth.shape[1]), truth) >= WANTED:
            break
    return Searched(f"hnswlib, M=16, ef={effort}", find, build_s, (item_IV.nbytes + 4 * 33 * len(item_IV)) / 2**20)


def usearch_graph(item_IV: F32, truth: I64, user_BV: F32) -> Searched:
    from usearch.index import Index

    index = Index(ndim=item_IV.shape[1], metric="ip", dtype="i8", connectivity=16, expansion_add=100)
    places = np.arange(len(item_IV))
    _, build_s = cpu(lambda: index.add(places, item_IV, threads=1))
    find = lambda asked_BV, k: index.search(asked_BV, k, threads=1).keys.reshape(len(asked_BV), -1).astype(np.int64)  # noqa: E731
    for effort in (100, 150, 200, 300, 400, 600, 800):
        index.expansion_search = effort
        if recall(find(user_BV, truth.shape[1]), truth) >= WANTED:
            break
    return Searched(f"usearch, i8, M=16, ef={effort}", find, build_s, index.memory_usage / 2**20)


def recall(found: I64, truth: I64) -> float:
    """Share of the best items that were found."""
    return float(
        np.mean([len(np.intersect1d(one, other)) / truth.shape[1] for one, other in zip(found, truth, strict=True)])
    )


def measure(items: int, asked: argparse.Namespace) -> Iterator[str]:
    """The lines of the table for so many items."""
    before_IV, item_IV, user_BV = vectors_of(items, asked.dim)
    mine = ours(item_IV)
    truth = mine.search(user_BV, asked.k)
    methods = [mine]
    if importlib.util.find_spec("faiss"):
        methods += [flat(item_IV)]
        quantizer = centroids(before_IV)
        methods += [ivf(quantizer, item_IV, truth, user_BV, short=short) for short in (False, True)]
    if importlib.util.find_spec("usearch"):
        methods += [usearch_exact(item_IV)]
        methods += [usearch_graph(item_IV, truth, user_BV)] if asked.graphs else []
    if importlib.util.find_spec("hnswlib") and asked.graphs:
        methods += [hnsw(item_IV, truth, user_BV)]
    alone: dict[str, list[float]] = {each.name: [] for each in methods}
    together: dict[str, list[float]] = {each.name: [] for each in methods}
    for number in range(asked.rounds):
        one_BV = user_BV[number % USERS][None]
        for each in methods:
            alone[each.name].append(cpu(lambda each=each, one_BV=one_BV: each.search(one_BV, asked.k))[1])
            if number % 50 == 0:
                many_BV = user_BV[:TOGETHER]
                spent_s = cpu(lambda each=each, many_BV=many_BV: each.search(many_BV, asked.k))[1]
                together[each.name].append(spent_s / TOGETHER)
    for each in methods:
        p50_s, p99_s = np.percentile(alone[each.name], (50, 99))
        many_s = float(np.median(together[each.name]))
        found = recall(each.search(user_BV, asked.k), truth)
        rates = f"{1 / np.mean(alone[each.name]):,.0f} | {1 / many_s:,.0f}"
        times = f"{p50_s * 1e3:.2f} | {p99_s * 1e3:.2f}"
        yield f"| {each.name} | {times} | {rates} | {found:.3f} | {each.build_s:.2f} | {each.mib:,.0f} |"


def main() -> None:
    """Measure, and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--items", type=int, nargs="+", default=[100_000, 1_000_000])
    options.add_argument("--dim", type=int, default=32)
    options.add_argument("--k", type=int, default=100)
    options.add_argument("--rounds", type=int, default=200)
    options.add_argument("--graphs", action="store_true", help="HNSW graphs as well")
    asked = options.parse_args()
    for items in asked.items:
        print(f"\n{items:,} items, {asked.dim} numbers, k = {asked.k}\n")
        print(f"| | p50 ms | p99 ms | users/s a core, one a request | {TOGETHER} a request | recall | build s | MiB |")
        print("|---|---|---|---|---|---|---|---|")
        for line in measure(items, asked):
            print(line, flush=True)


if __name__ == "__main__":
    main()
