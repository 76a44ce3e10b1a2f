"""Causal self-attention over a real document that is split over the ranks, checked against one device in float64.

The bytes of the document are the tokens. Every rank embeds its own tokens (fixed seed), projects them to queries, keys
and values on its NPU, and takes part in ring attention. Afterwards each rank computes its rows once more, in float64
from the keys of the whole document with the plain formula; the largest difference of all ranks decides.

    python launch.py -n 4 examples/ring_attention.py [TEXTFILE] [--tokens N] [--layout zigzag] [--json]
    python launch.py -n 4 --trace trace.json examples/ring_attention.py      # open in https://ui.perfetto.dev
    mpirun -n 4 python examples/ring_attention.py                            # a plain MPI launcher works as well
    python examples/ring_attention.py                                        # a world of one rank

Without TEXTFILE the document is the English help that ships with Python (`pydoc_data.topics`).
Exit status 1 when the error is larger than the element type's rounding allows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import hccl
from device import DeviceArray, dtype
from device.kernels import matmul
from parallel import LAYOUTS, positions, ring_attention

EMBEDDING = 256  # width of the embedding; the vocabulary is the 256 byte values
SEED = 20240229


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("textfile", nargs="?", type=Path, help="document (default: Python's help topics)")
    parser.add_argument("--tokens", type=int, default=4096, help="use at most so many bytes of it (%(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="query heads (%(default)s)")
    parser.add_argument("--kv-heads", type=int, help="key and value heads (as many as query heads)")
    parser.add_argument("--dim", type=int, default=64, help="size of a head (%(default)s)")
    parser.add_argument(
        "--layout", choices=list(LAYOUTS), default="zigzag", help="who holds which tokens (%(default)s)"
    )
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True, help="mask the future")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32", "float64"], default="float32")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args = parser.parse_args(argv)
    args.kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    if args.textfile is not None and not args.textfile.is_file():
        parser.error(f"no such file: {args.textfile}")
    if min(args.tokens, args.heads, args.kv_heads, args.dim) < 1:
        parser.error("--tokens, --heads, --kv-heads and --dim are at least 1")
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads} is not a multiple of --kv-heads {args.kv_heads}")
    return args


def read_document(path: Path | None) -> bytes:
    """Return the text as bytes."""
    if path is not None:
        return path.read_bytes()
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values()).encode()


def share_tokens(comm: hccl.Communicator, args: argparse.Namespace) -> np.ndarray:
    """Read the document on rank 0, give it to every rank: (tokens,) uint8."""
    document = np.frombuffer(read_document(args.textfile), np.uint8)[: args.tokens] if comm.rank == 0 else None
    length = comm.device.array(np.array([0 if document is None else document.size], np.int64))
    length = int(comm.broadcast(length, root=0).numpy()[0])
    if length == 0:
        raise SystemExit("the document is empty")
    tokens = comm.device.empty((length,), "uint8") if document is None else comm.device.array(document)
    return comm.broadcast(tokens, root=0).numpy()


def embed(tokens: np.ndarray, places: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Turn bytes at their places into vectors: embedding plus sinusoids of the place, normalised; no two are alike."""
    rates = 10_000.0 ** (-np.arange(0, EMBEDDING, 2) / EMBEDDING)
    angles = places[:, None] * rates
    x = table[tokens] + np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)


def project(x: DeviceArray, weights: np.ndarray) -> DeviceArray:
    """Multiply (1, tokens, width) by (heads, width, dim) on the device: (1, heads, tokens, dim)."""
    device, tokens = x.device, x.shape[1]
    heads, _, dim = weights.shape
    out = device.empty((heads, tokens, dim), x.dtype)
    device.launch(matmul, x, device.array(weights.astype(x.dtype)), out=out)
    return out.reshape(1, heads, tokens, dim)


def gather(comm: hccl.Communicator, x: np.ndarray, places: list[np.ndarray]) -> np.ndarray:
    """Bring all shards (1, heads, tokens, dim) together in the order of the document."""
    longest = max(len(p) for p in places)
    padded = np.zeros((1, x.shape[1], longest, x.shape[3]), x.dtype)
    padded[:, :, : x.shape[2]] = x
    parts = comm.all_gather(comm.device.array(padded)).numpy()
    whole = np.empty((1, x.shape[1], sum(len(p) for p in places), x.shape[3]), x.dtype)
    for part, place in zip(parts, places, strict=True):
        whole[0][:, place] = part[:, : len(place)]
    return whole


def exact_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, places: np.ndarray, causal: bool) -> np.ndarray:
    """Attention by its definition, in float64: rows `places` of what one device with the whole sequence would give."""
    q, k, v = (x[0].astype(np.float64) for x in (q, k, v))
    out = np.empty(q.shape)
    for head in range(len(q)):
        shared = head * len(k) // len(q)
        for start in range(0, len(places), 512):
            rows = slice(start, start + 512)
            scores = q[head, rows] @ k[shared].T / np.sqrt(q.shape[-1])
            if causal:
                scores[np.arange(scores.shape[1]) > places[rows, None]] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[head, rows] = weights @ v[shared] / weights.sum(axis=1, keepdims=True)
    return out[None]


