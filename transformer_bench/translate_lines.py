"""Measure how many sentences per second the packages, Hugging Face's Marian, and CTranslate2 translate.

Usage: ``python -m transformer_bench.translate_lines TEXT --config base --beam 4``. All translators use the same model,
in one of the sizes of ``parity bench``. The weights are random, because the speed depends only on the model size and
the lengths of the sentences. Each word of the text is one token, and every translation has exactly ``--tokens`` tokens.
Each translator runs in a separate process. It translates sentences sorted by length, in batches of up to 64. The first
run compiles and warms up, and the second run is timed. CTranslate2 (``pip install ctranslate2``) runs in float32 and in
int8. It sorts and batches sentences internally, and loads a directory written by ``parity export``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

import reference_numpy as ref
from transformer_bench.workload import SIZES, DecodeWork
from transformer_parity.engine.system.environment import prepare_environment
from transformer_parity.engine.system.machine import describe_machine

Translate = Callable[[list[list[int]]], list[list[int]]]
PACKAGES = {"numpy": "reference_numpy", **{name: f"transformer_{name}" for name in ("torch", "jax", "tf")}}
TRANSLATORS = (*PACKAGES, "marian", "ctranslate2", "ctranslate2 int8")
DISTRIBUTIONS = {"marian": "transformers", "ctranslate2": "ctranslate2"}  # names of the other translators on PyPI
BATCH = 64  # maximum number of sentences in a batch
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "PJRT_NPROC")


def read(options: argparse.Namespace) -> list[list[int]]:
    """Return the token IDs of each line: one ID per word, computed from the word's checksum, followed by EOS."""
    config = DecodeWork(options.config).config
    first = max(config.pad_id, config.bos_id, config.eos_id) + 1
    words = config.source_vocab_size - first
    opened = gzip.open if options.text.suffix == ".gz" else open
    with opened(options.text, "rt", encoding="utf-8") as file:
        lines = [line.split() for line, _ in zip(file, range(options.lines), strict=False)]
    return [[first + zlib.crc32(word.encode()) % words for word in line] + [config.eos_id] for line in lines]


def in_batches(lines: Sequence[list[int]], pad_id: int, search: Callable[[ndarray], ndarray]) -> list[list[int]]:
    """Translate the lines in batches of lines of similar length, and return the translations in the original order."""
    order = sorted(range(len(lines)), key=lambda number: len(lines[number]))
    found: list[list[int]] = [[] for _ in lines]
    for start in range(0, len(order), BATCH):
        numbers = order[start : start + BATCH]
        ids = np.full((len(numbers), max(len(lines[number]) for number in numbers)), pad_id)
        for row, number in enumerate(numbers):
            ids[row, : len(lines[number])] = lines[number]
        for number, tokens in zip(numbers, search(ids), strict=True):
            found[number] = tokens.tolist()
    return found


def of_package(name: str, model: Path, work: DecodeWork) -> Translate:
    """Return a function that translates with one of this project's packages."""
    package = __import__(PACKAGES[name])
    loaded = package.load_transformer(model, precision="highest")  # the default of `parity translate`

    def search(ids: ndarray) -> ndarray:
        return work.search.run(package, loaded, ids).ids

    return lambda lines: in_batches(lines, work.config.pad_id, search)


def of_marian(model: Path, work: DecodeWork) -> Translate:
    """Return a function that translates with Hugging Face's ``generate``."""
    import torch
    from transformers import GenerationConfig

    from transformer_bench.peers.marian import marian_model

    config, weights = ref.load_weights(model)
    loaded = marian_model(config, weights)
    settings = GenerationConfig(
        max_new_tokens=work.target,
        num_beams=work.beam_size or 1,
        decoder_start_token_id=config.bos_id,
        pad_token_id=config.pad_id,
        eos_token_id=config.eos_id,
    )

    def search(ids: ndarray) -> ndarray:
        mask = torch.from_numpy((ids != config.pad_id).astype(np.int64))
        found = loaded.generate(torch.from_numpy(ids), attention_mask=mask, generation_config=settings)
        return found[:, 1:].numpy()

    return lambda lines: in_batches(lines, config.pad_id, search)


