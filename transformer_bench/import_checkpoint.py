"""Measure the CPU time and the peak memory of importing a checkpoint with 75 or 600 million parameters.

Usage: ``python -m transformer_bench.import_checkpoint 75 DIRECTORY``. A separate process writes a checkpoint with
random weights to the directory, so that this process measures only reading and saving.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "75": {"preset": "marian", "vocab_size": 58101, "d_model": 512, "d_ff": 2048, "num_heads": 8, "layers": 6},
    "600": {"preset": "m2m_100", "vocab_size": 256206, "d_model": 1024, "d_ff": 4096, "num_heads": 16, "layers": 12},
}


def write(size: str, directory: Path) -> None:
    """Write a Hugging Face checkpoint with random weights."""
    import reference_numpy as ref
    from transformer_parity.apps.checkpoints.importer import export_checkpoint, load

    fields = dict(SIZES[size])
    vocab_size, layers = fields.pop("vocab_size"), fields.pop("layers")
    sizes = {"source_vocab_size": vocab_size, "target_vocab_size": vocab_size}
    depths = {"num_encoder_layers": layers, "num_decoder_layers": layers}
    config = ref.TransformerConfig.preset(fields.pop("preset"), **sizes, **depths, **fields)
    weights = ref.init_weights(config, seed=0)
    ref.save_weights(directory / "model.safetensors", config, weights, dtype="float32")
    export_checkpoint(load(directory / "model.safetensors"), "hf", directory / "hf")


def main() -> None:
    """Write the checkpoint in a separate process, measure its import, and print the result."""
    size, directory = sys.argv[1], Path(sys.argv[2])
    if sys.argv[3:] == ["write"]:
        write(size, directory)
        return
    directory.mkdir()
    subprocess.run([sys.executable, "-m", "transformer_bench.import_checkpoint", size, directory, "write"], check=True)
    from transformer_parity.apps.checkpoints.importer import import_checkpoint, save

    times = [time.process_time()]
    imported = import_checkpoint(directory / "hf")
    times.append(time.process_time())
    save(directory / "imported.safetensors", imported)
    times.append(time.process_time())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    parameters = sum(array.size for array in imported.weights.values()) / 1e6
    print(f"{parameters:.0f} M parameters: {times[1] - times[0]:.1f} s of CPU time to read the checkpoint,")
    print(f"{times[2] - times[1]:.1f} s of CPU time to save the weight file, {peak:.2f} GB of peak memory")


if __name__ == "__main__":
    main()
