"""
Do GGUF files compute in llama.cpp what they compute in transformers?

    npm install node-llama-cpp                              # llama.cpp, compiled; in a folder of your own
    export HYBRID_NODE_LLAMA_CPP=.../node_modules/node-llama-cpp
    python -m benchmarks.export.llama_cpp                   # after `python -m benchmarks.speedup.pretrained`

SmolLM2-135M-Instruct is exported in each format. llama.cpp and transformers read the same file and compute the loss of
the same tokens of Python's language reference, those of benchmarks/export/formats.py. llama.cpp also splits the text
into tokens, which must be those of the tokenizer of transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from benchmarks.export.formats import reference_batches
from benchmarks.results import Results, command_line, provenance
from benchmarks.texts import language_reference

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parents[1] / "tests" / "rig" / "llama_cpp.mjs"
KINDS = ("f16", "q8_0", "q5_1", "q4_1", "q4_0", "q4_m")
TEXTS = 20
"""Texts of the reference that are split into tokens."""
THREADS = 1


def in_llama_cpp(module: str, file: Path, texts: list[str], rows: list[list[int]], work: Path) -> dict:
    """Return the token ids and the mean loss that llama.cpp finds."""
    words, numbers = work / "texts.json", work / "rows.json"
    words.write_text(json.dumps(texts))
    numbers.write_text(json.dumps(rows))
    command = ["node", str(SCRIPT), module, str(file), str(words), str(numbers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    args = command_line(__doc__, HERE).parse_args()
    module = os.environ["HYBRID_NODE_LLAMA_CPP"]

    import torch
    import transformers
    from transformers import AutoTokenizer

    from benchmarks.speedup.pretrained import FOLDER
    from hf_hybrid.export import formats, measure

    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = Results(args.results, "llama_cpp", ("model", "format"))
    held_out, tokenizer = reference_batches(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    rows = [row for batch in held_out for row in batch["input_ids"].tolist()]
    texts = language_reference()[:TEXTS]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    original = measure.held_out(formats.load(FOLDER, torch.float32), held_out)
    version = json.loads(Path(module, "package.json").read_text())["version"]
    for kind in KINDS:
        name = f"gguf-{kind}"
        if results.get(model="smollm2", format=name) is not None:
            continue
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work, "model")
            formats.write(name, FOLDER, folder, tokenizer, torch.float32, torch.float32, "5GB")
            found = in_llama_cpp(module, folder / formats.GGUF_NAME, texts, rows, Path(work))
            same_file = measure.held_out(formats.load(folder, torch.float32), held_out)
        row = {
            "model": "smollm2",
            "format": name,
            "original": original["loss"],
            "transformers": same_file["loss"],
            "llama_cpp": found["loss"],
            "tokens": found["tokens"],
            "same_ids": found["ids"] == ids,
            "ids": sum(map(len, ids)),
            "node_llama_cpp": version,
        }
        results.add({**row, **provenance(THREADS)})
        print({key: row[key] for key in ("format", "llama_cpp", "transformers", "original", "same_ids")}, flush=True)


if __name__ == "__main__":
    main()
