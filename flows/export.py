"""Exports one policy version of a run as an ordinary Hugging Face model folder. The weights are checked against the
hashes in the run's log, and Hugging Face's `AutoTokenizer` gives the same tokens as in the run. The folder appears
under its final name only when it is complete.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rollflow.flows.locations import check_kept, read_policy_folder
from rollflow.storage.errors import ConfigError, Corrupt, StoreFailed
from rollflow.storage.policies import PolicyVersion
from rollflow.tasks.policies.tokenizer import find_other_reading
from rollflow.tasks.run.context import RunContext

TEXTS = 64  # Number of prompts for which the exported tokenizer and the run's tokenizer are compared.


def export(context: RunContext, version: PolicyVersion, folder: Path) -> None:
    """Write a policy version to `folder`, which must be new or empty.

    Raises:
        ConfigError: the weights of the policy version were deleted, or the folder cannot be written.
        Corrupt: the stored weights differ from the published weights.
    """
    with _create_folder(folder.expanduser().absolute()) as temporary:
        check_kept(context, version)
        for name, data in read_policy_folder(context).items():
            (temporary / name).write_bytes(data)
        context.policies.copy_weights(version, temporary)
        _check_tokenizer_agrees(context, temporary)


@contextlib.contextmanager
def _create_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `folder`, and rename it to `folder` if the `with` block succeeds."""
    temporary = None
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"FOLDER = {str(folder)!r} exists and is not empty; name a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        temporary.chmod(0o755)
        yield temporary
        temporary.rename(folder)
    except (OSError, StoreFailed) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        raise ConfigError(
            f"FOLDER = {str(folder)!r} cannot be written ({getattr(cause, 'strerror', cause)}); name a new folder that "
            "this user may write to, on a disk with space left"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _read_prompts(context: RunContext) -> list[str]:
    """Return the first `TEXTS` prompts of the run. If the prompts cannot be read, return an empty list, because an
    export does not need prompts.
    """
    try:
        prompts = context.prompts()
        return [prompts.prompt(index).text for index in range(TEXTS)]
    except (ConfigError, Corrupt):
        return []


def _check_tokenizer_agrees(context: RunContext, folder: Path) -> None:
    if (what := find_other_reading(folder, _read_prompts(context))) is not None:
        raise ConfigError(
            f"run {context.run_id!r} cannot be exported for other tools: {what}. Install the library versions "
            "that prepared the run, or use its weights with tokenizer.json only"
        )
