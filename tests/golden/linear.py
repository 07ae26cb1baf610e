"""Reference numbers of linearity (arXiv 2405.12250) from states, written out in numpy and scikit-learn."""

import numpy as np
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score


def centred(x):
    return x - x.mean(0)


def linearity(x, y):
    """1 − min ‖X̃A − Ỹ‖² of centred matrices of unit norm, by the SVD as in arXiv 2405.12250.

    The paper divides by every singular value. After BERT's layer norm one of them is zero, and is left out here.
    """
    x, y = centred(x), centred(y)
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    kept = s > 1e-10 * s[0]
    a = vt[kept].T @ np.diag(1 / s[kept]) @ u[:, kept].T @ y
    return 1 - np.linalg.norm(x @ a - y) ** 2


def held_out(x, y, x_test, y_test):
    predicted = LinearRegression(tol=1e-10).fit(x, y).predict(x_test)
    return r2_score(y_test, predicted, multioutput="variance_weighted")


def linearity_rows(fit, test):
    """Every block: both scores in sample and on other text, the identity's, and the chance floor."""
    rows = []
    for x, y, x_test, y_test in zip(fit, fit[1:], test, test[1:], strict=False):
        added, n = centred(y - x), len(x)
        rows.append(
            {
                "with residual": linearity(x, y),
                "without residual": linearity(x, y - x),
                "with residual held out": held_out(x, y, x_test, y_test),
                "without residual held out": held_out(x, y - x, x_test, y_test - x_test),
                "identity": 1 - (added**2).sum() / (centred(y) ** 2).sum(),
                "chance floor": x.shape[1] / (n - 1),
            }
        )
    return rows


def cosines(x, y):
    return (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)


def angle(x, y):
    return float(np.mean(np.arccos(np.clip(cosines(x, y), -1, 1))) / np.pi)


def why_rows(test):
    """Every block: its step beside the stream, and how far it turns it."""
    return [
        {
            "step norm over stream norm": np.mean(np.linalg.norm(y - x, axis=-1) / np.linalg.norm(x, axis=-1)),
            "block influence": np.mean(1 - cosines(x, y)),
            "angle": angle(x, y),
        }
        for x, y in zip(test, test[1:], strict=False)
    ]


def anisotropy(x):
    s = np.linalg.svd(centred(x), compute_uv=False)
    return s[0] ** 2 / (s**2).sum()


def two_nearest(x):
    """TwoNN (Facco et al. 2017), on rows that are not the same up to rounding."""
    same = 1e-5 * np.median(np.linalg.norm(x, axis=-1))
    kept = []
    for row in x:
        if not kept or np.linalg.norm(np.array(kept) - row, axis=-1).min() > same:
            kept.append(row)
    kept = np.array(kept)
    ratios = []
    for row in kept:
        _, first, second = np.sort(np.linalg.norm(kept - row, axis=-1))[:3]
        ratios.append(second / first)
    n = len(ratios)
    use = int(0.9 * n)
    log_ratio = np.log(np.sort(ratios))[:use]
    cumulative = np.arange(1, use + 1) / n
    line = LinearRegression(fit_intercept=False)
    return float(line.fit(log_ratio[:, None], -np.log(1 - cumulative)).coef_[0])


def level_rows(fit):
    """BERT's rows are more than the library samples for the dimension, so there it is of the first ones only."""
    return [
        {
            "mean norm": np.linalg.norm(x, axis=-1).mean(),
            "anisotropy": anisotropy(x),
            "intrinsic dimension": two_nearest(x[:2000]),
        }
        for x in fit
    ]
