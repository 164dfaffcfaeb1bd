"""README's tables of measurements, made from data/measurements; tools/readme.py puts them in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from glm5lab.gpu_check.soak import AT_ONCE, MEAN, WORST
from glm5lab.views.kernel_charts import CASE, remarks, speed_table
from glm5lab.views.measurements import measurements, origin
from glm5lab.views.roofline import compile_table

OURS = "glm5lab"
BLOCKS = "GGUF blocks"  # the form of a product that the engine takes
Json = Mapping[str, Any]


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *([str(c) for c in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def link(name: str) -> str:
    """A measurement as a link, with where and when it was made."""
    return f"[{name}.json](data/measurements/{name}.json): {origin(measurements(name))}"


def number(value: float) -> str:
    """A measured value with as many digits as say something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def sparse_mla() -> str:
    """Microseconds a call of sparse MLA beside its peers, a table a row format and heads."""
    measured = measurements("kernels")
    parts = [f"Microseconds a call, top-k 2048. {link('kernels')}."]
    for rows, heads in (("bf16", 8), ("fp8_ds_mla", 8), ("bf16", 64), ("fp8_ds_mla", 64)):
        table = speed_table(measured, rows, heads)
        names = [*table.columns[:-1], "memory alone"]
        lines = [
            (tokens, *map(number, values))
            for tokens, *values in table.itertuples(index=True, name=None)
        ]
        parts.append(markdown([f"{rows} rows, {heads} heads: tokens", *names], lines))
        parts.append(f"Relative errors, at most: {_errors(measured, rows, heads)}.")
        parts += [f"{remark}." for remark in remarks(measured, rows, heads)]
    return "\n\n".join([*parts, details("The same as code for sm_120, on an H200", _as_sm120())])


def _errors(measured: Json, rows: str, heads: int) -> str:
    """The greatest error of each kernel in a table."""
    largest: dict[str, float] = {}
    for row in measured["rows"]:
        if CASE.fullmatch(row["case"]) and row["case"].startswith(f"{rows}, {heads} heads"):
            largest[row["name"]] = max(largest.get(row["name"], 0.0), row["error"])
    return ", ".join(f"{name} {error:.4f}" for name, error in largest.items())


def _as_sm120() -> str:
    """Microseconds of our kernels with 8 heads, and of the others, compiled as for SM120."""
    measured = measurements("kernels_sm120")
    tables = [speed_table(measured, rows, 8)[OURS] for rows in ("bf16", "fp8_ds_mla")]
    lines = [(n, *(number(table[n]) for table in tables)) for n in tables[0].index]
    others = "; ".join(
        f"{row['case']}: {_named(row)}"
        for row in measured["rows"]
        if not CASE.match(row["case"]) and row["name"] != f"{OURS} in 99 KiB"
    )
    table = markdown(("8 heads: tokens", "bf16 rows", "fp8_ds_mla rows"), lines)
    note = (
        "Tiles and parts are those of SM120, whose multiprocessor holds two programs in 100 KiB, "
        "with the H200's 132 multiprocessors; as many run at once as an H200 holds. This says "
        "nothing of the speed of an SM120 GPU."
    )
    return f"{link('kernels_sm120')}. {note}\n\n{table}\n\n{others}."


def other_kernels() -> str:
    """Every other case of `kernels.json`: ours and each peer."""
    cases: dict[str, list[Json]] = {}
    for row in measurements("kernels")["rows"]:
        if not CASE.fullmatch(row["case"]) and "us" in row:
            cases.setdefault(row["case"], []).append(row)
    lines, said = [], []
    for case, rows in cases.items():
        peers = [row for row in rows if not row["name"].startswith(OURS)]
        mine = [row for row in rows if row["name"].startswith(OURS)]
        cells = ["; ".join(_named(row) for row in side) for side in (mine, peers)]
        lines.append((case, *cells))
        said += [f"{case}, {row['name']}: {row['remark']}." for row in mine if "remark" in row]
    return "\n\n".join([markdown(("case, microseconds", OURS, "peers"), lines), *said])


def _named(row: Json) -> str:
    name = row["name"].removeprefix(OURS).lstrip(", ")
    return f"{name} {number(row['us'])}".strip()


def weights() -> str:
    """Products with GGUF blocks, and in brackets the same with bf16, where they were measured."""
    measured = measurements("gguf_weights")
    table: dict[str, dict[str, dict[str, str]]] = {}
    for row in measured["rows"]:
        product, tokens = row["case"].rsplit(", ", 1)
        table.setdefault(product, {}).setdefault(tokens, {})[row["name"]] = number(row["us"])
    columns = list(dict.fromkeys(tokens for cells in table.values() for tokens in cells))
    lines = [
        (product, *(_pair(cells.get(n, {})) for n in columns)) for product, cells in table.items()
    ]
    said = f"Products with GGUF blocks, and (with bf16). {link('gguf_weights')}."
    headings = ("product, microseconds", *columns)
    return "\n\n".join([said, markdown(headings, lines), *_remarks(measured)])


