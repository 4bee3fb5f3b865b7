"""The layer in PyTorch, as a peer: NCCL all-to-all and grouped matrix products, a process a GPU.

  python -m jax_megamoe._bench.torch_layer --shape 2048,768,128,8 --gpus 2 --tokens 16384

prints a JSON object: for each pass "seconds", "dense_seconds" and "peak_bytes". JAX stays idle.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

# Columns of the dense product, in units of I; see _bench/layer.py.
_DENSE_COLUMNS = {"forward": 3, "backward": 8, "layer": 11}
_SKEW_EXPONENT = 0.6
_ALIGN = 8  # rows of a group: 16 bytes of bf16, which the weight gradient wants


class AllToAll(torch.autograd.Function):
    """Sends `sent[r]` rows to each rank r and receives `received[r]` of it."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.splits = received, sent
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad.contiguous(), *ctx.splits), None, None


def moe_mlp(x, ids, weights, w_gate_up, w_down):
    """The layer of one rank: x [T, H], ids and weights [T, K], w_gate_up [E_l, H, 2I]."""
    ranks, (local, _, inner) = dist.get_world_size(), w_gate_up.shape
    top_k = ids.shape[1]
    flat, order = ids.flatten().sort(stable=True)
    mine = torch.bincount(flat, minlength=ranks * local)
    theirs = torch.empty_like(mine)  # [source, local expert]
    dist.all_to_all_single(theirs, mine)
    sent = mine.view(ranks, local).sum(1).tolist()
    received = theirs.view(ranks, local).sum(1).tolist()
    rows = AllToAll.apply(x[order // top_k], sent, received)

    # From (source, expert) to (expert, source), every expert's rows aligned.
    expert = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(theirs)
    count = theirs.view(ranks, local).sum(0)
    aligned = (count + _ALIGN - 1) // _ALIGN * _ALIGN
    ends = aligned.cumsum(0)
    by_expert, source = expert.sort(stable=True)
    shift = (ends - aligned) - (count.cumsum(0) - count)
    place = torch.empty_like(source)
    place[source] = torch.arange(len(source), device=x.device) + shift[by_expert]
    pool = rows.new_zeros(len(source) + local * _ALIGN, x.shape[1]).index_copy(0, place, rows)

    offsets = ends.to(torch.int32)
    gate, up = torch._grouped_mm(pool, w_gate_up, offs=offsets).split(inner // 2, dim=1)
    hidden = torch._grouped_mm(F.silu(gate) * up, w_down, offs=offsets)
    back = AllToAll.apply(hidden[place], received, sent)
    by_slot = torch.empty_like(back).index_copy(0, order, back)
    by_token = by_slot.view(*ids.shape, x.shape[1])
    return torch.bmm(weights.to(x.dtype)[:, None], by_token)[:, 0]


def make_inputs(shape, tokens, routing, device):
    """x, ids, weights, w_gate_up, w_down and dy of one rank, as _bench/layer.py makes them."""
    hidden, inner, experts, top_k = shape
    local = experts // dist.get_world_size()
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())

    def normal(*size, fan_in=1):
        values = torch.randn(*size, generator=generator, device=device)
        return (values / fan_in**0.5).to(torch.bfloat16)

    uniform = torch.rand(tokens, experts, generator=generator, device=device)
    scores = -(-uniform.clamp(1e-30, 1 - 1e-7).log()).log()
    if routing == "skewed":
        places = torch.randperm(experts, generator=torch.Generator().manual_seed(0)).to(device)
        scores = scores - _SKEW_EXPONENT * torch.log1p(places.float())
    chosen, ids = scores.topk(top_k)
    return (
        normal(tokens, hidden),
        ids,
        chosen.softmax(1),
        normal(local, hidden, 2 * inner, fan_in=hidden),
        normal(local, inner, hidden, fan_in=inner),
        normal(tokens, hidden),
    )


def make_programs(passes, inputs):
    """The call of each pass, made when it is asked for; its results are gradients of all but ids.

    The backward pass starts from what autograd kept of the forward pass, without recomputation.
    """
    x, ids, weights, *experts, dy = inputs
    leaves = [a.requires_grad_() for a in (x, weights, *experts)]

    def forward():
        with torch.no_grad():
            return moe_mlp(x, ids, weights, *experts)

    def layer():
        return torch.autograd.grad(moe_mlp(x, ids, weights, *experts), leaves, dy)

    for name in passes:
        if name == "backward":
            y = moe_mlp(x, ids, weights, *experts)
            yield name, lambda y=y: torch.autograd.grad(y, leaves, dy, retain_graph=True)
            del y
        else:
            yield name, {"forward": forward, "layer": layer}[name]


def make_dense(name, shape, tokens, device):
    hidden, inner, _, top_k = shape
    a = torch.randn(tokens * top_k, hidden, device=device, dtype=torch.bfloat16)
    b = torch.randn(hidden, _DENSE_COLUMNS[name] * inner, device=device, dtype=torch.bfloat16)
    return lambda: a @ b


def measure(programs, rounds, turn_ms, device):
    """The median seconds of a call of each program, the slowest rank's, in turns."""
    calls = {name: max(1, math.ceil(turn_ms / 1e3 / seconds(run, 1, device, warm=True)))
             for name, run in programs.items()}  # fmt: skip
    times = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            times[name].append(seconds(run, calls[name], device))
    return {name: statistics.median(values) for name, values in times.items()}


def seconds(run, calls, device, warm=False):
    if warm:
        run()
    wait(device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait(device)
    slowest = torch.tensor((time.perf_counter() - start) / calls, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def worker(rank, options, port, results):
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=options.gpus,
    )
    inputs = make_inputs(options.shape, options.tokens, options.routing, device)
    for name, run in make_programs(options.passes, inputs):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        run()
        wait(device)
        peak = torch.cuda.max_memory_allocated() if cuda else None
        dense = make_dense(name, options.shape, options.tokens, device)
        times = measure({"layer": run, "dense": dense}, options.rounds, options.turn_ms, device)
        if rank == 0:
            results[name] = dict(
                seconds=times["layer"], dense_seconds=times["dense"], peak_bytes=peak
            )
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(prog="python -m jax_megamoe._bench.torch_layer")
    parser.add_argument("--shape", type=lambda t: tuple(map(int, t.split(","))), required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--passes", type=lambda t: t.split(","), default=list(_DENSE_COLUMNS))
    parser.add_argument("--routing", choices=("random", "skewed"), default="random")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn-ms", type=int, default=50)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(worker, (options, port, results), options.gpus)
        print(json.dumps(dict(results)))


if __name__ == "__main__":
    main()
