"""Tests Cleave behind load balancers, and measures the latency that they add (docs/benchmarks/load-balancers.md).

usage: check.py --cleave BIN [--only NAME ...] [--checks NAME ...] [--quick] [--rounds N] [--json FILE]

For each of nginx, HAProxy, Envoy, and Envoy with our endpoint picker, by TLS: two routers, a prefill and a decode
worker (mock engines: a token every 10 ms) on loopback, with the balancer before them, configured by the template beside
this script. The checks cover streams event by event, clients that leave, a router that is killed, drained or stuck,
overload, streams that are silent for longer than the balancer's limit, request ids, and
operators' routes. At the end it measures the lag of each event behind its due time, through each balancer and directly,
by turns in the same minutes. Prints Markdown; exits with 1 if a check failed. A balancer that this machine lacks is
reported as SKIPPED. Standard library only.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from fleet import STEP, Balancer, Fleet, balancer, get, metric, wait_until
from stream import Answer, Request, ask

# Fleets whose balancers are checked at once: most of a check's time is waiting.
LANES = 2
NAMES = ("nginx", "haproxy", "envoy", "picker")
# The balancer cuts streams that are silent for so long; routers send a comment more often.
IDLE, KEEP_ALIVE = 4, 1
# A proxy that buffers events, or waits for acknowledgements, adds tenths of seconds; a busy machine adds tens of
# milliseconds now and then.
ADDED_P50_MAX, ADDED_P99_MAX = 0.020, 0.150
PATH = 'route="/v1/completions"'


class Skipped(Exception):
    """The check cannot run here; the text says why."""


def check(held: bool, what: str) -> None:
    if not held:
        raise AssertionError(what)


def whole(answer: Answer, tokens: int) -> None:
    check(answer.whole and answer.tokens == tokens, f"{answer}")


def requests_by_router(fleet: Fleet) -> list[float]:
    return [metric(one, "cleave_http_requests_total", PATH) for one in fleet.routers]


def streaming(one: Balancer, fleet: Fleet) -> str:
    """Demands that each event arrives when it is sent, so no proxy buffers the stream."""
    answer = ask(one.address, {"max_tokens": 40, "stream": True})
    whole(answer, 40)
    check(answer.headers["content-type"].startswith("text/event-stream"), f"{answer.headers}")
    check(answer.headers["cache-control"] == "no-cache", f"{answer.headers}")
    gaps = [after - before for before, after in zip(answer.events, answer.events[1:])]
    together = sum(gap < STEP / 10 for gap in gaps)
    check(together <= len(gaps) // 2, f"{together} of {len(gaps)} events came with the one before")
    # The answer without streaming has the same tokens.
    text = ask(one.address, {"max_tokens": 40})
    check(text.status == 200 and text.tokens == 40, f"{text}")
    return f"{len(answer.events)} events, {together} with the one before"


def ids(one: Balancer, fleet: Fleet) -> str:
    """Demands `x-request-id` in both directions: made if absent, and also on errors."""
    for body, status in (({"max_tokens": 2}, 200), ({"max_tokens": -1}, 400)):
        answer = ask(one.address, body, {"x-request-id": "abc-1"})
        check(answer.status == status and answer.headers["x-request-id"] == "abc-1", f"{answer}")
    made = ask(one.address, {"max_tokens": 2}).headers["x-request-id"]
    check(len(made) >= 16, made)
    return "kept, made, on errors"


def operators(one: Balancer, fleet: Fleet) -> str:
    """Demands that no client reaches the operators' routes: a router on the balancer's machine takes every request for
    a local one that names this machine and has no header of a proxy."""
    host = {"Host": "localhost"}
    paths = ("/admin/workers", "/admin", "/ui", "/ui/")
    seen = {path: get(one.address, path, headers=host)[0] for path in paths}
    check(all(status == 403 for status in seen.values()), f"{seen}")
    check(get(fleet.routers[0], "/admin/workers", headers=host)[0] == 200, "the router itself refuses")
    check(get(one.address, "/v1/models", headers=host)[0] == 200, "a client's route is refused")
    return "403 for " + ", ".join(paths)


def overload(one: Balancer, fleet: Fleet) -> str:
    """Demands that a refusal reaches the client unchanged, once: the balancer must not retry it."""
    impossible = {"x-slo-tpot-ms": "0.1"}
    before = sum(metric(router, "cleave_http_requests_total", 'status="429"') for router in fleet.routers)
    answer = ask(one.address, {"max_tokens": 4}, impossible)
    after = sum(metric(router, "cleave_http_requests_total", 'status="429"') for router in fleet.routers)
    check(answer.status == 429 and int(answer.headers["retry-after"]) >= 1, f"{answer}")
    check("retry-after-ms" in answer.headers, f"{answer.headers}")
    code = json.loads(answer.body)["error"]["code"]
    check(answer.headers["x-cleave-refused-reason"] == code == "slo_tpot_unreachable", f"{answer}")
    check(after - before == 1, f"refused {after - before} times")
    return "429, Retry-After, reason; asked once"


def disconnect(one: Balancer, fleet: Fleet) -> str:
    """Demands that a client that leaves frees all its blocks, whether its answer has begun or not."""
    wait_until("an idle fleet", fleet.idle)
    streams = [Request(one.address, {"max_tokens": 3000, "stream": True}) for _ in range(4)]
    wait_until("streams that began", lambda: all(len(stream.answer.events) > 3 for stream in streams))
    pieces = [Request(one.address, {"max_tokens": 3000}) for _ in range(4)]
    running = lambda: sum(metric(router, "cleave_flights") for router in fleet.routers)
    wait_until("eight flights", lambda: running() == 8)
    for request in streams + pieces:
        request.leave()
    seconds = wait_until("nothing left", fleet.idle, 10)
    return f"8 clients, free after {seconds:.2f} s"


def killed(one: Balancer, fleet: Fleet) -> str:
    """Kills a router: the other one must serve requests without an answer, and broken streams must not look whole."""
    # A stream outlives the kill if neither its router nor the picker that the proxy asked was in that process: one in
    # four, each by chance, so that of 48 some do.
    count = 48 if one.name == "picker" else 12
    begun = [Request(one.address, {"max_tokens": 200, "stream": True}, {"x-session-id": f"k{i}"}) for i in range(count)]
    wait_until("streams that began", lambda: all(len(stream.answer.events) > 3 for stream in begun))
    # Answers without streaming send no byte before the last token.
    pieces = [Request(one.address, {"max_tokens": 100}, {"x-session-id": f"p{i}"}) for i in range(12)]
    wait_until("pieces under way", lambda: sum(metric(r, "cleave_flights") for r in fleet.routers) >= count + 8)
    theirs = metric(fleet.routers[0], "cleave_flights")
    check(theirs > 0, "the router that is killed has nothing")
    fleet.processes[0].end(signal.SIGKILL)
    after = [ask(one.address, {"max_tokens": 4}) for _ in range(10)]
    answers = [request.join() for request in begun]
    check(all(answer.honest for answer in answers), f"{[a for a in answers if not a.honest]}")
    cut = sum(not answer.whole for answer in answers)
    check(0 < cut < len(answers), f"{cut} of {len(answers)} streams ended with the router")
    check(all(answer.tokens == 200 for answer in answers if answer.whole), "an answer of another length")
    pieces_answers = [request.join() for request in pieces]
    served = [answer for answer in pieces_answers if answer.status == 200]
    check(all(answer.tokens == 100 for answer in served), "an answer of another length")
    lost = len(pieces_answers) - len(served)
    # Requests for which the proxy asked a picker fail with that picker.
    check(one.name == "picker" or lost == 0, f"{[a for a in pieces_answers if a.status != 200]}")
    late = [answer for answer in after if answer.status != 200]
    check(not late, f"{late}")
    fleet.restart(0)
    wait_until("both routers asked again", lambda: both_asked(one, fleet), 20)
    return f"{cut} begun streams ended in an error, {len(served)} of 12 unbegun answered, 10 of 10 later ones"


def both_asked(one: Balancer, fleet: Fleet) -> bool:
    before = requests_by_router(fleet)
    requests = [Request(one.address, {"max_tokens": 2, "prompt": f"prompt {i} {time.monotonic()}"}) for i in range(8)]
    answers = [request.join() for request in requests]
    moved = [after > earlier for earlier, after in zip(before, requests_by_router(fleet))]
    return all(moved) and all(answer.status == 200 for answer in answers)


def draining(one: Balancer, fleet: Fleet) -> str:
    """Drains a router: it must finish its streams, and get no new request."""
    long = Request(fleet.routers[1], {"max_tokens": 400, "stream": True})
    wait_until("a stream that began", lambda: len(long.answer.events) > 3)
    fleet.processes[1].tell(signal.SIGTERM)
    wait_until("a router not ready", lambda: get(fleet.routers[1], "/ready")[0] != 200)
    check(get(fleet.routers[1], "/health")[0] in (200, 0), "a draining router is healthy")
    answers = [ask(one.address, {"max_tokens": 4}) for _ in range(30)]
    bad = [answer for answer in answers if answer.status != 200]
    check(not bad, f"{len(bad)} of 30 were not answered, such as {bad[:1]}")
    whole(long.join(), 400)
    fleet.processes[1].child.wait(20)
    fleet.start(1)
    fleet.ready()
    wait_until("both routers asked again", lambda: both_asked(one, fleet), 20)
    return f"{30 - len(bad)} of 30 answered, its stream whole"


def stuck(one: Balancer, fleet: Fleet) -> str:
    """Stops a router's process: the balancer must take it out, and back later."""
    if one.name.startswith("nginx"):
        raise Skipped("this nginx asks nobody how they are")
    fleet.processes[0].tell(signal.SIGSTOP)
    try:
        good = 0

        def in_a_row() -> bool:
            nonlocal good
            answer = ask(one.address, {"max_tokens": 2, "prompt": f"prompt {time.monotonic()}"}, timeout=1.5)
            good = good + 1 if answer.status == 200 else 0
            return good >= 12

        seconds = wait_until("twelve answers in a row", in_a_row)
    finally:
        fleet.processes[0].tell(signal.SIGCONT)
    # The stopped router counts the requests that it received meanwhile, so the first round may see only those.
    for _ in range(2):
        wait_until("both routers asked again", lambda: both_asked(one, fleet), 20)
    return f"out, and twelve answers, after {seconds:.1f} s"


