"""Which row uses which slot: the batch of the moment, and the adapter names a patched model holds."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_epilora.ops import Groups

_MAX_CACHED = 16


def capturing(device: torch.device) -> bool:
    """Say whether what runs on the device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> int:
    """Return the stream of now; tensors made on one may be read on another only after an event, so none are."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


class AdapterBatch:
    """Slots of a batch's rows, and the operators' metadata for every number of rows they meet.

    Parameters
    ----------
    slots : sequence of int
        [n]; -1 is the bare base. Each entry covers an equal run of consecutive rows.
    num_slots : int
        Slots of the model's banks.
    chosen : mapping of str to int
        The adapters among them by name, each with its slot.
    """

    def __init__(self, slots: Sequence[int], num_slots: int, chosen: Mapping[str, int] | None = None) -> None:
        self.num_slots = max(num_slots, 1)
        self.used = frozenset(slots) - {-1}
        self.chosen = dict(chosen or {})
        self.captured = False  # by a CUDA graph, which goes on reading the metadata at every replay
        # Outside of inference mode, here and below: autograd must be able to save these when a later forward trains.
        with torch.inference_mode(False):
            self.no_adapter = torch.tensor([not self.used], device="cpu")
            self._host = torch.tensor(slots, dtype=torch.int32, device="cpu")
        self.slots = {self._host.device: self._host}  # on the stream that prepared them; what compiled graphs read
        self._on_stream = {(self._host.device, 0): self._host}
        self._cache: dict[tuple[int, torch.device, int], Groups] = {}

    def prepare(self, device: torch.device) -> Tensor:
        """Copy the slots to a device ahead of a forward there on this stream; does not wait for the copy."""
        key = (device, _stream(device))
        if key not in self._on_stream:
            if device.type == "cuda" and not self._host.is_pinned():
                self._host = self._host.pin_memory()
            with torch.inference_mode(False):
                self._on_stream[key] = self._host.to(device, non_blocking=device.type == "cuda")
            self.slots.setdefault(device, self._on_stream[key])
        return self._on_stream[key]

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
        device = x.device
        # A compiled graph guards on what it reads: only the tensor that is its input.
        entries = (self.slots[device] if compiling else self._host).shape[0]
        tokens = x.shape[:-1].numel()
        rows = x.shape[0] if x.dim() > 2 else tokens
        if rows % entries != 0 and tokens != entries:
            raise ValueError(
                f"names: {entries} entries were given to adapters(), but a layer got {rows} rows ({tokens} tokens); "
                "expected one entry a row, rows that are a multiple of them (beams, return sequences), or one a token."
            )
        if compiling:
            return self._make(self.slots[device], tokens)
        found = self._cache.get((tokens, device, _stream(device)))
        return found if found is not None else self._build(device, tokens)

    def _make(self, slots: Tensor, tokens: int) -> Groups:
        tokens_by_slot, ids, counts, starts = torch.ops.epilora.adapter_groups(slots, tokens, self.num_slots)
        return Groups(tokens_by_slot, ids, counts, starts, self.no_adapter)

    def _build(self, device: torch.device, tokens: int) -> Groups:
        if capturing(device):
            # A capture starts after a synchronization, so what another stream made before is ready; what is built
            # during it holds nothing until the graph runs, so it must not serve anyone else.
            for (count, where, _), groups in self._cache.items():
                if count == tokens and where == device:
                    return groups
            with torch.inference_mode(False):
                return self._make(self.slots[device] if device in self.slots else self.prepare(device), tokens)
        with torch.inference_mode(False):
            groups = self._make(self.prepare(device), tokens)
        if len(self._cache) >= _MAX_CACHED and not self.captured:
            self._cache.pop(next(iter(self._cache)))
        self._cache[tokens, device, _stream(device)] = groups
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
        self.batch = self.base  # in force: that of the last open context, or the base
        self.captured: list[AdapterBatch] = []  # CUDA graphs read their metadata for as long as the model lives
        self.traced: list[tuple[AdapterBatch, int, Groups]] | None = None  # of the model's forward being compiled
        self.followed = 0  # calls under a checkpoint function that knows its batch
        self._open: list[AdapterBatch] = []
        # Of forwards that may be recomputed in backward, under hooks or not: up to two batches they ran under.
        self._runs: dict[bool, list[AdapterBatch]] = {True: [], False: []}
        self._recomputed: set[bool] = set()

    def enter(self, batch: AdapterBatch) -> None:
        """Put a batch in force until it leaves.

        Raises
        ------
        RuntimeError
            If its adapters were unloaded since it was made: their slots may hold others now.
        """
        gone = [name for name, slot in batch.chosen.items() if self.slots.get(name) != slot]
        if gone:
            raise RuntimeError(f"adapters: expected the adapters of the forward, {gone} were unloaded since it ran.")
        self._open.append(batch)
        self.batch = batch

    def leave(self, batch: AdapterBatch) -> None:
        """Take a batch out of force, whether or not others entered after it."""
        last = max(i for i, entered in enumerate(self._open) if entered is batch)
        del self._open[last]
        self.batch = self._open[-1] if self._open else self.base

    def in_use(self, slot: int) -> bool:
        """Say whether an open context, or the rows outside of any, use a slot."""
        return any(slot in batch.used for batch in (self.base, *self._open))

    def use_by_default(self, name: str | None) -> None:
        """Choose the adapter of all rows outside of any context; None is the bare base."""
        old, self.base = self.base, self.bare
        if name is not None:
            slot = self.slots[name]
            self.base = AdapterBatch([slot], self.num_slots, {name: slot})
        for device in old.slots:
            self.base.prepare(device)
        if not self._open:
            self.batch = self.base

    def forget_adapters(self) -> None:
        """Free every slot, after their contents are gone."""
        self.slots.clear()
        self.use_by_default(None)

    def groups(self, batch: AdapterBatch, x: Tensor) -> Groups:
        """Metadata of an input's rows under a batch; one compiled forward of the model makes it once."""
        if self.traced is None or not torch.compiler.is_dynamo_compiling():
            if not torch.compiler.is_compiling() and capturing(x.device) and not batch.captured:
                batch.captured = True
                self.captured.append(batch)
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

        A function that the caller checkpoints on its own is recomputed in backward under the batch in force there. That
        is the right one only if no other batch ran since the last recomputation; anything else is refused.

        Raises
        ------
        RuntimeError
            If gradient checkpointing recomputes a forward under a batch that may not be its own.
        """
        if torch.compiler.is_compiling() or self.followed or torch.is_inference_mode_enabled():
            return self.batch
        grad = torch.is_grad_enabled()
        # Checkpointing runs the forward under hooks for saved tensors or, reentrant, without gradients, and backward
        # alike but with gradients.
        hooked = grad and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if grad and torch._C._current_graph_task_id() != -1:
            self._recomputed.add(hooked)
            if self._runs[hooked] != [self.batch]:
                raise RuntimeError(
                    "adapters: a checkpointed forward is recomputed outside of the adapters() context it ran in, or "
                    "after forwards under others, so its adapters are not known. Call backward() inside the context, "
                    "before another one's forward, with use_reentrant=False; or let the model checkpoint "
                    "(gradient_checkpointing_enable), which follows its batch."
                )
        elif hooked or not grad:
            self._note_run(hooked)
        return self.batch

    def _note_run(self, hooked: bool) -> None:
        runs = self._runs[hooked]
        if hooked in self._recomputed:
            self._recomputed.remove(hooked)
            runs.clear()
        if self.batch not in runs and len(runs) < 2:
            runs.append(self.batch)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the context out: copies start outside of any."""
        fresh: dict[str, Any] = {"_open": [], "captured": [], "followed": 0, "_recomputed": set()}
        return {**self.__dict__, **fresh, "batch": self.base, "_runs": {True: [], False: []}}
