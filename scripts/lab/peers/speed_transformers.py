"""transformers in this process, asked for one shape a line, as `cleave bench engine --stdin` is.

usage: speed_transformers.py MODEL THREADS

It runs plain forward passes with a growing cache, greedy, without generate(), whose own work would count too.
"""

import sys
import time

from shapes import answer

STEPS = 16


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(sys.argv[2]))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    vocabulary = model.config.vocab_size

    def ask(tokens: torch.Tensor, cache=None):
        out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    def prefill(tokens: int) -> float:
        prompt = torch.randint(vocabulary, (1, tokens))
        start = time.perf_counter()
        ask(prompt)
        return tokens / (time.perf_counter() - start)

    def decode(count: int, tokens: int) -> float:
        token, cache = ask(torch.randint(vocabulary, (count, tokens)))
        token, cache = ask(token, cache)
        start = time.perf_counter()
        for _ in range(STEPS):
            token, cache = ask(token, cache)
        return count * STEPS / (time.perf_counter() - start)

    with torch.inference_mode():
        answer(prefill, decode)


if __name__ == "__main__":
    main()
