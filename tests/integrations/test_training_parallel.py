"""Training on several processes: DDP and FSDP2 give the gradients of one process, over gloo on the CPU."""

import copy
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import torch_epilora as te
from tests.nn.helpers import llama

pytest.importorskip("peft")
from peft import LoraConfig, get_peft_model

PROCESSES = 2


def gradients_apart(rank: int, kind: str, port: int) -> None:
    """Compare a process's gradients with those of the whole batch; fails where they differ."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)
    base = te.patch(llama(), base="fp8", compute="w8a16", max_adapters=0)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    alone = copy.deepcopy(model)
    ids = torch.randint(3, 90, (2 * PROCESSES, 6))
    alone(input_ids=ids, labels=ids).loss.backward()
    want = {name: p.grad for name, p in alone.named_parameters() if p.requires_grad}
    mine = ids[2 * rank : 2 * rank + 2]
    if kind == "ddp":
        # every process made the same codes, and gloo sends no e4m3
        parallel = torch.nn.parallel.DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)
        parallel(input_ids=mine, labels=mine).loss.backward()
        got = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        model(input_ids=mine, labels=mine).loss.backward()
        got = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.requires_grad}
    assert got.keys() == want.keys() and len(want) >= 28
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_processes_have_the_gradients_of_one(kind: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(gradients_apart, (kind, port), nprocs=PROCESSES)
