"""A peer: transformers with continuous batching and its own defaults (paged cache, CUDA graphs, its best attention).

usage: transformers_batching.py --model FOLDER --kv-bytes N [--attention NAME] [--device cuda|cpu]   (answers turns.py)

The time of a decode step is that between tokens of one sequence while all sequences generate; a prompt's time runs from
its start to its first token. The cache has a fixed size, since other systems are on the same card.
"""

import argparse
import inspect
import math
import random
import time
from pathlib import Path

import answers
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

STEPS, STEPS_UNTIMED = 32, 8
PAGE_TOKENS = 256
# The number of steps whose mean is one sample: a thread of its own hands out tokens, a little early or late.
GROUP = 8


class Batching:
    def __init__(self, args: argparse.Namespace) -> None:
        # A GPU loads the weights directly from their files.
        placed = {"device_map": args.device} if args.device != "cpu" else {}
        self.model = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.bfloat16, attn_implementation=args.attention, **placed
        ).eval()
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2
        self.pages = args.kv_bytes // (PAGE_TOKENS * token_bytes)
        self.prompt_tokens = args.prompt_tokens

    def config(self) -> ContinuousBatchingConfig:
        known = inspect.signature(ContinuousBatchingConfig).parameters
        page = "page_size" if "page_size" in known else "block_size"
        wanted = {page: PAGE_TOKENS, "num_blocks": self.pages, "max_batch_tokens": self.prompt_tokens, "allow_block_sharing": False}
        return ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})

    def run(self, prompts: list[list[int]], new_tokens: int) -> list:
        pages = sum(math.ceil((len(prompt) + new_tokens) / PAGE_TOKENS) for prompt in prompts)
        if pages > self.pages:
            raise MemoryError(f"it takes {pages} pages of KV cache, and it was given {self.pages}")
        outputs = self.model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=self.config(),
            record_timestamps=True,
            progress_bar=False,
        )
        found = list(outputs.values())
        if len(found) != len(prompts) or any(output.error or not output.timestamps for output in found):
            raise RuntimeError(next((str(output.error) for output in found if output.error), "requests were lost"))
        return found

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        return [[random.randrange(10, self.model.config.vocab_size - 10) for _ in range(tokens)] for _ in range(count)]

    def prefill(self, tokens: int) -> list[float]:
        # The first prompt runs before caches are warm, and does not count.
        seconds = []
        for _ in range(3):
            outputs = self.run(self.prompts(1, tokens), 1)
            # The time begins when the prompt leaves the queue, where it waited for a thread to wake up.
            seconds.append(outputs[0].timestamps[0] - max(outputs[0].lifespan[0], outputs[0].created_time))
        return seconds[1:]

    def decode(self, batch: int, context: int) -> list[float]:
        # Sequences whose prompts are done generate while other prompts are still read: they need so many tokens more.
        early = 2 * math.ceil(batch * context / self.prompt_tokens) + batch // 8
        outputs = self.run(self.prompts(batch, context), STEPS + STEPS_UNTIMED + early)
        begin = max(output.timestamps[0] for output in outputs)
        end = min(output.timestamps[-1] for output in outputs)
        times = [moment for moment in outputs[0].timestamps if begin <= moment <= end][STEPS_UNTIMED // 2 :]
        if len(times) <= GROUP:
            raise RuntimeError(f"only {len(times)} tokens while all sequences generated")
        groups = [times[at : at + GROUP + 1] for at in range(0, len(times) - GROUP, GROUP)]
        return [(group[-1] - group[0]) / (len(group) - 1) for group in groups]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--prompt-tokens", type=int, default=8192, help="tokens of one step at most")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    begin = time.perf_counter()
    batching = Batching(args)
    if args.device != "cpu":
        torch.cuda.synchronize()
    answers.serve(time.perf_counter() - begin, batching.prefill, batching.decode)


if __name__ == "__main__":
    main()
