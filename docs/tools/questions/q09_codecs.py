"""Question 9: KV quantised on its way, in bytes, seconds and tokens that change."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from msgspec.structs import replace

from kernels_numba.codecs import CODECS, Codec
from mooncake_lite.profiles.costs import costs_of
from mooncake_lite.profiles.file import PAPER_MACHINES, MovesSection, Profile, named_profile, write_profile
from mooncake_lite.tools.bench.cluster import FOUR_RANKS, model_folder, started
from mooncake_lite.workloads.kinds import KINDS, made
from questions.frame import SEEDS, Found, Point, Rows, Seeds, simulated, table

NODES, RATE = "4P2D", 6.0
LINKS = (400, 200, 100, 60, 40, 30, 20)
KV_PAGES = 320 * 2**30
HOST_GBPS = 10.0
"""GB/s of plain KV that cores of a host encode or decode. Some GPU encodes faster than links take it."""

CODED = {"none": "gpu", "int8": "gpu", "int4": "gpu", "int8 on the host": "host"}
READ, CONTINUED = 384, 64
"""Tokens that the model reads behind each coded prefix, and that it goes on by itself."""

LIVE = ("none", "int8", "int4")
LIVE_PROMPTS, LIVE_TOKENS, LIVE_ANSWER = 8, 640, 48


def points(quick: bool) -> list[Point]:
    """Return clusters by link and codec, pieces of text for the model, the kernels, and live clusters."""
    links, seeds, requests = (LINKS[::3], SEEDS[:1], 60) if quick else (LINKS, SEEDS, 300)
    found: list[Point] = [
        {"gbps": gbps, "codec": codec, "seed": seed, "requests": requests}
        for gbps in links for codec in CODED for seed in seeds
    ]  # fmt: skip
    if quick:
        return found
    found += [{"model": "default", "seed": seed} for seed in seeds]
    found += [{"kernels": "cpu", "seed": seed, "alone": True} for seed in seeds]
    return found + [{"live": codec, "alone": True} for codec in LIVE]


def run(point: Point) -> Found:
    """Play requests on a cluster, or see what codecs do to the model."""
    if "gbps" in point:
        return _played(point)
    if "live" in point:
        return _live(point["live"])
    from questions import codecs_on_a_model

    return codecs_on_a_model.speed() if "kernels" in point else codecs_on_a_model.accuracy(point["seed"])


def _played(point: Point) -> Found:
    """Play questions about documents on machines whose KV has the encoded size.

    A row of a head is head_dim numbers of 2 bytes, or codes and scales. Pages hold plain KV, so their number
    stays. On the host, coding is what limits copies between pages and memory.
    """
    machines, codec = named_profile(PAPER_MACHINES), CODECS[point["codec"].split()[0]]
    layers, heads, dim, itemsize = machines.model.kv
    share, copy = share_of(machines, codec), costs_of(machines).load.dram_bytes_per_s
    if CODED[point["codec"]] == "host":
        copy = min(copy, 1e9 * HOST_GBPS * share)
    model = replace(machines.model, kv=[layers, heads, codec.unit_nbytes(1, dim, itemsize), 1])
    moves = replace(machines.moves or MovesSection(), dram_bytes_per_s=copy)
    trace = made(KINDS["rag"], point["requests"], RATE, point["seed"])
    with TemporaryDirectory(prefix="mooncake-lite-question-") as place:
        file = Path(place) / "coded.json"
        write_profile(file, replace(machines, model=model).with_section("moves", moves))
        return simulated(
            trace, point["seed"], profile=file, nodes=NODES, link_gbps=point["gbps"],
            kv_cache_bytes=int(KV_PAGES * share),
        )  # fmt: skip


def share_of(machines: Profile, codec: Codec) -> float:
    """Return the bytes of KV behind a codec, as a share of plain ones."""
    *_, dim, itemsize = machines.model.kv
    return codec.unit_nbytes(1, dim, itemsize) / (dim * itemsize)


def _live(codec: str) -> Found:
    """Ask a cluster of the default model twice for the same answers: then their KV comes from the pool."""
    from questions.codecs_on_a_model import pieces

    text = [token for piece in pieces(4) for token in piece]
    prompts = [text[LIVE_TOKENS * number :][:LIVE_TOKENS] for number in range(LIVE_PROMPTS)]
    flags = ["--kv-codec", codec, "--prefix-sharing", "off", "--threads", "1", "--admission", "none"]
    with started([str(model_folder(None)), *FOUR_RANKS, *flags]) as cluster:
        texts = [[_text(cluster.base_url, prompt) for prompt in prompts] for _ in range(2)]
        lines = httpx.get(f"{cluster.base_url}/metrics").text.splitlines()
    [visible] = (line.split()[-1] for line in lines if line.startswith("mooncake_lite_pool_visible_bytes"))
    return {"cold": texts[0], "warm": texts[1], "pool_bytes": float(visible)}


def _text(url: str, prompt: list[int]) -> str:
    body = {"prompt": prompt, "max_tokens": LIVE_ANSWER, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    return str(answer["choices"][0]["text"])


def numbers(rows: Rows) -> dict[str, Any]:
    """Return the numbers of the page. Times of answers are ratios to those without a codec."""
    found, lines, links = dict[str, Any](), [], rows.values("gbps")
    for gbps in links:
        whole, gaps = (
            {codec: rows.seeds(f"{name}.mean", gbps=gbps, codec=codec) for codec in CODED}
            for name in ("e2e_s", "tbt_s")
        )
        found |= {f"{_key(codec)}_{gbps}": whole[codec].over(whole["none"]) for codec in CODED}
        found |= {f"{_key(codec)}_tbt_{gbps}": gaps[codec].over(gaps["none"]) for codec in CODED}
        found |= {f"over_{gbps}": whole["int4"].over(whole["int8"])}
        cells = [f"{whole[codec]:.2f} s, {1000 * gaps[codec].middle:.0f} ms" for codec in CODED]
        lines.append([f"{gbps}", *cells])
    pays = [gbps for gbps in links if found[f"int8_{gbps}"].middle < 0.95]
    finer = [gbps for gbps in links if found[f"over_{gbps}"].middle < 0.95]
    cheap = [gbps for gbps in links if found[f"host_{gbps}"].middle < 1]
    machines = named_profile(PAPER_MACHINES)
    share, copy = share_of(machines, CODECS["int8"]), 1e-9 * costs_of(machines).load.dram_bytes_per_s
    closed = 8 * (1 - share) / (1 / HOST_GBPS - 1 / copy)
    return found | _of_model(rows) | _of_live(rows) | {
        "table": table(["link, Gbit/s", *CODED], lines), "pays": max(pays, default=0),
        "finer": max(finer, default=0), "cheap": max(cheap, default=0), "closed": closed,
        "share": share, "host_gbps": HOST_GBPS, "copy_gbps": copy,
        "dearest": min(gbps for gbps in links if gbps > max(cheap, default=0)),
        "requests": rows[0][0]["requests"], "nodes": NODES, "rate": RATE, "seeds": len(SEEDS),
        "widest": links[0], "narrowest": links[-1],
    }  # fmt: skip


def _key(codec: str) -> str:
    return "host" if CODED[codec] == "host" else codec


def _of_model(rows: Rows) -> dict[str, Any]:
    """Return what codecs do to the model, and how long kernels take."""
    found, lines, others, plain = dict[str, Any](), [], [], 46_080.0
    read, greedy = READ * len(SEEDS), CONTINUED * len(SEEDS)
    [first, *_] = rows.of(model="default")
    for name in first[1]:
        said = {
            what: rows.seeds(f"{name}.{what}", model="default")
            for what in ("keys", "values", "logits", "perplexity", "choices")
        }
        changed = f"{sum(said['choices']):.0f} of {read:,}"
        error = f"{said['keys']:.1%}, {said['values']:.1%}"
        change = f"{100 * said['perplexity'].middle:+.2f} %"
        if name not in CODECS:
            bits = rows.seeds(f"{name}.bits", model="default")
            others.append([name, f"{bits:g}", error, f"{said['logits']:.1%}", change, changed])
            continue
        nbytes, after = (rows.seeds(f"{name}.{what}", model="default") for what in ("bytes", "before"))
        went = rows.seeds(f"{name}.greedy", model="default")
        lines.append(
            [name, f"{nbytes:,.0f}", error, f"{said['logits']:.1%}", change, changed,
             f"{sum(went):.0f} of {greedy}", f"{min(after):.0f}"]
        )  # fmt: skip
        found |= {f"choices_{name}": sum(said["choices"]), f"greedy_{name}": sum(went)}
        plain = nbytes.middle if name == "none" else plain
    heads = ["error of keys, values", "of logits", "perplexity", "choices changed"]
    more = ["greedy tokens changed", "alike at least"]
    kernels = []
    times = {name: _us(rows, name) for name in CODECS}
    for name, (encode, decode) in times.items():
        extra = Seeds(a - b for a, b in zip(_total(times[name]), _total(times["none"])))
        saved = plain - rows.seeds(f"{name}.bytes", model="default").middle
        below = f"{8e-3 * saved / extra.middle:.0f}" if saved and extra.middle > 0 else "any" if saved else ""
        rates = [f"{plain / us.middle / 1e3:.1f}" for us in (encode, decode)]
        kernels.append([name, *rates, below])
        found["encode_16"] = Seeds(plain / us / 2e3 for us in times["int8"][0])
        found |= {f"encode_{name}": Seeds(plain / us / 1e3 for us in encode), f"below_{name}": below}
    return found | {
        "codecs": table(["codec", "bytes per token", *heads, *more], lines),
        "others": table(["how", "bits per number", *heads], others), "read": read, "greedy": greedy,
        "kernels": table(["codec", "encode, GB/s", "decode, GB/s", "pays below, Gbit/s"], kernels),
    }  # fmt: skip


def _us(rows: Rows, name: str) -> list[Seeds]:
    return [rows.seeds(f"{name}.{what}_us", kernels="cpu") for what in ("encode", "decode")]


def _total(times: list[Seeds]) -> Seeds:
    return Seeds(a + b for a, b in zip(*times))


def _of_live(rows: Rows) -> dict[str, Any]:
    """Return what live clusters answered."""
    [(_, exact)] = rows.of(live="none")
    found = dict[str, Any](live_prompts=LIVE_PROMPTS, live_tokens=LIVE_TOKENS, live_answer=LIVE_ANSWER)
    for codec in LIVE:
        [(_, live)] = rows.of(live=codec)
        found |= {
            f"live_{codec}": sum(a != b for a, b in zip(live["warm"], exact["warm"])),
            f"live_again_{codec}": sum(a != b for a, b in zip(live["warm"], live["cold"])),
            f"live_bytes_{codec}": live["pool_bytes"] / (LIVE_PROMPTS * LIVE_TOKENS),
        }
    return found


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    return {
        "coded on a GPU, int8 never costs time": max(of[f"int8_{gbps}"].middle for gbps in LINKS) < 1.01,
        "it saves little on wide links": of[f"int8_{of['widest']}"].middle > 0.98,
        "links turn the answer within the sweep": of["narrowest"] < of["pays"] < of["widest"],
        "coded on the host, it turns within the sweep": of["narrowest"] < of["cheap"] < of["widest"],
        "int4 pays beside int8 on narrower links alone": of["finer"] < of["pays"],
        "int8 changes few choices, int4 many": 5 * max(1, of["choices_int8"]) <= of["choices_int4"],
        "int8 keeps greedy answers, int4 does not": of["greedy_int8"] < 0.2 * of["greedy_int4"],
        "live, int4 changes most answers and int8 few": of["live_int8"] < 0.5 * of["live_int4"],
        "live, bytes are those of the layout": of["live_bytes_int8"] < 0.26 * of["live_bytes_none"],
        "live, warm answers are those of cold ones": not any(of[f"live_again_{codec}"] for codec in LIVE),
    }


def draw(axes: Any, rows: Rows) -> None:
    """Draw the time of answers by link, relative to that without a codec."""
    links = rows.values("gbps")
    for codec, style in zip(CODED, ("k--", "C0o-", "C1s-", "C2^:")):
        ratios = [
            rows.seeds("e2e_s.mean", gbps=gbps, codec=codec)
            .over(rows.seeds("e2e_s.mean", gbps=gbps, codec="none"))
            .middle
            for gbps in links
        ]
        axes.plot(links, ratios, style, label=codec)
    axes.set(xlabel="link of a node, Gbit/s", ylabel="time of an answer, ratio", xscale="log")
    axes.legend()