def measure(comm: hccl.Communicator, args: argparse.Namespace) -> dict[str, Any]:
    """Do the job; return the same report on every rank."""
    kind = dtype(args.dtype).numpy
    tokens = share_tokens(comm, args)
    places = [positions(len(tokens), rank, comm.size, args.layout) for rank in range(comm.size)]
    mine = places[comm.rank]

    rng = np.random.default_rng(SEED)
    x = embed(tokens[mine], mine, rng.standard_normal((256, EMBEDDING)))
    x = comm.device.array(x[None].astype(kind))
    heads = (args.heads, args.kv_heads, args.kv_heads)
    q, k, v = (project(x, rng.standard_normal((n, EMBEDDING, args.dim)) / np.sqrt(EMBEDDING)) for n in heads)

    stream = comm.device.default_stream
    comm.barrier()  # all ranks start together, in virtual and in wall time
    stream.synchronize()
    sent = comm.bytes_sent()
    start_s, computed_s, waited_s = stream.now_s, stream.compute_s, stream.wait_s
    wall_start_s = time.perf_counter()
    out = ring_attention(q, k, v, comm, causal=args.causal, layout=args.layout, seq_len=len(tokens))
    stream.synchronize()
    wall_s = time.perf_counter() - wall_start_s
    virtual_s, compute_s, wait_s = stream.now_s - start_s, stream.compute_s - computed_s, stream.wait_s - waited_s
    comm_s = sum(s.comm_s for s in comm.device.streams if s is not stream)  # ring_attention's own stream
    links = [comm.bytes_sent().get(peer, 0) - sent.get(peer, 0) for peer in range(comm.size)]

    keys, values = (gather(comm, part.numpy(), places) for part in (k, v))
    exact = exact_attention(q.numpy(), keys, values, mine, args.causal)
    error = np.abs(out.numpy().astype(np.float64) - exact).max(initial=0.0)
    largest = np.abs(exact).max(initial=0.0)

    row = np.array([[error, largest, len(mine), virtual_s, compute_s, comm_s, wait_s, wall_s, *links]], np.float64)
    table = comm.all_gather(comm.device.array(row)).numpy()
    named = dict(zip(("error", "largest", "held", "virtual", "compute", "comm", "wait", "wall"), table.T, strict=False))
    traffic = table[:, -comm.size :].astype(np.int64)
    limits = {"float64": 1e-12, "float32": 2e-6}  # half types: the one rounding of the result, and a little
    tolerance = limits.get(args.dtype) or _epsilon(kind) / 2 * named["largest"].max() + 2e-6
    return {
        "ranks": comm.size,
        "tokens": len(tokens),
        "heads": args.heads,
        "kv_heads": args.kv_heads,
        "dim": args.dim,
        "dtype": args.dtype,
        "layout": args.layout,
        "causal": args.causal,
        "max_abs_error": float(named["error"].max()),
        "tolerance": float(tolerance),
        "bytes_sent_per_rank": int(traffic.sum(axis=1).max()),
        "bytes_by_link": {f"{s}->{d}": int(traffic[s, d]) for s, d in zip(*np.nonzero(traffic), strict=True)},
        "tokens_by_rank": named["held"].astype(int).tolist(),
        "virtual_s": float(named["virtual"].max()),
        "virtual_s_by_rank": named["virtual"].tolist(),
        "compute_s_by_rank": named["compute"].tolist(),
        "communication_s_by_rank": named["comm"].tolist(),
        "wait_s_by_rank": named["wait"].tolist(),
        "wall_s": float(named["wall"].max()),
    }


def _epsilon(kind: Any) -> float:
    """Distance of 1 to the next larger number."""
    one = np.ones((), kind)
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[kind.itemsize]
    return float((one.view(bits) + bits(1)).view(kind).astype(np.float64) - 1.0)


def show(report: dict[str, Any]) -> None:
    """Print the report as tables."""
    summary = Table(title="Ring attention", show_header=False)
    causal = "causal" if report["causal"] else "full"
    heads = f"{report['heads']} heads, {report['kv_heads']} for keys and values, of {report['dim']}"
    for name, value in (
        ("tokens", f"{report['tokens']:,}"),
        ("ranks", str(report["ranks"])),
        ("attention", f"{causal}, {heads}, {report['dtype']}, {report['layout']}"),
        ("max error", f"{report['max_abs_error']:.2e} against float64 on one device (limit {report['tolerance']:.1e})"),
        ("virtual time", f"{report['virtual_s'] * 1e6:.1f} µs on {report['ranks']} NPUs"),
        ("wall time", f"{report['wall_s'] * 1e3:.1f} ms here"),
    ):
        summary.add_row(name, value)
    ranks = Table(title="Virtual time by rank")
    for column in ("rank", "tokens", "link", "bytes sent", "time µs", "compute", "wait", "communication"):
        ranks.add_column(column, justify="right")
    for rank, tokens in enumerate(report["tokens_by_rank"]):
        total_s = report["virtual_s_by_rank"][rank]
        sent = {link: n for link, n in report["bytes_by_link"].items() if link.startswith(f"{rank}->")}
        shares = [
            f"{report[f'{name}_s_by_rank'][rank] / total_s:.0%}" if total_s else "-"
            for name in ("compute", "wait", "communication")
        ]
        links = "\n".join(sent) or "-", "\n".join(f"{n:,}" for n in sent.values()) or "-"
        ranks.add_row(str(rank), str(tokens), *links, f"{total_s * 1e6:.1f}", *shares)
    ranks.caption = "communication has its own stream, beside computing; wait is the part that stayed exposed"
    console = Console()
    console.print(summary)
    console.print(ranks)


def main(argv: list[str] | None = None) -> int:
    """Run on this rank; return the exit status."""
    args = parse(argv)
    with hccl.init() as comm:
        report = measure(comm, args)
        if comm.rank == 0:
            if args.json:
                print(json.dumps(report))
            else:
                show(report)
    if report["max_abs_error"] <= report["tolerance"]:
        return 0
    if comm.rank == 0:
        print(f"error {report['max_abs_error']:.2e} exceeds {report['tolerance']:.2e}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
