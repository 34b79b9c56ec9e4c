"""What guessing tokens gains, and what it costs where no guess comes true.

usage: measure_speculation.py --cleave BIN [--model FOLDER ...] [--rounds N] [--tokens N]

For each checkpoint two servers, one that guesses and one that does not, take turns with the same requests, one
stream and eight, of each of TEXTS. Prompts are in the prefix cache, so times are those of decoding. Medians of the
rounds; the last columns say of a round how many tokens were guessed and verified, and how many of them came true.

Prints Markdown. Standard library only.
"""

import argparse
import json
import os
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from measure import metric, process, wait_for
from measure_survival import read_on

PROMPT_TOKENS = 160
LOOP_TOKENS = 20
# What a request says beside its prompt. A bias leaves no other tokens than those it names.
TEXTS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "drawn at temperature 1": {"temperature": 1},
    "one token, again and again": {"temperature": 0, "logit_bias": {"7": 100}},
    "drawn from four tokens": {"temperature": 1, "logit_bias": {str(token): 100 for token in range(7, 11)}},
}


def serve(stack: ExitStack, args: argparse.Namespace, model: str, *flags: str) -> str:
    command = (args.cleave, "serve", "--port", "0", "--model", model, "--dtype", "bf16", *flags)
    server = stack.enter_context(process(*command))
    address = wait_for(server, r"listening on http://(\S+)")
    read_on(server)
    return address


def ask(address: str, body: dict[str, object]) -> int:
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body).encode(), head)
    return json.load(urllib.request.urlopen(request))["usage"]["completion_tokens"]


def bodies(text: dict[str, object], streams: int, tokens: int) -> list[dict[str, object]]:
    """The same ones for each server and round; each prompt repeats itself."""
    prompts = [[3 + (stream * 31 + place % LOOP_TOKENS * 7) % 250 for place in range(PROMPT_TOKENS)] for stream in range(streams)]
    same = {"max_tokens": tokens, "ignore_eos": True} | text
    return [{"prompt": prompt, "seed": stream} | same for stream, prompt in enumerate(prompts)]


def tokens_per_second(address: str, wanted: list[dict[str, object]]) -> float:
    with ThreadPoolExecutor(len(wanted)) as pool:
        began = time.monotonic()
        tokens = sum(pool.map(lambda body: ask(address, body), wanted))
        return tokens / (time.monotonic() - began)


def compare(args: argparse.Namespace, servers: tuple[str, str], wanted: list[dict[str, object]]) -> list[str]:
    """Without, with, their ratio, and what came of guesses."""
    _, guessing = servers
    for address in servers:
        tokens_per_second(address, [body | {"max_tokens": 32} for body in wanted])
    count = lambda: [metric(guessing, rf'cleave_draft_tokens_total{{[^}}]*"{kind}"[^}}]*}}') for kind in ("drafted", "accepted")]
    before = count()
    rates: list[list[float]] = [[], []]
    for number in range(args.rounds):
        for place in (0, 1) if number % 2 else (1, 0):
            rates[place].append(tokens_per_second(servers[place], wanted))
    drafted, accepted = ((after - was) / args.rounds for after, was in zip(count(), before))
    without, with_guesses = map(statistics.median, rates)
    ratio = statistics.median(one / other for other, one in zip(*rates))
    return [f"{without:.1f}", f"{with_guesses:.1f}", f"{ratio:.2f}", f"{drafted:.0f}", f"{accepted:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=192)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores; medians of {args.rounds} rounds of {args.tokens} tokens a stream\n")
    print("| model | text | streams | tokens/s without | with | ratio | guessed | true |\n|---|---|---|---|---|---|---|---|")
    for model in args.model:
        with ExitStack() as stack:
            servers = serve(stack, args, model, "--speculative-config", "off"), serve(stack, args, model)
            for name, text in TEXTS.items():
                for streams in (1, 8):
                    cells = compare(args, servers, bodies(text, streams, args.tokens))
                    print("| " + " | ".join([Path(model).name, name, str(streams), *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
