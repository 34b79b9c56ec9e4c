"""mistral.rs in this process, asked for one shape a line, as `cleave bench engine --stdin` is.

usage: speed_mistralrs.py MODEL SEQUENCES bf16|f32|q8_0|q4k     (with the environment that engines.py gives)

Prompts are words of one token each, since the engine takes only text; it has no prefix cache. The engine reports a
prompt's time. To decode a batch, the script requests as many streams, and a thread reads each: the engine runs
sequences of one length in one step. The count has the tokens from the first token of the last stream to the end of the
first stream. q8_0 and q4k are its in-situ quantisation, whose other arithmetic is f32, its choice on a processor; its
q8_0 is slow to run prompts. They have no batches: version 0.9.5 runs waiting prompts of one length in one step, and its
quantised product then refuses their last rows ("not contiguous").
"""

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from shapes import answer

STEPS = 32
# More steps, for streams that begin before others.
SPARE_STEPS = 4
WORDS = 64
# Every larger tokenizer has words among these ids.
TOKENS = range(300, 10_000)
# Every other form computes in f32.
DTYPES = {"bf16": "BF16"}
QUANTISED = {"q8_0": "Q8_0", "q4k": "Q4K"}


def main() -> None:
    import mistralrs as rs

    model, sequences, form = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    runner = rs.Runner(
        which=rs.Which.Plain(model_id=model, dtype=getattr(rs.ModelDType, DTYPES.get(form, "F32"))),
        max_seqs=sequences,
        prefix_cache_n=0,
        token_source="none",
        in_situ_quant=QUANTISED.get(form),
    )
    dice = random.Random(7)

    def words() -> list[str]:
        """Words that are one token, with the space before them."""
        found: set[str] = set()
        for token in dice.sample(TOKENS, len(TOKENS)):
            word = runner.detokenize_text([token], False)
            if word[:1] == " " and word[1:].isalpha() and len(runner.tokenize_text(word, False, None)) == 1:
                found.add(word)
            if len(found) == WORDS:
                return sorted(found)
        sys.exit(f"the tokenizer has {len(found)} words of one token in {TOKENS}, prompts are drawn from {WORDS}")

    vocabulary = words()

    def prompt(tokens: int) -> str:
        return "".join(dice.choice(vocabulary) for _ in range(tokens))

    def settings(tokens: int) -> dict:
        return {"model": "default", "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}

    def prefill(tokens: int) -> float:
        usage = runner.send_completion_request(rs.CompletionRequest(prompt=prompt(tokens), **settings(1))).usage
        assert usage.prompt_tokens == tokens, f"{usage.prompt_tokens} tokens of {tokens} words"
        return tokens / usage.total_prompt_time_sec

    def ask(tokens: int):
        """A chat, because only chats are streamed."""
        request = rs.ChatCompletionRequest(messages=prompt(tokens), stream=True, **settings(STEPS + SPARE_STEPS + 1))
        return runner.send_chat_completion_request(request)

    def read(stream) -> tuple[list[float], int]:
        """The time of each piece, and the number of tokens of the prompt."""
        stamps, prompt_tokens = [], 0
        for piece in stream:
            stamps.append(time.perf_counter())
            prompt_tokens = piece.usage.prompt_tokens if piece.usage else prompt_tokens
        return stamps, prompt_tokens

    # Tokens that the chat's template puts around a prompt.
    around = read(ask(WORDS))[1] - WORDS

    def decode(count: int, tokens: int) -> float | None:
        if count > 1 and form in QUANTISED:
            return None
        # One thread sends: the runner takes one request at a time.
        asked = [ask(tokens - around) for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            streams = list(pool.map(read, asked))
        assert all(prompt_tokens == tokens for _, prompt_tokens in streams), f"prompts of {streams[0][1]} tokens, not {tokens}"
        start, end = max(stamps[0] for stamps, _ in streams), min(stamps[-1] for stamps, _ in streams)
        if start >= end:
            sys.exit("a stream came in one piece, or ended before another began: all never decoded at once")
        # Most pieces are a token; one without text comes with the next.
        shares = [sum(start < stamp <= end for stamp in stamps) / (len(stamps) - 1) for stamps, _ in streams]
        return sum(shares) * (STEPS + SPARE_STEPS) / (end - start)

    answer(prefill, decode)


if __name__ == "__main__":
    main()