def _pair(cell: Mapping[str, str]) -> str:
    """Of one product: each form's time, other forms by their first word, plain bf16 in brackets."""
    own = "; ".join(
        value if name == BLOCKS else f"{name.split()[0]} {value}"
        for name, value in cell.items()
        if name != "bf16"
    )
    return f"{own} ({cell['bf16']})" if "bf16" in cell else own


def gguf_layers() -> str:
    """Two layers of GLM-5's size, loaded from blocks: errors, memory beside the plan, bytes."""
    measured = measurements("gguf_layers")
    one, two, bound = measured["one_gpu"], measured["two_gpus"], measured["bound"]
    errors, planned = one["errors"].values(), one["planned_bytes"]
    shares = [read / two["file_bytes"] for read in two["bytes_read"]]
    over = one["gpu_bytes"] / planned
    taken = sum(one["parameter_bytes"]) / planned
    said = (
        f"A dense layer and a layer of 256 experts at GLM-5's sizes, a file of "
        f"{one['file_bytes'] / 1e9:.1f} GB in Q4_K and Q6_K: their outputs in vLLM's engine have "
        f"relative errors of {min(errors):.3f} to {max(errors):.3f} against float64 (bound "
        f"{bound}). Parameters take {taken:.3f} times the {planned / 1e9:.2f} GB that `plan` "
        f"counts, all that the GPU holds then {over:.3f} times; the host needs "
        f"{one['host_bytes'] / 1e9:.2f} GB more while loading. Two ranks read "
        f"{' and '.join(f'{share:.3f}' for share in shares)} of the file. {link('gguf_layers')}."
    )
    return "\n\n".join([said, *_remarks(measured)])


def gguf_engines() -> str:
    """Log-probabilities of engines whose weights stay blocks, beside what bf16 alone costs."""
    measured = measurements("gguf_engines")
    said = (
        f"Mean distance of log-probabilities in vLLM's engine, small models. The bound of a row is "
        f"{measured['bound']:.0f} times its first figure, what bf16 alone costs: kernels of blocks "
        f"round activations to 8 bits besides. "
        f"{link('gguf_engines')}."
    )
    columns = {"bf16": "numbers in bf16 to HF", "blocks": "blocks to HF"}
    columns |= {"tp_2": "blocks, TP 2 to one GPU", "ep_2": "blocks, TP 2 with EP to one GPU"}
    lines = [(row["kind"], *(f"{row[name]:.3f}" for name in columns)) for row in measured["rows"]]
    return "\n\n".join([said, markdown(("file", *columns.values()), lines), *_remarks(measured)])


def answers() -> str:
    """Mean distances of log-probabilities: ours to natives, and natives to each other."""
    measured = measurements("backend_answers")
    mean = measured["mean"]
    engines = {n: value for n, value in mean.items() if "HF" not in n and value is not None}
    ours = [value for name, value in engines.items() if name.startswith("ours and ")]
    natives = [v for name, v in engines.items() if name.startswith("natives") and "fp8" not in name]
    said = (
        f"Mean distance of log-probabilities over the prompt tokens, in vLLM's engine: ours to "
        f"a native backend {min(ours):.3f} to {max(ours):.3f}, natives to each other or to "
        f"themselves in another mode {min(natives):.3f} to {max(natives):.3f}. "
        f"{verdict(measured)} {link('backend_answers')}."
    )
    late = [facts.get("compiled_while_serving", 0) for facts in measured["engines"].values()]
    own = sum(facts.get("of_these_ours", 0) for facts in measured["engines"].values())
    said += (
        f" While they served, {own or 'none'} of glm5lab's kernels were compiled; vLLM's own were, "
        f"up to {max(late)} of them in {sum(n > 0 for n in late)} of {len(late)} engines."
    )
    cells = [(n, "-" if value is None else f"{value:.4f}") for n, value in mean.items()]
    table = markdown(("compared", "mean"), cells)
    return "\n\n".join([said, details("all comparisons", table), *_remarks(measured)])


def verdict(measured: Json) -> str:
    """Whether ours is within the bounds, what is beyond them, what was not judged, what failed."""
    failed = {n: facts["error"] for n, facts in measured["engines"].items() if "error" in facts}
    beyond = [text for text in measured["wrong"] if text not in map(": ".join, failed.items())]
    said = f"Beyond a bound: {'; '.join(beyond)}." if beyond else "All that is judged is in bounds."
    if measured["unjudged"]:
        said += f" Not judged: {', '.join(measured['unjudged'])}."
    for name, error in failed.items():
        last = re.sub(r"^\[rank\d+\]: ", "", error.rpartition(" | ")[2])
        said += f" The engine {name} failed: {last}."
    return said


