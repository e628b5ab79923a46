"""A worker of a private Ray cluster: Ray's own worker, after the imports that its environment asks for.

Ray runs this file as a script, in place of its `default_worker.py`. If an error ends the worker before it registers
with Ray, this file writes it down for `lost_workers`, because Ray itself does not report it.
"""

import os
import sys


def run_worker() -> None:
    import runpy

    import ray

    # `early_imports.KIND`; that module is not imported if there are no imports to make
    if "ROLLFLOW_IMPORTS" in os.environ:
        from rollflow.tasks.actors.early_imports import import_early

        import_early()
    folder = os.path.join(os.path.dirname(ray.__file__), "_private", "workers")
    sys.path.insert(0, folder)  # as Python does for a script
    runpy.run_path(os.path.join(folder, "default_worker.py"), run_name="__main__")


def write_death(error: Exception) -> None:
    """Write the error as `lost_workers.note_death` does; a copy, because the import of rollflow may be what fails."""
    folder = os.environ.get("ROLLFLOW_LOST_WORKERS")
    if folder:
        os.makedirs(folder, exist_ok=True)
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        with open(os.path.join(folder, str(os.getpid())), "x") as file:
            file.write(f"{os.environ.get('ROLLFLOW_IMPORTS', '')}\n{why}")


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules would shadow others
    try:
        run_worker()
    except Exception as failed:
        write_death(failed)
        raise
