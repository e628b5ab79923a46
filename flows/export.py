"""A version as an ordinary Hugging Face folder, from the run's storage alone.

The folder holds what was trained: the weights are checked against the entry that published them, `config.json` names
the type they were trained in, and `AutoTokenizer` reads the folder to the tokens that the run used. The folder gets its
name only when it is whole.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Set
from pathlib import Path

from rollflow.storage.errors import ConfigError, Corrupt, StoreFailed
from rollflow.storage.policies import PolicyVersion
from rollflow.tasks.policies.folder import COPIED
from rollflow.tasks.policies.tokenizer import other_reading
from rollflow.tasks.run.context import RunContext

TEXTS = 64  # of the run's prompts, where they can be had, that others must read as the run did


def export(context: RunContext, version: PolicyVersion, folder: Path) -> None:
    """Write `version` to `folder`, which must be new or empty.

    Raises:
        ConfigError: its weights are no longer kept, or the folder cannot be written.
        Corrupt: the weights are not what was published.
    """
    with _new_folder(folder.expanduser().absolute()) as temporary:
        _check_kept(context, version)
        for name, data in _described(context).items():
            (temporary / name).write_bytes(data)
        context.policies.copy_weights(version, temporary)
        _check_reading(context, temporary)


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, which is renamed to it when the block has ended well."""
    temporary = None
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"FOLDER = {str(folder)!r} exists and is not empty; name a new one")
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


def _check_kept(context: RunContext, version: PolicyVersion) -> None:
    """If the weights of this version were not kept, say which versions can be exported."""
    stored = set(context.store.list("policies"))
    if _are_in(stored, version):
        return
    numbers = sorted({int(path.split("/")[1]) for path in stored if "/weights/" in path})
    newest = context.policies.newest()
    whole = [v for v in numbers if v <= newest and _are_in(stored, context.policies.find(v))]
    raise ConfigError(
        f"version {version.number}: its weights are no longer kept; of run {context.run_id!r} those of versions "
        f"{', '.join(map(str, whole)) or 'none'} are (store.keep_every and store.keep_last say which stay)"
    )


def _are_in(stored: Set[str], version: PolicyVersion) -> bool:
    """Whether all its weights are among these objects."""
    return all(one.path in stored for one in version.weights)


def _described(context: RunContext) -> dict[str, bytes]:
    """All files but the weights."""
    names = [path for path in context.store.list("policy") if Path(path).name in COPIED]
    return {Path(path).name: context.store.get(path) for path in names}


def _texts(context: RunContext) -> list[str]:
    """Some of the run's prompts; none if they cannot be opened any more, which does not change the weights."""
    try:
        prompts = context.prompts()
        return [prompts.prompt(index).text for index in range(TEXTS)]
    except (ConfigError, Corrupt):
        return []


def _check_reading(context: RunContext, folder: Path) -> None:
    if (what := other_reading(folder, _texts(context))) is not None:
        raise ConfigError(
            f"run {context.run_id!r} cannot be exported for other tools: {what}; with the libraries that the run was "
            "prepared with they were alike: install those, or read its weights with that tokenizer.json only"
        )
