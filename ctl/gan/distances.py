"""How far made images are from real ones: the Frechet distance and the kernel distance between their features.

They are the formulas of FID and KID, over whatever features they are given: figures over different ones do not compare.
The Frechet distance counts every example of the evaluation once; the kernel distance, a sample of KERNEL_RECORDS,
the same every time. The sums are in float64, so replicas change nothing but their rounding.
"""

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from ctl.experiment import Tally

# The kernel distance compares all pairs of this many records, the first ones of the evaluation's seeded order: in that
# of the files they might be of one class.
KERNEL_RECORDS = 1000

Sums = Mapping[str, np.ndarray]


def make_tally(extract: Callable[[tf.Tensor], tf.Tensor], make: Callable[[dict], tf.Tensor]) -> Tally:
    """`frechet_distance` and `kernel_distance` of an evaluation, with a made image for each real one.

    Args:
      extract: images [B, S, S, C] in (-1, 1) -> features, float [B, F].
      make: batch -> made images, one for each example.
    """

    def sums(batch: dict) -> dict[str, tf.Tensor]:
        parts = {}
        for kind, images in {'real': batch['image'], 'made': make(batch)}.items():
            features = tf.cast(extract(images), tf.float64)
            parts.update({f'{kind}_{name}': value for name, value in feature_sums(features, batch).items()})
        return parts

    return Tally(sums, distances, ('frechet_distance', 'kernel_distance'))


def feature_sums(features_BxF: tf.Tensor, batch: dict) -> dict[str, tf.Tensor]:
    """Of the examples with a weight: their `count`, the `sum` [F] and `outer` products [F, F] of their features.

    And the features of the records with the first places in the evaluation's seeded order, each in its own row: `rows`
    [KERNEL_RECORDS, F], 1 in `in_row` where one is.
    """
    counts_B = tf.cast(batch['example_weight'] > 0, tf.float64)
    features_BxF = tf.where(counts_B[:, None] > 0, features_BxF, 0)
    places_B = batch['evaluation_place']
    first_B = counts_B * tf.cast(places_B < KERNEL_RECORDS, tf.float64)
    places_Bx1 = tf.minimum(places_B, KERNEL_RECORDS - 1)[:, None]
    width = features_BxF.shape[1]
    return {
        'count': tf.reduce_sum(counts_B),
        'sum': tf.reduce_sum(features_BxF, 0),
        'outer': tf.matmul(features_BxF, features_BxF, transpose_a=True),
        'rows': tf.scatter_nd(places_Bx1, features_BxF * first_B[:, None], [KERNEL_RECORDS, width]),
        'in_row': tf.scatter_nd(places_Bx1, first_B, [KERNEL_RECORDS]),
    }


def distances(sums: Sums) -> dict[str, float]:
    """Both distances, from the sums of real and of made features."""
    real, made = (
        {name.partition('_')[2]: v for name, v in sums.items() if name.startswith(k)} for k in ('real', 'made')
    )
    rows = [each['rows'][each['in_row'] > 0] for each in (real, made)]
    if not all(np.isfinite(each['outer']).all() for each in (real, made)):
        return {'frechet_distance': np.nan, 'kernel_distance': np.nan}  # numpy would fail, and say nothing of why
    return {
        'frechet_distance': frechet_distance(*_moments(real), *_moments(made)),
        'kernel_distance': kernel_distance(*rows),
    }


def _moments(sums: Sums) -> tuple[np.ndarray, np.ndarray]:
    """Mean [F] and unbiased covariance [F, F]."""
    count = float(sums['count'])
    mean = sums['sum'] / count
    return mean, (sums['outer'] - count * np.outer(mean, mean)) / max(1.0, count - 1)


def frechet_distance(mean: np.ndarray, covariance: np.ndarray, mean2: np.ndarray, covariance2: np.ndarray) -> float:
    """|m - m2|^2 + trace(C + C2 - 2 (C C2)^(1/2)), of float64 [F] and [F, F].

    Heusel et al. 2017, "GANs trained by a two time-scale update rule", equation 6. The trace of the root is the sum of
    the roots of the eigenvalues of C^(1/2) C2 C^(1/2), which is symmetric.
    """
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    trace = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ covariance2 @ root), 0)).sum()
    return float(np.sum((mean - mean2) ** 2) + np.trace(covariance) + np.trace(covariance2) - 2 * trace)


def kernel_distance(x: np.ndarray, y: np.ndarray) -> float:
    """The unbiased squared maximum mean discrepancy of float64 [N, F] and [N, F]; it may be a little below 0.

    Kernel (x . y / F + 1)^3: Binkowski et al. 2018, "Demystifying MMD GANs". No row is compared with its own number:
    Gretton et al. 2012, "A kernel two-sample test", equation 4. There the made image has the class of the real one,
    which would pull the distance below 0. 0 with fewer than two examples.
    """
    if len(x) < 2:
        return 0.0

    def between(a: np.ndarray, b: np.ndarray) -> float:
        k = (a @ b.T / a.shape[1] + 1) ** 3
        return (k.sum() - np.trace(k)) / (len(a) * (len(a) - 1))

    return float(between(x, x) + between(y, y) - 2 * between(x, y))
