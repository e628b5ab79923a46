"""Runs a worker process of a private Ray cluster: first imports the modules that an environment variable names, then
runs Ray's own worker.

Ray runs this file as a script, in place of its `default_worker.py`. If an error ends the worker before it registers
with Ray, this file records the error for `lost_workers`, because Ray does not report it.
"""

import os
import sys


def run_worker() -> None:
    import runpy

    import ray

    # This name equals `early_imports.KIND`, which is imported only if there are modules to import.
    if "ROLLFLOW_IMPORTS" in os.environ:
        from rollflow.tasks.actors.early_imports import import_early

        import_early()
    folder = os.path.join(os.path.dirname(ray.__file__), "_private", "workers")
    sys.path.insert(0, folder)  # Python, too, puts the folder of a script first in `sys.path`
    runpy.run_path(os.path.join(folder, "default_worker.py"), run_name="__main__")


def write_death(error: Exception) -> None:
    """Record the error that ended this Ray worker in a file, like `lost_workers.note_death`. This function does not
    import `lost_workers`, because the error may be that rollflow cannot be imported.
    """
    folder = os.environ.get("ROLLFLOW_LOST_WORKERS")
    if folder:
        os.makedirs(folder, exist_ok=True)
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        with open(os.path.join(folder, str(os.getpid())), "x") as file:
            file.write(f"{os.environ.get('ROLLFLOW_IMPORTS', '')}\n{why}")


if __name__ == "__main__":
    del sys.path[0]  # remove this file's folder, whose modules would shadow other modules
    try:
        run_worker()
    except Exception as failed:
        write_death(failed)
        raise
