"""Counts CUDA graph re-instantiations and uploads while a batch changes inside one bucket.

    python benchmarks/count_graphs.py --out graphs.json

The engine's own scheduler, runner and step loop over Llama-3.1-8B shapes with random weights: requests come, cross
pages and end; the batch wanders between half of its places and all of them, after a warm-up that visits every batch
size. Two processes run the same traffic:

- `driver`, 2,000 turns: with the graph counter preloaded, which counts cuGraphInstantiate*, cuGraphExecUpdate and its
  failures, cuGraphLaunch, managed allocations, prefetches, and the bytes of copies (benchmarks/graph_counter).
- `cupti`, 400 turns, as its records slow every launch down: with CUPTI's records of managed-memory migrations, page
  faults and copies, which is where an upload shows under MLX; then a few turns with a record a kernel: kernels and
  kernel time of a step (benchmarks/cupti_trace). CUPTI sometimes kills its process: that is run once more, which
  `retried` says with how the first one ended, and if it dies again without the records of migrations.

Each ends within its share of `--time-limit-s`, with fewer turns if need be, and says how many it counted. The JSON is
written after each; one that failed says how, and by which signal, beside the other's result.

Counts are kept apart for steady turns (the rows of the turn before, nothing prefilled) and for turns in which requests
came or went. Wanted: no instantiation in any turn, no byte from host to device in steady ones.

The engine reads a step's tokens through page-locked memory (mlxcel_paged/engine/token_reader.py), so that steady turns
need no managed memory. Where it cannot, `tolist()` makes MLX move the array there: a managed allocation of its size and
a copy of as many bytes without a direction, once a buffer, as the buffer is recycled
(`CudaAllocator::move_to_unified_memory`). From then on its page migrates down for the host's read and up for the next
step's write, once a turn each. `managed_memory_only_read` tells that from an upload, an allocation that the host fills
and that comes without such a copy. Arrays of up to 8 bytes lie in a small pool of managed memory that the device writes
without moving it.
"""

from __future__ import annotations

import argparse
import bisect
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graph_counter
from gpu_needs import require_mlx_gpu
from run_record import write_run
from step_cells import SHAPES, TARGET_SHAPE

SCRIPT = Path(__file__)
MODES = ("driver", "cupti")
# Of the time that is left, for the driver's process; the rest is CUPTI's.
DRIVER_SHARE = 0.6
# From a process's deadline to the end of its life: what it still writes and frees.
GRACE_S = 8.0
# A turn's kernels run while the next turns are prepared, so what CUPTI sees after a change is counted with the change.
SETTLING_TURNS = 2


