#!/usr/bin/env python3
"""Writes testdata/spellings/: config.json of each golden checkpoint as transformers writes it.

The checkpoints' own files have the keys of published models, most of them in the spelling of transformers 4
(rope_theta, rope_scaling, torch_dtype). A finetune that transformers 5 saves has rope_parameters, dtype and layer_types
in place of them, and the defaults of its class spelled out: NAME.json is what it saves after it read testdata/NAME.
A test of crates/models compares the descriptions that both become.

Usage:
    pip install -r scripts/models/requirements.txt
    python scripts/models/spellings.py            # (re)writes testdata/spellings/
    python scripts/models/spellings.py --check    # compares with what is there
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers
from transformers import AutoConfig

TESTDATA = Path(__file__).resolve().parents[2] / "testdata"


def saved(folder: Path) -> str:
    """Returns config.json as transformers saves it after reading this folder's."""
    with tempfile.TemporaryDirectory() as temporary:
        AutoConfig.from_pretrained(folder).save_pretrained(temporary)
        return (Path(temporary) / "config.json").read_text(encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes or checks testdata/spellings/.")
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    folders = sorted(goldens.parent for goldens in TESTDATA.glob("*/goldens.json"))
    out = TESTDATA / "spellings"
    out.mkdir(exist_ok=True)
    stale = []
    for folder in folders:
        file, text = out / f"{folder.name}.json", saved(folder)
        if not args.check:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(file.name)
    print("\n".join(stale) or "testdata/spellings matches")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
