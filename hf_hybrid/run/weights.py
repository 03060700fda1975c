"""
The trained weights of a run: where they are stored, which rows of them this process holds, and sums over all of them.

Everything in this package that reads or moves weights, gradients or optimizer states goes through [`TrainedWeights`].
It names them, and finds the optimizer's group and state of each. Three questions are answered by objects of their own.

Where are they stored? Mostly on the device that computes with them ([`InPlace`]). Streamed layers are stored on the
host, and copies of them compute on the device. Modules of FSDP2 compute with weights that they gathered ([`Gathered`]).
The store is notified before weights are read and after they were written.

Which part of them does this process hold? All of it with one process, and under DDP ([`Whole`]). FSDP2 (torch's
`fully_shard`) cuts every parameter, its gradient and its optimizer states along the first dimension, and each process
holds a shard, some rows of each ([`Shards`]: a `DTensor`, placed as `Shard(0)`). Most arithmetic of a leap is
elementwise: averages, preconditioners, snapshots and the move itself need only the shards of the process. Three things
need the other processes:

1. Sums. The norm of a leap, its cap, the predicted fall of the loss and the cosines are sums over all weights.
   [`Shards.totals`] adds up any number of them with one all-reduce. Every process gets the same bits, so all processes
   take the same decisions.
2. Whole matrices. A matrix cannot be orthogonalised by rows. With N processes, [`Shards.in_rounds`] takes N matrices at
   a time. Each process gets one whole matrix from the others, computes, and sends every process its shard of the
   result. So a process does 1/N of the arithmetic, and the processes together send 2 (N - 1) / N times the bytes of a
   matrix. Gathering it on every process would send N - 1 times its bytes, and repeat the arithmetic N times.
3. Copies. After a forward pass without backward some modules keep the weights that they gathered (the last norm and the
   head do). The next pass would silently use these old weights and miss the leap. So [`Gathered`] makes every module
   drop them whenever a leap has written weights.

Checkpoints hold whole tensors, whatever the number of processes. So a run can be resumed with another number of
processes.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from hf_hybrid.machine import LeapObstacleError, PendingRead
from hf_hybrid.optimizers import LIBRARIES, package_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# Sums over many tensors, with a single synchronisation and without temporaries of their size.


def sums_of_squares(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the sum of the squares of each tensor that is not sparse."""
    return [sum_of_squares(t) for t in tensors if not t.is_sparse]


def inner_product(first: Tensor, second: Tensor) -> Tensor:
    """Inner product of two tensors of one shape."""
    return torch.dot(first.reshape(-1), second.reshape(-1))


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Sum of the squares of the elements of one tensor, in fp32."""
    flat = tensor.float().reshape(-1)
    return torch.dot(flat, flat)  # several times faster than a norm on the CPU, and without a temporary


def totals(lists: list[list[Tensor]]) -> Tensor:
    """Return the sum of each list of scalars, 0 for an empty list. All scalars of a device travel together."""
    scalars, places = [scalar for scalars in lists for scalar in scalars], defaultdict[torch.device, list[int]](list)
    for place, scalar in enumerate(scalars):
        places[scalar.device].append(place)
    together = torch.empty(len(scalars))
    for of_device in places.values():
        together[of_device] = torch.stack([scalars[place].float() for place in of_device]).cpu()
    return torch.stack([part.sum() for part in together.split([*map(len, lists)])])


def totals_later(lists: list[list[Tensor]]) -> Callable[[], Tensor]:
    """Order these sums of scalars of one device, and return a function that waits for them."""
    look, sizes = (
        PendingRead(torch.stack([scalar.float() for scalars in lists for scalar in scalars])),
        [*map(len, lists)],
    )
    return lambda: torch.stack([part.sum() for part in torch.tensor(look.read()).split(sizes)])


# Which part of the weights is here.


def canonical(name: str) -> str:
    """Return the name of a parameter without what the activation checkpointing of accelerate adds to it."""
    return name.replace("_checkpoint_wrapped_module.", "")


def shards_of(parameters: Sequence[nn.Parameter]) -> Whole:
    """Return [`Shards`] if any of the parameters is spread over processes, otherwise [`Whole`]."""
    parameters = list(parameters)
    return Shards(parameters) if any(map(_is_spread, parameters)) else Whole(parameters)


def _is_spread(value: Any) -> TypeGuard[DTensor]:
    return getattr(value, "device_mesh", None) is not None


class Whole:
    """Parameters that this process has whole."""

    processes = 1
    """How many processes share the parameters."""

    def __init__(self, originals: list[nn.Parameter]):
        self.originals = originals
        """The parameters of the model, which the optimizer knows."""
        self.parameters: Sequence[Tensor] = originals
        """What this process holds of each parameter, with its `grad`."""
        self.bytes_sent = 0
        """Bytes that this process has sent to others."""

    def shape(self, index: int) -> torch.Size:
        """Return the shape of a whole parameter."""
        return self.originals[index].shape

    def totals(self, lists: list[list[Tensor]]) -> Tensor:
        """Return the sum of each list of scalars over all processes, on the host; 0 for an empty list."""
        return totals(lists)

    def totals_later(self, lists: list[list[Tensor]]) -> Callable[[], Tensor]:
        """Order these sums of at least one scalar, and return a function that waits for them."""
        if len({scalar.device for scalars in lists for scalar in scalars}) == 1:
            return totals_later(lists)
        sums = totals(lists)
        return lambda: sums

    def whole(self, index: int, tensor: Tensor) -> Tensor:
        """
        Return the whole of a tensor that is shaped as this process's part of a parameter, on the first process; an
        empty tensor on others. All processes must call this.
        """
        return tensor.contiguous()

    def part(self, index: int, tensor: Tensor) -> Tensor:
        """Return this process's part of what [`whole`] returned."""
        return tensor


