"""
Graphs of recorded operations, in place of `torch.cuda.CUDAGraph` where there is no CUDA.

A graph repeats the operations that were recorded, on the same tensors and with the same numbers: what Python would have
done otherwise at a replay does not happen, as on a GPU. So a length that was an `int` when it was recorded stays what
it was, and a tensor that somebody else has let go is still written to.
"""

import contextlib
import functools

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}


class RecordedGraph:
    """As `torch.cuda.CUDAGraph`."""

    replays = 0
    """Of all graphs."""

    def __init__(self):
        self.operations = []

    def replay(self):
        RecordedGraph.replays += 1
        for function, args, kwargs, results in self.operations:
            for result, new in zip(results, _tensors(function(*args, **kwargs))):
                if result is not new:
                    result.copy_(new)


@contextlib.contextmanager
def record(graph, pool=None, stream=None, capture_error_mode="global"):
    """As `torch.cuda.graph`. What was computed meanwhile is garbage until the first replay."""
    with _Recorder(graph):
        yield
    for function, _, _, results in graph.operations:
        if not _writes(function):
            for result in results:
                result.fill_(float("nan") if result.is_floating_point() else 0)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name in READS:
            raise RuntimeError(f"{func} is not permitted when a stream is captured (recorded).")
        results = func(*args, **kwargs)
        if not _is_view(func):
            self.graph.operations.append((func, args, kwargs, _tensors(results)))
        return results


def _tensors(results):
    results = results if isinstance(results, (list, tuple)) else [results]
    return [result for result in results if isinstance(result, torch.Tensor)]


@functools.cache
def _writes(function):
    return any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in function._schema.arguments
    )


@functools.cache
def _is_view(function):
    returns = [one.alias_info for one in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)
