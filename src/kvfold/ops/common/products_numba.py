"""Products of queries or weights with vectors in memory, for Numba kernels; each vector is read
once for several queries."""

import numpy as np

from kvfold.ops.common.codes_numba import kernel


@kernel(fast=True)
def dot(q, row):
    """Dot product of q and the first len(q) numbers of row."""
    total = np.float32(0)
    for i in range(len(q)):
        total += q[i] * row[i]
    return total


@kernel(fast=True)
def dots(queries, rows, width, count, scores):
    """Scores [h, .. count] of queries [h, .. width] and rows, `count` of `width` each, in turn.

    Two heads by four rows at once, that registers hold: fewer numbers are read for each product.
    """
    heads, whole = len(queries), count // 4 * 4
    for p in range(0, whole, 4):
        at = p * width
        a, b = rows[at : at + width], rows[at + width : at + 2 * width]
        c, d = rows[at + 2 * width : at + 3 * width], rows[at + 3 * width : at + 4 * width]
        for h in range(0, heads, 2):
            k = min(h + 1, heads - 1)  # the last of an odd number twice
            q, r = queries[h, :width], queries[k, :width]
            w, x, y, z = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            s, t, u, v = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(width):
                w += q[i] * a[i]
                x += q[i] * b[i]
                y += q[i] * c[i]
                z += q[i] * d[i]
                s += r[i] * a[i]
                t += r[i] * b[i]
                u += r[i] * c[i]
                v += r[i] * d[i]
            scores[h, p], scores[h, p + 1], scores[h, p + 2], scores[h, p + 3] = w, x, y, z
            scores[k, p], scores[k, p + 1], scores[k, p + 2], scores[k, p + 3] = s, t, u, v
    for p in range(whole, count):
        for h in range(heads):
            scores[h, p] = dot(queries[h, :width], rows[p * width : (p + 1) * width])


@kernel(fast=True)
def mix(weights, rows, width, count, total):
    """Add rows, `count` of `width` each, by weights [h, .. count] to total [h, .. width], as `dots`
    two heads by four rows at once."""
    heads, whole = len(weights), count // 4 * 4
    for p in range(0, whole, 4):
        at = p * width
        a, b = rows[at : at + width], rows[at + width : at + 2 * width]
        c, d = rows[at + 2 * width : at + 3 * width], rows[at + 3 * width : at + 4 * width]
        for h in range(0, heads - 1, 2):
            out, too = total[h, :width], total[h + 1, :width]
            w, x, y, z = weights[h, p], weights[h, p + 1], weights[h, p + 2], weights[h, p + 3]
            k = h + 1
            s, t, u, v = weights[k, p], weights[k, p + 1], weights[k, p + 2], weights[k, p + 3]
            for i in range(width):
                out[i] += w * a[i] + x * b[i] + y * c[i] + z * d[i]
                too[i] += s * a[i] + t * b[i] + u * c[i] + v * d[i]
    for p in range(count):
        for h in range(heads // 2 * 2 if p < whole else 0, heads):
            row, out, w = rows[p * width : (p + 1) * width], total[h, :width], weights[h, p]
            for i in range(width):
                out[i] += w * row[i]


@kernel(fast=True)
def power_of_2(x):
    """2^x for x <= 0, to within fp32's rounding, in operations that LLVM can vectorise."""
    x = np.float32(-126) if x < np.float32(-126) else x
    whole = np.rint(x)
    y = (x - whole) * np.float32(0.6931471805599453)
    result = np.float32(1 / 720) + y * np.float32(1 / 5040)
    result = np.float32(1 / 120) + y * result
    result = np.float32(1 / 24) + y * result
    result = np.float32(1 / 6) + y * result
    result = np.float32(0.5) + y * result
    result = np.float32(1) + y * (np.float32(1) + y * result)
    return result * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
