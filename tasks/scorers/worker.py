"""A reward worker process: JSON lines in, JSON lines out.

The worker first writes a line that says that it is ready, or why it cannot be. Then the worker writes one line per
request, in order.

The worker is started as `python -m rollflow.tasks.scorers.worker REWARD TOKENIZER_FOLDER EAR`, with the `[reward]`
section as JSON. The worker's warnings are sent to the open socket with file descriptor `EAR`. The worker ends when its
input ends, so it cannot outlive the process that started it. An error in a verifier becomes a score of 0 and does not
end the worker.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from pydantic import TypeAdapter

from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.runtime.actor_warnings import send_to
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.base import score_response
from rollflow.tasks.scorers.config import RewardConfig

REWARD: TypeAdapter[RewardConfig] = TypeAdapter(RewardConfig)


def main() -> None:
    """Answer requests until the input ends."""
    config, folder = REWARD.validate_json(sys.argv[1]), Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # texts that a verifier prints must not be read as scores
    try:
        verify, tokenizer = build_verifier(config), PolicyTokenizer(folder)
    except Exception as error:  # the process that started this one reports it to the user
        answers.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        raise
    send_to(socket.socket(fileno=int(sys.argv[3])), "a reward worker")
    answers.write("ready\n")
    for line in sys.stdin:
        request = json.loads(line)
        response = tokenizer.decode_response(list(Int32s(bytes.fromhex(request["tokens"]))), config.special_tokens)
        score = score_response(verify, config.answer, response, request["reference"], config.format)
        answers.write(json.dumps([score.reward, score.reason, score.seconds]) + "\n")


if __name__ == "__main__":
    main()
