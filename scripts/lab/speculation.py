"""Gain of speculative decoding, and its cost where no drafted token is accepted: docs/benchmarks/speculation.md.

usage: speculation.py --cleave BIN [--model FOLDER ...] [--rounds N] [--tokens N] [--text NAME ...]

For each checkpoint three servers, one that speculates and two that do not, take turns with the same requests, one
stream and eight, of each of TEXTS. Prompts are in the prefix cache, so times are those of decoding. Medians of the
rounds. A ratio is the median of the rounds' ratios, with the interval that holds the true median in 19 of 20 cases; the
ratio of the two servers without speculation shows the spread by chance. The last columns have the tokens of a round
that were drafted, and those that were accepted.

Prints Markdown. Standard library only.
"""

import argparse
import json
import math
import os
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from servers import metric, process, read_on, wait_for

PROMPT_TOKENS = 160
LOOP_TOKENS = 20
# Fields of a request beside its prompt. A bias leaves no other tokens than those it names.
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
    """The same bodies for each server and round; each prompt repeats itself."""
    prompts = [[3 + (stream * 31 + place % LOOP_TOKENS * 7) % 250 for place in range(PROMPT_TOKENS)] for stream in range(streams)]
    same = {"max_tokens": tokens, "ignore_eos": True} | text
    return [{"prompt": prompt, "seed": stream} | same for stream, prompt in enumerate(prompts)]


def tokens_per_second(address: str, wanted: list[dict[str, object]]) -> float:
    with ThreadPoolExecutor(len(wanted)) as pool:
        began = time.monotonic()
        tokens = sum(pool.map(lambda body: ask(address, body), wanted))
        return tokens / (time.monotonic() - began)


def ratio(rates: list[float], of: list[float]) -> str:
    """Returns the median of the rounds' ratios, and the sign test's interval for it at 0.95 or, of few rounds, the
    range."""
    ratios = sorted(one / other for one, other in zip(rates, of))
    count = len(ratios)
    tails = [sum(math.comb(count, k) for k in range(below + 1)) / 2**count for below in range(count // 2)]
    below = sum(1 for tail in tails if tail <= 0.025)
    low, high = ratios[max(below - 1, 0)], ratios[min(count - below, count - 1)]
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def compare(args: argparse.Namespace, servers: tuple[str, str, str], wanted: list[dict[str, object]]) -> list[str]:
    """Returns the cells of a row: speed without and with speculation, ratios, drafted and accepted tokens."""
    *_, guessing = servers
    for address in servers:
        tokens_per_second(address, [body | {"max_tokens": 32} for body in wanted])
    count = lambda: [metric(guessing, rf'cleave_draft_tokens_total{{[^}}]*"{kind}"[^}}]*}}') for kind in ("drafted", "accepted")]
    before = count()
    rates: list[list[float]] = [[], [], []]
    for number in range(args.rounds):
        for turn in range(3):
            place = (number + turn) % 3
            rates[place].append(tokens_per_second(servers[place], wanted))
    drafted, accepted = ((after - was) / args.rounds for after, was in zip(count(), before))
    without, again, guessed = rates
    speeds = [f"{statistics.median(each):.1f}" for each in (without, guessed)]
    return [*speeds, ratio(guessed, without), ratio(again, without), f"{drafted:.0f}", f"{accepted:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--text", choices=TEXTS, action="append", help="of TEXTS; all if absent")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores; medians of {args.rounds} rounds of {args.tokens} tokens a stream\n")
    print("| model | text | streams | tokens/s without | with | ratio | of two without | guessed | true |\n|---|---|---|---|---|---|---|---|---|")
    for model in args.model:
        with ExitStack() as stack:
            off = ("--speculative-config", "off")
            servers = serve(stack, args, model, *off), serve(stack, args, model, *off), serve(stack, args, model)
            for name in args.text or TEXTS:
                text = TEXTS[name]
                for streams in (1, 8):
                    cells = compare(args, servers, bodies(text, streams, args.tokens))
                    print("| " + " | ".join([Path(model).name, name, str(streams), *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
