"""Runs lm-eval by completions and by chat: `lm_eval_client.py BASE_URL MODEL TOKENIZER`.

The tasks are made here, so that nothing is downloaded: a choice among continuations by their log-probabilities, with
one request and with four at once, and texts up to a stop string. A continuation's log-probability is compared with the
sum of those of a request of our own. Exits with 0 when every check held.
"""

import json
import sys
import tempfile
import urllib.request
from pathlib import Path

import lm_eval

CONTINUATIONS = [" the request of a client", " zebra umbrella zebra"]
ROWS = [{"question": f"The router sends number {number} of", "choices": CONTINUATIONS, "gold": 0} for number in range(6)]


def tasks(folder: Path) -> tuple[dict, dict]:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}, "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    accuracy = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    matches = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    choice = data | {
        "task": "choice", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "gold",
        "target_delimiter": "", "metric_list": accuracy,
    }
    text = data | {
        "task": "text", "output_type": "generate_until", "doc_to_target": "none", "metric_list": matches,
        "generation_kwargs": {"until": ["."], "max_gen_toks": 12, "temperature": 0},
    }
    return choice, text


def own_logprob(url: str, model: str, question: str, continuation: str) -> float:
    """Asks for the scores of an echoed prompt, and adds up those of the continuation's characters."""
    body = {"model": model, "prompt": question + continuation, "max_tokens": 0, "echo": True, "logprobs": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        scores = json.load(answer)["choices"][0]["logprobs"]
    pairs = zip(scores["text_offset"], scores["token_logprobs"])
    return sum(logprob for offset, logprob in pairs if offset >= len(question))


def main() -> None:
    url, model, tokenizer = sys.argv[1:]
    common = {"model": model, "tokenizer": tokenizer, "max_retries": 1}
    completions = {**common, "base_url": f"{url}/v1/completions"}
    with tempfile.TemporaryDirectory() as folder:
        choice, text = tasks(Path(folder))
        for at_once in (1, 4):
            arguments = {**completions, "num_concurrent": at_once}
            run = lm_eval.simple_evaluate("local-completions", arguments, tasks=[choice, text], log_samples=True, bootstrap_iters=0)
            samples = run["samples"]
            assert len(samples["choice"]) == len(samples["text"]) == len(ROWS)
            for sample in samples["choice"]:
                for continuation, (logprob, _) in zip(CONTINUATIONS, sample["filtered_resps"], strict=True):
                    own = own_logprob(url, model, sample["doc"]["question"], continuation)
                    assert abs(own - logprob) < 1e-3, (own, logprob)
            assert all("." not in sample["resps"][0][0] for sample in samples["text"])
        chat = {**common, "base_url": f"{url}/v1/chat/completions", "num_concurrent": 4}
        run = lm_eval.simple_evaluate(
            "local-chat-completions", chat, tasks=[text], apply_chat_template=True, log_samples=True, bootstrap_iters=0,
        )
        assert all(sample["resps"][0][0] for sample in run["samples"]["text"])


if __name__ == "__main__":
    main()