def count(options: argparse.Namespace, folder: Path) -> None:
    """One process: builds the core, warms up, counts. Prints what it has as JSON, a line each time there is more."""
    deadline = time.monotonic() + options.seconds
    counters = graph_counter.Counters.loaded() if options.mode == "driver" else None
    trace = None
    migrations = "not asked for"
    if options.mode == "cupti":
        from cupti_trace import MEMCPY, CuptiTrace, CuptiUnavailableError

        ctypes.CDLL("libcuda.so.1").cuInit(0)
        trace = CuptiTrace(folder)
        if options.migrations == "on":
            try:
                trace.count_migrations()
                migrations = "counted"
            except CuptiUnavailableError as error:  # copies and kernels are still worth having
                migrations = str(error)
    from mlxcel_paged import blas

    blas.prepare()
    import mlx.core as mx
    from traffic import Traffic, build_core

    core = build_core(
        SHAPES[options.shape],
        device=options.device,
        bits=options.bits,
        batch=options.batch,
        page_size=options.page_size,
        max_context=2048,
        budget_bytes=options.budget_mb << 20,
    )
    traffic = Traffic(core, batch=options.batch, prompt_tokens=options.prompt_tokens, page_size=options.page_size)
    stage("warm-up")
    warm_turns = traffic.warm_up()
    mx.synchronize()
    stage("counting")
    if trace:
        trace.enable(MEMCPY)
        trace.clear()
    finished_before = traffic.num_finished
    sums: dict[str, Counter[str]] = {"steady": Counter(), "changed": Counter()}
    turns: dict[str, int] = {"steady": 0, "changed": 0}
    sizes: Counter[int] = Counter()
    crossings = prefills = 0
    instantiated_at: list[int] = []
    starts: list[int] = []
    kinds: list[str] = []
    began = time.perf_counter()
    before = counters.snapshot() if counters else {}
    for index in range(options.steps):
        if time.monotonic() > deadline:
            break
        if trace:
            starts.append(trace.now_ns())
        turn = traffic.turn()
        kind = "steady" if turn.is_steady else "changed"
        kinds.append(kind)
        turns[kind] += 1
        sizes[turn.num_rows] += 1
        crossings += turn.num_crossings
        prefills += turn.has_prefill
        if counters:
            counted = counters.since(before)
            before = counters.snapshot()
            sums[kind].update(counted)
            if counted.get("graph_instantiations"):
                instantiated_at.append(index)
    mx.synchronize()
    seconds = time.perf_counter() - began
    result: dict[str, Any] = {
        "mode": options.mode,
        "migrations": migrations,
        "cupti": trace.path if trace else None,
        "turns_wanted": options.steps,
        "turns": turns,
        "batch_sizes": dict(sorted(sizes.items())),
        "warm_up_turns": warm_turns,
        "page_crossings": crossings,
        "turns_with_prefill": prefills,
        "requests_finished": traffic.num_finished - finished_before,
        "launches": core.runner.outcomes(),
        "ms_per_turn": round(seconds / max(1, len(kinds)) * 1e3, 3),
    }
    if trace:
        stage("reading records")
        sums = attribute(trace, starts, kinds)
    else:
        result["instantiated_at"] = instantiated_at[:50]
    result["counted"] = {kind: dict(total) for kind, total in sums.items()}
    print(json.dumps(result), flush=True)
    if trace and time.monotonic() < deadline:
        stage("tracing kernels")
        result["kernels"] = kernels_of(trace, traffic, options.traced_steps)
        print(json.dumps(result), flush=True)


def stage(name: str) -> None:
    """Says on stderr how far a process is, for the one that has to tell why it died."""
    print(f"stage: {name}", file=sys.stderr, flush=True)


def attribute(trace: Any, starts: list[int], kinds: list[str]) -> dict[str, Counter[str]]:
    """CUPTI's migrations and copies, summed by the kind of the turn in which they happened."""
    from cupti_trace import COPY_DETAILS, MEMCPY, MIGRATION, MIGRATION_DETAILS

    settled = [
        "steady" if all(kind == "steady" for kind in kinds[max(0, index - SETTLING_TURNS) : index + 1]) else "changed"
        for index in range(len(kinds))
    ]
    sums: dict[str, Counter[str]] = {"steady": Counter(), "changed": Counter()}
    sums["steady"]["turns"] = settled.count("steady")
    sums["changed"]["turns"] = settled.count("changed")
    for record in trace.records():
        turn = settled[max(0, bisect.bisect_right(starts, record.start_ns) - 1)]
        if record.kind == MIGRATION:
            # A CPU page fault's value is a program counter.
            name = MIGRATION_DETAILS[record.detail]
            sums[turn][f"migrated_{name}" if name.endswith("bytes") else name] += (
                1 if name == "cpu_page_faults" else record.value
            )
        elif record.kind == MEMCPY:
            direction = COPY_DETAILS.get(record.detail, f"kind_{record.detail}")
            sums[turn][f"copied_{direction}_bytes"] += record.value
            sums[turn][f"copies_{direction}"] += 1
    return sums


