"""Which row uses which slot: the batch of the moment, and the adapter names a patched model holds."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_epilora.ops import Groups

_MAX_CACHED = 16


class AdapterBatch:
    """Slots of a batch's rows, and the operators' metadata for every number of rows they meet.

    Parameters
    ----------
    slots : sequence of int
        [n]; -1 is the bare base. Each entry covers an equal run of consecutive rows.
    num_slots : int
        Slots of the model's banks.
    """

    def __init__(self, slots: Sequence[int], num_slots: int) -> None:
        self.num_slots = max(num_slots, 1)
        self.used = frozenset(slots) - {-1}
        # Outside of inference mode, here and below: autograd must be able to save these when a later forward trains.
        with torch.inference_mode(False):
            self.no_adapter = torch.tensor([not self.used], device="cpu")
            self.slots = {torch.device("cpu"): torch.tensor(slots, dtype=torch.int32, device="cpu")}
        self._cache: dict[tuple[int, torch.device], Groups] = {}

    def prepare(self, device: torch.device) -> None:
        """Copy the slots to a device ahead of a forward there."""
        if device not in self.slots:
            with torch.inference_mode(False):
                self.slots[device] = next(iter(self.slots.values())).to(device)

    def groups(self, x: Tensor) -> Groups:
        """Metadata of an input's rows.

        Parameters
        ----------
        x : Tensor
            [K], [rows, K] or [rows, ..., K].

        Returns
        -------
        Groups
            For x flattened to [M, K].

        Raises
        ------
        ValueError
            If neither the rows are a multiple of the entries nor the tokens as many as them.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.prepare(x.device)
        slots = self.slots[x.device]
        entries = slots.shape[0]
        tokens = x.shape[:-1].numel()
        rows = x.shape[0] if x.dim() > 2 else tokens
        if rows % entries != 0 and tokens != entries:
            raise ValueError(
                f"names: {entries} entries were given to adapters(), but a layer got {rows} rows ({tokens} tokens); "
                "expected one entry a row, rows that are a multiple of them (beams, return sequences), or one a token."
            )
        if compiling:
            return self._make(slots, tokens)
        found = self._cache.get((tokens, x.device))
        return found if found is not None else self._build(slots, tokens)

    def _make(self, slots: Tensor, tokens: int) -> Groups:
        tokens_by_slot, ids, counts, starts = torch.ops.epilora.adapter_groups(slots, tokens, self.num_slots)
        return Groups(tokens_by_slot, ids, counts, starts, self.no_adapter)

    def _build(self, slots: Tensor, tokens: int) -> Groups:
        with torch.inference_mode(False):
            groups = self._make(slots, tokens)
        # What is built during a capture holds nothing until the graph runs, so it must not serve anyone else.
        if not (slots.is_cuda and torch.cuda.is_current_stream_capturing()):
            if len(self._cache) >= _MAX_CACHED:
                self._cache.pop(next(iter(self._cache)))
            self._cache[tokens, slots.device] = groups
        return groups


class AdapterState:
    """What all projections of a patched model share: the adapters' names, and the batch of the moment.

    The batch is a plain attribute of the model's state, not a context variable: ``torch.compile`` can then guard on it
    and autograd's threads see it. Threads that share a model therefore share its batch; give each its own model, or
    take turns.

    Parameters
    ----------
    num_slots, max_rank : int
        Capacity of the banks.
    """

    def __init__(self, num_slots: int, max_rank: int) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank
        self.slots: dict[str, int] = {}
        self.version = 0  # counts changes of adapters and weights
        self.bare = AdapterBatch([-1], num_slots)
        self.base = self.bare  # of rows outside of any context
        self.batch = self.base
        self.recorded = self.base  # of the last forward that autograd recorded
        self.traced: list[tuple[AdapterBatch, int, Groups]] | None = None  # of the model's forward being compiled

    def use_by_default(self, slot: int) -> None:
        """Choose the slot of all rows outside of any context; -1 is the bare base."""
        old, self.base = self.base, AdapterBatch([slot], self.num_slots)
        for device in old.slots:
            self.base.prepare(device)
        if self.batch is old:
            self.batch = self.base

    def groups(self, batch: AdapterBatch, x: Tensor) -> Groups:
        """Metadata of an input's rows under a batch; one compiled forward of the model makes it once."""
        if self.traced is None or not torch.compiler.is_dynamo_compiling():
            return batch.groups(x)
        tokens = x.shape[:-1].numel()
        for of, count, groups in self.traced:
            if of is batch and count == tokens and groups.ids.device == x.device:
                return groups
        groups = batch.groups(x)
        self.traced.append((batch, tokens, groups))
        return groups

    def current(self) -> AdapterBatch:
        """Return the batch of this forward.

        Raises
        ------
        RuntimeError
            If gradient checkpointing recomputes a forward outside of its ``adapters()`` context.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.batch
        if torch._C._current_graph_task_id() == -1:
            self.recorded = self.batch
        elif self.batch is not self.recorded and self.batch is self.base:
            raise RuntimeError(
                "adapters: a checkpointed forward is recomputed outside of the adapters() context it ran in, so its "
                "adapters are not known. Call backward() inside the context."
            )
        return self.batch

    def __getstate__(self) -> dict[str, Any]:
        """Leave the context out: copies start outside of any."""
        return {**self.__dict__, "batch": self.base, "recorded": self.base}


class TraceStart:
    """Forward pre-hook of a patched model: while dynamo traces it, its layers share the batch's metadata."""

    def __init__(self, state: AdapterState) -> None:
        self.state = state

    def __call__(self, *_: object) -> None:
        """Begin to share."""
        if torch.compiler.is_dynamo_compiling():
            self.state.traced = []


class TraceEnd:
    """Forward hook of a patched model: nothing of the traced forward stays behind."""

    def __init__(self, state: AdapterState) -> None:
        self.state = state

    def __call__(self, *_: object) -> None:
        """Cease to share."""
        if torch.compiler.is_dynamo_compiling():
            self.state.traced = None