def idle(one: Balancer, fleet: Fleet) -> str:
    """Demands that streams outlast a silence of the fleet longer than the balancer allows, before and after their first
    token."""
    begun = Request(one.address, {"max_tokens": 60, "stream": True})
    wait_until("a stream that began", lambda: len(begun.answer.events) > 3)
    for worker in fleet.workers.values():
        worker.tell(signal.SIGSTOP)
    try:
        queued = Request(one.address, {"max_tokens": 20, "stream": True})
        silence = IDLE * 1.5
        stopped = time.monotonic()
        comments = lambda: min(begun.answer.comments, queued.answer.comments) >= silence / KEEP_ALIVE - 2
        wait_until("comments", lambda: begun.answer.ended or queued.answer.ended or
                   (comments() and time.monotonic() - stopped > silence))
    finally:
        for worker in fleet.workers.values():
            worker.tell(signal.SIGCONT)
    whole(begun.join(), 60)
    whole(queued.join(), 20)
    return f"{begun.answer.comments} and {queued.answer.comments} comments in {silence:.0f} s, limit {IDLE} s"


def picking(one: Balancer, fleet: Fleet) -> str:
    """Demands that sessions stay on one router, other requests spread, the subset is kept, and 503 answers an empty
    subset."""
    if one.name != "picker":
        raise Skipped("of the endpoint picker")
    homes = set()
    for session in range(16):
        before = requests_by_router(fleet)
        for turn in range(4):
            ask(one.address, {"max_tokens": 1, "prompt": f"turn {turn}"}, {"x-session-id": f"s{session}"})
        moved = [after - earlier for earlier, after in zip(before, requests_by_router(fleet))]
        check(sorted(moved) == [0, 4], f"session {session} went {moved}")
        homes.add(moved.index(4))
    check(homes == {0, 1}, f"all 16 sessions went to router {homes}")
    before = requests_by_router(fleet)
    for number in range(12):
        answer = ask(one.address, {"max_tokens": 1, "prompt": f"p{number}"}, {"x-test-subset": fleet.routers[1]})
        check(answer.status == 200, f"{answer}")
    moved = [after - earlier for earlier, after in zip(before, requests_by_router(fleet))]
    check(moved == [0, 12], f"the subset was one router, and they went {moved}")
    nobody = ask(one.address, {"max_tokens": 1}, {"x-test-subset": "127.0.0.1:1"})
    check(nobody.status == 503 and b"no_endpoint" in nobody.body, f"{nobody}")
    # A client cannot choose the endpoint itself.
    forged = ask(one.address, {"max_tokens": 1}, {"x-gateway-destination-endpoint": "127.0.0.1:1"})
    check(forged.status == 200, f"{forged}")
    return "sessions together, subset kept, 503 for none"