def kernels_of(trace: Any, traffic: Any, num_turns: int) -> dict[str, Any]:
    """Kernels of some further turns."""
    import mlx.core as mx
    from cupti_trace import KERNEL, kernel_summary

    mx.synchronize()
    trace.enable(KERNEL)
    trace.clear()
    turns = [traffic.turn() for _ in range(num_turns)]
    mx.synchronize()
    steady = sum(turn.is_steady for turn in turns)
    return {"turns": num_turns, "of_them_steady": steady, **kernel_summary(trace.records(), num_turns)}


def verdicts(results: list[dict[str, Any]]) -> dict[str, bool | None]:
    """Whether each target holds; None where nothing was measured."""
    found: dict[str, bool | None] = {
        "no_instantiation": None,
        "nothing_copied_up": None,
        "managed_memory_only_read": None,
        "nothing_migrated_up": None,
    }
    for result in results:
        if "failed" in result:
            continue
        counted = result["counted"]
        if result["mode"] == "driver" and (counted["steady"].get("graph_launches") or 0) > 0:
            found["no_instantiation"] = not any(part.get("graph_instantiations") for part in counted.values())
            found["nothing_copied_up"] = not counted["steady"].get("htod_bytes")
            found["managed_memory_only_read"] = moved_for_reads(counted["steady"])
        if result["mode"] == "cupti" and result["migrations"] == "counted":
            steady = counted["steady"]
            found["nothing_migrated_up"] = not (steady.get("migrated_htod_bytes") or steady.get("copied_htod_bytes"))
    return found


def moved_for_reads(steady: dict[str, int]) -> bool:
    """Whether every managed allocation came with a copy into it, as those for the host's reads do; none is as good."""
    pairs = (("managed_allocs", "undirected_copies"), ("managed_alloc_bytes", "undirected_bytes"))
    return all(steady.get(allocated, 0) == steady.get(copied, 0) for allocated, copied in pairs)


def remarks(results: list[dict[str, Any]]) -> list[str]:
    """What the steady turns' managed allocations were, in words."""
    said = []
    for result in results:
        if result["mode"] != "driver" or "failed" in result:
            continue
        steady, num_turns = result["counted"]["steady"], result["turns"]["steady"]
        allocations, size = steady.get("managed_allocs", 0), steady.get("managed_alloc_bytes", 0)
        cause = (
            "each with a copy of as many bytes: tokens that the host read, moved there by MLX once a buffer"
            if moved_for_reads(steady)
            else f"but {steady.get('undirected_copies', 0)} copies of {steady.get('undirected_bytes', 0)} bytes into"
            " them: some were filled by the host"
        )
        said.append(
            f"{num_turns} steady turns: {steady.get('graph_launches', 0)} graph launches,"
            f" {steady.get('htod_bytes', 0)} bytes copied from host to device, {allocations} managed allocations of"
            f" {size} bytes in all" + (f", {cause}" if allocations else "")
        )
    return said


