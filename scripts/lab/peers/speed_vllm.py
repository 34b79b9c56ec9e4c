"""vLLM's engine in this process, asked for one shape a line, as `cleave bench engine --stdin` is.

usage: speed_vllm.py MODEL CONTEXT_TOKENS SEQUENCES     (with the environment that engines.py gives)

A prompt's time is the whole call with one token drawn; a decode step's is the engine's own time between its first and
last tokens, with prompts from the prefix cache.
"""

import random
import sys
import time

from shapes import answer

STEPS = 32


def main() -> None:
    from vllm import LLM, SamplingParams

    model, context, sequences = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # A batch's KV is small here; the rest of memory is for the other engines.
    llm = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=context,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(2048, context),
        kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=True,
        disable_log_stats=False,
        skip_tokenizer_init=True,
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    dice = random.Random(7)

    def prompts(count: int, tokens: int) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": [dice.randrange(vocabulary) for _ in range(tokens)]} for _ in range(count)]

    def generate(asked: list[dict[str, list[int]]], tokens: int) -> list:
        params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False)
        return llm.generate(asked, params, use_tqdm=False)

    def prefill(tokens: int) -> float:
        asked = prompts(1, tokens)
        start = time.perf_counter()
        generate(asked, 1)
        return tokens / (time.perf_counter() - start)

    def decode(count: int, tokens: int) -> float:
        asked = prompts(count, tokens)
        generate(asked, 1)
        times = [answer.metrics for answer in generate(asked, STEPS + 1)]
        took = max(each.last_token_ts for each in times) - max(each.first_token_ts for each in times)
        return count * STEPS / took

    answer(prefill, decode)


if __name__ == "__main__":
    main()
