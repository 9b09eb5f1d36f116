"""A GGUF file as a folder in Hugging Face format, for engines that do not read GGUF: its weights at full precision.

`python -m tests.support.gguf_folder FILE FOLDER`. It needs PyPI's `gguf` and `accelerate`.
"""

import sys
from pathlib import Path


def write_folder(file: Path, folder: Path) -> Path:
    """Write weights (bfloat16), config, tokenizer and chat template; return the folder. Does nothing if it is there."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if not (folder / "config.json").exists():
        where = {"gguf_file": file.name, "local_files_only": True}
        AutoTokenizer.from_pretrained(str(file.parent), **where).save_pretrained(str(folder))
        whole = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
        AutoModelForCausalLM.from_pretrained(str(file.parent), **whole, **where).save_pretrained(str(folder))
    return folder


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]), Path(sys.argv[2]))
