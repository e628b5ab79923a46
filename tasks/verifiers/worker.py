"""A reward worker process: JSON lines in, JSON lines out: one when it is ready, then one per request and in order.

It is run as `python -m rollflow.tasks.verifiers.worker KIND WHERE TOKENIZER_FOLDER`. It ends when its input
does, so it cannot outlive the process that owns it. A verifier's failure is an answer, not the worker's end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

from rollflow.tasks.verifiers.verifier import Score, Verifier, answer_of, verifier


def judge(verify: Verifier, where: str, response: str, reference: dict[str, object]) -> Score:
    """Run a verifier; what it raises becomes a score of 0 with the reason."""
    started = time.perf_counter()
    try:
        score = verify(answer_of(response, where), reference)
    except Exception as error:  # noqa: BLE001 - a verifier is foreign code; its failure is this response's reason
        score = Score(0.0, f"verifier failed: {type(error).__name__}: {error}"[:200])
    return Score(score.reward, score.reason, time.perf_counter() - started)


def main() -> None:
    """Answer requests until the input ends."""
    kind, where, folder = sys.argv[1:]
    verify, tokenizer = verifier(kind), Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a verifier prints must not be taken for an answer
    answers.write("ready\n")
    for line in sys.stdin:
        request = json.loads(line)
        score = judge(verify, where, tokenizer.decode(request["tokens"]), request["reference"])
        answers.write(json.dumps([score.reward, score.reason, score.seconds]) + "\n")


if __name__ == "__main__":
    main()