def of_ctranslate2(name: str, model: Path, work: DecodeWork, threads: int) -> Translate:
    """Return a function that translates with CTranslate2. Its tokens are strings, so token ID 5 is passed as "5"."""
    import ctranslate2

    kind = "int8" if name.endswith("int8") else "float32"
    translator = ctranslate2.Translator(
        str(model.parent / "ctranslate2"), compute_type=kind, inter_threads=1, intra_threads=threads
    )

    def translate(lines: list[list[int]]) -> list[list[int]]:
        found = translator.translate_batch(
            [[str(token) for token in line] for line in lines],
            beam_size=work.beam_size or 1,
            max_batch_size=BATCH,
            max_decoding_length=work.target,
            min_decoding_length=work.target,
        )
        return [[int(token) for token in result.hypotheses[0]] for result in found]

    return translate


def measure(options: argparse.Namespace, name: str, model: Path) -> dict[str, Any]:
    """Return the elapsed time, the CPU time, and the translations of one translator."""
    prepare_environment()
    work = DecodeWork(options.config, target=options.tokens, beam_size=options.beam)
    if name in PACKAGES:
        translate = of_package(name, model, work)
    elif name == "marian":
        translate = of_marian(model, work)
    else:
        translate = of_ctranslate2(name, model, work, options.threads)
    lines = read(options)
    translate(lines)
    start, processor_start = time.perf_counter(), time.process_time()
    found = translate(lines)
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - processor_start,
        "found": found,
    }


def write(options: argparse.Namespace, model: Path) -> None:
    """Write the weight file and, if necessary, the CTranslate2 model."""
    from transformer_parity.apps.checkpoints.importer import export_checkpoint, load

    work = DecodeWork(options.config)
    ref.save_weights(model, work.config, work.weights())
    if any(name.startswith("ctranslate2") for name in options.translators):
        export_checkpoint(load(model), "ctranslate2", model.parent / "ctranslate2")


def write_json(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write the results, the settings, and a description of the machine as JSON."""
    asked = {name: getattr(options, name) for name in ("config", "lines", "tokens", "beam", "threads")}
    words = [len(line) - 1 for line in read(options)]
    report = {"machine": describe_machine(), **asked, "words": sum(words) / len(words), "translators": rows}
    options.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")


def main() -> None:
    """Measure each translator in a separate process, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="translate this text, plain or gzipped, with one sentence per line")
    parser.add_argument(
        "--lines", type=int, default=1000, help="translate the first LINES lines (default: %(default)s)"
    )
    parser.add_argument(
        "--config", choices=SIZES, default="base", help="use a model of this size (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=16, help="generate TOKENS tokens per translation (default: %(default)s)"
    )
    parser.add_argument("--beam", type=int, help="use beam search with BEAM beams (default: greedy search)")
    parser.add_argument(
        "--threads", type=int, default=2, help="use THREADS threads for each translator (default: %(default)s)"
    )
    parser.add_argument(
        "--translators",
        type=lambda text: text.split(","),
        default=list(TRANSLATORS),
        metavar="A,B",
        help=f"time these translators, given as a comma-separated list of {', '.join(TRANSLATORS)} (default: all)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results and the machine as JSON")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)  # used only for the translators' processes
    options = parser.parse_args()
    if options.model:
        (name,) = options.translators
        print(json.dumps(measure(options, name, options.model)))
        return
    first, rows = None, []
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model.safetensors"
        write(options, model)
        print(f"{'':18} sentences/s   CPU ms/sentence  lines with the same tokens as {options.translators[0]}")
        for name in options.translators:
            given = [*sys.argv[1:], "--translators", name, "--model", model]
            switches = dict.fromkeys(THREADS, str(options.threads))
            run = subprocess.run(
                [sys.executable, "-m", "transformer_bench.translate_lines", *given],
                env={**os.environ, **switches},
                check=True,
                stdout=subprocess.PIPE,
            )
            answer = json.loads(run.stdout.splitlines()[-1])
            found = answer["found"]
            first = first or found
            same = sum(a == b for a, b in zip(found, first, strict=True))
            rate, each = len(found) / answer["seconds"], 1e3 * answer["processor_seconds"] / len(found)
            print(f"{name:18} {rate:11,.1f} {each:18,.1f}  {same:,} of {len(found):,}", flush=True)
            rows.append(
                {
                    "name": name,
                    "version": version(DISTRIBUTIONS.get(name.split()[0], "transformer-parity")),
                    "sentences_per_second": rate,
                    "processor_ms_each": each,
                    "same_tokens": same,
                }
            )
    if options.json:
        write_json(options, rows)


if __name__ == "__main__":
    main()