CHECKS: tuple[Callable[[Balancer, Fleet], str], ...] = (
    streaming, ids, operators, overload, disconnect, idle, picking, draining, stuck, killed,
)


def lateness(address: str, tokens: int) -> list[float]:
    """Returns the time of the first event, and the delay of each later event beyond its tokens' time."""
    answer = ask(address, {"max_tokens": tokens, "stream": True})
    whole(answer, tokens)
    known = list(zip(answer.events, answer.counts))
    later = (then - at - (more - count) * STEP for (at, count), (then, more) in zip(known, known[1:]))
    return [answer.events[0], *later]


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def lags(fleet: Fleet, names: list[str], rounds: int) -> list[dict]:
    """Measures the lag of events directly and through each balancer, in turns."""
    with ExitStack() as stack:
        up = [stack.enter_context(balancer(name, fleet, IDLE)) for name in names]
        ways = [("direct", fleet.routers[0]), *((one.name, one.address) for one in up if isinstance(one, Balancer))]
        first, gaps = ({name: [] for name, _ in ways} for _ in range(2))
        for _ in range(rounds):
            for name, address in ways:
                begin, *rest = lateness(address, 30)
                first[name].append(begin)
                gaps[name].extend(rest)
    rows = []
    for name, _ in ways:
        row = {"name": name, "events": len(gaps[name])}
        for what, values in (("first", first), ("gap", gaps)):
            for part in (0.5, 0.99):
                row[f"{what}_p{part * 100:.0f}"] = quantile(values[name], part)
                row[f"{what}_added_p{part * 100:.0f}"] = row[f"{what}_p{part * 100:.0f}"] - quantile(values["direct"], part)
        rows.append(row)
    return rows


