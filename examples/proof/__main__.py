"""The whole of docs/proof.md: `python -m examples.proof`, or `--quick` for a little of it.

Needs espeak-ng (`apt-get install espeak-ng`). Leaves figures, tables and all numbers in a folder.
Stopped anywhere, the same command goes on with what is there; another folder begins anew.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.proof.corpus import CLEAN, Size, write_corpus
from examples.proof.features import EXTRACTS, Cost, Part, extract, read
from examples.proof.figures import draw_accuracy, draw_loudness, loudness_table, tables
from examples.proof.loudness import measure
from examples.proof.network import Classifier, Plan, train
from examples.proof.page import PAGE, time_text, verdict
from examples.proof.scores import by_ratio, in_noise, interval

SEED = 20260401
LEARNT = "dau1997, learnable"
KINDS = ("log-mel", "dau1997", LEARNT)


def main() -> None:
    """Corpus, features, networks, loudness, figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="default: build/proof, or build/proof-quick")
    parser.add_argument("--quick", action="store_true", help="a little: it runs, no more")
    parser.add_argument("--seeds", type=int, help=f"networks of a kind, {Plan.seeds} if not set")
    asked = parser.parse_args()
    if shutil.which("espeak-ng") is None:
        raise SystemExit("espeak-ng is missing: apt-get install espeak-ng")
    torch.set_num_threads(2)
    out: Path = asked.out or Path("build/proof-quick" if asked.quick else "build/proof")
    size, plan = Size(), Plan() if asked.seeds is None else Plan(seeds=asked.seeds)
    if asked.quick:
        size, plan = Size(10, 30), replace(plan, epochs=3, learning_epoch=1, seeds=2)
    begun, anew = time.monotonic(), not out.exists()
    costs = prepared(out, size)
    say(begun, "features are extracted")
    sones = measured(out, quick=asked.quick)
    say(begun, "loudness is measured")
    parts = {name: read(out / name) for name in EXTRACTS}
    networks: dict[str, list[dict[str, Any]]] = {name: [] for name in KINDS}
    for seed, name in product(range(plan.seeds), KINDS):
        networks[name].append(told(name, seed, parts, plan, out))
        share = np.mean(networks[name][-1]["correct"])
        say(begun, f"{name}, seed {seed}: {share:.1%} of the test's rows")
    correct = {
        name: np.array([network["correct"] for network in found])
        for name, found in networks.items()
    }
    rows = parts["log-mel"]["test"].rows
    snr_db = parts["log-mel"]["test"].snr_db
    accuracy = {name: by_ratio(found, snr_db) for name, found in correct.items()}
    words = ["-".join((row["label"], row["language"], row["voice"])) for row in rows]
    noisy = snr_db != CLEAN
    told_in_noise = {name: in_noise(found, words, noisy) for name, found in correct.items()}
    pairs = (("dau1997", "log-mel"), (LEARNT, "log-mel"), (LEARNT, "dau1997"))
    differences = {
        f"{a} against {b}": interval(told_in_noise[a] - told_in_noise[b]) for a, b in pairs
    }
    draw_accuracy(accuracy, out / "proof.svg")
    draw_loudness(sones, out / "proof_loudness.svg")
    cpu_s = {
        name: float(np.mean([one["cpu_s"] for one in found])) for name, found in networks.items()
    }
    page = PAGE.format(
        train=len(parts["log-mel"]["train"].rows),
        test=len(rows),
        words=len(set(words)),
        parameters=f"{parameters(parts['dau1997']):,}",
        epochs=plan.epochs,
        rate=plan.rate,
        seeds=plan.seeds,
        tables=tables(accuracy, costs),
        verdict=verdict(differences),
        loudness=loudness_table(sones),
        took=time_text(cpu_s, time.monotonic() - begun if anew else None),
    )
    (out / "proof.md").write_text(page)
    print(page)
    say(begun, "done")


def parameters(parts: dict[str, Part]) -> int:
    """Of a network on these features."""
    network = Classifier(parts["train"].values)
    return sum(one.numel() for one in network.parameters())


def measured(out: Path, *, quick: bool) -> dict[str, dict[str, np.ndarray]]:
    """Loudness of the clips, measured or kept."""
    kept = out / "loudness.json"
    if not kept.exists():
        shutil.rmtree(out / "loudness", ignore_errors=True)
        found = measure(out / "loudness", quick=quick)
        plain = {m: {way: v.tolist() for way, v in ways.items()} for m, ways in found.items()}
        kept.write_text(json.dumps(plain))
    known = json.loads(kept.read_text())
    return {m: {way: np.array(v) for way, v in ways.items()} for m, ways in known.items()}


def prepared(out: Path, size: Size) -> dict[str, Cost]:
    """Corpus and datasets, and what they cost: made, or as they are there."""
    manifest = out / "corpus" / "manifest.parquet"
    if not manifest.exists():
        write_corpus(out / "corpus", size, SEED)
    costs = {}
    for name in EXTRACTS:
        kept = out / f"{name}.json"
        if not kept.exists():
            shutil.rmtree(out / name, ignore_errors=True)
            kept.write_text(json.dumps(asdict(extract(name, manifest, out / name))))
        costs[name] = Cost(**json.loads(kept.read_text()))
    return costs


def told(
    name: str, seed: int, parts: dict[str, dict[str, Part]], plan: Plan, out: Path
) -> dict[str, Any]:
    """Which test rows a network tells right, and what its training took: trained, or kept."""
    kept = out / "networks" / f"{name}-{seed}.json"
    if not kept.exists():
        cpu_begun = time.process_time()
        samples = parts["samples"] if name == LEARNT else None
        features = parts["dau1997" if name == LEARNT else name]
        scores = train(features, plan, seed=seed, samples=samples).scores("test")
        right = (scores.argmax(1) == features["test"].labels).tolist()
        found = {"correct": right, "cpu_s": time.process_time() - cpu_begun}
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(found))
    known: dict[str, Any] = json.loads(kept.read_text())
    return known


def say(begun: float, what: str) -> None:
    """A line with the time since the beginning."""
    print(f"{time.monotonic() - begun:6.0f} s: {what}", flush=True)


if __name__ == "__main__":
    main()