class Shards(Whole):
    """Parameters of which each process holds some rows: `DTensor`s placed as `Shard(0)` on one mesh, or refused."""

    def __init__(self, originals: list[nn.Parameter]):
        import torch.distributed as distributed  # some builds of torch lack it
        from torch.distributed.tensor import Shard

        super().__init__(originals)
        self._distributed = distributed
        mesh = next(p for p in originals if _is_spread(p)).device_mesh
        for parameter in originals:
            if not _is_spread(parameter) or parameter.device_mesh != mesh or parameter.placements != (Shard(0),):
                how = f"placed as {parameter.placements}" if _is_spread(parameter) else "whole on each process"
                raise LeapObstacleError(
                    f"A parameter of shape {tuple(parameter.shape)} is {how}, and leaps take weights that FSDP2 cuts "
                    "along the first dimension, all of them over the same processes.",
                    "Drop `ignored_modules`, hybrid sharding and tensor parallelism.",
                )
        self._group, self._device = mesh.get_group(), torch.device(mesh.device_type)
        self._rank, self.processes = mesh.get_local_rank(), mesh.size()
        self.parameters = _Parts(originals)

    def totals(self, lists: list[list[Tensor]]) -> Tensor:
        sums = totals(lists).to(self._device, torch.float64)
        self._distributed.all_reduce(sums, group=self._group)
        return sums.float().cpu()

    def totals_later(self, lists: list[list[Tensor]]) -> Callable[[], Tensor]:
        sums = self.totals(lists)
        return lambda: sums

    def _rows(self, shape: torch.Size) -> list[int]:
        """Return how many rows each process holds. The last ones may hold less than others, or nothing."""
        most = -(-shape[0] // self.processes)
        return [max(min(most, shape[0] - process * most), 0) for process in range(self.processes)]

    def in_rounds(
        self, tasks: Iterable[tuple[Any, torch.Size, Tensor]], function: Callable[[Any, Tensor], Tensor]
    ) -> Iterator[tuple[Any, Tensor]]:
        """
        Apply a function to whole matrices. Yield key and this process's rows of each result, in any order.

        A task is key and shape of a matrix, and the rows of it that this process holds. All processes pass the same
        keys and shapes in the same order. The function takes a key and a whole matrix (fp32, on the device of the
        mesh), and returns a matrix of the same shape.
        """
        # Matrices of a round cost about the same, so that no process waits long for another.
        ordered = sorted(tasks, key=lambda task: min(task[1]) * task[1].numel(), reverse=True)
        for first in range(0, len(ordered), self.processes):
            in_turn = ordered[first : first + self.processes]
            parts = [rows.to(self._device, torch.float32).reshape(-1) for _, _, rows in in_turn]
            give = [part.numel() for part in parts] + [0] * (self.processes - len(parts))
            key, shape, _ = in_turn[self._rank] if self._rank < len(in_turn) else (None, torch.Size([0, 0]), None)
            take = [rows * shape[1] for rows in self._rows(shape)]
            matrix = self._exchange(torch.cat(parts), give, take).view(shape)
            result = function(key, matrix).reshape(-1) if shape.numel() else matrix.reshape(-1)
            back = self._exchange(result, take, give).split(give)
            for (key, _, rows), part in zip(in_turn, back):
                yield key, part.view(rows.shape).to(rows.device)

    def _exchange(self, tensor: Tensor, give: list[int], take: list[int]) -> Tensor:
        """Send the next `give[p]` elements of a flat tensor to process `p`; return `take[p]` elements from each."""
        taken = tensor.new_empty(sum(take))
        self._distributed.all_to_all_single(taken, tensor, take, give, group=self._group)
        self.bytes_sent += (sum(give) - give[self._rank]) * tensor.element_size()
        return taken

    def whole(self, index: int, tensor: Tensor) -> Tensor:
        if tensor.shape != self.parameters[index].shape:
            raise ValueError(
                f"A buffer of shape {tuple(tensor.shape)} cannot be saved under FSDP2, where buffers of a `Direction` "
                f"must be shaped as the part of a parameter that is held here ({tuple(self.parameters[index].shape)})."
            )
        parts: list[Any] | None = [None] * self.processes if self._rank == 0 else None
        flat = tensor.detach().cpu().reshape(-1).clone()  # a view would be sent with all of its storage
        self._distributed.gather_object(flat, parts, group=self._group, group_dst=0)
        if parts is None:
            return tensor.new_empty(0, device="cpu")
        return torch.cat(parts).view(self.shape(index))

    def part(self, index: int, tensor: Tensor) -> Tensor:
        return tensor.split(self._rows(self.shape(index)))[self._rank]


class _Parts(Sequence[Tensor]):
    """
    What this process holds of each parameter: a plain tensor in the parameter's own memory, and its gradient likewise,
    made when it is asked for, because FSDP2 may move the memory between two steps.
    """

    def __init__(self, originals: list[nn.Parameter]):
        self._originals: list[Any] = originals  # `DTensor`s

    def __len__(self) -> int:
        return len(self._originals)

    @torch.no_grad()
    def __getitem__(self, index: int) -> Tensor:  # ty: ignore[incompatible-method-override]  # nobody slices
        original = self._originals[index]
        part = original.to_local().detach()
        if original.grad is not None:
            part.grad = original.grad.to_local()
        return part


# Where they are stored.


class InPlace:
    """Weights that compute where they are stored."""

    def holds(self, parameter: torch.nn.Parameter) -> bool:
        """Whether copies of a parameter compute in its place."""
        return False

    def finish_updates(self) -> None:
        """Finish updates that are under way. Called before weights or optimizer states are read."""

    def changed(self) -> None:
        """Called after weights were written, or after the leap under test changed: copies of them are out of date."""


IN_STEP = "_is_fsdp_managed_module"
"""Attribute with which `generate` goes on until all processes have ended."""


class Gathered(InPlace):
    """Weights of FSDP2, whose modules compute with weights that they gathered. Leaps are written into shards."""

    def __init__(self, model: nn.Module):
        from torch.distributed.fsdp import FSDPModule

        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.changed()  # an evaluation before the run may have left gathered weights in the place of shards

    def changed(self) -> None:
        for module in self._modules:
            module.reshard()


@contextlib.contextmanager
def gathered(model: Any) -> Generator[None]:
    """
    Inside, this process holds the weights of a model whole that FSDP2 shards: passes send nothing, and processes may
    compute different numbers of them. All processes enter together.
    """
    store = Gathered(model)
    model._get_fsdp_state()._lazy_init()  # otherwise the first pass does it, and decides what the root keeps
    groups = {id(group): group for module in store._modules if (group := module._get_fsdp_state()._fsdp_param_group)}
    reshards = {key: group.post_forward_mesh_info for key, group in groups.items()}
    model.set_reshard_after_forward(False)
    # `Trainer` has made it a pass, which gathers the root's weights. An exception would leave that pass open.
    generate = vars(model).pop("generate") if package_of(vars(model).get("generate")) in LIBRARIES else None
    in_step = [module for module in model.modules() if getattr(module, IN_STEP, False)]
    try:
        for module in store._modules:
            module.unshard()
        for module in in_step:
            setattr(module, IN_STEP, False)
        yield
    finally:
        for module in in_step:
            setattr(module, IN_STEP, True)
        if generate is not None:
            model.generate = generate
        for key, group in groups.items():
            group.post_forward_mesh_info = reshards[key]
        store.changed()


# All of it.


class TrainedWeights:
    """
    The trainable weights of a run, with the unwrapped optimizer that moves them; parameters that it does not move are
    left out. `store` is where they are stored, by default where they compute.

    Attributes:
        names (`list[str]`): Names in the model; every `index` counts in this list.
        shards (`Whole`): The parameters. It finds what lies on other processes.
        parameters (`Sequence[torch.Tensor]`): What this process holds of each, with its gradient.
        groups (`list[int]`): Index of each parameter's group in `optimizer.param_groups`.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        store: InPlace | None = None,
    ):
        group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        moved = [(name, parameter) for name, parameter in parameters if id(parameter) in group_of]
        self.names = [name for name, _ in moved]
        self.shards = shards_of([parameter for _, parameter in moved])
        self.parameters = self.shards.parameters
        self.groups = [group_of[id(parameter)] for _, parameter in moved]
        self.optimizer = optimizer
        self.store = store or InPlace()
        self.scratches: dict[torch.device, Tensor] = {}

    def group(self, index: int) -> dict[str, Any]:
        """The parameter group of a parameter."""
        return self.optimizer.param_groups[self.groups[index]]

    def state(self, index: int) -> Mapping[str, Any]:
        """The optimizer's state of a parameter; empty before its first update."""
        state = self.optimizer.state.get(self.shards.originals[index], {})
        if not isinstance(self.shards, Shards):
            return state
        return {name: value.to_local() if _is_spread(value) else value for name, value in state.items()}

    def scratch(self, like: Tensor, device: torch.device) -> Tensor:
        """A view of one fp32 buffer per device that all parameters share; it lasts until the next call."""
        if device not in self.scratches:
            # Allocated once: a new tensor per parameter costs more than the arithmetic on it.
            size = max(parameter.numel() for parameter in self.parameters)
            self.scratches[device] = torch.empty(size, dtype=torch.float32, device=device)
        return self.scratches[device][: like.numel()].view(like.shape)

    def whole(self, kinds: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """
        Return whole tensors for a checkpoint, keyed `kind.parameter`, from lists with one per parameter or none. All
        processes must call this. Where they share the weights, the first one gets the tensors.
        """
        return {
            f"{kind}.{name}": self.shards.whole(index, tensor)
            for kind, tensors in kinds.items()
            for index, (name, tensor) in enumerate(zip(self.names, tensors))
        }

    def in_order(self, tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return this process's parts of what [`whole`] returned, by kind, if they are of the model's parameters."""
        kinds: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            kind, name = key.split(".", 1)
            kinds.setdefault(kind, {})[name] = tensor
        for saved in kinds.values():
            if unknown := sorted(saved.keys() ^ set(self.names)):
                raise ValueError(
                    "The hybrid state of the checkpoint belongs to other parameters "
                    f"(`{unknown[0]}` is only in one of them). "
                    "Resume with the model, adapters and trainable layers of the run that wrote it."
                )
        return {
            kind: [self.shards.part(index, saved[name]) for index, name in enumerate(self.names)]
            for kind, saved in kinds.items()
        }

    @torch.no_grad()
    def are_finite(self) -> bool:
        """Whether no weight is NaN or infinite: one pass over them, and one host synchronisation."""
        self.store.finish_updates()
        squares = self.shards.totals([sums_of_squares(parameter.detach() for parameter in self.parameters)])
        return bool(torch.isfinite(squares))
