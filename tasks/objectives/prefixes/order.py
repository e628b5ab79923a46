"""Orders rows by their prefix tree (trie), so that each row follows a row with which it shares the most tokens.

    rows    a b c d      tree    a b c d      order    a b c d
            a b e                    e                 a b e      shares 2 tokens with the row before it
            a f                    f                   a f        shares 1

The order is depth first. At each fork of the tree, the branch with the longest row comes first. Rows of different
groups never share tokens. The size of the tree is the number of tokens that a row does not share with the row before
it, summed over all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollflow.tasks.objectives.rows import BatchRows


@dataclass(slots=True)
class _Node:
    """A fork of the tree, or the end of a row."""

    depth: int  # number of tokens between the beginning of a row and the node
    longest: int  # number of tokens of the longest row below the node
    parts: list[_Node]  # the branches of a fork
    row: int = -1  # the row that ends at the node; -1 for a fork


def order_rows(data: BatchRows, rows: Sequence[int]) -> list[int]:
    """Order rows depth first by their prefix tree. See the module's docstring."""
    ordered = _sort_by_tokens(data, rows)
    if not ordered:
        return []
    groups = data.groups[ordered]
    # Rows of different groups have no node in common but the root, whose depth is -1.
    depths = np.where(groups[1:] == groups[:-1], count_shared(data, ordered)[1:], -1).tolist()
    return _walk(_build_tree(ordered, data.lengths[ordered].tolist(), [-1, *depths]))


def count_shared(data: BatchRows, rows: Sequence[int]) -> np.ndarray:
    """Count for each row how many leading tokens it shares with the row before it in `rows`; 0 if the row before it is
    of another group."""
    found, order = np.zeros(len(rows), np.int64), np.asarray(rows, np.int64)
    if len(rows) < 2:
        return found
    begins, lengths, groups = data.offsets[:-1][order], data.lengths[order], data.groups[order]
    most = np.where(groups[1:] == groups[:-1], np.minimum(lengths[1:], lengths[:-1]), 0)
    pair = np.repeat(np.arange(len(most)), most)
    step = np.arange(len(pair)) - np.repeat(np.cumsum(most) - most, most)
    differs = np.flatnonzero(data.tokens[begins[:-1][pair] + step] != data.tokens[begins[1:][pair] + step])[::-1]
    found[1:] = most
    found[1 + pair[differs]] = step[differs]  # of several values for a pair, numpy keeps the last, the smallest
    return found


def _sort_by_tokens(data: BatchRows, rows: Sequence[int]) -> list[int]:
    """Sort rows by group, then by their tokens as a dictionary sorts words."""
    words = data.tokens.astype(">i4").tobytes()  # the bytes of big-endian numbers sort like the numbers
    ends, groups = (4 * data.offsets).tolist(), data.groups.tolist()
    return sorted(map(int, rows), key=lambda row: (groups[row], words[ends[row] : ends[row + 1]], row))


def _build_tree(rows: Sequence[int], lengths: Sequence[int], depths: Sequence[int]) -> _Node:
    """Build the prefix tree of sorted rows. `depths` gives the depth at which each row leaves the row before it."""
    path = [_Node(-1, 0, [])]
    for row, length, depth in zip(rows, lengths, depths, strict=True):
        while path[-1].depth > depth:
            _close(path)
        if path[-1].depth < depth:
            last = path[-1].parts.pop()
            fork = _Node(depth, last.longest, [last])
            path[-1].parts.append(fork)
            path.append(fork)
        path[-1].parts.append(_Node(length, length, [], row))
        path[-1].longest = max(path[-1].longest, length)
    while len(path) > 1:
        _close(path)
    return path[0]


def _close(path: list[_Node]) -> None:
    """Remove the deepest fork from the path."""
    closed = path.pop()
    path[-1].longest = max(path[-1].longest, closed.longest)


def _walk(root: _Node) -> list[int]:
    """Return the rows of a tree, in depth-first order. The branch with the longest row comes first."""
    found, left = list[int](), [root]
    while left:
        node = left.pop()
        if node.row >= 0:
            found.append(node.row)
        left += sorted(node.parts, key=lambda part: part.longest)
    return found