def show_lags(rows: list[dict]) -> None:
    print("\n| way | first event p50, ms | added p50 | added p99 | later events added p50 | added p99 |\n|---|---|---|---|---|---|")
    for row in rows:
        ms = lambda key: f"{row[key] * 1e3:.2f}"
        print(f"| {row['name']} | {ms('first_p50')} | {ms('first_added_p50')} | {ms('first_added_p99')} "
              f"| {ms('gap_added_p50')} | {ms('gap_added_p99')} |")


def run(one: Balancer, fleet: Fleet, wanted: list[str]) -> dict[str, str]:
    said = {}
    for each in (check for check in CHECKS if check.__name__ in wanted):
        begun = time.monotonic()
        try:
            said[each.__name__] = each(one, fleet)
        except Skipped as why:
            said[each.__name__] = f"SKIPPED: {why}"
        except (AssertionError, KeyError, ValueError, OSError) as wrong:
            said[each.__name__] = f"FAILED: {wrong}"
            # The next check must begin with all processes running.
            fleet.restart(0, 1)
        seconds = time.monotonic() - begun
        print(f"| {one.name} | {each.__name__} | {said[each.__name__].replace('|', '/')[:600]} | {seconds:.1f} |", flush=True)
    return said


def run_all(names: list[str], fleet: Fleet, wanted: list[str]) -> dict[str, dict[str, str]]:
    """Runs the checks of these balancers before one fleet, one after the other."""
    # The first hand-off between two workers sets up their link.
    for router in fleet.routers:
        ask(router, {"max_tokens": 4})
    results = {}
    for name in names:
        with balancer(name, fleet, IDLE) as one:
            if isinstance(one, str):
                print(f"| {name} | all | SKIPPED: {one} | |")
                continue
            results[name] = run(one, fleet, wanted)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES)
    names = [each.__name__ for each in CHECKS]
    parser.add_argument("--checks", nargs="+", default=names, choices=names)
    parser.add_argument("--quick", action="store_true", help="fewer rounds of lag, for CI")
    parser.add_argument("--rounds", type=int, default=None, help="streams through each way for its lag")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        lanes = [list(args.only[at::LANES]) for at in range(LANES)]
        fleets = [Fleet(args.cleave, Path(folder) / str(at), KEEP_ALIVE) for at, lane in enumerate(lanes) if lane]
        try:
            print("| balancer | check | seen | seconds |\n|---|---|---|---|")
            with ThreadPoolExecutor(LANES) as pool:
                seen = list(pool.map(lambda lane, fleet: run_all(lane, fleet, args.checks), lanes, fleets))
            results = {name: said for lane in seen for name, said in lane.items()}
            results = {name: results[name] for name in args.only if name in results}
            # The lags are measured alone.
            fleet, *others = fleets
            for one in others:
                one.end()
            failed = any(seen.startswith("FAILED") for said in results.values() for seen in said.values())
            plain = [] if args.quick or "haproxy" not in results else ["haproxy plain"]
            rows = lags(fleet, [*results, *plain], args.rounds or (6 if args.quick else 40))
            show_lags(rows)
            for row in rows:
                held = row["gap_added_p50"] <= ADDED_P50_MAX and row["gap_added_p99"] <= ADDED_P99_MAX
                if not held and "plain" not in row["name"]:
                    failed = True
                    print(f"FAILED: {row['name']} adds more than {ADDED_P50_MAX} s at p50 or {ADDED_P99_MAX} s at p99")
        finally:
            for one in fleets:
                one.end()
    if args.json:
        args.json.write_text(json.dumps({"checks": results, "lags": rows}, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