def soak() -> str:
    """What many requests with random aborts showed, beside the bounds."""
    measured = measurements("backend_soak")
    among, memory = measured["among"], measured["memory_mib"]
    last, flat = memory[-1]
    samples = sum(count for _, count in memory)
    after = "the same" if measured["same"] else "others"
    return (
        f"- `glm5lab backends soak`: {measured['sent']:,} requests of random lengths, {AT_ONCE} at "
        f"a time, for {measured['seconds']:.0f} s; {measured['aborted']} were aborted. The fixed "
        f"sample's tokens were {after} afterwards. Among the requests it was answered "
        f"{among['answers']:,} times, {among['equal']} of them with the tokens that it has alone: "
        f"experts near a tie change with the batch. Log-probabilities of those answers are "
        f"{among['mean']:.3f} from what the same tokens have alone (bound {MEAN}), in the worst "
        f"answer {among['worst']:.3f} ({WORST}). PyTorch's memory: {last:,} MiB in the last {flat} "
        f"of {samples} samples, {memory[0][0]:,} at the start. {link('backend_soak')}."
    )


def engine_speed() -> str:
    """Milliseconds a token and to the first one: the latest run of each format, others folded."""
    measured = measurements("backend_speed")
    tables = ["\n\n".join([_speed_of(run), *_remarks(run)]) for run in measured["runs"]]
    return "\n\n".join(
        [
            f"Medians in vLLM's engine, 8 heads. {link('backend_speed')}.",
            *tables[:2],
            details("Runs before that", "\n\n".join(tables[2:])),
            "Of all runs:",
            *_remarks(measured),
        ]
    )


def _speed_of(run: Json) -> str:
    """A table, an engine a row."""
    engines: Mapping[str, Json] = run["engines"]
    some = next(iter(engines.values()))
    counts, lengths = list(some["ms_per_token"]), list(some["first_ms"])
    headings = [f"{run['layers']} layers"]
    headings += [f"ms a token, {n} at once" for n in counts]
    headings += [f"ms to the first token of {int(n):,}" for n in lengths]
    lines = [
        (
            name,
            *(number(engine["ms_per_token"][n]["median"]) for n in counts),
            *(number(engine["first_ms"][n]["median"]) for n in lengths),
        )
        for name, engine in engines.items()
    ]
    return markdown(headings, lines)


def _remarks(document: Json) -> list[str]:
    return ["\n".join(f"- {text}" for text in document["remarks"])] if "remarks" in document else []


def details(summary: str, text: str) -> str:
    """Text that GitHub folds away."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def compiled() -> str:
    """What SM120 gives and each kernel takes."""
    document = measurements("compile_sm120")
    table = compile_table(document)
    lines = [
        (name, n, f"{shared:,}", f"{limit:,}", registers, stack, "yes" if fits else "no")
        for name, n, shared, limit, registers, stack, fits in table.itertuples(name=None)
    ]
    headings = ("kernel", "configurations", "shared memory, bytes", "of", "registers", "stack")
    return f"{link('compile_sm120')}.\n\n" + markdown((*headings, "fits"), lines)


def cpu() -> str:
    """The reader beside gguf-py's, and the doctor on logs of a GB."""
    reader, doctor = measurements("reader"), measurements("doctor")
    ours, theirs, logs = reader["ours"], reader["theirs"], doctor["logs"].values()
    cores = doctor["cpu"]["cores"]
    return "\n".join(
        [
            f"- The table of a set of {reader['set']['files']} files and "
            f"{reader['set']['tensors']:,} tensors: {ours['seconds']:.1f} s and "
            f"{ours['mb']:.0f} MB; gguf-py's GGUFReader {theirs['seconds']:.0f} s and "
            f"{theirs['mb']:.0f} MB. [reader.json](data/measurements/reader.json), "
            f"{reader['cpu']['cores']} cores, {reader['date']}.",
            f"- `doctor` on logs of 1 GB: {_range(logs, 'cpu_s')} s of one core, "
            f"{_range(logs, 'seconds')} s of the clock at a load of "
            f"{doctor['load_average']:.0f}, {_range(logs, 'mb')} MB. "
            f"[doctor.json](data/measurements/doctor.json), {cores} cores, {doctor['date']}.",
        ]
    )


def _range(logs: Iterable[Json], key: str) -> str:
    values = [log[key] for log in logs]
    return f"{min(values):.0f} to {max(values):.0f}"


TABLES: dict[str, Callable[[], str]] = {
    "sparse-mla": sparse_mla,
    "other-kernels": other_kernels,
    "weights": weights,
    "gguf-layers": gguf_layers,
    "gguf-engines": gguf_engines,
    "answers": answers,
    "soak": soak,
    "engine-speed": engine_speed,
    "compiled": compiled,
    "cpu": cpu,
}