def cause_of_death(code: int, stderr: str) -> str:
    """Why a process ended as it did: its signal or status, how far it was, and its last words."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    lines = stderr.splitlines()
    stages = [line.removeprefix("stage: ") for line in lines if line.startswith("stage: ")]
    words = "\n".join(line for line in lines if not line.startswith("stage: "))[-1500:]
    return f"{how} during {stages[-1] if stages else 'start'}" + (f": {words}" if words else "")


def run_mode(options: argparse.Namespace, mode: str, folder: Path, seconds: float, migrations: str) -> dict[str, Any]:
    """One process of one mode; what it printed last, and why it ended if it did not end well."""
    environment = dict(os.environ)
    if mode == "driver":
        try:
            environment = graph_counter.preload(graph_counter.build(folder))
        except (OSError, subprocess.SubprocessError) as error:
            return {"mode": mode, "failed": f"the graph counter cannot be built: {error}"}
    steps = options.steps if mode == "driver" else options.cupti_steps
    own = ["--mode", mode, "--seconds", str(seconds - GRACE_S), "--steps", str(steps), "--migrations", migrations]
    command = [sys.executable, "-X", "faulthandler", str(SCRIPT), *sys.argv[1:], *own]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    ended = ""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        ended = f"no end within {seconds:.0f} s: "
    printed = [line for line in stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(printed[-1]) if printed else {"mode": mode}
    if process.returncode:
        # What was counted before the end counts.
        result["ended" if printed else "failed"] = ended + cause_of_death(process.returncode, stderr)
    if process.returncode < 0 and not ended:
        result["signal"] = signal.Signals(-process.returncode).name
    return result


def run_cupti(options: argparse.Namespace, folder: Path, deadline: float) -> dict[str, Any]:
    """CUPTI's mode: once more if the process dies of a signal, then without the records of migrations."""
    result = run_mode(options, "cupti", folder, deadline - time.monotonic(), "on")
    retried: list[dict[str, Any]] = []
    if "failed" in result and "signal" in result and deadline - time.monotonic() > 2 * GRACE_S:
        retried.append({key: result[key] for key in ("failed", "signal")})
        result = run_mode(options, "cupti", folder, deadline - time.monotonic(), "on")
    if "failed" in result and deadline - time.monotonic() > 2 * GRACE_S:
        without = run_mode(options, "cupti", folder, deadline - time.monotonic(), "off")
        if "failed" not in without:
            result = without | {"migrations": f"with their records: {result['failed']}"}
    return result | ({"retried": retried} if retried else {})


def run_modes(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The result of every mode in turn, within the time limit."""
    deadline = time.monotonic() + options.time_limit_s
    modes = options.modes.split(",")
    for mode in modes:
        if mode == "cupti":
            yield run_cupti(options, folder, deadline)
        else:
            left = deadline - time.monotonic()
            yield run_mode(options, mode, folder, DRIVER_SHARE * left if len(modes) > 1 else left, "on")


def write(options: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Writes the modes that have run so far. A mode whose time ran out before its turns leaves the run incomplete."""
    num_modes = len(options.modes.split(","))
    are_whole = all("failed" in result or sum(result["turns"].values()) == result["turns_wanted"] for result in results)
    document = {
        "batch": options.batch,
        "steps": options.steps,
        "cupti_steps": options.cupti_steps,
        "modes_complete": len(results),
        "modes_wanted": num_modes,
        "targets": verdicts(results),
        "remarks": remarks(results),
        "results": results,
    }
    return write_run(options.out, document, complete=len(results) == num_modes and are_whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("graphs.json"))
    parser.add_argument("--steps", type=int, default=2000, help="turns that the driver's process counts")
    parser.add_argument("--cupti-steps", type=int, default=400, help="turns that CUPTI's process counts")
    parser.add_argument("--time-limit-s", type=float, default=95, help="of the whole run")
    parser.add_argument("--traced-steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8, help="places of the bucket")
    parser.add_argument("--prompt-tokens", type=int, default=33)
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--bits", type=int, default=0, choices=(0, 4, 8))
    parser.add_argument("--budget-mb", type=int, default=4096)
    parser.add_argument("--shape", default=TARGET_SHAPE, choices=SHAPES)
    parser.add_argument("--device", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--modes", help="driver, cupti or both, with a comma; both, on the CPU the driver's alone")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--migrations", choices=("on", "off"), default="on", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.modes = options.modes or ("driver" if options.device == "cpu" else ",".join(MODES))
    if unknown := set(options.modes.split(",")) - set(MODES):
        parser.error(f"--modes: unknown {', '.join(sorted(unknown))}; known: {', '.join(MODES)}")
    if options.device == "gpu" and not options.mode:
        require_mlx_gpu()
    with tempfile.TemporaryDirectory() as name:
        if options.mode:
            count(options, Path(name))
            return 0
        results: list[dict[str, Any]] = []
        for result in run_modes(options, Path(name)):
            results.append(result)
            document = write(options, results)
    print(json.dumps({key: document[key] for key in ("targets", "remarks", "results")}, indent=1))
    return 1 if any("failed" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
