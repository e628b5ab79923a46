"""Reports known vulnerabilities of the pinned packages, and writes the pinned packages as an SBOM.

    make audit-pins     asks PyPI for advisories of each pin; exit code 1: there is an advisory; 2: PyPI gave no answer
    make sbom           writes dist/sbom-cpu.json and dist/sbom-gpu.json in CycloneDX 1.6, validated, without a network

Both tools run in `.venv-audit`, from the pins of `infra/constraints-audit.txt`. `make` prints the exit code of this
script ("Error 1"), and ends with 2 after every failure. The names of pinned packages that
PyPI does not know are printed, because nothing is known about them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INFRA = Path(__file__).parent
PINS = tuple(INFRA / f"constraints-{name}.txt" for name in ("cpu", "gpu", "build", "audit"))
SAFE, VULNERABLE, UNKNOWN = 0, 1, 2
TIMEOUT_SECONDS = 30


def audit() -> int:
    """Audit all pinned packages, and print the results."""
    worst = SAFE
    for pins in PINS:
        code, lines = judge(*ask(pins))
        print("\n".join(f"{pins.name}: {line}" for line in lines), flush=True)
        if code == UNKNOWN:
            return code  # the next file would wait for the same service
        worst = max(worst, code)
    return worst


def ask(pins: Path) -> tuple[str, str]:
    """Run pip-audit on a file of pinned packages. Return its JSON and its output on standard error."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(pins), "--no-deps", "--disable-pip"]
    command += ["--format", "json", "--progress-spinner", "off", "--timeout", str(TIMEOUT_SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


def judge(answer: str, errors: str) -> tuple[int, Sequence[str]]:
    """Return the exit code for pip-audit's output about one file, and the lines to print."""
    try:
        packages: list[dict[str, Any]] = json.loads(answer)["dependencies"]
    except (ValueError, KeyError, TypeError):
        why = errors.strip().splitlines()[-1] if errors.strip() else "pip-audit said nothing"
        return UNKNOWN, [f"no advisories could be read ({why}); run `make audit-pins` where PyPI answers"]
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    if len(unknown) == len(packages):
        return UNKNOWN, [
            f"PyPI answered for none of {len(packages)} pins, as a mirror does that has no advisories; "
            "run `make audit-pins` where PyPI itself answers"
        ]
    found = [describe(package, advisory) for package in packages for advisory in package.get("vulns", ())]
    lines = [*found, f"{len(packages) - len(unknown)} pins audited, {len(found)} advisories"]
    if unknown:
        lines.append(f"not known to PyPI, so not audited: {', '.join(unknown)}")
    return (VULNERABLE if found else SAFE), lines


def describe(package: dict[str, Any], advisory: dict[str, Any]) -> str:
    """Return one line about an advisory."""
    fixed = ", ".join(advisory["fix_versions"]) or "no release"
    return f"{package['name']} {package['version']}: {advisory['id']}; fixed in {fixed}"


def write_sboms(folder: Path) -> int:
    """Write an SBOM of the packages for a CPU machine, and an SBOM of those for a GPU machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("cpu", "gpu"):
        to = folder / f"sbom-{name}.json"
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "cyclonedx_py",
            "requirements",
            str(INFRA / f"constraints-{name}.txt"),
        ]
        command += ["--pyproject", str(INFRA.parent / "pyproject.toml"), "--sv", "1.6", "--output-reproducible"]
        subprocess.run([*command, "--validate", "--output-file", str(to)], check=True)
        print(to)
    return SAFE


if __name__ == "__main__":
    sys.exit(write_sboms(Path(sys.argv[2])) if sys.argv[1:2] == ["sbom"] else audit())
