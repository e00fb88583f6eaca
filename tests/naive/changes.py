"""The naive twins of `cpu/changes.py`."""

from typing import Any


def find_changes(old: Any, new: Any, indices: Any, values: Any) -> int:
    k = 0
    for i in range(len(old)):
        if int(old[i]) != int(new[i]):
            indices[k], values[k] = i, new[i]
            k += 1
    return k


def scatter(target: Any, indices: Any, values: Any) -> None:
    for index, value in zip(indices, values, strict=True):
        target[int(index)] = value


def gather(source: Any, indices: Any, values: Any) -> None:
    for j, index in enumerate(indices):
        values[j] = source[int(index)]


def scatter_rows(target: Any, indices: Any, values: Any) -> None:
    for index, value in zip(indices, values, strict=True):
        target[divmod(int(index), target.shape[1])] = value


def gather_rows(source: Any, indices: Any, values: Any) -> None:
    for j, index in enumerate(indices):
        values[j] = source[divmod(int(index), source.shape[1])]


def union(indices: Any, values: Any, more_indices: Any, more_values: Any, all_indices: Any, all_values: Any) -> int:
    merged = dict(zip(more_indices, more_values, strict=True)) | dict(zip(indices, values, strict=True))
    for k, index in enumerate(sorted(merged)):
        all_indices[k], all_values[k] = index, merged[index]
    return len(merged)
